"""`CallbackSet`: a Trainer's callbacks of both kinds in one order, and their loggers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_compat.callbacks.event_order import CallbackOrder, check_lightning_callback, check_state_keys
from hf_compat.callbacks.loggers import HistoryLogger, LoggerCallback, experiment_of, reporting_callbacks
from hf_compat.callbacks.other_distribution import adopt
from hf_compat.data.tree import nested_detach
from hf_compat.data.types import ModelOutput
from hf_compat.errors import ArgumentError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.builtin_callbacks import DefaultFlowCallback, JITCheckpointCallback, PrinterCallback, ProgressCallback
from hf_compat.hf.callbacks import Callback, CallbackHandler, callback_kind
from hf_compat.hf.state import TrainerControl, TrainerState, is_exportable
from hf_compat.interop.callback_classes import known_to_transformers, notebooks_callback
from hf_compat.interop.replaced_globals import global_of_trainer
from hf_compat.runtime.signals import StopSignals

logger = logging.getLogger(__name__)


class CallbackHost(Protocol):
    """What a `CallbackSet` needs of its Trainer."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    model: nn.Module
    model_wrapped: nn.Module
    callback_handler: CallbackHandler
    processing_class: object
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: object
    stop_signals: StopSignals

    def add_callback(self, callback: Callback) -> None: ...

    def _log_of_lightning(self, metrics: Mapping[str, float], step: int | None) -> None: ...


class CallbackSet:
    """Holds a Trainer's Lightning callbacks. Its `callback_handler` holds the HF callbacks.

    Args:
        host: The Trainer.

    Attributes:
        lightning: The Lightning callbacks.
        order: The order in which callbacks of both kinds were added.
    """

    def __init__(self, host: CallbackHost) -> None:
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
            check_state_keys([*self.lightning, candidate])
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
