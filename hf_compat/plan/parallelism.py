"""The sizes of a mesh: copies and shards of a model, and processes that share its layers or its sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from hf_compat.errors import ArgumentError, UnsupportedArgument
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.deepspeed import tensor_ranks_of, uses_deepspeed
from hf_compat.plan.fsdp import uses_fsdp
from hf_compat.runtime.text import brief, parse_switch

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_PREFIX = "PARALLELISM_CONFIG_"  # of a launcher's variables


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePlan:
    """How processes share each sequence in training, by DeepSpeed's Ulysses.

    The names are those of Accelerate's configuration, which transformers' loss reads.

    Mirrors:
        `accelerate.utils.DeepSpeedSequenceParallelConfig`, 1.15.
    """

    sp_backend: ClassVar[str] = "deepspeed"
    sp_size: int  # neighbouring processes that have parts of the same sequences
    length: int | None = None  # tokens of each sequence. None if batches differ
    attention: str | None = None  # the implementation whose calls are exchanged. None means the model's


def asked_sizes(args: TrainingArguments, variables: Mapping[str, str]) -> dict[str, int]:
    """Read the sizes of a mesh, from the arguments or from the launcher's variables."""
    sizes: dict[str, int] = {}
    if args.parallelism_config is not None:
        sizes = {name: int(getattr(args.parallelism_config, name, None) or 1) for name in _SIZES}
    elif parse_switch(variables, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        for name in _SIZES:
            value = variables.get(variable := f"{_PREFIX}{name.upper()}", "1")
            if not value.isdecimal() or int(value) < 1:
                raise ArgumentError(
                    f"`{variable}={value}` is not a size.\n\nHint: give a whole number from 1 on, or leave it out."
                )
            sizes[name] = int(value)
    return sizes


def parallel_sizes(args: TrainingArguments, variables: Mapping[str, str], split: int | None) -> tuple[int, int] | None:
    """Read the number of copies of the model, and of processes that share each copy.

    None if every size is 1 and each process has a copy. `split` is the number of processes that hold parts of the same
    layers, None without a model.

    Raises:
        UnsupportedArgument: A dimension is not supported.
        ArgumentError: The sizes contradict the number of processes or `fsdp`.

    Mirrors:
        `accelerate.ParallelismConfig`, 1.15, and its check against the Accelerator.
    """
    sizes = asked_sizes(args, variables)
    if sizes.get("cp_size", 1) > 1:
        raise UnsupportedArgument(
            f"`parallelism_config` has cp_size={sizes['cp_size']}: torch's `context_parallel` shares each sequence "
            "between GPUs, and is not built here. It has no kernel for CPUs "
            "(`_scaled_dot_product_flash_attention_for_cpu` has no sharding strategy).\n\n"
            "Hint: leave it out, or set `sp_size` beside `deepspeed`, which shares sequences, too. transformers' own "
            "Trainer needs several GPUs and FSDP 2 (`fsdp=True`) for `cp_size`."
        )
    if sequence_plan(args, variables) is not None:
        return None
    copies, shards, wanted = (sizes.get(name, 1) for name in _SIZES[:3])
    if split is not None and wanted not in (1, split):
        raise ArgumentError(
            f"`parallelism_config` has tp_size={wanted}, and {split} processes share each layer of the model.\n\n"
            f"Hint: load it with `distributed_config=DistributedConfig(tp_size={wanted})`, or split its layers with "
            "torch's `parallelize_module`."
        )
    if copies * shards == 1:
        return None
    is_fsdp = uses_fsdp(args, variables)
    told = f"`parallelism_config` has dp_replicate_size={copies} and dp_shard_size={shards}"
    needed = copies * shards * (split or wanted)
    if needed != args.world_size:
        raise ArgumentError(
            f"{told}, for {needed} processes; the launcher has started {args.world_size}.\n\n"
            "Hint: make their product the number of processes."
        )
    if is_fsdp != (shards > 1):
        way_out = "leave `fsdp` out, or set `dp_shard_size` above 1" if is_fsdp else "set `fsdp=True`: FSDP shards"
        raise ArgumentError(f"{told}, and `fsdp` is {'on' if is_fsdp else 'off'}.\n\nHint: {way_out}.")
    return copies, shards


def sequence_plan(args: TrainingArguments, variables: Mapping[str, str]) -> SequencePlan | None:
    """Read how processes share sequences. None if each has whole ones.

    Raises:
        UnsupportedArgument: `sp_size` is set without DeepSpeed, beside split layers, or beside a loss of its own.
        ArgumentError: The sizes contradict the number of processes.
    """
    sizes = asked_sizes(args, variables)
    if (size := sizes.get("sp_size", 1)) == 1:
        return None
    told = f"`parallelism_config` has sp_size={size}"
    if not uses_deepspeed(args, variables):
        raise UnsupportedArgument(
            f"{told}: DeepSpeed shares sequences between processes, and `deepspeed` is not set.\n\n"
            "Hint: set `deepspeed` to a configuration, or leave `sp_size` out."
        )
    if sizes["tp_size"] > 1 or tensor_ranks_of(args, variables) > 1:
        raise UnsupportedArgument(
            f"{told}, and layers are split between processes, too (`tp_size`, DeepSpeed's `autotp_size`). DeepSpeed "
            "knows one kind of groups.\n\nHint: leave one of them out."
        )
    if args.label_smoothing_factor:
        raise UnsupportedArgument(
            f"{told}, and `label_smoothing_factor={args.label_smoothing_factor}`: the model computes the loss of each "
            "part of a sequence, so transformers would leave labels as they are.\n\nHint: leave one of them out."
        )
    copies = sizes["dp_replicate_size"] * sizes["dp_shard_size"]
    if copies * size != args.world_size:
        raise ArgumentError(
            f"{told} and {copies} copies (dp_replicate_size × dp_shard_size), for {copies * size} processes; the "
            f"launcher has started {args.world_size}.\n\nHint: make their product the number of processes."
        )
    handler = getattr(args.parallelism_config, "sp_handler", None)
    if handler is not None:
        length, attention = handler.sp_seq_length, handler.sp_attn_implementation
        is_variable = handler.sp_seq_length_is_variable
    else:  # of `accelerate launch`
        text = variables.get(f"{_PREFIX}SP_SEQ_LENGTH", "None")
        length = int(text) if text.isdecimal() else None
        attention = variables.get(f"{_PREFIX}SP_ATTN_IMPLEMENTATION")
        is_variable = variables.get(f"{_PREFIX}SP_SEQ_LENGTH_IS_VARIABLE", "true").lower() == "true"
    if not is_variable and length is None:
        raise ArgumentError(
            f"{told}, and sequences of one length that is not given (`sp_seq_length_is_variable=False`).\n\n"
            "Hint: set `sp_seq_length`, or let it vary."
        )
    return SequencePlan(sp_size=size, length=None if is_variable else length, attention=attention)


def check_shared_model(model: nn.Module, plan: SequencePlan) -> None:
    """Refuse a model whose sequences cannot be shared.

    Mirrors:
        The checks of `accelerate.Accelerator._prepare_deepspeed`, 1.15.
    """
    config = getattr(model, "config", None)
    told = f"`parallelism_config` has sp_size={plan.sp_size}, and"
    if config is None:
        raise UnsupportedArgument(
            f"{told} {type(model).__name__} has no `config`: DeepSpeed works within transformers' attention."
            "\n\nHint: train a model of transformers, or leave `sp_size` out."
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    recurrent = sorted({kind for kind in getattr(text, "layer_types", None) or () if "linear_attention" in kind})
    if recurrent:
        raise UnsupportedArgument(
            f"{told} {type(model).__name__} has layers of {', '.join(recurrent)}. Each process would begin their state "
            "anew within a sequence.\n\nHint: train a model with full attention only, or leave `sp_size` out."
        )
    used = getattr(config, "_attn_implementation", None)
    if used == "eager" or plan.attention not in (None, used):
        raise ArgumentError(
            f"{told} sp_attn_implementation={brief(plan.attention)}, while the model's attention is {brief(used)}.\n\n"
            "Hint: load the model with `attn_implementation='sdpa'`, or a flash attention, and leave "
            "`sp_attn_implementation` out."
        )
