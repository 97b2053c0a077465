"""`doctor` names the constants in a script that our own `TrainingArguments` refuses, with file and line."""

from __future__ import annotations

import os

import pytest

from hf_compat import TrainingArguments
from hf_compat.errors import HfCompatError
from hf_compat.tools.commands import doctor
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Effect, Target

START = "from transformers import TrainingArguments\n"


def failures(text, target=Target.HF_COMPAT):
    found = rewrite_python(START + text, target).findings
    return [(one.line, one.what) for one in found if one.effect is Effect.FAILS]


# What follows `TrainingArguments("out", ` in a call that our constructor refuses
REFUSED = (
    'learning_rate="high")',
    'eval_strategy="step")',
    "gradient_accumulation_steps=0)",
    "per_device_train_batch_size=2.5)",
    "learning_rte=1e-3)",
    "load_best_model_at_end=True)",
    "fp16=True, bf16=True)",
    'logging_strategy="steps", logging_steps=0)',
    'lr_scheduler_type="reduce_lr_on_plateau")',
    "dataloader_prefetch_factor=2)",
    'eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=4, load_best_model_at_end=True)',
    'evaluation_strategy="epoch", eval_strategy="steps")',
    'push_to_hub=True, hub_model_id="a/b/c")',
    'accelerator_config={"even_batch": True})',
)


@pytest.mark.parametrize("rest", REFUSED)
def test_what_the_constructor_refuses_is_found_in_the_source(rest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = f'TrainingArguments("out", {rest}'
    with pytest.raises(HfCompatError):
        eval(call, {"TrainingArguments": TrainingArguments})
    assert failures(f"args = {call}\n"), call
    assert os.listdir(tmp_path) == [], "nothing is made"


def test_constants_are_followed_to_where_they_stand():
    text = """
RATE = "high"
OPTIONS = {"max_steps": -3}
args = TrainingArguments("out", learning_rate=RATE, **OPTIONS)
other = TrainingArguments(
    "out",
    seed="one",
    warmup_steps=-1,
)
"""
    assert failures(text) == [(4, "max_steps"), (5, "learning_rate"), (8, "seed"), (9, "warmup_steps")]


def test_the_defaults_of_a_class_count_with_the_constants_of_its_call():
    text = """
class Own(TrainingArguments):
    load_best_model_at_end: bool = True
    mine: int = 3

Own("out", mine="any", eval_strategy="epoch", save_strategy="epoch")
Own("out", mine="any", eval_strategy="epoch", save_strategy="steps")
"""
    assert failures(text) == [(8, "Own")]


# What is not known for certain, and what only the machine or the folder of the run can say
ACCEPTED = (
    "args = TrainingArguments('out', load_best_model_at_end=True, eval_strategy=CHOSEN, save_strategy='epoch')",
    "args = TrainingArguments('out', load_best_model_at_end=True, save_strategy='epoch', **chosen())",
    "args = TrainingArguments('out', bf16=True, tf32=True, deepspeed='ds.json', fsdp_config='fsdp.json')",
    "args = TrainingArguments('out', eval_strategy='steps', logging_steps=CHOSEN, save_steps=7, save_strategy='steps', "
    "load_best_model_at_end=True)",
    "args = TrainingArguments('out', optim='adamw_bnb_8bit', report_to='wandb', use_liger_kernel=True)",
    "args = TrainingArguments('out', evaluation_strategy='epoch', per_gpu_train_batch_size=4)",
    "N = 3\nN += 1\nargs = TrainingArguments('out', seed=N)",
    "class Own(TrainingArguments):\n    learning_rate: str = 'high'\n    mine: int = 0\n"
    "Own('out', learning_rate='low', mine=2)",
    "class Own(TrainingArguments):\n    def __init__(self, seed, **rest):\n        super().__init__('out', **rest)\n"
    "Own(seed='one', learning_rate=0.1)",
    "class Own(Mixin, TrainingArguments): ...\nOwn('out', of_mixin=3)",
    "def make(seed, **rest):\n    return TrainingArguments('out', **rest)\nmake(seed='one', eval_strategy='epoch')",
    "import dataclasses\nargs = TrainingArguments('out')\n"
    "more = dataclasses.replace(args, load_best_model_at_end=True, save_strategy='epoch')",
)


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_may_be_accepted_is_not_named(text):
    assert failures(text) == []


def test_transformers_5_checks_by_itself():
    assert failures('args = TrainingArguments("out", learning_rate="high")', Target.TRANSFORMERS_5) == []


def test_the_command_tells_file_line_and_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(f'{START}\nargs = TrainingArguments("out",\n    eval_strategy="step")\n')
    assert doctor.main(["train.py"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "train.py: fails",
        "  fails, line 4: eval_strategy: `eval_strategy='step'` is not known. Hint: choose one of 'no', 'steps', "
        "'epoch'; did you mean 'steps'?",
    ]
