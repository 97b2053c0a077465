"""The processes of a run in Accelerate's words, for its users and for libraries without a Trainer.

`accelerate.PartialState()` and `AcceleratorState()` are one object each in a process. They are filled here. Otherwise
Accelerate would look for devices and processes by itself, and make a second process group.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from hf_compat.hf.argument_values import options_of
from hf_compat.hf.value_types import ValueType, options_value, read_options, text_value
from hf_compat.runtime.collectives import GroupArguments, barrier, start_processes
from hf_compat.runtime.console import saying_what_is_awaited
from hf_compat.runtime.inspection import delegated
from hf_compat.runtime.launch import environment, is_launched, read_launch
from hf_compat.runtime.text import brief, need, parse_switch

if TYPE_CHECKING:
    from hf_compat.hf.fields import TrainingFields


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


# What makes a process group. Accelerate's state keeps it, and would keep arguments from being collected.
_GROUP = ("world_size", "process_index", "device", "ddp_backend", "ddp_timeout")


def share_processes(args: TrainingFields, distributed_type: str) -> ProcessState:
    """Fill `accelerate.PartialState()` from the arguments. Accelerate must be installed."""
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
        "wait_for_everyone": partial(
            wait_for_everyone, SimpleNamespace(**{name: getattr(args, name) for name in _GROUP})
        ),
    }
    was_initialised = state.is_initialized()
    state.PartialState._shared_state.update(found)
    if was_initialised:
        state.AcceleratorState._shared_state.update(found)
    shared: ProcessState = state.PartialState()  # Accelerate's has the same members
    return shared


def wait_for_everyone(args: GroupArguments) -> None:
    """Wait for the other processes, after joining their group."""
    start_processes(args)
    barrier()


def share_accelerator(mixed_precision: str, deepspeed_plugin: object | None = None) -> None:
    """Fill `AcceleratorState()`, as an Accelerator does."""
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


_SECTION = ValueType("a dict of options", lambda value: options_value.read(None if isinstance(value, str) else value))
# What transformers and our plan read of a DeepSpeed configuration, at any depth. Only sections may be None.
_OF_SECTIONS: dict[str, ValueType] = {
    **dict.fromkeys(("zero_optimization", "optimizer", "scheduler", "bf16", "fp16", "checkpoint"), _SECTION),
    **dict.fromkeys(("offload_optimizer", "offload_param"), _SECTION),
    **{"type": text_value, "device": text_value, "params": options_value},
}


def check_sections(config: Mapping[str, Any], owner: str = "deepspeed") -> None:
    """Refuse a DeepSpeed configuration with a section that is not a mapping."""
    for name, value in config.items():
        kind = _OF_SECTIONS.get(name)
        if kind is None or (kind is _SECTION and value is None):
            continue
        read_options(owner, {name: kind}, {name: value})
        if kind is _SECTION:
            check_sections(value, f"{owner}[{brief(name)}]")


def share_deepspeed(args: TrainingFields) -> None:
    """Tell transformers of DeepSpeed's configuration. For ZeRO 3 `from_pretrained` then makes models in parts.

    The processes find each other first, because models in parts take all of them. A launcher must have started them.

    Mirrors:
        `transformers.TrainingArguments.__post_init__`, its last part.
    """
    is_asked = (args.deepspeed or parse_switch(environment, "ACCELERATE_USE_DEEPSPEED")) and is_launched()
    if not is_asked or not all(map(importlib.util.find_spec, ("transformers", "accelerate", "deepspeed"))):
        return
    if args.deepspeed:
        given = options_of("deepspeed", args.deepspeed)
        check_sections(given)
        shared = importlib.import_module("transformers.integrations").HfTrainerDeepSpeedConfig(given)
        shared.trainer_config_process(args)
    else:
        plugin = importlib.import_module("accelerate.utils").DeepSpeedPlugin()
        plugin.set_mixed_precision(args.mixed_precision)
        plugin.set_deepspeed_weakref()
        shared = plugin.dschf
    if shared.is_zero3():
        start_processes(args)
        start_deepspeed(args.device)
    vars(args)["hf_deepspeed_config"] = shared  # transformers holds it weakly; `setattr` accepts fields only


def start_deepspeed(device: torch.device) -> None:
    """Let DeepSpeed use the process group. It makes one if there is none."""
    import deepspeed
    from torch.utils import cpp_extension

    if environment.get("LOCAL_RANK") is None:  # DeepSpeed reads it, and Slurm and MPI have other names
        launch = read_launch()
        environment["LOCAL_RANK"] = str(launch.local_process_index)
        environment["LOCAL_WORLD_SIZE"] = str(launch.local_world_size)
    # DeepSpeed compiles code on its first start. A build that was killed leaves a file, and torch waits for it forever
    root = Path(environment.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    told = (
        f"DeepSpeed waits for a build of its code in {root}. If no other process compiles there, a build was killed: "
        "remove the files named `lock` below this folder"
    )
    with saying_what_is_awaited(told, until=lambda: not any(root.glob("**/lock"))):
        deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False)


def of_accelerate(members: ProcessMembers, name: str) -> Callable[..., object]:
    """Bind a method of Accelerate's own `Accelerator` to an object of ours, which has the members that it uses.

    Raises:
        MissingPackage: Accelerate is not installed.
    """
    package = need("accelerate", "accelerate", f"`{name}`")
    if not has_state():
        share_processes(members._args, members.distributed_type)
    if name == "split_between_processes":  # it needs the process group
        start_processes(members._args)
    method: Callable[..., object] = inspect.getattr_static(package.Accelerator, name).__get__(members)
    return method


class OfAccelerate:
    """A method of Accelerate's own `Accelerator`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, members: ProcessMembers | None, owner: type) -> object:
        return self if members is None else of_accelerate(members, self._name)


class ProcessMembers:
    """The members about processes that Accelerate's state and its Accelerator share.

    Mirrors:
        `accelerate.PartialState`, 1.15.
    """

    _args: TrainingFields
    distributed_type: Any  # a text, or a member of Accelerate's enum

    device: torch.device = delegated("_args.device")
    num_processes: int = delegated("_args.world_size")
    process_index: int = delegated("_args.process_index")
    local_process_index: int = delegated("_args.local_process_index")

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

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print on the first process of each machine, with the arguments of Python's `print`."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 - what the script prints

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process run the block before the others."""
        return self._args.main_process_first(local=False)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each machine run the block before the others."""
        return self._args.main_process_first()


for _name in (
    *("on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process"),
    "split_between_processes",
):
    setattr(ProcessMembers, _name, OfAccelerate(_name))


class ProcessState(ProcessMembers):
    """The processes of a run, as `args.distributed_state`. Mirrors `accelerate.PartialState`, 1.15."""

    debug = fork_launched = False
    initialized = True

    def __init__(self, args: TrainingFields) -> None:
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
