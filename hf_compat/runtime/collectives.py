"""What the processes of a run exchange: tensors, objects, errors. torch.distributed only.

In a run of one process every function returns what that process has. Lightning's strategies use the same process group:
`start_processes` makes it, or Lightning, whichever comes first.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store
from torch.distributed.rendezvous import rendezvous

from hf_compat.errors import ProcessError
from hf_compat.runtime.launch import has_rendezvous, main_address, variable
from hf_compat.runtime.nested import Nested, map_nested
from hf_compat.runtime.process_exit import destroy_at_exit, leave_at_exit
from hf_compat.runtime.waiting import saying_what_is_awaited

Object = TypeVar("Object")

_IS_AVAILABLE = distributed.is_available()  # asked several times a batch
# How long the first process waits for a port that a job which has just ended still holds.
PORT_WAIT_SECONDS = 20.0


class GroupArguments(Protocol):
    """The training arguments that a process group is made from."""

    ddp_backend: str | None
    ddp_timeout: int

    @property
    def world_size(self) -> int:
        """Processes that train together."""

    @property
    def process_index(self) -> int:
        """Rank of this process."""

    @property
    def device(self) -> torch.device:
        """Device of this process."""


def is_distributed() -> bool:
    """Return whether several processes train together and have a process group."""
    return _IS_AVAILABLE and distributed.is_initialized() and distributed.get_world_size() > 1


def start_processes(args: GroupArguments) -> None:
    """Join the process group that the launcher has prepared; nothing happens in one process, or a second time.

    Args:
        args: The training arguments.
    """
    if args.world_size <= 1:
        return
    leave_at_exit()
    if not distributed.is_initialized():
        on_gpu = args.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(args.device)
        timeout = datetime.timedelta(seconds=args.ddp_timeout)
        address, port = main_address()
        told = f"rank {args.process_index} waits for the others of {args.world_size} processes at {address}:{port}"
        with saying_what_is_awaited(told, address):
            distributed.init_process_group(
                args.ddp_backend or ("nccl" if on_gpu else "gloo"),
                store=_rendezvous_store(args, timeout),
                rank=args.process_index,
                world_size=args.world_size,
                timeout=timeout,
            )
        destroy_at_exit()


def limit_waiting(timeout_seconds: float) -> None:
    """Let every process group wait so long at most; those that strategies make have torch's default of 30 minutes."""
    if is_distributed():
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_seconds), group)


def _rendezvous_store(args: GroupArguments, timeout: datetime.timedelta) -> Store:
    """Return the store through which the processes find each other, another one at each start.

    torch's elastic launcher keeps its store when it restarts processes; it still holds the last start's addresses.
    """
    address, port = main_address()
    method = "env://" if has_rendezvous() else f"tcp://{address}:{port}"
    store = _meet(method, args, timeout)
    store.set_timeout(timeout)
    return PrefixStore(f"hf_compat/start_{variable('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _meet(method: str, args: GroupArguments, timeout: datetime.timedelta) -> Store:
    """Return torch's store; where the last start still holds the port, wait until it is free."""
    give_up = time.monotonic() + PORT_WAIT_SECONDS
    while True:
        found = rendezvous(method, rank=args.process_index, world_size=args.world_size, timeout=timeout)
        try:
            store, _, _ = next(found)
            return store
        except distributed.DistNetworkError as error:
            if "EADDRINUSE" not in str(error) or time.monotonic() > give_up:
                raise
            time.sleep(0.5)


def barrier() -> None:
    """Wait for all processes."""
    if is_distributed():
        distributed.barrier()


def gather(data: Nested) -> Nested:
    """Join nested tensors of all processes along their first dimension, in the order of ranks.

    Shapes:
        each tensor: [n, …] on every process → [world_size · n, …]; a scalar → [world_size]

    Mirrors:
        `accelerate.utils.gather`, 1.15.
    """
    if not is_distributed():
        return data
    return map_nested(_gather_tensor, data)


def _gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = (tensor.reshape(1) if tensor.ndim == 0 else tensor).contiguous()
    parts = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, tensor)
    return torch.cat(parts)


def gather_objects(data: Object) -> list[Object]:
    """Return an object of every process, in the order of ranks."""
    if not is_distributed():
        return [data]
    parts = [data] * distributed.get_world_size()
    distributed.all_gather_object(parts, data)
    return parts


class CPUAgreement:
    """Numbers on which all processes agree, passed between CPUs: no GPU waits for them, though every update asks.

    Every process makes one, and asks as often as the others.

    Args:
        timeout_seconds: How long a process waits for the others.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._group = _cpu_group(distributed.group.WORLD, timeout_seconds) if is_distributed() else None

    def highest(self, number: int) -> int:
        """Return the highest number that a process has given."""
        return self.highest_each([number])[0]

    def highest_each(self, numbers: Sequence[int]) -> list[int]:
        """Return, place by place, the highest number that a process has given."""
        if self._group is None:
            return list(numbers)
        box = torch.tensor(numbers)
        distributed.all_reduce(box, op=distributed.ReduceOp.MAX, group=self._group)
        return [int(number) for number in box]


@functools.lru_cache(maxsize=1)
def _cpu_group(world: ProcessGroup, timeout_seconds: float) -> ProcessGroup:
    """Return a group of all processes on the CPU; one for all runs, as each has threads of its own."""
    timeout = datetime.timedelta(seconds=timeout_seconds)
    group: ProcessGroup = distributed.new_group(backend="gloo", timeout=timeout)
    return group


def broadcast_object(data: Object, source: int = 0) -> Object:
    """Return one process's object on every process."""
    if not is_distributed():
        return data
    box = [data]
    distributed.broadcast_object_list(box, src=source)
    return box[0]


def reduce(data: Nested, reduction: str = "sum", scale: float = 1.0) -> Nested:
    """Sum or average nested tensors over the processes. Mirrors `accelerate.utils.reduce`, 1.15."""

    def on_tensor(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone()
        distributed.all_reduce(total)
        if reduction == "mean":
            total = total / distributed.get_world_size()
        return total if scale == 1.0 else total * scale

    if is_distributed():
        return map_nested(on_tensor, data)
    return map_nested(lambda tensor: tensor * scale, data) if scale != 1.0 else data


def pad_across(data: Nested, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Nested:
    """Pad nested tensors to the longest of all processes in one dimension.

    Mirrors:
        `accelerate.utils.pad_across_processes`, 1.15.
    """
    if not is_distributed():
        return data

    def on_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if dim >= tensor.ndim or dim < -tensor.ndim:
            return tensor
        size = torch.tensor([tensor.shape[dim]], device=tensor.device)
        longest = int(_gather_tensor(size).max())
        if longest == tensor.shape[dim]:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = longest
        padded = tensor.new_full(shape, pad_index)
        start = longest - tensor.shape[dim] if pad_first else 0
        padded.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
        return padded

    return map_nested(on_tensor, data)


def agree(error: BaseException | None) -> None:
    """Wait for all processes, and raise on every one of them where one has failed.

    Args:
        error: What went wrong on this process, if anything.

    Raises:
        BaseException: This process's own error.
        ProcessError: Another process has failed; the message says which, and how.
    """
    failed = _failed_ranks(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        try:
            raise error
        finally:
            del error  # a frame that holds its own error keeps everything in it alive
    if failed:
        raise ProcessError("Another process of this run has failed.\n\n" + "\n".join(failed))


def _failed_ranks(text: str | None) -> list[str]:
    """Return `rank N: text` for each process that gives a text: what has gone wrong there."""
    return [f"rank {rank}: {told}" for rank, told in enumerate(gather_objects(text)) if told is not None]


@contextlib.contextmanager
def failing_together(kind: type[Exception], is_wanted: bool = True) -> Iterator[None]:
    """Let an error of one process be one of all: the same kind of error, so that all of them go on in the same way.

    Args:
        kind: The errors that are shared. One of another kind is raised by its own process only.
        is_wanted: Whether to wait for the other processes at all; the same on all of them.

    Raises:
        Exception: This process's own error, or one of `kind` that names the ranks that have failed.
    """
    failed: Exception | None = None
    try:
        yield
    except kind as error:
        failed = error
    ranks = _failed_ranks(None if failed is None else str(failed).partition("\n")[0]) if is_wanted else []
    if failed is not None:
        try:
            raise failed
        finally:
            del failed  # a frame that holds its own error keeps everything in it alive
    if ranks:
        raise kind("; ".join(ranks))
