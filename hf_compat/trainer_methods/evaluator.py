"""`Evaluator` runs a Trainer's evaluations.

`LightningOptions` holds the options of `lightning.Trainer` that are set beside the arguments.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, TypedDict

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.profilers import Profiler
from torch import nn

from hf_compat.callbacks.bridge import BridgedTrainer, HFBridge
from hf_compat.data.tree import join_batches
from hf_compat.data.types import Batch, DataSource, Loader
from hf_compat.engine.evaluation import EvaluationBatches, EvaluationRun, EvaluationSettings
from hf_compat.engine.internals import is_validating_within_fit, run_validation
from hf_compat.engine.kept_batches import ComputeMetrics
from hf_compat.engine.loops import WHOLE, EvaluationPart
from hf_compat.engine.module import WindowModule
from hf_compat.engine.precision import wrap_forward
from hf_compat.engine.window_trainer import WindowTrainer
from hf_compat.errors import ArgumentError, UnknownArgument, UnsupportedArgument
from hf_compat.hf.metrics import EvalLoopOutput, speed_metrics
from hf_compat.hf.search import Metrics
from hf_compat.interop.upstream_log import log_evaluation
from hf_compat.optim.stepping import stepping_of
from hf_compat.plan.argument_support import ELSEWHERE, EQUIVALENTS
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.translate import CurrentPlan
from hf_compat.runtime.collectives import gather_objects, naming_absent_ranks
from hf_compat.runtime.inspection import has_length
from hf_compat.runtime.nested import Nested
from hf_compat.runtime.text import did_you_mean, shown
from hf_compat.search.trials import check_model_is_there
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.training_run.loss_log import StepAverages
from hf_compat.training_run.run import TrainingRun

_PROFILERS = ("simple", "advanced", "pytorch", "xla")


class LightningOptions(TypedDict, total=False):
    """Options of `lightning.Trainer` for `Trainer(lightning_options={…})`. They do not change any numbers.

    Attributes:
        profiler: `"simple"`, `"advanced"`, `"pytorch"`, `"xla"` or a Profiler. It measures fits and evaluations.
        detect_anomaly: Raise an error that names an operation whose gradient is NaN.
        benchmark: Let cuDNN find the fastest convolutions.
        enable_model_summary: Print the layers and their sizes at the start of a fit.
        max_time: Time limit of a `train()` (`"DD:HH:MM:SS"`, a timedelta, or a dict of its keywords). Training stops
            after the current update. Checkpoints store the used time.
        plugins: A CheckpointIO, or a list of one, which writes the files of Lightning's ModelCheckpoint.
    """

    profiler: str | Profiler | None
    detect_anomaly: bool
    benchmark: bool | None
    enable_model_summary: bool
    max_time: str | timedelta | dict[str, float] | None
    plugins: CheckpointIO | list[CheckpointIO] | None


class CheckedOptions(UserDict[str, object]):
    """Options that are checked when set, singly or together.

    Raises:
        UnknownArgument: `lightning.Trainer` has no such option.
        UnsupportedArgument: Another setting decides this. The message names it.
        ArgumentError: The option does not accept the value.
    """

    def __setitem__(self, name: str, value: object) -> None:
        check_option(name, value)
        super().__setitem__(name, value)

    def __ior__(self, other: object) -> CheckedOptions:  # type: ignore[override,misc]  # UserDict's takes anything
        self.update(other)  # type: ignore[call-overload]
        return self

    def of_trainers(self) -> dict[str, object]:
        """Return the keywords for each Lightning trainer, without the time limit, which is only for fits."""
        return {name: value for name, value in self.items() if name != "max_time" and value is not None}

    def timer(self) -> Timer | None:
        """Return a new callback that ends a fit in time, or None without a limit."""
        limit = self.get("max_time")
        return None if limit is None else Timer(limit)  # type: ignore[arg-type]  # `check_option` has checked it


def checked(options: object) -> CheckedOptions:
    """Check options and return them.

    Raises:
        ArgumentError: They are not a mapping, or an option cannot be set.
    """
    if not isinstance(options, Mapping):
        raise ArgumentError(
            f"`{shown('lightning_options', options)}` is not a mapping.\n\nHint: write {{'profiler': 'simple'}}."
        )
    return CheckedOptions(options)


def check_option(name: str, value: object) -> None:
    """Check one option and its value."""
    if name not in _TAKES:
        raise _refusal(name, value)
    is_taken, kinds = _TAKES[name]
    if not is_taken(value):
        raise ArgumentError(f"`lightning_options` has `{shown(name, value)}`.\n\nHint: {kinds}.")


def _refusal(name: str, value: object) -> UnknownArgument | UnsupportedArgument:
    if name not in ELSEWHERE and name not in EQUIVALENTS:
        hint = did_you_mean(str(name), _TAKES, f"there are {', '.join(_TAKES)}.")
        return UnknownArgument(f"`lightning_options` has an unknown name: `{shown(str(name), value)}`.\n\nHint: {hint}")
    way = ELSEWHERE.get(name) or f"`TrainingArguments({_ARGUMENTS[name]})`"
    return UnsupportedArgument(
        f"`{shown(name, value)}` cannot be set in `lightning_options`.\n\nHint: its counterpart here is {way}."
    )


# The training arguments to use instead of an option.
_ARGUMENTS = {
    "max_epochs": "num_train_epochs=…",
    "max_steps": "max_steps=…",
    "accumulate_grad_batches": "gradient_accumulation_steps=…",
    "gradient_clip_val": "max_grad_norm=…",
    "log_every_n_steps": "logging_steps=…",
    "default_root_dir": "output_dir=…",
    "deterministic": "full_determinism=True",
    "precision": "bf16=True)` or `TrainingArguments(fp16=True",
    "val_check_interval": "eval_strategy='steps', eval_steps=…",
    "check_val_every_n_epoch": "eval_strategy='epoch'",
    "accelerator": "use_cpu=True",
    "enable_progress_bar": "disable_tqdm=True",
}


def _is_profiler(value: object) -> bool:
    return value is None or isinstance(value, Profiler) or value in _PROFILERS


def _is_switch(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _is_duration(value: object) -> bool:
    if value is None:
        return True
    try:
        return isinstance(value, (str, timedelta, dict)) and (Timer(value).time_remaining() or 0) > 0
    except (MisconfigurationException, TypeError):  # a malformed text, or a keyword that timedelta lacks
        return False


def _are_plugins(value: object) -> bool:
    plugins = value if isinstance(value, list) else [value]
    return value is None or (len(plugins) == 1 and isinstance(plugins[0], CheckpointIO))


_SWITCH = (_is_switch, "it takes True or False")
_TAKES: dict[str, tuple[Callable[[object], bool], str]] = {
    "profiler": (_is_profiler, f"it takes a Profiler, or one of {', '.join(_PROFILERS)}"),
    "detect_anomaly": _SWITCH,
    "benchmark": _SWITCH,
    "enable_model_summary": _SWITCH,
    "max_time": (_is_duration, "it takes a positive duration: 'DD:HH:MM:SS', a timedelta, or {'minutes': 5}"),
    "plugins": (_are_plugins, "it takes a CheckpointIO, as the arguments decide precision and processes"),
}


class EvaluationHost(BridgedTrainer, Protocol):
    """What an `Evaluator` needs of its Trainer. Subclasses may override the methods."""

    model_wrapped: nn.Module
    model_preparation_time: float
    optimizer: object
    is_in_train: bool
    lightning_trainer: pl.Trainer | None
    compute_metrics: ComputeMetrics | Mapping[str, ComputeMetrics] | None
    preprocess_logits_for_metrics: Callable[..., Nested] | None
    gather_function: Callable[..., Nested]
    accelerator: AcceleratorFacade
    _plan: CurrentPlan
    _run: TrainingRun
    _lightning_options: CheckedOptions

    def evaluate(
        self, eval_dataset: DataSource = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Metrics: ...

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Nested | None, Nested | None]: ...

    def num_examples(self, dataloader: Loader) -> int: ...

    def compiled(self, model: nn.Module) -> nn.Module: ...

    def _prepare_input(self, data: Batch) -> Batch: ...

    def _call_wrap_model(self, training: bool) -> None: ...

    def _make_module(self, plan: LightningPlan) -> WindowModule: ...


class Evaluator:
    """Runs the evaluations of a Trainer, within a fit and outside of one.

    Args:
        host: The Trainer.

    Attributes:
        averages: Means of the named values that the steps of an evaluation log.
        is_prepared: Whether the model was compiled and timed. This happens only in a first evaluation before training.
    """

    def __init__(self, host: EvaluationHost) -> None:
        self._host = host
        self.averages = StepAverages()
        self.is_prepared = False
        self._name: str | None = None
        self._part = WHOLE
        self._outside_fit: _OutsideFit | None = None

    def begin_fit(self) -> None:
        """Take the model for compiled, and let go of what evaluated before: it may hold the model of another trial."""
        self.is_prepared, self._outside_fit = True, None

    def evaluate_each(self, datasets: Mapping[str, DataSource], ignore_keys: list[str] | None, prefix: str) -> Metrics:
        """Evaluate several data sets with the Trainer's `evaluate`, each under a prefix with its name.

        Args:
            datasets: Data sets by name. A value may be the name itself, for an overridden `get_eval_dataloader`.
            ignore_keys: Outputs of the model to leave out.
            prefix: The prefix before each name.
        """
        metrics: Metrics = {}
        last = len(datasets) - 1
        try:
            for place, (name, dataset) in enumerate(datasets.items()):
                self._name = name
                self._part = EvaluationPart(is_first=place == 0, is_last=place == last, earlier=metrics)
                metrics |= self._host.evaluate(
                    eval_dataset=dataset, ignore_keys=ignore_keys, metric_key_prefix=f"{prefix}_{name}"
                )
        finally:
            self._name, self._part = None, WHOLE
        return metrics

    @property
    def compute_metrics(self) -> ComputeMetrics | None:
        """The metrics of this evaluation. With several data sets each may have its own."""
        given = self._host.compute_metrics
        return given.get(str(self._name)) if isinstance(given, Mapping) else given

    def run(
        self, loader: Loader, description: str, loss_only: bool, ignore_keys: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        """Run Lightning's validation over a loader, and collect predictions and metrics.

        Args:
            loader: The batches.
            description: `Evaluation` or `Prediction`.
            loss_only: Keep the loss only.
            ignore_keys: Outputs of the model to leave out.
            prefix: Prefix of the metrics.
        """
        host, args = self._host, self._host.args
        check_model_is_there(host.model)
        plan = host._plan.of(args, getattr(host.model, "config", None))
        host._call_wrap_model(training=False)
        model = self._prepare_model(plan)
        # Outside training, use the precision of full evaluations. Use the optimizer's averaged weights, if any.
        if not host.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
            host.model.to(dtype=torch.float16 if args.fp16_full_eval else torch.bfloat16, device=args.device)
        stepping_of(host.optimizer).to_evaluation()
        host.callback_handler.eval_dataloader = loader
        log_evaluation(description, host.num_examples(loader) if has_length(loader) else None, args.eval_batch_size)
        is_prediction = description == "Prediction"
        gather, drops_fillers = self._gather()
        run = EvaluationRun(
            host,
            model,
            loader,
            EvaluationSettings.of(args, prefix, loss_only, ignore_keys, is_prediction=is_prediction),
            self.compute_metrics,
            host.preprocess_logits_for_metrics,
            gather,
            self.averages.take,
            drops_fillers,
        )
        with host.accelerator.passes.reading(loader):
            batches = EvaluationBatches(run.loader)
            batches.start_if_empty()
            if batches.length == 0:  # Lightning skips an empty evaluation, including its switch to eval mode
                host.model.eval()
            module, trainer = host._run.module, host._run.lightning_trainer
            if module is not None and trainer is not None and not is_validating_within_fit(trainer):
                with module.evaluating(run), self._taking_part(trainer):
                    run_validation(trainer, batches)
            else:
                self._run_outside_fit(run, plan, batches)
        output = run.output or run.finish()
        seconds = vars(host).get("model_preparation_time")
        if seconds is not None and output.metrics is not None:
            output.metrics[f"{prefix}_model_preparation_time"] = seconds
        return output

    def add_speed(self, output: EvalLoopOutput, prefix: str, start_time: float) -> Metrics:
        """Return an evaluation's metrics with its duration, and with samples and batches per second.

        Args:
            output: The loop's result.
            prefix: Prefix of the metrics.
            start_time: `time.time()` at the start, in seconds.
        """
        metrics = output.metrics if output.metrics is not None else {}
        start_time += metrics.get(f"{prefix}_model_preparation_time", 0.0)
        samples, args = output.num_samples or 0, self._host.args
        batches = math.ceil(samples / (args.eval_batch_size * args.world_size))
        metrics.update(speed_metrics(prefix, start_time, num_samples=samples, num_steps=batches))
        return metrics

    def _prepare_model(self, plan: LightningPlan) -> nn.Module:
        """Set the model's precision, and return the module to evaluate.

        As in HF, only a first evaluation before any training is timed and runs compiled.
        """
        host, start_time = self._host, time.time()
        if plan.strategy != "deepspeed":
            wrap_forward(host.model, plan.precision, host.args.device.type)
        if self.is_prepared:
            return host.model
        self.is_prepared = True
        host.model_wrapped = model = host.compiled(host.model)
        host.model_preparation_time = round(time.time() - start_time, 4)
        return model

    def _gather(self) -> tuple[Callable[[Nested], Nested], bool]:
        """Return a function that gathers results: as tensors, as objects, or as a subclass defines.

        Also return whether to drop samples that fill up the last batch. A subclass's function drops them itself.
        """
        host = self._host
        own, chosen = host.accelerator.gather_for_metrics, vars(host).get("gather_function")
        if chosen is not None or _is_another_way(own):
            host.gather_function = own  # as upstream, an override applies to one evaluation only
        if chosen is not None and _is_another_way(chosen):
            return chosen, False
        if host.args.eval_use_gather_object and host.args.world_size > 1:
            return lambda data: join_batches(gather_objects(data)), True
        return host.accelerator.gather, True

    @contextmanager
    def _taking_part(self, trainer: WindowTrainer) -> Iterator[None]:
        """Run Lightning's loop as the current part. A nested evaluation by a callback is a whole one."""
        part, self._part = self._part, WHOLE
        with trainer.as_part(part):
            yield

    def _run_outside_fit(self, run: EvaluationRun, plan: LightningPlan, batches: EvaluationBatches) -> None:
        """Run an evaluation in its own Lightning trainer. Reuse the last one if it is still up to date."""
        host, callbacks = self._host, self._host._callbacks
        options = host._lightning_options.of_trainers()
        kept, self._outside_fit = self._outside_fit, None
        if kept is None or callbacks.lightning or options or not kept.is_for(plan, host):
            bridge = HFBridge(host, host._run)
            arranged = bridge.lightning_callback_list(callbacks.lightning, callbacks.order)
            # EarlyStopping chooses its hook in `setup`, by the trainer's validation interval
            looked_at = plan if host.args.eval_strategy == "no" else dataclasses.replace(plan, validate_every_updates=1)
            trainer = WindowTrainer(looked_at, arranged, callbacks.loggers(), host.args._launch, **options)
            kept = _OutsideFit(plan, host._run, host.model, trainer, host._make_module(plan), bridge)
        trainer, module = kept.trainer, kept.module
        if host._run.module is None:
            host.lightning_trainer = trainer
        kept.bridge.find_requested_kwargs()
        try:
            with naming_absent_ranks(), module.evaluating(run), self._taking_part(trainer):
                command = trainer.test if run.settings.is_prediction else trainer.validate
                trainer.run_command(command, module, dataloaders=batches, verbose=False)
        finally:
            callbacks.watch_outputs(False)
        self._outside_fit = kept  # only after success, as an error may leave it in any state


@dataclasses.dataclass(frozen=True, slots=True)
class _OutsideFit:
    """The trainer for evaluations outside a fit, and the objects that it was made for."""

    plan: LightningPlan
    run: TrainingRun
    model: nn.Module
    trainer: WindowTrainer
    module: WindowModule
    bridge: HFBridge

    def is_for(self, plan: LightningPlan, host: EvaluationHost) -> bool:
        """Whether it is still up to date for a plan and its Trainer."""
        return self.run is host._run and self.model is host.model and self.plan == plan


def _is_another_way(gather: Callable[[Nested], Nested]) -> bool:
    """Whether results are gathered by anything but our accelerator's own method."""
    return getattr(gather, "__func__", None) is not AcceleratorFacade.gather_for_metrics
