"""States of Lightning callbacks in HF checkpoints: what they add, which weights they put in, and both given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
from torch import nn

from hf_compat.checkpoint.reading import Weights
from hf_compat.checkpoint.run_state import RunState


class LightningCallbacks(Protocol):
    """The callbacks of a Trainer, of which Lightning's have states of their own."""

    lightning: list[pl.Callback]


def ask_callbacks(
    callbacks: Sequence[pl.Callback], trainer: pl.Trainer, module: pl.LightningModule
) -> tuple[Weights | None, dict[str, Any]]:
    """Let Lightning callbacks add to a checkpoint, and change its weights: averages are what should be used.

    Returns:
        The model's weights where a callback has put others in their place, else None; and what was added.
    """
    asked = [callback for callback in callbacks if _overrides(callback, "on_save_checkpoint")]
    if not asked:
        return None, {}
    weights = module.state_dict()
    checkpoint: dict[str, Any] = {"state_dict": weights}
    for callback in asked:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    replaced = checkpoint.pop("state_dict")
    if replaced is weights:
        return None, checkpoint
    return {name.removeprefix("model."): value for name, value in replaced.items()}, checkpoint


def give_back_states(
    callbacks: Sequence[pl.Callback], state: RunState, trainer: pl.Trainer, module: pl.LightningModule
) -> None:
    """Give Lightning callbacks the states that they had, and what they had put into the checkpoint."""
    for callback in callbacks:
        saved = state.callbacks.get(callback.state_key)
        if saved:
            callback.load_state_dict(saved)
        if state.extras and _overrides(callback, "on_load_checkpoint"):
            callback.on_load_checkpoint(trainer, module, {"state_dict": module.state_dict(), **state.extras})


def _overrides(callback: pl.Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(pl.Callback, hook) or hook in vars(callback)


@contextlib.contextmanager
def holding(model: nn.Module, weights: Weights | None) -> Iterator[None]:
    """Let a model hold other weights for a while: those that are to be written."""
    if weights is None:
        yield
        return
    own = {name: value.clone() for name, value in model.state_dict().items()}
    if own.keys() != weights.keys():  # pruned weights, which the model holds as weights and masks
        model.__dict__["state_dict"] = lambda *args, **kwargs: dict(weights)
        try:
            yield
        finally:
            del model.__dict__["state_dict"]
        return
    model.load_state_dict(weights)
    try:
        yield
    finally:
        model.load_state_dict(own)
