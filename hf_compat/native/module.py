"""`HFModule`: a model that trains as HF trains it, in any `lightning.Trainer` or `LightningCLI`."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.types import STEP_OUTPUT, OptimizerLRScheduler
from torch import nn
from torchmetrics import Metric, MetricCollection

from hf_compat.callbacks.callback_set import prepare_lightning_callbacks, refuse_native, unfreeze_optimized
from hf_compat.callbacks.hf_in_lightning import wrap_hf_callbacks
from hf_compat.callbacks.loggers import adopt_callbacks_of, adopt_data_of
from hf_compat.data.tree import find_batch_size
from hf_compat.data.types import Batch
from hf_compat.engine.evaluation import EvaluationBatch, EvaluationRun
from hf_compat.engine.internals import compile_model_only, ranks_of, skip_step_metrics
from hf_compat.engine.kept_batches import check_metrics
from hf_compat.engine.model_hooks import OverflowWatch, begin_noise, end_noise, watch_if_enabled
from hf_compat.engine.precision import ForwardPrecision, move_autocast_to_forward, unwrap_forward
from hf_compat.engine.window_trainer import EXPECTED
from hf_compat.engine.windows import Window, Windows
from hf_compat.errors import ArgumentError, OverrideError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.interop.transformers_models import apply_liger, check_liger
from hf_compat.native.loading import LoadableModule, ModelSpec, made
from hf_compat.native.own_methods import (
    OverridePoints,
    call_overrides,
    keep_hooks,
    names_beside,
    note_hooks,
    overrides_automatic_hooks,
    refuse_late,
    refuse_unheard_methods,
    refuse_unused_hooks,
    tell_of_untrained,
    trained_names,
)
from hf_compat.native.own_steps import (
    AuthorStep,
    GuardedStep,
    leave_own_step,
    loss_of_batch,
    makes_updates,
    serve_own_step,
)
from hf_compat.native.plain_batches import PlainBatches, share_arguments
from hf_compat.native.steps import (
    NativeEvaluations,
    NativeSteps,
    accumulate_batches,
    adopt_optimizer,
    begin_at_epoch,
    check_accumulation,
    check_strategy,
    count_updates,
    forget_updates,
    keep_monitor,
    leave_epoch,
    optimizers_of,
    read_when_due,
    seed_from,
    step_plateau,
    updates_of_fit,
)
from hf_compat.optim.lr_schedulers import follows_metric
from hf_compat.plan.argument_support import (
    PRECISIONS,
    check_mechanics,
    check_native,
    check_optimization,
    check_supported,
)
from hf_compat.runtime.collectives import leave_at_exit
from hf_compat.runtime.nested import Nested
from hf_compat.runtime.text import brief, check_callables
from hf_compat.training_run.run import tracked_value

_EXPECTED = frozenset(
    {
        *(message for message in EXPECTED if "sync_dist" not in message),  # of a subclass's own logs it holds
        # every HFModule has a `validation_step`
        ".*You defined a `validation_step` but have no `val_dataloader`.*",
    }
)


def leave_out_expected() -> None:
    """Leave the warnings out from now on."""
    for message in _EXPECTED:
        warnings.filterwarnings("ignore", message)


def show_expected() -> None:
    """Show the warnings again: other modules of this process may need them."""
    warnings.filters[:] = [  # type: ignore[index]  # a list, which typeshed declares to be read only
        entry for entry in warnings.filters if getattr(entry[1], "pattern", None) not in _EXPECTED
    ]


_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class HFModule(OverridePoints, LoadableModule):
    """A model as a LightningModule that trains as HF's Trainer does: one Lightning batch is one update.

    It logs `loss`, `learning_rate` and `grad_norm` of each update, and `loss_epoch`, the epoch's mean. It also takes
    loaders that give plain batches: `gradient_accumulation_steps` of them make an update.

    Args:
        model: Any module whose forward returns a loss first (tuple, mapping or object with `.loss`); or the
            `class_path` and `init_args` of a function or of `from_pretrained`, which LightningCLI leaves as they are.
        args: The training arguments; the defaults where none are given.
        steps: HF's steps for this model; made from `model` and `args` where none are given.
        compute_metrics: Metrics of validation and test: a torchmetrics object, something that makes one, or a function
            of an `EvalPrediction`.
        compute_loss_func: From outputs, labels and `num_items_in_batch` to the loss, as of `transformers.Trainer`.

    Examples:
        `lightning.Trainer(max_epochs=3).fit(HFModule(model, args), HFDataModule(args, train_dataset=data))`
    """

    logs_to_lightning = True
    steps: NativeSteps
    _watch: OverflowWatch | None = None  # while it trains with `debug="underflow_overflow"`
    _is_set_up = False  # for the run under way
    _optimized: frozenset[int] | None = None  # ids of those that HF's optimizer was made for
    _said_automatic: bool | None = None  # what the author has said of `automatic_optimization`
    _author: AuthorStep | None = None  # in a fit whose updates are made of an author's loss
    _guarded: GuardedStep | None = None  # in one where the author makes updates

    def __init__(
        self,
        model: nn.Module | ModelSpec,
        args: TrainingArguments | None = None,
        steps: NativeSteps | None = None,
        compute_metrics: Metric | MetricCollection | Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            spec, model = model, made(model, "model")
            if not isinstance(model, nn.Module):
                raise ArgumentError(
                    f"`model` is {brief(spec, 60)}, and no torch.nn.Module is made of it.\n\n"
                    "Hint: model: {class_path: package.Class, init_args: {…}}, with arguments that the class takes."
                )
        check_callables(compute_loss_func=compute_loss_func)
        own = NativeSteps(model, args) if steps is None else steps
        own.compute_loss_func = compute_loss_func
        check_supported(own.args)
        if own.args.use_liger_kernel:
            check_liger(model, own.args.liger_kernel_config)
        if type(self).configure_optimizers is HFModule.configure_optimizers:
            check_optimization(own.args)
        check_metrics(compute_metrics, None, False)
        super().__init__(model, own, compute_metrics)
        self.__dict__.pop("_said_automatic", None)  # what the base class has said
        # what a Trainer does otherwise: watch updates, gather batches and metrics, seed
        self._plain_batches = PlainBatches(own)
        self._evaluations = NativeEvaluations(own, self.compute_metrics)
        self._seeded_in = os.getpid()
        seed_from(own.args)
        self.keep_hyperparameters()

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        said = cls.automatic_optimization
        if isinstance(said, bool):  # in the body of the class, where it would hide the property
            cls._said_automatic = said
            cls.automatic_optimization = HFModule.automatic_optimization
        refuse_unheard_methods(cls)
        keep_hooks(cls, HFModule)

    @property
    def automatic_optimization(self) -> bool:
        """Whether Lightning makes the updates. Where the author says nothing, HF's updates are made.

        A `training_step` of the author's own then returns a loss for them; hooks of its own that only automatic
        optimization calls (`optimizer_step` …) leave the updates to Lightning.
        """
        if self._said_automatic is not None:
            return self._said_automatic
        return self._has_own_step and overrides_automatic_hooks(self, HFModule)

    @automatic_optimization.setter
    def automatic_optimization(self, said: bool) -> None:
        self._said_automatic = said

    @property
    def learning_rate(self) -> float:
        """The rate that training begins with; setting it, as Lightning's `Tuner` does, leaves the arguments alone."""
        return self.steps.args.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if "steps" not in vars(self):
            raise OverrideError(
                f"`learning_rate` of {type(self).__name__} was set before `super().__init__(model, args)`.\n\n"
                "Hint: set it after, or in the arguments."
            )
        self.steps.set_learning_rate(rate)

    def __deepcopy__(self, memo: dict[int, Any]) -> HFModule:
        """Copy the model with its steps, which are this module's own."""
        return self._copied(memo)

    def __getstate__(self) -> dict[str, object]:
        """Leave out what a fit has put around a step of the user's own, too."""
        state = super().__getstate__()
        if state.pop("_author", None) is not None:
            state.pop("training_step", None)
        copied = SimpleNamespace(**state)
        leave_own_step(copied)
        return vars(copied)

    def _take_model(self, model: nn.Module) -> None:
        """Train the model that a subclass sets in the place of the one that the constructor was given."""
        steps: NativeSteps | None = vars(self).get("steps")
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

    @property
    def _is_attached(self) -> bool:
        """Whether a lightning.Trainer has this module; Fabric has a stand-in for one."""
        try:
            return isinstance(self.trainer, pl.Trainer)
        except RuntimeError:
            return False

    @property
    def _returns_loss_for_updates(self) -> bool:
        """Whether HF's updates are made of the loss that a `training_step` of the author's own returns."""
        return self._has_own_step and self._said_automatic is None and not self.automatic_optimization

    @property
    def _has_own_forward(self) -> bool:
        return type(self).forward is not HFModule.forward

    @property
    def forward_owner(self) -> nn.Module | None:
        """This module, where a `forward` of its own says what a batch holds; None where the model's does."""
        if not self._has_own_forward:
            return None
        kinds = {parameter.kind for parameter in inspect.signature(self.forward).parameters.values()}
        return None if inspect.Parameter.VAR_KEYWORD in kinds else self

    def _called_model(self) -> nn.Module:
        """Return what forward passes go through: this module where it has a forward of its own, else the model."""
        return self if self._has_own_forward else super()._called_model()

    def configure_callbacks(self) -> Sequence[pl.Callback] | pl.Callback:
        """Refuse what the trainer would do to gradients beside the arguments: Lightning asks this before it checks."""
        self._is_set_up = False
        self._leave_author()  # of a fit that has failed
        adopt_callbacks_of(self.trainer)
        wrap_hf_callbacks(self.trainer)
        adopt_data_of(self.trainer, self)
        leave_out_expected()
        forget_updates(self.trainer)
        if not self.automatic_optimization:
            if self.trainer.state.fn == "fit":
                refuse_unused_hooks(self, HFModule)
            check_mechanics(self.steps.args, self.trainer)
            refuse_native(self.trainer.callbacks, self)  # type: ignore[attr-defined]  # set by a connector
            check_strategy(self.trainer.strategy)
        prepare_lightning_callbacks(self.trainer, self, self.model)
        return super().configure_callbacks()

    def setup(self, stage: str) -> None:
        """Take this process's place; compare a trainer of the user's own with the arguments."""
        if self.trainer.world_size > 1:
            leave_at_exit()
        self._set_up_steps()
        if stage == "fit":
            self._set_up_fit()
        super().setup(stage)

    def _set_up_steps(self) -> None:
        """Let the steps work as this process of the trainer, on its device, with what its data module says."""
        steps = self.steps
        self._evaluations.forget()
        datamodule = getattr(self.trainer, "datamodule", None)
        data = getattr(datamodule, "steps", None)
        if datamodule is not None and isinstance(data, NativeSteps):
            datamodule.is_set_up = True  # a subclass's `setup` may have left that out
            share_arguments(steps, data)
            if steps.processing_class is None:
                steps.processing_class = data.processing_class
        steps.take_place(*ranks_of(self.trainer))
        steps.take_device(self.trainer.strategy.root_device)
        if not self.automatic_optimization:
            compile_model_only(self, self.model)
        steps.take_forward_of(self.forward_owner)
        own = [name for name in _STEPS if getattr(type(self), name) is not getattr(HFModule, name)]
        if self._returns_loss_for_updates:
            own.remove("training_step")  # an update of HF's calls it
        called = steps.model_wrapped = self._called_model()
        move_autocast_to_forward(self.trainer.strategy, called, steps.args.device.type, own)
        call_overrides(self, steps)
        self._is_set_up = True

    def _set_up_fit(self) -> None:
        """Compare a trainer of the user's own with the arguments, and make the model ready to be trained."""
        steps = self.steps
        if os.getpid() != self._seeded_in:  # a process that Lightning has spawned
            seed_from(steps.args)
        self._compare_with_trainer()
        keep_monitor(self)
        self._stop_watching()  # of a fit that has failed
        self._watch = watch_if_enabled(self.model, steps.args.debug)
        if self.automatic_optimization:
            check_accumulation(self.trainer, steps.args.gradient_accumulation_steps)
        else:
            data = getattr(getattr(self.trainer, "datamodule", None), "steps", None)
            count_updates(self.trainer, 1 if isinstance(data, NativeSteps) else steps.args.gradient_accumulation_steps)
        if steps.args.use_liger_kernel:
            apply_liger(self.model, steps.args.liger_kernel_config)
        begin_noise(self.trainer, self.model, steps.args.neftune_noise_alpha)
        self.model.train()

    def teardown(self, stage: str) -> None:
        """Leave the model and the data module as they were."""
        self._is_set_up = False
        show_expected()
        self._stop_watching()
        unwrap_forward(self._called_model())
        end_noise(self.trainer)
        datamodule = getattr(self.trainer, "datamodule", None)
        if datamodule is not None and hasattr(datamodule, "is_set_up"):
            datamodule.is_set_up = False
        forget_updates(self.trainer)
        self.leave_fit()
        leave_own_step(self)
        self._leave_author()
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
        steps = self.steps
        steps.forget_optimizer()
        call_overrides(self, steps)
        if names_beside(self, self.model) and "create_optimizer" not in vars(steps):
            steps.create_optimizer(self)
        self._optimized = frozenset(id(parameter) for parameter in trained_names(self).values())
        return super().configure_optimizers()

    def _planned_updates(self) -> int:
        steps = self.steps
        if self._is_attached:
            return updates_of_fit(self.trainer, steps)
        updates = steps.args.max_steps if self.num_training_updates is None else self.num_training_updates
        if updates <= 0:
            raise ArgumentError(
                "`configure_optimizers` was called without a lightning.Trainer, and nothing says for how many updates."
                "\n\nHint: set `max_steps` in TrainingArguments, or `num_training_updates` of the module."
            )
        return updates

    def on_fit_start(self) -> None:
        """Work with the optimizer that is in force."""
        # Refuse parameters that the updates of this fit would leave as they are
        self.names_beside = names_beside(self, self.model)
        if self._optimized is not None:
            refuse_late(self, self._optimized)
        self._optimized = None
        if not self.automatic_optimization:
            count = len(optimizers_of(self.trainer))
            if count == 1 or not self._has_own_step or (count == 0 and self._returns_loss_for_updates):
                adopt_optimizer(self.trainer, self.steps)
            if isinstance(self.trainer.train_dataloader, Windows):
                forget_updates(self.trainer)
        unfreeze_optimized(self.trainer)
        super().on_fit_start()
        if self._has_own_step:
            serve_own_step(self, self.stepping)
            if self._returns_loss_for_updates and len(optimizers_of(self.trainer)) == 1:
                self._author = vars(self.steps)["training_step"] = AuthorStep(self, self.steps)
                self.__dict__["training_step"] = functools.partial(HFModule.training_step, self)
            elif not self.automatic_optimization:
                self._guarded = GuardedStep(self, self.steps.args.gradient_accumulation_steps)

    def _leave_author(self) -> None:
        """Give the steps and the module their own `training_step` back."""
        self._guarded = None
        if self._author is not None:
            vars(self.steps).pop("training_step", None)
            self.__dict__.pop("training_step", None)
            self._author = None

    def on_train_start(self) -> None:
        """Begin to read; continue where the run of a checkpoint ended."""
        if self.automatic_optimization:
            accumulate_batches(self.trainer, self.steps.args.gradient_accumulation_steps)
        read_when_due(self.trainer)
        super().on_train_start()

    def on_train_epoch_start(self) -> None:
        """Begin an epoch of plain batches."""
        read_when_due(self.trainer)
        self._plain_batches.start_epoch()
        begin_at_epoch(self.trainer.train_dataloader, self.trainer.current_epoch)

    def training_step(  # type: ignore[override]  # with a step of the author's own, what that returned
        self, window: Window | Batch, batch_idx: int
    ) -> STEP_OUTPUT:
        """Do one update and log what it measured; of plain batches, gather an update's.

        Returns:
            The window's loss, detached; None where the update takes more batches. Where something else makes the
            update (a step of a subclass that returns a loss, Lightning, Fabric, a loop by hand) the loss of the batch,
            with its graph.
        """
        steps, author = self.steps, self._author
        if author is not None and author.runs:
            return author.loss_of_hf(window)
        if not self._is_set_up:
            return loss_of_batch(self._without_trainer(), window)
        if self.automatic_optimization:
            return loss_of_batch(steps, window)
        first = batch_idx * steps.args.gradient_accumulation_steps  # the number of the micro-batch
        if not isinstance(window, Window):
            gathered = self._plain_batches.add(window, self.trainer.is_last_batch)
            if gathered is None:
                skip_step_metrics(self.trainer)
                return None
            window, first = gathered, batch_idx + 1 - len(gathered)
        if author is not None:
            author.batch_idx = first
        window.micro_batches = [self._in_true_precision(batch) for batch in window.micro_batches]
        self.measured = {}
        loss = super().training_step(window, batch_idx)
        self._log_update(loss)
        own = author or self._guarded
        return loss if own is None else own.update_made(loss)

    def log(self, name: str, value: object, *args: object, **kwargs: object) -> None:
        """Log a value as any LightningModule; its weight in a mean is the number of samples in the (micro-)batch."""
        if self._author is not None and self._author.runs:
            self._author.logged.add(name)
            kwargs["batch_size"] = kwargs.get("batch_size") or find_batch_size(self._author.batch) or 1
        super().log(name, value, *args, **kwargs)

    def _update(self, window: Window) -> None:
        if self.names_beside:
            tell_of_untrained(self, self.names_beside)
        super()._update(window)

    def manual_backward(self, loss: torch.Tensor, *args: object, **kwargs: object) -> None:
        """Run a backward pass in a step that makes its updates itself.

        Raises:
            OverrideError: The step has not said so, and an update is made of the loss that it returns.
        """
        if self._author is not None and self._author.runs:
            raise makes_updates(self, "calls `manual_backward`")
        super().manual_backward(loss, *args, **kwargs)

    def _without_trainer(self) -> NativeSteps:
        """Make the steps ready for Fabric, or for a loop by hand."""
        steps = self.steps
        steps.take_device(self.device)
        steps.take_forward_of(self.forward_owner)
        call_overrides(self, steps)
        steps.model_wrapped = self if self._has_own_forward else self.model
        return steps

    def _in_true_precision(self, batch: Batch) -> Batch:
        """Return a batch with its floating numbers in the precision of the weights (`precision="bf16-true"`)."""
        if not self._is_set_up or "true" not in str(self.trainer.precision):
            return batch
        return self.trainer.precision_plugin.convert_input(batch)

    def _log_update(self, loss: torch.Tensor | None) -> None:
        measured = self.measured
        if loss is None or not measured or self.trainer.barebones:  # no update was made, or nothing may be logged
            return
        logged = set() if self._author is None else self._author.logged
        if "loss" not in logged:
            self.log("loss", loss, prog_bar=True)
            if "loss_epoch" not in logged:
                self.log("loss_epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        for name, value in measured.items():
            if name not in logged:
                self.log(name, value)

    def on_train_epoch_end(self) -> None:
        """Finish the epoch; step a schedule of Lightning's that follows a metric."""
        if self.trainer.is_last_batch:
            leave_epoch(self.trainer.train_dataloader)
        super().on_train_epoch_end()
        config = self._replaced_schedule()
        if config is not None and config.reduce_on_plateau and not self.automatic_optimization:
            step_plateau(self.trainer, config)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip at `max_grad_norm` of the arguments where Lightning makes the updates, and was not told otherwise."""
        precision = self.trainer.precision_plugin
        if gradient_clip_val is None and not self.stepping.steps_in_backward:
            if isinstance(precision, ForwardPrecision):
                precision.unscale(optimizer)
            gradient_clip_val, gradient_clip_algorithm = self.steps.args.max_grad_norm, "norm"
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_validation_model_zero_grad(self) -> None:
        """Keep the gradients of a window that the next epoch completes; an update zeroes its own."""
        if self.automatic_optimization:
            super().on_validation_model_zero_grad()

    def on_validation_model_eval(self) -> None:
        """Evaluate the weights that a schedule-free optimizer has averaged."""
        super().on_validation_model_eval()
        self.stepping.to_evaluation()

    def on_test_model_eval(self) -> None:
        """Test the weights that a schedule-free optimizer has averaged."""
        super().on_test_model_eval()
        self.stepping.to_evaluation()

    def on_predict_model_eval(self) -> None:
        """Predict with the weights that a schedule-free optimizer has averaged."""
        super().on_predict_model_eval()
        self.stepping.to_evaluation()

    def validation_step(
        self, batch: EvaluationBatch | Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> torch.Tensor | None:
        """Predict one batch and keep what the metrics need; returns its loss."""
        batch = batch if isinstance(batch, EvaluationBatch) else EvaluationBatch(batch, False, -1)
        batch.inputs = self._in_true_precision(batch.inputs)
        if not self._is_set_up:  # in Fabric, or in a loop by hand
            steps = self._without_trainer()
            return steps.prediction_step(steps.model_wrapped, batch.inputs, prediction_loss_only=True)[0]
        return super().validation_step(batch, batch_idx, dataloader_idx)

    test_step = validation_step

    def predict_step(self, batch: EvaluationBatch | Batch, batch_idx: int, dataloader_idx: int = 0) -> Nested:
        """Return the logits of one batch, as `Trainer.predict` keeps them."""
        inputs = self._in_true_precision(batch.inputs if isinstance(batch, EvaluationBatch) else batch)
        steps = self.steps if self._is_set_up else self._without_trainer()
        with torch.enable_grad():  # the prediction step decides whether it needs gradients
            model = steps.compiled(steps.model_wrapped)
            _, logits, _ = steps.prediction_step(model, inputs, prediction_loss_only=False)
        return logits

    def _own_evaluation(self, dataloader_idx: int) -> EvaluationRun:
        return self._evaluations.run_of(self.trainer, dataloader_idx)

    def _finish_own_evaluations(self) -> Mapping[str, object]:
        metrics = self._evaluations.finish()
        scheduler = self.steps.lr_scheduler
        if self.trainer.validating and self.trainer.state.fn == "fit" and follows_metric(scheduler):
            scheduler.step(tracked_value(metrics, str(self.steps.args.metric_for_best_model)))
        return metrics


note_hooks(HFModule)
