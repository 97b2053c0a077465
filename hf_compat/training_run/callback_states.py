"""Save and restore the states of Lightning callbacks in HF checkpoints, including weights that they replace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
from torch import nn

from hf_compat.checkpoint.reading import Weights
from hf_compat.checkpoint.run_state import RunState


class LightningCallbacks(Protocol):
    """A Trainer's callbacks, of which Lightning's have states."""

    lightning: list[pl.Callback]


def collect_callback_entries(
    callbacks: Sequence[pl.Callback], trainer: pl.Trainer, module: pl.LightningModule
) -> tuple[Weights | None, dict[str, Any]]:
    """Call `on_save_checkpoint` of Lightning callbacks, which may replace the weights, for instance by averages.

    Returns:
        The model's weights if a callback has replaced them, else None. Then the added entries.
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


def restore_callback_states(
    callbacks: Sequence[pl.Callback], state: RunState, trainer: pl.Trainer, module: pl.LightningModule
) -> None:
    """Load the callbacks' states and the entries that they added to the checkpoint."""
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
    """Let a model hold other weights within the context, so that they can be written."""
    if weights is None:
        yield
        return
    own = {name: value.clone() for name, value in model.state_dict().items()}
    if own.keys() != weights.keys():  # pruned weights, for which the model has weights and masks
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
