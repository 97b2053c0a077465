"""Old arguments in calls, dicts, fields and attributes."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from helpers.migrated import left, today
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.legacy import OLD_NAMES, is_harmless
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Target

HEAD = "from transformers import TrainingArguments\n"
WIDE = f"# {'lines may be as long as this one ' * 4}"[:120] + "\n"
FIVE = Target.TRANSFORMERS_5


def keywords(given, target=FIVE, head=""):
    """Return what the keywords of a call become."""
    result = today(f'{WIDE}{HEAD}{head}args = TrainingArguments("out", {given})\n', target)
    return result.splitlines()[-1].removeprefix('args = TrainingArguments("out"').removesuffix(")").removeprefix(", ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('evaluation_strategy="epoch"', 'eval_strategy="epoch"'),
        ("evaluation_strategy=chosen()", "eval_strategy=chosen()"),
        ("no_cuda=True", "use_cpu=True"),
        ("no_cuda=not torch.cuda.is_available()", "use_cpu=not torch.cuda.is_available()"),
        ("no_cuda=False, use_cpu=True", "use_cpu=True"),
        ("per_gpu_train_batch_size=4", "per_device_train_batch_size=4"),
        ("per_gpu_eval_batch_size=None, seed=1", "seed=1"),
        ("evaluate_during_training=True", 'eval_strategy="steps"'),
        ("evaluate_during_training=x or y", 'eval_strategy="steps" if x or y else "no"'),
        ("evaluate_during_training=(x if y else z)", 'eval_strategy="steps" if (x if y else z) else "no"'),
        ("group_by_length=True", 'train_sampling_strategy="group_by_length"'),
        ("group_by_length=False", ""),
        ("group_by_length=flag", 'train_sampling_strategy="group_by_length" if flag else "random"'),
        ("adafactor=True", 'optim="adafactor"'),
        ("adafactor=False, seed=1", "seed=1"),
        ("include_inputs_for_metrics=True", 'include_for_metrics=["inputs"]'),
        ("include_tokens_per_second=True", 'include_num_input_tokens_seen="all"'),
        ("warmup_ratio=0.06", "warmup_steps=0.06"),
        ("warmup_ratio=0.0", ""),
        ("warmup_ratio=1.0", "warmup_steps=0.9999999999999999"),
        ("warmup_ratio=ratio", "warmup_steps=min(ratio, 0.9999999999999999)"),
        ("warmup_ratio=0.1, warmup_steps=5", "warmup_steps=5"),
        ("torchdynamo='inductor'", "torch_compile_backend='inductor'"),
        ("xpu_backend='ccl'", "ddp_backend='ccl'"),
        (
            "dispatch_batches=False, split_batches=s",
            'accelerator_config={"dispatch_batches": False, "split_batches": s}',
        ),
        ("dispatch_batches=None", ""),
        ("fsdp_min_num_params=100", 'fsdp_config={"min_num_params": 100}'),
        ("fsdp_transformer_layer_cls_to_wrap='B'", "fsdp_config={\"transformer_layer_cls_to_wrap\": 'B'}"),
        ("push_to_hub_organization='o', push_to_hub_model_id='m'", 'hub_model_id="o/m"'),
        ("push_to_hub_token=None", ""),
        ("tpu_metrics_debug=True", 'debug="tpu_metrics_debug"'),
        ("debug=False, seed=1", "seed=1"),
        ("save_safetensors=True", ""),
        ("fp16_backend='auto', seed=1", "seed=1"),
        ("optim='adamw_hf'", 'optim="adamw_torch"'),
        ("overwrite_output_dir=True", ""),
        ("evaluation_strategy='no', eval_strategy='no'", "eval_strategy='no'"),
    ],
)
def test_what_keywords_become(old, new):
    assert keywords(old) == new


@pytest.mark.parametrize(
    "given",
    [
        "evaluation_strategy='epoch', eval_strategy='steps'",
        "per_gpu_train_batch_size=4, per_device_train_batch_size=8",
        "adafactor=True, optim='adamw_torch'",
        "adafactor=flag",
        "warmup_ratio=0.1, warmup_steps=count",
        "dispatch_batches=True, accelerator_config=config",
        "fp16_backend=chosen",
        "logging_dir=folder",
    ],
)
def test_what_is_no_matter_of_names_stays_and_is_listed(given):
    assert keywords(given) == given
    assert [line for line, _ in left(f"{HEAD}args = TrainingArguments('out', {given})\n", FIVE)] == [2]


@pytest.mark.parametrize("name", OLD_NAMES)
def test_every_old_name_is_dealt_with(name):
    row = OLD_NAMES[name]
    value = {"optim": "x", "warmup_ratio": 0.5}.get(name, True if row.kind is None or "true" in str(row.kind) else 1)
    source = f"{HEAD}args = TrainingArguments('out', {name}={value!r})\n"
    result = today(source, FIVE)
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    inside = result.splitlines()[1].partition("'out'")[2]
    given = {word.partition("=")[0] for word in inside.strip(", )").split(", ") if "=" in word}
    assert given <= known and name not in given
    assert given or left(source, FIVE) or is_harmless(name, value)


def test_what_is_taken_out_is_said_where_it_asked_for_something():
    found = left(f"{HEAD}a = TrainingArguments('o', fp16_opt_level='O2')\nb = TrainingArguments('o', tp_size=4)\n")
    assert found == [(2, "fp16_opt_level='O2'"), (3, "tp_size=4")]
    assert left(f"{HEAD}a = TrainingArguments('o', fp16_opt_level='O1', save_safetensors=True)\n") == []


def test_this_package_keeps_what_it_knows_as_attributes():
    given = "overwrite_output_dir=True, logging_dir='logs'"
    assert keywords(given, Target.HF_COMPAT) == given
    assert left(f"{HEAD}a = TrainingArguments('o', {given})\n") == []


def test_layout_and_comments_stay():
    source = """\
    from transformers import TrainingArguments

    args = TrainingArguments(
        "out",  # where
        # how often
        evaluation_strategy = "epoch",  # every epoch
        fp16_opt_level="O1",  # of Apex
        # the rate
        learning_rate=1e-4,
        save_safetensors=True  # last
    )
    """
    assert today(source, FIVE) == inspect.cleandoc("""\
    from transformers import TrainingArguments

    args = TrainingArguments(
        "out",  # where
        # how often
        eval_strategy = "epoch",  # every epoch
        # the rate
        learning_rate=1e-4,
    )
    """) + "\n"  # fmt: skip


def test_dicts_that_calls_take():
    source = f"""{HEAD}
common = {{
    "evaluation_strategy": "epoch",  # when
    'no_cuda': True,
    "save_safetensors": True,
}}
common["seed"] = 3
a = TrainingArguments("a", **common)
b = TrainingArguments("b", **{{"per_gpu_train_batch_size": 2}}, **common)
"""
    result = today(source)
    assert '    "eval_strategy": "epoch",  # when\n    \'use_cpu\': True,\n}' in result
    assert '**{"per_device_train_batch_size": 2}, **common' in result and left(source) == []


def test_calls_of_dict_that_calls_take():
    source = f"""{HEAD}
common = dict(evaluation_strategy="epoch", save_safetensors=True)
a = TrainingArguments("a", **common, **dict({{"seed": 1}}, no_cuda=True))
b = TrainingArguments("b", **{{**more, "evaluation_strategy": "no"}})
"""
    result = today(source)
    assert 'common = dict(eval_strategy="epoch")' in result and left(source) == []
    assert '**dict({"seed": 1}, use_cpu=True)' in result and '{**more, "eval_strategy": "no"}' in result
    assert left(f"{HEAD}def dict(**k): return k\na = TrainingArguments('a', **dict(no_cuda=True))\n")


def test_a_dict_that_others_read_is_listed():
    source = f"{HEAD}common = {{'no_cuda': True}}\nprint(common)\na = TrainingArguments('a', **common)\n"
    assert "'no_cuda'" in today(source) and (2, "common") in left(source)


def test_functions_that_hand_keywords_on():
    source = f"""{HEAD}
def make(folder, no_cuda=None, **more):
    return TrainingArguments(folder, seed=1, **more)

print(make("out", evaluation_strategy="epoch", no_cuda=3).evaluation_strategy)
"""
    assert 'make("out", eval_strategy="epoch", no_cuda=3).eval_strategy' in today(source)


def test_fields_of_subclasses():
    source = """\
    from dataclasses import dataclass, field
    import transformers

    @dataclass
    class Arguments(transformers.TrainingArguments):
        evaluation_strategy: str = field(default="epoch")
        warmup_ratio: float = 0.5

        def ratio(self):
            return self.warmup_ratio if self.evaluation_strategy != "no" else 0

    args: Arguments = Arguments("out", warmup_ratio=0.1, evaluation_strategy="steps")
    print(args.evaluation_strategy, args.warmup_ratio)
    """
    result = today(source)
    assert 'eval_strategy: str = field(default="epoch")' in result and "warmup_ratio: float = 0.5" in result
    assert 'Arguments("out", warmup_ratio=0.1, eval_strategy="steps")' in result
    assert "print(args.eval_strategy, args.warmup_ratio)" in result and "hf_compat.TrainingArguments" in result
    assert left(source) == [(7, "Arguments.warmup_ratio")]


@pytest.mark.parametrize(
    ("known", "name"),
    [
        ("args = TrainingArguments('o')", "args"),
        ("args = copy = TrainingArguments('o')", "copy"),
        ("import dataclasses\nargs = dataclasses.replace(TrainingArguments('o'), seed=1)", "args"),
        ("args = TrainingArguments('o')\nargs = args", "args"),
        ("first, args = 1, TrainingArguments('o')", "args"),
        ("parser = HfArgumentParser(TrainingArguments)\nargs = parser.parse_args_into_dataclasses()[0]", "args"),
        ("parser = HfArgumentParser(TrainingArguments)\n(args,) = parser.parse_args_into_dataclasses()", "args"),
        ("other, args = HfArgumentParser((int, TrainingArguments)).parse_dict({})", "args"),
        ("def f(args: TrainingArguments): pass", None),
        ("trainer = Trainer(args=TrainingArguments('o'))", "trainer.args"),
    ],
)
def test_what_is_known_to_be_training_arguments(known, name):
    head = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
    body = f"{known}\nprint({name}.no_cuda)\n" if name else known.replace("pass", "return args.no_cuda") + "\n"
    result = today(head + body)
    assert ".use_cpu" in result and ".no_cuda" not in result


@pytest.mark.parametrize(
    "annotation", ["'TrainingArguments'", "TrainingArguments | None", "Optional[TrainingArguments]"]
)
def test_annotations(annotation):
    source = f"from typing import Optional\n{HEAD}async def f(*, args: {annotation} = None):\n    return args.no_cuda\n"
    assert "return args.use_cpu" in today(source)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if args.evaluate_during_training: pass", 'if args.eval_strategy == "steps": pass'),
        ("x = not args.group_by_length", 'x = not (args.train_sampling_strategy == "group_by_length")'),
        ("print(f'{args.evaluation_strategy!r:>9}')", "print(f'{args.eval_strategy!r:>9}')"),
        ("args.no_cuda = True", "args.use_cpu = True"),
        ("args.group_by_length = True", 'args.train_sampling_strategy = "group_by_length"'),
        ("args.evaluate_during_training = False", 'args.eval_strategy = "no"'),
        ("x = args.overwrite_output_dir", 'x = getattr(args, "overwrite_output_dir", False)'),
    ],
)
def test_attributes(old, new):
    assert today(f"{HEAD}args = TrainingArguments('o')\n{old}\n", FIVE).splitlines()[-1] == new


@pytest.mark.parametrize(
    "line",
    [
        "print(args.per_gpu_train_batch_size)",
        "args.warmup_ratio = 0.1",
        "print(args.past_index)",
        "args.adafactor |= x",
    ],
)
def test_attributes_that_a_person_decides_about(line):
    source = f"{HEAD}args = TrainingArguments('o')\n{line}\n"
    assert today(source, FIVE).splitlines()[-1] == line and [one for one, _ in left(source, FIVE)] == [3]


def test_unknown_objects_are_listed_and_others_left_alone():
    source = """\
    import argparse
    from transformers import Trainer
    from library import Other, SFTConfig

    options = argparse.ArgumentParser().parse_args()
    print(options.no_cuda, Other().no_cuda)

    def work(training_args, args):
        return training_args.no_cuda

    SFTConfig(evaluation_strategy="no")
    """
    assert left(source) == [(9, "training_args.no_cuda"), (11, "SFTConfig(evaluation_strategy=…)")]
    assert today(source) == inspect.cleandoc(source).replace(
        "from transformers import Trainer", "from hf_compat import Trainer"
    ) + "\n"  # fmt: skip


def test_a_reason_says_that_transformers_5_lacks_the_argument():
    source = """\
    from transformers import TrainerCallback

    class Board(TrainerCallback):
        def _open(self, args):
            return args.logging_dir
    """
    assert left(source) == []
    (found,) = rewrite_python(inspect.cleandoc(source), FIVE).findings
    assert found.what == "args.logging_dir" and "5.15 has no such argument" in found.reason


def test_classes_of_the_same_name_are_left_alone():
    source = """\
    from mine import Trainer

    class TrainingArguments:
        pass

    def train():
        import transformers
        args = TrainingArguments(evaluation_strategy="no", no_cuda=True)
        return Trainer(tokenizer=None), args.no_cuda, transformers.AutoModel
    """
    assert today(source) == inspect.cleandoc(source) + "\n"
    assert [what for _, what in left(source)] == ["Trainer(tokenizer=…)"]


def test_partials():
    source = f"import functools\n{HEAD}make = functools.partial(TrainingArguments, evaluation_strategy='no', seed=1)\n"
    source += "print(make('o', no_cuda=True).no_cuda)\n"
    assert "functools.partial(TrainingArguments, eval_strategy='no', seed=1)" in today(source) and left(source) == []
    assert "print(make('o', use_cpu=True).use_cpu)" in today(source)


def test_keys_that_no_rule_deals_with_are_listed():
    source = f"""{HEAD}
options = dict(no_cuda=True)
options["evaluation_strategy"] = "no"
other = {{"warmup_ratio": 0.1, "seed": 2}}
setattr(options, "group_by_length", True)
args = TrainingArguments("o", **{{"no_cuda": True}})
"""
    whats = [what for _, what in left(source)]
    assert whats == ["dict(no_cuda=…)", '"evaluation_strategy"', '"warmup_ratio"', '"group_by_length"']


@pytest.mark.parametrize(
    ("value", "after"),
    [
        ('"wandb" if w else None', '"wandb" if w else "all"'),
        ("None if w else (x if y else None)", '"all" if w else (x if y else "all")'),
        ("w", "w"),
    ],
)
def test_report_to_that_is_none_in_one_case_reports_to_all_there(value, after):
    text = f"{HEAD}args = TrainingArguments('out', report_to={value})\n"
    assert f"report_to={after})" in rewrite_python(text, Target.TRANSFORMERS_5).text
    assert f"report_to={value})" in rewrite_python(text, Target.HF_COMPAT).text


@pytest.mark.parametrize("default", ["None", "field(default=None)"])
def test_a_field_report_to_that_is_none_reports_to_all_as_before(default):
    start = f"from dataclasses import field\n{HEAD}class Own(TrainingArguments):\n    report_to: str | None = "
    assert today(f"{start}{default}\n", FIVE) == f"{start}{default.replace('None', chr(34) + 'all' + chr(34))}\n"
    assert today(f'{start}"none"\n', FIVE) == f'{start}"none"\n'
    assert today(f"{start}{default}\n").endswith(f"{default}\n")  # which hf_compat reads as before
