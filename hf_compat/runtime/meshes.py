"""How a model's layers are split between processes before it is trained: tensor parallelism on a mesh of torch.

Processes that hold parts of the same layers run every forward pass together, so they read the same batches. They are
neighbours: with two of them, ranks 0 and 1 share a model, ranks 2 and 3 the next one. FSDP may shard what each has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_compat.errors import UnsupportedArgument
from hf_compat.runtime.text import brief

ParameterGroup = dict[str, Any]  # as torch's optimizers have them


def tensor_axes(model: nn.Module) -> Iterator[tuple[str, DeviceMesh, int]]:
    """Yield each parameter that is spread over processes: its name, its mesh, and the first axis that splits a layer.

    The axes before it are those of FSDP 2: one that shards, after one of copies if there is one.
    """
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, parameter in model.named_parameters():
        tensor = parameter.data
        if isinstance(tensor, DTensor):
            first = (1 + tensor.placements[0].is_replicate()) if is_sharded else 0
            yield name, tensor.device_mesh, first


def tensor_ranks(model: nn.Module | None) -> int:
    """Count the processes that hold parts of the same layers. 1 if each has whole layers, or shards of FSDP 2 alone.

    Raises:
        UnsupportedArgument: They are not neighbours, or parameters are split between different numbers of processes.
    """
    if model is None or not (distributed.is_available() and distributed.is_initialized()):
        return 1
    sizes: dict[int, str] = {}
    for name, mesh, first in tensor_axes(model):
        size = math.prod(mesh.shape[first:])
        if size > 1 and size not in sizes:
            sizes[size] = name
            rows = mesh.mesh.reshape(-1, size)
            own = distributed.get_rank() // size * size
            if [own + place for place in range(size)] not in rows.tolist():
                raise UnsupportedArgument(
                    f"The model's parameter {brief(name)} is split between processes whose ranks do not follow one "
                    f"another: a row of its mesh is {rows[0].tolist()}.\n\n"
                    "Hint: make the axis that splits layers the last one, as in "
                    '`init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))`.'
                )
    if len(sizes) > 1:
        told = ", ".join(f"{brief(name)} between {size}" for size, name in sizes.items())
        raise UnsupportedArgument(
            f"The model's parameters are split between different numbers of processes: {told}.\n\n"
            "Hint: split all layers over the same axis of a mesh."
        )
    return next(iter(sizes), 1)


def data_mesh(model: nn.Module) -> DeviceMesh | None:
    """The axes of a split model's mesh over which its batches differ. None if there are none."""
    for _, mesh, first in tensor_axes(model):
        root = mesh._get_root_mesh()
        names = [name for name in root.mesh_dim_names or () if name not in (mesh.mesh_dim_names or ())[first:]]
        return root[tuple(names)] if names else None
    return None


def clip_on_meshes(parameters: list[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip gradients that may lie on different meshes by their global norm, and return the norm.

    Mirrors:
        `transformers.Trainer._mixed_mesh_grad_norm`.
    """
    by_mesh: dict[DeviceMesh | None, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh.setdefault(mesh, []).append((parameter, gradient))
    norms = [nn.utils.get_total_norm([gradient for _, gradient in part], norm_type) for part in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole), norm_type) if whole else torch.tensor(0.0)
    for part in by_mesh.values() if max_norm != float("inf") else ():
        nn.utils.clip_grads_with_norm_([parameter for parameter, _ in part], max_norm, total)
    return total


SPLIT_FROM = "split_from"  # a key of the groups that were one before `split_by_mesh`


def split_by_mesh(groups: list[ParameterGroup]) -> list[ParameterGroup]:
    """Split parameter groups, so that each has parameters of one mesh, or whole ones. Fused kernels take no others.

    Mirrors:
        The end of `transformers.Trainer.create_optimizer`.
    """
    found = []
    for place, group in enumerate(groups):
        by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        mark = {SPLIT_FROM: place} if len(by_mesh) > 1 else {}
        found += [{**group, **mark, "params": part} for part in by_mesh.values() or [[]]]
    return found


def as_before_split(groups: list[ParameterGroup], order: Iterable[object]) -> list[ParameterGroup]:
    """Join the groups of `split_by_mesh` again, for checkpoints. `order` are all parameters, as the model has them."""
    places = {one: place for place, one in enumerate(order)}
    found: list[ParameterGroup] = []
    before = None
    for group in groups:
        place = group.get(SPLIT_FROM)
        if place is not None and place == before:
            found[-1]["params"] = sorted(found[-1]["params"] + group["params"], key=places.__getitem__)
        else:
            found.append({name: value for name, value in group.items() if name != SPLIT_FROM})
        before = place
    return found


def split_again(whole: list[ParameterGroup], split: list[ParameterGroup]) -> list[ParameterGroup]:
    """Give the options of whole groups to the groups of `split_by_mesh`. Both name their parameters."""
    if not any(SPLIT_FROM in group for group in split):
        return whole
    options = {name: group for group in whole for name in group["params"]}
    return [{**group, **options[group["params"][0]], "params": group["params"]} for group in split]
