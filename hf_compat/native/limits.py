"""How a Lightning trainer of the user's own cuts a run: epochs that it ends or reloads, updates that it counts."""

from __future__ import annotations

from weakref import WeakSet

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

from hf_compat.checkpoint.run_state import ResumePoint
from hf_compat.engine.internals import fetch_without_prefetch
from hf_compat.engine.windows import Windows, WindowsWithoutLength
from hf_compat.errors import ArgumentError, UnsupportedArgument

# Trainers that were told how many of their batches make an update, for one fit.
_COUNTING: WeakSet[pl.Trainer] = WeakSet()
# Strategies of Lightning's own that shard, and the argument that does so in a Trainer of ours.
_SHARDING: dict[type[Strategy], str] = {
    FSDPStrategy: "fsdp=True",
    ModelParallelStrategy: "fsdp=True",
    DeepSpeedStrategy: "deepspeed='zero.json'",
}


def count_updates(trainer: pl.Trainer, batches: int) -> None:
    """Let a trainer count updates, not batches: in `log_every_n_steps`, loggers and `estimated_stepping_batches`.

    Args:
        trainer: It has checked its settings already.
        batches: Plain batches that make an update.
    """
    if batches > 1:
        trainer.accumulate_grad_batches = batches
        _COUNTING.add(trainer)


def accumulate_batches(trainer: pl.Trainer, batches: int) -> None:
    """Let Lightning accumulate plain batches, as the arguments say, for an optimization that is automatic.

    Args:
        trainer: Its training data are loaded: a window holds the batches of an update already.
        batches: Plain batches that make an update.
    """
    data = trainer.train_dataloader
    if not (isinstance(data, Windows) and data.gives_windows):
        count_updates(trainer, batches)


def check_accumulation(trainer: pl.Trainer, batches: int) -> None:
    """Refuse two numbers of batches that make an update: of windows it would be their product.

    Raises:
        ArgumentError: Both the arguments and the trainer have one.
    """
    if batches > 1 and trainer.accumulate_grad_batches > 1:
        raise ArgumentError(
            f"`gradient_accumulation_steps={batches}` of the arguments and "
            f"`accumulate_grad_batches={trainer.accumulate_grad_batches}` of lightning.Trainer both say what makes an "
            "update.\n\nHint: give one of them."
        )


def forget_updates(trainer: pl.Trainer) -> None:
    """Let a trainer count as it was told by its user."""
    if trainer in _COUNTING:
        trainer.accumulate_grad_batches = 1
        _COUNTING.discard(trainer)


def begin_at_epoch(data: object, epoch: int) -> None:
    """Let windows that were loaded within a fit (`reload_dataloaders_every_n_epochs`) give the order of that epoch."""
    if isinstance(data, Windows) and data.is_new and epoch:
        data.start_at(ResumePoint(epoch=epoch))


def hold_windows(data: object) -> None:
    """Let nothing be read while a fit is being set up."""
    if isinstance(data, WindowsWithoutLength):
        data.is_held = True


def read_when_due(trainer: pl.Trainer) -> None:
    """Let windows of data without a length be read from now on, each when it is trained."""
    data = trainer.train_dataloader
    if isinstance(data, WindowsWithoutLength) and data.is_held:
        data.is_held = False
        fetch_without_prefetch(trainer, data.is_at_end)


def leave_epoch(data: object) -> None:
    """Note that an epoch is over, though it has more data (`limit_train_batches`): the next one starts afresh."""
    if isinstance(data, Windows):
        data.leave_epoch(is_over=True)


def check_strategy(strategy: Strategy) -> None:
    """Refuse strategies of Lightning's own that hold parts of weights: an update of HF's clips and steps whole ones.

    Raises:
        UnsupportedArgument: The message names the argument of `hf_compat.Trainer` that does the same.
    """
    found = next((kind for kind in _SHARDING if isinstance(strategy, kind)), None)
    if found is not None:
        raise UnsupportedArgument(
            f"`strategy={type(strategy).__name__}` of lightning.Trainer cannot train an HFModule, whose updates need "
            f"whole weights.\n\nHint: `hf_compat.Trainer` with `TrainingArguments({_SHARDING[found]})` shards them; or "
            "override `training_step` with `automatic_optimization = True`."
        )
