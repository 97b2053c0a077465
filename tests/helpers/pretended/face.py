"""What `torch.cuda`, `torch.accelerator` and torch's own questions about devices answer while a device is pretended."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import platform
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # while no device is there: it looks for what only a build with one has
from lightning.fabric.accelerators import CUDAAccelerator, MPSAccelerator

from helpers.pretended import serialization, tensors
from helpers.pretended.machine import Machine, RaceError
from helpers.pretended.randomness import Generators
from helpers.pretended.streams import Event, Stream
from helpers.pretended.tensors import DeviceTensor, Kernels
from hf_compat.runtime import device_copies as frozen_copies

Answers = dict[str, Any]
TOTAL_MEMORY = 80 << 30


class Properties:
    """What a device says of itself."""

    name, major, minor = "Pretended device", 9, 0
    total_memory, multi_processor_count, gcnArchName, uuid = TOTAL_MEMORY, 132, "", "0"  # noqa: N815 - torch's name


class InDevice:
    """`torch.cuda.device(…)` as a context."""

    def __init__(self, machine: Machine, device: Any) -> None:
        self.machine, self.index = machine, machine.index_of(device)

    def __enter__(self) -> None:
        self.before = self.machine.current
        if self.index is not None:
            self.machine.current = self.index

    def __exit__(self, *_: object) -> None:
        self.machine.current = self.before


def _module(machine: Machine, generators: Generators) -> Answers:
    """`torch.cuda` and its like."""

    def at(device: Any = None) -> int:
        index = machine.current if device is None else machine.index_of(device)
        if index is None:
            raise ValueError(f"Expected a {machine.kind} device, but got: {device}")
        return index

    def set_device(device: Any) -> None:
        machine.current = at(device)

    def synchronize(device: Any = None) -> None:
        machine.wait("synchronize")
        machine.finish({stream: stream.number for stream in _streams(machine)})

    def empty_cache() -> None:
        machine.wait("empty_cache")  # the driver frees memory when all work is done
        machine.calls.append("empty_cache")

    def manual_seed_all(seed: int) -> None:
        for index in range(machine.devices):
            generators.seed(index, seed)

    class NewStream(Stream):
        def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
            super().__init__(machine, at(device))
            _streams(machine).append(self)

    class NewEvent(Event):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(machine)

    def set_states(states: Any) -> None:
        for index, state in enumerate(states):
            generators.set_state(index, state)

    def stats(device: Any = None) -> dict[str, int]:
        used, peak = machine.memory(at(device)), machine.peak_memory(at(device))
        return {"allocated_bytes.all.current": used, "allocated_bytes.all.peak": peak}

    return {
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: machine.devices,
        "current_device": lambda: machine.current,
        "set_device": set_device,
        "get_device_name": lambda *_: Properties.name,
        "get_device_properties": lambda *_: Properties,
        "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": synchronize,
        "empty_cache": empty_cache,
        "ipc_collect": lambda: None,
        "current_stream": lambda device=None: machine.current_stream(at(device)),
        "default_stream": lambda device=None: machine.default_stream(at(device)),
        "set_stream": machine.set_stream,
        "Stream": NewStream,
        "Event": NewEvent,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "device": lambda device: InDevice(machine, device),
        "manual_seed": lambda seed: generators.seed(machine.current, seed),
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: generators.states[machine.current][0],
        "get_rng_state": lambda device=None: generators.state(at(device)),
        "get_rng_state_all": lambda: [generators.state(index) for index in range(machine.devices)],
        "set_rng_state": lambda state, device=None: generators.set_state(at(device), state),
        "set_rng_state_all": set_states,
        "memory_stats": stats,
        "mem_get_info": lambda device=None: (TOTAL_MEMORY - machine.memory(at(device)), TOTAL_MEMORY),
        "memory_allocated": lambda device=None: machine.memory(at(device)),
        "memory_reserved": lambda device=None: machine.memory(at(device)),
        "max_memory_allocated": lambda device=None: machine.peak_memory(at(device)),
        "max_memory_reserved": lambda device=None: machine.peak_memory(at(device)),
        "reset_peak_memory_stats": lambda device=None: machine.reset_peak_memory(at(device)),
        "reset_max_memory_allocated": lambda device=None: machine.reset_peak_memory(at(device)),
        "is_current_stream_capturing": lambda: False,
        "current_allocated_memory": lambda: machine.memory(0),  # this and the next are names of MPS
        "clear_graph_cache": lambda: machine.calls.append("clear_graph_cache"),
    }  # fmt: skip


def _streams(machine: Machine) -> list[Stream]:
    return machine.__dict__.setdefault("_made", list(machine._defaults))


def _autocast(kind: str) -> Answers:
    """The autocast of the device is the CPU's: to torch's C++ the tensors are there."""

    def of_cpu(name: str) -> Callable[..., Any]:
        original = getattr(torch, name)

        def answer(*args: Any) -> Any:
            if args and args[0] == kind:
                return original("cpu", *args[1:])
            return original(*args) if args else original("cpu")

        return answer

    names = ("set_autocast_enabled", "set_autocast_dtype", "get_autocast_dtype", "is_autocast_enabled")
    return {name: of_cpu(name) for name in names} | {"is_autocast_available": lambda _: True}


def _factories(machine: Machine) -> Answers:
    """Those that torch's C++ fills on the host, and then moves by itself."""

    def made(name: str) -> Callable[..., torch.Tensor]:
        original = getattr(torch, name)

        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device")
            if device is None and args and isinstance(args[0], torch.Tensor):
                return original(*args, **kwargs)
            device = _default_device() if device is None else device
            index = machine.index_of(device)
            if args and isinstance(args[0], DeviceTensor) and name in ("as_tensor", "asarray"):
                dtype = kwargs.get("dtype") or args[0].dtype
                return args[0].to(device, dtype)
            if index is None:
                return original(*args, **kwargs)
            needs_grad = kwargs.pop("requires_grad", False)
            pageable = original(*args, **{**kwargs, "device": "cpu"})
            return tensors.move(pageable, index).requires_grad_(needs_grad)

        return make

    names = {one.__name__ for one in torch.utils._device._device_constructors() if hasattr(torch, one.__name__)}
    names |= {f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
    moved = {name: made(name) for name in ("tensor", "as_tensor", "asarray")}
    return {**{name: _asking(getattr(torch, name)) for name in names}, **moved}


def _asking(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors.asked.is_python = True
        try:
            return original(*args, **kwargs)
        finally:
            tensors.asked.is_python = False

    return make


def _default_device() -> torch.device:
    """The device of `with torch.device(…)`; torch's own question makes a tensor."""
    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode.device for mode in reversed(modes) if hasattr(mode, "device")), torch.device("cpu"))


def _methods(machine: Machine) -> Answers:
    """Methods of the host's tensors."""
    names = ("numpy", "tolist", "__array__", "data_ptr", "is_pinned")
    plain = {name: getattr(torch.Tensor, name) for name in names}

    def of_host(name: str) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            machine.check_host(self)
            return plain[name](self, *args, **kwargs)

        return method

    def to_device(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        return tensors.to(self, machine.device(machine.index_of(machine.kind if device is None else device) or 0),
                          non_blocking=non_blocking)  # fmt: skip

    def pin_memory(self: torch.Tensor, *_: Any) -> torch.Tensor:
        return self if machine.is_pinned(self) else machine.pin(self.detach().clone())

    def new_tensor(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **kwargs})

    guarded = {name: of_host(name) for name in ("numpy", "tolist", "__array__")}
    return {
        **guarded,
        "to": tensors.to,
        "cpu": tensors.cpu,
        machine.kind if machine.kind in ("cuda", "xpu") else "cuda": to_device,
        "pin_memory": pin_memory,
        "is_pinned": lambda self, *_: machine.is_pinned(self),
        "new_tensor": new_tensor,
    }


def _grouping(tensorlists: Any, with_indices: bool = False) -> Any:
    """By device and type, as torch's C++ groups where it sees the devices."""
    with torch.no_grad():
        groups: dict[Any, Any] = {}
        for place, first in enumerate(tensorlists[0]):
            lists, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in tensorlists], []))
            for column, tensorlist in zip(lists, tensorlists, strict=True):
                if tensorlist:
                    column.append(tensorlist[place])
            indices.append(place)
        return {key: (lists, indices if with_indices else []) for key, (lists, indices) in groups.items()}


def _swapping() -> Answers:
    """`Module.to` swaps even where a parameter stays as it is, which fails while DDP holds it."""
    plain = torch.utils.swap_tensors

    def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
        stays = isinstance(one, DeviceTensor) and one.dtype == other.dtype and one.data_ptr() == other.data_ptr()
        if not stays or one.device != other.device:
            plain(one, other)

    return {"swap_tensors": swap_tensors}


def _seeding(machine: Machine, generators: Generators) -> Answers:
    plain = torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        for index in range(machine.devices):
            generators.seed(index, int(seed))
        return plain(seed)

    return {"manual_seed": manual_seed}


def answers(machine: Machine, generators: Generators) -> list[tuple[Any, Answers]]:
    """All that is put in place: owner, and its names."""
    module = _module(machine, generators)
    kind = machine.kind
    random = {name: module[name] for name in module if "rng_state" in name or name.endswith("seed_all")}
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device(kind),
        "device_count": lambda: machine.devices,
        "current_device_index": lambda: machine.current,
        "set_device_index": module["set_device"],
        "current_stream": module["current_stream"],
        "synchronize": module["synchronize"],
    }
    optimizers = __import__("torch.optim.optimizer", fromlist=["optimizer"])
    foreach = torch.utils._foreach_utils
    found: list[tuple[Any, Answers]] = [
        (frozen_copies, {"PLAIN": (torch.Tensor, DeviceTensor)}),  # ours, too, knows plain tensors by their type
        (getattr(torch, kind), module),
        (torch.accelerator, accelerator),
        (torch.Tensor, _methods(machine)),
        (torch, {**_factories(machine), **_autocast(kind), **_seeding(machine, generators)}),
        (torch.random, _seeding(machine, generators)),
        (torch.utils, _swapping()),
        (torch._C, {"_group_tensors_by_device_and_dtype": _grouping}),
        (foreach, {"_foreach_supported_types": [torch.Tensor, DeviceTensor]}),
        (optimizers, {"_foreach_supported_types": [torch.Tensor, torch.nn.Parameter, DeviceTensor]}),
        (threading.Thread, {"run": _run_in_mode(threading.Thread.run)}),
    ]
    if kind == "cuda":
        found += [(torch.cuda.random, random), (torch.version, {"cuda": "12.8"})]
        found += [(torch.cuda.memory, {k: v for k, v in module.items() if "memory" in k or k == "mem_get_info"})]
    if kind == "mps":
        answers_of_backend = {
            "is_available": lambda: True,
            "is_built": lambda: True,
            "is_macos_or_newer": lambda *_: True,
        }
        found += [(torch.backends.mps, answers_of_backend), (platform, {"processor": lambda: "arm"})]
    return found


def _forget_devices() -> None:
    """Let transformers, accelerate, Lightning and DeepSpeed ask again which devices there are."""
    for accelerator in (MPSAccelerator, CUDAAccelerator):
        if hasattr(accelerator.is_available, "cache_clear"):
            accelerator.is_available.cache_clear()
    for name in ("transformers.utils.import_utils", "accelerate.utils.imports"):
        for question in vars(sys.modules[name]).values() if name in sys.modules else ():
            if getattr(question, "__name__", "").endswith("_available") and hasattr(question, "cache_clear"):
                question.cache_clear()
    if deepspeed := sys.modules.get("deepspeed.accelerator.real_accelerator"):
        deepspeed.ds_accelerator = None


def _run_in_mode(plain: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Modes belong to a thread: new ones get ours."""

    def run(self: threading.Thread) -> None:
        with Kernels() if tensors.is_active() else contextlib.nullcontext():
            plain(self)

    return run


@contextlib.contextmanager
def pretended_device(kind: str = "cuda", count: int = 1, check_races: bool = True) -> Iterator[Machine]:
    """Put a device in place, and take it away again.

    Args:
        kind: `cuda`, `xpu`, `mps` or `npu`, whose name torch keeps for the rest of the process.
        count: How many of them.
        check_races: Raise, at the end, what races were found where nothing could be raised.
    """
    if importlib.util.find_spec("bitsandbytes") is not None:  # PEFT imports it, and it looks for CUDA's own functions
        importlib.import_module("bitsandbytes")
    if kind == "npu" and torch._C._get_privateuse1_backend_name() != kind:
        torch.utils.rename_privateuse1_backend(kind)  # as `import torch_npu` does
        torch._register_device_module(kind, types.ModuleType("torch.npu"))
    machine, generators = Machine(kind, count), Generators(count)
    owners = answers(machine, generators)
    absent = object()
    before = [(owner, name, vars(owner).get(name, absent)) for owner, found in owners for name in found]
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        stack.callback(serialization.register())
        for owner, found in owners:
            for name, answer in found.items():
                is_method = isinstance(owner, type) and isinstance(answer, types.FunctionType)
                setattr(owner, name, answer if is_method or not isinstance(owner, type) else staticmethod(answer))

        def restore() -> None:
            for owner, name, value in before:
                if value is absent:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)

        stack.callback(_forget_devices)
        stack.callback(restore)
        _forget_devices()
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        token = tensors.RANDOMNESS.set(generators)
        stack.callback(tensors.RANDOMNESS.reset, token)
        tensors._MACHINE.append(machine)
        stack.callback(tensors._MACHINE.pop)
        stack.enter_context(Kernels())
        yield machine
        machine.finish_all()
    if check_races and machine.races:
        raise RaceError("; ".join(sorted(set(machine.races))))
