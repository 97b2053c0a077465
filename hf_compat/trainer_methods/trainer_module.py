"""The LightningModule of a Trainer: `WindowModule`, with what Lightning's own callbacks ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn

from hf_compat.callbacks.manual_optimization import serve_callbacks, thaw_optimized
from hf_compat.engine.module import WindowModule
from hf_compat.engine.protocols import TrainingSteps
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.runtime.process_exit import leave_at_exit


class TrainerModule(WindowModule):
    """The module that a Trainer of ours trains: a step sets the mode of its model itself."""

    def configure_callbacks(self) -> Sequence[pl.Callback] | pl.Callback:
        """Give Lightning's callbacks what they ask for; Lightning asks this before it checks them."""
        serve_callbacks(self.trainer, self, self.model)
        return super().configure_callbacks()

    def setup(self, stage: str) -> None:
        """Let HF folders be read as checkpoints; leave the other processes in order when this one ends."""
        if self.trainer.world_size > 1:
            leave_at_exit()
        super().setup(stage)

    def on_fit_start(self) -> None:
        """Work with the optimizer that is in force, and train what a resumed callback has given to it."""
        thaw_optimized(self.trainer)
        super().on_fit_start()

    def on_validation_model_train(self) -> None:
        """Stay in eval mode: values that steps log in eval mode are the evaluation's."""

    on_test_model_train = on_validation_model_train


class FSDP2Module(TrainerModule):
    """The same, whose model is sharded before its optimizer is made."""

    def configure_model(self) -> None:
        """Shard the model as the strategy's plan says."""
        strategy: Any = self.trainer.strategy
        strategy.shard(self.model)


def make_module(plan: LightningPlan, model: nn.Module, steps: TrainingSteps) -> TrainerModule:
    """Return the module that goes with a plan's strategy."""
    return (FSDP2Module if plan.strategy == "fsdp2" else TrainerModule)(model, steps=steps)
