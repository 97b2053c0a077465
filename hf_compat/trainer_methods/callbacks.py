"""Adding and removing callbacks of both kinds; what they see of the inside of a step, and what they log to."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

from hf_compat.callbacks.event_order import CallbackOrder, check_lightning_callback, check_state_keys
from hf_compat.callbacks.loggers import HistoryLogger, LoggerCallback, experiment_of, reporting_callbacks
from hf_compat.callbacks.other_distribution import adopt
from hf_compat.data.tree import nested_detach
from hf_compat.errors import ArgumentError
from hf_compat.hf.builtin_callbacks import (
    DefaultFlowCallback,
    JITCheckpointCallback,
    PrinterCallback,
    ProgressCallback,
)
from hf_compat.hf.callbacks import CallbackHandler, callback_kind
from hf_compat.hf.notebook import NotebookProgressCallback
from hf_compat.hf.state import TrainerState, is_exportable
from hf_compat.interop.callback_classes import known_to_transformers
from hf_compat.interop.replaced_globals import global_of_trainer
from hf_compat.runtime.progress import in_notebook
from hf_compat.trainer_methods.base import AnyCallback, ModelOutput, TrainerBase

logger = logging.getLogger(__name__)


class CallbackMethods(TrainerBase):
    """The public methods around callbacks, and the parts of a run that callbacks look at."""

    _outputs_hook: Any = None  # the handle of torch's forward hook

    def _set_callbacks(self, callbacks: Sequence[AnyCallback] | None) -> None:
        if callbacks is not None and not isinstance(callbacks, (list, tuple)):
            raise ArgumentError(f"`callbacks={callbacks!r}` is no list.\n\nHint: write `callbacks=[…]`.")
        self._lightning_callbacks: list[pl.Callback] = []
        self._callback_order = CallbackOrder()
        given = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
        added = reporting_callbacks(self.args)
        kinds = {callback_kind(callback) for callback in given if not isinstance(callback, LoggerCallback)}
        candidates = [
            _adopted(callback)
            for callback in [
                *_default_callbacks(),
                *[callback for callback in added if callback_kind(callback) not in kinds],
                *([known_to_transformers(JITCheckpointCallback)] if self.args.enable_jit_checkpoint else []),
                *given,
            ]
        ]
        self.callback_handler = CallbackHandler(
            [callback for callback in candidates if not isinstance(callback, pl.Callback)],
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        self.callback_handler.requestable_kwargs["trainer"] = self
        for candidate in candidates:
            self._note_callback(candidate)
            if isinstance(candidate, JITCheckpointCallback):
                candidate.set_trainer(self)
        if self.args.disable_tqdm:
            self.add_callback(known_to_transformers(PrinterCallback))
        elif not self._has_lightning_bar():
            # Ours, or what a script has put in the place of transformers'
            own = global_of_trainer("DEFAULT_PROGRESS_CALLBACK")
            self.add_callback(
                own or known_to_transformers(NotebookProgressCallback if in_notebook() else ProgressCallback)
            )
        stateful = [c for c in [*self.callback_handler.callbacks, self.control] if is_exportable(c)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks

    def add_callback(self, callback: AnyCallback) -> None:
        """Add an HF callback, a Lightning callback or a Lightning logger; a class is instantiated.

        Raises:
            CallbackError: It is none of these, or a Lightning callback that cannot work here.
        """
        self._take_callback(callback)

    def _take_callback(self, callback: AnyCallback) -> None:
        candidate = _adopted(callback)
        if not isinstance(candidate, pl.Callback):
            self.callback_handler.add_callback(candidate)
        self._note_callback(candidate)

    def _note_callback(self, candidate: AnyCallback) -> None:
        if isinstance(candidate, pl.Callback):
            check_lightning_callback(candidate, self.model)
            check_state_keys([*self._lightning_callbacks, candidate])
            self._lightning_callbacks.append(candidate)
        self._callback_order.add(candidate)
        if isinstance(candidate, pl.callbacks.ProgressBar):
            self._give_up_callback(ProgressCallback)  # one bar

    def _has_lightning_bar(self) -> bool:
        return any(isinstance(callback, pl.callbacks.ProgressBar) for callback in self._lightning_callbacks)

    def _checkpoint_of_exception(self, wanted: str | bool | None) -> str | bool | None:
        """Return what to resume from: where nothing was asked for, what an OnExceptionCheckpoint has left."""
        callbacks = [c for c in self._lightning_callbacks if isinstance(c, pl.callbacks.OnExceptionCheckpoint)]
        found = [callback.ckpt_path for callback in callbacks if os.path.exists(callback.ckpt_path)]
        if wanted is not None or not found:
            return wanted
        logger.warning(
            "Training goes on from %s, which OnExceptionCheckpoint has written. To begin anew, remove it or pass "
            "`resume_from_checkpoint=False`.",
            found[0],
        )
        return found[0]

    def pop_callback(self, callback: AnyCallback) -> AnyCallback:
        """Remove a callback and return it; None where it is not there."""
        return self._give_up_callback(callback)

    def _give_up_callback(self, callback: AnyCallback) -> AnyCallback:
        for candidate in self._lightning_callbacks:
            if candidate is callback or (isinstance(callback, type) and isinstance(candidate, callback)):
                self._lightning_callbacks.remove(candidate)
                self._callback_order.remove(candidate)
                return candidate
        popped = self.callback_handler.pop_callback(callback)
        self._callback_order.remove(popped)
        return popped

    def remove_callback(self, callback: AnyCallback) -> None:
        """Remove a callback."""
        if self._give_up_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(f"{callback!r} is not among the callbacks")

    def _watch_outputs(self, wanted: bool) -> None:
        """Keep what the model returns for callbacks that ask for `outputs`, or stop keeping it."""
        if wanted and self._outputs_hook is None:
            self._outputs_hook = self.model_wrapped.register_forward_hook(self._keep_outputs)
        elif not wanted and self._outputs_hook is not None:
            self._outputs_hook.remove()
            self._outputs_hook = None
        if not wanted:
            self.callback_handler.requestable_kwargs.update(outputs=None)

    def _keep_outputs(self, module: object, args: object, outputs: ModelOutput) -> None:
        self.callback_handler.requestable_kwargs["outputs"] = nested_detach(outputs)

    def _loggers(self) -> list[Logger]:
        """Return what Lightning callbacks find to log to: the user's Lightning loggers, and HF's own logs."""
        if not self._lightning_callbacks:
            return []
        given = [c.logger for c in self.callback_handler.callbacks if isinstance(c, LoggerCallback)]
        return [*given, HistoryLogger(self._log_of_lightning, self._experiment)]

    def _experiment(self) -> object:
        return experiment_of(self.callback_handler.callbacks, self.args, self.state)


def _adopted(callback: AnyCallback) -> AnyCallback:
    """Return the object that is called: of a class one of its, of a Lightning logger a callback that logs to it."""
    candidate = adopt(callback() if isinstance(callback, type) else callback)
    return LoggerCallback(candidate) if isinstance(candidate, Logger) else candidate


def _default_callbacks() -> list[AnyCallback]:
    """Return what every Trainer has first: ours, or what a script has made of transformers' list of them."""
    wanted = global_of_trainer("DEFAULT_CALLBACKS")
    kinds: list[AnyCallback] = list(wanted) if isinstance(wanted, (list, tuple)) else [DefaultFlowCallback]
    return [known_to_transformers(DefaultFlowCallback) if kind is DefaultFlowCallback else kind for kind in kinds]
