"""`CallbackSet` holds a Trainer's callbacks of both kinds in one order, and their loggers.

Lightning's callbacks are written for automatic optimization, where one batch is one backward pass. Those that would
have no effect here, or a wrong one, are refused before training.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import types
from collections.abc import Callable, Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment  # type: ignore[attr-defined]  # not listed
from torch import nn

from hf_compat.callbacks.loggers import HistoryLogger, LoggerCallback, refuse_other_distribution, reporting_callbacks
from hf_compat.engine.internals import reset_weight_averaging
from hf_compat.errors import ArgumentError, CallbackError, warn_user
from hf_compat.hf.callbacks import (
    Callback,
    CallbackHandler,
    DefaultFlowCallback,
    JITCheckpointCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    callback_kind,
)
from hf_compat.hf.state import export_states
from hf_compat.interop.patching import tell_of_newer_names
from hf_compat.interop.transformers_models import global_of_trainer, known_to_transformers, notebooks_callback
from hf_compat.runtime.inspection import is_replaced
from hf_compat.runtime.text import brief
from hf_compat.training_run.interface import TrainerApi

logger = logging.getLogger(__name__)

# The places where a Lightning callback may be refused, as the error names them.
IN_TRAINER, IN_TRANSFORMERS = "in this Trainer", "in transformers.Trainer"
WITH_MODULE, WITH_DATA = "with an HFModule", "with an HFDataModule"


_IN_HF_COMPAT = "pass it to hf_compat.Trainer"
# Places → Lightning callbacks that cannot work there → why, and the alternative.
_REFUSED: dict[tuple[str, ...], dict[tuple[type[pl.Callback], ...], str]] = {
    (IN_TRAINER, WITH_MODULE): {
        (lightning_callbacks.GradientAccumulationScheduler,): "an update always takes one window of "
        "`gradient_accumulation_steps` micro-batches.\n\nHint: set `gradient_accumulation_steps` in the arguments",
    },
    (IN_TRAINER, WITH_DATA): {
        (lightning_callbacks.BatchSizeFinder,): "the arguments set the batch size.\n\nHint: set "
        "`per_device_train_batch_size` in the arguments, or let `auto_find_batch_size=True` of `hf_compat.Trainer` "
        "find one that fits",
    },
    (IN_TRAINER,): {
        (lightning_callbacks.LearningRateFinder,): "the arguments set the learning rate and its schedule.\n\nHint: set "
        "`learning_rate` and compare several in short runs with `max_steps=100`, or use `hyperparameter_search`",
        (lightning_callbacks.BasePredictionWriter,): "`predict` returns its predictions.\n\n"
        "Hint: write the result of `trainer.predict(…)`",
    },
    (IN_TRANSFORMERS,): {
        (lightning_callbacks.WeightAveraging, lightning_callbacks.StochasticWeightAveraging): "it changes weights or "
        f"schedule inside the loops, for which transformers.Trainer has no event.\n\nHint: {_IN_HF_COMPAT}",
        (lightning_callbacks.ProgressBar,): "it follows batches, for which transformers.Trainer has no event.\n\n"
        f"Hint: use HF's own progress bar, or {_IN_HF_COMPAT}",
        (lightning_callbacks.SpikeDetection, lightning_callbacks.ThroughputMonitor): "it reads batches and step "
        f"outputs, which transformers.Trainer does not pass to callbacks.\n\nHint: {_IN_HF_COMPAT}",
        (lightning_callbacks.OnExceptionCheckpoint,): "it writes when an exception ends the training, for which "
        f"transformers.Trainer has no event.\n\nHint: {_IN_HF_COMPAT}",
        (lightning_callbacks.BackboneFinetuning,): "it trains the backbone at its own learning rate, but "
        "transformers.Trainer makes one optimizer for all parameters before its first event.\n\n"
        f"Hint: {_IN_HF_COMPAT}",
    },
}


def refuse(callback: pl.Callback, place: str) -> None:
    """Refuse a Lightning callback that cannot work at a place.

    Raises:
        CallbackError: It cannot work. The message names an alternative.
    """
    for places, reasons in _REFUSED.items():
        for kinds, reason in reasons.items():
            if place in places and isinstance(callback, kinds):
                raise CallbackError(f"Lightning's {type(callback).__name__} cannot work {place}: {reason}.")


def refuse_native(
    callbacks: list[pl.Callback], module: pl.LightningModule, with_data: bool, author_updates: bool
) -> None:
    """Refuse a `lightning.Trainer`'s callbacks that cannot work with an HFModule, or with the data of an HFDataModule.

    What works may depend on whether the author's `training_step` makes its own updates.

    A callback added by a `Tuner` is removed first, as the trainer may fit again after the refusal.

    Raises:
        CallbackError: A callback is refused. The message names an alternative.
    """
    makes_updates = not module.automatic_optimization
    places = [place for place, is_there in ((WITH_MODULE, makes_updates), (WITH_DATA, with_data)) if is_there]
    for callback in list(callbacks):
        try:
            for place in places:
                refuse(callback, place)
        except CallbackError:
            if getattr(callback, "_early_exit", False):
                callbacks.remove(callback)
            raise
        if makes_updates:
            check_model_of(callback, module.model, module)  # type: ignore[arg-type]  # an HFModule's
        if author_updates:
            check_averaging_of(callback, module)


def check_model_of(callback: pl.Callback, model: nn.Module, trained: nn.Module) -> None:
    """Refuse a Lightning callback that cannot work with a model, or with the trained module that holds it.

    Raises:
        CallbackError: BackboneFinetuning without a backbone. The message names an alternative.
    """
    has_own = isinstance(getattr(trained, "backbone", None), nn.Module)
    if isinstance(callback, lightning_callbacks.BackboneFinetuning) and not has_own and backbone_of(model) is None:
        raise CallbackError(
            f"BackboneFinetuning unfreezes the model's `backbone`, and {type(model).__name__} has none.\n\n"
            "Hint: name the part `backbone`, or write a BaseFinetuning that freezes parts of `pl_module.model`."
        )


def check_averaging_of(callback: pl.Callback, trained: nn.Module) -> None:
    """Refuse to average a model with a batch norm where an epoch always makes updates.

    Raises:
        CallbackError: It is Lightning's StochasticWeightAveraging. The message names an alternative.
    """
    if isinstance(callback, lightning_callbacks.StochasticWeightAveraging) and any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in trained.modules()
    ):
        raise CallbackError(
            "Lightning's StochasticWeightAveraging runs one more epoch for models with batch norm, and it must not "
            "train in it. hf_compat.Trainer makes no such epoch, and a `training_step` that makes its own updates "
            "makes them there, too.\n\n"
            "Hint: use lightning's WeightAveraging, which averages buffers too."
        )


def backbone_of(model: nn.Module) -> nn.Module | None:
    """Find a model's `backbone`, or the base of a transformers model."""
    for name in ("backbone", "base_model"):
        part = getattr(model, name, None)
        if isinstance(part, nn.Module) and part is not model:
            return part
    return None


def _save_as_in_automatic(
    callback: ModelCheckpoint, trainer: pl.Trainer, _: pl.LightningModule, *given: object
) -> None:
    save: Callable[..., None] = ModelCheckpoint.on_train_batch_end
    # it reads nothing else of a module
    save(callback, trainer, types.SimpleNamespace(automatic_optimization=True), *given)


def prepare_lightning_callbacks(
    trainer: pl.Trainer, module: pl.LightningModule, model: nn.Module, makes_updates: bool = True
) -> None:
    """Prepare module and callbacks for Lightning's own callbacks, before these are set up.

    In manual optimization a ModelCheckpoint ignores `train_time_interval`. It also warns that a checkpoint holds the
    weights after the update. Where the module `makes_updates`, this is intended, as in HF, so it saves as in automatic
    optimization. (lightning 2.6.6. Remove it when both are gone.)
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    leave_lightning_callbacks(trainer)  # of a fit that has failed
    for callback in callbacks:
        if trainer.state.fn == "fit":
            reset_weight_averaging(callback)
        if isinstance(callback, lightning_callbacks.BackboneFinetuning) and not hasattr(module, "backbone"):
            module.__dict__["backbone"] = backbone_of(model)  # not as a submodule, which would duplicate its weights
        if not isinstance(callback, ModelCheckpoint) or is_replaced(callback, "on_train_batch_end", ModelCheckpoint):
            continue
        if makes_updates and not module.automatic_optimization:
            vars(callback)["on_train_batch_end"] = functools.partial(_save_as_in_automatic, callback)


def leave_lightning_callbacks(trainer: pl.Trainer) -> None:
    """Give the callbacks back what a fit has replaced in them."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        hook = vars(callback).get("on_train_batch_end")
        if isinstance(hook, functools.partial) and hook.func is _save_as_in_automatic:
            del vars(callback)["on_train_batch_end"]


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


# Hooks that are never called. HF has no sanity check, and `predict` runs Lightning's test loop.
NEVER_CALLED = [name for name in vars(pl.Callback) if name.startswith(("on_sanity_check_", "on_predict_"))]


def check_lightning_callback(callback: pl.Callback, model: nn.Module) -> None:
    """Refuse a Lightning callback that cannot work in the Trainer. Warn about hooks that are never called.

    Raises:
        CallbackError: It would have no effect or a wrong one. The message names an alternative.
    """
    name = type(callback).__name__
    if isinstance(callback, TrainerCallback):
        raise CallbackError(
            f"{name} is both a Lightning and an HF callback, and `on_train_end` has two meanings.\n\n"
            "Hint: split it into two classes and pass both."
        )
    refuse(callback, IN_TRAINER)
    check_model_of(callback, model, model)
    check_averaging_of(callback, model)
    uncalled = hooks_of_user(callback, NEVER_CALLED)
    if uncalled:
        warn_user(
            f"{name}: {', '.join(uncalled)} will not be called. HF has no sanity check, and `predict` runs Lightning's "
            "test loop (`on_test_*`).",
        )


def hooks_of_user(callback: pl.Callback, hooks: Sequence[str]) -> list[str]:
    """List the hooks that user code defines. Lightning's own callbacks work without the hooks that are never called."""
    is_lightnings = type(callback).__module__.startswith("lightning.")
    # a LambdaCallback has its functions as instance attributes
    return [h for h in hooks if h in vars(callback) or (not is_lightnings and is_replaced(callback, h, pl.Callback))]


class CallbackSet:
    """Holds a Trainer's Lightning callbacks. Its `callback_handler` holds the HF callbacks."""

    def __init__(self, host: TrainerApi) -> None:
        self._host = host
        self.lightning: list[pl.Callback] = []
        self.order: list[pl.Callback | Callback] = []  # in which callbacks of both kinds were added

    def fill(self, callbacks: Sequence[Callback] | None) -> None:
        """Make the handler of the defaults, the trackers of `report_to`, the user's callbacks, and a bar or printer.

        Raises:
            ArgumentError: `callbacks` is not a list.
            CallbackError: An entry is not a callback, or is a Lightning callback that cannot work here.
        """
        if callbacks is not None and not isinstance(callbacks, (list, tuple)):
            raise ArgumentError(f"`callbacks` must be a list, got {brief(callbacks)}.\n\nHint: write `callbacks=[…]`.")
        host = self._host
        given = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
        kinds = {callback_kind(callback) for callback in given if not isinstance(callback, LoggerCallback)}
        trackers = [callback for callback in reporting_callbacks(host.args) if callback_kind(callback) not in kinds]
        jit = [known_to_transformers(JITCheckpointCallback)] if host.args.enable_jit_checkpoint else []
        defaults = global_of_trainer("DEFAULT_CALLBACKS")  # a script may have replaced transformers' list
        if not isinstance(defaults, (list, tuple)):
            defaults = [DefaultFlowCallback]
        defaults = [known_to_transformers(kind) if kind is DefaultFlowCallback else kind for kind in defaults]
        candidates = [_adopted(callback) for callback in [*defaults, *trackers, *jit, *given]]
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
                candidate.trainer = host
        if host.args.disable_tqdm:
            host.add_callback(known_to_transformers(PrinterCallback))
        elif not any(isinstance(callback, pl.callbacks.ProgressBar) for callback in self.lightning):
            # a script may have replaced transformers' default
            own = global_of_trainer("DEFAULT_PROGRESS_CALLBACK")
            host.add_callback(own or notebooks_callback() or known_to_transformers(ProgressCallback))
        host.state.stateful_callbacks = export_states([*host.callback_handler.callbacks, host.control])

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
                    f"There are two {type(candidate).__name__} callbacks with the `state_key` "
                    f"{brief(candidate.state_key)}. A checkpoint would keep the state of one.\n\n"
                    "Hint: set them up differently, or override `state_key`."
                )
            self.lightning.append(candidate)
        self.order.append(candidate)
        if isinstance(candidate, pl.callbacks.ProgressBar):
            for other in (ProgressCallback, notebooks_callback()):  # one bar only
                if other is not None:
                    self.remove_callback(other)

    def remove_callback(self, callback: Callback) -> Callback:
        """Remove a callback, or the first of a class. The result is the removed one, if any."""
        kind = callback if isinstance(callback, type) else ()
        found = next((c for c in self.lightning if c is callback or isinstance(c, kind)), None)
        if found is None:
            found = self._host.callback_handler.pop_callback(callback)
        else:
            self.lightning.remove(found)
        self.order[:] = [entry for entry in self.order if entry is not found]
        return found

    def checkpoint_of_exception(self) -> str | None:
        """The checkpoint that an OnExceptionCheckpoint has written, from which a training resumes by default."""
        for callback in self.lightning:
            if isinstance(callback, pl.callbacks.OnExceptionCheckpoint) and os.path.exists(callback.ckpt_path):
                logger.warning(
                    "Training resumes from %s, which OnExceptionCheckpoint has written. To start from the beginning, "
                    "remove it or pass `resume_from_checkpoint=False`.",
                    callback.ckpt_path,
                )
                return callback.ckpt_path
        return None

    def loggers(self) -> list[Logger]:
        """The loggers for Lightning callbacks, which are the user's own and one for HF's logs."""
        host = self._host
        given = [c.logger for c in host.callback_handler.callbacks if isinstance(c, LoggerCallback)]

        def experiment() -> object:
            """The writer of the first tracker among the callbacks, or None."""
            found = [callback for callback in host.callback_handler.callbacks if hasattr(callback, "experiment")]
            if found and not host.state.is_world_process_zero:
                return DummyExperiment()
            return found[0].experiment(host.args, host.state) if found else None

        return [*given, HistoryLogger(host._log_of_lightning, experiment)]


def _adopted(callback: Callback) -> Callback:
    """Instantiate a class, and wrap a Lightning logger in a callback that logs to it."""
    candidate = callback() if isinstance(callback, type) else callback
    refuse_other_distribution(candidate)
    if not isinstance(candidate, (Logger, pl.Callback)):
        tell_of_newer_names(type(candidate), TrainerCallback)
    return LoggerCallback(candidate) if isinstance(candidate, Logger) else candidate


_CONTAINERS = (dict, list, set)
_BASES = {pl.Callback, pl.callbacks.Checkpoint}


class SavedCallbackStates:
    """A copy of Lightning callbacks' states, and the means to restore them.

    For a callback of Lightning's, or of a subclass, all attributes are restored. Other callbacks load their
    `state_dict`. A script's list or dict that a callback shares is left alone.
    """

    def __init__(self, callbacks: Sequence[pl.Callback]) -> None:
        self._saved = []
        for callback in callbacks:
            declared, kinds = copy.deepcopy(callback.state_dict()), type(callback).__mro__
            of_lightning = {kind for kind in kinds if kind.__module__.partition(".")[0] == "lightning"} - _BASES
            attributes = {
                name: _copied(value)
                for name, value in vars(callback).items()
                if kinds[0] in of_lightning or name in declared or not isinstance(value, _CONTAINERS)
            }
            self._saved.append((callback, declared, attributes if of_lightning else {}))

    def restore(self) -> None:
        for callback, declared, attributes in self._saved:
            if attributes:
                vars(callback).update({name: _copied(value) for name, value in attributes.items()})
            elif declared:
                callback.load_state_dict(copy.deepcopy(declared))


def _copied(value: object) -> object:
    """Copy tensors and containers, in which a callback may count or collect. Other values are shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value
