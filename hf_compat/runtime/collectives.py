"""Exchange tensors, objects and errors between the processes of a run.

In a run of one process every function returns that process's own data. `start_processes` or Lightning makes the
process group, whichever comes first. An exchange that fails names the missing rank and its error. At exit the process
waits for Gloo's threads, because CPython before 3.14 aborts a process that ends before them (pytorch/pytorch, issue
190489).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from hf_compat.errors import ProcessError
from hf_compat.runtime.console import saying_what_is_awaited
from hf_compat.runtime.launch import has_rendezvous, main_address
from hf_compat.runtime.nested import Nested, map_nested

GIVE_UP_SECONDS = 5.0


@functools.cache
def leave_at_exit() -> None:
    """Wait for Gloo's threads when the process ends. A second call does nothing.

    Exit handlers run in reverse order: a later one, such as that of `destroy_at_exit`, runs before the wait.
    """
    atexit.register(wait_for_gloo)


def destroy_at_exit() -> None:
    """Destroy this process's group at exit if it still exists then."""
    leave_at_exit()
    atexit.register(lambda: distributed.destroy_process_group() if distributed.is_initialized() else None)


def wait_for_gloo() -> None:
    """Wait until Gloo's threads sleep, at most 5 seconds. Their memory is free then."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():  # only Linux shows the state of a thread
        time.sleep(0.05)
        return
    give_up, looks = time.monotonic() + GIVE_UP_SECONDS, 0
    # A thread that waits for Python wakes as soon as this one sleeps, and then counts as awake. Three looks in a
    # row also see threads that wait one behind the other.
    while looks < 3 and time.monotonic() < give_up:
        time.sleep(0.001)
        # The state letter of each of Gloo's threads, as `/proc` gives it; a thread that has just ended has none
        states = []
        for task in tasks.iterdir():
            try:
                name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if name == "pt_gloo_runloop":
                states.append(rest.split()[0])
        looks = 0 if any(state != "S" for state in states) else looks + 1


Object = TypeVar("Object")

# How long the first process waits for a port that a job which has just ended still holds.
PORT_WAIT_SECONDS = 20.0


class GroupArguments(Protocol):
    """The training arguments that a process group is made from."""

    ddp_backend: str | None
    ddp_timeout: int

    @property
    def world_size(self) -> int: ...

    @property
    def process_index(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


def is_distributed() -> bool:
    """Whether several processes train together and have a process group."""
    return distributed.is_initialized() and distributed.get_world_size() > 1


def start_processes(args: GroupArguments) -> None:
    """Join the process group that the launcher has prepared. One process, or a second call, does nothing."""
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
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_seconds), group)


def _rendezvous_store(args: GroupArguments, timeout: datetime.timedelta) -> Store:
    """Make the store through which the processes find each other, with keys that belong to this start alone.

    torch's elastic launcher keeps its store when it restarts processes, and it still holds the last start's addresses.
    Launchers on several machines count restarts differently: a machine that came later begins at 0. So the first
    process draws a name for this start. It answers every process that asks, until each has confirmed this very name.
    """
    address, port = main_address()
    method = "env://" if has_rendezvous() else f"tcp://{address}:{port}"
    give_up = time.monotonic() + PORT_WAIT_SECONDS
    while True:  # the last start may still hold the port
        try:
            store, _, _ = next(rendezvous(method, rank=args.process_index, world_size=args.world_size, timeout=timeout))
            break
        except distributed.DistNetworkError as error:
            if "EADDRINUSE" not in str(error) or time.monotonic() > give_up:
                raise
            time.sleep(0.5)
    store.set_timeout(timeout)
    own = uuid.uuid4().hex
    asks = "hf_compat/asks_{}"
    if args.process_index > 0:
        store.set(asks.format(args.process_index), own)  # replaces what this rank asked in an earlier start
        name = store.get(own).decode()
        store.set(f"{name}/{args.process_index}", "")
        return PrefixStore(name, store)
    give_up = time.monotonic() + timeout.total_seconds()
    absent = set(range(1, args.world_size))
    while absent:
        for rank in absent:
            if store.check([asks.format(rank)]):
                store.set(store.get(asks.format(rank)).decode(), own)
        absent = {rank for rank in absent if not store.check([f"{own}/{rank}"])}
        if time.monotonic() > give_up:
            raise TimeoutError(f"Ranks {sorted(absent)} did not come within {timeout.total_seconds():g} s.")
        time.sleep(0.02 if absent else 0)
    return PrefixStore(own, store)


def barrier() -> None:
    """Wait for all processes."""
    if is_distributed():
        distributed.barrier()


def gather(tensor: Nested) -> Nested:
    """Join nested tensors of all processes along their first dimension, in the order of ranks.

    Shapes:
        each tensor: [n, …] on every process → [world_size · n, …]; a scalar → [world_size]

    Mirrors:
        `accelerate.utils.gather`, 1.15.
    """
    if not is_distributed():
        return tensor
    return map_nested(_gather_tensor, tensor)


def _gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = (tensor.reshape(1) if tensor.ndim == 0 else tensor).contiguous()
    parts = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, tensor)
    return torch.cat(parts)


def gather_objects(data: Object) -> list[Object]:
    """List an object of every process, in the order of ranks."""
    if not is_distributed():
        return [data]
    parts = [data] * distributed.get_world_size()
    distributed.all_gather_object(parts, data)
    return parts


def highest_each(numbers: Sequence[int], timeout_seconds: float) -> list[int]:
    """The highest number that a process has given, place by place. All processes ask equally often.

    The numbers pass between CPUs: no GPU waits for them, though every update may ask.
    """
    if not is_distributed():
        return list(numbers)
    box = torch.tensor(numbers)
    distributed.all_reduce(box, op=distributed.ReduceOp.MAX, group=_cpu_group(distributed.group.WORLD, timeout_seconds))
    return [int(number) for number in box]


@functools.lru_cache(maxsize=1)
def _cpu_group(world: ProcessGroup, timeout_seconds: float) -> ProcessGroup:
    """Make a group of all processes on the CPU. All runs share it, as each has threads of its own."""
    timeout = datetime.timedelta(seconds=timeout_seconds)
    group: ProcessGroup = distributed.new_group(backend="gloo", timeout=timeout)
    return group


def broadcast_object(data: Object) -> Object:
    """Give the first process's object to every process."""
    if not is_distributed():
        return data
    box = [data]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def reduce(tensor: Nested, reduction: str = "sum", scale: float = 1.0) -> Nested:
    """Sum or average nested tensors over the processes. Mirrors `accelerate.utils.reduce`, 1.15."""

    def on_tensor(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone()
        distributed.all_reduce(total)
        if reduction == "mean":
            total = total / distributed.get_world_size()
        return total if scale == 1.0 else total * scale

    if is_distributed():
        return map_nested(on_tensor, tensor)
    return map_nested(lambda part: part * scale, tensor) if scale != 1.0 else tensor


def pad_across(tensor: Nested, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Nested:
    """Pad nested tensors to the longest of all processes in one dimension.

    Mirrors:
        `accelerate.utils.pad_across_processes`, 1.15.
    """
    if not is_distributed():
        return tensor

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

    return map_nested(on_tensor, tensor)


@contextlib.contextmanager
def failing_together(kind: type[Exception] = Exception, is_wanted: bool = True) -> Iterator[None]:
    """Let an error of one process be one of all. At the end of the context each waits for the others.

    Args:
        kind: The errors that are shared. One of another kind is raised by its own process only.
        is_wanted: Whether to share errors at all; the same on all processes.

    Raises:
        Exception: This process's own error. If only others have failed, one of `kind` that names their ranks.
        ProcessError: The same, with any kind of error. It names the classes of the errors, too.
    """
    failed: Exception | None = None
    is_shared = is_wanted and is_distributed()
    try:
        yield
    except kind as error:
        if not is_shared:
            raise
        failed = error
    if not is_shared:
        return
    try:
        text = None
        if failed is not None:
            text = f"{type(failed).__name__}: {failed}" if kind is Exception else str(failed).partition("\n")[0]
        told = [f"rank {rank}: {what}" for rank, what in enumerate(gather_objects(text)) if what is not None]
        if failed is not None:
            raise failed
        if told and kind is not Exception:
            raise kind("; ".join(told))
        if told:
            raise ProcessError("Another process of this run has failed.\n\n" + "\n".join(told))
    finally:
        del failed  # a frame that holds its own error keeps everything in it alive


# Ranks give up waiting at moments that lie apart, and the store may be gone with the rank that held it.
PATIENCE_SECONDS = 5.0
_SECONDS_BETWEEN = 0.05
# What Gloo and NCCL say when a rank is gone, and when it does not answer.
_GONE = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "remote process exited",
    "pair closure",
)
_SILENT = ("Timed out", "timeout", "Timeout", "pair closure")
_BACKENDS = ("gloo", "NCCL", "ProcessGroup", "Socket", "pair closure")
_FAILED_AFTER_ANOTHER = "-"
# Where a rank leaves its error of a constructor, which need not be called on every rank.
_CONSTRUCTOR = "constructor"

_calls = itertools.count()


@contextlib.contextmanager
def naming_absent_ranks() -> Iterator[None]:
    """Turn the failure of an exchange within this context into an error that names the rank that was missing.

    Every process enters it as often as the others. A process that has an error of its own tells the others.

    Raises:
        ProcessError: Another process has failed, has gone, or does not answer; the message says which, and why if that
            is known.
    """
    if not is_distributed():
        yield
        return
    call = next(_calls)
    try:
        yield
    except BaseException as error:
        if not is_failed_exchange(error):
            _leave(call, f"{type(error).__name__}: {error}")
            raise
        _leave(call, _FAILED_AFTER_ANOTHER)
        reasons = _reasons(call, error)
        if not reasons:
            raise
        raise ProcessError("Another process of this run has failed.\n\n" + "\n".join(reasons)) from error


@contextlib.contextmanager
def telling_of_failure() -> Iterator[None]:
    """Tell the other ranks of an error within this context, where they wait for this rank later.

    No process waits here: one that calls a constructor may be the only one that does.
    """
    try:
        yield
    except BaseException as error:
        if is_distributed():
            _leave(_CONSTRUCTOR, f"{type(error).__name__}: {error}")
        raise


def is_failed_exchange(error: BaseException) -> bool:
    """Whether an error says that an exchange between processes did not come about."""
    if isinstance(error, distributed.DistError):
        return True
    text = str(error)
    speaks_of_it = any(word in text for word in (*_GONE, *_SILENT)) and any(word in text for word in _BACKENDS)
    return (isinstance(error, RuntimeError) and speaks_of_it) or (
        error.__cause__ is not None and is_failed_exchange(error.__cause__)
    )


def _key(call: int | str, rank: int) -> str:
    """Where a rank leaves a word for the others during a call of all of them, or in its constructor."""
    return f"hf_compat/ended/{call}/{rank}"


def _leave(call: int | str, word: str) -> None:
    """Tell the others, if they can be reached."""
    _in_time(lambda store: store.set(_key(call, distributed.get_rank()), word))


def _reasons(call: int, error: BaseException) -> list[str]:
    """Give a line for each other rank that did not merely fail after another. Wait for their words."""
    own, size = distributed.get_rank(), distributed.get_world_size()
    words: dict[int, str | None] = {rank: None for rank in range(size) if rank != own}

    def look(store: Store, place: int | str) -> None:
        for rank in [rank for rank, word in words.items() if word is None]:
            if store.check([_key(place, rank)]):
                words[rank] = store.get(_key(place, rank)).decode(errors="replace")

    def collect(store: Store) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while None in words.values() and time.monotonic() < until:
            look(store, call)
            time.sleep(_SECONDS_BETWEEN)
        look(store, _CONSTRUCTOR)

    _in_time(collect)
    text = str(error)
    # Gloo closes a connection itself when no answer comes: "Application timeout caused pair closure"
    silence = "does not answer: it hangs, is stopped, or does something else than the others; `ddp_timeout` has passed"
    if any(word in text for word in _GONE) and "imeout" not in text:
        silence = "has gone without an error: it was killed, or left by itself"
    told = {rank: silence if word is None else word for rank, word in dict(words).items()}
    return [f"rank {rank}: {word}" for rank, word in told.items() if word != _FAILED_AFTER_ANOTHER]


def _in_time(ask: Callable[[Store], object]) -> None:
    """Ask the store in a thread of its own: one whose process is stopped never answers."""
    store = _get_default_store()

    def quietly() -> None:
        # it is gone with the process that held it; who asks finds no answer, and says so
        with contextlib.suppress(RuntimeError):
            ask(store)

    thread = threading.Thread(target=quietly, name="hf_compat-store", daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS + 1.0)
