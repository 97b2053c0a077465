"""What each type of values reads, up to its borders, and what it refuses."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_compat.hf import value_types
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.hf.value_types import LARGEST_COUNT, Range, Unreadable, number, or_none, whole_number

REFUSED = object()
SHARE = Range(low=0, high=1, excludes_high=True)


def read(kind, value):
    try:
        return kind.read(value)
    except Unreadable:
        return REFUSED


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (number(), 3, 3),
        (number(), "5e-5", 5e-5),
        (number(), " 3 ", 3.0),
        (number(), np.float32(0.5), 0.5),
        (number(), torch.tensor(2), 2),
        (number(), Fraction(1, 2), 0.5),
        (number(), True, REFUSED),
        (number(), 1j, REFUSED),
        (number(), None, REFUSED),
        (number(), "x", REFUSED),
        (number(), "9" * 101, REFUSED),
        (number(), "9" * 100, float("9" * 100)),
        (number(), math.inf, REFUSED),
        (number(), math.nan, REFUSED),
        (number(), 10**400, REFUSED),
        (number(SHARE), 0, 0),
        (number(SHARE), -0.1, REFUSED),
        (number(SHARE), 0.9, 0.9),
        (number(SHARE), 1, REFUSED),
        (number(Range(low=0, high=1)), 1, 1),
        (number(Range(low=0, high=1)), 1.1, REFUSED),
        (whole_number(), 3.0, 3),
        (whole_number(), "3e2", 300),
        (whole_number(), "3", 3),
        (whole_number(), 3.5, REFUSED),
        (whole_number(), LARGEST_COUNT, LARGEST_COUNT),
        (whole_number(), LARGEST_COUNT + 1, REFUSED),
        (whole_number(), -LARGEST_COUNT, -LARGEST_COUNT),
        (value_types.truth_value, True, True),
        (value_types.truth_value, 0, False),
        (value_types.truth_value, 1.0, True),
        (value_types.truth_value, np.bool_(True), True),
        (value_types.truth_value, 2, REFUSED),
        (value_types.truth_value, "yes", True),
        (value_types.truth_value, "maybe", REFUSED),
        (value_types.truth_value, None, REFUSED),
        (value_types.text_value, "a", "a"),
        (value_types.text_value, 2024, "2024"),
        (value_types.text_value, LARGEST_COUNT, str(LARGEST_COUNT)),
        (value_types.text_value, LARGEST_COUNT + 1, REFUSED),
        (value_types.text_value, True, REFUSED),
        (value_types.text_value, "\0", REFUSED),
        (value_types.NAME, "a", "a"),
        (value_types.NAME, " ", REFUSED),
        (value_types.NAME, "\0", REFUSED),
        (value_types.NAME, 1, REFUSED),
        (value_types.path_value, Path("a/b"), "a/b"),
        (value_types.path_value, " ", REFUSED),
        (value_types.path_value, "a\0", REFUSED),
        (value_types.path_value, 1, REFUSED),
        (value_types.list_of(number()), "[1, 2]", [1, 2]),
        (value_types.list_of(number()), (1, "2"), [1, 2.0]),
        (value_types.list_of(number()), "1", REFUSED),
        (value_types.list_of(number()), "[1", REFUSED),
        (value_types.list_of(number()), {1}, REFUSED),
        (value_types.options_value, ' {"a": "True", "b": "2", "c": {"d": "x"}}', {"a": True, "b": 2, "c": {"d": "x"}}),
        (value_types.options_value, '{"a": "false", "b": "on"}', {"a": False, "b": "on"}),
        (value_types.options_value, {"a": "2"}, {"a": "2"}),
        (value_types.options_value, "a", REFUSED),
        (value_types.options_value, {1: 2}, REFUSED),
        (value_types.options_value, {"a": [{1: 2}]}, REFUSED),
        (value_types.options_value, {"a": [[{1: 2}]]}, REFUSED),
        (value_types.options_value, {"a": {"b": 1}}, {"a": {"b": 1}}),
        (or_none(number()), None, None),
        (or_none(number()), " None ", None),
        (or_none(number()), "null", None),
        (or_none(number()), "x", REFUSED),
        (or_none(value_types.text_value), "none", "none"),
        (value_types.either([number(), value_types.truth_value]), "yes", True),
        (value_types.either([number(), value_types.truth_value]), None, REFUSED),
        (value_types.member(IntervalStrategy), "steps", IntervalStrategy.STEPS),
        (value_types.member(IntervalStrategy), IntervalStrategy.NO, IntervalStrategy.NO),
        (value_types.member(IntervalStrategy), "step", REFUSED),
        (value_types.type_of(int | None), "3", 3),
        (value_types.type_of(IntervalStrategy | str), "steps", IntervalStrategy.STEPS),
        (value_types.type_of(IntervalStrategy | str), "odd", REFUSED),
        (value_types.type_of(str), "odd", "odd"),
        (value_types.type_of(bool), "1", True),
    ],
)
def test_a_type_reads_a_value(kind, value, found):
    got = read(kind, value)
    assert got is REFUSED if found is REFUSED else (got, type(got)) == (found, type(found))


def test_a_hint_of_another_type_is_not_checked():
    assert value_types.type_of(set[int]) is None and value_types.type_of(int | set) is None


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        (Range(), ""),
        (Range(low=1), " >= 1"),
        (Range(low=1, high=LARGEST_COUNT), " >= 1"),
        (Range(high=1), " <= 1"),
        (Range(high=LARGEST_COUNT), f" <= {LARGEST_COUNT}"),
        (Range(low=0, high=1), " in [0, 1]"),
        (SHARE, " in [0, 1)"),
    ],
)
def test_a_range_is_written(allowed, text):
    assert str(allowed) == text


@pytest.mark.parametrize(
    ("content", "found"), [('{"a": 1}', {"a": 1}), ("[1]", REFUSED), ("{", REFUSED), (None, REFUSED)]
)
def test_a_file_of_options_holds_an_object(monkeypatch, tmp_path, content, found):
    path = tmp_path / "options.json"
    if content is not None:
        path.write_text(content)
        assert (value_types.read_options_file(str(path)) if found is not REFUSED else found) == found
        monkeypatch.setattr(value_types, "_LARGEST_FILE", len(content) - 1)
    with pytest.raises(Unreadable):
        value_types.read_options_file(str(path))
    with pytest.raises(Unreadable, match="not a regular file"):
        value_types.read_options_file(str(tmp_path))
    monkeypatch.setattr(value_types, "_LARGEST_FILE", 2)
    path.write_text(json.dumps({}))
    assert value_types.read_options_file(str(path)) == {}


ARRAY = np.ones(2)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(2.0), 2.0),
        (ARRAY, ARRAY),
        (np.dtype("float32"), np.dtype("float32")),
        (torch.tensor(3), 3),
        (torch.tensor(True), True),
        (IntervalStrategy.STEPS, "steps"),
        ("text", "text"),
        (None, None),
    ],
)
def test_scalars_and_members_become_values_of_python(value, found):
    got = value_types.plain(value)
    assert got is found or (got == found and type(got) is type(found))


@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.ones((), device="meta"), type("Own", (), {"ndim": 0, "item": 3})()]
)
def test_what_is_no_scalar_is_kept(value):
    assert value_types.plain(value) is value
