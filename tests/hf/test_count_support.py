"""The counts of what is supported are over all that transformers has, and nothing is left for later."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import transformers
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from hf_compat.hf.enums import OWN_OPTIMIZERS
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.hf.rows import ROWS
from hf_compat.optim.optimizers import OPTIMIZERS

_spec = importlib.util.spec_from_file_location("count_support", Path(__file__).with_name("count_support.py"))
assert _spec is not None and _spec.loader is not None
count_support = importlib.util.module_from_spec(_spec)
sys.modules["count_support"] = count_support
_spec.loader.exec_module(count_support)

FIELDS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}


def test_no_row_is_missing_invented_or_stale():
    assert list(ROWS)[: len(FIELDS)] == [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    assert set(count_support.NAMES) == FIELDS | (set(OLD_NAMES) & set(count_support.NAMES))
    assert not set(OLD_NAMES) & FIELDS
    assert set(OPTIMIZERS) == {name.value for name in OptimizerNames} | set(OWN_OPTIMIZERS)


def test_the_counts_are_over_everything_and_are_printed(capsys):
    found = count_support.counts()
    assert sum(found["names"].values()) == 153
    assert sum(found["optimizers"].values()) == len(OptimizerNames)
    assert sum(found["schedules"].values()) == len(SchedulerType)
    with capsys.disabled():
        print("\n" + "\n".join(count_support.lines()))


def test_nothing_is_left_for_later():
    for kind, found in count_support.counts().items():
        assert found[count_support.LATER] == 0, kind
