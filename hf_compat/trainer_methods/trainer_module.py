"""The LightningModule of a Trainer: `WindowModule`, prepared for Lightning's own callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn

from hf_compat.callbacks.manual_optimization import prepare_lightning_callbacks, unfreeze_optimized
from hf_compat.engine.module import WindowModule
from hf_compat.engine.protocols import TrainingSteps
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.runtime.process_exit import leave_at_exit


class TrainerModule(WindowModule):
    """The module of our Trainer. Its steps set the model's mode themselves."""

    def configure_callbacks(self) -> Sequence[pl.Callback] | pl.Callback:
        """Prepare for Lightning's own callbacks, before Lightning checks them."""
        prepare_lightning_callbacks(self.trainer, self, self.model)
        return super().configure_callbacks()

    def setup(self, stage: str) -> None:
        """Enable HF folders as checkpoints, and make this rank leave the group cleanly at exit."""
        if self.trainer.world_size > 1:
            leave_at_exit()
        super().setup(stage)

    def on_fit_start(self) -> None:
        """Unfreeze the parameters that a resumed callback has added to the optimizer, then start the fit."""
        unfreeze_optimized(self.trainer)
        super().on_fit_start()

    def on_validation_model_train(self) -> None:
        """Stay in eval mode, as values logged in eval mode belong to the evaluation."""

    on_test_model_train = on_validation_model_train


class FSDP2Module(TrainerModule):
    """The same for FSDP 2, which shards the model before its optimizer is made."""

    def configure_model(self) -> None:
        """Shard the model according to the strategy's plan."""
        strategy: Any = self.trainer.strategy
        strategy.shard(self.model)


def make_module(plan: LightningPlan, model: nn.Module, steps: TrainingSteps) -> TrainerModule:
    """Make the module for a plan's strategy."""
    return (FSDP2Module if plan.strategy == "fsdp2" else TrainerModule)(model, steps=steps)
