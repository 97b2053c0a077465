"""A sample of `arguments.py`: every value is taken, or refused in an error of ours that names the argument."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_compat import TrainingArguments
from hf_compat.errors import ArgumentError
from sweeps.faults import arguments


def test_values_are_taken_or_refused_by_name():
    report = arguments.run(250, seed=3, every=29, train_every=150)
    assert report.is_well, "\n".join([*report.bad, *("  ".join(row) for row in report.table())])
    assert report.counts["3 make a Trainer"]["success"] > 50 and report.counts["4 train"]["tries"] > 1


@pytest.mark.parametrize("several", [np.array([1, 2]), torch.tensor([1, 2]), np.array(["a", "b"])], ids=repr)
def test_values_without_one_truth_are_taken_or_refused_by_name(tmp_path, several):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    for name in arguments.FIELDS:
        end, _, told = arguments.judge(lambda name=name: setattr(args, name, several), [name])
        assert end in ("success", "ours, named"), (name, told)


def test_there_are_enough_of_them():
    tries = list(arguments.systematic_tries())
    assert len(tries) > 15_000
    assert {name for one in tries for name in one.values} >= set(arguments.FIELDS)
    assert {one.way for one in tries} == set(arguments.WAYS)


def test_what_is_wrong_is_counted_as_wrong():
    """The judge of `arguments.py` tells the good ends from the bad ones."""

    def fail(error):
        raise error

    names = ["max_steps"]
    assert arguments.judge(lambda: 1, names)[0] == "success"
    assert arguments.judge(lambda: fail(ArgumentError("`max_steps=x`")), names)[0] == "ours, named"
    for error, end in ((ArgumentError("no"), "ours, WITHOUT THE NAME"), (TypeError("max_steps"), "FOREIGN")):
        assert arguments.judge(lambda error=error: fail(error), names)[0] == end
        assert end in arguments.BAD
    with pytest.raises(KeyboardInterrupt):
        arguments.judge(lambda: fail(KeyboardInterrupt()), names)
