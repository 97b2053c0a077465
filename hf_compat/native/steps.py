"""The steps of a native `HFModule`: HF's override points without a Trainer.

Also its evaluations, its number of updates in a user's own Lightning trainer, and its optimizer and schedule.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TypeAlias
from weakref import WeakSet

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torchmetrics import Metric, MetricCollection

from hf_compat.data.types import Batch, Collator
from hf_compat.engine.evaluation import ComputeMetrics, EvaluationRun
from hf_compat.engine.internals import fetch_without_prefetch
from hf_compat.engine.windows import Windows
from hf_compat.errors import ArgumentError, InertArgumentWarning, UnsupportedArgument, warn_user
from hf_compat.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
from hf_compat.hf.rows import ROWS
from hf_compat.hf.value_types import plain
from hf_compat.interop.arguments import adopt_arguments
from hf_compat.optim.lr_schedulers import is_schedule_of
from hf_compat.optim.prepared import PreparedOptimizer
from hf_compat.plan.argument_support import default_of
from hf_compat.runtime.inspection import uncompiled
from hf_compat.runtime.launch import Launch
from hf_compat.runtime.seeding import enable_full_determinism, seed_of_lightning, set_seed
from hf_compat.runtime.text import brief, shown
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.trainer_methods.base import Dataset, ProcessingClass
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.generation import GenerationSteps


class NativeSteps(GenerationSteps, DataloaderMethods):
    """HF's steps, optimizer and data loading, for Lightning to drive.

    Its arguments are those of HFModule and HFDataModule. Without a model it loads data only.
    """

    data_is_set_up = False  # whether the data module has made its sets, for the current run

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
        """Leave out the objects of the last fit. The next one makes its own, and a copied module stays small."""
        of_fit = {"optimizer": None, "lr_scheduler": None, "accelerator": AcceleratorFacade(self.args)}
        kept = {name: value for name, value in self.__dict__.items() if name != "training_step"}  # a fit's own
        return {**kept, **of_fit}

    def use_arguments(self, args: TrainingArguments, **values: object) -> None:
        """Use other arguments from now on, or a copy with these values. A running fit keeps its backward pass."""
        if values or self.set_rate is not None:
            args = copy.copy(args)
            args.__dict__.update(values)
        if self.set_rate is not None:
            args.learning_rate = self.set_rate
        before = self.accelerator
        self.args, self.accelerator = args, AcceleratorFacade(args)
        self.accelerator.run_backward, self.accelerator.compiled_update = before.run_backward, before.compiled_update
        if isinstance(self.optimizer, PreparedOptimizer):
            self.optimizer.timing = self.accelerator
        self._train_batch_size = args.train_batch_size
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self._gen_kwargs = self._generation_keywords({})

    @property
    def evaluates_as_seq2seq(self) -> bool:
        """Whether evaluations are those of a `Seq2SeqTrainer`, as the arguments are."""
        return isinstance(self.args, Seq2SeqTrainingArguments)

    def take_place(self, trainer: pl.Trainer) -> None:
        """Take the rank of this process in a Lightning trainer, which may launch it after the arguments are made."""
        if (trainer.global_rank, trainer.world_size) == (self.args.process_index, self.args.world_size):
            return
        launch = Launch(
            process_index=trainer.global_rank,
            local_process_index=trainer.local_rank,
            world_size=trainer.world_size,
            local_world_size=trainer.num_devices,
        )
        args = copy.copy(self.args)
        args.__dict__.pop("device", None)
        self.use_arguments(args, _launch=launch)

    def take_device(self, device: torch.device) -> None:
        """Use the device that a Lightning trainer has chosen."""
        if self.args.device != device:
            self.use_arguments(self.args, device=device)

    def prepare_model(self, model: nn.Module) -> None:
        """Train this model, and set its options that the arguments name."""
        self.take_model(model)
        self._set_use_cache()
        if self.args.activation_checkpointing:
            self._enable_activation_checkpointing()

    def take_model(self, model: nn.Module, called: nn.Module | None = None) -> None:
        """Use a model, and read its inputs and outputs from its signature, or from that of a module that is called."""
        self.model = self.model_wrapped = model
        self._called = called
        self._introspect()
        self._signature_columns = None
        if self.evaluates_as_seq2seq:
            self._set_up_generation()
            self._gen_kwargs = self._generation_keywords({})

    def take_forward_of(self, called: nn.Module | None) -> None:
        """Read the inputs from the signature of a module around the model. None reads them from the model's."""
        if called is not self._called:
            self._called = called
            self._introspect()
            self._signature_columns = None


def steps_of_data(trainer: pl.Trainer) -> NativeSteps | None:
    """The steps of the trainer's HFDataModule. None if its data is of another kind."""
    steps = getattr(getattr(trainer, "datamodule", None), "steps", None)
    return steps if isinstance(steps, NativeSteps) else None


def share_arguments(model: NativeSteps, data: NativeSteps) -> None:
    """Give the steps of a module and those of its data module the same arguments.

    Raises:
        ArgumentError: Both set an argument to different values, or the data module sets a training argument.
    """
    if model.args is data.args:
        return
    values: dict[str, object] = {}
    problems = []
    for field in fields(model.args) if data.has_own_arguments else ():
        name, default = field.name, default_of(field)
        of_model, of_data = getattr(model.args, name), getattr(data.args, name, default)
        row = ROWS.get(name)
        is_replaced = name == "learning_rate" and model.set_rate is not None
        # a native run has Lightning's folder and loggers
        is_lightnings = name == "output_dir" or (row is not None and row.native == "logger")
        if is_replaced or is_lightnings or of_data in (default, of_model):
            continue
        if row is not None and row.data and of_model == default:
            values[name] = of_data
        else:
            problems.append(
                f"`{name}={brief(of_data)}` of HFDataModule's arguments, {name}={brief(of_model)} of HFModule's"
            )
    if problems:
        raise ArgumentError(
            f"HFModule and HFDataModule have different arguments: {'; '.join(problems)}.\n\n"
            "Hint: pass the same `TrainingArguments` to both, or none to HFDataModule, which then takes HFModule's."
        )
    if values:
        model.use_arguments(model.args, **values)
    data.use_arguments(model.args)


def warn_of_unused(args: TrainingArguments, names: Iterable[str], why: str) -> None:
    """Warn of those arguments among the named that are not at their defaults."""
    defaults = {field.name: default_of(field) for field in fields(args)}
    told = [shown(name, getattr(args, name)) for name in names if getattr(args, name) != defaults[name]]
    if told:
        warn_user(f"These arguments have no effect, because {why}: `{'`, `'.join(told)}`.", InertArgumentWarning)


def warn_of_late_rate(rate: float) -> None:
    """Warn of a learning rate that is set while a fit follows HF's schedule."""
    warn_user(
        f"`learning_rate={brief(rate)}` of an HFModule was set in a fit, whose schedule continues from the rate that "
        "it began with. The next fit begins with this one.\n\n"
        "Hint: set it before the fit. Or return an optimizer of your own from `configure_optimizers`."
    )


def seed_from(args: TrainingArguments) -> None:
    """Seed every generator with `args.seed`, or if that is the default, with the seed of `seed_everything`.

    All ranks must draw the same order of samples, as they share them out.
    """
    by_lightning = seed_of_lightning()
    is_default = args.seed == default_of(args.__dataclass_fields__["seed"])
    seed = by_lightning if by_lightning is not None and is_default else args.seed
    if args.full_determinism:
        enable_full_determinism(seed)
    else:
        set_seed(seed)


Metrics: TypeAlias = Metric | MetricCollection | ComputeMetrics | None


class NativeEvaluations:
    """The evaluations of a validation or test, one for each loader, by the steps' `prediction_step`."""

    def __init__(self, steps: NativeSteps, compute_metrics: Metrics) -> None:
        self.steps = steps
        self.compute_metrics = compute_metrics
        self.forget()

    def forget(self) -> None:
        """Start again. An error may have ended the last evaluation."""
        self._runs: dict[int, EvaluationRun] = {}
        self._metrics: dict[str, float] = {}

    @property
    def has_run(self) -> bool:
        """Whether a batch was evaluated since the last evaluation ended."""
        return bool(self._runs)

    def run_of(self, trainer: pl.Trainer, dataloader_idx: int) -> EvaluationRun:
        """The evaluation of a loader. Its first batch begins it, and finishes the one before."""
        if dataloader_idx in self._runs:
            return self._runs[dataloader_idx]
        self._finish_open()  # a torchmetrics object counts for one loader at a time
        loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        if not isinstance(loaders, Mapping):  # the metrics' names have its keys, or numbers if there are several
            several = list(loaders) if isinstance(loaders, Sequence) else [loaders]
            loaders = {"": several[0]} if len(several) == 1 else {str(i): one for i, one in enumerate(several)}
        name, loader = list(loaders.items())[dataloader_idx]
        model = self.steps.model_wrapped  # within a fit evaluations run uncompiled, as in HF
        run = self._runs[dataloader_idx] = EvaluationRun(
            self.steps,
            uncompiled(model) if trainer.state.fn == "fit" else self.steps.compiled(model),
            loader,
            "_".join(part for part in ("test" if trainer.testing else "eval", name) if part),
            # predictions that no metric reads are not kept, and not generated
            loss_only=self.steps.args.prediction_loss_only or self.compute_metrics is None,
            compute_metrics=self.compute_metrics,
            drops_fillers=not self.steps.evaluates_as_seq2seq,
            reads_all=False,
        )
        return run

    def _finish_open(self) -> None:
        for run in self._runs.values():
            self._metrics |= run.finish().metrics or {}
        self._runs = {}

    def finish(self) -> dict[str, float]:
        """Return the metrics of all loaders, and start again."""
        self._finish_open()
        metrics = self._metrics
        self.forget()
        return metrics


# Trainers that count updates of several batches for one fit.
_COUNTING: WeakSet[pl.Trainer] = WeakSet()
# Strategies of Lightning's that shard, and the argument of our Trainer that does so.
_SHARDING: dict[type[Strategy], str] = {
    FSDPStrategy: "fsdp=True",
    ModelParallelStrategy: "fsdp=True",
    DeepSpeedStrategy: "deepspeed='zero.json'",
}


def count_updates(trainer: pl.Trainer, batches: int) -> None:
    """Make a trainer count updates, not batches, in `log_every_n_steps`, loggers and `estimated_stepping_batches`.

    It has checked its settings already. One batch in an update restores the trainer's own count.
    """
    if batches > 1:
        trainer.accumulate_grad_batches = batches
        _COUNTING.add(trainer)
    elif trainer in _COUNTING:
        trainer.accumulate_grad_batches = 1
        _COUNTING.discard(trainer)


def accumulate_batches(trainer: pl.Trainer, batches: int) -> None:
    """Make Lightning accumulate plain batches in automatic optimization. A window already holds those of an update."""
    data = trainer.train_dataloader
    if batches > 1 and not (isinstance(data, Windows) and data.gives_windows):
        count_updates(trainer, batches)


def read_when_due(trainer: pl.Trainer) -> None:
    """Read windows of data without a length from now on, each just before it is trained on."""
    data = trainer.train_dataloader
    if isinstance(data, Windows) and data.is_held:
        data.is_held = False
        fetch_without_prefetch(trainer, data.is_at_end)


def check_strategy(strategy: Strategy) -> None:
    """Refuse Lightning's sharding strategies, as an update clips and steps whole weights.

    Raises:
        UnsupportedArgument: The message names the argument of `hf_compat.Trainer` that shards.
    """
    found = next((kind for kind in _SHARDING if isinstance(strategy, kind)), None)
    if found is not None:
        raise UnsupportedArgument(
            f"`strategy={type(strategy).__name__}` of lightning.Trainer cannot train an HFModule, whose updates need "
            f"whole weights.\n\nHint: `hf_compat.Trainer` with `TrainingArguments({_SHARDING[found]})` shards them; or "
            "override `training_step` with `automatic_optimization = True`."
        )


# The updates of a run without a known end. Every schedule then stays constant after its warm-up, to many digits.
NO_END = 10**12
_ENDLESS_SCHEDULES = frozenset({"constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy"})


def refuse_samples(given: object) -> None:
    """Refuse a list of samples in place of a loader, for which Lightning's error names no way out.

    Raises:
        ArgumentError: The first item is a sample: it has a tensor, a number or a text.
    """
    first = given[0] if isinstance(given, (list, tuple)) and given else None
    values = first.values() if isinstance(first, Mapping) else first if isinstance(first, (list, tuple)) else ()
    if any(isinstance(value, (torch.Tensor, np.ndarray, int, float, str)) for value in values):
        raise ArgumentError(
            "`fit` got a list of samples, and Lightning takes loaders.\n\n"
            "Hint: trainer.fit(module, HFDataModule(args, train_dataset=…)), or a DataLoader over them."
        )


def takes_entries(forward: Callable[..., object], batch: Batch) -> bool:
    """Whether a `forward` takes the entries of a batch by their names."""
    parameters = inspect.signature(forward).parameters
    takes_any = inspect.Parameter.VAR_KEYWORD in {parameter.kind for parameter in parameters.values()}
    return isinstance(batch, Mapping) and (takes_any or any(name in parameters for name in batch))


def updates_of_fit(trainer: pl.Trainer, steps: NativeSteps) -> int:
    """Count the updates of a fit that is about to begin.

    Without a limit (`Trainer(max_time=…)`) the schedule has no end to decay to, and a warning says so.

    Raises:
        ArgumentError: The warm-up is a share of an unknown number of updates.
    """
    updates = trainer.estimated_stepping_batches
    if trainer.lightning_module.automatic_optimization:
        accumulate_batches(trainer, steps.args.gradient_accumulation_steps)
        updates = trainer.estimated_stepping_batches
    if math.isinf(updates) or updates < 0:
        args = steps.args
        if 0 < args.warmup_steps < 1:
            raise ArgumentError(
                f"`warmup_steps={brief(args.warmup_steps)}` is a share of the run, and nothing says how many updates "
                "it has.\n\nHint: give a number of updates, or `max_steps` or `max_epochs` to lightning.Trainer."
            )
        kind = str(plain(args.lr_scheduler_type))
        if kind not in _ENDLESS_SCHEDULES:
            warn_user(
                f"Nothing says how many updates this fit makes, so `lr_scheduler_type='{kind}'` has no end to decay "
                "to: the learning rate stays constant after its warm-up.\n\n"
                "Hint: give `max_steps` or `max_epochs` to lightning.Trainer, or choose "
                "`lr_scheduler_type='constant'`.",
            )
        return NO_END
    gives_windows = isinstance(trainer.train_dataloader, Windows) or not math.isfinite(trainer.num_training_batches)
    if gives_windows or trainer.lightning_module.automatic_optimization:  # Lightning has counted its own updates
        return int(updates)
    assert trainer.max_epochs is not None  # set by Lightning where it is left out
    per_epoch = math.ceil(trainer.num_training_batches / steps.args.gradient_accumulation_steps)
    of_epochs = per_epoch * trainer.max_epochs if trainer.max_epochs > 0 else NO_END
    return min(of_epochs, trainer.max_steps) if trainer.max_steps > 0 else of_epochs


def optimizers_of(trainer: pl.Trainer) -> list[torch.optim.Optimizer]:
    """List the optimizers, without Lightning's stand-in for a `configure_optimizers` that returned None."""
    return [optimizer for optimizer in trainer.optimizers if optimizer.param_groups]


def adopt_optimizer(trainer: pl.Trainer, steps: NativeSteps) -> None:
    """Give the steps the optimizer that a subclass, or LightningCLI, has configured.

    Its schedule stays Lightning's, with its own interval.

    Raises:
        ArgumentError: There are none or several, or it is LBFGS.
    """
    made = optimizers_of(trainer)
    if len(made) != 1:
        raise ArgumentError(
            f"`configure_optimizers` returned {len(made)} optimizers; an update of an HFModule takes one.\n\n"
            "Hint: return one with several parameter groups, or override `training_step` with "
            "`automatic_optimization = True`."
        )
    if isinstance(made[0], torch.optim.LBFGS):
        raise ArgumentError(
            f"{type(made[0]).__name__} computes the loss several times in a step (`step(closure)`), and an HFModule's "
            "update computes it once.\n\nHint: set `self.automatic_optimization = True` after `super().__init__(…)`. "
            "Then Lightning makes the updates."
        )
    # An override may have left the schedule out
    is_left_out = not trainer.lr_scheduler_configs and is_schedule_of(steps.lr_scheduler, made[0])
    if made[0] is not steps.optimizer or is_left_out:
        steps.lr_scheduler = None
    is_torchs = isinstance(made[0], torch.optim.Optimizer)
    steps.optimizer = PreparedOptimizer(made[0], steps.accelerator, is_trained=True) if is_torchs else made[0]
