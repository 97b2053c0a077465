"""The steps of a native `HFModule`: HF's override points without a Trainer around them.

Below: its metrics under HF's names, the limits that a user's own Lightning trainer sets, and its optimizer and
schedule.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TypeAlias
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torchmetrics import Metric, MetricCollection

from hf_compat.checkpoint.run_state import ResumePoint
from hf_compat.data.types import Batch, Collator
from hf_compat.engine.evaluation import EvaluationRun
from hf_compat.engine.internals import fetch_without_prefetch
from hf_compat.engine.kept_batches import ComputeMetrics
from hf_compat.engine.model_hooks import uncompiled
from hf_compat.engine.windows import Windows, WindowsWithoutLength
from hf_compat.errors import ArgumentError, UnsupportedArgument, warn_user
from hf_compat.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
from hf_compat.interop.arguments import adopt_arguments
from hf_compat.optim.stepping import stepping_of
from hf_compat.plan.argument_support import default_of
from hf_compat.runtime.launch import Launch
from hf_compat.runtime.seeding import enable_full_determinism, seed_of_lightning, set_seed
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.trainer_methods.base import Dataset, ProcessingClass
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.generation import GenerationSteps
from hf_compat.trainer_methods.model_setup import ModelMethods
from hf_compat.trainer_methods.optimization import OptimizationMethods


class NativeSteps(GenerationSteps, ModelMethods, OptimizationMethods, DataloaderMethods):
    """HF's steps, optimizer and data loading, for Lightning to drive.

    Args:
        model: Any module whose forward returns a loss first; None for data only.
        args: The training arguments; the defaults where none are given.
        train_dataset: Samples to train on.
        eval_dataset: Samples to evaluate on.
        data_collator: From a list of samples to a batch.
        processing_class: Tokenizer or processor.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        train_dataset: Dataset = None,
        eval_dataset: Dataset = None,
        data_collator: Collator | None = None,
        processing_class: ProcessingClass = None,
    ) -> None:
        self.has_own_arguments = args is not None
        self.set_rate: float | None = None  # a learning rate in place of the arguments'
        self.args = TrainingArguments() if args is None else adopt_arguments(args)
        self.accelerator = AcceleratorFacade(self.args)
        self.optimizer = self.lr_scheduler = None
        self.optimizer_cls_and_kwargs = self.compute_loss_func = None
        self.compute_metrics = self.preprocess_logits_for_metrics = None
        self.label_smoother = None
        self._set_up_data(train_dataset, eval_dataset, data_collator, processing_class)
        self._set_up_counters()
        if model is not None:
            self.prepare_model(model)

    def __getstate__(self) -> dict[str, object]:
        """Leave out what the last fit has made: the next one makes its own, and a copied module stays small."""
        of_fit = {"optimizer": None, "lr_scheduler": None, "accelerator": AcceleratorFacade(self.args)}
        kept = {name: value for name, value in self.__dict__.items() if name != "training_step"}  # a fit's own
        return {**kept, **of_fit}

    def use_arguments(self, args: TrainingArguments) -> None:
        """Work with other arguments from now on."""
        if self.set_rate is not None:
            args = copy.copy(args)
            args.learning_rate = self.set_rate
        self.args = args
        self._renew_accelerator()
        self._train_batch_size = args.train_batch_size
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self._gen_kwargs = self._generation_keywords({})

    def set_learning_rate(self, rate: float) -> None:
        """Train at another rate than that of the arguments, which stay as they are."""
        self.set_rate = rate
        self.use_arguments(self.args)

    @property
    def evaluates_as_seq2seq(self) -> bool:
        """Whether evaluations are those of a `Seq2SeqTrainer`: its arguments say so."""
        return isinstance(self.args, Seq2SeqTrainingArguments)

    def _renew_accelerator(self) -> None:
        """Let `accelerator` know the arguments; a fit that is under way keeps its backward pass."""
        run_backward = self.accelerator.run_backward
        self.accelerator = AcceleratorFacade(self.args)
        self.accelerator.run_backward = run_backward

    def forget_optimizer(self) -> None:
        """Let a fit make its own optimizer and schedule, as Lightning has it: those of an earlier fit have ended."""
        stepping_of(self.optimizer).detach()
        self.optimizer = self.lr_scheduler = None

    def take_place(self, rank: int, local_rank: int, world_size: int, local_world_size: int) -> None:
        """Work as one of the processes of a Lightning trainer, which may launch them after the arguments are made.

        Args:
            rank: This process.
            local_rank: On its machine.
            world_size: Processes.
            local_world_size: Processes on this machine.
        """
        if (rank, world_size) == (self.args.process_index, self.args.world_size):
            return
        launch = Launch(
            process_index=rank,
            local_process_index=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
        )
        self.args = copy.copy(self.args)
        self.args.__dict__["_launch"] = launch
        self.args.__dict__.pop("device", None)
        self._renew_accelerator()

    def take_device(self, device: torch.device) -> None:
        """Work on the device that a Lightning trainer has chosen."""
        if self.args.device != device:
            self.args = copy.copy(self.args)
            self.args.__dict__["device"] = device
            self._renew_accelerator()

    def prepare_model(self, model: nn.Module) -> None:
        """Train this model: set in it what the arguments say."""
        self.take_model(model)
        self._set_use_cache()
        self._enable_activation_checkpointing()

    def take_model(self, model: nn.Module, called: nn.Module | None = None) -> None:
        """Work with a model: read off it what it takes and returns.

        Args:
            model: The model.
            called: Whose forward is called in its place.
        """
        self.model = self.model_wrapped = model
        self._called = called
        self._introspect()
        self._signature_columns = None
        if self.evaluates_as_seq2seq:
            self._set_up_generation()
            self._gen_kwargs = self._generation_keywords({})

    def take_forward_of(self, called: nn.Module | None) -> None:
        """Read off the forward of a module around the model what a batch holds; None goes by the model's."""
        if called is not self._called:
            self._called = called
            self._introspect()
            self._signature_columns = None


def seed_from(args: TrainingArguments) -> None:
    """Seed every generator with `args.seed`; where it is the default, with the seed of `seed_everything`.

    All ranks draw the same order of samples then, which is what they share out.

    Args:
        args: `seed` and `full_determinism`.
    """
    by_lightning = seed_of_lightning()
    default = {field.name: default_of(field) for field in fields(args)}["seed"]
    seed = by_lightning if by_lightning is not None and args.seed == default else args.seed
    if args.full_determinism:
        enable_full_determinism(seed)
    else:
        set_seed(seed)


Loaders: TypeAlias = Mapping[str, Iterable[Batch]]
Metrics: TypeAlias = Metric | MetricCollection | ComputeMetrics | None


class NativeEvaluations:
    """What is evaluated between the first batch of a validation, or test, and its end.

    Args:
        steps: Whose `prediction_step` is called.
        compute_metrics: From predictions to metrics, or a torchmetrics object.
    """

    def __init__(self, steps: NativeSteps, compute_metrics: Metrics) -> None:
        self.steps = steps
        self.compute_metrics = compute_metrics
        self.forget()

    def forget(self) -> None:
        """Begin anew: an error may have ended the last evaluation."""
        self._runs: dict[int, EvaluationRun] = {}
        self._metrics: dict[str, float] = {}

    def run_of(self, trainer: pl.Trainer, dataloader_idx: int) -> EvaluationRun:
        """Return what collects the batches of a loader."""
        if dataloader_idx not in self._runs:
            self._finish_open()  # a torchmetrics object counts for one loader at a time
            self._runs[dataloader_idx] = self._begin(trainer, dataloader_idx)
        return self._runs[dataloader_idx]

    def _finish_open(self) -> None:
        for run in self._runs.values():
            self._metrics |= run.finish().metrics or {}
        self._runs = {}

    def _begin(self, trainer: pl.Trainer, dataloader_idx: int) -> EvaluationRun:
        loaders = named_loaders(trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders)
        name, loader = list(loaders.items())[dataloader_idx]
        prefix = "_".join(part for part in ("test" if trainer.testing else "eval", name) if part)
        # predictions that no metric reads are not kept, and not generated
        loss_only = self.steps.args.prediction_loss_only or self.compute_metrics is None
        model = self.steps.model_wrapped  # within a fit evaluations run uncompiled, as in HF
        return EvaluationRun(
            self.steps,
            uncompiled(model) if trainer.state.fn == "fit" else self.steps.compiled(model),
            loader,
            prefix,
            loss_only=loss_only,
            compute_metrics=self.compute_metrics,
            drops_fillers=not self.steps.evaluates_as_seq2seq,
        )

    def finish(self) -> dict[str, float]:
        """Return the metrics of all loaders, and begin anew."""
        self._finish_open()
        metrics = self._metrics
        self.forget()
        return metrics


def named_loaders(loaders: object) -> Loaders:
    """Return loaders by the names in their metrics: of a mapping its keys, of several in a sequence their numbers.

    A loader alone has no name.
    """
    if isinstance(loaders, Mapping):
        return loaders
    if isinstance(loaders, Sequence):
        return {"": loaders[0]} if len(loaders) == 1 else {str(i): loader for i, loader in enumerate(loaders)}
    assert isinstance(loaders, Iterable)  # Lightning iterates over it
    return {"": loaders}


# Trainers that were told how many of their batches make an update, for one fit.
_COUNTING: WeakSet[pl.Trainer] = WeakSet()
# Strategies of Lightning's own that shard, and the argument that does so in a Trainer of ours.
_SHARDING: dict[type[Strategy], str] = {
    FSDPStrategy: "fsdp=True",
    ModelParallelStrategy: "fsdp=True",
    DeepSpeedStrategy: "deepspeed='zero.json'",
}


def count_updates(trainer: pl.Trainer, batches: int) -> None:
    """Let a trainer count updates, not batches: in `log_every_n_steps`, loggers and `estimated_stepping_batches`.

    Args:
        trainer: It has checked its settings already.
        batches: Plain batches that make an update.
    """
    if batches > 1:
        trainer.accumulate_grad_batches = batches
        _COUNTING.add(trainer)


def accumulate_batches(trainer: pl.Trainer, batches: int) -> None:
    """Let Lightning accumulate plain batches, as the arguments say, for an optimization that is automatic.

    Args:
        trainer: Its training data are loaded: a window holds the batches of an update already.
        batches: Plain batches that make an update.
    """
    data = trainer.train_dataloader
    if not (isinstance(data, Windows) and data.gives_windows):
        count_updates(trainer, batches)


def check_accumulation(trainer: pl.Trainer, batches: int) -> None:
    """Refuse two numbers of batches that make an update: of windows it would be their product.

    Raises:
        ArgumentError: Both the arguments and the trainer have one.
    """
    if batches > 1 and trainer.accumulate_grad_batches > 1:
        raise ArgumentError(
            f"`gradient_accumulation_steps={batches}` of the arguments and "
            f"`accumulate_grad_batches={trainer.accumulate_grad_batches}` of lightning.Trainer both say what makes an "
            "update.\n\nHint: give one of them."
        )


def forget_updates(trainer: pl.Trainer) -> None:
    """Let a trainer count as it was told by its user."""
    if trainer in _COUNTING:
        trainer.accumulate_grad_batches = 1
        _COUNTING.discard(trainer)


def begin_at_epoch(data: object, epoch: int) -> None:
    """Let windows that were loaded within a fit (`reload_dataloaders_every_n_epochs`) give the order of that epoch."""
    if isinstance(data, Windows) and data.is_new and epoch:
        data.start_at(ResumePoint(epoch=epoch))


def hold_windows(data: object) -> None:
    """Let nothing be read while a fit is being set up."""
    if isinstance(data, WindowsWithoutLength):
        data.is_held = True


def read_when_due(trainer: pl.Trainer) -> None:
    """Let windows of data without a length be read from now on, each when it is trained."""
    data = trainer.train_dataloader
    if isinstance(data, WindowsWithoutLength) and data.is_held:
        data.is_held = False
        fetch_without_prefetch(trainer, data.is_at_end)


def leave_epoch(data: object) -> None:
    """Note that an epoch is over, though it has more data (`limit_train_batches`): the next one starts afresh."""
    if isinstance(data, Windows):
        data.leave_epoch(is_over=True)


def check_strategy(strategy: Strategy) -> None:
    """Refuse strategies of Lightning's own that hold parts of weights: an update of HF's clips and steps whole ones.

    Raises:
        UnsupportedArgument: The message names the argument of `hf_compat.Trainer` that does the same.
    """
    found = next((kind for kind in _SHARDING if isinstance(strategy, kind)), None)
    if found is not None:
        raise UnsupportedArgument(
            f"`strategy={type(strategy).__name__}` of lightning.Trainer cannot train an HFModule, whose updates need "
            f"whole weights.\n\nHint: `hf_compat.Trainer` with `TrainingArguments({_SHARDING[found]})` shards them; or "
            "override `training_step` with `automatic_optimization = True`."
        )


# A run without an end in sight: every schedule stays, to many digits, where its warm-up has brought it.
NO_END = 10**12
# By schedule: the metric that it follows, and whether that has to be there.
_FOLLOWED: weakref.WeakKeyDictionary[object, tuple[object, bool]] = weakref.WeakKeyDictionary()
_ENDLESS_SCHEDULES = frozenset({"constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy"})


def updates_of_fit(trainer: pl.Trainer, steps: NativeSteps) -> int:
    """Return the updates of a fit that is about to begin.

    Where nothing bounds them (`Trainer(max_time=…)`), the schedule has no end to decay to, and a warning says so.

    Raises:
        ArgumentError: The warm-up is a share of a number of updates that nobody knows.
    """
    updates = trainer.estimated_stepping_batches
    if trainer.lightning_module.automatic_optimization:
        accumulate_batches(trainer, steps.args.gradient_accumulation_steps)
        updates = trainer.estimated_stepping_batches
    if math.isinf(updates) or updates < 0:
        _check_endless_schedule(steps)
        return NO_END
    gives_windows = isinstance(trainer.train_dataloader, Windows) or not math.isfinite(trainer.num_training_batches)
    if gives_windows or trainer.lightning_module.automatic_optimization:  # Lightning has counted its own updates
        return int(updates)
    assert trainer.max_epochs is not None  # set by Lightning where it is left out
    per_epoch = math.ceil(trainer.num_training_batches / steps.args.gradient_accumulation_steps)
    of_epochs = per_epoch * trainer.max_epochs if trainer.max_epochs > 0 else NO_END
    return min(of_epochs, trainer.max_steps) if trainer.max_steps > 0 else of_epochs


def _check_endless_schedule(steps: NativeSteps) -> None:
    args = steps.args
    if 0 < args.warmup_steps < 1:
        raise ArgumentError(
            f"`warmup_steps={args.warmup_steps!r}` is a share of the run, and nothing says how many updates it has.\n\n"
            "Hint: give a number of updates, or `max_steps` or `max_epochs` to lightning.Trainer."
        )
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind not in _ENDLESS_SCHEDULES:
        warn_user(
            f"Nothing says how many updates this fit makes, so `lr_scheduler_type={kind!r}` has no end to decay to: "
            "the learning rate stays constant after its warm-up.\n\n"
            "Hint: give `max_steps` or `max_epochs` to lightning.Trainer, or choose `lr_scheduler_type='constant'`.",
        )


def optimizers_of(trainer: pl.Trainer) -> list[torch.optim.Optimizer]:
    """List the optimizers, without Lightning's stand-in for a `configure_optimizers` that returned None."""
    return [optimizer for optimizer in trainer.optimizers if optimizer.param_groups]


def adopt_optimizer(trainer: pl.Trainer, steps: NativeSteps) -> None:
    """Let the steps work with the optimizer that a subclass, or LightningCLI, has configured.

    Its schedule stays Lightning's, stepped at the interval that it was configured with.

    Raises:
        ArgumentError: There are none or several: an update of HF's has one.
    """
    made = optimizers_of(trainer)
    if len(made) != 1:
        raise ArgumentError(
            f"`configure_optimizers` returned {len(made)} optimizers; an update of an HFModule takes one.\n\n"
            "Hint: return one with several parameter groups, or override `training_step` with "
            "`automatic_optimization = True`."
        )
    if made[0] is not steps.optimizer:
        steps.optimizer, steps.lr_scheduler = made[0], None
        restore_monitor(trainer)


def keep_monitor(module: pl.LightningModule) -> None:
    """Keep which metric a schedule follows: Lightning drops it, as manual optimization steps schedules itself.

    Args:
        module: Its `configure_optimizers` may be a subclass's, or LightningCLI's; it is asked once more a fit.
    """
    configure = module.configure_optimizers
    own = module.__dict__.get("configure_optimizers")  # LightningCLI puts one into the module itself

    @functools.wraps(configure)
    def configured() -> object:
        module.__dict__.pop("configure_optimizers", None)
        if own is not None:
            module.__dict__["configure_optimizers"] = own
        chosen = configure()
        for schedule in _schedules_in(chosen):
            kept = {name: schedule.pop(name) for name in ("monitor", "strict", "reduce_on_plateau") if name in schedule}
            if kept:
                _FOLLOWED[schedule["scheduler"]] = (kept.get("monitor"), bool(kept.get("strict", True)))
        return chosen

    module.__dict__["configure_optimizers"] = configured


def _schedules_in(chosen: object) -> list[dict[str, object]]:
    """Return the entries of schedules in what `configure_optimizers` returns; a monitor beside one is put into it."""
    if isinstance(chosen, dict) and "lr_scheduler" in chosen:
        entry = chosen["lr_scheduler"]
        if not isinstance(entry, dict):
            entry = chosen["lr_scheduler"] = {"scheduler": entry}
        if "monitor" in chosen:
            entry.setdefault("monitor", chosen.pop("monitor"))
        return [entry]
    if isinstance(chosen, (tuple, list)) and len(chosen) == 2 and isinstance(chosen[1], (tuple, list)):
        return [entry for entry in chosen[1] if isinstance(entry, dict)]
    return []


def restore_monitor(trainer: pl.Trainer) -> None:
    """Give Lightning's entries of schedules the metric that they follow.

    Raises:
        ArgumentError: A schedule that follows a metric names none.
    """
    for config in trainer.lr_scheduler_configs:
        monitor, strict = _FOLLOWED.get(config.scheduler, (None, True))
        if not isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            continue
        if monitor is None:
            raise ArgumentError(
                "`configure_optimizers` returned a ReduceLROnPlateau, and no metric that it follows.\n\n"
                "Hint: return {'optimizer': …, 'lr_scheduler': {'scheduler': …, 'monitor': 'eval_loss'}}."
            )
        config.reduce_on_plateau, config.monitor, config.strict = True, str(monitor), strict


def step_plateau(trainer: pl.Trainer, config: LRSchedulerConfig) -> None:
    """Step a schedule of Lightning's that follows a metric, at its monitor's value.

    Raises:
        ArgumentError: Nothing of that name was logged.
    """
    value = trainer.callback_metrics.get(str(config.monitor))
    if value is None:
        if not config.strict:
            return
        raise ArgumentError(
            f"The schedule follows {config.monitor!r}, which was not logged; there are "
            f"{', '.join(sorted(trainer.callback_metrics)) or 'no metrics'}.\n\n"
            "Hint: name one of them as `monitor` in `configure_optimizers`."
        )
    assert isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    config.scheduler.step(value)
