"""Every key that DeepSpeed 0.19 reads of a configuration, and what becomes of it: one table.

What is not in it DeepSpeed ignores without a word; here a warning names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple

from hf_compat.errors import InertArgumentWarning, UnsupportedArgument
from hf_compat.runtime.text import did_you_mean


class Fate(StrEnum):
    """What becomes of a key."""

    PASSED = "passed on"
    TRANSLATED = "compared with the arguments"
    INERT = "no effect, with a warning"
    REFUSED = "refused"


class Key(NamedTuple):
    """A row.

    Args:
        fate: What becomes of the key.
        why: Why it has no effect, or is refused; else what it is compared with.
        is_on: Whether a value asks for what is refused or has no effect.
    """

    fate: Fate
    why: str = ""
    is_on: Callable[[object], bool] = bool


def _enabled(section: object) -> bool:
    return isinstance(section, Mapping) and bool(section.get("enabled"))


def _above_one(size: object) -> bool:
    return isinstance(size, (int, float)) and size > 1


_OWN_LOADER = "it is of DeepSpeed's own data loader; a Trainer has another"
_OWN_FILES = "another engine writes the files of a checkpoint after it is sealed"

KEYS: dict[str, Key] = {
    "train_batch_size": Key(Fate.TRANSLATED, "batch size × accumulation × processes"),
    "train_micro_batch_size_per_gpu": Key(Fate.TRANSLATED, "per_device_train_batch_size"),
    "gradient_accumulation_steps": Key(Fate.TRANSLATED, "gradient_accumulation_steps"),
    "gradient_clipping": Key(Fate.TRANSLATED, "max_grad_norm"),
    "bf16": Key(Fate.TRANSLATED, "bf16"),
    "bfloat16": Key(Fate.TRANSLATED, "bf16: its old name"),
    "fp16": Key(Fate.TRANSLATED, "fp16"),
    "optimizer": Key(Fate.TRANSLATED, "learning_rate, adam_beta1 …; torch's AdamW"),
    "scheduler": Key(Fate.TRANSLATED, "learning_rate, warmup_steps, the updates"),
    "zero_optimization": Key(Fate.TRANSLATED, "sizes that are auto follow the model"),
    "amp": Key(Fate.REFUSED, "it needs NVIDIA's apex, with which ZeRO does not work; use bf16 or fp16", _enabled),
    "elasticity": Key(Fate.REFUSED, "it chooses batch sizes, and here the arguments do", _enabled),
    "hybrid_engine": Key(Fate.REFUSED, "it is another engine, for training with generation", _enabled),
    "tensor_parallel": Key(
        Fate.REFUSED,
        "tensor parallelism is not supported",
        lambda section: isinstance(section, Mapping) and _above_one(section.get("autotp_size")),
    ),
    "expert_parallel": Key(Fate.REFUSED, "the files of its experts are not read again", _enabled),
    "sequence_parallel_size": Key(Fate.REFUSED, "sequence parallelism is not supported", _above_one),
    "nebula": Key(Fate.REFUSED, _OWN_FILES, _enabled),
    "datastates_ckpt": Key(Fate.REFUSED, _OWN_FILES, bool),
    "checkpoint": Key(
        Fate.REFUSED,
        "DeepSpeed unpickles whatever is in a universal checkpoint; other numbers of ranks are read without",
        lambda section: isinstance(section, Mapping) and bool(section.get("load_universal")),
    ),
    "dataloader_drop_last": Key(Fate.INERT, _OWN_LOADER),
    "data_efficiency": Key(Fate.INERT, _OWN_LOADER, _enabled),
    "curriculum_learning": Key(Fate.INERT, _OWN_LOADER, _enabled),
    "autotuning": Key(Fate.INERT, "it is read by DeepSpeed's launcher alone", _enabled),
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
    """Refuse and warn, as the table says.

    Raises:
        UnsupportedArgument: A key asks for something that is not here; all are listed.
    """
    told = {name: KEYS[name] for name, value in config.items() if name in KEYS and KEYS[name].is_on(value)}
    refused = [f"  {name}: {key.why}" for name, key in told.items() if key.fate is Fate.REFUSED]
    if refused:
        raise UnsupportedArgument(
            "The DeepSpeed configuration asks for what is not supported:\n\n" + "\n".join(refused) + "\n\n"
            "Hint: leave it out."
        )
    for name, key in told.items():
        if key.fate is Fate.INERT:
            _warn(f"The DeepSpeed configuration's `{name}` has no effect: {key.why}.")
    for name in config.keys() - KEYS.keys():
        _warn(f"DeepSpeed reads no key {name!r}.\n\nHint: {did_you_mean(name, KEYS, 'leave it out.')}")


def _warn(text: str) -> None:
    warnings.warn(text, InertArgumentWarning, stacklevel=5)
