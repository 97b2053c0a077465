"""Exchange tensors, objects and errors between the processes of a run.

In a run of one process every function returns that process's own data. `start_processes` or Lightning makes the
process group, whichever comes first. While all goes well, ranks agree by one small tensor (`highest_each`), whatever
their number. Texts are gathered after a failure only. An exchange that fails names the missing rank and its error. At
exit the process waits for Gloo's threads, because CPython before 3.14 aborts a process that ends before them
(pytorch/pytorch, issue 190489).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import hashlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar, cast

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from hf_compat.errors import ProcessError
from hf_compat.runtime.console import saying_what_is_awaited
from hf_compat.runtime.launch import environment, has_rendezvous, main_address
from hf_compat.runtime.nested import Nested, map_nested
from hf_compat.runtime.text import brief

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]

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
# torch before 2.13 has it under the other name
GATHER = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"

# How long the first process waits for a port that a job which has just ended still holds.
PORT_WAIT_SECONDS = 20.0
# How long a request for all ranks waits in the store, first and at most, before it is repeated.
_FIRST_PATIENCE, _MOST_PATIENCE = datetime.timedelta(seconds=0.1), datetime.timedelta(seconds=1)
# Sockets and files of a process that do not become more with the processes: listening, to the store, in a ring of them.
FEW_SOCKETS = 16
LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"  # its value is read when a group is made


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
        backend = args.ddp_backend or ("nccl" if on_gpu else "gloo")
        # Gloo connects every two processes. The first process has the store, unless the launcher has it
        holds_store = args.process_index == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        sockets = (args.world_size - 1) * ((backend == "gloo") + holds_store)
        check_descriptors(sockets + FEW_SOCKETS, args.world_size)
        address, port = main_address()
        told = f"rank {args.process_index} waits for the others of {args.world_size} processes at {address}:{port}"
        with saying_what_is_awaited(told, address):
            distributed.init_process_group(
                backend,
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
    _answer_all(store, args.world_size, own, asks, timeout)
    return PrefixStore(own, store)


def _answer_all(store: Store, world_size: int, own: str, asks: str, timeout: datetime.timedelta) -> None:
    """Tell every rank the name of this start. Each request is about all ranks, and waits in the store for them.

    What a rank asked in an earlier start is answered, too, until it has asked in this one.
    """
    others = range(1, world_size)
    asked, came = [asks.format(rank) for rank in others], [f"{own}/{rank}" for rank in others]
    give_up, patience = time.monotonic() + timeout.total_seconds(), _FIRST_PATIENCE
    while asked:
        with contextlib.suppress(distributed.DistStoreError):  # one of them has not come, or has not confirmed yet
            store.wait(asked, patience)
            names = [name.decode() for name in store.multi_get(asked)]
            store.multi_set(names, [own] * len(asked))  # type: ignore[attr-defined]  # torch's types lack it
            store.wait(came, patience)
            return
        if time.monotonic() > give_up:
            absent = [rank for rank, key in zip(others, came, strict=True) if not store.check([key])]
            raise TimeoutError(f"Ranks {absent} did not come within {timeout.total_seconds():g} s.")
        patience = min(2 * patience, _MOST_PATIENCE)


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
    joined = tensor.new_empty((distributed.get_world_size() * tensor.shape[0], *tensor.shape[1:]))
    getattr(distributed, GATHER)(joined, tensor)
    return joined


def gather_objects(data: Object) -> list[Object]:
    """List an object of every process, in the order of ranks."""
    if not is_distributed():
        return [data]
    parts = [data] * distributed.get_world_size()
    distributed.all_gather_object(parts, data)
    return parts


def gather_numbers(numbers: Sequence[float]) -> list[list[float]]:
    """List the numbers of every process, in the order of ranks. All have equally many, which are exchanged exactly."""
    if not is_distributed():
        return [list(numbers)]
    found: list[list[float]] = _rows(numbers, torch.float64).tolist()
    return found


def gather_rows(numbers: Sequence[int]) -> torch.Tensor:
    """Stack the whole numbers of every process, a row for each rank. All have equally many."""
    return _rows(numbers, torch.int64)


def _rows(numbers: Sequence[float], kind: torch.dtype) -> torch.Tensor:
    box = torch.tensor(numbers, dtype=kind, device=_device_of(distributed.group.WORLD) if is_distributed() else "cpu")
    return (_gather_tensor(box) if is_distributed() else box).reshape(-1, len(numbers))


def float_bits(number: float) -> int:
    """A number in float32, as the whole number that has its bits. Those exchange it beside other whole numbers."""
    return int(torch.tensor(number, dtype=torch.float32).view(torch.int32))


def sum_of_bits(numbers: torch.Tensor) -> float:
    """Add up such numbers in float32, as `transformers` does.

    Shapes:
        numbers: [ranks]
    """
    return float(numbers.cpu().to(torch.int32).view(torch.float32).sum())


def highest_each(numbers: Sequence[int]) -> list[int]:
    """The highest number that a process has given, place by place. All processes ask equally often, and for as many.

    One small tensor passes through the group that exists. Its result is read, so a GPU is waited for.
    """
    return _highest(numbers, None) if is_distributed() else list(numbers)


def highest_on_host(numbers: Sequence[int], timeout_seconds: float) -> list[int]:
    """The same between CPUs, for what every update asks: no GPU is waited for.

    Only where the processes' group knows no tensors of the CPU, as NCCL's, a second group is made at the first call.
    """
    if not is_distributed():
        return list(numbers)
    world = distributed.group.WORLD
    has_cpu = _device_of(world).type == "cpu"
    return _highest(numbers, None if has_cpu else _cpu_group(world, timeout_seconds))


def _highest(numbers: Sequence[int], group: ProcessGroup | None) -> list[int]:
    device = torch.device("cpu") if group is not None else _device_of(distributed.group.WORLD)
    box = torch.tensor(numbers, dtype=torch.int64, device=device)
    distributed.all_reduce(box, op=distributed.ReduceOp.MAX, group=group)
    found: list[int] = box.tolist()
    return found


@functools.lru_cache(maxsize=1)
def _device_of(world: ProcessGroup) -> torch.device:
    """A device whose tensors a group exchanges, the CPU if it can."""
    kinds = [torch.device(device).type for device in world._device_types]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


@functools.lru_cache(maxsize=1)
def _cpu_group(world: ProcessGroup, timeout_seconds: float) -> ProcessGroup:
    """Make a group of all processes on the CPU. All runs share it, as each has threads of its own.

    Gloo then connects a process only with those that it exchanges with, a few in a ring. Otherwise each process would
    have a socket to each other one.
    """
    check_descriptors(FEW_SOCKETS, distributed.get_world_size())
    timeout, before = datetime.timedelta(seconds=timeout_seconds), environment.get(LAZY_GLOO)
    environment[LAZY_GLOO] = "1"
    try:
        group: ProcessGroup = distributed.new_group(backend="gloo", timeout=timeout)
    finally:
        if before is None:
            del environment[LAZY_GLOO]
        else:
            environment[LAZY_GLOO] = before
    return group


def check_descriptors(sockets: int, processes: int) -> None:
    """Refuse to open more sockets than this process may have, before Gloo does, which aborts the process.

    Raises:
        ProcessError: `ulimit -n` is too low for the number of processes.
    """
    held = Path("/proc/self/fd")
    if resource is None or not held.is_dir():
        return
    most, open_now = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir(held))
    needed = open_now + sockets
    if most != resource.RLIM_INFINITY and needed > most:
        raise ProcessError(
            f"This process may have {most} files and sockets open (`ulimit -n`). To be one of {processes} processes it "
            f"needs {needed}: {open_now} are open, and {sockets} connect it with the others.\n\n"
            f"Hint: run `ulimit -n {2 ** (needed + FEW_SOCKETS).bit_length()}` before the launcher, on every machine."
        )


# What one process tells all others in a small tensor: text as numbers of so many bytes each, below the sign
_BYTES_OF_A_NUMBER = 7


def as_numbers(text: str | None, most_bytes: int) -> list[int]:
    """Write a text of at most so many bytes as numbers. None, of a process that tells none, gives zeros.

    `highest_each` of a text and zeros is the text.
    """
    count = -(-most_bytes // _BYTES_OF_A_NUMBER)
    content = ("" if text is None else text).encode(errors="surrogateescape")
    if len(content) > most_bytes:
        raise ProcessError(f"{brief(text)} has more than the {most_bytes} bytes that ranks exchange.")
    padded = content.ljust(count * _BYTES_OF_A_NUMBER, b"\0")
    starts = range(0, len(padded), _BYTES_OF_A_NUMBER)
    return [int.from_bytes(padded[start : start + _BYTES_OF_A_NUMBER], "big") for start in starts]


def as_text(numbers: Iterable[int]) -> str:
    """Read the text back."""
    content = b"".join(number.to_bytes(_BYTES_OF_A_NUMBER, "big") for number in numbers)
    return content.rstrip(b"\0").decode(errors="surrogateescape")


LONGEST_PATH = 4200  # bytes


def broadcast_text(text: str) -> str:
    """Give the first process's text, such as a path, to every process in one small tensor."""
    if not is_distributed():
        return text
    return as_text(highest_each(as_numbers(text if distributed.get_rank() == 0 else None, LONGEST_PATH)))


def bounds_of(text: str) -> list[int]:
    """Two numbers for a text. The highest that processes have for them cancel out if all texts are equal."""
    content = hashlib.sha256(text.encode(errors="surrogateescape")).digest()
    digest = int.from_bytes(content[:_BYTES_OF_A_NUMBER], "big")
    return [digest, -digest]


def are_equal(text: str, numbers: list[int] | None = None, before: Callable[[], object] | None = None) -> bool:
    """Whether every process has the same text. Its hash is exchanged, and `numbers` as by `failing_together`.

    An error of what a process does `before` is one of all.
    """
    told = [*bounds_of(text), *(numbers or ())]
    with failing_together(numbers=told):
        if before is not None:
            before()
    if numbers is not None:
        numbers[:] = told[2:]
    return told[0] == -told[1]


def broadcast_object(data: Object) -> Object:
    """Give the first process's object to every process."""
    if not is_distributed():
        return data
    box = [data]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def scatter_object(objects: list[Object] | None) -> Object:
    """Give every process the object at its place in the first process's list. Others give None."""
    if not is_distributed():
        assert objects is not None
        return objects[0]
    box: list[Object | None] = [None]
    distributed.scatter_object_list(box, objects, src=0)
    return cast(Object, box[0])


def raise_first(error: Exception | None) -> None:
    """Raise the first process's error on every process. The others' own do not count."""
    is_first = not is_distributed() or distributed.get_rank() == 0
    if highest_each([is_first and error is not None]) == [1]:
        told = broadcast_object(error)
        raise (error if is_first else told) or ProcessError("Rank 0 has failed.")


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


@dataclass(slots=True)
class Rows:
    """Whole numbers that every process tells all others. All have equally many."""

    own: list[int]
    of_all: torch.Tensor | None = None  # [ranks, numbers], once they are exchanged


@contextlib.contextmanager
def failing_together(
    kind: type[Exception] = Exception,
    is_wanted: bool = True,
    numbers: list[int] | None = None,
    rows: Rows | None = None,
) -> Iterator[None]:
    """Let an error of one process be one of all. At the end of the context each waits for the others.

    Args:
        kind: The errors that are shared. One of another kind is raised by its own process only.
        is_wanted: Whether to share errors at all; the same on all processes.
        numbers: Exchanged in the same tensor. Afterwards it has the highest of all processes, place by place.
        rows: Exchanged with them, in place of a maximum.

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
        mine = [failed is not None, *(numbers or ())]
        if rows is None:
            have_failed, *highest = highest_each(mine)
        else:
            told = gather_rows([*mine, *rows.own])
            have_failed, *highest = told[:, : len(mine)].amax(0).tolist()
            rows.of_all = told[:, len(mine) :]
        if numbers is not None:
            numbers[:] = highest
        if have_failed:
            _raise_shared(failed, kind)
    finally:
        del failed  # a frame that holds its own error keeps everything in it alive


def _raise_shared(failed: Exception | None, kind: type[Exception]) -> NoReturn:
    """Raise the error of this process, or one that says which others have failed. All processes call it."""
    text = None
    if failed is not None:
        text = f"{type(failed).__name__}: {failed}" if kind is Exception else str(failed).partition("\n")[0]
    told = [f"rank {rank}: {what}" for rank, what in enumerate(gather_objects(text)) if what is not None]
    try:
        if failed is not None:
            raise failed
        if kind is not Exception:
            raise kind("; ".join(told))
        raise ProcessError("Another process of this run has failed.\n\n" + "\n".join(told))
    finally:
        del failed


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
