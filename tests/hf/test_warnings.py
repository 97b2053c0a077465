"""Warnings about arguments point at the user's line, however the arguments are made."""

from __future__ import annotations

import dataclasses
import inspect
import warnings

import pytest

from helpers import toy
from hf_compat import HfArgumentParser, Trainer, TrainingArguments


def directly(args):
    return TrainingArguments("out", use_cpu=True, past_index=3)


def by_position_in_a_subclass(args):
    @dataclasses.dataclass
    class Own(TrainingArguments):
        past_index: int = 3

    return Own("out", use_cpu=True)


def parsed(args):
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--use_cpu", "--past_index", "3"])


def replaced(args):
    return dataclasses.replace(args, past_index=3)


def assigned(args):
    args.past_index = 3


def trained_with(args):
    trainer = Trainer(toy.Classifier(), dataclasses.replace(args, ddp_backend="gloo"), train_dataset=toy.rows(8))
    return trainer.train()


@pytest.mark.parametrize("way", [directly, by_position_in_a_subclass, parsed, replaced, assigned, trained_with])
def test_a_warning_names_the_users_line(way, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = TrainingArguments("out", use_cpu=True, report_to="none")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        way(args)
    lines, first = inspect.getsourcelines(way)
    [warning] = told
    assert "has no effect" in str(warning.message) or "Without effect" in str(warning.message)
    assert warning.filename == __file__ and first < warning.lineno < first + len(lines)


@pytest.mark.parametrize(("rank", "times"), [(0, 1), (1, 0)])
def test_one_rank_of_a_launcher_warns(tmp_path, monkeypatch, rank, times):
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with warnings.catch_warnings(record=True) as told:
        warnings.resetwarnings()  # the user's filters, as these of the tests, go before
        TrainingArguments(str(tmp_path), use_cpu=True, past_index=3)
    assert len(told) == times
