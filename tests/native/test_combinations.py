"""A sample of `native_combinations.py`: rows that differed once, and the machine's own judgement."""

from __future__ import annotations

import random

import lightning.pytorch as pl
import pytest

from helpers import toy
from hf_compat import HFDataModule, HFModule, TrainingArguments
from sweeps.native import combination_rows, native_combinations
from sweeps.native.combination_parts import metric

ROWS = {
    "a stream goes on without losing a window": {"task": "shuffled_stream", "length": "17 updates", "resume": "native"},
    "a folder goes on within an epoch": {"resume": "from trainer", "validation": "3 updates", "accumulation": 2},
    "intervals are the arguments' after a .ckpt": {"resume": "to trainer", "length": "5 updates"},
    "a metric object counts for each set": {"metrics": "torchmetrics", "sets": "two", "length": "1 epochs"},
    "an evaluation before a fit": {"validation": "2 epochs", "around": "validate", "stopping": "lightning"},
    "a .ckpt holds adapters and what they stand on": {"resume": "to trainer", "task": "lora"},
    "HF callbacks in a run that updates end": {"length": "17 updates", "spies": True},
    "everything is overridden": {"module": "hooks", "spies": True, "yaml": True, "checkpoints": "best", "bar": True},
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_both_doors_do_the_same(row):
    assert native_combinations.try_row(row) == "equal"


def test_what_differs_is_found(monkeypatch):
    monkeypatch.setattr(combination_rows, "native_arguments", lambda row: {"label_smoothing_factor": 0.4})
    assert native_combinations.try_row({"length": "5 updates"}).startswith("DIFFERS updates")


def test_what_is_drawn_can_be_compared_and_covers_everything():
    generator = random.Random(0)
    drawn = [combination_rows.draw(generator) for _ in range(3000)]
    assert all(2 <= len(row) <= 5 and combination_rows.why_not(row) is None for row in drawn)
    for name, values in combination_rows.FEATURES.items():
        assert {row[name] for row in drawn if name in row} == set(values[1:]), name


def test_an_error_in_a_validation_leaves_nothing_to_the_next(tmp_path, lightning):
    class Fails(pl.Callback):
        def on_validation_batch_end(self, *args):
            raise RuntimeError("mine")

    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=3, use_cpu=True)
    module, data = HFModule(toy.Classifier(), args, compute_metrics=metric()), HFDataModule(args, None, toy.rows(9))
    (expected,) = lightning().validate(module, data, verbose=False)
    with pytest.raises(RuntimeError, match="mine"):
        lightning(callbacks=[Fails()]).validate(module, data, verbose=False)
    (found,) = lightning().validate(module, data, verbose=False)
    assert found == expected
