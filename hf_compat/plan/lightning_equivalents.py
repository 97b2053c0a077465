"""Settings that Lightning's Trainer and HF's arguments both have: one row each, and what compares the two."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, Protocol, cast

import torch

from hf_compat.errors import ArgumentError, InertArgumentWarning
from hf_compat.hf.argument_values import ROWS
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.argument_support import default_of
from hf_compat.plan.lightning_plan import PrecisionName

Setting = Any  # a value of Lightning's Trainer or of an argument: a text, a number, a flag
Values = dict[str, Setting]  # of arguments, by name

# Lightning's precision → HF's `mixed_precision`; of several spellings the first is the one Lightning is given.
PRECISIONS = {
    "bf16-mixed": "bf16",
    "bf16": "bf16",
    "16-mixed": "fp16",
    "16": "fp16",
    "32-true": "no",
    "32": "no",
}


def lightning_precision(mixed_precision: str) -> PrecisionName:
    """Return Lightning's word for HF's `mixed_precision`."""
    first_spellings = {hf_word: precision for precision, hf_word in reversed(PRECISIONS.items())}
    return cast(PrecisionName, first_spellings[mixed_precision])


def _same(name: str) -> Callable[[Setting], Values]:
    return lambda value: {name: value}


def _precision(value: Setting) -> Values:
    try:
        mixed_precision = PRECISIONS[str(value)]
        return {"bf16": mixed_precision == "bf16", "fp16": mixed_precision == "fp16"}
    except KeyError:
        raise ArgumentError(
            f"`trainer.precision={value!r}` has no counterpart among the arguments.\n\n"
            f"Hint: choose one of {', '.join(PRECISIONS)}."
        ) from None


def _interval(value: Setting) -> Values:
    if isinstance(value, float) and value <= 1.0:
        raise ArgumentError(
            f"`trainer.val_check_interval={value!r}` is a share of an epoch, HF's `eval_steps` below 1 of the run.\n\n"
            "Hint: set `args.eval_strategy` and `args.eval_steps`."
        )
    return {"eval_strategy": "steps", "eval_steps": int(value)}


def _every_epoch(value: Setting) -> Values:
    if value == 1:
        return {"eval_strategy": "epoch"}
    raise ArgumentError(
        f"`trainer.check_val_every_n_epoch={value!r}` has no counterpart in HF.\n\n"
        "Hint: set `args.eval_strategy` to 'epoch', or to 'steps' with `args.eval_steps`."
    )


def _accelerator(value: Setting) -> Values:
    if value == "cpu":
        return {"use_cpu": True}
    if value in ("gpu", "cuda") and torch.cuda.is_available():
        return {"use_cpu": False}
    if value == "auto":
        return {}
    raise ArgumentError(
        f"`trainer.accelerator={value!r}` is not to be had here.\n\n"
        "Hint: leave it out: a GPU is used where there is one."
    )


def _determinism(value: Setting) -> Values:
    if isinstance(value, bool):
        return {"full_determinism": value}
    raise ArgumentError(f"`trainer.deterministic={value!r}` has no counterpart in HF.\n\nHint: true, or leave it out.")


# A setting of `trainer:` → from its value to the arguments that say the same.
EQUIVALENTS: dict[str, Callable[[Setting], Values]] = {
    "max_epochs": _same("num_train_epochs"),
    "max_steps": _same("max_steps"),
    "accumulate_grad_batches": _same("gradient_accumulation_steps"),
    "gradient_clip_val": _same("max_grad_norm"),
    "log_every_n_steps": _same("logging_steps"),
    "default_root_dir": _same("output_dir"),
    "deterministic": _determinism,
    "precision": _precision,
    "val_check_interval": _interval,
    "check_val_every_n_epoch": _every_epoch,
    "accelerator": _accelerator,
    "enable_progress_bar": lambda value: {"disable_tqdm": not value},
}

# Handed to Lightning as they are: they change nothing that HF has a word for.
PASSED_ON = ("profiler", "detect_anomaly", "benchmark", "enable_model_summary", "max_time")

# What the arguments, or other sections, decide; and where it is set.
ELSEWHERE = {
    "callbacks": "`callbacks`",
    "logger": "`args.report_to`, which takes names of trackers and Lightning loggers",
    "enable_checkpointing": "`args.save_strategy`, or a ModelCheckpoint among the callbacks",
    "devices": "the launcher: one process a device",
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
    """Return the arguments that a `trainer` section and an `args` section ask for together.

    Args:
        trainer: The settings of the Lightning trainer; None is not set.
        args: The arguments.
        given: Names of arguments that the user set.

    Raises:
        ArgumentError: One setting has two values, or another section decides it; all are listed.
    """
    joined, problems = dict(args), []
    for name, value in trainer.items():
        if value is None or name in PASSED_ON:
            continue
        if name in ELSEWHERE:
            problems.append(
                f"`trainer.{name}={value!r}` is not set here.\n\nHint: it is the affair of {ELSEWHERE[name]}."
            )
            continue
        wanted = EQUIVALENTS[name](value)
        contradicted = [n for n in wanted if n in given and _differs(args.get(n), wanted[n])]
        problems += [_contradiction(name, value, n, args.get(n)) for n in contradicted]
        joined |= wanted
    if problems:
        raise ArgumentError("\n\n".join(problems))
    return joined


def _contradiction(name: str, value: Setting, argument: str, has: Setting) -> str:
    return (
        f"`trainer.{name}={value!r}` and `args.{argument}={has!r}` set the same thing to two values.\n\n"
        "Hint: keep one of them."
    )


def _differs(a: Setting, b: Setting) -> bool:
    return str(getattr(a, "value", a)) != str(b) if isinstance(b, str) else bool(a != b)


class MechanicsOfTrainer(Protocol):
    """What a Lightning trainer may be told to do to gradients."""

    @property
    def gradient_clip_algorithm(self) -> Enum | None:
        """`norm` or `value`."""

    accumulate_grad_batches: int
    gradient_clip_val: float | None


def check_mechanics(args: TrainingArguments, trainer: MechanicsOfTrainer) -> None:
    """Refuse a trainer of the user's own that accumulates or clips beside the arguments.

    Raises:
        ArgumentError: It does; the argument that does the same is named.
    """
    if trainer.accumulate_grad_batches != 1:
        wanted, set_to = "gradient_accumulation_steps", trainer.accumulate_grad_batches
        shown = f"accumulate_grad_batches={set_to}"
    elif trainer.gradient_clip_val is not None and float(trainer.gradient_clip_val) > 0:
        wanted, set_to = "max_grad_norm", trainer.gradient_clip_val  # type: ignore[assignment]
        shown = f"gradient_clip_val={set_to}"
    elif trainer.gradient_clip_algorithm is not None and trainer.gradient_clip_algorithm.value != "norm":
        raise ArgumentError(
            f"`gradient_clip_algorithm={trainer.gradient_clip_algorithm.value!r}` of lightning.Trainer has no effect "
            f"on an HFModule, which clips by the norm (`max_grad_norm={args.max_grad_norm}`).\n\n"
            "Hint: leave it out; to clip by value, set `max_grad_norm=0` and call `torch.nn.utils.clip_grad_value_` in "
            "`on_before_optimizer_step` of a callback."
        )
    else:
        return
    raise ArgumentError(
        f"`{shown}` of lightning.Trainer has no effect on an HFModule, which accumulates and clips as its arguments "
        f"say (`{wanted}={getattr(args, wanted)}`).\n\n"
        f"Hint: leave it out, and set `TrainingArguments({wanted}={set_to})`."
    )


def check_native(args: TrainingArguments, trainer: Mapping[str, Setting]) -> None:
    """Compare arguments with a Lightning trainer of the user's own, in which a native module trains.

    Args:
        args: The arguments of the module.
        trainer: `max_epochs`, `max_steps` and `precision` of the trainer.

    Raises:
        ArgumentError: An argument that was set says another thing than the trainer; both are shown.
    """
    defaults = {field.name: default_of(field) for field in fields(args)}
    problems = []
    for name, value in trainer.items():
        for argument, wanted in EQUIVALENTS[name](value).items():
            has = getattr(args, argument)
            if argument == "fp16" and args.device.type == "cpu":  # nothing there
                continue
            if has != defaults[argument] and _differs(has, wanted):
                problems.append(
                    f"`{argument}={has!r}` of the arguments and `{name}={value!r}` of lightning.Trainer set the same "
                    "thing to two values.\n\nHint: a native module trains as its trainer says; set it there."
                )
    if problems:
        raise ArgumentError("\n\n".join(problems))
    inert = [name for name, row in ROWS.items() if row.native and getattr(args, name) != defaults[name]]
    # evaluating by steps without a number of them takes over `logging_steps`
    if "eval_steps" in inert and args.eval_steps == defaults["logging_steps"]:
        inert.remove("eval_steps")
    if inert:
        ways = ", ".join(f"`{name}` ({ROWS[name].native})" for name in inert)
        warnings.warn(
            f"A Lightning trainer of your own decides what these arguments say; they have no effect: {ways}.",
            InertArgumentWarning,
            stacklevel=2,
        )
