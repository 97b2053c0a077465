"""What `parallelism_config`, or that of `accelerate launch`, asks for: copies and shards of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_compat.errors import ArgumentError, UnsupportedArgument
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.fsdp import uses_fsdp
from hf_compat.runtime.text import parse_switch

# Sizes of Accelerate's configuration → why a size above 1 is refused.
_REFUSED = {
    "tp_size": "tensor parallelism shares each layer between processes, and a model is whole or sharded by FSDP here",
    "cp_size": "context parallelism shares each sequence between processes, and each process has its own here",
    "sp_size": "sequence parallelism shares each sequence between processes, and each process has its own here",
}
_HINT = "leave it out; `dp_replicate_size` and `dp_shard_size` are carried out, and `fsdp` saves memory, too"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """How many copies of a model there are, and how many processes share each.

    Args:
        copies: Copies of the model: `dp_replicate_size`.
        shards: Processes that a copy is sharded over: `dp_shard_size`.
    """

    copies: int
    shards: int


def parallel_sizes(args: TrainingArguments, variables: Mapping[str, str]) -> ParallelSizes | None:
    """Return what is asked for; None where nothing is, or every size is 1 (then all processes hold copies).

    Args:
        args: The training arguments; their `parallelism_config` comes before the launcher's.
        variables: The launcher's environment.

    Raises:
        UnsupportedArgument: A dimension that is not carried out.
        ArgumentError: Sizes that do not fit the processes, or `fsdp`.

    Mirrors:
        `accelerate.ParallelismConfig`, 1.15, and its check against the Accelerator.
    """
    names = ("dp_replicate_size", "dp_shard_size", *_REFUSED)
    if args.parallelism_config is not None:
        sizes = {name: int(getattr(args.parallelism_config, name, None) or 1) for name in names}
    else:
        if not parse_switch(variables, "ACCELERATE_USE_PARALLELISM_CONFIG"):
            sizes = {}
        else:
            sizes = {name: _size_in(variables, f"PARALLELISM_CONFIG_{name.upper()}") for name in names}
    for name, why in _REFUSED.items():
        if sizes.get(name, 1) > 1:
            raise UnsupportedArgument(f"`parallelism_config` has {name}={sizes[name]}: {why}.\n\nHint: {_HINT}.")
    found = ParallelSizes(copies=sizes.get("dp_replicate_size", 1), shards=sizes.get("dp_shard_size", 1))
    if found.copies * found.shards == 1:
        return None
    is_fsdp = uses_fsdp(args, variables)
    told = f"`parallelism_config` has dp_replicate_size={found.copies} and dp_shard_size={found.shards}"
    if found.copies * found.shards != args.world_size:
        raise ArgumentError(
            f"{told}, for {found.copies * found.shards} processes; the launcher has started {args.world_size}.\n\n"
            "Hint: make their product the number of processes."
        )
    if is_fsdp != (found.shards > 1):
        way_out = "leave `fsdp` out, or shard: `dp_shard_size` above 1" if is_fsdp else "set `fsdp=True`: FSDP shards"
        raise ArgumentError(f"{told}, and `fsdp` is {'on' if is_fsdp else 'off'}.\n\nHint: {way_out}.")
    return found


def _size_in(variables: Mapping[str, str], name: str) -> int:
    value = variables.get(name, "1")
    if not value.isdecimal() or int(value) < 1:
        raise ArgumentError(f"`{name}={value}` is no size.\n\nHint: give a whole number from 1 on, or leave it out.")
    return int(value)
