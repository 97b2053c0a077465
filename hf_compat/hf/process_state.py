"""The processes of a run in Accelerate's words, for its users and for libraries without a Trainer.

`accelerate.PartialState()` and `AcceleratorState()` are one object each in a process. They are filled here. Otherwise
Accelerate would look for devices and processes by itself, and make a second process group.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import IO, Any, ParamSpec, Protocol, TypeAlias, TypeVar

import torch

from hf_compat.runtime.collectives import GroupArguments, barrier, start_processes


class ProcessArguments(GroupArguments, Protocol):
    """The members of `TrainingArguments` that fill the states."""

    @property
    def process_index(self) -> int: ...

    @property
    def local_process_index(self) -> int: ...


def may_be_asked() -> bool:
    """Whether Accelerate is installed, and a module that uses it is loaded."""
    if "accelerate" in sys.modules:
        return sys.modules["accelerate"] is not None
    return sys.modules.get("transformers") is not None and importlib.util.find_spec("accelerate") is not None


def has_state() -> bool:
    """Whether Accelerate's state of the processes is set up."""
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.PartialState._shared_state)


def as_distributed_type(name: str) -> str:
    """A member of Accelerate's enum, or its text without Accelerate."""
    if not may_be_asked():
        return name
    kind: Callable[[str], str] = importlib.import_module("accelerate.state").DistributedType
    return kind(name)


def share_processes(args: ProcessArguments, distributed_type: str) -> object:
    """Fill `accelerate.PartialState()` from the arguments. Accelerate must be installed.

    Args:
        args: The training arguments.
        distributed_type: The way in which the processes train together, as text of Accelerate's enum.
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
        # defined before the method, so that the first wait joins Lightning's process group
        "wait_for_everyone": partial(wait_for_everyone, args),
    }
    was_initialised = state.is_initialized()
    state.PartialState._shared_state.update(found)
    if was_initialised:
        state.AcceleratorState._shared_state.update(found)
    return state.PartialState()


def wait_for_everyone(args: GroupArguments) -> None:
    """Wait for the other processes, after joining their group."""
    start_processes(args)
    barrier()


def share_accelerator(mixed_precision: str, deepspeed_plugin: object | None = None) -> None:
    """Fill `AcceleratorState()`, as an Accelerator does.

    Args:
        mixed_precision: `no`, `bf16` or `fp16`.
        deepspeed_plugin: Accelerate's description of DeepSpeed's setup, if DeepSpeed trains.
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


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Parts = TypeVar("Parts")
# A list, a tuple, a tensor, a data set, or a mapping of these.
Splittable: TypeAlias = Any


class ProcessMembers:
    """The members about processes that Accelerate's state and its Accelerator share.

    Mirrors:
        `accelerate.PartialState`, 1.15.
    """

    _args: ProcessArguments

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._args.device

    @property
    def num_processes(self) -> int:
        """Processes that train together."""
        return self._args.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self._args.process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self._args.local_process_index

    @property
    def is_main_process(self) -> bool:
        """First process of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """First process of this machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Last process of all."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether several processes train together."""
        return self.num_processes > 1

    def wait_for_everyone(self) -> None:
        """Wait for the other processes."""
        wait_for_everyone(self._args)

    def print(
        self,
        *args: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: IO[str] | None = None,
        flush: bool = False,
    ) -> None:
        """Print on the first process of each machine, with the arguments of Python's `print`."""
        if self.is_local_main_process:
            print(*args, sep=sep, end=end, file=file, flush=flush)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let the first process run the block before the others."""
        with self._first(self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let the first process of each machine run the block before the others."""
        with self._first(self.is_local_main_process):
            yield

    @contextlib.contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    def on_main_process(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]:
        """Decorate a function that only the first process runs. The others get None."""
        return _only_where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]:
        """Decorate a function that only the first process of each machine runs."""
        return _only_where(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]:
        """Decorate a function that only the last process runs."""
        return _only_where(lambda: self.is_last_process, function)

    def on_process(
        self, function: Callable[Parameters, Result], process_index: int
    ) -> Callable[Parameters, Result | None]:
        """Decorate a function that only one process runs."""
        return _only_where(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[Parameters, Result], local_process_index: int
    ) -> Callable[Parameters, Result | None]:
        """Decorate a function that only one process of each machine runs."""
        return _only_where(lambda: self.local_process_index == local_process_index, function)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Parts, apply_padding: bool = False) -> Iterator[Parts]:
        """Give each process its part of a list, a tuple, a tensor, a data set, or of the values of a dict.

        Args:
            inputs: The items. The first processes get one more if they do not divide evenly.
            apply_padding: Repeat the last item for a process that has fewer.
        """
        yield _part_of(inputs, self.process_index, self.num_processes, apply_padding)


class ProcessState(ProcessMembers):
    """The processes of a run, as `args.distributed_state`.

    Mirrors:
        `accelerate.PartialState`, 1.15.
    """

    debug = fork_launched = False
    initialized = True

    def __init__(self, args: ProcessArguments) -> None:
        self._args = args
        several = f"MULTI_{'CPU' if args.device.type == 'cpu' else 'GPU'}"
        # scripts assign it, and compare it with members of Accelerate's enum
        self.distributed_type = as_distributed_type(several if args.world_size > 1 else "NO")

    @property
    def backend(self) -> str | None:
        """Backend of the process group."""
        return torch.distributed.get_backend() if torch.distributed.is_initialized() else None

    def destroy_process_group(self) -> None:
        """Do nothing, because Lightning ends the process group."""


def _only_where(
    is_chosen: Callable[[], bool], function: Callable[Parameters, Result]
) -> Callable[Parameters, Result | None]:
    @functools.wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | None:
        return function(*args, **kwargs) if is_chosen() else None

    return wrapper


def _part_of(inputs: Splittable, rank: int, ranks: int, apply_padding: bool) -> Splittable:
    """Take a rank's part of a sized object, or of the values of a mapping."""
    if ranks == 1:
        return inputs
    if isinstance(inputs, Mapping):
        return {key: _part_of(value, rank, ranks, apply_padding) for key, value in inputs.items()}
    each, more = divmod(len(inputs), ranks)
    start = rank * each + min(rank, more)
    stop = start + each + (rank < more)
    places = list(range(start, stop))
    if apply_padding and more and rank >= more:
        places.append(len(inputs) - 1)
    if isinstance(inputs, torch.Tensor):
        return inputs[places]
    if hasattr(inputs, "select"):  # of `datasets`
        return inputs.select(places)
    return type(inputs)(inputs[place] for place in places)
