"""What the bridge asks of the Trainer. A Protocol only."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from hf_compat.hf.callbacks import CallbackHandler
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.background import BackgroundWriter
from hf_compat.runtime.signals import StopSignals


class Session(Protocol):
    """A run as the bridge sees it: state, control, callbacks, and the override points around an update."""

    args: Any
    model: nn.Module
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    current_flos: float
    _tr_loss: torch.Tensor
    _globalstep_last_logged: int
    _nonfinite_steps: Any
    lightning_trainer: Any
    _background: BackgroundWriter
    stop_signals: StopSignals

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None: ...

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None: ...

    def _evaluate(self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False) -> Any: ...

    def _check_background(self) -> None: ...

    def _watch_outputs(self, wanted: bool) -> None: ...

    def _take_up_optimizer(self) -> None: ...

    def floating_point_ops(self, inputs: Any) -> int: ...

    def _track_num_input_tokens(self, inputs: Any) -> None: ...
