"""`async_save`: the optimizer's state is copied while training goes on, and is the state of the save nevertheless."""

from __future__ import annotations

import copy
import sys
import threading
import time
import types

import pytest
import torch

from helpers import toy
from hf_compat import Trainer, TrainerCallback, set_seed
from hf_compat.errors import CheckpointWriteError
from hf_compat.runtime import device_copies as frozen_copies


@pytest.fixture
def slowly(monkeypatch):
    """Let the thread that writes take its time to copy; return how many tensors each save leaves for later."""
    copy_all, begin, counts = frozen_copies._copy_all, frozen_copies.LaterCopies.start, []

    def slow(pairs):
        if threading.current_thread().name.startswith("hf_compat-checkpoint"):
            time.sleep(0.1)
        copy_all(pairs)

    monkeypatch.setattr(frozen_copies, "_copy_all", slow)
    monkeypatch.setattr(
        frozen_copies.LaterCopies, "start", lambda self, pairs: counts.append(len(pairs)) or begin(self, pairs)
    )
    return counts


def train(make_args, folder, async_save=True, callbacks=(), trainer_class=Trainer, **options):
    set_seed(3)
    values = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "logging_strategy": "no"}
    args = make_args(output_dir=str(folder), async_save=async_save, **values, **options.pop("values", {}))
    trainer = trainer_class(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=list(callbacks), **options)
    trainer.train()
    return trainer


def states(folder):
    """Return what was saved, in one order: of every checkpoint the optimizer and the weights."""
    found = {}
    for path in sorted(folder.glob("checkpoint-*")):
        found[path.name] = torch.load(path / "optimizer.pt", weights_only=True)["state"]
        found[path.name]["weights"] = (path / "model.safetensors").read_bytes()
    return found


def same(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


class Forgets(TrainerCallback):
    """Sets the moments of the optimizer to zero in one event."""

    def __init__(self, event):
        setattr(self, event, self.forget)

    def forget(self, args, state, control, optimizer=None, **kwargs):
        for moments in optimizer.state.values():
            moments["exp_avg"].zero_()


def test_a_step_waits_for_the_copies(make_args, tmp_path, slowly):
    train(make_args, tmp_path / "now", async_save=False)
    assert not slowly
    trainer = train(make_args, tmp_path / "later")
    assert len(slowly) == 3 and all(slowly)
    assert same(states(tmp_path / "later"), states(tmp_path / "now"))
    assert not trainer.optimizer._optimizer_step_pre_hooks and len(states(tmp_path / "now")) == 3
    copy.deepcopy(trainer.callback_handler)


@pytest.mark.parametrize(
    "event", ["on_save", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step"]
)
def test_callbacks_that_change_the_state_wait(make_args, tmp_path, slowly, event):
    values = {"gradient_accumulation_steps": 2, "num_train_epochs": 3, "per_device_train_batch_size": 12}
    for name, async_save in (("now", False), ("later", True)):
        train(make_args, tmp_path / name, async_save, [Forgets(event)], values=values)
    assert same(states(tmp_path / "later"), states(tmp_path / "now"))


class ForgetsInLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        for moments in self.optimizer.state.values():
            moments["exp_avg"].zero_()
        return super().compute_loss(*args, **kwargs)


def test_a_change_within_a_step_is_named(make_args, tmp_path, slowly):
    with pytest.raises(
        CheckpointWriteError, match=r"(?s)checkpoint-2.*optimizer's state was changed.*async_save=False"
    ):
        train(make_args, tmp_path / "out", trainer_class=ForgetsInLoss)
    assert not list((tmp_path / "out").glob("checkpoint-*"))


class Slower(torch.optim.AdamW):
    """An optimizer of somebody's own: what else changes its state is not known."""


@pytest.mark.parametrize("kind", [Slower, torch.optim.AdamW])
def test_other_optimizers_are_copied_at_once(make_args, tmp_path, slowly, kind):
    train(make_args, tmp_path / "out", optimizer_cls_and_kwargs=(kind, {"lr": 1e-3}))
    assert len(slowly) == (0 if kind is Slower else 3) and len(states(tmp_path / "out")) == 3


def test_an_error_of_the_copies_is_that_of_the_save(make_args, tmp_path, monkeypatch):
    copy_all = frozen_copies._copy_all

    def fail(pairs):
        if sys._getframe(1).f_code is frozen_copies.LaterCopies.finish.__code__:
            raise MemoryError("no memory")
        copy_all(pairs)

    monkeypatch.setattr(frozen_copies, "_copy_all", fail)
    with pytest.raises(MemoryError, match="no memory"):
        train(make_args, tmp_path / "out")
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_step_of_a_script_s_own_is_not_waited_for(make_args, tmp_path, slowly):
    """Hooks would not come before it; and what a schedule puts around torch's own step is known."""
    set_seed(3)
    args = make_args(async_save=True, save_strategy="steps", save_steps=2, max_steps=4)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows())
    trainer.create_optimizer()
    own, asked = trainer.optimizer.step, []
    trainer.optimizer.step = types.MethodType(lambda self, *args: (asked.append(1), own(*args))[1], trainer.optimizer)
    trainer.train()
    assert not slowly and len(asked) == 4 and len(states(tmp_path / "out")) == 2


def test_an_interruption_of_the_training_leaves_the_copies_to_who_writes(monkeypatch):
    later, tensor = frozen_copies.LaterCopies(), torch.ones(3)
    later.begin()
    copied = frozen_copies.frozen_copy({"state": tensor}, None, later)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(frozen_copies, "_copy_all", lambda pairs: (_ for _ in ()).throw(KeyboardInterrupt))
        later.finish()
    later.result()
    assert copied["state"].tolist() == [1, 1, 1]
    tensor += 1
    later.begin()
    later.result()
