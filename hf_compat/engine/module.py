"""`HFModule`: a model as a LightningModule whose batch is a window of micro-batches. Lightning words only."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from hf_compat.engine.checkpoint_io import OWN_KEY, HFCheckpointIO
from hf_compat.engine.evaluation import EvaluationBatch, EvaluationRun, EvaluationSettings
from hf_compat.engine.internals import before_zero_grad, load_waiting_data_states, place_of, start_from
from hf_compat.engine.precision import ForwardPrecision
from hf_compat.engine.recipe import Observer, Recipe, SilentObserver
from hf_compat.engine.strategies import gradients_at_the_end, is_engine, wrapped_model
from hf_compat.engine.streaming import check_metrics
from hf_compat.engine.windows import Window, Windows
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.signatures import call_by_signature
from hf_compat.plan.settings import LightningPlan
from hf_compat.plan.table import check_supported
from hf_compat.plan.translate import exchanges_every_micro_batch
from hf_compat.plan.twins import PRECISIONS, check_native
from hf_compat.recipe.optimization import follows_metric
from hf_compat.recipe.reading import names_of, plain_names

# Fields that Lightning writes several times a step. None of them is a module or parameter, so nn.Module's search for
# those is left out.
_BOOKKEEPING = frozenset({"_current_fx_name"})
_ALONE = contextlib.nullcontext()


class HFModule(pl.LightningModule):
    """A model that trains as HF's Trainer trains it: one Lightning batch is one update.

    Optimization is manual: micro-batches, clipping, step, schedule, zeroing, in HF's order.

    Args:
        model: Any module whose forward returns a loss first (tuple, mapping or object with `.loss`).
        args: The training arguments; the defaults where none are given.
        recipe: Whoever owns the overridable steps; made from `model` and `args` where none is given.
        compute_metrics: Metrics of validation and test: a torchmetrics object, something that makes one, or a function
            of an `EvalPrediction`. A Trainer brings its own.

    Example:
        `lightning.Trainer(max_epochs=3).fit(HFModule(model, args), HFDataModule(args, train_dataset=data))`
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        recipe: Recipe | None = None,
        compute_metrics: Metric | MetricCollection | Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        recipe_is_own = recipe is None
        if recipe is None:
            from hf_compat.recipe.native import NativeRecipe

            recipe = NativeRecipe(model, args)
            check_supported(recipe.args)
            check_metrics(compute_metrics, None, False)
        self.compute_metrics = compute_metrics
        self.recipe = recipe
        self.observer: Observer = SilentObserver()
        self.evaluation: EvaluationRun | None = None
        self.num_training_updates: int | None = None
        self.strict_loading = False  # a folder holds tied weights once
        self._resume: dict[str, Any] | None = None
        self._logs_itself = recipe_is_own
        self._exchanges = self._exchanges_always = False
        self._tells_zero_grad = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _BOOKKEEPING:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        """Let the recipe make optimizer and schedule; the schedule is stepped by the update, not by Lightning."""
        updates = self.num_training_updates
        if updates is None:
            updates = int(self.trainer.estimated_stepping_batches)
        self.recipe.create_optimizer_and_scheduler(updates)
        optimizer, scheduler = self.recipe.optimizer, self.recipe.lr_scheduler
        shown = getattr(scheduler, "optimizer", None) is optimizer and hasattr(scheduler, "state_dict")
        if not shown:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def setup(self, stage: str) -> None:
        """Let this trainer read HF folders as checkpoints; compare a trainer of the user's own with the arguments."""
        if self._logs_itself:
            own: Any = self.recipe
            own.take_place(*place_of(self.trainer))
            if stage == "fit":
                self._compare_with_trainer()
        strategy = self.trainer.strategy
        if not isinstance(strategy.checkpoint_io, HFCheckpointIO):
            strategy.checkpoint_io = HFCheckpointIO(strategy.checkpoint_io)

    def _compare_with_trainer(self) -> None:
        trainer: Any = self.trainer
        says = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps, "precision": trainer.precision}
        # -1 epochs: the updates end the run
        told = {name: value for name, value in says.items() if value not in (None, -1) or name == "precision"}
        if str(told["precision"]) not in PRECISIONS:  # a kind that the arguments have no word for
            del told["precision"]
        check_native(self.recipe.args, told)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what an HF folder says about where its run stood; name weights as the model does, compiled or not."""
        self._resume = checkpoint.get(OWN_KEY)
        checkpoint["state_dict"] = names_of(self, plain_names(checkpoint["state_dict"]))

    def on_train_start(self) -> None:
        """Go on where the run of a Lightning checkpoint, or of an HF folder, stood."""
        load_waiting_data_states(self.trainer)
        resume, self._resume = self._resume, None
        if resume is None:
            return
        windows = self.trainer.train_dataloader
        if isinstance(windows, Windows):
            windows.load_state_dict(resume["windows"])
            start_from(self.trainer, windows.next_epoch, int(resume["updates"]))

    def on_fit_start(self) -> None:
        """Let the recipe's forward and backward pass go through Lightning's strategy."""
        recipe = self.recipe
        recipe.model_wrapped = wrapped = wrapped_model(self.trainer.strategy, recipe.model)
        recipe.accelerator.run_backward = self.manual_backward
        # asked once a fit, not at every step
        self._exchanges = recipe.accelerator.num_processes > 1 or is_engine(wrapped)
        self._exchanges_always = exchanges_every_micro_batch(recipe.args) and not is_engine(wrapped)
        heard: list[Any] = [*self.trainer.callbacks, self]  # type: ignore[attr-defined]  # set by a connector
        empty = (pl.Callback.on_before_zero_grad, pl.LightningModule.on_before_zero_grad)
        self._tells_zero_grad = any(getattr(one.on_before_zero_grad, "__func__", one) not in empty for one in heard)
        if is_engine(wrapped):
            engine: Any = wrapped
            # the loss is divided by the window already
            recipe.accelerator.run_backward = lambda loss: engine.backward(loss, scale_wrt_gas=False)

    def training_step(self, window: Window, batch_idx: int) -> torch.Tensor | None:
        """Do one update: every micro-batch forward and backward, then clip, step, schedule, zero.

        Returns:
            The window's loss, detached.
        """
        recipe, observer = self.recipe, self.observer
        model, step = recipe.model_wrapped, recipe.training_step
        recipe.current_gradient_accumulation_steps = len(window)
        total: torch.Tensor | None = None
        for index, inputs in enumerate(window.micro_batches, start=1):
            is_last = index == len(window)
            recipe.accelerator.sync_gradients = is_last
            with gradients_at_the_end(model, is_last or self._exchanges_always) if self._exchanges else _ALONE:
                loss = call_by_signature(step, model, inputs, optional={"num_items_in_batch": window.num_items})
            observer.micro_batch_done(loss, inputs)
            total = loss if total is None else total + loss
            if is_last and window.is_complete:
                self._update(model)
                break
            observer.substep_ended()
            if observer.should_break():
                break
        return total

    def _update(self, model: nn.Module) -> None:
        recipe, observer = self.recipe, self.observer
        optimizer = self.optimizers()
        precision = self.trainer.precision_plugin
        if isinstance(precision, ForwardPrecision):
            precision.unscale(recipe.optimizer)
        grad_norm: Any = None
        if not is_engine(model):  # an engine clips when it steps
            grad_norm = recipe._clip_grad_norm(model) if recipe.args.max_grad_norm > 0 else None
            grad_norm = recipe._get_grad_norm(model, grad_norm=grad_norm)
        optimizer.step()  # type: ignore[union-attr]  # one optimizer
        if is_engine(model):
            engine: Any = model
            grad_norm = engine.get_global_grad_norm()
        observer.optimizer_stepped(grad_norm)
        replaced = self._replaced_schedule() is not None
        rate = recipe.optimizer.param_groups[0]["lr"] if replaced else recipe._get_learning_rate()
        observer.learning_rate_read(rate)
        skipped = isinstance(precision, ForwardPrecision) and precision.step_was_skipped
        if not skipped:
            self._step_schedule("step")
        if self._tells_zero_grad:
            before_zero_grad(self.trainer, recipe.optimizer)
        model.zero_grad()

    def _step_schedule(self, moment: str) -> None:
        """Step the schedule where its moment has come: the recipe's, or one that a callback has put in its place."""
        scheduler, replaced = self.recipe.lr_scheduler, self._replaced_schedule()
        if replaced is not None:
            if replaced.interval == moment:
                replaced.scheduler.step()
        elif moment == "step" and scheduler is not None and not follows_metric(scheduler):
            scheduler.step()

    def _replaced_schedule(self) -> Any:
        """Return Lightning's entry of a schedule that a callback has put in the place of the recipe's, else None."""
        configs = self.trainer.lr_scheduler_configs
        return configs[0] if configs and configs[0].scheduler is not self.recipe.lr_scheduler else None

    def on_train_epoch_end(self) -> None:
        """Step a schedule of epochs that a callback has put in (averaging weights does)."""
        self._step_schedule("epoch")

    def __deepcopy__(self, memo: dict[int, Any]) -> HFModule:
        """Copy the model; whoever owns the steps and the data stays the same one (averages are copies)."""
        for shared in (self.recipe, self.observer, self.evaluation):
            memo[id(shared)] = shared
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return twin

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Predict one batch and keep what the metrics need; returns its loss."""
        run = self._running_evaluation()
        if not isinstance(batch, EvaluationBatch):  # a plain loader, in a trainer of somebody else's
            batch = EvaluationBatch(batch, False, -1)
        # Lightning evaluates without gradients; whether they are needed is the prediction step's affair
        with torch.enable_grad():
            return run.step(batch)

    test_step = validation_step

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Finish a batch after its callbacks."""
        self._running_evaluation().end_batch()

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Finish a batch after its callbacks."""
        self._running_evaluation().end_batch()

    def on_validation_epoch_end(self) -> None:
        """Compute the metrics and log them, so that `callback_metrics` holds them in `on_validation_end`."""
        run = self._running_evaluation()
        metrics = (run.output or run.finish()).metrics or {}
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                # beside a Trainer the trackers have it from HF's own log
                self.log(name, float(value), batch_size=1, logger=None if self._logs_itself else False)
        if self._owns_evaluation:
            self.evaluation = None

    on_test_epoch_end = on_validation_epoch_end

    def on_validation_model_train(self) -> None:
        """Stay in eval mode: every training step sets the mode, and logs of an evaluation are told by it."""

    on_test_model_train = on_validation_model_train

    _owns_evaluation = False

    def _running_evaluation(self) -> EvaluationRun:
        if self.evaluation is None:
            self._owns_evaluation = True
            loaders = self.trainer.val_dataloaders if self.trainer.validating else self.trainer.test_dataloaders
            settings = EvaluationSettings(metric_key_prefix="eval" if self.trainer.validating else "test")
            self.evaluation = EvaluationRun(
                self.recipe, self.recipe.model_wrapped, loaders, settings, self.compute_metrics
            )
        return self.evaluation

    @contextlib.contextmanager
    def evaluating(self, run: EvaluationRun) -> Any:
        """Collect into `run` whatever is validated meanwhile."""
        previous, self.evaluation = self.evaluation, run
        try:
            yield
        finally:
            self.evaluation = previous


class ShardedHFModule(HFModule):
    """The same, whose model is sharded before its optimizer is made."""

    def configure_model(self) -> None:
        """Shard the model as the strategy's plan says."""
        strategy: Any = self.trainer.strategy
        strategy.shard(self.model)


def make_module(plan: LightningPlan, model: nn.Module, recipe: Recipe) -> HFModule:
    """Return the module that goes with a plan's strategy."""
    kind = ShardedHFModule if plan.strategy == "fsdp2" else HFModule
    return kind(model, recipe=recipe)
