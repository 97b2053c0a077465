"""Lightning callbacks in a Trainer's list: which can work there, and the order of both kinds.

HF's events and Lightning's hooks meet in pairs (`PAIRS`); in each pair the callbacks are called in the order of the
list, whichever kind they are. Every run of HF callbacks between Lightning ones has an `HFEvents` there.
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

# Lightning hook → HF event that is fired in it. `HFEvents` and the bridge have their hooks from here.
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

# Hooks that are never called: HF has no sanity check, and `predict` is Lightning's test loop.
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

# Lightning callbacks that work on what is HF's here, and what to write in their place.
_REFUSED: tuple[tuple[str, str, str], ...] = (
    (
        "GradientAccumulationScheduler",
        "an update is one window of `gradient_accumulation_steps` micro-batches, the whole run through",
        "set `gradient_accumulation_steps` in the arguments",
    ),
    (
        "BatchSizeFinder",
        "the batch size is the arguments'",
        "set `auto_find_batch_size=True` in the arguments, which starts again with less when memory runs out",
    ),
    (
        "LearningRateFinder",
        "the learning rate and its schedule are the arguments'",
        "set `learning_rate`; short runs with `max_steps=100` compare several",
    ),
    ("BasePredictionWriter", "`predict` returns its predictions", "write what `trainer.predict(…)` returns"),
)


def check_lightning_callback(callback: pl.Callback, model: nn.Module) -> None:
    """Refuse a Lightning callback that cannot work here; warn where a hook of it will never be called.

    Raises:
        CallbackError: It would be inert, or wrong; the message holds the way out.
    """
    _refuse(callback, model)
    # The hooks of a callback that are never called here
    # those that Lightning ships do without these hooks
    is_users = not type(callback).__module__.startswith(("lightning.", "pytorch_lightning."))
    overridden = [hook for hook in _NEVER if getattr(type(callback), hook) is not getattr(pl.Callback, hook)]
    # a LambdaCallback keeps its functions as attributes of the instance
    uncalled = [*(overridden if is_users else []), *(hook for hook in _NEVER if hook in vars(callback))]
    if uncalled:
        warnings.warn(
            f"{type(callback).__name__}: {', '.join(uncalled)} will not be called: HF has no sanity check, and "
            "`predict` runs Lightning's test loop (`on_test_*`).",
            HfCompatWarning,
            stacklevel=5,
        )


def check_state_keys(callbacks: Iterable[pl.Callback]) -> None:
    """Refuse callbacks whose states would stand under one name in a checkpoint.

    Raises:
        CallbackError: There are two.
    """
    known: set[str] = set()
    for callback in callbacks:
        if type(callback).state_dict is pl.Callback.state_dict:
            continue
        if callback.state_key in known:
            raise CallbackError(
                f"There are two {type(callback).__name__} callbacks with the `state_key` {callback.state_key!r}: a "
                "checkpoint would keep the state of one.\n\nHint: set them up differently, or override `state_key`."
            )
        known.add(callback.state_key)


def _refuse(callback: pl.Callback, model: nn.Module) -> None:
    name = type(callback).__name__
    if isinstance(callback, TrainerCallback):
        raise CallbackError(
            f"{name} is a Lightning and an HF callback at once, and `on_train_end` means two things.\n\n"
            "Hint: make it two classes and pass both."
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
    """Fires an event for one segment of the HF callbacks: the bridge."""

    def fire_for_hook(self, hook: str, segment: int, batch: Batch = None, outputs: STEP_OUTPUT = None) -> None: ...


class HFEvents(pl.Callback):
    """One segment of the HF callbacks, called between two Lightning callbacks.

    Args:
        bridge: Fires the events.
        segment: Which of the segments that Lightning callbacks divide the list of HF callbacks into; 0 is the first.
    """

    def __init__(self, bridge: EventSource, segment: int) -> None:
        self.bridge = bridge
        self.segment = segment


def _firing(hook: str) -> Callable[..., None]:
    """Return the method of `HFEvents` for a hook: it hands on the batch and the outputs, where the hook has them."""
    names = tuple(inspect.signature(getattr(pl.Callback, hook)).parameters)[3:]

    def fire(self: HFEvents, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Batch) -> None:
        known = dict(zip(names, given, strict=False))
        self.bridge.fire_for_hook(hook, self.segment, known.get("batch"), known.get("outputs"))

    return functools.wraps(getattr(pl.Callback, hook))(fire)


for _hook in PAIRS:
    setattr(HFEvents, _hook, _firing(_hook))


class CallbackOrder:
    """The order in which callbacks of both kinds were given."""

    def __init__(self) -> None:
        self.entries: list[pl.Callback | Callback] = []

    def add(self, callback: pl.Callback | Callback) -> None:
        """Append a callback that was given now."""
        self.entries.append(callback)

    def remove(self, callback: pl.Callback | Callback) -> None:
        """Forget a callback."""
        self.entries = [entry for entry in self.entries if entry is not callback]

    def segments(self, hf_callbacks: Iterable[Callback]) -> list[frozenset[int]]:
        """Return the HF callbacks before, between and after the Lightning ones, as sets of `id`.

        Callbacks that were put into the handler behind the Trainer's back come last.
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
        """Return what Lightning gets: before each of its callbacks a segment of the HF ones, at the end the bridge."""
        if not lightning_callbacks:
            return [bridge]
        arranged: list[pl.Callback] = [make(0)]
        for index, callback in enumerate(lightning_callbacks, start=1):
            arranged.append(callback)
            if index < len(lightning_callbacks):
                arranged.append(make(index))
        return [*arranged, bridge]
