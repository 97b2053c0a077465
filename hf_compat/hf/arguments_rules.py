"""What `TrainingArguments` makes of its fields: normal forms, derived values, and everything that cannot work.

HF words only. `normalise_arguments` raises only where a field cannot be read at all (a value outside a closed set,
broken JSON, two counts of accumulation); `check_arguments` collects all complaints and raises once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import torch

from hf_compat.errors import ArgumentError
from hf_compat.hf.accelerator_config import AcceleratorConfig
from hf_compat.hf.enums import (
    DebugOption,
    ExplicitEnum,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)
from hf_compat.hf.legacy import ArgumentValue
from hf_compat.hf.tracking import PACKAGES, available_trackers
from hf_compat.runtime.launch import variable
from hf_compat.runtime.text import parse_bool

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments  # which imports this module

JSON_FIELDS = (
    "lr_scheduler_kwargs",
    "activation_checkpointing_kwargs",
    "accelerator_config",
    "deepspeed",
    "gradient_checkpointing_kwargs",
    "fsdp_config",
)
METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


Strategy = TypeVar("Strategy", bound=ExplicitEnum)


def normalise_arguments(args: TrainingArguments) -> None:
    """Bring every field to its one form: enums, parsed JSON, resolved defaults."""
    args.output_dir = os.path.expanduser(args.output_dir) if args.output_dir is not None else "trainer_output"
    _parse_json_fields(args)
    _resolve_activation_checkpointing(args)
    _convert_enums(args)
    _derive_defaults(args)
    _derive_metric(args)
    _round_steps(args)
    config = AcceleratorConfig.from_any(args.accelerator_config)
    args.accelerator_config = config  # type: ignore[assignment]  # the field's type is what a command line gives
    _resolve_accumulation(args, config)
    if args.fp16 or args.bf16:
        args.mixed_precision = "fp16" if args.fp16 else "bf16"
    else:  # what `accelerate launch --mixed_precision` has set
        args.mixed_precision = str(variable("ACCELERATE_MIXED_PRECISION", "no")).lower()
    if args.torch_compile_mode is not None or args.torch_compile_backend is not None:
        args.torch_compile = True


def _parse_json_fields(args: TrainingArguments) -> None:
    for name in JSON_FIELDS:
        value = getattr(args, name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                setattr(args, name, _typed(json.loads(value)))
            except json.JSONDecodeError as error:
                raise ArgumentError(f"`{name}={value!r}` is not valid JSON: {error}.") from error


def _typed(value: ArgumentValue) -> ArgumentValue:
    """Turn the strings of command-line JSON into what they spell: booleans and numbers."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):  # narrow, as in transformers: `"on"` and `"1"` may be meant as they are
        return parse_bool(value, "JSON")
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            continue
    return value


def _resolve_activation_checkpointing(args: TrainingArguments) -> None:
    pairs = (
        ("gradient_checkpointing", "activation_checkpointing"),
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    )
    for old, new in pairs:
        if getattr(args, new) is None:
            setattr(args, new, getattr(args, old))
        setattr(args, old, getattr(args, new))
    if args.activation_checkpointing is None:
        args.activation_checkpointing = args.gradient_checkpointing = False


def _convert_enums(args: TrainingArguments) -> None:
    args.eval_strategy = _strategy(IntervalStrategy, args.eval_strategy)
    args.logging_strategy = _strategy(IntervalStrategy, args.logging_strategy)
    args.save_strategy = _strategy(SaveStrategy, args.save_strategy)
    args.hub_strategy = HubStrategy(_value(args.hub_strategy))
    args.lr_scheduler_type = SchedulerType(_value(args.lr_scheduler_type))
    args.optim = OptimizerNames(_value(args.optim))
    debug = args.debug.split() if isinstance(args.debug, str) else (args.debug or [])
    args.debug = [DebugOption(_value(option)) for option in debug]


def _strategy(kind: type[Strategy], value: str | bool | Enum) -> Strategy:
    # 3.x and 4.x scripts also passed booleans; members of the `transformers` enums bring their value along.
    if isinstance(value, bool):
        value = "steps" if value else "no"
    return kind(_value(value))


def _value(option: str | Enum) -> str:
    """Return the value of a member of an enum, ours or `transformers`' own; a string is returned as it is."""
    return str(option.value) if isinstance(option, Enum) else option


def _derive_defaults(args: TrainingArguments) -> None:
    if args.disable_tqdm is None:
        args.disable_tqdm = False
    if isinstance(args.include_num_input_tokens_seen, bool):
        args.include_num_input_tokens_seen = "all" if args.include_num_input_tokens_seen else "no"
    if args.include_for_metrics is None:
        args.include_for_metrics = []
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        args.eval_steps = args.logging_steps
    args.report_to = _trackers(args.report_to)
    if args.use_cpu:
        args.dataloader_pin_memory = False


def _derive_metric(args: TrainingArguments) -> None:
    if args.metric_for_best_model is None and (
        args.load_best_model_at_end or args.lr_scheduler_type in METRIC_SCHEDULES
    ):
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def _round_steps(args: TrainingArguments) -> None:
    """Make whole numbers of steps ints; a share below 1 stays."""
    for kind in ("logging", "eval", "save"):
        steps = getattr(args, f"{kind}_steps")
        if steps is not None and steps > 1 and steps == int(steps):
            setattr(args, f"{kind}_steps", int(steps))


def _trackers(report_to: str | list[str] | None) -> list[str]:
    """Return the trackers as a list: names, and Lightning loggers as they are."""
    names = list(report_to) if isinstance(report_to, (list, tuple)) else [] if report_to is None else [report_to]
    if names == ["all"]:
        return available_trackers()
    return [] if names == ["none"] else names


def _known_trackers(args: TrainingArguments) -> Iterator[str]:
    for name in args.report_to or []:
        if isinstance(name, str) and name not in PACKAGES:
            yield _problem(
                f"`report_to` has {name!r}, which is not known.",
                f"choose from {', '.join(PACKAGES)}, 'all', 'none', or pass a Lightning logger.",
            )


def _resolve_accumulation(args: TrainingArguments, config: AcceleratorConfig) -> None:
    options = config.gradient_accumulation_kwargs or {}
    if "num_steps" not in options:
        return
    if args.gradient_accumulation_steps > 1:
        raise ArgumentError(
            f"`gradient_accumulation_steps={args.gradient_accumulation_steps}` and `accelerator_config`'s "
            f"`num_steps={options['num_steps']}` both set the accumulation.\n\nHint: keep one of them."
        )
    args.gradient_accumulation_steps = options["num_steps"]


def check_arguments(args: TrainingArguments) -> None:
    """Raise one error that lists everything that cannot work.

    Raises:
        ArgumentError: At least one field, or combination, cannot be trained with.
    """
    problems = [
        *_intervals(args),
        *_best_model(args),
        *_numbers(args),
        *_workers(args),
        *_precision(args),
        *_choices(args),
        *_metric_schedule(args),
        *_known_trackers(args),
    ]
    if problems:
        raise ArgumentError("\n\n".join(problems))


def _problem(fact: str, hint: str) -> str:
    return f"{fact}\n\nHint: {hint}"


def _intervals(args: TrainingArguments) -> Iterator[str]:
    for kind, strategy in (
        ("logging", args.logging_strategy),
        ("eval", args.eval_strategy),
        ("save", args.save_strategy),
    ):
        if strategy != "steps":
            continue
        steps = getattr(args, f"{kind}_steps")
        if steps is None or (steps == 0 and kind != "save"):
            yield _problem(
                f"`{kind}_strategy='steps'` needs `{kind}_steps` above 0, got {steps!r}.",
                f"give a number of updates, or a share below 1, or set `{kind}_strategy='no'`.",
            )
        elif steps < 0:
            yield _problem(f"`{kind}_steps={steps!r}` is below 0.", f"use `{kind}_strategy='no'` to switch it off.")
        elif steps > 1 and steps != int(steps):
            yield _problem(f"`{kind}_steps={steps!r}` must be an integer if bigger than 1.", "round it.")


def _best_model(args: TrainingArguments) -> Iterator[str]:
    if not args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST:
        return
    if args.eval_strategy != args.save_strategy:
        yield _problem(
            "`load_best_model_at_end=True` needs the evaluation and the save strategy to match, got "
            f"`eval_strategy={_value(args.eval_strategy)!r}` and `save_strategy={_value(args.save_strategy)!r}`.",
            "set both to 'steps' or both to 'epoch', or use `save_strategy='best'`.",
        )
    elif args.eval_strategy == IntervalStrategy.STEPS and not _is_multiple(args.save_steps, args.eval_steps):
        yield _problem(
            f"`load_best_model_at_end=True` needs `save_steps={args.save_steps!r}` to be a round multiple of "
            f"`eval_steps={args.eval_steps!r}`, both as counts or both as shares below 1.",
            "make it one, or use `save_strategy='best'`.",
        )


def _is_multiple(save_steps: float, eval_steps: float | None) -> bool:
    if not eval_steps or save_steps % eval_steps == 0:
        return True
    if save_steps < 1 and eval_steps < 1:
        ratio = save_steps / eval_steps
        return math.isclose(ratio, round(ratio), rel_tol=1e-9)
    return False


def _numbers(args: TrainingArguments) -> Iterator[str]:
    positive = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
    for name in positive:
        value = getattr(args, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield _problem(f"`{name}={value!r}` is not a whole number above 0.", "use 1 or more.")
    not_negative = ("warmup_steps", "max_grad_norm", "learning_rate", "weight_decay", "num_train_epochs")
    for name in not_negative:
        value = getattr(args, name)
        if value is None or value < 0:
            yield _problem(f"`{name}={value!r}` is below 0; expected {name} >= 0.", "use 0 or more.")
    every = args.torch_empty_cache_steps
    if every is not None and not (isinstance(every, int) and every > 0):
        yield _problem(
            f"`torch_empty_cache_steps={every!r}` must be an integer bigger than 0.", "use 1 or more, or None."
        )
    if not 0 <= args.label_smoothing_factor < 1:
        yield _problem(f"`label_smoothing_factor={args.label_smoothing_factor!r}` is not in [0, 1).", "use 0.1, say.")


def _workers(args: TrainingArguments) -> Iterator[str]:
    if args.dataloader_num_workers == 0 and args.dataloader_prefetch_factor is not None:
        yield _problem(
            f"`dataloader_prefetch_factor={args.dataloader_prefetch_factor!r}` has no workers to load ahead.",
            "set `dataloader_num_workers` above 0.",
        )
    if args.dataloader_num_workers == 0 and args.dataloader_persistent_workers:
        yield _problem(
            "`dataloader_persistent_workers=True` has no workers to keep.",
            "set `dataloader_num_workers` above 0.",
        )


def _precision(args: TrainingArguments) -> Iterator[str]:
    if args.fp16 and args.bf16:
        yield _problem("`fp16` and `bf16` are both on.", "at most one of fp16 and bf16 can be True.")
    if args.fp16_full_eval and args.bf16_full_eval:
        yield _problem("`fp16_full_eval` and `bf16_full_eval` are both on.", "at most one of them can be True.")
    on_cpu = args.device.type == "cpu"
    if (args.bf16 or args.bf16_full_eval) and not args.use_cpu and on_cpu:
        yield _problem(
            "`bf16` on the CPU has to be asked for: your setup doesn't support bf16/gpu.",
            "set `use_cpu=True` to train under bfloat16 on the CPU.",
        )
    if args.mixed_precision not in ("no", "bf16", "fp16"):
        yield _problem(
            f"ACCELERATE_MIXED_PRECISION={args.mixed_precision!r}, set by `accelerate launch`, is not supported.",
            "choose no, bf16 or fp16.",
        )
    if args.fp16 and on_cpu:
        yield _problem("`fp16=True` requires a GPU.", "use `bf16=True, use_cpu=True` on the CPU.")
    if args.tf32 and not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8):
        yield _problem("`tf32=True` requires an Ampere or newer GPU.", "leave `tf32` out.")


def _choices(args: TrainingArguments) -> Iterator[str]:
    for name in ("train_sampling_strategy", "log_level", "log_level_replica", "dataloader_multiprocessing_context"):
        allowed = args.__dataclass_fields__[name].metadata["choices"]
        value = getattr(args, name)
        if value is not None and value not in allowed:
            yield _problem(f"`{name}={value!r}` is not known.", f"choose one of {', '.join(map(repr, allowed))}.")
    if args.include_num_input_tokens_seen not in ("no", "all", "non_padding"):
        yield _problem(
            f"`include_num_input_tokens_seen={args.include_num_input_tokens_seen!r}` is not known.",
            "choose 'no', 'all' or 'non_padding'.",
        )
    for name in args.include_for_metrics:
        if name not in ("inputs", "loss"):
            yield _problem(f"`include_for_metrics` has {name!r}, which is not known.", "choose from 'inputs', 'loss'.")


def _metric_schedule(args: TrainingArguments) -> Iterator[str]:
    needs_metric = args.lr_scheduler_type in METRIC_SCHEDULES
    if needs_metric and args.eval_strategy == IntervalStrategy.NO:
        yield _problem(
            f"`lr_scheduler_type={_value(args.lr_scheduler_type)!r}` requires an eval strategy: it follows a metric.",
            "set `eval_strategy` to 'steps' or 'epoch'.",
        )
