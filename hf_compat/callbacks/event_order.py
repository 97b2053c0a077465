"""Lightning callbacks in a Trainer's list: which can work there, and the order of both kinds.

`PAIRS` maps Lightning's hooks to HF's events. Within a pair, callbacks of both kinds are called in the order of the
list. Each group of HF callbacks between two Lightning ones is represented by an `HFEvents`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Protocol

import lightning.pytorch as pl
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn

from hf_compat.callbacks.manual_optimization import check_backbone
from hf_compat.data.types import Batch
from hf_compat.errors import CallbackError, HfCompatWarning
from hf_compat.hf.callbacks import Callback, TrainerCallback

# Lightning hook → the HF event that it fires. `HFEvents` and the bridge get their hooks from this table.
PAIRS = {
    "on_train_start": "on_train_begin",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_batch_start": "on_step_begin",
    "on_before_optimizer_step": "on_pre_optimizer_step",
    "on_train_batch_end": "on_step_end",
    "on_train_epoch_end": "on_epoch_end",
    "on_validation_batch_end": "on_prediction_step",
    "on_test_batch_end": "on_prediction_step",
}

# Hooks that are never called. HF has no sanity check, and `predict` runs Lightning's test loop.
_NEVER = (
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_predict_start",
    "on_predict_end",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
)

# Lightning callbacks that would change what HF's arguments decide, and the alternative for each.
_REFUSED: tuple[tuple[str, str, str], ...] = (
    (
        "GradientAccumulationScheduler",
        "an update always takes one window of `gradient_accumulation_steps` micro-batches",
        "set `gradient_accumulation_steps` in the arguments",
    ),
    (
        "BatchSizeFinder",
        "the arguments set the batch size",
        "set `auto_find_batch_size=True` in the arguments, which starts again with less when memory runs out",
    ),
    (
        "LearningRateFinder",
        "the arguments set the learning rate and its schedule",
        "set `learning_rate`, and compare several in short runs with `max_steps=100`",
    ),
    ("BasePredictionWriter", "`predict` returns its predictions", "write the result of `trainer.predict(…)`"),
)


def check_lightning_callback(callback: pl.Callback, model: nn.Module) -> None:
    """Refuse a Lightning callback that cannot work here. Warn about hooks that are never called.

    Raises:
        CallbackError: It would have no effect or a wrong one. The message names an alternative.
    """
    _refuse(callback, model)
    # Lightning's own callbacks work without the hooks that are never called here
    is_users = not type(callback).__module__.startswith(("lightning.", "pytorch_lightning."))
    overridden = [hook for hook in _NEVER if getattr(type(callback), hook) is not getattr(pl.Callback, hook)]
    # a LambdaCallback has its functions as instance attributes
    uncalled = [*(overridden if is_users else []), *(hook for hook in _NEVER if hook in vars(callback))]
    if uncalled:
        warnings.warn(
            f"{type(callback).__name__}: {', '.join(uncalled)} will not be called. HF has no sanity check, and "
            "`predict` runs Lightning's test loop (`on_test_*`).",
            HfCompatWarning,
            stacklevel=5,
        )


def check_state_keys(callbacks: Iterable[pl.Callback]) -> None:
    """Refuse callbacks whose states would have the same key in a checkpoint.

    Raises:
        CallbackError: Two callbacks have the same key.
    """
    known: set[str] = set()
    for callback in callbacks:
        if type(callback).state_dict is pl.Callback.state_dict:
            continue
        if callback.state_key in known:
            raise CallbackError(
                f"There are two {type(callback).__name__} callbacks with the `state_key` {callback.state_key!r}. A "
                "checkpoint would keep the state of one.\n\nHint: set them up differently, or override `state_key`."
            )
        known.add(callback.state_key)


def _refuse(callback: pl.Callback, model: nn.Module) -> None:
    name = type(callback).__name__
    if isinstance(callback, TrainerCallback):
        raise CallbackError(
            f"{name} is both a Lightning and an HF callback, and `on_train_end` has two meanings.\n\n"
            "Hint: split it into two classes and pass both."
        )
    for refused, why, hint in _REFUSED:
        if isinstance(callback, getattr(lightning_callbacks, refused)):
            raise CallbackError(f"Lightning's {name} cannot work in this Trainer: {why}.\n\nHint: {hint}.")
    check_backbone(callback, model)
    if isinstance(callback, lightning_callbacks.StochasticWeightAveraging) and any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    ):
        raise CallbackError(
            "Lightning's StochasticWeightAveraging runs one more epoch for models with batch norm, beyond the updates "
            "that the arguments ask for.\n\nHint: use lightning's WeightAveraging, which averages buffers too."
        )


class EventSource(Protocol):
    """Fires an event for one segment of the HF callbacks, as the bridge does."""

    def fire_for_hook(self, hook: str, segment: int, batch: Batch = None, outputs: STEP_OUTPUT = None) -> None: ...


class HFEvents(pl.Callback):
    """One segment of the HF callbacks, between two Lightning callbacks.

    Args:
        bridge: Fires the events.
        segment: Index of the segment. Lightning callbacks divide the HF callbacks into segments, starting with 0.
    """

    def __init__(self, bridge: EventSource, segment: int) -> None:
        self.bridge = bridge
        self.segment = segment


def _firing(hook: str) -> Callable[..., None]:
    """Make the method of `HFEvents` for a hook. It passes the hook's batch and outputs on."""
    names = tuple(inspect.signature(getattr(pl.Callback, hook)).parameters)[3:]

    def fire(self: HFEvents, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Batch) -> None:
        known = dict(zip(names, given, strict=False))
        self.bridge.fire_for_hook(hook, self.segment, known.get("batch"), known.get("outputs"))

    return functools.wraps(getattr(pl.Callback, hook))(fire)


for _hook in PAIRS:
    setattr(HFEvents, _hook, _firing(_hook))


class CallbackOrder:
    """The order in which callbacks of both kinds were added."""

    def __init__(self) -> None:
        self.entries: list[pl.Callback | Callback] = []

    def add(self, callback: pl.Callback | Callback) -> None:
        """Append a callback."""
        self.entries.append(callback)

    def remove(self, callback: pl.Callback | Callback) -> None:
        """Remove a callback."""
        self.entries = [entry for entry in self.entries if entry is not callback]

    def segments(self, hf_callbacks: Iterable[Callback]) -> list[frozenset[int]]:
        """Return the HF callbacks before, between and after the Lightning ones, as sets of `id`.

        Callbacks that were added to the handler directly come last.
        """
        segments: list[set[int]] = [set()]
        segment_of: dict[int, int] = {}
        for entry in self.entries:
            if isinstance(entry, pl.Callback):
                segments.append(set())
            else:
                segment_of[id(entry)] = len(segments) - 1
        for callback in hf_callbacks:
            segments[segment_of.get(id(callback), len(segments) - 1)].add(id(callback))
        return [frozenset(segment) for segment in segments]

    def arrange(
        self, lightning_callbacks: list[pl.Callback], bridge: pl.Callback, make: Callable[[int], pl.Callback]
    ) -> list[pl.Callback]:
        """Return the list for Lightning: HF segments, each before one of its callbacks, then the bridge."""
        if not lightning_callbacks:
            return [bridge]
        arranged: list[pl.Callback] = [make(0)]
        for index, callback in enumerate(lightning_callbacks, start=1):
            arranged.append(callback)
            if index < len(lightning_callbacks):
                arranged.append(make(index))
        return [*arranged, bridge]
