"""Where a loaded module continues: each kind of checkpoint, loader and position, with stand-ins for a fit."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from lightning.pytorch import LightningModule

from hf_compat.engine.windows import Windows
from hf_compat.native import loading
from hf_compat.native.loading import LoadableModule


def told(calls, name):
    return lambda *args, **kwargs: calls.append((name, *args, *sorted(kwargs.items())))


class Position(Windows):
    """Windows that are at a place of an epoch."""

    def __init__(self, calls, next_epoch=2, skip=3):
        self.calls, self.place = calls, (next_epoch, skip)

    next_epoch = property(lambda self: self.place[0])
    updates_to_skip = property(lambda self: self.place[1])

    def load_state_dict(self, state):
        self.calls.append(("loaded", state))

    def finish_epoch(self):
        self.calls.append("finished")

    @contextlib.contextmanager
    def resumed_rng(self):
        self.calls.append("rng")
        yield
        self.calls.append("rng again")


@pytest.fixture
def calls(monkeypatch):
    made = []
    for name in ("load_waiting_data_states", "settle_states", "start_from", "keep_loaded_data", "run_validation"):
        monkeypatch.setattr(loading, name, told(made, name))
    return made


def begun(calls, resume, windows, by_lightning=False, path=None, epoch=0, batches=10, accumulation=2):
    """Start a fit, and return what was done beyond the states of waiting data."""
    trainer = SimpleNamespace(
        ckpt_path=path, optimizers=["first", "second"], train_dataloader=windows, current_epoch=epoch,
        num_training_batches=batches,
    )  # fmt: skip
    module = SimpleNamespace(
        trainer=trainer, stepping=SimpleNamespace(tell_of_resuming=told(calls, "resuming")), _resume=resume,
        _lightning_resumes=by_lightning,
        steps=SimpleNamespace(args=SimpleNamespace(gradient_accumulation_steps=accumulation)),
    )  # fmt: skip
    LoadableModule.on_train_start(module)
    assert calls.pop(0) == ("load_waiting_data_states", trainer) and module._resume is None
    return [tuple("trainer" if part is trainer else part for part in one) if type(one) is tuple else one
            for one in calls]  # fmt: skip


@pytest.mark.parametrize("path", [None, "a.ckpt"])
def test_optimizers_are_told_of_a_checkpoint(path, calls):
    expected = [("resuming",), ("settle_states", path, "first"), ("settle_states", path, "second")]
    assert begun(calls, None, Position(calls), path=path) == expected * (path is not None)


@pytest.mark.parametrize(
    ("by_lightning", "epoch", "next_epoch", "validates", "expected"),
    [
        (False, 0, 2, False, [("start_from", "trainer", 2, 7, 3)]),
        (False, 3, 2, True, [("start_from", "trainer", 2, 7, 3)]),
        (True, 2, 2, False, []),
        (True, 3, 2, False, ["finished"]),
        (True, 1, 2, False, []),
        (True, 2, 2, True, ["rng", ("run_validation", "trainer"), "rng again"]),
        (True, 3, 2, True, ["finished", "rng", ("run_validation", "trainer"), "rng again"]),
    ],
)
def test_windows_continue_at_the_position(by_lightning, epoch, next_epoch, validates, expected, calls):
    resume = {"windows": "position", "updates": "7"} | ({"validates_next": True} if validates else {})
    found = begun(calls, resume, Position(calls, next_epoch), by_lightning, epoch=epoch)
    assert found == [("loaded", "position"), ("keep_loaded_data", "trainer"), *expected]


@pytest.mark.parametrize(
    ("position", "batches", "expected"),
    [
        ({"epoch": 0, "updates_done": 0}, 10, (0, 7, 0, 0)),
        ({"epoch": 0, "updates_done": 3}, 10, (0, 7, 6, 6)),
        ({"epoch": 1, "updates_done": 3}, 10, (1, 7, 6, 16)),
        ({"epoch": 1, "updates_done": 3, "micro_batches_done": 5}, 10, (1, 7, 5, 15)),
        ({"epoch": 1, "updates_done": 4}, 9, (1, 7, 8, 17)),
        ({"epoch": 1, "updates_done": 5}, 10, (2, 7, 0, 20)),
        ({"epoch": 1, "updates_done": 5}, 9, (2, 7, 0, 18)),
        ({"epoch": 1, "updates_done": 1, "is_over": True}, 10, (2, 7, 0, 20)),
        ({"epoch": 0, "updates_done": 2}, float("inf"), (0, 7, 4, 4)),
    ],
)
def test_a_plain_loader_continues_by_the_counts(position, batches, expected, calls, monkeypatch):
    kept = SimpleNamespace(**{"micro_batches_done": 0, "is_over": False} | position)
    monkeypatch.setattr(loading.DataPosition, "read", lambda state: kept if state == "position" else None)
    found = begun(calls, {"windows": "position", "updates": "7"}, ["a loader"], batches=batches)
    assert found == [("start_from", "trainer", *expected)]
    calls.clear()
    assert begun(calls, {"windows": "position", "updates": "7"}, ["a loader"], by_lightning=True) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_and_schedules_are_checked_before_lightning_gives_them_their_states(world_size, monkeypatch):
    calls = []
    monkeypatch.setattr(loading, "check_optimizer", told(calls, "optimizer"))
    monkeypatch.setattr(loading, "check_schedule", told(calls, "schedule"))
    monkeypatch.setattr(loading.WindowModule, "on_fit_start", told(calls, "started"))
    module = LoadableModule.__new__(LoadableModule)
    LightningModule.__init__(module)
    module._fabric = None
    module._trainer = SimpleNamespace(
        ckpt_path="a.ckpt", optimizers=["first"], world_size=world_size,
        lr_scheduler_configs=[SimpleNamespace(scheduler="linear"), SimpleNamespace(scheduler="cosine")],
    )  # fmt: skip
    module._loaded_optimizers, module._loaded_schedules = [{"lr": 1}, {"lr": 2}], [{"last_epoch": 3}]
    module.on_fit_start()
    assert calls == [
        ("optimizer", "a.ckpt", {"lr": 1}, "first" if world_size == 1 else None),
        ("schedule", "a.ckpt", {"last_epoch": 3}, "linear"),
        ("started", module),
    ]
    assert module._loaded_optimizers == module._loaded_schedules == ()
