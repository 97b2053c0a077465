"""A device that is not there: tensors that say `cuda:0` on a CPU build of torch, and behave as on a GPU.

    with pretended_device() as machine:             # or ("cuda", count=4), ("mps"), ("xpu")
        trainer.train()
    machine.count                                   # {"kernels": …, "h2d": …, "wait:item": …}
    machine.where                                   # who waited: Counter of "kind file:line"
    machine.peak_memory(0)                          # bytes of live tensors, at most

Tensors compute on the CPU and refuse to mix with those of another device (`tensors.py`). A non-blocking copy is not
there before it was waited for, and a kernel that reads what an unfinished stream writes is a race (`streams.py`). Each
device draws from a generator of its own, whose state is a GPU's (`randomness.py`). What is saved comes back on the
device that it was saved from (`serialization.py`). Memory is that of live tensors (`machine.py`).

What it cannot show: speed, the rounding and order of a GPU's kernels, collectives between devices, compiled code.
"""

from helpers.pretended.face import pretended_device
from helpers.pretended.machine import Machine, RaceError
from helpers.pretended.tensors import DeviceTensor

__all__ = ["DeviceTensor", "Machine", "RaceError", "pretended_device"]
