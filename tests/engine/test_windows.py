"""The windows of an epoch, their positions, and where a resumed pass goes on, without a Trainer."""

import logging
import pickle
from collections import deque
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hf_compat.checkpoint.run_state import DataPosition, ResumePoint
from hf_compat.data.loader import PreparedDataLoader
from hf_compat.engine.windows import Window, Windows, as_plain
from hf_compat.errors import DataError, OverrideError
from hf_compat.plan.translate import ENDLESS_EPOCHS, RunCounts
from hf_compat.runtime.seeding import read_rng


class Numbers(IterableDataset):
    """A stream of `count` numbers."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def read(batches, count, device):
    return list(islice(batches, count)), None


def make(loader, size=2, announced=None, endless=False, sequence=None, read=read, **options):
    announced = len(loader) if announced is None else announced
    epochs, updates = (ENDLESS_EPOCHS if endless else 3), -(-announced // size)
    counts = RunCounts(epochs, updates, announced, announced, size, announced, updates * 3)
    args = SimpleNamespace(gradient_accumulation_steps=size, device=torch.device("cpu"))
    steps = SimpleNamespace(args=args, accelerator=SimpleNamespace(sequence=sequence), get_batch_samples=read)
    return Windows(loader, steps=steps, counts=counts, **options)


def numbers(window):
    return [int(batch) for batch in window]


def prepared(count, **options):
    return PreparedDataLoader(range(count), batch_size=1, **options)


def shuffled(count):
    return DataLoader(range(count), batch_size=1, shuffle=True)


@pytest.mark.parametrize("loader", [range, prepared, lambda n: DataLoader(range(n), batch_size=1)])
@pytest.mark.parametrize(
    ("count", "size", "seen"),
    [
        (4, 2, [([0, 1], True, 0.5, False), ([2, 3], True, 1.0, True)]),
        (5, 2, [([0, 1], True, 0.4, False), ([2, 3], True, 0.8, False), ([4], True, 1.0, True)]),
        (3, 1, [([0], True, 1 / 3, False), ([1], True, 2 / 3, False), ([2], True, 1.0, True)]),
        (2, 3, [([0, 1], True, 1.0, True)]),
    ],
)
def test_an_epoch_is_cut_into_windows(loader, count, size, seen):
    windows, found = make(loader(count), size), []
    assert len(windows) == len(seen) and not windows.saw_data
    for window in windows:
        at = windows.position()
        assert (at.epoch, at.is_open, at.micro_batches_done) == (
            0,
            True,
            sum(len(one[0]) for one in found) + len(window),
        )
        assert at.is_over is windows.is_at_end() and not window.is_trained
        found.append((numbers(window), window.is_complete, window.epoch_progress, windows.is_at_end()))
    assert found == seen and windows.saw_data
    windows.finish_epoch()
    after = windows.position()
    assert (after.epoch, after.is_open, after.is_over, after.micro_batches_done) == (1, False, False, 0)
    assert [numbers(window) for window in windows] == [one[0] for one in seen]
    assert windows.position().epoch == 1 and windows.next_epoch == 2


@pytest.mark.parametrize("loader", [shuffled, lambda n: prepared(n, shuffle=True), lambda n: prepared(n)])
@pytest.mark.parametrize("before_last", [False, True])
@pytest.mark.parametrize("made", [1, 2, 3, 4, 5])
def test_a_resumed_pass_reads_what_was_left(loader, before_last, made):
    torch.manual_seed(3)
    windows = make(loader(5))
    whole = iter_epochs(windows, 2)
    head = [next(whole) for _ in range(made)]
    stored = windows.position(before_last=before_last).to_plain()
    left = head[made - before_last :] + list(whole)
    torch.manual_seed(99)
    resumed = make(loader(5))
    resumed.load_state_dict(stored)
    assert list(iter_epochs(resumed, 2 - resumed.next_epoch)) == left


def iter_epochs(windows, epochs):
    for _ in range(epochs):
        for window in windows:
            yield numbers(window)
        windows.finish_epoch()


@pytest.mark.parametrize(
    ("trained", "before_last", "if_untrained", "done"),
    [
        (False, False, False, 4),
        (True, False, True, 4),
        (False, True, False, 2),
        (True, True, False, 2),
        (False, True, True, 2),
        (True, True, True, 4),
    ],
)
def test_the_last_window_is_read_again_where_it_was_not_trained(trained, before_last, if_untrained, done):
    windows = make(prepared(6))
    passing = iter(windows)
    next(passing)
    next(passing).is_trained = trained
    at = windows.position(before_last=before_last, if_untrained=if_untrained)
    assert at.micro_batches_done == done
    assert (at.lookahead is None) is (done == 2)  # what was read ahead follows the window that is read again


@pytest.mark.parametrize("loader", [range, prepared])
def test_the_last_window_of_an_epoch_that_is_not_trained_is_not_its_end(loader):
    windows = make(loader(4))
    *_, last = windows
    assert windows.is_at_end() and windows.position().is_over and not windows.position(before_last=True).is_over
    windows.rewind(last)
    assert not windows.is_at_end() and not windows.position().is_over
    assert windows.position().micro_batches_done == 2 and windows.position().lookahead is None
    assert windows.position(epoch_is_over=True).is_over


@pytest.mark.parametrize("is_over", [False, True])
def test_a_pass_that_is_left_gives_no_window_more(is_over):
    windows = make(prepared(6))
    passing = iter(windows)
    next(passing)
    windows.leave_epoch(is_over)
    windows.leave_epoch(False)  # what is over stays over
    assert list(passing) == [] and windows.position().is_over is is_over
    windows.finish_epoch()
    at = windows.position()
    assert (at.epoch, at.is_open, at.micro_batches_done) == ((1, False, 0) if is_over else (0, True, 2))


OPEN, CLOSED = DataPosition(epoch=1, is_open=True, micro_batches_done=5), DataPosition(epoch=1)


@pytest.mark.parametrize(
    ("start", "done", "to_skip", "replaces"),
    [
        (ResumePoint(), 0, 0, False),
        (ResumePoint(epoch=2), 0, 0, False),
        (ResumePoint(epoch=2, skip_micro_batches=5), 5, 2, False),
        (ResumePoint(skip_micro_batches=5), 5, 2, False),
        (ResumePoint(epoch=1, position=OPEN, skip_micro_batches=3), 5, 2, True),
        (ResumePoint(epoch=1, position=CLOSED, skip_micro_batches=3), 3, 1, True),
        (ResumePoint(position=DataPosition(epoch=0, is_open=True, micro_batches_done=3)), 3, 1, False),
        (ResumePoint(position=DataPosition(epoch=0, is_open=True), epoch_is_over=True), 0, 0, True),
        (ResumePoint(epoch=1, position=OPEN, epoch_is_over=True), 5, 0, True),
    ],
)
def test_a_start_tells_what_is_done(start, done, to_skip, replaces):
    windows = make(prepared(6), start=start)
    assert (windows._done, windows.updates_to_skip, windows.next_epoch) == (done, to_skip, start.epoch)
    assert windows.loader.replaces_workers is replaces


@pytest.mark.parametrize(
    ("seed", "has_shuffler", "kept"), [(7, True, 7), (None, True, 5), (7, False, None), (0, True, 0)]
)
def test_the_seed_of_the_orders_is_resumed(seed, has_shuffler, kept):
    loader = prepared(4)
    loader.shuffler = SimpleNamespace(initial_seed=5) if has_shuffler else None
    windows = make(loader, start=ResumePoint(shuffle_seed=seed))
    assert getattr(loader.shuffler, "initial_seed", None) == kept == windows.position().shuffle_seed


def test_the_seed_of_a_wrapped_loaders_orders_is_saved():
    class Wraps:
        def __init__(self, loader):
            self.loader = loader

        def __len__(self):
            return len(self.loader)

        def __getattr__(self, name):
            return getattr(self.loader, name)

    loader = prepared(4)
    loader.shuffler = SimpleNamespace(initial_seed=5)
    assert make(Wraps(loader)).position().shuffle_seed == 5


@pytest.mark.parametrize(
    ("start", "epoch", "begins"),
    [
        (ResumePoint(), 2, 2),
        (ResumePoint(), 0, 0),
        (ResumePoint(epoch=1), 2, 1),
        (ResumePoint(skip_micro_batches=2), 2, 2),
        (ResumePoint(position=DataPosition(epoch=0)), 2, 0),
    ],
)
def test_lightnings_epoch_counts_where_nothing_is_resumed(start, epoch, begins):
    windows = make(range(4), start=start)
    windows.begin_at(epoch)
    assert windows.next_epoch == begins
    next(iter(windows))
    windows.begin_at(5)
    assert windows.next_epoch == begins + 1  # a pass has begun


@pytest.mark.parametrize(
    ("start", "epoch", "is_open"),
    [
        (ResumePoint(epoch=1, position=OPEN, epoch_is_over=True), 2, False),
        (ResumePoint(epoch=1, position=OPEN), 1, True),
        (ResumePoint(epoch=1, epoch_is_over=True), 1, False),
    ],
)
def test_an_epoch_of_which_only_the_end_is_left_is_finished(start, epoch, is_open):
    windows = make(range(6), start=start)
    windows.finish_epoch()
    at = windows.position()
    assert (at.epoch, at.is_open, windows.next_epoch) == (epoch, is_open, epoch)
    assert bool(list(windows)) is (start.position is not None)


def test_a_resumed_epoch_that_is_over_gives_its_end_alone():
    windows = make(prepared(6), start=ResumePoint(epoch=1, position=OPEN, epoch_is_over=True))
    assert list(windows) == [] and windows.saw_data and windows.next_epoch == 2
    windows.finish_epoch()
    assert [numbers(one) for one in windows] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("start", "order"),
    [
        (ResumePoint(), ["restored", "started", "read"]),
        (ResumePoint(skip_micro_batches=2), ["started", "read", "restored"]),
        (
            ResumePoint(position=DataPosition(epoch=0, is_open=True, micro_batches_done=2)),
            ["started", "restored", "read"],
        ),
        (ResumePoint(position=DataPosition(epoch=0)), ["restored", "started", "read"]),
        (ResumePoint(position=OPEN, epoch_is_over=True), ["restored"]),
    ],
)
def test_random_states_are_restored_once_the_data_is_in_place(start, order):
    seen = []

    class Told:
        def __len__(self):
            return 6

        def __iter__(self):
            seen.append("started")
            return iter(range(6))

    def reading(batches, count, device):
        seen.append("read")
        return read(batches, count, device)

    windows = make(Told(), read=reading, start=start, restore_random_states=lambda: seen.append("restored"))
    next(iter(windows), None)
    assert seen == order
    list(windows)
    assert seen.count("restored") == 1


@pytest.mark.parametrize("restores", [False, True])
def test_states_of_the_start_are_set_where_nobody_restores_them(restores):
    torch.manual_seed(4)
    states = read_rng()
    expected = torch.rand(1)
    start = ResumePoint(position=DataPosition(epoch=0), rng=states)
    windows = make(range(4), start=start, restore_random_states=(lambda: torch.manual_seed(8)) if restores else None)
    next(iter(windows))
    drawn = torch.rand(1)
    assert torch.equal(drawn, torch.rand(1, generator=torch.Generator().manual_seed(8)) if restores else expected)


@pytest.mark.parametrize(
    "start",
    [ResumePoint(), ResumePoint(position=CLOSED), ResumePoint(rng=read_rng()), ResumePoint(position=CLOSED, rng={})],
)
def test_draws_before_the_run_goes_on_are_part_of_it(start):
    torch.manual_seed(1)
    if start.rng == {}:
        start = ResumePoint(position=CLOSED, rng=read_rng())
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    windows = make(range(4), start=start)
    is_resumed = start.position is not None and start.rng is not None
    with windows.resumed_rng():
        seeded = torch.Generator().manual_seed(1 if is_resumed else 2)
        assert torch.equal(torch.rand(1), torch.rand(1, generator=seeded))
    drawn = torch.random.get_rng_state()
    assert not torch.equal(drawn, before)
    for _ in windows:
        break
    states_set = start.rng is not None and not is_resumed
    assert torch.equal(torch.random.get_rng_state(), drawn) is not states_set
    if is_resumed:
        assert windows._epoch_rng is not None and torch.equal(windows._epoch_rng["cpu"], drawn)


@pytest.mark.parametrize(
    ("count", "announced", "endless", "warned"), [(3, 6, False, 1), (6, 6, False, 0), (3, 6, True, 0), (4, 6, False, 1)]
)
def test_data_that_ends_early_is_told_once(caplog, count, announced, endless, warned):
    windows = make(DataLoader(Numbers(count), batch_size=1), announced=announced, endless=endless)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            passed = [(numbers(one), one.is_complete) for one in windows]
            assert (
                passed
                == [([0, 1], True), *([([2], False)] if count == 3 else [([2, 3], True)]), ([4, 5], True)][
                    : (count + 1) // 2
                ]
            )
            assert windows.position().is_over is (count < announced or not endless)
            windows.finish_epoch()
    told = [one for one in caplog.records if "announces 6 micro-batches (6 samples)" in one.getMessage()]
    assert len(told) == warned and all(f"this one had {count}." in one.getMessage() for one in told)


@pytest.mark.parametrize(("count", "size", "refused"), [(2, 3, True), (3, 3, False), (0, 3, False), (4, 3, False)])
def test_an_epoch_without_an_update_is_refused(count, size, refused):
    windows = make(DataLoader(Numbers(count), batch_size=1), size, announced=9, endless=True)
    if not refused:
        assert len(list(windows)) == -(-count // size)
        return_to = make(DataLoader(Numbers(count), batch_size=1), size, announced=9, endless=True)
        assert return_to.saw_data is False
    else:
        with pytest.raises(
            DataError, match=f"gave {count} micro-batches, fewer than the `gradient_accumulation_steps={size}`"
        ):
            list(windows)


def test_a_resumed_epoch_may_end_within_a_window():
    start = ResumePoint(skip_micro_batches=3)
    windows = make(DataLoader(Numbers(4), batch_size=1), 3, announced=9, endless=True, start=start)
    assert [(numbers(one), one.is_complete) for one in windows] == [([3], False)]


@pytest.mark.parametrize("returned", [None, 3, ([1], 2, 3), [[1]]])
def test_what_is_no_pair_is_named(returned):
    with pytest.raises(OverrideError, match="`get_batch_samples` returned"):
        next(iter(make(range(4), read=lambda *_: returned)))


def test_a_held_pass_reads_nothing():
    windows = make(range(4))
    windows.is_held = True
    (window,) = windows
    assert len(window) == 0 and not window.is_complete and window.epoch_progress == 0.0
    windows.is_held = False
    assert windows.position().is_open is False and len(list(windows)) == 2


def test_windows_have_a_length_unless_lightning_may_not_ask():
    assert len(make(range(5))) == 3
    with pytest.raises(TypeError, match="no length"):
        len(make(range(5), has_length=False))


@pytest.mark.parametrize(
    ("stored", "start"),
    [
        ({"epoch": 1, "updates_done": 2}, (1, 4, False, None)),
        ({"epoch": 1, "is_open": True, "micro_batches_done": 4}, (1, 4, False, 4)),
        ({"epoch": 1, "is_open": True, "micro_batches_done": 6}, (1, 6, True, 6)),
        ({"epoch": 1, "is_open": True, "micro_batches_done": 2, "is_over": True}, (1, 2, True, 2)),
        ({"epoch": 1, "is_open": False, "is_over": True}, (1, 0, False, 0)),
    ],
)
def test_a_stored_position_is_where_the_pass_starts(stored, start):
    windows = make(range(6))
    windows.load_state_dict(DataPosition(**stored).to_plain())
    at = windows._start
    done = None if at.position is None else at.position.micro_batches_done
    assert (windows.next_epoch, windows._done, at.epoch_is_over, done) == start


class Kept:
    """A loader with a state of its own, as torchdata's."""

    batch_size = 3

    def __init__(self, state=None):
        self.loaded, self.epochs = [], []
        self.state_dict = lambda: {"at": 1} if state is None else state

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(range(self.loaded[-1]["at"] if self.loaded else 0, 6))

    def load_state_dict(self, state):
        self.loaded.append(state)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_a_loader_that_knows_its_position_is_asked_for_it():
    loader = Kept({"at": 2})
    windows = make(loader)
    next(iter(windows))
    at = windows.position()
    assert at.source == {"at": 2} and at.lookahead is None and at.micro_batch_size == 3
    other = make(Kept())
    other.load_state_dict(at.to_plain())
    assert [numbers(one) for one in other] == [[2, 3], [4, 5]] and other.loader.loaded == [{"at": 2}]
    assert loader.epochs == [0] and other.loader.epochs == [0]
    windows.rewind(windows._last)
    assert windows.position().source is None
    del loader.state_dict
    assert make(loader).position().source is None


def test_a_closed_pass_holds_nothing():
    windows = make(prepared(6))
    passing = iter(windows)
    next(passing)
    under_way = windows._pass
    windows.close()
    assert windows._pass is None and windows._last is None and windows.loader.lookahead is None
    assert under_way.gi_frame is None
    windows = make(range(6))
    next(iter(windows))
    windows.close()
    assert windows._pass is None


def test_a_copy_has_no_pass():
    windows = make(range(6))
    next(iter(windows))
    windows.steps.get_batch_samples = None
    copied = pickle.loads(pickle.dumps({**windows.__getstate__(), "steps": None}))
    assert copied["_pass"] is None and copied["_shared"] is None and copied["_done"] == 2


def test_names_give_the_last_micro_batch():
    window = Window([{"x": 1}, {"x": 2, "y": 3}], None, True, 0.5)
    assert (
        window["x"] == 2 and window[0] == {"x": 1} and window[:1] == [{"x": 1}] and "y" in window and "z" not in window
    )
    assert list(window.keys()) == ["x", "y"] and len(window) == 2 and [*window][1] == window.as_batch()
    window.change_batches(lambda batch: {"x": batch["x"] + 1})
    assert [one["x"] for one in window] == [2, 3]
    window.poses_as_batch = False
    with pytest.raises(OverrideError, match="window of 2 micro-batches"):
        window["x"]
    window.micro_batches = window.micro_batches[:1]
    assert window["x"] == 2


@pytest.mark.parametrize(
    ("data", "is_kept"),
    [
        ({"a": [1, (2.0, "s", None, True)]}, True),
        (torch.ones(1), True),
        ({"a": object()}, False),
        ([{1, 2}], False),
        (None, True),
    ],
)
def test_plain_data_is_kept(data, is_kept):
    kept = as_plain(data)
    assert (kept is not None) is (is_kept and data is not None)
    if isinstance(data, dict) and is_kept:
        assert kept == {"a": [1, [2.0, "s", None, True]]}


class Exchange:
    """Stands in for the exchange of two processes that share sequences: each batch comes as two parts."""

    def __init__(self, batches, model):
        self.batches, self.micro_batches = iter(batches), deque()

    def __iter__(self):
        return self

    def __next__(self):
        if not self.micro_batches:
            batch = next(self.batches)
            self.micro_batches.extend([batch * 10, batch * 10 + 1])
        return self.micro_batches.popleft()


def shared(loader, size, **options):
    windows = make(loader, size, announced=2 * len(loader), sequence=SimpleNamespace(sp_size=2), **options)
    windows.steps.accelerator.deepspeed_ulysses_dl_adapter = Exchange
    windows.steps.model_wrapped = None
    return windows


@pytest.mark.parametrize("made", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_of_a_shared_batch_are_resumed(size, made):
    windows = shared(prepared(4), size)
    passing = iter_epochs(windows, 1)
    head = [one for _, one in zip(range(made), passing, strict=False)]
    at = windows.position()
    done = sum(map(len, head))
    assert at.micro_batches_done == done and (at.shared is not None) is (done % 2 == 1)
    resumed = shared(prepared(4), size)
    resumed.load_state_dict(at.to_plain())
    left = list(iter_epochs(resumed, 1))
    whole = [10 * batch + part for batch in range(4) for part in range(2)]
    assert sum(head + left, []) == whole
