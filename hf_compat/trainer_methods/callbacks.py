"""What callbacks see of the inside of a step, and what Lightning callbacks find to log to. Both vocabularies."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers import Logger

from hf_compat.callbacks.loggers import HistoryLogger, LoggerCallback
from hf_compat.data.tree import nested_detach
from hf_compat.trainer_methods.base import TrainerBase


class CallbackMethods(TrainerBase):
    """The parts of a run that callbacks look at."""

    _outputs_hook: Any = None

    def _watch_outputs(self, wanted: bool) -> None:
        """Keep what the model returns for callbacks that ask for `outputs`, or stop keeping it."""
        if wanted and self._outputs_hook is None:
            self._outputs_hook = self.model_wrapped.register_forward_hook(self._keep_outputs)
        elif not wanted and self._outputs_hook is not None:
            self._outputs_hook.remove()
            self._outputs_hook = None
        if not wanted:
            self.callback_handler.requestable_kwargs.update(outputs=None)

    def _keep_outputs(self, module: Any, args: Any, outputs: Any) -> None:
        self.callback_handler.requestable_kwargs["outputs"] = nested_detach(outputs)

    def _loggers(self) -> list[Logger]:
        """Return what Lightning callbacks find to log to: the user's Lightning loggers, and HF's own logs."""
        if not self._lightning_callbacks:
            return []
        given = [c.logger for c in self.callback_handler.callbacks if isinstance(c, LoggerCallback)]
        return [*given, HistoryLogger(self._log_of_lightning)]
