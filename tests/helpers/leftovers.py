"""What a call of `train` may leave behind in its process: a picture of it before, and what is more afterwards."""

from __future__ import annotations

import atexit
import collections
import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path

import torch
from torch import nn

SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "SIGCHLD")
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# What a monkey patch would change: the attributes of these are compared by identity.
PATCHABLE = (
    "builtins",
    "signal",
    "torch.nn.modules.module:Module",
    "torch.optim:Optimizer",
    "torch.optim:AdamW",
    "torch.optim.lr_scheduler:LRScheduler",
    "torch.utils.data:DataLoader",
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "torch:Tensor",
    "torch.autograd",
    "lightning.pytorch:Trainer",
    "lightning.pytorch:LightningModule",
    "lightning.pytorch.trainer.call",
    "lightning.pytorch.loops.fit_loop:_FitLoop",
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop",
    "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop",
    "tqdm.auto:tqdm",
    "hf_compat:Trainer",
    "hf_compat.engine.module:WindowModule",
    "hf_compat.checkpoint.manifest",
)


def children() -> list[str]:
    """Return the processes that this one has started and that still run."""
    multiprocessing.active_children()  # those that have ended are waited for
    found, numbers = [], []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            numbers += (task / "children").read_text().split()
    for number in numbers:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "resource_tracker" not in command:  # Python's own; it stays until the process ends
                found.append(command.strip())
    return found


def descriptors() -> list[str]:
    """Return what this process holds open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # the listing's own
            continue
        found.append(target.split(":")[0] if ":[" in target else target)
    return found


def temporary_files() -> list[str]:
    places = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    mine = f"torch_{os.getpid()}"
    return [
        str(path)
        for place in places
        if place.is_dir()
        for path in place.iterdir()
        if place != places[1] or path.name.startswith(mine)
    ]


def bars() -> list[str]:
    from tqdm import tqdm

    return [str(getattr(bar, "desc", bar)) for bar in getattr(tqdm, "_instances", ())]


def flags() -> dict[str, object]:
    """Return torch's settings of the whole process."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic, warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "matmul precision": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "saved tensors' hooks": bool(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        "module hooks": len(nn.modules.module._global_forward_hooks)
        + len(nn.modules.module._global_forward_pre_hooks)
        + len(nn.modules.module._global_backward_hooks),
        "warning filters": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "excepthook": sys.excepthook,
        "threads' excepthook": threading.excepthook,
        "streams": (sys.stdout, sys.stderr),
        "exit functions": atexit._ncallbacks(),
        "working directory": os.getcwd(),
        "logging disabled": logging.root.manager.disable,
        "audit": sys.getswitchinterval(),
        "recursion": sys.getrecursionlimit(),
        "umask": _umask(),
    }


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def loggers() -> dict[str, object]:
    named = {name: one for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)}
    return {
        name: (list(one.handlers), one.level, list(one.filters), one.propagate, one.disabled)
        for name, one in {"root": logging.root, **named}.items()
        if one.handlers or one.level or one.filters or not one.propagate or one.disabled
    }


def handlers() -> dict[str, object]:
    return {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}


def patches() -> dict[str, object]:
    found = {}
    for place in PATCHABLE:
        module, _, name = place.partition(":")
        target = importlib.import_module(module)
        target = getattr(target, name) if name else target
        for attribute, value in vars(target).items():
            if callable(value) or isinstance(value, (property, staticmethod, classmethod)):
                found[f"{place}.{attribute}"] = value
    return found


def hooks(model: nn.Module) -> list[str]:
    """Return the hooks on a model, its parameters, and methods that stand in the instance."""
    found = []
    for name, module in model.named_modules():
        found += [f"{name}.{kind}" for kind in HOOKS if getattr(module, kind, None)]
        found += [f"{name}.{attribute} replaced" for attribute in ("forward", "__call__") if attribute in vars(module)]
    for name, parameter in model.named_parameters():
        found += [f"{name}.hooks"] * bool(parameter._backward_hooks)
        found += [f"{name}.hooks after the gradient"] * bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
    return found


def holders_of_shared_tensors(most: int = 3, longest: int = 12) -> list[str]:
    """Say what keeps tensors of loader workers alive: each with the chain of what refers to it."""
    objects = gc.get_objects()
    shared = [one for one in objects if type(one) is torch.Tensor and one.device.type == "cpu" and one.is_shared()]
    seen = {id(objects), id(shared)}
    del objects
    return [" <- ".join(_chain(tensor, longest, seen)) for tensor in shared[:most]]


def _chain(held: object, longest: int, seen: set[int]) -> list[str]:
    """Follow the first referrer of each object, but for those of this search."""
    chain: list[str] = []
    seen = {*seen, id(sys._getframe()), id(sys._getframe(1)), id(sys._getframe(2))}
    while len(chain) < longest:
        chain.append(_name_of(held))
        seen.add(id(held))
        referrers = [one for one in gc.get_referrers(held) if id(one) not in seen and one is not chain]
        referrers = [
            one for one in referrers if not isinstance(one, types.FrameType) or one.f_code.co_filename != __file__
        ]
        seen.add(id(referrers))
        if not referrers:
            break
        held = referrers[0]
    return chain


def _is_of_this_search(held: object) -> bool:
    return isinstance(held, types.FrameType) and held.f_code.co_filename == __file__


def _name_of(held: object) -> str:
    if isinstance(held, types.FrameType):
        return f"{held.f_code.co_qualname}:{held.f_lineno}"
    if isinstance(held, dict):
        return f"dict({', '.join(map(str, list(held)[:4]))})"
    return type(held).__qualname__


class Picture:
    """What this process holds now."""

    def __init__(self) -> None:
        gc.collect()
        self.lists = {
            "thread": [thread.name for thread in threading.enumerate()],
            "process": children(),
            "descriptor": descriptors(),
            "temporary file": temporary_files(),
            "progress bar": bars(),
        }
        self.values = {
            "flag": flags(),
            "logger": loggers(),
            "signal handler": handlers(),
            "patch": patches(),
            "environment": dict(os.environ),
        }

    def left_since(self, before: Picture) -> list[str]:
        """Name what is here and was not there, or has changed."""
        found = []
        for kind, now in self.lists.items():
            more = collections.Counter(now) - collections.Counter(before.lists[kind])
            found += [f"{kind} {name!r}" for name in more.elements()]
        for kind, now in self.values.items():
            then = before.values[kind]
            found += [
                f"{kind} {name!r}: {then.get(name)!r} → {now.get(name)!r}"
                for name in {**then, **now}
                if not _is_same(then.get(name), now.get(name))
            ]
        return found


def _is_same(left: object, right: object) -> bool:
    return left is right or left == right
