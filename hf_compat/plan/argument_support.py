"""Check arguments before training.

Unsupported values are refused, and values without effect found. Settings that Lightning's Trainer shares with
HF's arguments are compared. A small optimizer and its schedule are built, so that a wrong option of `optim_args` or
`lr_scheduler_kwargs` raises before any model is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from hf_compat.errors import (
    ArgumentError,
    HfCompatError,
    InertArgumentWarning,
    UnsupportedArgument,
    warn_inert,
    warn_user,
)
from hf_compat.hf import argument_values as values
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.arguments_rules import check_again
from hf_compat.hf.enums import DebugOption
from hf_compat.hf.inert import FP16_ON_CPU, OWN_OPTIMIZER, OWN_OPTIMIZER_OBJECT
from hf_compat.hf.rows import OWN_ARGUMENTS, OWN_ROWS, ROWS, RunParts, without_effect
from hf_compat.hf.value_types import plain
from hf_compat.optim.lr_schedulers import get_scheduler
from hf_compat.optim.optimizers import check_request, get_optimizer_cls_and_kwargs, read_request, unread_arguments
from hf_compat.runtime.text import brief, shown


def default_of(field: Field[Any]) -> object:
    """A dataclass field's default in its normalised form."""
    row = ROWS.get(field.name)
    if row is not None and row.normal is not None:
        return row.normal
    default = values.default_of(field)
    return None if default is values.NO_DEFAULT else default


def check_supported(args: TrainingArguments) -> None:
    """Refuse unsupported or contradictory values."""
    check_again(args)
    if args.mixed_precision == "fp16" and not args.fp16 and args.device.type == "cpu":
        warn_inert("ACCELERATE_MIXED_PRECISION=fp16", FP16_ON_CPU.why)
    if DebugOption.TPU_METRICS_DEBUG in args.debug:
        raise UnsupportedArgument(
            f"`{shown('debug', args.debug)}`: tpu_metrics_debug prints counters of a TPU's compiler, and TPUs are not "
            "supported.\n\nHint: leave tpu_metrics_debug out."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class InertSetting:
    """An argument that has no effect in a run, and why."""

    name: str
    value: object
    why: str


@functools.lru_cache(maxsize=64)
def defaults_of(kind: type[TrainingArguments]) -> Mapping[str, object]:
    """The defaults of a class's arguments, with ours. A subclass may have a field of such a name."""
    defaults = {field.name: default_of(field) for field in fields(kind)}
    return defaults | {name: getattr(TrainingArguments, name) for name in OWN_ARGUMENTS if name not in defaults}


def set_arguments(args: TrainingArguments) -> dict[str, object]:
    """List the arguments that were set away from their defaults, ours too, with their values."""
    chosen = {}
    defaults = defaults_of(type(args))
    values_of = operator.attrgetter(*defaults)
    for (name, default), value in zip(defaults.items(), values_of(args), strict=True):
        if name == "accelerator_config":  # an object by now
            default = None if value is None else type(value)()
        if value is not default and not (default is not None and bool(value == default)):
            chosen[name] = value
    return chosen


def inert_settings(
    args: TrainingArguments, parts: RunParts | None = None, in_evaluation: bool = False
) -> list[InertSetting]:
    """Find the arguments that are set away from their defaults and have no effect.

    Args:
        args: The arguments.
        parts: What the run is given beside them. None if that is not known.
        in_evaluation: Whether the run is an evaluation outside of a training.
    """
    parts = RunParts(unread=lambda: unread_arguments(args)) if parts is None else parts
    found = []
    for name, value in set_arguments(args).items():
        row = ROWS.get(name) or OWN_ROWS.get(name)
        if row is None or not row.inert or name in args._defaults_of_profile:
            continue
        if row.derived is not None and value == row.derived.value(args):
            continue
        conditions = (one for one in row.inert if one.in_evaluation or not in_evaluation)
        holds = ((one, one.when(args, parts)) for one in conditions)
        why = next((reason if isinstance(reason, str) else one.why for one, reason in holds if reason), None)
        if why is not None and not parts.reads(name):
            found.append(InertSetting(name=name, value=plain(value), why=why))
    return found


def in_one_line(settings: Iterable[InertSetting]) -> str:
    """Write settings without effect as one line, those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for one in settings:
        by_reason.setdefault(one.why, []).append(f"`{shown(one.name, one.value)}`")
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())


Setting = Any  # a value of Lightning's Trainer or of an argument
Values = dict[str, Setting]  # argument name → value

# Lightning's precision → HF's `mixed_precision`. Lightning gets the first of several spellings.
PRECISIONS = {
    "bf16-mixed": "bf16",
    "bf16": "bf16",
    "16-mixed": "fp16",
    "16": "fp16",
    "32-true": "no",
    "32": "no",
}


def _same(name: str) -> Callable[[Setting], Values]:
    return lambda value: {name: value}


def _checked(name: str, translate: Callable[[Setting], Values | None], hint: str) -> Callable[[Setting], Values]:
    """Refuse the values of a setting for which `translate` returns None."""

    def refusing(value: Setting) -> Values:
        found = translate(value)
        if found is None:
            raise ArgumentError(
                f"`trainer.{name}={brief(value)}` has no counterpart among the arguments.\n\nHint: {hint}"
            )
        return found

    return refusing


def _accelerator(value: Setting) -> Values:
    here = torch.accelerator.current_accelerator(check_available=True)
    if value == "cpu" or (here is not None and value in ("gpu", here.type)):
        return {"use_cpu": value == "cpu"}
    if value == "auto":
        return {}
    raise ArgumentError(
        f"`trainer.accelerator={brief(value)}` is not available here.\n\n"
        "Hint: leave it out. A GPU is used where there is one."
    )


# Setting of `trainer:` → function that translates its value into equivalent arguments.
EQUIVALENTS: dict[str, Callable[[Setting], Values]] = {
    "max_epochs": _same("num_train_epochs"),
    "max_steps": _same("max_steps"),
    "accumulate_grad_batches": _same("gradient_accumulation_steps"),
    "gradient_clip_val": _same("max_grad_norm"),
    "log_every_n_steps": _same("logging_steps"),
    "default_root_dir": _same("output_dir"),
    "deterministic": _checked(
        "deterministic",
        lambda value: {"full_determinism": value} if isinstance(value, bool) else None,
        "true, or leave it out.",
    ),
    "precision": _checked(
        "precision",
        lambda value: (
            {name: PRECISIONS[str(value)] == name for name in ("bf16", "fp16")} if str(value) in PRECISIONS else None
        ),
        f"choose one of {', '.join(PRECISIONS)}.",
    ),
    "val_check_interval": _checked(
        "val_check_interval",
        lambda value: (
            None if isinstance(value, float) and value <= 1.0 else {"eval_strategy": "steps", "eval_steps": int(value)}
        ),
        "set `args.eval_strategy` and `args.eval_steps`. A share there is one of the run, not of an epoch.",
    ),
    "check_val_every_n_epoch": _checked(
        "check_val_every_n_epoch",
        lambda value: {"eval_strategy": "epoch"} if value == 1 else None,
        "set `args.eval_strategy` to 'epoch', or to 'steps' with `args.eval_steps`.",
    ),
    "accelerator": _accelerator,
    "enable_progress_bar": lambda value: {"disable_tqdm": not value},
}

# Passed to Lightning unchanged, because no HF argument corresponds to them.
PASSED_ON = ("profiler", "detect_anomaly", "benchmark", "enable_model_summary", "max_time")

# Setting that the arguments or another section decide → the place to set it.
ELSEWHERE = {
    "callbacks": "`callbacks`",
    "logger": "`args.report_to`, which takes names of trackers and Lightning loggers",
    "enable_checkpointing": "`args.save_strategy`, or a ModelCheckpoint among the callbacks",
    "devices": "the launcher: `hf-compat run --devices N -m hf_compat fit …` starts one process a device",
    "num_nodes": "the launcher",
    "strategy": "the arguments (`fsdp`, `deepspeed`)",
    "min_epochs": "nothing: HF has no minimum",
    "min_steps": "nothing: HF has no minimum",
    "limit_train_batches": "a shorter data set",
    "limit_val_batches": "a shorter data set",
    "limit_test_batches": "a shorter data set",
    "limit_predict_batches": "a shorter data set",
    "overfit_batches": "a shorter data set",
    "fast_dev_run": "`args.max_steps=1`, with `eval_strategy='steps'`, `eval_steps=1` and `save_strategy='no'`",
    "num_sanity_val_steps": "`args.eval_on_start`",
    "inference_mode": "nothing: evaluation runs without gradients",
    "gradient_clip_algorithm": "nothing: HF clips by the norm",
    "use_distributed_sampler": "`args.accelerator_config`",
    "sync_batchnorm": "the model: `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`",
    "reload_dataloaders_every_n_epochs": "nothing: HF loads data once",
    "plugins": "nothing: precision and checkpoints are hf_compat's",
    "barebones": "`args.report_to='none'`, `disable_tqdm=True` and `save_strategy='no'`",
    "enable_autolog_hparams": "`args.report_to`: trackers are given the arguments",
    "model_registry": "nothing: checkpoints are HF folders",
}


def join(trainer: Mapping[str, Setting], args: Mapping[str, Setting], given: set[str]) -> Values:
    """Join the arguments of a `trainer` section and an `args` section."""
    joined, problems = dict(args), []
    for name, value in trainer.items():
        if value is None or name in PASSED_ON:
            continue
        if name in ELSEWHERE:
            problems.append(
                f"`trainer.{name}={brief(value)}` cannot be set here.\n\n"
                f"Hint: leave it out. Its counterpart is {ELSEWHERE[name]}."
            )
            continue
        wanted = EQUIVALENTS[name](value)
        problems += [
            f"`trainer.{name}={brief(value)}` and `args.{n}={brief(args.get(n))}` set the same thing to two values.\n\n"
            "Hint: keep one of them."
            for n in wanted
            if n in given and _differs(args.get(n), wanted[n])
        ]
        joined |= wanted
    if problems:
        raise ArgumentError("\n\n".join(problems))
    return joined


def _differs(a: Setting, b: Setting) -> bool:
    return str(getattr(a, "value", a)) != str(b) if isinstance(b, str) else bool(a != b)


def check_mechanics(args: TrainingArguments, trainer: Any) -> None:
    """Refuse a `lightning.Trainer` of the user's own that accumulates or clips beside the arguments."""
    algorithm = trainer.gradient_clip_algorithm
    if trainer.accumulate_grad_batches != 1:
        name, wanted = "accumulate_grad_batches", "gradient_accumulation_steps"
    elif trainer.gradient_clip_val is not None and float(trainer.gradient_clip_val) > 0:
        name, wanted = "gradient_clip_val", "max_grad_norm"
    elif algorithm is not None and algorithm.value != "norm":
        raise ArgumentError(
            f"`gradient_clip_algorithm='{algorithm.value}'` of lightning.Trainer has no effect on an HFModule, which "
            f"clips by the norm (`max_grad_norm={args.max_grad_norm}`).\n\n"
            "Hint: leave it out. To clip by value, set `max_grad_norm=0` and call `torch.nn.utils.clip_grad_value_` in "
            "`on_before_optimizer_step` of a callback."
        )
    else:
        return
    raise ArgumentError(
        f"`{name}={getattr(trainer, name)}` of lightning.Trainer has no effect on an HFModule, which accumulates and "
        f"clips as its arguments say (`{wanted}={getattr(args, wanted)}`).\n\n"
        f"Hint: leave it out, and set `TrainingArguments({wanted}={getattr(trainer, name)})`."
    )


def check_native(args: TrainingArguments, trainer: Mapping[str, Setting], parts: RunParts) -> None:
    """Compare arguments with the user's own Lightning trainer, in which a native module trains.

    Warn of those that have no effect there, or in this run.
    """
    defaults = {field.name: default_of(field) for field in fields(args)}
    problems = []
    for name, value in trainer.items():
        for argument, wanted in EQUIVALENTS[name](value).items():
            has = getattr(args, argument)
            if argument == "fp16" and args.device.type == "cpu":  # no effect on the CPU
                continue
            if has != defaults[argument] and _differs(has, wanted):
                is_default = (name, value) == ("max_epochs", 1000)  # Lightning's, where no length is given
                is_length = name in ("max_epochs", "max_steps") and has == int(has)
                there = f": `lightning.Trainer({name}={int(has)})`" if is_length else ""
                problems.append(
                    f"`{argument}={brief(has)}` of the arguments and `{name}={brief(value)}` of lightning.Trainer"
                    f"{' (its default)' if is_default else ''} set the same thing to two values.\n\n"
                    f"Hint: a native module follows its trainer. Set the value there{there}."
                )
    if problems:
        raise ArgumentError("\n\n".join(problems))
    rows = ROWS | OWN_ROWS
    defaults |= {name: own.default for name, own in OWN_ARGUMENTS.items()}
    inert = [name for name, row in rows.items() if row.native and getattr(args, name) != defaults[name]]
    # evaluating by steps without a number of them takes over `logging_steps`
    if "eval_steps" in inert and args.eval_steps == defaults["logging_steps"]:
        inert.remove("eval_steps")
    if inert:
        ways = ", ".join(f"`{name}` ({rows[name].native})" for name in inert)
        warn_user(
            f"These arguments have no effect, because your own Lightning trainer decides instead: {ways}.",
            InertArgumentWarning,
        )
    others = [one for one in inert_settings(args, parts) if one.name in rows and rows[one.name].native is None]
    if others:
        warn_user(f"Without effect in this run: {in_one_line(others)}.", InertArgumentWarning)


# Errors that torch optimizers and schedules raise for unusable values.
_UNUSABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# The sample run has updates before and after the warmup, in the middle and at the end.
_WARMUP, _TOTAL = 10, 1000
_ASKED = (0, 5, 10, 500, 999)
# A metric that improves, stays, and gets worse.
_METRICS = (1.0, 0.5, 0.5, 2.0, 3.0)


def check_optimization(args: TrainingArguments) -> None:
    """Build the optimizer and the schedule of the arguments, and compute sample learning rates."""
    check_schedule(args, check_optimizer(args))


def check_optimizer(args: TrainingArguments, model: torch.nn.Module | None = None) -> torch.optim.Optimizer | None:
    """Build the optimizer over one parameter with weight decay and one without. None if it needs a whole model."""
    check_request(args, model)
    entry, _ = read_request(args, model)
    if entry.projects or entry.in_backward:  # its keywords depend on the model
        return None
    try:
        kind, keywords = get_optimizer_cls_and_kwargs(args)
        return kind(_two_groups(), **keywords)
    except HfCompatError:
        raise
    except _UNUSABLE as error:
        read = {name: getattr(args, name) for name in without_effect(OWN_OPTIMIZER, OWN_OPTIMIZER_OBJECT)}
        told = ", ".join(f"`{shown(name, value)}`" for name, value in read.items() if value is not None)
        raise ArgumentError(f"The optimizer cannot be made: {error}.\n\nHint: check {told}.") from error


def check_schedule(args: TrainingArguments, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Compute learning rates of the arguments' schedule at some updates, with an SGD if no optimizer is given."""
    if optimizer is None:
        optimizer = torch.optim.SGD(_two_groups(), lr=args.learning_rate)
    options = dict(args.lr_scheduler_kwargs or {})  # type: ignore[arg-type]  # a dict once normalised
    try:
        # a schedule that follows a metric may print its changes
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            schedule = get_scheduler(args.lr_scheduler_type, optimizer, _WARMUP, _TOTAL, options)
            if isinstance(schedule, LambdaLR):
                rates = [float(factor(update)) for factor in schedule.lr_lambdas for update in _ASKED]
            else:
                for metric in _METRICS:
                    schedule.step(metric)  # type: ignore[arg-type]  # it follows a metric
                rates = [float(group["lr"]) for group in optimizer.param_groups]
    except HfCompatError as error:
        if "lr_scheduler_type" in str(error):
            raise
        raise _unusable(args, str(error)) from error
    except _UNUSABLE as error:
        raise _unusable(args, f"{type(error).__name__}: {error}") from error
    if not all(math.isfinite(rate) for rate in rates):
        raise _unusable(args, "it gives learning rates that are not finite")


def _unusable(args: TrainingArguments, why: str) -> ArgumentError:
    options = shown("lr_scheduler_kwargs", args.lr_scheduler_kwargs)
    return ArgumentError(
        f"`{shown('lr_scheduler_type', args.lr_scheduler_type)}` does not work with `{options}` and "
        f"`learning_rate={args.learning_rate}`: {why}.\n\nHint: check these three."
    )


def _two_groups() -> list[dict[str, object]]:
    return [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
