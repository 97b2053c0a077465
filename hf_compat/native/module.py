"""`HFModule`: a model that trains as HF trains it, in anybody's `lightning.Trainer` or `LightningCLI`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torchmetrics import Metric, MetricCollection

from hf_compat.callbacks.manual_optimization import refuse_native, serve_callbacks, thaw_optimized
from hf_compat.callbacks.other_distribution import adopt_callbacks_of, adopt_data_of
from hf_compat.checkpoint.files import short
from hf_compat.data.types import Batch
from hf_compat.engine.embedding_noise import begin_noise, end_noise
from hf_compat.engine.evaluation import EvaluationBatch, EvaluationRun
from hf_compat.engine.internals import compile_model_only, leave_out_step_metrics, place_of
from hf_compat.engine.overflow_debug import DebugUnderflowOverflow, watch_where_asked
from hf_compat.engine.precision import leave_autocast_to_forward, unwrap_forward
from hf_compat.engine.protocols import TrainingSteps
from hf_compat.engine.torchmetrics_evaluation import check_metrics
from hf_compat.engine.windows import Window, Windows
from hf_compat.errors import ArgumentError, OverrideError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.interop.liger import apply_liger, check_liger
from hf_compat.native.agreement import share_arguments
from hf_compat.native.configured import ModelSpec, made
from hf_compat.native.evaluations import NativeEvaluations
from hf_compat.native.expected_warnings import leave_out_expected, show_expected
from hf_compat.native.kept_hooks import keep_hooks, note_hooks
from hf_compat.native.learning_log import LastUpdate
from hf_compat.native.limits import (
    accumulate_batches,
    begin_at_epoch,
    check_accumulation,
    check_strategy,
    count_updates,
    forget_updates,
    leave_epoch,
    read_when_due,
)
from hf_compat.native.loading import LoadableModule
from hf_compat.native.override_points import OverridePoints, call_overrides, refuse_unheard_methods
from hf_compat.native.own_steps import GuardedStep, leave_own_step, serve_own_step
from hf_compat.native.plain_batches import PlainBatches
from hf_compat.native.refusals import (
    names_beside,
    refuse_automatic,
    refuse_beside,
    refuse_late,
    refuse_own_forward,
    refuse_unused_hooks,
    trained_names,
)
from hf_compat.native.schedules import adopt_optimizer, keep_monitor, step_plateau, updates_of_fit
from hf_compat.native.seeding import seed_from
from hf_compat.native.steps import NativeSteps
from hf_compat.optim.lr_schedulers import follows_metric
from hf_compat.plan.argument_support import check_supported
from hf_compat.plan.compilation import compilation_of
from hf_compat.plan.lightning_equivalents import PRECISIONS, check_mechanics, check_native
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.optimization_checks import check_optimization
from hf_compat.runtime.nested import Nested
from hf_compat.runtime.process_exit import leave_at_exit
from hf_compat.training_run.best_metric import tracked_value

# By what a Lightning trainer is asked to do: the step of the module that it calls.
_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


class HFModule(OverridePoints, LoadableModule):
    """A model as a LightningModule that trains as HF's Trainer does: one Lightning batch is one update.

    It logs `loss`, `learning_rate` and `grad_norm` of each update, and `loss_epoch`, the epoch's mean. It also takes
    loaders that give plain batches: `gradient_accumulation_steps` of them make an update.

    Args:
        model: Any module whose forward returns a loss first (tuple, mapping or object with `.loss`); or the
            `class_path` and `init_args` of a function or of `from_pretrained`, which LightningCLI leaves as they are.
        args: The training arguments; the defaults where none are given.
        steps: Whoever owns the overridable steps; made from `model` and `args` where none is given.
        compute_metrics: Metrics of validation and test: a torchmetrics object, something that makes one, or a function
            of an `EvalPrediction`. A Trainer brings its own.

    Example:
        `lightning.Trainer(max_epochs=3).fit(HFModule(model, args), HFDataModule(args, train_dataset=data))`
    """

    _watch: DebugUnderflowOverflow | None = None  # while it trains with `debug="underflow_overflow"`
    _own_steps: NativeSteps | None = None
    _is_set_up = False  # for the run under way
    _beside: Sequence[str] = ()  # parameters of the fit that are no part of the model
    _optimized: frozenset[int] | None = None  # ids of those that HF's optimizer was made for

    def __init__(
        self,
        model: nn.Module | ModelSpec,
        args: TrainingArguments | None = None,
        steps: TrainingSteps | None = None,
        compute_metrics: Metric | MetricCollection | Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            spec, model = model, made(model, "model")
            if not isinstance(model, nn.Module):
                raise ArgumentError(
                    f"`model` is {short(spec)}, and no torch.nn.Module is made of it.\n\n"
                    "Hint: model: {class_path: package.Class, init_args: {…}}, with arguments that the class takes."
                )
        own = NativeSteps(model, args) if steps is None else None
        if own is not None:
            check_supported(own.args)
            compilation_of(own.args)
            if own.args.use_liger_kernel:
                check_liger(model, own.args.liger_kernel_config)
            if type(self).configure_optimizers is HFModule.configure_optimizers:
                check_optimization(own.args)
            check_metrics(compute_metrics, None, False)
        super().__init__(model, own or steps, compute_metrics)  # type: ignore[arg-type]  # one of them is there
        self._own_steps = own
        self.logs_to_lightning = own is not None
        if own is not None:
            self._become_native(own)

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        refuse_unheard_methods(cls)
        keep_hooks(cls, HFModule)

    def __getstate__(self) -> dict[str, object]:
        """Leave out the guard of a step of the user's own, too."""
        copied = SimpleNamespace(**super().__getstate__())
        leave_own_step(copied)
        return vars(copied)

    def _take_model(self, model: nn.Module) -> None:
        """Train the model that a subclass sets in the place of the one that the constructor was given."""
        steps = self._own_steps
        if steps is None or steps.model is model:
            return
        if self._is_set_up and self.trainer.state.status == TrainerStatus.RUNNING:
            raise OverrideError(
                f"`model` of {type(self).__name__} was replaced in a run that has been set up with another one.\n\n"
                "Hint: set it in `__init__`, or in `setup` before `super().setup(stage)`."
            )
        if steps.args.use_liger_kernel:
            check_liger(model, steps.args.liger_kernel_config)
        steps.prepare_model(model)
        self.__dict__.pop("backbone", None)  # what BackboneFinetuning was shown of the other one

    @property
    def _has_own_step(self) -> bool:
        return type(self).training_step is not HFModule.training_step

    def _become_native(self, steps: NativeSteps) -> None:
        """Do what a Trainer does otherwise: watch updates, gather batches and metrics, seed."""
        self._last_update = self.observer = LastUpdate()
        self._plain_batches = PlainBatches(steps)
        self._evaluations = NativeEvaluations(steps, self.compute_metrics)
        self._seeded_in = os.getpid()
        seed_from(steps.args)
        self.keep_hyperparameters()

    def configure_callbacks(self) -> Sequence[pl.Callback] | pl.Callback:
        """Refuse what the trainer would do to gradients beside the arguments: Lightning asks this before it checks."""
        if self._own_steps is not None:
            self._is_set_up = False
            adopt_callbacks_of(self.trainer)
            adopt_data_of(self.trainer, self)
            leave_out_expected()
            forget_updates(self.trainer)
            assert self.trainer.state.fn is not None  # one of them asks for callbacks
            self._refuse_what_step_leaves_out(_STEPS[self.trainer.state.fn])
        if self._own_steps is not None and not self.automatic_optimization:
            if self.trainer.state.fn == "fit":
                refuse_unused_hooks(self)
            check_mechanics(self._own_steps.args, self.trainer)
            refuse_native(self.trainer.callbacks, self.model)  # type: ignore[attr-defined]  # set by a connector
            check_strategy(self.trainer.strategy)
        serve_callbacks(self.trainer, self, self.model)
        return super().configure_callbacks()

    def _refuse_what_step_leaves_out(self, step: str) -> None:
        """Refuse what a step of this class would not use, where a subclass does not override it."""
        if getattr(type(self), step) is getattr(HFModule, step):
            refuse_own_forward(self, HFModule, step)
            if step == "training_step":
                refuse_automatic(self)

    def setup(self, stage: str) -> None:
        """Take this process's place; compare a trainer of the user's own with the arguments."""
        if self.trainer.world_size > 1:
            leave_at_exit()
        if self._own_steps is not None:
            self._set_up_native(self._own_steps, stage)
        super().setup(stage)

    def _set_up_native(self, steps: NativeSteps, stage: str) -> None:
        self._evaluations.forget()
        datamodule = getattr(self.trainer, "datamodule", None)
        data = getattr(datamodule, "steps", None)
        if datamodule is not None and isinstance(data, NativeSteps):
            datamodule.is_set_up = True  # a subclass's `setup` may have left that out
            share_arguments(steps, data)
            if steps.processing_class is None:
                steps.processing_class = data.processing_class
        steps.take_place(*place_of(self.trainer))
        steps.take_device(self.trainer.strategy.root_device)
        if not self.automatic_optimization:
            compile_model_only(self, self.model)
        leave_autocast_to_forward(self.trainer.strategy, self.model, steps.args.device.type)
        call_overrides(self, steps)
        self._is_set_up = True
        if stage != "fit":
            return
        if os.getpid() != self._seeded_in:  # a process that Lightning has spawned
            seed_from(steps.args)
        self._compare_with_trainer()
        keep_monitor(self)
        self._stop_watching()  # of a fit that has failed
        self._watch = watch_where_asked(self.model, steps.args.debug)
        if self.automatic_optimization:
            check_accumulation(self.trainer, steps.args.gradient_accumulation_steps)
        else:
            count_updates(self.trainer, 1 if isinstance(data, NativeSteps) else steps.args.gradient_accumulation_steps)
        if steps.args.use_liger_kernel:
            apply_liger(self.model, steps.args.liger_kernel_config)
        begin_noise(self.trainer, self.model, steps.args.neftune_noise_alpha)
        self.model.train()

    def teardown(self, stage: str) -> None:
        """Leave the model and the data module as they were."""
        if self._own_steps is not None:
            self._is_set_up = False
            show_expected()
            self._stop_watching()
            unwrap_forward(self.model)
            end_noise(self.trainer)
            datamodule = getattr(self.trainer, "datamodule", None)
            if datamodule is not None and hasattr(datamodule, "is_set_up"):
                datamodule.is_set_up = False
            forget_updates(self.trainer)
            self.leave_fit()
            leave_own_step(self)
        super().teardown(stage)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def _compare_with_trainer(self) -> None:
        trainer: Any = self.trainer
        says = {"precision": trainer.precision}
        if not trainer.fast_dev_run:  # it makes its own lengths, whatever a script has set for the real run
            says |= {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
        # -1 epochs: the updates end the run
        told = {name: value for name, value in says.items() if value not in (None, -1) or name == "precision"}
        if str(told["precision"]) not in PRECISIONS:  # a kind that the arguments have no word for
            del told["precision"]
        check_native(self.steps.args, told)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make optimizer and schedule; each native fit has its own."""
        steps = self._own_steps
        if steps is not None:
            steps.forget_optimizer()
            if self._has_own_step and names_beside(self, self.model):
                steps.create_optimizer(self)
            self._optimized = frozenset(id(parameter) for parameter in trained_names(self).values())
        return super().configure_optimizers()

    def _planned_updates(self) -> int:
        if self._own_steps is None:
            return super()._planned_updates()
        return updates_of_fit(self.trainer, self._own_steps)

    def on_fit_start(self) -> None:
        """Work with the optimizer that is in force."""
        if self._own_steps is not None:
            self._check_trained()
            if self.trainer.enable_validation:
                self._refuse_what_step_leaves_out("validation_step")
        if self._own_steps is not None and not self.automatic_optimization:
            if not self._has_own_step or len(self.trainer.optimizers) == 1:
                adopt_optimizer(self.trainer, self._own_steps)
            if isinstance(self.trainer.train_dataloader, Windows):
                forget_updates(self.trainer)
        thaw_optimized(self.trainer)
        super().on_fit_start()
        if self._has_own_step:
            serve_own_step(self, self.stepping)
            if self._own_steps is not None:
                GuardedStep(self, self._own_steps.args.gradient_accumulation_steps)

    def _check_trained(self) -> None:
        """Refuse parameters that the updates of this fit would leave as they are."""
        self._beside = names_beside(self, self.model)
        if not self._has_own_step:
            refuse_beside(self, self._beside)
        if self._optimized is not None:
            refuse_late(self, self._optimized)
        self._optimized = None

    def on_train_start(self) -> None:
        """Begin to read; continue where the run of a checkpoint ended."""
        if self._own_steps is not None and self.automatic_optimization:
            accumulate_batches(self.trainer, self._own_steps.args.gradient_accumulation_steps)
        read_when_due(self.trainer)
        super().on_train_start()

    def on_train_epoch_start(self) -> None:
        """Begin an epoch of plain batches."""
        if self._own_steps is not None:
            read_when_due(self.trainer)
            self._plain_batches.start_epoch()
            begin_at_epoch(self.trainer.train_dataloader, self.trainer.current_epoch)

    def training_step(self, window: Window | Batch, batch_idx: int) -> torch.Tensor | None:
        """Do one update and log what it measured; of plain batches, gather an update's.

        Returns:
            The window's loss, detached; None where the update takes more batches.
        """
        if self._own_steps is None:
            return super().training_step(window, batch_idx)
        guarded = self.__dict__.get("training_step")
        if isinstance(guarded, GuardedStep):  # a step of the user's own lets this one make the update
            guarded.made_update = True
            refuse_automatic(self)
            refuse_own_forward(self, HFModule, "training_step")
            refuse_beside(self, self._beside)
        if not isinstance(window, Window):
            gathered = self._plain_batches.add(window, self.trainer.is_last_batch)
            if gathered is None:
                leave_out_step_metrics(self.trainer)
                return None
            window = gathered
        window.micro_batches = [self._in_true_precision(batch) for batch in window.micro_batches]
        self._last_update.forget()
        loss = super().training_step(window, batch_idx)
        self._log_update(loss)
        if isinstance(guarded, GuardedStep):
            guarded.loss_of_update = loss
        return loss

    def _in_true_precision(self, batch: Batch) -> Batch:
        """Return a batch with its floating numbers in the precision of the weights (`precision="bf16-true"`)."""
        if "true" not in str(self.trainer.precision):
            return batch
        return self.trainer.precision_plugin.convert_input(batch)

    def _log_update(self, loss: torch.Tensor | None) -> None:
        measured = self._last_update.measured()
        if loss is None or not measured or self.trainer.barebones:  # no update was made, or nothing may be logged
            return
        self.log("loss", loss, prog_bar=True)
        self.log("loss_epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        for name, value in measured.items():
            self.log(name, value)

    def on_train_epoch_end(self) -> None:
        """Finish the epoch; step a schedule of Lightning's that follows a metric."""
        if self._own_steps is not None and self.trainer.is_last_batch:
            leave_epoch(self.trainer.train_dataloader)
        super().on_train_epoch_end()
        config = self._replaced_schedule() if self._own_steps is not None else None
        if config is not None and config.reduce_on_plateau and not self.automatic_optimization:
            step_plateau(self.trainer, config)

    def on_validation_model_zero_grad(self) -> None:
        """Keep the gradients of a window that the next epoch completes; an update zeroes its own."""
        if self._own_steps is None or self.automatic_optimization:
            super().on_validation_model_zero_grad()

    def on_validation_model_eval(self) -> None:
        """Evaluate the weights that a schedule-free optimizer has averaged."""
        super().on_validation_model_eval()
        self._to_averaged_weights()

    def on_test_model_eval(self) -> None:
        """Test the weights that a schedule-free optimizer has averaged."""
        super().on_test_model_eval()
        self._to_averaged_weights()

    def on_predict_model_eval(self) -> None:
        """Predict with the weights that a schedule-free optimizer has averaged."""
        super().on_predict_model_eval()
        self._to_averaged_weights()

    def _to_averaged_weights(self) -> None:
        if self._own_steps is not None:  # a Trainer does so itself
            self.stepping.to_evaluation()

    def validation_step(
        self, batch: EvaluationBatch | Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> torch.Tensor | None:
        """Predict one batch and keep what the metrics need; returns its loss."""
        if self._own_steps is not None:
            refuse_own_forward(self, HFModule, "validation_step")
            batch = batch if isinstance(batch, EvaluationBatch) else EvaluationBatch(batch, False, -1)
            batch.inputs = self._in_true_precision(batch.inputs)
        return super().validation_step(batch, batch_idx, dataloader_idx)

    test_step = validation_step

    def predict_step(self, batch: EvaluationBatch | Batch, batch_idx: int, dataloader_idx: int = 0) -> Nested:
        """Return the logits of one batch, as `Trainer.predict` keeps them."""
        refuse_own_forward(self, HFModule, "predict_step")
        inputs = self._in_true_precision(batch.inputs if isinstance(batch, EvaluationBatch) else batch)
        steps = self.steps
        with torch.enable_grad():  # the prediction step decides whether it needs gradients
            model = steps.compiled(steps.model_wrapped)
            _, logits, _ = steps.prediction_step(model, inputs, prediction_loss_only=False)
        return logits

    def _running_evaluation(self, dataloader_idx: int = 0) -> EvaluationRun:
        if self.evaluation is not None:
            return self.evaluation
        return self._evaluations.run_of(self.trainer, dataloader_idx)

    def _evaluated_metrics(self) -> Mapping[str, object]:
        if self._own_steps is None or self.evaluation is not None:
            return super()._evaluated_metrics()
        metrics = self._evaluations.finish()
        scheduler = self._own_steps.lr_scheduler
        if self.trainer.validating and self.trainer.state.fn == "fit" and follows_metric(scheduler):
            scheduler.step(tracked_value(metrics, str(self._own_steps.args.metric_for_best_model)))
        return metrics


note_hooks(HFModule)
HFModule.own_ends_of_batches = frozenset({HFModule.on_validation_batch_end, HFModule.on_test_batch_end})


class TrainerModule(HFModule):
    """The module that a Trainer of ours trains: a step sets the mode of its model itself."""

    # what the module of somebody's own trainer does first is done already
    validation_step = test_step = LoadableModule.validation_step

    def on_validation_model_train(self) -> None:
        """Stay in eval mode: values that steps log in eval mode are the evaluation's."""

    on_test_model_train = on_validation_model_train


class FSDP2Module(TrainerModule):
    """The same, whose model is sharded before its optimizer is made."""

    def configure_model(self) -> None:
        """Shard the model as the strategy's plan says."""
        strategy: Any = self.trainer.strategy
        strategy.shard(self.model)


def make_module(plan: LightningPlan, model: nn.Module, steps: TrainingSteps) -> HFModule:
    """Return the module that goes with a plan's strategy."""
    kind = FSDP2Module if plan.strategy == "fsdp2" else TrainerModule
    return kind(model, steps=steps)
