"""Resolve every `auto` of a DeepSpeed configuration, and list where it contradicts the arguments.

The arguments choose the optimizer, so the section `optimizer` must agree with them or be `auto`. A section `scheduler`
selects one of DeepSpeed's schedules in place of `lr_scheduler_type`. `KEYS` lists every key that DeepSpeed 0.19 reads
and its treatment. DeepSpeed silently ignores other keys, so a warning names them here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from torch import nn

from hf_compat.errors import ArgumentError, InertArgumentWarning, UnsupportedArgument, warn_user
from hf_compat.hf.argument_values import options_of, read_as
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.process_state import check_sections
from hf_compat.hf.value_types import Range, number, read_options, whole_number
from hf_compat.runtime.text import brief, did_you_mean, parse_switch


class Fate(StrEnum):
    """The treatment of a key."""

    PASSED = "passed on"
    TRANSLATED = "compared with the arguments"
    INERT = "no effect, with a warning"
    REFUSED = "refused"


class Key(NamedTuple):
    """A row of `KEYS`."""

    fate: Fate  # the treatment of the key
    why: str = ""  # why it has no effect or is refused, or the argument that it is compared with
    is_on: Callable[[object], bool] = bool  # whether a value switches the key on


def _enabled(section: object) -> bool:
    return isinstance(section, Mapping) and bool(section.get("enabled"))


def _above_one(size: object) -> bool:
    return isinstance(size, (int, float)) and size > 1


_OWN_LOADER = "it configures DeepSpeed's data loader, which a Trainer does not use"
_OWN_FILES = "another engine writes the files of a checkpoint after it is sealed"

KEYS: dict[str, Key] = {
    "train_batch_size": Key(Fate.TRANSLATED, "batch size × accumulation × processes"),
    "train_micro_batch_size_per_gpu": Key(Fate.TRANSLATED, "per_device_train_batch_size"),
    "gradient_accumulation_steps": Key(Fate.TRANSLATED, "gradient_accumulation_steps"),
    "gradient_clipping": Key(Fate.TRANSLATED, "max_grad_norm"),
    "bf16": Key(Fate.TRANSLATED, "bf16"),
    "bfloat16": Key(Fate.TRANSLATED, "bf16 (this is its old name)"),
    "fp16": Key(Fate.TRANSLATED, "fp16"),
    "optimizer": Key(Fate.TRANSLATED, "learning_rate, adam_beta1 …; torch's AdamW"),
    "scheduler": Key(Fate.TRANSLATED, "learning_rate, warmup_steps, the updates"),
    "zero_optimization": Key(Fate.TRANSLATED, "sizes that are auto follow the model"),
    "amp": Key(Fate.REFUSED, "it needs NVIDIA's apex, which does not work with ZeRO (use bf16 or fp16)", _enabled),
    "elasticity": Key(Fate.REFUSED, "it chooses batch sizes, and here the arguments do", _enabled),
    "hybrid_engine": Key(Fate.REFUSED, "it is another engine, for training with generation", _enabled),
    "expert_parallel": Key(Fate.REFUSED, "the files of its experts are not read again", _enabled),
    "sequence_parallel_size": Key(
        Fate.REFUSED,
        "it is for models that exchange by themselves; `sp_size` of a ParallelismConfig shares sequences",
        _above_one,
    ),
    "nebula": Key(Fate.REFUSED, _OWN_FILES, _enabled),
    "datastates_ckpt": Key(Fate.REFUSED, _OWN_FILES, bool),
    "checkpoint": Key(
        Fate.REFUSED,
        "DeepSpeed unpickles any object in a universal checkpoint, and resuming on other world sizes works without",
        lambda section: isinstance(section, Mapping) and bool(section.get("load_universal")),
    ),
    "dataloader_drop_last": Key(Fate.INERT, _OWN_LOADER),
    "data_efficiency": Key(Fate.INERT, _OWN_LOADER, _enabled),
    "curriculum_learning": Key(Fate.INERT, _OWN_LOADER, _enabled),
    "autotuning": Key(Fate.INERT, "only DeepSpeed's launcher reads it", _enabled),
    "pipeline": Key(Fate.INERT, "it is for a PipelineModule"),
    **dict.fromkeys(
        (
            "activation_checkpointing", "aio", "comet", "comms_logger", "communication_data_type", "compile",
            "compression_training", "csv_monitor", "data_parallel_size", "data_types", "disable_allgather",
            "disable_python_gc", "dump_state", "eigenvalue", "flops_profiler", "gradient_allreduce_op",
            "gradient_predivide_factor", "graph_harvesting", "log_level", "managed_gradient_accumulation",
            "memory_breakdown", "prescale_gradients", "progressive_layer_drop", "quantize_training",
            "seq_parallel_communication_data_type", "sparse_attention", "sparse_gradients", "steps_per_print",
            "tensor_parallel", "tensorboard", "timers", "torch_autocast", "use_data_before_expert_parallelism",
            "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        ),
        Key(Fate.PASSED),
    ),
}  # fmt: skip


def check_keys(config: Mapping[str, object]) -> None:
    """Refuse or warn about keys of a configuration, as `KEYS` specifies."""
    told = {name: KEYS[name] for name, value in config.items() if name in KEYS and KEYS[name].is_on(value)}
    refused = [f"  {name}: {key.why}" for name, key in told.items() if key.fate is Fate.REFUSED]
    if refused:
        raise UnsupportedArgument(
            "The DeepSpeed configuration has unsupported keys:\n\n" + "\n".join(refused) + "\n\nHint: leave them out."
        )
    for name, key in told.items():
        if key.fate is Fate.INERT:
            _warn(f"The DeepSpeed configuration's `{name}` has no effect: {key.why}.")
    for name in config.keys() - KEYS.keys():
        _warn(f"DeepSpeed reads no key {brief(name)}.\n\nHint: {did_you_mean(name, KEYS, 'leave it out.')}")


def _warn(text: str) -> None:
    warn_user(text, InertArgumentWarning)


Config = dict[str, Any]  # a DeepSpeed configuration as nested JSON
Setting = Any  # one of its values

_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")  # of DeepSpeed 0.19


def uses_deepspeed(args: TrainingArguments, variables: Mapping[str, str]) -> bool:
    """Return whether the arguments, or the launcher, ask for DeepSpeed."""
    return bool(args.deepspeed) or parse_switch(variables, "ACCELERATE_USE_DEEPSPEED")


def tensor_ranks_of(args: TrainingArguments, variables: Mapping[str, str]) -> int:
    """Number of processes between which DeepSpeed splits each layer (`tensor_parallel.autotp_size`), by default 1.

    Raises:
        ArgumentError: It must be a whole number that divides the number of processes, and is not.
    """
    config = _config_of(args, variables) if uses_deepspeed(args, variables) else {}
    section = config.get(_SPLIT)
    if not isinstance(section, Mapping) or not section.get(_SIZE):
        return 1
    kinds = {_SIZE: whole_number(Range(low=1))}
    size = int(str(read_options(f"deepspeed['{_SPLIT}']", kinds, {_SIZE: section[_SIZE]})[_SIZE]))
    if args.world_size % size:
        raise ArgumentError(
            f"`deepspeed['{_SPLIT}']` has {_SIZE}={size}, and the launcher has started {args.world_size} "
            "processes.\n\nHint: start a multiple of it, as each model takes so many processes."
        )
    if size > 1 and (config.get("zero_optimization") or {}).get("stage") == 3:
        raise UnsupportedArgument(
            f"`deepspeed['{_SPLIT}']` has {_SIZE}={size} beside ZeRO 3, which counts the processes that share layers "
            "as those of the data.\n\nHint: use ZeRO 0, 1 or 2. transformers' own Trainer fails there, too."
        )
    return size


_SPLIT, _SIZE = "tensor_parallel", "autotp_size"


def deepspeed_config(args: TrainingArguments, variables: Mapping[str, str], model: nn.Module | None = None) -> Config:
    """Resolve a DeepSpeed configuration. Without a model, sizes that follow it are left out where they are `auto`.

    Raises:
        ArgumentError: The configuration contradicts the arguments, or an `auto` cannot be resolved. All are listed.

    Mirrors:
        `transformers.integrations.HfTrainerDeepSpeedConfig`, and `accelerate.utils.DeepSpeedPlugin`, 1.15.
    """
    config = _config_of(args, variables)
    if "bfloat16" in config:
        config.setdefault("bf16", config.pop("bfloat16"))
    check_keys(config)
    check_sections(config)
    if "gradient_clipping" not in config and args.max_grad_norm and _is_set(args, "max_grad_norm"):
        _warn(
            f"`max_grad_norm={args.max_grad_norm}` has no effect: DeepSpeed clips, and its configuration has no "
            '`gradient_clipping`.\n\nHint: add "gradient_clipping": "auto" to it.'
        )
    _check_replaced(config, args)
    zero = config.get("zero_optimization") or {}
    if model is None:
        for name in [name for name in _SIZES if zero.get(name) == "auto"]:
            del zero[name]
    rows = _rows_of(args) | _rows_of_launcher(variables) | _rows_of_model(model)
    # `schedule_section` resolves these once training begins
    rows |= dict.fromkeys(("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"), (None, 0))
    _resolve(config, rows)
    if zero.get("stage") is not None:
        zero |= read_options(
            "deepspeed['zero_optimization']", {"stage": whole_number(_STAGES)}, {"stage": zero["stage"]}
        )
    _complete_precision(config, args)
    if args.save_on_each_node:
        config["checkpoint"] = {**(config.get("checkpoint") or {}), "use_node_local_storage": True}
    # Drop the sections that the arguments replace, and set the keys that DeepSpeed then needs
    config.pop("optimizer", None)
    config.pop("scheduler", None)
    config["zero_allow_untested_optimizer"] = True
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
    config.setdefault("gradient_accumulation_steps", args.gradient_accumulation_steps)
    return config


_STAGES = Range(low=0, high=3)


def zero_stage(config: Mapping[str, Setting]) -> int:
    """Return the ZeRO stage of a configuration, or 0 if it has none."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))


# A setting's path, such as `optimizer.params.lr` → the argument that it has to agree with, or None, and its value.
Rows = dict[str, tuple[str | None, Setting]]

_HALVES = ("bf16", "fp16")
_OFFLOADED = ("optimizer", "param")
# Keys of `zero_optimization` that follow the model's hidden size.
_SIZES: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def _rows_of(args: TrainingArguments) -> Rows:
    """The settings that follow the arguments alone."""
    per_update = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    rows: Rows = {
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", args.per_device_train_batch_size),
        "gradient_accumulation_steps": ("gradient_accumulation_steps", args.gradient_accumulation_steps),
        "train_batch_size": ("(batch size × accumulation × processes)", per_update),
        "gradient_clipping": ("max_grad_norm", args.max_grad_norm),
        "optimizer.params.lr": ("learning_rate", args.learning_rate),
        "optimizer.params.betas": ("adam_beta1, adam_beta2", [args.adam_beta1, args.adam_beta2]),
        "optimizer.params.eps": ("adam_epsilon", args.adam_epsilon),
        "optimizer.params.weight_decay": ("weight_decay", args.weight_decay),
        "scheduler.params.warmup_min_lr": (None, 0),
        "scheduler.params.warmup_max_lr": ("learning_rate", args.learning_rate),
    }
    halves = {"bf16": args.bf16 or args.bf16_full_eval, "fp16": args.fp16 or args.fp16_full_eval}
    for name, is_asked in halves.items():
        by_launcher = args.mixed_precision == name and not is_asked
        # transformers fills `deepspeed` before Accelerate reads the launcher's precision
        value = is_asked or (by_launcher and not args.deepspeed)
        rows[f"{name}.enabled"] = (None if by_launcher else name, value)
    return rows


def _rows_of_launcher(variables: Mapping[str, str]) -> Rows:
    """The settings that follow the variables of `accelerate launch`, or Accelerate's defaults."""
    name = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
    rows: Rows = {
        "zero_optimization.stage": (None, read_as(name, whole_number(_STAGES), variables.get(name, 2))),
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
            None,
            parse_switch(variables, "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
        ),
    }
    for part in _OFFLOADED:
        for key in ("device", "nvme_path"):
            value = variables.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_{key}".upper(), "none")
            rows[f"zero_optimization.offload_{part}.{key}"] = (None, value)
    return rows


def _rows_of_model(model: nn.Module | None) -> Rows:
    """The sizes that follow the model's hidden size, if its configuration has one."""
    config = getattr(model, "config", None)
    owners, names = (config, getattr(config, "text_config", None)), ("hidden_size", "hidden_sizes")
    hidden = next(filter(None, (getattr(owner, name, None) for owner in owners for name in names)), None)
    if hidden is None:
        return {}
    largest = max(hidden) if isinstance(hidden, Sequence) else hidden
    return {f"zero_optimization.{name}": (None, size(largest)) for name, size in _SIZES.items()}


def _complete_precision(config: Config, args: TrainingArguments) -> None:
    """Add the sections of half precision that are missing, and warn if one leaves the asked precision off.

    Raises:
        ArgumentError: Both precisions are enabled.

    Mirrors:
        `accelerate.utils.DeepSpeedPlugin.set_mixed_precision`, 1.15.
    """
    asked = args.mixed_precision
    for name in _HALVES:
        cast_inputs = {"auto_cast": True} if name == asked == "fp16" else {}
        config.setdefault(name, {"enabled": name == asked, **cast_inputs})
    enabled = [name for name in _HALVES if (config[name] or {}).get("enabled")]
    if len(enabled) > 1:
        raise ArgumentError(
            "The DeepSpeed configuration enables `bf16` and `fp16`, and `auto` follows `bf16_full_eval` and "
            "`fp16_full_eval`, too.\n\nHint: train and evaluate in one of them."
        )
    if asked != "no" and asked not in enabled:
        given = f"{asked}=True" if getattr(args, asked) else f"ACCELERATE_MIXED_PRECISION={asked}"
        _warn(
            f"`{given}` has no effect, as the DeepSpeed configuration's section `{asked}` does not enable it.\n\n"
            f'Hint: set `{asked}=True` and "enabled": "auto".'
        )


def _resolve(config: Config, rows: Rows) -> None:
    """Replace `auto` by the values of the rows.

    Raises:
        ArgumentError: Settings disagree with their arguments, or an `auto` has no row. All are listed.
    """
    held = {path: (section, key) for path, section, key in _settings_of(config)}
    differing = [("DeepSpeed configuration", "arguments", "used")]
    for path, (argument, value) in rows.items():
        section, key = held.get(path, ({}, ""))
        if section.get(key) == "auto":
            section[key] = value
        elif path in held and argument is not None and section[key] not in (None, value):
            differing.append((f"{path} = {brief(section[key])}", f"{argument} = {brief(value)}", "neither"))
    left, lines = [path for path, (section, key) in held.items() if section[key] == "auto"], []
    if differing[1:]:
        widths = [max(map(len, column)) for column in zip(*differing, strict=True)]
        lines += ["The DeepSpeed configuration and the arguments disagree:", ""]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in differing]
        lines += ["", 'Hint: write "auto" into the configuration, or give both the same value.']
    if left:
        lines += [f'"auto" cannot be resolved for {", ".join(left)}.', "", "Hint: write values there."]
    if lines:
        raise ArgumentError("\n".join(lines))


def _settings_of(section: Config, path: str = "") -> Iterator[tuple[str, Config, str]]:
    """Yield the path of every setting, with its section and its key there."""
    for key, value in section.items():
        yield f"{path}{key}", section, key
        if isinstance(value, dict):
            yield from _settings_of(value, f"{path}{key}.")


def _config_of(args: TrainingArguments, variables: Mapping[str, str]) -> Config:
    """Return the arguments' configuration, or the one that `accelerate launch` would have set up from its flags."""
    if args.deepspeed:
        return options_of("deepspeed", args.deepspeed)
    file = variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    config = _config_of_flags(variables) if file == "none" else options_of("deepspeed", file)
    kinds = {"gradient_accumulation_steps": whole_number(), "gradient_clipping": number()}
    for key, kind in kinds.items():
        text = variables.get(name := f"ACCELERATE_{key}".upper(), "auto")
        if config.get(key) == "auto" and text == "none":
            del config[key]
        elif config.get(key) == "auto" and text != "auto":
            config[key] = read_as(name, kind, text)
    return config


def _config_of_flags(variables: Mapping[str, str]) -> Config:
    zero: Config = {"stage": "auto", "stage3_gather_16bit_weights_on_model_save": "auto"}
    for part in _OFFLOADED:
        is_on_disk = variables.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE") == "nvme"
        zero[f"offload_{part}"] = {"device": "auto", "nvme_path": "auto" if is_on_disk else None}
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {**dict.fromkeys(keys, "auto"), "zero_optimization": zero}


def _check_replaced(config: Config, args: TrainingArguments) -> None:
    """Refuse optimizers and schedules that are not supported, and warn about what has no effect beside them."""
    optimizer, schedule = config.get("optimizer"), config.get("scheduler")
    if optimizer is not None and str(optimizer.get("type", "")).lower() not in ("adam", "adamw"):
        raise ArgumentError(
            f"The DeepSpeed configuration has the optimizer {brief(optimizer.get('type'))}, which is not supported.\n\n"
            "Hint: leave the section `optimizer` out and set `optim`, or use AdamW."
        )
    if schedule is not None and schedule.get("type") not in _SCHEDULES:
        raise ArgumentError(
            f"The DeepSpeed configuration has the schedule {brief(schedule.get('type'))}, which is not supported.\n\n"
            f"Hint: leave the section `scheduler` out and set `lr_scheduler_type`, or use {', '.join(_SCHEDULES)}."
        )
    rest = set((optimizer or {}).get("params") or {}) - {"lr", "betas", "eps", "weight_decay", "warmup_type"}
    if rest:
        _warn(
            f"The DeepSpeed configuration's optimizer sets {', '.join(sorted(rest))}, which has no effect: torch's "
            "optimizer is used."
        )

    unused = [name for name in ("lr_scheduler_type", "lr_scheduler_kwargs") if _is_set(args, name)]
    if unused and schedule is not None:
        _warn(
            f"{' and '.join(f'`{name}={brief(getattr(args, name))}`' for name in unused)} has no effect, because the "
            f"DeepSpeed configuration's section `scheduler` selects {schedule['type']}."
        )


def _is_set(args: TrainingArguments, name: str) -> bool:
    default = TrainingArguments.__dataclass_fields__[name].default
    return getattr(args, name) not in (default, None, {})


def decays_all(args: TrainingArguments, variables: Mapping[str, str]) -> bool:
    """Whether weight decay covers biases and norms, too, as DeepSpeed makes one group by its section `optimizer`."""
    return uses_deepspeed(args, variables) and "optimizer" in _config_of(args, variables)


def schedule_section(args: TrainingArguments, variables: Mapping[str, str], updates: int) -> Config | None:
    """Resolve the section `scheduler`, which selects one of DeepSpeed's schedules. None if there is none.

    Raises:
        ArgumentError: It disagrees with the training, or an `auto` cannot be resolved.

    Mirrors:
        `transformers.integrations.HfTrainerDeepSpeedConfig.trainer_config_finalize`.
    """
    section = _config_of(args, variables).get("scheduler") if uses_deepspeed(args, variables) else None
    if section is not None:
        rows = _rows_of(args)
        rows["scheduler.params.total_num_steps"] = "(updates of the training)", updates
        # DeepSpeed refuses a warmup of no updates
        rows["scheduler.params.warmup_num_steps"] = "max(1, warmup_steps)", max(1, args.get_warmup_steps(updates))
        _resolve({"scheduler": section}, rows)
    return section
