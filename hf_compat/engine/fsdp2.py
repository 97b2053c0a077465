"""FSDP 2: a model's parameters become shards, through torch's `fully_shard`. torch words only."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from hf_compat.errors import ArgumentError
from hf_compat.plan.fsdp import FsdpPlan


@functools.lru_cache(maxsize=4)
def shard_mesh(device: str, world_size: int, per_node: int, hybrid: bool) -> DeviceMesh:
    """Return the mesh that parameters are sharded over: one for the whole run, however many trainers it makes."""
    if hybrid and world_size > per_node:
        return init_device_mesh(
            device, (world_size // per_node, per_node), mesh_dim_names=("replicate", "data_parallel")
        )
    return init_device_mesh(device, (world_size,), mesh_dim_names=("data_parallel",))


def shard_model(model: nn.Module, plan: FsdpPlan, mesh: DeviceMesh, precision: str) -> None:
    """Shard a model in place: first the modules that the plan names, then what is left. Nothing happens twice.

    Raises:
        ArgumentError: No module is of the classes that the plan names.
    """
    if isinstance(model, FSDPModule):
        return
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None),
        "offload_policy": CPUOffloadPolicy() if plan.cpu_offload else OffloadPolicy(),
    }
    parts = list(_parts(model, plan))
    if plan.activation_checkpointing:
        _recompute(model, parts)
    for part in parts:
        fully_shard(part, **options)
    fully_shard(model, **options)


def _parts(model: nn.Module, plan: FsdpPlan) -> Iterator[nn.Module]:
    """Yield the modules that are sharded one by one, inner ones first."""
    modules = [
        module for module in list(model.modules())[:0:-1] if not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]
    if plan.wrap == "none":
        return
    if plan.wrap == "size":
        taken: set[int] = set()
        for module in modules:
            own = [p for p in module.parameters() if id(p) not in taken]
            if sum(p.numel() for p in own) >= plan.min_num_params:
                taken.update(map(id, own))
                yield module
        return
    names = set(plan.wrap_classes) or set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in modules if type(module).__name__ in names]
    missing = set(plan.wrap_classes) - {type(module).__name__ for module in found}
    if missing:
        raise ArgumentError(
            f"`fsdp_config` wraps {sorted(missing)}, and the model has no module of such a class.\n\n"
            f"Hint: its classes are {', '.join(sorted({type(m).__name__ for m in modules}))}."
        )
    yield from found


def _recompute(model: nn.Module, parts: list[nn.Module]) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    chosen = set(map(id, parts))
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
