"""What a run's state holds is read by its version, and a wrong value is named."""

from __future__ import annotations

import pytest

from hf_compat.checkpoint.run_state import DataPosition
from hf_compat.errors import CheckpointError


def test_the_values_come_back():
    position = DataPosition(epoch=2, micro_batches_done=5)
    plain = position.to_plain()
    assert plain["version"] == 2, "another one needs a way to read checkpoints of this one"
    assert DataPosition.read(plain) == position


@pytest.mark.parametrize("version", [None, 0, 1, 3, "2"])
def test_another_version_is_refused(version):
    with pytest.raises(CheckpointError, match="another version of hf_compat"):
        DataPosition.read({**DataPosition(epoch=2).to_plain(), "version": version})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (None, "is None, not fields"),
        ({"epoch": None}, "`epoch`"),
        ({"epoch": -1}, "`epoch`"),
        ({"micro_batches_done": 1.5}, "`micro_batches_done`"),
        ({"window_size": "4"}, "`window_size`"),
        ({"is_over": 2}, "`is_over`"),
        ({"shared": "no list"}, "`shared`"),
    ],
)
def test_a_wrong_value_is_named(change, what):
    plain = None if change is None else {**DataPosition(epoch=2).to_plain(), **change}
    with pytest.raises(CheckpointError, match=what):
        DataPosition.read(plain)
