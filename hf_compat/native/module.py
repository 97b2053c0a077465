"""`HFModule`: a model that trains as HF trains it, in anybody's `lightning.Trainer` or `LightningCLI`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from hf_compat.engine.internals import place_of
from hf_compat.engine.module import WindowModule
from hf_compat.engine.protocols import TrainingSteps
from hf_compat.engine.torchmetrics_evaluation import check_metrics
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.native.steps import NativeSteps
from hf_compat.plan.argument_support import check_supported
from hf_compat.plan.lightning_equivalents import PRECISIONS, check_native
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.optimization_checks import check_optimization
from hf_compat.runtime.process_exit import leave_at_exit


class HFModule(WindowModule):
    """A model as a LightningModule that trains as HF's Trainer does: one Lightning batch is one update.

    Args:
        model: Any module whose forward returns a loss first (tuple, mapping or object with `.loss`).
        args: The training arguments; the defaults where none are given.
        steps: Whoever owns the overridable steps; made from `model` and `args` where none is given.
        compute_metrics: Metrics of validation and test: a torchmetrics object, something that makes one, or a function
            of an `EvalPrediction`. A Trainer brings its own.

    Example:
        `lightning.Trainer(max_epochs=3).fit(HFModule(model, args), HFDataModule(args, train_dataset=data))`
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        steps: TrainingSteps | None = None,
        compute_metrics: Metric | MetricCollection | Callable[..., Any] | None = None,
    ) -> None:
        own = NativeSteps(model, args) if steps is None else None
        if own is not None:
            check_supported(own.args)
            if type(self).configure_optimizers is WindowModule.configure_optimizers:
                check_optimization(own.args)
            check_metrics(compute_metrics, None, False)
        super().__init__(model, own or steps, compute_metrics)  # type: ignore[arg-type]  # one of them is there
        self._own_steps = own
        self.logs_to_lightning = own is not None

    def setup(self, stage: str) -> None:
        """Take this process's place; compare a trainer of the user's own with the arguments."""
        if self.trainer.world_size > 1:
            leave_at_exit()
        if self._own_steps is not None:
            self._own_steps.take_place(*place_of(self.trainer))
            if stage == "fit":
                self._compare_with_trainer()
        super().setup(stage)

    def _compare_with_trainer(self) -> None:
        trainer: Any = self.trainer
        says = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps, "precision": trainer.precision}
        # -1 epochs: the updates end the run
        told = {name: value for name, value in says.items() if value not in (None, -1) or name == "precision"}
        if str(told["precision"]) not in PRECISIONS:  # a kind that the arguments have no word for
            del told["precision"]
        check_native(self.steps.args, told)


class FSDP2Module(HFModule):
    """The same, whose model is sharded before its optimizer is made."""

    def configure_model(self) -> None:
        """Shard the model as the strategy's plan says."""
        strategy: Any = self.trainer.strategy
        strategy.shard(self.model)


def make_module(plan: LightningPlan, model: nn.Module, steps: TrainingSteps) -> HFModule:
    """Return the module that goes with a plan's strategy."""
    kind = FSDP2Module if plan.strategy == "fsdp2" else HFModule
    return kind(model, steps=steps)
