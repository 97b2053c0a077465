"""Accelerate's own states of the processes, which libraries ask without a Trainer: they say what the arguments say.

`accelerate.PartialState()` and `AcceleratorState()` are one object each in a process. Left alone, the first question
would let Accelerate look for devices and processes by itself, and make a process group beside Lightning's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol

from hf_compat.runtime.collectives import GroupArguments, barrier, start_processes


class SharedArguments(GroupArguments, Protocol):
    """What the states are filled from: `TrainingArguments`."""

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""


def may_be_asked() -> bool:
    """Return whether Accelerate is installed, and something is loaded that uses it."""
    if "accelerate" in sys.modules:
        return sys.modules["accelerate"] is not None
    return sys.modules.get("transformers") is not None and importlib.util.find_spec("accelerate") is not None


def has_state() -> bool:
    """Return whether Accelerate's state of the processes is set up."""
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.PartialState._shared_state)


def as_distributed_type(name: str) -> str:
    """Return a member of Accelerate's enum, which is a text, too; the text where Accelerate is not used."""
    if not may_be_asked():
        return name
    kind: Callable[[str], str] = importlib.import_module("accelerate.state").DistributedType
    return kind(name)


def share_processes(args: SharedArguments, distributed_type: str) -> object:
    """Let `accelerate.PartialState()` answer as the arguments do.

    Args:
        args: The training arguments.
        distributed_type: By what the processes train together, as Accelerate's enum spells it.

    Returns:
        The state; Accelerate has to be installed.
    """
    state = importlib.import_module("accelerate.state")
    several = args.world_size > 1
    found: dict[str, object] = {
        "_cpu": args.device.type == "cpu",
        "backend": (args.ddp_backend or ("nccl" if args.device.type == "cuda" else "gloo")) if several else None,
        "device": args.device,
        "debug": False,
        "distributed_type": state.DistributedType(distributed_type),
        "num_processes": args.world_size,
        "process_index": args.process_index,
        "local_process_index": max(args.local_process_index, 0),
        # stands before the method: whoever waits first joins the process group that Lightning uses
        "wait_for_everyone": partial(_wait_for_everyone, args),
    }
    was_initialised = state.is_initialized()
    state.PartialState._shared_state.update(found)
    if was_initialised:
        state.AcceleratorState._shared_state.update(found)
    return state.PartialState()


def _wait_for_everyone(args: GroupArguments) -> None:
    start_processes(args)
    barrier()


def share_accelerator(mixed_precision: str, deepspeed_plugin: object | None = None) -> None:
    """Let `AcceleratorState()` answer, as it does when a Trainer has made an Accelerator.

    Args:
        mixed_precision: `no`, `bf16` or `fp16`.
        deepspeed_plugin: What says how DeepSpeed is set up, where it trains.
    """
    state = importlib.import_module("accelerate.state")
    dataclasses = importlib.import_module("accelerate.utils.dataclasses")
    state.AcceleratorState._shared_state.update(
        state.PartialState._shared_state,
        _mixed_precision=mixed_precision,
        dynamo_plugin=dataclasses.TorchDynamoPlugin(),
        deepspeed_plugins=None if deepspeed_plugin is None else {"default": deepspeed_plugin},
        torch_tp_plugin=None,
        parallelism_config=None,
        device_mesh=None,
    )
