"""`HFModule`: a model that trains as HF trains it, in any `lightning.Trainer` or `LightningCLI`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.types import STEP_OUTPUT, LRSchedulerConfig, OptimizerLRScheduler
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection

from hf_compat.callbacks.callback_set import (
    leave_lightning_callbacks,
    prepare_lightning_callbacks,
    refuse_native,
    unfreeze_optimized,
)
from hf_compat.callbacks.hf_in_lightning import wrap_hf_callbacks
from hf_compat.checkpoint.convert import HFCheckpointIO
from hf_compat.data.loader import PreparedDataLoader
from hf_compat.data.types import Batch
from hf_compat.engine.evaluation import EvaluationBatch, check_metrics
from hf_compat.engine.internals import (
    attached_trainer,
    compile_model_only,
    given_hyperparameters,
    given_to_fit,
    overrides,
    replace_schedule_steps,
    skip_step_metrics,
    skips_backward,
)
from hf_compat.engine.model_hooks import begin_hooks, end_hooks
from hf_compat.engine.module import samples_of
from hf_compat.engine.quiet import OF_LIGHTNING
from hf_compat.engine.strategies import ForwardPrecision, move_autocast_to_forward, unwrap_forward
from hf_compat.engine.windows import Window, Windows
from hf_compat.errors import ArgumentError, OverrideError, warn_once
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.inert import OWN_OPTIMIZER, OWN_OPTIMIZER_OBJECT, OWN_SCHEDULE
from hf_compat.hf.rows import ROWS, without_effect
from hf_compat.interop.object_parser import without_secret_values
from hf_compat.interop.transformers_models import apply_liger, check_liger
from hf_compat.native.expected import OF_HFS_UPDATES, OF_STEP, hide_expected, show_expected
from hf_compat.native.loading import LoadableModule, ModelSpec, made
from hf_compat.native.overrides import (
    OF_AUTOMATIC_OPTIMIZATION,
    AuthorStep,
    GuardedStep,
    OverridePoints,
    call_overrides,
    keep_hooks,
    keep_put_hooks,
    leave_own_step,
    leave_put_hooks,
    loss_of_batch,
    makes_updates,
    parameters_outside_model,
    refuse_late,
    refuse_unheard_methods,
    refuse_unused_hooks,
    replace_hook,
    serve_own_step,
    tell_of_untrained,
    trained_names,
)
from hf_compat.native.schedules import LightningSchedules, read_schedules, take_schedules_read
from hf_compat.native.steps import (
    NativeEvaluations,
    NativeSteps,
    accumulate_batches,
    adopt_optimizer,
    check_strategy,
    count_updates,
    optimizers_of,
    read_when_due,
    refuse_samples,
    seed_from,
    share_arguments,
    steps_of_data,
    takes_entries,
    updates_of_fit,
    warn_of_late_rate,
    warn_of_unused,
)
from hf_compat.optim.lr_schedulers import follows_metric
from hf_compat.optim.stepping import behaviour_of
from hf_compat.plan.argument_support import (
    PRECISIONS,
    check_mechanics,
    check_native,
    check_optimization,
    check_supported,
)
from hf_compat.plan.translate import compilation_of
from hf_compat.runtime.collectives import leave_at_exit
from hf_compat.runtime.inspection import UntilSet, is_replaced
from hf_compat.runtime.nested import Nested, find_batch_size
from hf_compat.runtime.text import brief, check_callables
from hf_compat.trainer_methods.run_parts import run_parts
from hf_compat.training_run.best import tracked_value

# Attributes of HF's Trainer, besides the model, that methods written for it read.
_OF_STEPS = frozenset(
    {
        "accelerator", "args", "can_return_loss", "compute_loss_func", "data_collator", "label_names", "label_smoother",
        "lr_scheduler", "model_accepts_loss_kwargs", "model_wrapped", "optimizer", "processing_class",
    }
)  # fmt: skip
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class HFModule(OverridePoints, LoadableModule):
    """A model as a LightningModule that trains as HF's Trainer does: one Lightning batch is one update.

    It logs `loss`, `learning_rate` and `grad_norm` of each update, and `loss_epoch`, the epoch's mean. It also takes
    loaders that give plain batches: `gradient_accumulation_steps` of them make an update.

    Args:
        model: Any module whose forward returns the loss: as `.loss`, as the key `"loss"`, or first in a tuple. Or the
            `class_path` and `init_args` of a function or of `from_pretrained`, which LightningCLI passes on unchanged.
        args: The training arguments. None takes the defaults.
        steps: HF's steps for this model. None makes them from `model` and `args`.
        compute_metrics: Metrics of validation and test: a torchmetrics object, a function that makes one, or a
            function of an `EvalPrediction`.
        compute_loss_func: Computes the loss from outputs, labels and `num_items_in_batch`, as in `transformers`.

    Examples:
        >>> import lightning, torch
        >>> from hf_compat import HFDataModule, HFModule, TrainingArguments
        >>> class Regression(torch.nn.Linear):
        ...     def forward(self, x, labels):
        ...         return {"loss": (super().forward(x) - labels).square().mean()}
        >>> data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 32
        >>> args = TrainingArguments(per_device_train_batch_size=8, learning_rate=0.1)
        >>> trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", barebones=True)
        >>> trainer.fit(HFModule(Regression(2, 1), args), HFDataModule(args, train_dataset=data))
        >>> trainer.global_step
        12
    """

    logs_to_lightning = True
    __jit_ignored_attributes__: list[str]
    steps: NativeSteps
    _waiting: list[Batch]  # plain batches whose update takes more of them
    _is_set_up = False  # for the current run
    _is_connected = False  # to the optimizers of the current fit
    _is_tried = False  # whether a callback has trained before the current fit
    configured_schedules: list[LRSchedulerConfig] | None = None  # of HF's optimizer or the user's, until a fit starts
    _optimized: frozenset[int] | None = None  # ids of the parameters that HF's optimizer was made for
    _rate_made: float | None = None  # the learning rate that HF's optimizer was made for
    _said_automatic: bool | None = None  # the user's setting of `automatic_optimization`
    _own_step: AuthorStep | GuardedStep | None = None  # in a fit with a user-defined step

    def __init__(
        self,
        model: nn.Module | ModelSpec,
        args: TrainingArguments | None = None,
        steps: NativeSteps | None = None,
        compute_metrics: Metric | MetricCollection | Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            spec, model = model, made(model, "model")
            if not isinstance(model, nn.Module):
                raise ArgumentError(
                    f"`model` is {brief(spec, 60)}, and no torch.nn.Module is made of it.\n\n"
                    "Hint: give a torch.nn.Module, HFModule(model, args). In YAML: "
                    "model: {class_path: package.Class, init_args: {…}}, with arguments that the class takes."
                )
        check_callables(compute_loss_func=compute_loss_func)
        own = NativeSteps(model, args) if steps is None else steps
        own.compute_loss_func = compute_loss_func
        check_supported(own.args)
        compilation_of(own.args)  # it refuses backends and modes that torch does not know
        if own.args.use_liger_kernel:
            check_liger(model, own.args.liger_kernel_config)
        if type(self).configure_optimizers is HFModule.configure_optimizers:
            check_optimization(own.args)
        check_metrics(compute_metrics, None, False)
        super().__init__(model, own, compute_metrics)
        self.__dict__.pop("_said_automatic", None)  # the base class has set it
        self._waiting = []
        self._evaluations = NativeEvaluations(own, self.compute_metrics)
        self._seeded_in = os.getpid()
        seed_from(own.args)
        if given_hyperparameters() is not None:  # LightningCLI's: with them its checkpoints describe the module
            self.save_hyperparameters(logger=False)
            self.hparams.update(without_secret_values(self.hparams))

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        said, ours = cast(object, cls.automatic_optimization), cast(object, HFModule.automatic_optimization)
        if isinstance(said, (bool, property)) and said is not ours:  # it would hide the property
            cls._said_automatic = said if isinstance(said, bool) else UntilSet(said)  # type: ignore[assignment]
            cls.automatic_optimization = HFModule.automatic_optimization  # type: ignore[method-assign]
        refuse_unheard_methods(cls)
        keep_hooks(cls, HFModule)

    @property
    def automatic_optimization(self) -> bool:
        """Whether Lightning makes the updates. By default this module makes HF's updates.

        A user-defined `training_step` then returns a loss for them. With hooks that only automatic optimization calls
        (`optimizer_step` …) Lightning makes the updates.
        """
        if self._said_automatic is not None:
            return self._said_automatic
        return self._has_own_step and any(is_replaced(self, name, HFModule) for name in OF_AUTOMATIC_OPTIMIZATION)

    @automatic_optimization.setter
    def automatic_optimization(self, said: bool) -> None:
        self._said_automatic = said

    @property
    def learning_rate(self) -> float:
        """The initial learning rate.

        Setting it, as Lightning's `Tuner` does, changes that of the next fit, and not the arguments.
        """
        return self.steps.args.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if "steps" not in vars(self):
            raise OverrideError(
                f"`learning_rate` of {type(self).__name__} was set before `super().__init__(model, args)`.\n\n"
                "Hint: set it after, or in the arguments."
            )
        self.steps.set_rate = rate
        self.steps.use_arguments(self.steps.args)
        if self._is_connected and self._rate_made not in (None, rate):
            warn_of_late_rate(rate)

    def __getstate__(self) -> dict[str, object]:
        """Also leave out a fit's wrapper of a user-defined step, and of hooks."""
        state = super().__getstate__()
        leave_own_step(state)
        state["_hooks_put"] = {**vars(self).get("_hooks_put", {})}  # this module keeps its own
        leave_put_hooks(state)
        return state

    def __setattr__(self, name: str, value: object) -> None:
        if name == "trainer" and value is not None:  # a run begins
            self._leave_own_step()  # of a fit that has failed
            keep_put_hooks(self, HFModule)
        if name == "model" and isinstance(value, nn.Module):  # a subclass may set another one than the constructor's
            steps: NativeSteps | None = vars(self).get("steps")
            if steps is not None and steps.model is not value:
                if self._is_set_up and self.trainer.state.status == TrainerStatus.RUNNING:
                    raise OverrideError(
                        f"`model` of {type(self).__name__} was replaced in a run that is set up with another one.\n\n"
                        "Hint: set it in `__init__`, or in `setup` before `super().setup(stage)`."
                    )
                if steps.args.use_liger_kernel:
                    check_liger(value, steps.args.liger_kernel_config)
                steps.prepare_model(value)
                self.__dict__.pop("backbone", None)  # the other model's, for BackboneFinetuning
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        """Give methods written for HF's Trainer the attributes that they read."""
        if name in _OF_STEPS and "steps" in self.__dict__:
            return cast(torch.Tensor, getattr(self.__dict__["steps"], name))  # of any type
        return super().__getattr__(name)

    @property
    def _has_own_step(self) -> bool:
        return overrides(self, "training_step", HFModule)

    @property
    def _returns_loss_for_updates(self) -> bool:
        """Whether HF's updates are made of the loss that a user-defined `training_step` returns."""
        return self._has_own_step and self._said_automatic is None and not self.automatic_optimization

    @property
    def _says_manual(self) -> bool:
        """Whether a user-defined `training_step` is said to make the updates itself."""
        return self._has_own_step and self._said_automatic is False

    @property
    def _has_own_forward(self) -> bool:
        return overrides(self, "forward", HFModule)

    @property
    def forward_owner(self) -> nn.Module | None:
        """This module, if the signature of its own `forward` names a batch's entries. None if the model's does."""
        if not self._has_own_forward or not callable(self.forward):
            return None
        kinds = {parameter.kind for parameter in inspect.signature(self.forward).parameters.values()}
        return None if inspect.Parameter.VAR_KEYWORD in kinds else self

    @property
    def _called_model(self) -> nn.Module:
        """This module if it has its own `forward`, else the model."""
        return self if self._has_own_forward else self.model

    def configure_callbacks(self) -> Sequence[pl.Callback] | pl.Callback:
        """Refuse settings of the trainer that change gradients. Lightning calls this before its own checks."""
        self._is_set_up = self._is_connected = self._is_tried = False
        self._optimized = self._rate_made = None
        wrap_hf_callbacks(self.trainer)
        hide_expected([OF_LIGHTNING] if self.automatic_optimization or self._says_manual else OF_HFS_UPDATES)
        if not is_replaced(self, "validation_step", HFModule):
            hide_expected([OF_STEP])
        count_updates(self.trainer, 1)
        with_data = steps_of_data(self.trainer) is not None
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        refuse_native(callbacks, self, with_data, author_updates=self._says_manual)
        if not self.automatic_optimization:
            if self.trainer.state.fn == "fit":
                refuse_unused_hooks(self, HFModule, may_read=self._says_manual and not with_data)
            if not self._says_manual:  # else Lightning checks them as for any LightningModule
                check_mechanics(self.steps.args, self.trainer)
            check_strategy(self.trainer.strategy)
        prepare_lightning_callbacks(self.trainer, self, self.model, makes_updates=not self._says_manual)
        return super().configure_callbacks()

    def setup(self, stage: str) -> None:
        """Give the steps this process's rank and device, and the data module's arguments. Prepare a fit."""
        if self.trainer.world_size > 1:
            leave_at_exit()
        steps = self.steps
        self._evaluations.forget()
        data = steps_of_data(self.trainer)
        if data is not None:
            data.data_is_set_up = True  # a subclass's `setup` may not have set it
            share_arguments(steps, data)
            if steps.processing_class is None:
                steps.processing_class = data.processing_class
        steps.take_place(self.trainer)
        steps.take_device(self.trainer.strategy.root_device)
        if not self.automatic_optimization:
            compile_model_only(self, self.model)
        steps.take_forward_of(self.forward_owner)
        own = [name for name in _STEPS if overrides(self, name, HFModule)]
        if self._returns_loss_for_updates:
            own.remove("training_step")  # HF's update calls it
        called = steps.model_wrapped = self._called_model
        move_autocast_to_forward(self.trainer.strategy, called, steps.args.device.type, own)
        call_overrides(self, steps)
        self._is_set_up = True
        if stage == "fit":
            self._set_up_fit()
        strategy = self.trainer.strategy
        if not isinstance(strategy.checkpoint_io, HFCheckpointIO):  # it loads HF folders
            strategy.checkpoint_io = HFCheckpointIO(strategy.checkpoint_io)
        super().setup(stage)

    def _set_up_fit(self) -> None:
        """Compare the user's trainer with the arguments, and prepare the model for training."""
        steps = self.steps
        refuse_samples(given_to_fit(self.trainer))
        if os.getpid() != self._seeded_in:  # a process that Lightning has spawned
            seed_from(steps.args)
        trainer: Any = self.trainer
        told: dict[str, object] = {}
        if str(trainer.precision) in PRECISIONS:  # it may be of a kind that the arguments cannot name
            told["precision"] = trainer.precision
        if not trainer.fast_dev_run:  # it sets its own lengths
            told["max_steps"] = trainer.max_steps
            if trainer.max_epochs != -1 or trainer.max_steps == -1:  # else the updates alone end the run, as in HF
                told["max_epochs"] = trainer.max_epochs
        check_native(steps.args, told, run_parts(steps))
        batches, told_batches = steps.args.gradient_accumulation_steps, trainer.accumulate_grad_batches
        if not self.automatic_optimization:
            self._read_schedules()
            count_updates(trainer, 1 if steps_of_data(trainer) is not None else batches)
        elif batches > 1 and told_batches > 1:  # with windows it would be their product
            raise ArgumentError(
                f"`gradient_accumulation_steps={batches}` of the arguments and "
                f"`accumulate_grad_batches={told_batches}` of lightning.Trainer both set the size of an update.\n\n"
                "Hint: set one of them."
            )
        if steps.args.use_liger_kernel:
            apply_liger(self.model, steps.args.liger_kernel_config)
        begin_hooks(self.trainer, self.model, steps.args)
        self.model.train()

    def _read_schedules(self) -> None:
        if not self.automatic_optimization and not self._says_manual:  # else as in any LightningModule
            read_schedules(self)

    def teardown(self, stage: str) -> None:
        """Restore the model and the data module."""
        self._is_set_up = self._is_connected = False
        show_expected()
        unwrap_forward(self._called_model)
        end_hooks(self.trainer)
        leave_lightning_callbacks(self.trainer)
        data = steps_of_data(self.trainer)
        if data is not None:
            data.data_is_set_up = False
        count_updates(self.trainer, 1)
        replace_schedule_steps(self.trainer, None)
        strategy = self.trainer.strategy
        if isinstance(strategy.checkpoint_io, HFCheckpointIO):
            strategy.checkpoint_io = strategy.checkpoint_io.behind
        self.leave_fit()
        self._leave_own_step()
        leave_put_hooks(vars(self), all_of_them=False)
        super().teardown(stage)

    def configure_optimizers(self) -> OptimizerLRScheduler:  # type: ignore[override]  # Lightning passes nothing
        """Make optimizer and schedule. Each native fit has its own."""
        steps = self.steps
        behaviour_of(steps.optimizer).detach()  # of an earlier fit
        steps.optimizer = steps.lr_scheduler = None
        call_overrides(self, steps)
        if parameters_outside_model(self, self.model) and "create_optimizer" not in vars(steps):
            steps.create_optimizer(self)
        self._optimized = frozenset(id(parameter) for parameter in trained_names(self).values())
        self._rate_made = self.learning_rate
        updates = steps.args.max_steps if self.num_training_updates is None else self.num_training_updates
        if attached_trainer(self) is not None:
            updates = updates_of_fit(self.trainer, steps)
        elif updates <= 0:
            raise ArgumentError(
                "`configure_optimizers` was called without a lightning.Trainer, and the number of updates is unknown."
                "\n\nHint: set `max_steps` in TrainingArguments, or `num_training_updates` of the module."
            )
        chosen = super().configure_optimizers(updates)
        if isinstance(chosen, dict) and follows_metric(steps.lr_scheduler) and not self._says_manual:
            # the end of an evaluation steps it
            chosen["lr_scheduler"]["reduce_on_plateau"] = False  # type: ignore[typeddict-item]  # it has one
        return chosen

    def on_fit_start(self) -> None:
        """Connect the optimizer, and refuse parameters that it would not train."""
        if "configure_optimizers" in self.__dict__:
            unused = without_effect(OWN_OPTIMIZER, OWN_OPTIMIZER_OBJECT, OWN_SCHEDULE)
            warn_of_unused(self.steps.args, unused, "`--optimizer` and `--lr_scheduler` of LightningCLI replace HF's")
        is_other_fit = self._is_tried or self._rate_made != self.learning_rate
        if self._optimized is not None and is_other_fit:  # HF's schedule was made for another rate, or more updates
            self._read_schedules()
            self.trainer.strategy.setup_optimizers(self.trainer)
        self._connect()
        self._optimized = self.configured_schedules = None
        self._is_connected = True

    def _connect(self) -> None:
        """Connect the module to the optimizers and schedules that the trainer has now.

        A callback that finds a learning rate or a batch size trains before the fit starts, with a schedule of its own.
        """
        self._leave_own_step()  # of the updates of such a callback
        self.parameters_outside_model = parameters_outside_model(
            self, self.model, frozen=True
        )  # a callback may unfreeze them later
        if self._optimized is not None:
            refuse_late(self, self._optimized)
        take_schedules_read(self)
        if not self.automatic_optimization:
            count = len(optimizers_of(self.trainer))
            if count == 1 or not self._has_own_step or (count == 0 and self._returns_loss_for_updates):
                adopt_optimizer(self.trainer, self.steps)
            if isinstance(self.trainer.train_dataloader, Windows):
                count_updates(self.trainer, 1)
        unfreeze_optimized(self.trainer)
        super().on_fit_start()
        if self._has_own_step:
            serve_own_step(self, self.stepping)
            if self._returns_loss_for_updates and len(optimizers_of(self.trainer)) == 1:
                self._own_step = vars(self.steps)["training_step"] = AuthorStep(self, self.steps)
                self.__dict__["training_step"] = functools.partial(HFModule.training_step, self)
            elif not self.automatic_optimization:
                self._own_step = self.__dict__["training_step"] = GuardedStep(self, self.steps)
        if not isinstance(self._own_step, GuardedStep):  # an author steps the schedules, as in any LightningModule
            LightningSchedules(self)

    def _step_installed(self, moment: Literal["step", "epoch"]) -> None:
        """Leave the schedules of Lightning, and those of the author, to their owner."""

    def _leave_own_step(self) -> None:
        leave_own_step(vars(self))
        vars(self.steps).pop("training_step", None)

    @property
    def _author(self) -> AuthorStep | None:
        """The user-defined step whose losses updates are made of."""
        return self._own_step if isinstance(self._own_step, AuthorStep) else None

    def on_train_start(self) -> None:
        """Start to read, and continue at the position of a checkpoint."""
        if not self._is_connected:  # a callback that finds a rate or a batch size trains before the fit starts
            self._is_tried = True
            self._connect()
            if not self.trainer.enable_validation:  # such a callback asks every module with a step for its data
                replace_hook(self, "validation_step", pl.LightningModule.validation_step.__get__(self))
        if self.automatic_optimization:
            accumulate_batches(self.trainer, self.steps.args.gradient_accumulation_steps)
        read_when_due(self.trainer)
        loader = self.trainer.train_dataloader
        if isinstance(loader, DataLoader) and not isinstance(loader, PreparedDataLoader):
            args = self.steps.args
            held = {name: getattr(loader, row.loader) for name, row in ROWS.items() if row.loader}
            differing = [name for name, value in held.items() if value != getattr(args, name)]
            warn_of_unused(args, differing, "the batches are those of your own DataLoader")
        super().on_train_start()

    def on_train_epoch_start(self) -> None:
        """Start an epoch, without the plain batches that the last one has not trained on."""
        read_when_due(self.trainer)
        self._waiting = []
        if isinstance(self.trainer.train_dataloader, Windows):  # `reload_dataloaders_every_n_epochs` may have made them
            self.trainer.train_dataloader.begin_at(self.trainer.current_epoch)
        if skips_backward(self.trainer):
            self.steps.accelerator.run_backward = lambda loss, **options: None

    def training_step(  # type: ignore[override]  # with a user-defined step, its result
        self, window: Window | Batch, batch_idx: int
    ) -> STEP_OUTPUT:
        """Make one update and log its numbers. Plain batches are collected until they complete an update.

        Returns:
            The window's loss, detached, or None if the update takes more batches. If something else makes the update
            (a user-defined step, Lightning, Fabric, a loop by hand), the batch's loss with its graph.
        """
        steps, author = self.steps, self._author
        if author is not None and author.runs:
            return author.loss_of_hf(window)
        if not self._is_set_up:
            return loss_of_batch(self._without_trainer(), window)
        if self.automatic_optimization:
            return loss_of_batch(steps, window, is_final=not self._has_own_step)
        first = batch_idx * steps.args.gradient_accumulation_steps  # the number of the micro-batch
        if not isinstance(window, Window):
            self._waiting.append(window)
            size = len(self._waiting)
            if size < steps.args.gradient_accumulation_steps and not self.trainer.is_last_batch:
                skip_step_metrics(self.trainer)
                return None
            waiting, self._waiting = self._waiting, []
            batches, items = steps.get_batch_samples(iter(waiting), size, steps.args.device)
            window, first = Window(batches, items, is_complete=True, epoch_progress=0.0), batch_idx + 1 - size
        if author is not None:
            author.batch_idx, author.gave_loss = first, False
        window.micro_batches = [self._in_true_precision(batch) for batch in window.micro_batches]
        self.measured = {}
        loss = super().training_step(window, batch_idx)
        if author is not None and not author.gave_loss:
            loss = None
            skip_step_metrics(self.trainer, {"loss", *self.measured} - author.logged)
        self._log_update(loss, samples_of(window))
        return loss if self._own_step is None else self._own_step.update_made(loss)

    def log(self, name: str, value: object, *args: object, **kwargs: object) -> None:
        """Log a value as any LightningModule does. In means it is weighted by the samples of the (micro-)batch."""
        if self._author is not None and self._author.runs:
            self._author.logged.add(name)
            kwargs["batch_size"] = kwargs.get("batch_size") or find_batch_size(self._author.batch) or 1
        super().log(name, value, *args, **kwargs)

    def _update(self, window: Window) -> None:
        if self.parameters_outside_model:
            tell_of_untrained(self, self.parameters_outside_model)
        if skips_backward(self.trainer):
            window.is_trained = True
        else:
            super()._update(window)

    def manual_backward(self, loss: torch.Tensor, *args: object, **kwargs: object) -> None:
        """Run a backward pass in a step that makes its updates itself.

        Raises:
            OverrideError: The step returns a loss, of which the module makes the update.
        """
        if self._author is not None and self._author.runs:
            raise makes_updates(self, "calls `manual_backward`")
        super().manual_backward(loss, *args, **kwargs)

    def _without_trainer(self) -> NativeSteps:
        """Prepare the steps for Fabric, or for a loop by hand."""
        steps = self.steps
        steps.take_device(self.device)
        steps.take_forward_of(self.forward_owner)
        call_overrides(self, steps)
        steps.model_wrapped = self._called_model
        return steps

    def _in_true_precision(self, batch: Batch) -> Batch:
        """Convert a batch's floating-point numbers to the precision of the weights (`precision="bf16-true"`)."""
        if not self._is_set_up or "true" not in str(self.trainer.precision):
            return batch
        return self.trainer.precision_plugin.convert_input(batch)

    def _log_update(self, loss: torch.Tensor | None, samples: int) -> None:
        measured = self.measured
        if loss is None or not measured or self.trainer.barebones:  # nothing was trained, or nothing may be logged
            return
        logged = set() if self._author is None else self._author.logged
        if "loss" not in logged:
            self.log("loss", loss, prog_bar=True)
            if "loss_epoch" not in logged:
                self.log("loss_epoch", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=samples)
        for name, value in measured.items():
            if name not in logged:
                self.log(name, value)

    def on_train_epoch_end(self) -> None:
        """Finish the epoch's data."""
        windows = self.trainer.train_dataloader
        if self.trainer.is_last_batch and isinstance(windows, Windows):
            windows.leave_epoch(is_over=True)  # even if it has more data (`limit_train_batches`)
        self.end_epoch()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip at the arguments' `max_grad_norm` if Lightning makes the updates and has no limit of its own."""
        precision, limit = self.trainer.precision_plugin, self.steps.args.max_grad_norm
        if gradient_clip_val is None and not self.stepping.steps_in_backward:
            if isinstance(precision, ForwardPrecision):
                precision.unscale(optimizer)
            if limit:
                gradient_clip_val, gradient_clip_algorithm = limit, "norm"
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def on_validation_model_zero_grad(self) -> None:
        """Keep the gradients of a window that the next epoch completes. An update zeroes its own."""
        if self.automatic_optimization:
            super().on_validation_model_zero_grad()

    def on_validation_model_eval(self) -> None:
        """Evaluate the weights that a schedule-free optimizer has averaged."""
        super().on_validation_model_eval()  # Lightning's three hooks do the same
        self.stepping.to_evaluation()

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval

    def validation_step(
        self, batch: EvaluationBatch | Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> torch.Tensor | None:
        """Predict one batch, keep its results for the metrics, and return its loss."""
        batch = batch if isinstance(batch, EvaluationBatch) else EvaluationBatch(batch, False, -1)
        batch.change_batches(self._in_true_precision)
        if not self._is_set_up:  # in Fabric, or in a loop by hand
            steps = self._without_trainer()
            return steps.prediction_step(steps.model_wrapped, batch.inputs, prediction_loss_only=True)[0]
        with torch.enable_grad():  # as in a Trainer's
            return self._evaluations.run_of(self.trainer, dataloader_idx).step(batch)

    test_step = validation_step

    def predict_step(self, batch: EvaluationBatch | Batch, batch_idx: int, dataloader_idx: int = 0) -> Nested:
        """Return the logits of one batch, as `Trainer.predict` keeps them.

        An own `forward` gets a batch as it is, as in any LightningModule, unless it takes the batch's entries by name.
        """
        inputs = self._in_true_precision(batch.inputs if isinstance(batch, EvaluationBatch) else batch)
        if self._has_own_forward and not takes_entries(self.forward, inputs):
            return self(inputs)
        steps = self.steps if self._is_set_up else self._without_trainer()
        with torch.enable_grad():  # the prediction step decides whether it needs gradients
            model = steps.compiled(steps.model_wrapped)
            _, logits, _ = steps.prediction_step(model, inputs, prediction_loss_only=False)
        return logits

    def evaluated_numbers(self, metrics: Mapping[str, object] | None = None) -> dict[str, float]:
        """Return the numeric metrics of the evaluations that this module has begun, and end them."""
        if self._evaluations.compute_metrics is not None and not self._evaluations.has_run:
            step = "test_step" if self.trainer.testing else "validation_step"
            warn_once(
                f"`compute_metrics` of {type(self).__name__} is not called, because its own `{step}` does not call "
                f"HFModule's.\n\nHint: call `super().{step}(batch, batch_idx)` in it, or compute the metrics there."
            )
        metrics = self._evaluations.finish()
        scheduler, is_in_fit = self.steps.lr_scheduler, self.trainer.validating and self.trainer.state.fn == "fit"
        if is_in_fit and follows_metric(scheduler) and not self._has_other_schedule():
            scheduler.step(tracked_value(metrics, str(self.steps.args.metric_for_best_model)))
        return super().evaluated_numbers(metrics)


keep_hooks(HFModule)
# `to_torchscript` compiles a subclass's `forward`, and none of this
HFModule.__jit_ignored_attributes__ = [*HFModule.__annotations__]
HFModule.__jit_unused_properties__ = [
    *pl.LightningModule.__jit_unused_properties__,
    *(name for name, kind in inspect.getmembers(HFModule) if isinstance(kind, property)),
]
