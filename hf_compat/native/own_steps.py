"""Optimizers that change the step, under a `training_step` of the user's own: automatic optimization, or manual.

The steps of HF's switch schedule-free optimizers themselves, and count their micro-batches; others do not.
"""

from __future__ import annotations

import lightning.pytorch as pl

from hf_compat.data.types import Batch
from hf_compat.errors import ArgumentError, OverrideError
from hf_compat.optim.stepping import Stepping

# Hooks that Lightning calls in automatic optimization only, and what does the same in an HFModule.
_OF_AUTOMATIC_OPTIMIZATION = {
    "optimizer_step": "change gradients or rates in `on_before_optimizer_step`, or the optimizer in "
    "`configure_optimizers`",
    "optimizer_zero_grad": "use `on_before_zero_grad`",
    "configure_gradient_clipping": "set `max_grad_norm` in the arguments, or clip in `on_before_optimizer_step`",
    "lr_scheduler_step": "return a schedule with its `interval` and `frequency` from `configure_optimizers`",
}


def serve_own_step(module: pl.LightningModule, stepping: Stepping) -> None:
    """Give a module with a `training_step` of its own what the steps of HF's do for its optimizers.

    Raises:
        ArgumentError: Lightning is to accumulate or clip gradients, and there are none after a backward pass.
    """
    if stepping.steps_in_backward and module.automatic_optimization:
        _refuse_gradients(module.trainer)
    if stepping.switches:
        _switch_before_batches(module, stepping)


def refuse_unused_hooks(module: pl.LightningModule) -> None:
    """Refuse hooks of a subclass that take a part of the update: Lightning calls them in automatic optimization only.

    Raises:
        OverrideError: One is overridden; the message names it and what does the same.
    """
    for name, hint in _OF_AUTOMATIC_OPTIMIZATION.items():
        hook = getattr(module, name)
        if getattr(hook, "__func__", hook) is not getattr(pl.LightningModule, name):
            raise OverrideError(
                f"`{name}` of {type(module).__name__} would never be called: an HFModule makes its updates itself.\n\n"
                f"Hint: {hint}; or override `training_step` with `automatic_optimization = True`."
            )


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
