"""The calls on DeepSpeed's engine, and its recognition without an import of DeepSpeed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, TypeAlias, TypeGuard

import torch
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

    # DeepSpeed counts it by the other two. Processes that share sequences in training evaluate each on its own
    config = {name: value for name, value in config.items() if name != "train_batch_size"}
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


@contextlib.contextmanager
def sharing_sequences(
    model: object, processes: int, samples: int, length: int | None, attention: str | None
) -> Iterator[object]:
    """Let neighbouring processes share each sequence in training (Ulysses). Yields their groups, DeepSpeed's `mpu`.

    A process holds a part of every sequence. Each call of the model's attention exchanges queries, keys, values and
    results, so that the process computes some heads of whole sequences. Evaluations exchange nothing, as upstream's.

    Args:
        model: A model of transformers.
        processes: The number of those that share a sequence.
        samples: The samples of a micro-batch.
        length: The tokens of each sequence. None if batches differ.
        attention: The name of the model's attention. None reads it from the model.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp, ulysses_sp
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name: str = attention or attrgetter("config._attn_implementation")(model)
    own = ALL_ATTENTION_FUNCTIONS[name]
    try:
        yield ulysses_sp.UlyssesSPAttentionHF.register_with_transformers(
            model,
            core_attn_implementation=name,
            sequence_parallel_size=processes,
            micro_batch_size=samples,
            seq_length=length,
            seq_length_is_variable=length is None,
            disable_in_eval=True,
        )
    finally:  # another fit makes its own groups, or none
        ALL_ATTENTION_FUNCTIONS[name] = own
        parallel_state_sp._release_sequence_parallel_groups()
        groups.mpu = None


def exchanging_sequences(batches: Iterable[object], device: torch.device) -> Iterator[object]:
    """Exchange the batches of processes that share sequences: each gets its part of every sequence, batch by batch."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp, ulysses_sp

    found: Iterator[object] = ulysses_sp.UlyssesSPDataLoaderAdapter(
        batches,
        sp_rank=parallel_state_sp.get_sequence_parallel_rank(),
        sp_group=parallel_state_sp.get_sequence_parallel_group(),
        sp_world_size=parallel_state_sp.get_sequence_parallel_world_size(),
        device=device,
    )
    return found
