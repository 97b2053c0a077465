"""What Lightning's own callbacks need of a module whose updates are made in manual optimization.

Lightning's callbacks are written for automatic optimization, where one batch is one backward pass. Here those that
would be inert, or wrong, are refused before training, and the others get what they ask for.
"""

from __future__ import annotations

import types

import lightning.pytorch as pl
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn

from hf_compat.data.types import Batch
from hf_compat.engine.internals import reset_weight_averaging
from hf_compat.errors import CallbackError

# Callbacks that change what the arguments of a native module decide, and what to write in their place.
_REFUSED_NATIVELY = (
    (
        "GradientAccumulationScheduler",
        "an update is one window of `gradient_accumulation_steps` micro-batches, the whole run through",
        "set `gradient_accumulation_steps` in the arguments",
    ),
    (
        "BatchSizeFinder",
        "the batch size is the arguments'",
        "set `per_device_train_batch_size` in the arguments; `auto_find_batch_size=True` of `hf_compat.Trainer` finds "
        "one that fits",
    ),
    (
        "LearningRateFinder",
        "the learning rate and its schedule are the arguments'",
        "set `learning_rate`; short fits with `max_steps=100` compare several, `hyperparameter_search` of "
        "`hf_compat.Trainer` does so by itself",
    ),
)


def refuse_native(callbacks: list[pl.Callback], model: nn.Module) -> None:
    """Refuse callbacks of a Lightning trainer of the user's own that cannot work with an HFModule.

    One that a `Tuner` has put there is taken away: the trainer fits again after the refusal.

    Raises:
        CallbackError: The message holds the way out.
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
    """Refuse to finetune a backbone that is not there.

    Raises:
        CallbackError: The model has none.
    """
    if isinstance(callback, lightning_callbacks.BackboneFinetuning) and backbone_of(model) is None:
        raise CallbackError(
            f"BackboneFinetuning thaws the model's `backbone`, and {type(model).__name__} has none.\n\n"
            "Hint: name the part `backbone`, or write a BaseFinetuning that freezes parts of `pl_module.model`."
        )


def backbone_of(model: nn.Module) -> nn.Module | None:
    """Return the part of a model that its head stands on: its `backbone`, or the base of a transformers model."""
    for name in ("backbone", "base_model"):
        part = getattr(model, name, None)
        if isinstance(part, nn.Module) and part is not model:
            return part
    return None


def serve_callbacks(trainer: pl.Trainer, module: pl.LightningModule, model: nn.Module) -> None:
    """Give Lightning's own callbacks what they ask for, before they are set up."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        if trainer.state.fn == "fit":
            reset_weight_averaging(callback)
        if isinstance(callback, lightning_callbacks.BackboneFinetuning) and not hasattr(module, "backbone"):
            module.__dict__["backbone"] = backbone_of(model)  # no submodule: its weights have names already
        if isinstance(callback, ModelCheckpoint) and not module.automatic_optimization:
            _save_as_in_automatic_optimization(callback)


def thaw_optimized(trainer: pl.Trainer) -> None:
    """Let parameters that a resumed BaseFinetuning has given back to the optimizer be trained: it thaws them once only.

    (lightning 2.6.6 freezes them again in `setup`; remove it when a resumed callback thaws them.)
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    if not any(isinstance(callback, lightning_callbacks.BaseFinetuning) for callback in callbacks):
        return
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(True)


class _Automatic:
    """Stands for the module where a callback asks only how it is optimized."""

    automatic_optimization = True


def _save_as_in_automatic_optimization(callback: ModelCheckpoint) -> None:
    """Let a ModelCheckpoint look at every batch's end as in automatic optimization.

    In manual optimization it leaves `train_time_interval` out and warns that a checkpoint holds the weights after the
    update, which is what a checkpoint of HF's holds. (lightning 2.6.6; remove it when both are gone.)
    """
    if type(callback).on_train_batch_end is not ModelCheckpoint.on_train_batch_end:
        return  # a subclass has its own

    def on_train_batch_end(
        self: ModelCheckpoint,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        ModelCheckpoint.on_train_batch_end(self, trainer, _Automatic(), outputs, batch, batch_idx)  # type: ignore[arg-type]

    callback.on_train_batch_end = types.MethodType(on_train_batch_end, callback)  # type: ignore[method-assign]
