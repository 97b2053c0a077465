"""Old argument names: one table, old name → what it means today. HF words only.

Each row is a function from the old value to today's keywords, with a note on the change. `translate_legacy` walks the
table; nothing else in the package knows an old name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from hf_compat.errors import ArgumentError, InertArgumentWarning, UnknownArgument
from hf_compat.hf.argument_values import ArgumentCheck, read_as
from hf_compat.hf.value_types import (
    LARGEST_COUNT,
    NONE,
    PATH,
    TEXT,
    TRUTH_VALUE,
    Range,
    ValueType,
    either,
    list_of,
    number,
    whole_number,
)
from hf_compat.runtime.text import is_secret, nearest, shown

# The value of some argument: its type is the argument's.
ArgumentValue: TypeAlias = Any
# Keywords of today that an old value turns into; empty when the value asks for nothing.
Translation: TypeAlias = dict[str, ArgumentValue]


@dataclass(frozen=True, kw_only=True, slots=True)
class OldName:
    """One retired name.

    Args:
        lifetime: Releases that had it.
        means: What it is today, for the documentation and for warnings.
        translate: The old value's keywords of today.
        inert: A value other than `harmless` has no effect here and is warned about.
        harmless: Values that asked for nothing.
        kind: What its value may be; None where the argument of today that it was renamed to says so.
    """

    lifetime: str
    means: str
    translate: Callable[[ArgumentValue], Translation]
    inert: bool = False
    harmless: tuple[ArgumentValue, ...] = (None, False, "", "auto", -1, "O1", "last")
    kind: ValueType | None = None


def _renamed(new: str) -> Callable[[ArgumentValue], Translation]:
    return lambda value: {} if value is None else {new: value}


def _flag(new: str, when_true: ArgumentValue) -> Callable[[ArgumentValue], Translation]:
    return lambda value: {new: when_true} if value else {}


def _nothing(value: ArgumentValue) -> Translation:
    return {}


def _warmup_ratio(ratio: ArgumentValue) -> Translation:
    if ratio is None or ratio == 0:
        return {}
    # `warmup_steps=1.0` would be a single update. The float just below 1 is a ratio still, and as warmup steps are
    # rounded up it gives the whole run.
    return {"warmup_steps": min(float(ratio), math.nextafter(1.0, 0.0))}


def _in_config(config: str, key: str) -> Callable[[ArgumentValue], Translation]:
    return lambda value: {} if value is None else {config: {key: value}}


def _evaluate_during_training(value: ArgumentValue) -> Translation:
    return {"eval_strategy": "steps"} if value else {}


def _organization(value: ArgumentValue) -> Translation:
    if value is None:
        return {}
    raise ArgumentError(
        f"`push_to_hub_organization={value!r}` is part of the repository name now.\n\n"
        f'Hint: pass `hub_model_id="{value}/<name>"`.'
    )


_SHARE = number(Range(low=0, high=1))
_COUNT = whole_number(Range(low=0, high=LARGEST_COUNT))

OLD_NAMES: dict[str, OldName] = {
    "evaluation_strategy": OldName(lifetime="3.2-4.50", means="eval_strategy", translate=_renamed("eval_strategy")),
    "evaluate_during_training": OldName(
        lifetime="3.0-3.5", means='eval_strategy="steps"', kind=TRUTH_VALUE, translate=_evaluate_during_training
    ),
    "no_cuda": OldName(lifetime="3.0-4.57", means="use_cpu", translate=_renamed("use_cpu")),
    "logging_dir": OldName(
        lifetime="3.0-5.14",
        means="kept as the attribute `logging_dir`, where TensorBoard files go",
        kind=PATH,
        translate=lambda value: {"logging_dir": value},
    ),
    "warmup_ratio": OldName(
        lifetime="4.4-5.14",
        means="warmup_steps below 1; 1.0 is a full warmup",
        kind=_SHARE,
        translate=_warmup_ratio,
    ),
    "group_by_length": OldName(
        lifetime="4.3-5.14",
        means='train_sampling_strategy="group_by_length"',
        kind=TRUTH_VALUE,
        translate=_flag("train_sampling_strategy", "group_by_length"),
    ),
    "include_inputs_for_metrics": OldName(
        lifetime="4.19-4.57",
        means='include_for_metrics=["inputs"]',
        kind=TRUTH_VALUE,
        translate=_flag("include_for_metrics", ["inputs"]),
    ),
    "include_tokens_per_second": OldName(
        lifetime="4.34-4.57",
        means='include_num_input_tokens_seen="all"',
        kind=TRUTH_VALUE,
        translate=_flag("include_num_input_tokens_seen", "all"),
    ),
    "per_gpu_train_batch_size": OldName(
        lifetime="3.0-4.57",
        means="per_device_train_batch_size",
        translate=_renamed("per_device_train_batch_size"),
    ),
    "per_gpu_eval_batch_size": OldName(
        lifetime="3.0-4.57",
        means="per_device_eval_batch_size",
        translate=_renamed("per_device_eval_batch_size"),
    ),
    "adafactor": OldName(
        lifetime="4.2-4.57", means='optim="adafactor"', kind=TRUTH_VALUE, translate=_flag("optim", "adafactor")
    ),
    "push_to_hub_token": OldName(lifetime="4.8-4.57", means="hub_token", translate=_renamed("hub_token")),
    "push_to_hub_model_id": OldName(lifetime="4.8-4.57", means="hub_model_id", translate=_renamed("hub_model_id")),
    "push_to_hub_organization": OldName(
        lifetime="4.8-4.57", means="the part of hub_model_id before the slash", kind=TEXT, translate=_organization
    ),
    "overwrite_output_dir": OldName(
        lifetime="3.0-4.57",
        means="nothing: a flag for scripts; an output folder is never wiped",
        kind=TRUTH_VALUE,
        translate=lambda value: {"overwrite_output_dir": value},
    ),
    "save_safetensors": OldName(
        lifetime="4.28-4.57",
        means="nothing: weights are always written as safetensors",
        kind=TRUTH_VALUE,
        translate=_nothing,
        inert=True,
        harmless=(None, True),
    ),
    "torchdynamo": OldName(
        lifetime="4.20-4.57", means="torch_compile_backend", translate=_renamed("torch_compile_backend")
    ),
    "xpu_backend": OldName(lifetime="4.11-4.31", means="ddp_backend", translate=_renamed("ddp_backend")),
    "tpu_metrics_debug": OldName(
        lifetime="3.0-4.57",
        means='debug="tpu_metrics_debug"',
        kind=TRUTH_VALUE,
        translate=_flag("debug", "tpu_metrics_debug"),
    ),
    "dispatch_batches": OldName(
        lifetime="4.32-4.50",
        means='accelerator_config={"dispatch_batches": …}',
        kind=either((NONE, TRUTH_VALUE)),
        translate=_in_config("accelerator_config", "dispatch_batches"),
    ),
    "split_batches": OldName(
        lifetime="4.35-4.50",
        means='accelerator_config={"split_batches": …}',
        kind=either((NONE, TRUTH_VALUE)),
        translate=_in_config("accelerator_config", "split_batches"),
    ),
    "fsdp_min_num_params": OldName(
        lifetime="4.19-4.57",
        means='fsdp_config={"min_num_params": …}',
        kind=_COUNT,
        translate=lambda value: {"fsdp_config": {"min_num_params": value}} if value else {},
    ),
    "fsdp_transformer_layer_cls_to_wrap": OldName(
        lifetime="4.21-4.57",
        means='fsdp_config={"transformer_layer_cls_to_wrap": …}',
        kind=either((NONE, list_of(TEXT), TEXT)),
        translate=_in_config("fsdp_config", "transformer_layer_cls_to_wrap"),
    ),
    **{
        name: OldName(lifetime=lifetime, means=f"nothing: {why}", translate=_nothing, inert=True)
        for name, lifetime, why in (
            ("_n_gpu", "4.2-4.57", "the number of devices is found out"),
            ("fp16_backend", "4.1-4.57", "only torch's own mixed precision is left"),
            ("fp16_opt_level", "3.0-4.57", "Apex is gone; `fp16`/`bf16` use torch's own mixed precision"),
            ("half_precision_backend", "4.13-4.57", "only torch's own mixed precision is left"),
            ("jit_mode_eval", "4.20-4.57", "gone upstream; `torch_compile` took its place"),
            ("model_parallel", "4.1", "gone upstream"),
            ("mp_parameters", "4.5-4.57", "SageMaker model parallelism is gone upstream"),
            ("past_index", "3.1-4.57", "gone upstream"),
            ("place_model_on_device", "5.2.0.dev0", "a property today; override it in a subclass"),
            ("ray_scope", "4.20-4.57", "set the environment variable RAY_SCOPE"),
            ("sharded_ddp", "4.1-4.34", "FairScale is gone upstream; `fsdp` or `deepspeed` took its place"),
            ("tp_size", "4.50-4.51", "tensor parallelism is set up when the model is loaded"),
            ("tpu_num_cores", "3.0-4.57", "set the environment variable TPU_NUM_CORES"),
            ("use_ipex", "4.20-4.56", "Intel's extension is gone upstream"),
            ("use_legacy_prediction_loop", "4.6-4.57", "the old loop is gone upstream"),
            ("use_mps_device", "4.22-4.57", "Apple's devices are found by themselves"),
        )
    },
}

# Kept as plain attributes, since scripts read them back.
ATTRIBUTES_ONLY = ("logging_dir", "overwrite_output_dir")


def read_old(name: str, value: ArgumentValue, checks: Mapping[str, ArgumentCheck]) -> ArgumentValue:
    """Read the value of an old name; None stands for a name that is not set.

    Args:
        name: The old name.
        value: What it was given.
        checks: What today's arguments may be.

    Raises:
        ArgumentError: It cannot have that value.
    """
    row = OLD_NAMES[name]
    kind = row.kind or (checks[row.means].kind if row.means in checks else None)
    return value if value is None or kind is None else read_as(name, kind, value)


def translate_legacy(
    given: Translation, known: Collection[str], checks: Mapping[str, ArgumentCheck]
) -> tuple[Translation, Translation]:
    """Turn a call's keywords of any era into today's.

    Args:
        given: The keywords as the user gave them.
        known: Today's names.
        checks: What today's arguments may be.

    Returns:
        Today's keywords, and the attributes that are kept for scripts that read them back.

    Raises:
        UnknownArgument: A name that no release has had; the message holds the nearest one that exists.
        ArgumentError: An old and a new name that contradict each other, or a value that an old name cannot have.
    """
    current = {name: value for name, value in given.items() if name in known}
    attributes: dict[str, ArgumentValue] = {}
    for name, value in given.items():
        if name in current:
            continue
        if name not in OLD_NAMES:
            raise UnknownArgument(_unknown_message(name, value, sorted(known)))
        row = OLD_NAMES[name]
        if row.inert and not _is_harmless(value, row.harmless):
            _warn_inert(name, value, row.means)
        value = read_old(name, value, checks)
        for new, new_value in row.translate(value).items():
            target = attributes if new in ATTRIBUTES_ONLY else current
            target[new] = _merge(name, new, given.get(new), new_value)
    return current, attributes


def _is_harmless(value: ArgumentValue, harmless: tuple[ArgumentValue, ...]) -> bool:
    # only plain values are compared: an array answers with an array
    return value is None or (isinstance(value, (bool, int, float, str)) and value in harmless)


def _merge(old: str, new: str, given: ArgumentValue, translated: ArgumentValue) -> ArgumentValue:
    if given is None or given == translated:
        return translated
    if isinstance(given, dict) and isinstance(translated, dict):
        return {**translated, **given}
    if isinstance(given, list) and isinstance(translated, list):
        return given + [item for item in translated if item not in given]
    if old == "warmup_ratio":  # 4.x: an explicit count of steps wins over the ratio
        return given if given else translated
    raise ArgumentError(
        f"`{old}` (an old name of `{new}`) asks for `{shown(new, translated)}`, but `{shown(new, given)}` was given "
        "too.\n\n"
        f"Hint: keep `{new}` only."
    )


def _unknown_message(name: str, value: ArgumentValue, known: list[str]) -> str:
    near = nearest(name, [*known, *OLD_NAMES], cutoff=0.5)
    text = shown(name, value) if not is_secret(near or name) else f"{name}=<{(near or name).upper()}>"
    return f"TrainingArguments got an unknown argument `{text}`.\n\nHint: {_meant(name, known)}"


# Arguments of trainers that generate (`arguments_seq2seq.py`).
_OF_SEQ2SEQ = (
    "sortish_sampler", "predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config",
)  # fmt: skip
# What other libraries call an argument.
_CALLED_ELSEWHERE = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
    "precision": "bf16",
    "gradient_clip_val": "max_grad_norm",
    "accumulate_grad_batches": "gradient_accumulation_steps",
}


def _meant(name: str, known: list[str]) -> str:
    """Say which argument is meant: one spelled like it, or those that have all its words in their names."""
    if name in _OF_SEQ2SEQ:
        return "it is one of `Seq2SeqTrainingArguments`, for a `Seq2SeqTrainer`."
    near = _CALLED_ELSEWHERE.get(name) or nearest(name, known, cutoff=0.7) or nearest(name, OLD_NAMES, cutoff=0.8)
    if near is not None:
        return f"did you mean `{near}`?"
    words = {word.removesuffix("s") for word in name.lower().split("_")}
    holding = [one for one in known if words <= {word.removesuffix("s") for word in one.split("_")}]
    if not holding:
        return "see docs/arguments.md for the list of arguments."
    return f"did you mean {' or '.join(f'`{one}`' for one in holding[:3])}?"


def _warn_inert(name: str, value: ArgumentValue, means: str) -> None:
    warnings.warn(f"`{shown(name, value)}` has no effect: {means}.", InertArgumentWarning, stacklevel=5)
