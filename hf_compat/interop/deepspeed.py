"""The calls on DeepSpeed's engine, and its recognition without an import of DeepSpeed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeGuard

from torch import distributed, nn

# `deepspeed.DeepSpeedEngine`, 0.19, which is not imported
DeepSpeedEngine: TypeAlias = Any


def is_deepspeed_engine(model: object) -> TypeGuard[DeepSpeedEngine]:
    """Return whether a model is DeepSpeed's engine."""
    return type(model).__name__ == "DeepSpeedEngine"


def compile_engine(engine: DeepSpeedEngine, keywords: dict[str, str | bool]) -> None:
    """Compile what is in an engine, once, with keywords of `torch.compile`."""
    if not engine.is_compiled:
        others = {name: value for name, value in keywords.items() if name != "backend"}
        engine.compile(keywords["backend"], compile_kwargs=others)


def is_partitioned(model: nn.Module) -> bool:
    """Return whether ZeRO-3 has spread a model's parameters over the processes."""
    parameter = next(model.parameters(), None)
    return hasattr(parameter, "ds_id")


@contextlib.contextmanager
def gathering(model: nn.Module, config: dict[str, Any]) -> Iterator[None]:
    """Let each module of a model in parts gather its parameters while it runs, as in a fit."""
    import deepspeed

    engine = deepspeed.initialize(model=model, config=config)[0]
    try:
        yield
    finally:
        engine.destroy()


def whole_for_a_while(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Let parameters of a model in parts be whole for a while. What the first process has made of them is kept."""
    import deepspeed

    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)
    return context


def whole_size(parameter: nn.Parameter) -> int:
    """Return how many numbers a parameter has, which ZeRO-3 may have spread over the processes."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def tensor_group() -> distributed.ProcessGroup:
    """The processes that hold parts of the same layers, in an engine with `tensor_parallel`."""
    from deepspeed.utils import groups

    group: distributed.ProcessGroup = groups.get_tensor_model_parallel_group()
    return group


def tensor_place() -> int:
    """This process's place among them, 0 without `tensor_parallel`."""
    from deepspeed.utils import groups

    return int(groups.get_tensor_model_parallel_rank())
