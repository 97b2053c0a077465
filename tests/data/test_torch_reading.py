"""Reading from torch's loader gives the batches of `next`, and a running profiler records each read."""

from __future__ import annotations

import pytest
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from helpers import toy
from hf_compat.data.loader import _END, PreparedDataLoader

MARK = "enumerate(DataLoader)"


def reads(events) -> int:
    return sum(event.count for event in events if event.key.startswith(MARK))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_batches_as_next(workers):
    options = {"batch_size": 2, "num_workers": workers}
    loader = PreparedDataLoader(list(range(11)), **options)
    batches = DataLoader.__iter__(loader)
    read, found = loader._reader(batches), []
    while (batch := read()) is not _END:
        found.append(batch.tolist())
    assert found == [batch.tolist() for batch in DataLoader(list(range(11)), **options)] and batches._num_yielded == 6


def test_a_profiler_sees_reads_while_it_runs():
    """This includes a profiler that starts in the middle of a pass."""
    batches = iter(PreparedDataLoader(toy.rows(12), batch_size=2))
    next(batches)  # two are read: one ahead
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        next(batches), next(batches)
    assert reads(profiler.key_averages()) == 2 and len(list(batches)) == 3


def test_iterators_of_somebody_else_are_asked_themselves():
    class Counted(type(iter(DataLoader([1])))):
        asked = 0

        def __next__(self):
            Counted.asked += 1
            return super().__next__()

    class Loader(PreparedDataLoader):
        def _get_iterator(self):
            return Counted(self)

    assert len(list(Loader(toy.rows(6), batch_size=2))) == 3
    assert Counted.asked == 4  # and that there is no more


def test_what_torch_patches_is_asked(monkeypatch):
    """A library may replace the method of torch's class."""
    base = type(iter(DataLoader([1]))).__mro__[1]
    own, seen = base.__next__, []
    monkeypatch.setattr(base, "__next__", lambda self: seen.append(1) or own(self))
    assert len(list(PreparedDataLoader(toy.rows(6), batch_size=2))) == 3
    assert len(seen) == 4  # the last one finds that there is no more
