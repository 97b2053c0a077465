"""`doctor` names code that gives other numbers than under 4.x, and the numbers are those that it names."""

from __future__ import annotations

import pytest
import torch
import transformers

from hf_compat.tools.migration.migrate import migrate
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Effect, Target

SCRIPT = """
from transformers import {model}, Trainer, TrainingArguments
model = {model}{made}
args = TrainingArguments("out", gradient_accumulation_steps={count})
Trainer(model, args, train_dataset=data).train()
"""


def effects(text, target=Target.HF_COMPAT):
    return [(one.effect, one.line, one.what) for one in rewrite_python(text, target).findings]


def of_model(model, made="(config)", count="4"):
    return [one for one in effects(SCRIPT.format(model=model, made=made, count=count)) if "accumulation" in one[2]]


@pytest.mark.parametrize("target", Target)
def test_a_masked_language_model_with_accumulation_differs(target):
    found = effects(SCRIPT.format(model="BertForMaskedLM", made="(config)", count="4"), target)
    assert (Effect.DIFFERS, 4, "gradient_accumulation_steps=4") in found
    assert of_model("BertForSequenceClassification", '.from_pretrained("x")') == of_model("RobertaForMaskedLM")
    look = [(Effect.LOOK, 4, "gradient_accumulation_steps=4")]
    assert of_model("AutoModelForMaskedLM", '.from_pretrained("x")') == look
    assert of_model("AutoModelForTokenClassification", ".from_config(config)") == look


def test_a_loss_that_is_divided_is_not_named():
    for model in ("LlamaForCausalLM", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "NoSuchForMaskedLM"):
        assert of_model(model) == [], model
    assert of_model("BertForMaskedLM", count="1") == of_model("BertForMaskedLM", count="chosen") == []
    text = SCRIPT.format(model="BertForMaskedLM", made="(config)", count="4")
    for further in (
        "model.accepts_loss_kwargs = False\n",
        "class Own(Trainer):\n    def compute_loss(self, model, inputs, return_outputs=False, **rest): ...\n",
        "Trainer(model, args, compute_loss_func=own)\n",
    ):
        assert not [one for one in effects(text + further) if "accumulation" in one[2]], further
    alone = text.replace("Trainer(model, args, train_dataset=data).train()", "loop(model, args)")
    assert not [one for one in effects(alone) if "accumulation" in one[2]]


TINY = {
    "vocab_size": 12, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_labels": 2, "pad_token_id": 0, "max_position_embeddings": 8,
}  # fmt: skip
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("BertForMaskedLM", transformers.BertConfig(**TINY, **WITHOUT_DROPOUT)),
        ("BertForSequenceClassification", transformers.BertConfig(**TINY, **WITHOUT_DROPOUT)),
        ("LlamaForSequenceClassification", transformers.LlamaConfig(**TINY)),
        ("LlamaForCausalLM", transformers.LlamaConfig(**TINY)),
    ],
)
def test_the_loss_is_what_the_finding_says(model, config, tmp_path):
    torch.manual_seed(0)
    row = {"input_ids": [1, 2, 3], "labels": 1 if "Sequence" in model else [1, 2, 3]}
    args = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=1, logging_steps=1,
        report_to="none", disable_tqdm=True, save_strategy="no", use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(getattr(transformers, model)(config), args, train_dataset=[row] * 4)
    mean = trainer.evaluate([row])["eval_loss"]
    trainer.train()
    times = 4 if of_model(model) else 1
    assert trainer.state.log_history[-2]["loss"] == pytest.approx(mean * times, rel=1e-4)
    assert times == (1 if model.endswith("CausalLM") else 4)


OWN = """
from transformers import Trainer
class Own(Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps):
        self.args.warmup_steps = {value}
        super().create_optimizer_and_scheduler(num_training_steps)
"""


def test_a_fraction_of_updates_is_named():
    fractions = ("num_training_steps * 0.35", "num_training_steps / 10")
    for value, named in [*((one, True) for one in fractions), ("int(num_training_steps * 0.1)", False), ("7", False)]:
        found = [one for one in effects(OWN.format(value=value)) if "warmup" in one[2]]
        assert found == ([(Effect.LOOK, 5, "self.args.warmup_steps")] if named else []), value


@pytest.mark.parametrize(("method", "is_told"), [("compute_loss", False), ("training_step", False), ("log", True)])
def test_the_loss_of_a_trainer_of_another_file_is_its_own(tmp_path, method, is_told):
    (tmp_path / "mine.py").write_text(
        f"from transformers import Trainer\nclass Mine(Trainer):\n    def {method}(self, *args, **rest): ...\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "from mine import Mine\nfrom transformers import BertForMaskedLM, TrainingArguments\n"
        "args = TrainingArguments('out', gradient_accumulation_steps=4)\n"
        "Mine(BertForMaskedLM.from_pretrained('x'), args).train()\n"
    )
    (file,) = migrate([str(script)], runs_as_is=True).files
    assert any(one.what == "gradient_accumulation_steps=4" for one in file.findings) is is_told
