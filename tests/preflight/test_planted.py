"""A preflight finds each planted mistake, all of them at once where they are independent, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import tempfile

import pytest
import torch
import transformers

from helpers import planted_mistakes as planted
from helpers import toy
from helpers.planted_mistakes import PLANTED, Planted, made
from hf_compat import PreflightReport

# One row of each kind; the rest is the matrix.
SAMPLE = (
    "wrong metric name",
    "evaluation fails",
    "loss without parameters",
    "a label somewhere",
    "text that reaches the collator",
    "a column that is removed",
    "no full batch",
    "disk space",
    "what cannot be saved",
)


def rows():
    return [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.matrix, id=name.replace(" ", "_"))
        for name in PLANTED
    ]


def files_below(*folders):
    return {os.path.join(place, name) for folder in folders for place, _, names in os.walk(folder) for name in names}


@pytest.fixture(autouse=True)
def lone_folder(tmp_path, monkeypatch):
    """Every file that a preflight may write stands below `tmp_path`; no key is found outside."""
    home = tmp_path / "home"
    (home / "scratch").mkdir(parents=True)
    for name in ("HF_TOKEN", "WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN_PATH", "HF_HOME", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(home / "scratch"))
    monkeypatch.chdir(tmp_path)


def finding_of(report, mistake):
    found = [one for one in report.findings if one.check == mistake.check and one.severity == mistake.severity]
    told = [one for one in found if all(word in one.problem for word in mistake.words)]
    assert told, report
    return told[0]


@pytest.mark.parametrize("name", rows())
def test_a_planted_mistake_is_found(name, tmp_path):
    mistake = PLANTED[name]
    trainer = made(mistake, tmp_path)
    if mistake.check == "hub":
        trainer.args.push_to_hub = True
    before = files_below(tmp_path)
    report = trainer.preflight()
    assert isinstance(report, PreflightReport)
    assert mistake.way_out in finding_of(report, mistake).way_out
    assert report.ok is (mistake.severity == "note")
    assert files_below(tmp_path) == before
    others = [one for one in (*report.errors, *report.warnings) if one.check != mistake.check]
    assert [one for one in others if one.check not in ALONG_WITH.get(name, ())] == []


# What a mistake brings with it: where the update cannot be made, evaluations cannot either.
ALONG_WITH = {
    "what cannot be saved": ("load",),
    "no padding token": ("evaluation",),
    "a column that is removed": ("evaluation", "columns"),
    "a sequence too long": ("update",),
    "evaluation fails": (),
    "loss of a wrong shape": ("evaluation",),
}


def test_a_fine_run_has_no_finding(tmp_path):
    report = made(Planted("", (), ""), tmp_path).preflight()
    assert report.ok and report.findings == () and report.unchecked == ()
    assert {"training data", "update", "save", "load", "evaluation", "disk space"} <= set(report.checked)
    assert "nothing found" in str(report) and json.loads(report.to_json())["ok"] is True


def test_the_plan_of_a_model_with_a_configuration_is_checked(tmp_path):
    trainer = made(Planted("", (), ""), tmp_path)
    trainer.model.config = transformers.PreTrainedConfig()
    report = trainer.preflight()
    assert "devices" in report.checked, report


def test_independent_mistakes_are_found_in_one_run(tmp_path):
    """Fifteen at once: the data are read once, the failing evaluation hides nothing."""
    together = Planted(
        "", (), "", kind=planted.Trainer, model=lambda: Patchwork(),
        options={
            "metric_for_best_model": "f1", "report_to": "wandb", "warmup_steps": 10**13, "max_steps": 10**12,
            "save_steps": 1, "eval_steps": 10**13, "logging_steps": 10**13, "dataloader_drop_last": True,
            "per_device_train_batch_size": 15, "save_total_limit": None,
            "dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn",
        },
        parts={
            "compute_metrics": None, "callbacks": [planted.EarlyStoppingCallback],
            "train_dataset": planted.LocalData(toy.rows(24)),
        },
    )  # fmt: skip
    trainer = made(together, tmp_path)
    trainer.args.push_to_hub = True
    report = trainer.preflight("not_there")
    checks = [(one.severity, one.check) for one in report.findings]
    for expected in (
        ("error", "trackers"), ("error", "hub"), ("error", "update"), ("error", "evaluation"),
        ("error", "metric name"), ("error", "disk space"), ("warning", "plan"), ("warning", "load"), ("note", "plan"),
        ("note", "update"), ("error", "workers"), ("error", "resume"),
    ):  # fmt: skip
        assert expected in checks, report
    assert len(report.findings) >= 15, report


class Patchwork(planted.SavesHalf):
    """A loss that is not finite, a module that is not used, weights that are not saved, and no mode for evaluations."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x, labels=None):
        if not self.training:
            raise RuntimeError("this model has no mode for evaluations")
        out = super().forward(x, labels)
        return {**out, "loss": out["loss"] / 0}


def test_a_failing_evaluation_does_not_hide_the_metrics(tmp_path):
    broken = [{"y": row["x"], "labels": row["labels"]} for row in toy.rows(8)]
    mistake = Planted("", (), "", options={"metric_for_best_model": "f1"}, parts={"eval_dataset": broken})
    report = made(mistake, tmp_path).preflight()
    assert {one.check for one in report.errors} == {"evaluation", "metric name"}


def test_less_is_read_than_an_epoch(tmp_path):
    data, evaluated = toy.Table(toy.rows(400)), toy.Table(toy.rows(400, seed=1))
    reads = []
    for table in (data, evaluated):
        get = table.samples
        table.samples = Counting(get, reads)
    mistake = Planted("", (), "", parts={"train_dataset": data, "eval_dataset": evaluated})
    assert made(mistake, tmp_path).preflight().ok
    assert 0 < len(reads) < 40


class Counting(list):
    def __init__(self, samples, reads):
        super().__init__(samples)
        self.counted = reads.append

    def __getitem__(self, index):
        self.counted(index)
        return super().__getitem__(index)
