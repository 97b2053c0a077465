"""What the processes of a run say to each other. HF words and torch.distributed only.

Everything here is a question to one process where there is one. Lightning's strategies use the same process group: it
is started by whoever comes first (`start_processes`), and Lightning takes one that is there.
"""

from __future__ import annotations

import atexit
import datetime
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from hf_compat.errors import ProcessError
from hf_compat.runtime.launch import has_rendezvous, main_address, variable
from hf_compat.runtime.nested import map_nested


def is_distributed() -> bool:
    """Say whether several processes train together, and can talk."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def start_processes(args: Any) -> None:
    """Join the process group that the launcher has prepared; nothing happens in one process, or a second time.

    Args:
        args: The training arguments: `world_size`, `device`, `ddp_backend`, `ddp_timeout` are read.
    """
    if args.world_size <= 1 or distributed.is_initialized():
        return
    on_gpu = args.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(args.device)
    backend = args.ddp_backend or ("nccl" if on_gpu else "gloo")
    timeout = datetime.timedelta(seconds=args.ddp_timeout)
    distributed.init_process_group(
        backend,
        store=_meeting_place(args, timeout),
        rank=args.process_index,
        world_size=args.world_size,
        timeout=timeout,
    )
    atexit.register(_leave)


def _meeting_place(args: Any, timeout: datetime.timedelta) -> Any:
    """Return the store through which the processes find each other, another one at each start.

    torch's elastic launcher keeps its store when it starts processes again; addresses of the last start lie there.
    """
    address, port = main_address()
    method = "env://" if has_rendezvous() else f"tcp://{address}:{port}"
    found = rendezvous(method, rank=args.process_index, world_size=args.world_size, timeout=timeout)
    store, _, _ = next(found)
    store.set_timeout(timeout)
    return PrefixStore(f"hf_compat/start_{variable('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def barrier() -> None:
    """Wait for all processes."""
    if is_distributed():
        distributed.barrier()


def gather(data: Any) -> Any:
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


def gather_objects(data: Any) -> list[Any]:
    """Return an object of every process, in the order of ranks."""
    if not is_distributed():
        return [data]
    parts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, data)
    return parts


class CPUAgreement:
    """A number on which all processes agree, passed between CPUs: asking in every update leaves GPUs undisturbed.

    Every process has to make one, and to ask as often as the others.
    """

    def __init__(self) -> None:
        self._group = distributed.new_group(backend="gloo") if is_distributed() else None

    def highest(self, number: int) -> int:
        """Return the highest number that a process has given."""
        if self._group is None:
            return number
        box = torch.tensor(number)
        distributed.all_reduce(box, op=distributed.ReduceOp.MAX, group=self._group)
        return int(box)


def broadcast_object(data: Any, source: int = 0) -> Any:
    """Return what one process has, on all."""
    if not is_distributed():
        return data
    box = [data]
    distributed.broadcast_object_list(box, src=source)
    return box[0]


def reduce(data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    """Sum or average nested tensors over the processes. Mirrors `accelerate.utils.reduce`, 1.15."""
    if not is_distributed():
        return map_nested(lambda tensor: tensor * scale, data) if scale != 1.0 else data

    def one(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone()
        distributed.all_reduce(total)
        if reduction == "mean":
            total = total / distributed.get_world_size()
        return total if scale == 1.0 else total * scale

    return map_nested(one, data)


def pad_across(data: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad nested tensors to the longest of all processes in one dimension.

    Mirrors:
        `accelerate.utils.pad_across_processes`, 1.15.
    """
    if not is_distributed():
        return data

    def one(tensor: torch.Tensor) -> torch.Tensor:
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

    return map_nested(one, data)


def agree(error: BaseException | None) -> None:
    """Wait for all processes, and raise on every one of them where one has failed.

    Args:
        error: What went wrong on this process, if anything.

    Raises:
        BaseException: This process's own error.
        ProcessError: Another process has failed; the message says which, and how.
    """
    failed = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        try:
            raise error
        finally:
            del error  # a frame that holds its own error keeps everything in it alive
    others = [f"rank {rank}: {text}" for rank, text in enumerate(failed) if text is not None]
    if others:
        raise ProcessError("Another process of this run has failed.\n\n" + "\n".join(others))
