"""FSDP 2: shard a model's parameters with torch's `fully_shard`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from hf_compat.errors import ArgumentError
from hf_compat.plan.fsdp import FsdpPlan


@functools.lru_cache(maxsize=4)
def shard_mesh(device: str, world_size: int, per_node: int, hybrid: bool) -> DeviceMesh:
    """Return the mesh that parameters are sharded over, shared by all trainers of a process."""
    if hybrid and world_size > per_node:
        return init_device_mesh(
            device, (world_size // per_node, per_node), mesh_dim_names=("replicate", "data_parallel")
        )
    return init_device_mesh(device, (world_size,), mesh_dim_names=("data_parallel",))


def shard_model(model: nn.Module, plan: FsdpPlan, mesh: DeviceMesh, precision: str) -> None:
    """Shard a model in place: first the modules that the plan names, then the rest. Skip a sharded model.

    Raises:
        ArgumentError: The model has no module of a class that the plan names.
    """
    if isinstance(model, FSDPModule):
        return
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        reshard_after_forward=plan.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None),
        offload_policy=CPUOffloadPolicy() if plan.cpu_offload else OffloadPolicy(),
    )
    parts = list(_parts(model, plan))
    if plan.activation_checkpointing:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        chosen = set(map(id, parts))
        apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
    for part in parts:
        shard(part)
    shard(model)


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's parameters are sharded."""
    return isinstance(model, FSDPModule)


@contextlib.contextmanager
def gathering_method(model: nn.Module, method: str) -> Iterator[Callable[..., torch.Tensor]]:
    """Yield a method of a model that gathers sharded parameters before it runs, as a forward pass does.

    `generate` calls an encoder on its own, and the root's sharded parameters are not gathered for that call.
    """
    if not is_sharded(model):
        yield getattr(model, method)
        return
    of_instance = {name: value for name, value in vars(model).items() if name == method}
    register_fsdp_forward_method(model, method)
    try:
        yield getattr(model, method)
    finally:
        del vars(model)[method]
        vars(model).update(of_instance)


def _parts(model: nn.Module, plan: FsdpPlan) -> Iterable[nn.Module]:
    """Return the modules to shard separately, inner ones first."""
    if plan.wrap == "none":
        return ()
    containers = (nn.ModuleList, nn.ModuleDict)  # fully_shard rejects both
    modules = [module for module in list(model.modules())[:0:-1] if not isinstance(module, containers)]
    if plan.wrap == "size":
        return _parts_of_size(modules, plan.min_num_params)
    names = set(plan.wrap_classes) or set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in modules if type(module).__name__ in names]
    missing = set(plan.wrap_classes) - {type(module).__name__ for module in found}
    if missing:
        raise ArgumentError(
            f"`fsdp_config` wraps {sorted(missing)}, and the model has no module of such a class.\n\n"
            f"Hint: its classes are {', '.join(sorted({type(m).__name__ for m in modules}))}."
        )
    return found


def _parts_of_size(modules: list[nn.Module], min_num_params: int) -> Iterator[nn.Module]:
    """Yield the modules with at least `min_num_params` parameters that no inner module has taken."""
    taken: set[int] = set()
    for module in modules:
        own = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        if sum(parameter.numel() for parameter in own) >= min_num_params:
            taken.update(map(id, own))
            yield module
