"""Optimizers that change the step, under a `training_step` of the user's own: automatic optimization, or manual.

The steps of HF's switch schedule-free optimizers themselves, and count their micro-batches; others do not.
"""

from __future__ import annotations

import lightning.pytorch as pl

from hf_compat.data.types import Batch
from hf_compat.errors import ArgumentError
from hf_compat.optim.stepping import Stepping


def serve_own_step(module: pl.LightningModule, stepping: Stepping) -> None:
    """Give a module with a `training_step` of its own what the steps of HF's do for its optimizers.

    Raises:
        ArgumentError: Lightning is to accumulate or clip gradients, and there are none after a backward pass.
    """
    if stepping.steps_in_backward and module.automatic_optimization:
        _refuse_gradients(module.trainer)
    if stepping.switches:
        _switch_before_batches(module, stepping)


def leave_own_step(module: pl.LightningModule) -> None:
    """Give the module its own hook back."""
    module.__dict__.pop("on_train_batch_start", None)


def _refuse_gradients(trainer: pl.Trainer) -> None:
    for name, unset in (("accumulate_grad_batches", 1), ("gradient_clip_val", None)):
        value = getattr(trainer, name)
        if value not in (unset, 0):
            raise ArgumentError(
                f"`{name}={value!r}` of lightning.Trainer needs gradients, and this optimizer updates each parameter "
                "in the backward pass.\n\nHint: leave it out, or choose another optimizer."
            )


def _switch_before_batches(module: pl.LightningModule, stepping: Stepping) -> None:
    own = module.on_train_batch_start

    def on_train_batch_start(batch: Batch, batch_idx: int) -> int | None:
        stepping.to_training()
        return own(batch, batch_idx)

    module.__dict__["on_train_batch_start"] = on_train_batch_start
