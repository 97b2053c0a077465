"""After a preflight everything is as it was: a `train()` gives the numbers that it gives without, bit for bit."""

from __future__ import annotations

import dataclasses
import os
import random

import numpy as np
import pytest
import torch
from transformers import DataCollatorForLanguageModeling

from helpers import toy
from hf_compat import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments, set_seed
from hf_compat.errors import HfCompatWarning
from hf_compat.tools.preflight.snapshot import Snapshot


def options(**more):
    return {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4, "max_steps": 5, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "no",
    } | more  # fmt: skip


def plain(folder, kind=Trainer, model=toy.Classifier, parts=None, **more):
    torch.manual_seed(1)
    data = {"train_dataset": toy.Noisy(toy.rows(24)), "eval_dataset": toy.rows(10, seed=1)}
    return kind(model(), TrainingArguments(str(folder / "out"), **options(**more)), **data | (parts or {}))


class Overriding(Trainer):
    """Overrides what a preflight calls, and counts the calls."""

    calls: dict

    def _count(self, name):
        self.__dict__.setdefault("calls", {})
        self.calls[name] = self.calls.get(name, 0) + 1

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self._count("compute_loss")
        SEEN.add("compute_loss")
        found = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = found[0] * random.random() * float(np.random.rand())
        return (loss, found[1]) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        self._count("training_step")
        SEEN.add("training_step")
        return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        SEEN.add("prediction_step")
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def get_train_dataloader(self):
        SEEN.add("get_train_dataloader")
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset=None):
        SEEN.add("get_eval_dataloader")
        return super().get_eval_dataloader(eval_dataset)

    def create_optimizer(self, model=None):
        SEEN.add("create_optimizer")
        return super().create_optimizer(model)


SEEN = set()


class Counting(toy.Classifier):
    """Keeps a number of its own, and a running mean in a buffer."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x, labels=None):
        self.calls += 1
        self.mean += 0.1 * (x.mean(0) - self.mean)
        return super().forward(x + self.mean * self.calls, labels)


class Drawing:
    """A collator with generators of its own, which no seed sets."""

    def __init__(self):
        self.torch, self.numpy = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.python, self.count = random.Random(3), 0

    def __call__(self, samples):
        self.count += 1
        x = torch.stack([sample["x"] for sample in samples])
        noise = torch.randn(x.shape, generator=self.torch) * float(self.numpy.random()) * self.python.random()
        return {"x": x + noise + self.count, "labels": torch.tensor([sample["labels"] for sample in samples])}


def with_own_optimizer(folder):
    torch.manual_seed(1)
    model = toy.Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return plain(folder, model=lambda: model, parts={"optimizers": (optimizer, schedule)})


def from_model_init(folder):
    args = TrainingArguments(str(folder / "out"), **options())
    return Trainer(
        args=args,
        model_init=lambda: toy.Classifier(),
        train_dataset=toy.Noisy(toy.rows(24)),
        eval_dataset=toy.rows(10, seed=1),
    )


def sequences(folder):
    torch.manual_seed(1)
    args = Seq2SeqTrainingArguments(
        str(folder / "out"), **options(predict_with_generate=True, generation_max_length=6)
    )  # fmt: skip
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )  # fmt: skip
    data = [{"input_ids": [1, 2, 3, 4], "labels": [4, 3, 2, 1]} for _ in range(20)]
    return Seq2SeqTrainer(T5ForConditionalGeneration(config), args, train_dataset=data, eval_dataset=data[:6])


def adapted(folder):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(
        toy.tiny_gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    )
    collator = DataCollatorForLanguageModeling(toy.tiny_tokenizer(), mlm=False)
    args = TrainingArguments(str(folder / "out"), **options())
    return Trainer(model, args, collator, toy.blocks(20), toy.blocks(6))


RUNS = {
    "plain": plain,
    "accumulation": lambda folder: plain(folder, gradient_accumulation_steps=3, average_tokens_across_devices=False),
    "overrides": lambda folder: plain(folder, kind=Overriding),
    "own_state": lambda folder: plain(folder, model=Counting),
    "drawing_collator": lambda folder: plain(folder, parts={"data_collator": Drawing()}),
    "own_optimizer": with_own_optimizer,
    "model_init": from_model_init,
    "stream": lambda folder: plain(folder, parts={"train_dataset": toy.Stream(toy.rows(40))}),
    "seq2seq": sequences,
    "peft": adapted,
    "bf16": lambda folder: plain(folder, bf16=True),
    "fp16_evaluation": lambda folder: plain(folder, bf16_full_eval=True),
    "schedule_by_metric": lambda folder: plain(folder, lr_scheduler_type="reduce_lr_on_plateau"),
    "adafactor": lambda folder: plain(folder, optim="adafactor"),
    "neftune": lambda folder: adapted_with_noise(folder),
    "workers": lambda folder: plain(folder, dataloader_num_workers=1),
}
SAMPLE = {"overrides", "own_state", "drawing_collator", "own_optimizer", "model_init", "stream", "accumulation"}


def adapted_with_noise(folder):
    trainer = adapted(folder)
    trainer.neftune_noise_alpha = 5.0
    return trainer


def rows():
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.matrix) for name in RUNS]


def numbers_of(trainer):
    """Return everything that a run has come to, but for times."""
    logs = [
        {name: value for name, value in log.items() if not name.endswith(("runtime", "per_second", "_time"))}
        for log in trainer.state.log_history
    ]
    model = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return logs, model, torch.rand(3).tolist(), random.random(), float(np.random.rand())


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name
    assert one[2:] == other[2:]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.parametrize("name", rows())
def test_a_train_after_a_preflight_gives_the_same_numbers(name, tmp_path):
    alone = RUNS[name](tmp_path / "alone")
    alone.train()
    expected = numbers_of(alone)
    checked = RUNS[name](tmp_path / "checked")
    report = checked.preflight()
    assert report.ok, report
    assert "update" in report.checked and "evaluation" in report.checked, report
    checked.train()
    assert_same(numbers_of(checked), expected)
    assert os.listdir(tmp_path / "checked" / "out") == os.listdir(tmp_path / "alone" / "out")


def test_the_overrides_of_a_subclass_are_what_is_called(tmp_path):
    SEEN.clear()
    trainer = plain(tmp_path, kind=Overriding)
    assert trainer.preflight().ok
    assert {
        "compute_loss", "training_step", "prediction_step", "get_train_dataloader", "get_eval_dataloader",
        "create_optimizer",
    } == SEEN  # fmt: skip
    assert "calls" not in vars(trainer)


class Told(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

    def on_log(self, args, state, control, **kwargs):
        self.events.append("log")


def test_nobody_is_told_and_the_report_says_so(tmp_path):
    told = Told()
    trainer = plain(tmp_path, parts={"callbacks": [told]})
    before = {name: id(value) for name, value in vars(trainer).items()}
    history = list(trainer.state.log_history)
    report = trainer.preflight()
    assert told.events == [] and any("Told" in one.reason for one in report.unchecked)
    assert {name: id(value) for name, value in vars(trainer).items()} == before
    assert trainer.state.log_history == history and trainer.optimizer is None
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_preflights_between_two_trainings_change_nothing(tmp_path):
    alone, checked = plain(tmp_path / "alone"), plain(tmp_path / "checked")
    for trainer in (alone, checked):
        set_seed(5)
        for _ in range(2):
            if trainer is checked:
                assert trainer.preflight().ok
                assert trainer.preflight().ok
            trainer.train()
        trainer.result = numbers_of(trainer)
    assert_same(checked.result, alone.result)


def stream_of(samples):
    yield from samples


class Once(toy.Stream):
    """Reads a generator that somebody has made, once."""


def test_what_can_be_read_once_is_not_read(tmp_path):
    once = Once(stream_of(toy.rows(40)))
    trainer = plain(tmp_path, parts={"train_dataset": once})
    report = trainer.preflight()
    assert {one.check for one in report.unchecked} >= {"training data", "update"}
    assert "generator" in next(one.reason for one in report.unchecked if one.check == "training data")
    assert len(list(once)) == 40


def test_it_checks_what_the_run_goes_on_from(tmp_path):
    trainer = plain(tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    trainer.train()
    report = trainer.preflight(resume_from_checkpoint=True)
    assert [(one.severity, one.check) for one in report.findings] == [("warning", "resume")], report
    assert "at the end of this run" in report.findings[0].problem
    longer = plain(tmp_path, save_strategy="steps", save_steps=2, max_steps=6)
    report = longer.preflight(resume_from_checkpoint=True)
    assert report.ok and "resume" in report.checked, report
    (tmp_path / "out" / "checkpoint-4" / "model.safetensors").write_bytes(b"cut")
    report = longer.preflight(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert [one.check for one in report.errors] == ["resume"], report
    report = plain(tmp_path / "new").preflight(resume_from_checkpoint=True)
    assert "No valid checkpoint" in report.errors[0].problem


def test_old_names_that_the_arguments_class_declares_are_noted(tmp_path):
    @dataclasses.dataclass
    class Declares(TrainingArguments):
        warmup_ratio: float = 0.5
        evaluation_strategy: str = "no"
        group_by_length: str = "own"

    with pytest.warns(HfCompatWarning, match="another meaning"):
        args = Declares(str(tmp_path / "out"), use_cpu=True, max_steps=4, report_to="none", save_strategy="no")
    notes = Trainer(toy.Classifier(), args, train_dataset=toy.rows(16)).preflight().notes
    (note,) = [one for one in notes if one.check == "arguments" and "warmup_ratio=0.5" in one.problem]
    assert "`warmup_steps=0.5`" in note.problem and "warmup_steps" in note.way_out
    assert not any("group_by_length" in one.problem for one in notes)


def test_a_private_slot_is_restored():
    class Counter:
        __slots__ = ("__count",)

        def __init__(self):
            self.__count = 1

        def add(self):
            self.__count += 1
            return self.__count

    counter = Counter()
    snapshot = Snapshot([counter])
    assert counter.add() == 2
    snapshot.restore()
    assert counter.add() == 2
