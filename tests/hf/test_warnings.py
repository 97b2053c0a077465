"""Warnings about arguments point at the user's line, however the arguments are made."""

from __future__ import annotations

import dataclasses
import inspect
import warnings

import pytest

from helpers import toy
from hf_compat import HfArgumentParser, Trainer, TrainingArguments, errors


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


@pytest.mark.parametrize(
    ("message", "cut"),
    [
        ("a" * 1000, "a" * 1000),
        ("a" * 600 + "\n" + "b" * 600, "a" * 600 + "\n" + "b" * 600),
        ("a" * 500 + "b" * 501, "a" * 500 + "b" * 166 + " … " + "b" * 250),
        ("short\n" + "a" * 1000, "short\n" + "a" * 1000),
        ("short\n" + "a" * 1001 + "\nend", "short\n" + "a" * 666 + " … " + "a" * 250 + "\nend"),
    ],
)
def test_long_lines_of_messages_are_cut(message, cut):
    assert errors.cut_lines(message) == cut
    assert errors.HfCompatError(message, 3).args == (cut, 3)
    with pytest.warns(errors.HfCompatWarning) as told:
        errors.warn_user(message)
    assert str(told[0].message) == cut


def test_errors_show_what_they_hold():
    assert str(errors.MissingMetric("no 'a'")) == "no 'a'" and str(errors.MissingMetric()) == ""
    assert errors.ScriptError("it left").status == 0 and errors.ScriptError("it left", 3).status == 3


def test_a_setting_without_effect_is_told_each_time_and_other_things_once():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            errors.warn_inert("a=1", "b is set")
            errors.warn_once("of test_warnings", UserWarning)
    assert [(one.category, str(one.message)) for one in told] == [
        (errors.InertArgumentWarning, "`a=1` has no effect: b is set."),
        (UserWarning, "of test_warnings"),
        (errors.InertArgumentWarning, "`a=1` has no effect: b is set."),
    ]


@pytest.mark.parametrize(
    ("module", "file", "name", "is_between"),
    [
        ("lightning.pytorch.x", "a.py", "f", True),
        ("argparse", "a.py", "f", True),
        ("lightningly", "a.py", "f", False),
        ("own", "<string>", "__init__", True),
        ("own", "<string>", "f", False),
        ("own", "a.py", "__init__", False),
    ],
)
def test_a_warning_passes_over_frames_of_packages(module, file, name, is_between):
    space = {"__name__": module, "warn": errors.warn_user}
    exec(compile(f"\n\ndef {name}():\n    warn('it')\n", file, "exec"), space)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        space[name]()
    assert (told[0].filename, told[0].lineno == 4) == ((__file__, False) if is_between else (file, True))
