"""Reading from torch's loader gives the batches of `next`, and a running profiler records each read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from helpers import toy
from hf_compat.data import loader as loaders
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


class Batches:
    """Stand for torch's iterator."""

    def __init__(self, error=None, **attributes):
        self.error = error
        self.__dict__ |= {"_next_data": lambda: self._tell("data"), "_num_yielded": 0, "_sampler_iter": ()} | attributes

    def _tell(self, way):
        if self.error is not None:
            raise self.error
        return way

    def __next__(self):
        return self._tell("next")


class Torchs(Batches):
    def __next__(self):
        return super().__next__()


Torchs.__next__.__module__ = "torch.utils.data.dataloader"


@pytest.mark.parametrize(
    ("dataset", "batches", "is_profiled", "way"),
    [
        ([1], Torchs(), False, "data"),
        ([1], Torchs(), True, "next"),
        ([1], Torchs(), None, "next"),
        ([1], Torchs(_sampler_iter=None), False, "next"),
        ([1], Torchs(_next_data=None), False, "next"),
        ([1], Batches(), False, "next"),
        (toy.Stream([1]), Torchs(), False, "next"),
    ],
)
def test_only_torchs_own_iterator_is_read_without_the_mark(monkeypatch, dataset, batches, is_profiled, way):
    monkeypatch.setattr(torch.autograd, "_profiler_enabled", None if is_profiled is None else lambda: is_profiled)
    assert PreparedDataLoader(dataset)._reader(batches)() == way and batches._num_yielded == (way == "data")


@pytest.mark.parametrize("error", [FileNotFoundError, ConnectionError, EOFError])
@pytest.mark.parametrize(
    ("workers", "text", "has_died", "is_told"),
    [
        (0, "lost", True, False),
        (1, "lost", True, True),
        (1, "lost", False, False),
        (1, "Caught in DataLoader worker process 0", True, False),
    ],
)
def test_a_connection_that_is_lost_with_its_worker_is_told(monkeypatch, error, workers, text, has_died, is_told):
    monkeypatch.setattr(loaders, "dead_among", lambda workers: [SimpleNamespace(pid=7)] * has_died)
    read = PreparedDataLoader([1], num_workers=workers)._reader(Batches(error(text)))
    with pytest.raises(RuntimeError if is_told else error, match="pid\\(s\\) 7" if is_told else text):
        read()
