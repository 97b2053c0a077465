"""Resolve every `auto` of a DeepSpeed configuration, and list where it contradicts the arguments.

The arguments choose the optimizer, so the section `optimizer` must agree with them or be `auto`. A section `scheduler`
selects one of DeepSpeed's schedules in place of `lr_scheduler_type`. `KEYS` lists every key that DeepSpeed 0.19 reads
and its treatment. DeepSpeed silently ignores other keys, so a warning names them here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from hf_compat.errors import ArgumentError, InertArgumentWarning, UnsupportedArgument, warn_user
from hf_compat.hf.argument_values import read_as
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.process_state import check_sections
from hf_compat.hf.value_types import (
    Range,
    Unreadable,
    ValueType,
    number,
    read_options,
    read_options_file,
    whole_number,
)
from hf_compat.runtime.text import did_you_mean, parse_switch


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
    "tensor_parallel": Key(
        Fate.REFUSED,
        "tensor parallelism is not supported (transformers' own Trainer trains with this key, on CPUs too)",
        lambda section: isinstance(section, Mapping) and _above_one(section.get("autotp_size")),
    ),
    "expert_parallel": Key(Fate.REFUSED, "the files of its experts are not read again", _enabled),
    "sequence_parallel_size": Key(Fate.REFUSED, "sequence parallelism is not supported", _above_one),
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
            "tensorboard", "timers", "torch_autocast", "use_data_before_expert_parallelism", "vocabulary_size",
            "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer",
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
        _warn(f"DeepSpeed reads no key {name!r}.\n\nHint: {did_you_mean(name, KEYS, 'leave it out.')}")


def _warn(text: str) -> None:
    warn_user(text, InertArgumentWarning)


Config = dict[str, Any]  # a DeepSpeed configuration as nested JSON
Setting = Any  # one of its values

_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")  # of DeepSpeed 0.19
_ADAMS = ("adam", "adamw")


def uses_deepspeed(args: TrainingArguments, variables: Mapping[str, str]) -> bool:
    """Return whether the arguments, or the launcher, ask for DeepSpeed."""
    return bool(args.deepspeed) or parse_switch(variables, "ACCELERATE_USE_DEEPSPEED")


def deepspeed_config(
    args: TrainingArguments, variables: Mapping[str, str], model_config: object | None = None
) -> Config:
    """Resolve a DeepSpeed configuration, without the sizes that follow the model if its configuration is unknown.

    Raises:
        ArgumentError: The configuration contradicts the arguments, or an `auto` cannot be resolved. All are listed.

    Mirrors:
        `transformers.integrations.HfTrainerDeepSpeedConfig`, 5.23.
    """
    config = options_of("deepspeed", args.deepspeed) if args.deepspeed else _config_of_accelerate(variables)
    if "bfloat16" in config:
        config.setdefault("bf16", config.pop("bfloat16"))
    check_keys(config)
    check_sections(config)
    stage = (config.get("zero_optimization") or {}).get("stage")
    if stage is not None:
        read = read_options("deepspeed['zero_optimization']", {"stage": whole_number(_STAGES)}, {"stage": stage})
        config["zero_optimization"]["stage"] = read["stage"]
    table = _Table(config)
    per_update = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    table.match("train_micro_batch_size_per_gpu", "per_device_train_batch_size", args.per_device_train_batch_size)
    table.match("gradient_accumulation_steps", "gradient_accumulation_steps", args.gradient_accumulation_steps)
    table.match("train_batch_size", "(batch size × accumulation × processes)", per_update)
    table.match("gradient_clipping", "max_grad_norm", args.max_grad_norm)
    if "gradient_clipping" not in config and args.max_grad_norm and _is_set(args, "max_grad_norm"):
        _warn(
            f"`max_grad_norm={args.max_grad_norm}` has no effect: DeepSpeed clips, and its configuration has no "
            '`gradient_clipping`.\n\nHint: add "gradient_clipping": "auto" to it.'
        )
    table.match("bf16.enabled", "bf16", bool(args.mixed_precision == "bf16" or args.bf16_full_eval))
    table.match("fp16.enabled", "fp16", bool(args.mixed_precision == "fp16" or args.fp16_full_eval))
    section = table.config.get("optimizer")
    if section is not None:
        if str(section.get("type", "")).lower() not in _ADAMS:
            raise ArgumentError(
                f"The DeepSpeed configuration has the optimizer {section.get('type')!r}, which is not supported.\n\n"
                "Hint: leave the section `optimizer` out and set `optim`, or use AdamW."
            )
        rest = set(section.get("params") or {}) - {"lr", "betas", "eps", "weight_decay", "warmup_type"}
        if rest:
            _warn(
                f"The DeepSpeed configuration's optimizer sets {', '.join(sorted(rest))}, which has no effect: torch's "
                "optimizer is used."
            )
        table.match("optimizer.params.lr", "learning_rate", args.learning_rate)
        table.match("optimizer.params.betas", "adam_beta1, adam_beta2", [args.adam_beta1, args.adam_beta2])
        table.match("optimizer.params.eps", "adam_epsilon", args.adam_epsilon)
        table.match("optimizer.params.weight_decay", "weight_decay", args.weight_decay)
    _match_scheduler(table, args)
    for name in ("warmup_num_steps", "total_num_steps"):  # `schedule_section` resolves these once training begins
        table.fill(f"scheduler.params.{name}", 0)
    # Fill in the sizes that follow the model's hidden size, if its configuration has one
    sizes = getattr(model_config, "hidden_sizes", None)
    text = getattr(model_config, "text_config", None)
    hidden = getattr(model_config, "hidden_size", None) or (max(sizes) if sizes else getattr(text, "hidden_size", None))
    if hidden is not None:
        table.fill("zero_optimization.reduce_bucket_size", hidden * hidden)
        table.fill("zero_optimization.stage3_prefetch_bucket_size", int(0.9 * hidden * hidden))
        table.fill("zero_optimization.stage3_param_persistence_threshold", 10 * hidden)
    table.check()
    # Drop the sections that the arguments replace, and set the keys that DeepSpeed then needs
    config.pop("optimizer", None)
    config.pop("scheduler", None)
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
    config.setdefault("gradient_accumulation_steps", args.gradient_accumulation_steps)
    return config


_STAGES = Range(low=0, high=3)


def zero_stage(config: Mapping[str, Setting]) -> int:
    """Return the ZeRO stage of a configuration, or 0 if it has none."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))


class _Table:
    """A configuration beside the arguments."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.disagreements: list[tuple[str, Setting, str, Setting]] = []

    def _find(self, path: str) -> tuple[Config | None, str]:
        """Return the section that holds a setting (None if it is not set) and the setting's key in it."""
        *parents, key = path.split(".")
        section: object = self.config
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        return (section, key) if isinstance(section, dict) and key in section else (None, key)

    def match(self, path: str, argument: str, value: Setting) -> None:
        """Replace `auto` by the argument's value, and record a value that differs from it."""
        section, key = self._find(path)
        if section is None:
            return
        if section[key] == "auto":
            section[key] = value
        elif section[key] != value:
            self.disagreements.append((path, section[key], argument, value))

    def fill(self, path: str, value: Setting) -> None:
        """Replace `auto` by a value, and keep any other value."""
        section, key = self._find(path)
        if section is not None and section[key] == "auto":
            section[key] = value

    def check(self) -> None:
        """Raise an error that lists disagreements and every remaining `auto`."""
        left, lines = list(_autos_of(self.config)), []
        if self.disagreements:
            rows = [("DeepSpeed configuration", "arguments", "used")]
            rows += [
                (f"{path} = {has!r}", f"{name} = {value!r}", "neither") for path, has, name, value in self.disagreements
            ]
            widths = [max(len(row[column]) for row in rows) for column in range(3)]
            lines += ["The DeepSpeed configuration and the arguments disagree:", ""]
            lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
            lines += ["", 'Hint: write "auto" into the configuration, or give both the same value.']
        if left:
            lines += [f'"auto" cannot be resolved for {", ".join(left)}.', "", "Hint: write values there."]
        if lines:
            raise ArgumentError("\n".join(lines))


def _autos_of(section: Config, path: str = "") -> Iterator[str]:
    """Yield the paths of the settings that are `auto`."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _autos_of(value, f"{path}{key}.")
        elif value == "auto":
            yield f"{path}{key}"


def options_of(name: str, given: Mapping[str, Any] | str | None) -> Config:
    """Copy options that an argument has as a mapping, or read them from the JSON file that it names."""
    if given is None or isinstance(given, Mapping):
        return copy.deepcopy(dict(given or {}))
    try:
        return read_options_file(given)
    except Unreadable as error:
        raise ArgumentError(f"`{name}={given!r}`: {error}") from error


def _config_of_accelerate(variables: Mapping[str, str]) -> Config:
    """Return the configuration that `accelerate launch` would have set up from its flags."""
    file = variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file != "none":
        return options_of("deepspeed", file)
    name = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
    stage = read_as(name, whole_number(_STAGES), variables.get(name, 2))
    zero: Config = {"stage": stage}
    for part in ("optimizer", "param"):
        prefix = f"ACCELERATE_DEEPSPEED_OFFLOAD_{part.upper()}"
        device = variables.get(f"{prefix}_DEVICE", "none")
        path = variables.get(f"{prefix}_NVME_PATH", "none")
        if device != "none":
            has_path = device == "nvme" and path != "none"
            zero[f"offload_{part}"] = {"device": device, "nvme_path": path} if has_path else {"device": device}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = parse_switch(
            variables, "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"
        )
    config: Config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": _number_of(variables, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", whole_number()),
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
    }
    if variables.get("ACCELERATE_GRADIENT_CLIPPING") != "none":
        config["gradient_clipping"] = _number_of(variables, "ACCELERATE_GRADIENT_CLIPPING", number())
    return config


def _number_of(variables: Mapping[str, str], name: str, kind: ValueType) -> Setting:
    text = variables.get(name, "auto")
    return text if text == "auto" else read_as(name, kind, text)


def _match_scheduler(table: _Table, args: TrainingArguments) -> None:
    section = table.config.get("scheduler")
    if section is None:
        return
    if section.get("type") not in _SCHEDULES:
        raise ArgumentError(
            f"The DeepSpeed configuration has the schedule {section.get('type')!r}, which is not supported.\n\n"
            f"Hint: leave the section `scheduler` out and set `lr_scheduler_type`, or use {', '.join(_SCHEDULES)}."
        )
    unused = [name for name in ("lr_scheduler_type", "lr_scheduler_kwargs") if _is_set(args, name)]
    if unused:
        _warn(
            f"{' and '.join(f'`{name}={getattr(args, name)!r}`' for name in unused)} has no effect, because the "
            f"DeepSpeed configuration's section `scheduler` selects {section['type']}."
        )
    _match_rates(table, args)


def _match_rates(table: _Table, args: TrainingArguments) -> None:
    table.fill("scheduler.params.warmup_min_lr", 0)
    table.match("scheduler.params.warmup_max_lr", "learning_rate", args.learning_rate)


def _is_set(args: TrainingArguments, name: str) -> bool:
    default = TrainingArguments.__dataclass_fields__[name].default
    return getattr(args, name) not in (default, None, {})


def schedule_section(args: TrainingArguments, variables: Mapping[str, str], updates: int) -> Config | None:
    """Resolve the section `scheduler`, which selects one of DeepSpeed's schedules. None if there is none.

    Raises:
        ArgumentError: It disagrees with the training, or an `auto` cannot be resolved.

    Mirrors:
        `transformers.integrations.HfTrainerDeepSpeedConfig.trainer_config_finalize`, 5.23.
    """
    if not uses_deepspeed(args, variables):
        return None
    config = options_of("deepspeed", args.deepspeed) if args.deepspeed else _config_of_accelerate(variables)
    if config.get("scheduler") is None:
        return None
    table = _Table({"scheduler": config["scheduler"]})
    _match_rates(table, args)
    table.match("scheduler.params.total_num_steps", "(updates of the training)", updates)
    table.match("scheduler.params.warmup_num_steps", "warmup_steps", args.get_warmup_steps(updates))
    table.check()
    section: Config = table.config["scheduler"]
    return section
