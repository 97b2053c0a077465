"""`CallbackSet` holds a Trainer's callbacks of both kinds in one order, and their loggers.

Lightning's callbacks are written for automatic optimization, where one batch is one backward pass. Those that would
have no effect here, or a wrong one, are refused before training.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_compat.callbacks.loggers import HistoryLogger, LoggerCallback, adopt, experiment_of, reporting_callbacks
from hf_compat.data.tree import nested_detach
from hf_compat.data.types import Batch, ModelOutput
from hf_compat.engine.internals import reset_weight_averaging
from hf_compat.errors import ArgumentError, CallbackError, HfCompatWarning
from hf_compat.hf.builtin_callbacks import DefaultFlowCallback, JITCheckpointCallback, PrinterCallback, ProgressCallback
from hf_compat.hf.callbacks import Callback, CallbackHandler, TrainerCallback, callback_kind
from hf_compat.hf.state import TrainerState, is_exportable
from hf_compat.interop.patching import global_of_trainer
from hf_compat.interop.transformers_models import known_to_transformers, notebooks_callback
from hf_compat.runtime.inspection import is_replaced
from hf_compat.training_run.run import RunHost

if TYPE_CHECKING:
    from hf_compat.callbacks.bridge import HFBridge

logger = logging.getLogger(__name__)

# Callbacks that would change what a native module's arguments decide, and the alternative for each.
_REFUSED_NATIVELY = (
    (
        "GradientAccumulationScheduler",
        "an update always takes one window of `gradient_accumulation_steps` micro-batches",
        "set `gradient_accumulation_steps` in the arguments",
    ),
    (
        "BatchSizeFinder",
        "the arguments set the batch size",
        "set `per_device_train_batch_size` in the arguments, or let `auto_find_batch_size=True` of "
        "`hf_compat.Trainer` find one that fits",
    ),
    (
        "LearningRateFinder",
        "the arguments set the learning rate and its schedule",
        "set `learning_rate` and compare several in short fits with `max_steps=100`, or use `hyperparameter_search` of "
        "`hf_compat.Trainer`",
    ),
)


def refuse_native(callbacks: list[pl.Callback], model: nn.Module) -> None:
    """Refuse a `lightning.Trainer`'s callbacks that cannot work with an HFModule.

    A callback added by a `Tuner` is removed first, as the trainer may fit again after the refusal.

    Raises:
        CallbackError: A callback is refused. The message names an alternative.
    """
    for callback in list(callbacks):
        for refused, why, hint in _REFUSED_NATIVELY:
            if isinstance(callback, getattr(lightning_callbacks, refused)):
                if getattr(callback, "_early_exit", False):
                    callbacks.remove(callback)
                raise CallbackError(
                    f"Lightning's {type(callback).__name__} cannot work with an HFModule: {why}.\n\nHint: {hint}."
                )
        check_backbone(callback, model)


def check_backbone(callback: pl.Callback, model: nn.Module) -> None:
    """Refuse BackboneFinetuning for a model without a backbone.

    Raises:
        CallbackError: The model has none.
    """
    if isinstance(callback, lightning_callbacks.BackboneFinetuning) and backbone_of(model) is None:
        raise CallbackError(
            f"BackboneFinetuning unfreezes the model's `backbone`, and {type(model).__name__} has none.\n\n"
            "Hint: name the part `backbone`, or write a BaseFinetuning that freezes parts of `pl_module.model`."
        )


def backbone_of(model: nn.Module) -> nn.Module | None:
    """Return a model's `backbone`, or the base of a transformers model. None if it has neither."""
    for name in ("backbone", "base_model"):
        part = getattr(model, name, None)
        if isinstance(part, nn.Module) and part is not model:
            return part
    return None


def prepare_lightning_callbacks(trainer: pl.Trainer, module: pl.LightningModule, model: nn.Module) -> None:
    """Prepare module and callbacks for Lightning's own callbacks, before these are set up."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        if trainer.state.fn == "fit":
            reset_weight_averaging(callback)
        if isinstance(callback, lightning_callbacks.BackboneFinetuning) and not hasattr(module, "backbone"):
            module.__dict__["backbone"] = backbone_of(model)  # not as a submodule, which would duplicate its weights
        if isinstance(callback, ModelCheckpoint) and not module.automatic_optimization:
            _save_as_in_automatic_optimization(callback)


def unfreeze_optimized(trainer: pl.Trainer) -> None:
    """Unfreeze parameters that a resumed BaseFinetuning has returned to the optimizer. It unfreezes them only once.

    (lightning 2.6.6 freezes them again in `setup`. Remove it when a resumed callback unfreezes them.)
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    if not any(isinstance(callback, lightning_callbacks.BaseFinetuning) for callback in callbacks):
        return
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(True)


def _save_as_in_automatic_optimization(callback: ModelCheckpoint) -> None:
    """Make a ModelCheckpoint treat the end of a batch as in automatic optimization.

    In manual optimization it ignores `train_time_interval`. It also warns that a checkpoint holds the weights after the
    update, which is intended here as in HF. (lightning 2.6.6. Remove it when both are gone.)
    """
    if type(callback).on_train_batch_end is not ModelCheckpoint.on_train_batch_end:
        return  # leave a subclass's own method alone

    def on_train_batch_end(
        self: ModelCheckpoint,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        module = types.SimpleNamespace(automatic_optimization=True)  # the callback reads nothing else of it
        ModelCheckpoint.on_train_batch_end(self, trainer, module, outputs, batch, batch_idx)  # type: ignore[arg-type]

    callback.on_train_batch_end = types.MethodType(on_train_batch_end, callback)  # type: ignore[method-assign]


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
    uncalled = hooks_of_user(callback, _NEVER)
    if uncalled:
        warnings.warn(
            f"{type(callback).__name__}: {', '.join(uncalled)} will not be called. HF has no sanity check, and "
            "`predict` runs Lightning's test loop (`on_test_*`).",
            HfCompatWarning,
            stacklevel=5,
        )


def hooks_of_user(callback: pl.Callback, hooks: Sequence[str]) -> list[str]:
    """List the hooks that user code defines. Lightning's own callbacks work without those that are never called."""
    is_lightnings = type(callback).__module__.startswith(("lightning.", "pytorch_lightning."))
    # a LambdaCallback has its functions as instance attributes
    return [h for h in hooks if h in vars(callback) or (not is_lightnings and is_replaced(callback, h, pl.Callback))]


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


class HFEvents(pl.Callback):
    """One segment of the HF callbacks, between two Lightning callbacks.

    Args:
        bridge: Fires the events.
        segment: Index of the segment. Lightning callbacks divide the HF callbacks into segments, starting with 0.
    """

    def __init__(self, bridge: HFBridge, segment: int) -> None:
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


class CallbackSet:
    """Holds a Trainer's Lightning callbacks. Its `callback_handler` holds the HF callbacks.

    Args:
        host: The Trainer.

    Attributes:
        lightning: The Lightning callbacks.
        order: The order in which callbacks of both kinds were added.
    """

    def __init__(self, host: RunHost) -> None:
        self._host = host
        self.lightning: list[pl.Callback] = []
        self.order = CallbackOrder()
        self._outputs_hook: RemovableHandle | None = None

    def fill(self, callbacks: Sequence[Callback] | None) -> None:
        """Make the handler: defaults, the trackers of `report_to`, the user's callbacks, then a bar or printer.

        Raises:
            ArgumentError: `callbacks` is not a list.
            CallbackError: An entry is not a callback, or is a Lightning callback that cannot work here.
        """
        if callbacks is not None and not isinstance(callbacks, (list, tuple)):
            raise ArgumentError(f"`callbacks` must be a list, got {callbacks!r}.\n\nHint: write `callbacks=[…]`.")
        host = self._host
        given = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
        kinds = {callback_kind(callback) for callback in given if not isinstance(callback, LoggerCallback)}
        trackers = [callback for callback in reporting_callbacks(host.args) if callback_kind(callback) not in kinds]
        jit = [known_to_transformers(JITCheckpointCallback)] if host.args.enable_jit_checkpoint else []
        candidates = [_adopted(callback) for callback in [*_default_callbacks(), *trackers, *jit, *given]]
        host.callback_handler = CallbackHandler(
            [callback for callback in candidates if not isinstance(callback, pl.Callback)],
            host.model,
            host.processing_class,
            host.optimizer,
            host.lr_scheduler,
        )
        host.callback_handler.requestable_kwargs["trainer"] = host
        for candidate in candidates:
            self._note(candidate)
            if isinstance(candidate, JITCheckpointCallback):
                candidate.set_trainer(host)
        if host.args.disable_tqdm:
            host.add_callback(known_to_transformers(PrinterCallback))
        elif not any(isinstance(callback, pl.callbacks.ProgressBar) for callback in self.lightning):
            # Ours, or a script's replacement of transformers' default
            own = global_of_trainer("DEFAULT_PROGRESS_CALLBACK")
            host.add_callback(own or notebooks_callback() or known_to_transformers(ProgressCallback))
        stateful = [c for c in [*host.callback_handler.callbacks, host.control] if is_exportable(c)]
        host.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks

    def add(self, callback: Callback) -> None:
        """Add an HF callback, a Lightning callback or a Lightning logger. A class is instantiated.

        Raises:
            CallbackError: It is none of these, or is a Lightning callback that cannot work here.
        """
        candidate = _adopted(callback)
        if not isinstance(candidate, pl.Callback):
            self._host.callback_handler.add_callback(candidate)
        self._note(candidate)

    def _note(self, candidate: Callback) -> None:
        """Keep a Lightning callback, and note any callback's position in the order."""
        if isinstance(candidate, pl.Callback):
            check_lightning_callback(candidate, self._host.model)
            stateful = [c for c in [*self.lightning, candidate] if type(c).state_dict is not pl.Callback.state_dict]
            if len({c.state_key for c in stateful}) < len(stateful):
                raise CallbackError(
                    f"There are two {type(candidate).__name__} callbacks with the `state_key` {candidate.state_key!r}. "
                    "A checkpoint would keep the state of one.\n\n"
                    "Hint: set them up differently, or override `state_key`."
                )
            self.lightning.append(candidate)
        self.order.add(candidate)
        if isinstance(candidate, pl.callbacks.ProgressBar):
            for other in (ProgressCallback, notebooks_callback()):  # one bar only
                if other is not None:
                    self.remove_callback(other)

    def remove_callback(self, callback: Callback) -> Callback:
        """Remove and return a callback, or the first of a class. None if there is none."""
        for candidate in self.lightning:
            if candidate is callback or (isinstance(callback, type) and isinstance(candidate, callback)):
                self.lightning.remove(candidate)
                self.order.remove(candidate)
                return candidate
        popped = self._host.callback_handler.pop_callback(callback)
        self.order.remove(popped)
        return popped

    def checkpoint_of_exception(self, wanted: str | bool | None) -> str | bool | None:
        """Return the checkpoint to resume from. By default the one that an OnExceptionCheckpoint has written."""
        callbacks = [c for c in self.lightning if isinstance(c, pl.callbacks.OnExceptionCheckpoint)]
        found = [callback.ckpt_path for callback in callbacks if os.path.exists(callback.ckpt_path)]
        if wanted is not None or not found:
            return wanted
        logger.warning(
            "Training resumes from %s, which OnExceptionCheckpoint has written. To start from the beginning, remove it "
            "or pass `resume_from_checkpoint=False`.",
            found[0],
        )
        return found[0]

    def watch_outputs(self, wanted: bool) -> None:
        """Start or stop keeping the model's outputs for callbacks that ask for `outputs`."""
        requestable = self._host.callback_handler.requestable_kwargs

        def keep(module: object, args: object, outputs: ModelOutput) -> None:
            self._host.callback_handler.requestable_kwargs["outputs"] = nested_detach(outputs)

        if wanted and self._outputs_hook is None:
            self._outputs_hook = self._host.model_wrapped.register_forward_hook(keep)
        elif not wanted and self._outputs_hook is not None:
            self._outputs_hook.remove()
            self._outputs_hook = None
        if not wanted:
            requestable.update(outputs=None)

    def loggers(self) -> list[Logger]:
        """Return the loggers for Lightning callbacks: the user's own, and one for HF's logs."""
        if not self.lightning:
            return []
        host = self._host
        given = [c.logger for c in host.callback_handler.callbacks if isinstance(c, LoggerCallback)]

        def experiment() -> object:
            return experiment_of(host.callback_handler.callbacks, host.args, host.state)

        return [*given, HistoryLogger(host._log_of_lightning, experiment)]


def _adopted(callback: Callback) -> Callback:
    """Instantiate a class, and wrap a Lightning logger in a callback that logs to it."""
    candidate = adopt(callback() if isinstance(callback, type) else callback)
    return LoggerCallback(candidate) if isinstance(candidate, Logger) else candidate


def _default_callbacks() -> list[Callback]:
    """Return the default callbacks of every Trainer: ours, or a script's replacement of transformers' list."""
    wanted = global_of_trainer("DEFAULT_CALLBACKS")
    kinds: list[Callback] = list(wanted) if isinstance(wanted, (list, tuple)) else [DefaultFlowCallback]
    return [known_to_transformers(DefaultFlowCallback) if kind is DefaultFlowCallback else kind for kind in kinds]


_CONTAINERS = (dict, list, set)


class SavedCallbackStates:
    """A copy of Lightning callbacks' states, and the means to restore them.

    For a callback of Lightning's, or of a subclass, all attributes are restored. For any other, the content of its
    `state_dict` is. A script's list or dict that a callback shares is left alone.

    Args:
        callbacks: The callbacks.
    """

    def __init__(self, callbacks: Sequence[pl.Callback]) -> None:
        self._callbacks = list(callbacks)
        self._declared = [copy.deepcopy(callback.state_dict()) for callback in self._callbacks]
        self._attributes = [
            _attributes(callback, declared) for callback, declared in zip(self._callbacks, self._declared, strict=True)
        ]

    def restore(self) -> None:
        """Restore the state of every callback."""
        for callback, declared, attributes in zip(self._callbacks, self._declared, self._attributes, strict=True):
            if attributes:
                vars(callback).update({name: _copied(value) for name, value in attributes.items()})
            elif declared:
                callback.load_state_dict(copy.deepcopy(declared))


def _attributes(callback: pl.Callback, declared: dict[str, object]) -> dict[str, object]:
    """Copy the attributes to restore."""
    if not any(_is_lightnings(kind) for kind in type(callback).__mro__ if kind not in _BASES):
        return {}
    is_own = _is_lightnings(type(callback))
    return {
        name: _copied(value)
        for name, value in vars(callback).items()
        if is_own or name in declared or not isinstance(value, _CONTAINERS)
    }


_BASES = (pl.Callback, pl.callbacks.Checkpoint)


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def _copied(value: object) -> object:
    """Copy tensors and containers, in which a callback may count or collect. Return other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, _CONTAINERS) and not isinstance(value, Enum):
        return copy.copy(value)
    return value
