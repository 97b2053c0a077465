"""A preflight speaks of the run's own schedule, loader and checkpoints, whatever the arguments say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from helpers import planted_mistakes as planted
from helpers import toy
from helpers.planted_mistakes import Planted, made
from hf_compat.tools.preflight import checking, plan_checks

CHECKS = ("schedule", "followed metric")


def report_of(folder, kind=planted.Trainer, parts=None, model=toy.Classifier, deepspeed=None, schedule=None, **options):
    parts = dict(parts or {})
    if schedule is not None:  # an optimizer and a schedule of the user's, which ignore the arguments
        model, make_model = model(), lambda: model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts["optimizers"] = optimizer, schedule(optimizer)
    else:
        make_model = model
    trainer = made(Planted("", (), "", kind=kind, options=options, parts=parts, model=make_model), folder)
    if deepspeed is not None:  # set here, as arguments ask for a launcher
        vars(trainer.args)["deepspeed"] = deepspeed
    return trainer.preflight()


def told_by(report, *checks):
    return [one for one in report.findings if one.check in checks]


class OwnSchedule(planted.Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda update: 1.0)
        return self.lr_scheduler


class NoSchedule(planted.Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        raise LookupError("no such schedule")


SECTION = {"type": "WarmupDecayLR", "params": dict.fromkeys(("warmup_num_steps", "total_num_steps"), "auto")}


REACHES = {
    "constant": {"lr_scheduler_type": "constant", "warmup_steps": 500},
    "warmup to the last update": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 11},
    "no warmup": {"lr_scheduler_type": "cosine"},
    "a long run": {"max_steps": 10**6, "warmup_steps": 10**5},
    "no rate": {"learning_rate": 0.0, "warmup_steps": 3},
    "overridden": {"kind": OwnSchedule, "warmup_steps": 500},
    "overridden, not by a metric": {"kind": OwnSchedule, "lr_scheduler_type": "reduce_lr_on_plateau"},
    "own": {"warmup_steps": 500, "schedule": lambda optimizer: LambdaLR(optimizer, lambda update: 0.5**update)},
    "of DeepSpeed": {"deepspeed": {"scheduler": SECTION}, "lr_scheduler_type": "reduce_lr_on_plateau"},
}


@pytest.mark.parametrize("name", REACHES)
def test_nothing_is_said_of_a_schedule_that_reaches_its_rate(name, tmp_path):
    report = report_of(tmp_path, **REACHES[name])
    assert told_by(report, *CHECKS) == [] and "schedule" in report.checked, report


# name → the run, how bad it is, and words of the problem
FALLS_SHORT = {
    "warmup": ({"warmup_steps": 12}, "warning", "`learning_rate=5e-05`: it is 4.58333e-05 at most in 12 updates, as"),
    "a long run": ({"max_steps": 10**6, "warmup_steps": 10**6}, "warning", "as the warmup takes 1000000 updates"),
    "of DeepSpeed": ({"deepspeed": {"scheduler": SECTION}, "max_steps": 1}, "warning", "0 at most in 1 updates"),
    "own": (
        {"schedule": lambda optimizer: LambdaLR(optimizer, lambda update: 0.5)},
        "warning", "the optimizer's 0.1: it is 0.05",
    ),
    "own, too short": (
        {"schedule": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=10)},
        "error", "Tried to step 11 times",
    ),
    "no metric": ({"schedule": ReduceLROnPlateau}, "error", "ReduceLROnPlateau follows a metric, and `metric_for_"),
    "no evaluation": (
        {"schedule": ReduceLROnPlateau, "eval_strategy": "no"},
        "warning", "makes no evaluation: the rate stays",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FALLS_SHORT)
def test_what_a_schedule_does_in_the_run_is_found(name, tmp_path):
    run, severity, words = FALLS_SHORT[name]
    (finding,) = told_by(report_of(tmp_path, **run), *CHECKS)
    assert finding.severity == severity and words in finding.problem, finding


def test_an_error_of_the_schedule_is_told_once(tmp_path):
    report = report_of(tmp_path, kind=NoSchedule)
    assert [one.check for one in report.errors] == ["update"] and "no such schedule" in report.errors[0].problem, report


class OwnLoader(planted.Trainer):
    """Reads all of its data, one sample at a time, without workers."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=self.data_collator)

    def get_eval_dataloader(self, eval_dataset=None):
        return DataLoader(self.eval_dataset, batch_size=1, collate_fn=self.data_collator)


class WholeLoader(planted.Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=len(self.train_dataset), collate_fn=self.data_collator)


def test_nothing_is_said_of_samples_that_the_loader_does_not_drop(tmp_path):
    options = {"dataloader_drop_last": True, "per_device_train_batch_size": 16}
    for kind, is_told in ((planted.Trainer, True), (WholeLoader, False)):
        found = told_by(report_of(tmp_path, kind=kind, **options), "plan")
        assert any("out of every epoch" in one.problem for one in found) is is_told


def test_nothing_is_said_of_workers_that_the_loader_does_not_have(tmp_path):
    parts = {"train_dataset": planted.LocalData(toy.rows(24))}
    options = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn"}
    assert told_by(report_of(tmp_path, kind=OwnLoader, parts=parts, **options), "workers") == []


def left_to_right():
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16, num_labels=3)
    return GPT2ForSequenceClassification(config)


@pytest.mark.parametrize(("kind", "is_told"), [(planted.Trainer, True), (OwnLoader, False)])
def test_padding_is_asked_for_where_a_batch_has_several_samples(kind, is_told, tmp_path):
    rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor(1)} for _ in range(8)]
    parts = {"train_dataset": rows, "eval_dataset": rows}
    found = told_by(report_of(tmp_path, kind=kind, model=left_to_right, parts=parts), "numbers")
    assert [("pad_token_id" in one.problem) for one in found] == [True] * is_told


def test_the_best_checkpoints_are_as_many_as_evaluations_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_checks.shutil, "disk_usage", lambda place: SimpleNamespace(free=50_000))
    monkeypatch.setattr(checking, "_SCRATCH_COPIES", 0)
    options = {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "epoch"}
    (finding,) = told_by(report_of(tmp_path, num_train_epochs=7, **options), "disk space")
    assert finding.severity == "warning" and "of 7 checkpoints that it writes if each evaluation" in finding.problem
