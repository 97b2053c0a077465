"""A DeepSpeed configuration and the arguments: every `auto` resolved, every disagreement shown. Pure.

The optimizer and the schedule are always the arguments' (torch's AdamW is DeepSpeed's); what their sections of the
configuration say has to agree, or to be `auto`.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from typing import Any

from hf_compat.errors import ArgumentError, HfCompatWarning, InertArgumentWarning

# DeepSpeed's schedules, and what they are in HF's words.
_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_ADAMS = ("adam", "adamw")


def uses_deepspeed(args: Any, variables: Mapping[str, str]) -> bool:
    """Say whether the arguments, or the launcher, ask for DeepSpeed."""
    return bool(args.deepspeed) or variables.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"


def deepspeed_config(args: Any, variables: Mapping[str, str], model_config: Any = None) -> dict[str, Any]:
    """Resolve a DeepSpeed configuration.

    Args:
        args: `deepspeed` (a dict or a JSON file's path) and everything that `auto` stands for.
        variables: What `accelerate launch` has set; read where `args.deepspeed` is empty.
        model_config: The model's configuration, for sizes that follow its hidden size; None leaves those out.

    Raises:
        ArgumentError: The configuration and the arguments disagree, or an `auto` cannot be resolved; all are listed.

    Mirrors:
        `transformers.integrations.HfTrainerDeepSpeedConfig`, 5.23.
    """
    config = _read(args.deepspeed) if args.deepspeed else _of_accelerate(variables)
    table = _Table(config)
    per_update = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    table.match("train_micro_batch_size_per_gpu", "per_device_train_batch_size", args.per_device_train_batch_size)
    table.match("gradient_accumulation_steps", "gradient_accumulation_steps", args.gradient_accumulation_steps)
    table.match("train_batch_size", "(batch size × accumulation × processes)", per_update)
    table.match("gradient_clipping", "max_grad_norm", args.max_grad_norm)
    table.match("bf16.enabled", "bf16", bool(args.mixed_precision == "bf16" or args.bf16_full_eval))
    table.match("fp16.enabled", "fp16", bool(args.mixed_precision == "fp16" or args.fp16_full_eval))
    _match_optimizer(table, args)
    _match_scheduler(table, args)
    _sizes(table, model_config)
    left = table.autos()
    if table.disagreements or left:
        raise ArgumentError(table.message(left))
    config.pop("optimizer", None)
    config.pop("scheduler", None)
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
    config.setdefault("gradient_accumulation_steps", args.gradient_accumulation_steps)
    config.setdefault("gradient_clipping", args.max_grad_norm)
    return config


def zero_stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a configuration: 0 where it has none."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))


class _Table:
    """A configuration beside the arguments."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.disagreements: list[tuple[str, Any, str, Any]] = []

    def find(self, path: str) -> tuple[dict[str, Any] | None, str]:
        *parents, key = path.split(".")
        place: Any = self.config
        for parent in parents:
            place = place.get(parent) if isinstance(place, dict) else None
        return (place, key) if isinstance(place, dict) and key in place else (None, key)

    def match(self, path: str, argument: str, value: Any) -> None:
        """Put the argument's value in the place of `auto`; note a value that differs from it."""
        place, key = self.find(path)
        if place is None:
            return
        if place[key] == "auto":
            place[key] = value
        elif place[key] != value:
            self.disagreements.append((path, place[key], argument, value))

    def fill(self, path: str, value: Any) -> None:
        """Put a value in the place of `auto`; another one stays."""
        place, key = self.find(path)
        if place is not None and place[key] == "auto":
            place[key] = value

    def autos(self) -> list[str]:
        """List what is `auto` still."""
        found: list[str] = []

        def look(part: Any, path: str) -> None:
            for key, value in part.items():
                if isinstance(value, dict):
                    look(value, f"{path}{key}.")
                elif value == "auto":
                    found.append(f"{path}{key}")

        look(self.config, "")
        return found

    def message(self, left: list[str]) -> str:
        """Say what is wrong, as a table of three columns."""
        lines = []
        if self.disagreements:
            rows = [("DeepSpeed configuration", "arguments", "used"), *self._rows()]
            widths = [max(len(row[column]) for row in rows) for column in range(3)]
            lines += ["The DeepSpeed configuration and the arguments disagree:", ""]
            lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
            lines += ["", 'Hint: write "auto" into the configuration, or give both the same value.']
        if left:
            lines += [f'"auto" cannot be resolved for {", ".join(left)}.', "", "Hint: write values there."]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str, str]]:
        return [
            (f"{path} = {has!r}", f"{argument} = {value!r}", "neither")
            for path, has, argument, value in self.disagreements
        ]


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return copy.deepcopy(given)
    try:
        with open(given, encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise ArgumentError(f"`deepspeed={given!r}` is no JSON file that can be read: {error}.") from error


def _of_accelerate(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration that `accelerate launch` would have set up from its flags."""
    file = variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file != "none":
        return _read(file)
    stage = int(variables.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))
    zero: dict[str, Any] = {"stage": stage}
    for part in ("optimizer", "param"):
        device = variables.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE", "none")
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
            path = variables.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part.upper()}_NVME_PATH", "none")
            if device == "nvme" and path != "none":
                zero[f"offload_{part}"]["nvme_path"] = path
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = (
            variables.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false") == "true"
        )
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": _number(variables.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"), int),
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
    }
    clipping = variables.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if clipping != "none":
        config["gradient_clipping"] = _number(clipping, float)
    return config


def _number(text: str, kind: type) -> Any:
    return text if text == "auto" else kind(text)


def _match_optimizer(table: _Table, args: Any) -> None:
    section = table.config.get("optimizer")
    if section is None:
        return
    if str(section.get("type", "")).lower() not in _ADAMS:
        raise ArgumentError(
            f"The DeepSpeed configuration has the optimizer {section.get('type')!r}, which is not supported.\n\n"
            "Hint: leave the section `optimizer` out and set `optim`; or use AdamW."
        )
    _warn_of_rest("optimizer", section, ("lr", "betas", "eps", "weight_decay"), "torch's optimizer is used")
    table.match("optimizer.params.lr", "learning_rate", args.learning_rate)
    table.match("optimizer.params.betas", "adam_beta1, adam_beta2", [args.adam_beta1, args.adam_beta2])
    table.match("optimizer.params.eps", "adam_epsilon", args.adam_epsilon)
    table.match("optimizer.params.weight_decay", "weight_decay", args.weight_decay)


def _match_scheduler(table: _Table, args: Any) -> None:
    section = table.config.get("scheduler")
    if section is None:
        return
    name = _SCHEDULES.get(section.get("type", ""))
    if name is None:
        raise ArgumentError(
            f"The DeepSpeed configuration has the schedule {section.get('type')!r}, which is not supported.\n\n"
            f"Hint: leave the section `scheduler` out and set `lr_scheduler_type`; or use {', '.join(_SCHEDULES)}."
        )
    chosen = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if chosen != name:
        table.disagreements.append(("scheduler.type", f"{section['type']} ({name})", "lr_scheduler_type", chosen))
    _warn_of_rest(
        "scheduler",
        section,
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"),
        f"the schedule is HF's {name!r}",
    )
    if name != "cosine" and (section.get("params") or {}).get("warmup_type") != "linear":
        warnings.warn(
            f"DeepSpeed's {section['type']} warms up along a logarithm; the schedule here is HF's {name!r}, which "
            'warms up linearly. Write `"warmup_type": "linear"` to agree, or leave the section out.',
            HfCompatWarning,
            stacklevel=5,
        )
    table.fill("scheduler.params.warmup_min_lr", 0)
    table.match("scheduler.params.warmup_max_lr", "learning_rate", args.learning_rate)
    table.match("scheduler.params.warmup_num_steps", "warmup_steps", args.warmup_steps)
    table.fill("scheduler.params.total_num_steps", 0)


def _warn_of_rest(name: str, section: Mapping[str, Any], known: tuple[str, ...], why: str) -> None:
    """Warn about parameters of a section that have no counterpart among the arguments."""
    rest = sorted(set(section.get("params") or {}) - {*known, "warmup_type"})
    if rest:
        warnings.warn(
            f"The DeepSpeed configuration's {name} sets {', '.join(rest)}, which has no effect: {why}.",
            InertArgumentWarning,
            stacklevel=6,
        )


def _sizes(table: _Table, model_config: Any) -> None:
    sizes = getattr(model_config, "hidden_sizes", None)
    text = getattr(model_config, "text_config", None)
    hidden = getattr(model_config, "hidden_size", None) or (max(sizes) if sizes else getattr(text, "hidden_size", None))
    if hidden is None:
        return
    table.fill("zero_optimization.reduce_bucket_size", hidden * hidden)
    table.fill("zero_optimization.stage3_prefetch_bucket_size", int(0.9 * hidden * hidden))
    table.fill("zero_optimization.stage3_param_persistence_threshold", 10 * hidden)
