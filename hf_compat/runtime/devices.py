"""The accelerator of this process: which one it is, and the memory that torch caches there."""

from __future__ import annotations

import torch

from hf_compat.errors import ArgumentError
from hf_compat.runtime.launch import Launch, assumed_device, environment
from hf_compat.runtime.text import parse_switch


def choose_device(use_cpu: bool, launch: Launch) -> torch.device:
    """Choose this process's single device: its own CUDA device, Apple's, or the CPU.

    A process that sees fewer GPUs than its number among the machine's takes the remainder, as under Accelerate: a
    launcher may show each process one GPU. Where each pod has one, nothing need say a rank on the machine.

    Raises:
        ArgumentError: There is an accelerator that Lightning does not know, or nothing says which of several GPUs.
    """
    assumed = assumed_device()
    if assumed is not None:
        return torch.device("cpu" if use_cpu else assumed)
    if use_cpu or parse_switch(environment, "ACCELERATE_USE_CPU"):
        return torch.device("cpu")
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if launch.unsaid and gpus > 1:
            raise ArgumentError(
                f"This is rank {launch.process_index} of {launch.world_size} and sees {gpus} GPUs; "
                f"`{launch.unsaid}`, which would say which of them is its own, is not set.\n\n"
                f"Hint: set `{launch.unsaid}` to the process's number on its machine; or let "
                "`hf-compat run --devices N` or torchrun start the processes of a machine."
            )
        return torch.device("cuda", launch.local_process_index % max(gpus, 1))
    if torch.backends.mps.is_available():
        if launch.world_size > 1:
            raise ArgumentError(
                f"This is rank {launch.process_index} of {launch.world_size}, and torch has no process group for "
                "Apple's GPU.\n\nHint: start one process, or set `use_cpu=True`."
            )
        return torch.device("mps")
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None:
        raise ArgumentError(
            f"torch finds an accelerator of type '{other.type}', which Lightning does not train on; transformers does."
            "\n\nHint: set `use_cpu=True` to train on the CPU."
        )
    return torch.device("cpu")


def empty_device_cache() -> None:
    """Give memory that torch caches on this machine's accelerator back to the system.

    Mirrors:
        `accelerate.utils.memory.clear_device_cache`, 1.15.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
        if hasattr(torch.mps, "clear_graph_cache"):  # as `transformers.Trainer.training_step`
            torch.mps.clear_graph_cache()
