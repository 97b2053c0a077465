"""Make Lightning's own callbacks work with a module in manual optimization.

Lightning's callbacks are written for automatic optimization, where one batch is one backward pass. Callbacks that would
have no effect, or a wrong one, are refused before training. The others get the attributes they need.
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


class _Automatic:
    """Replaces the module where a callback only reads how it is optimized."""

    automatic_optimization = True


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
        ModelCheckpoint.on_train_batch_end(self, trainer, _Automatic(), outputs, batch, batch_idx)  # type: ignore[arg-type]

    callback.on_train_batch_end = types.MethodType(on_train_batch_end, callback)  # type: ignore[method-assign]
