"""Tensors of a pretended device: each wraps a tensor of the CPU, and each of torch's operators goes through `compute`.

To torch's C++ the wrapper is on the CPU, so that autograd, autocast and fused optimizers work. What Python sees says
`cuda:0`. So what C++ decides by a device is decided here.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from helpers.pretended.machine import Machine
from helpers.pretended.streams import PendingCopy

Operator = Any  # torch._ops.OpOverload, whose attributes torch does not type
_MACHINE: list[Machine] = []
_VIEWS_AND_NAMES = ("detach", "alias", "lift_fresh", "set_", "_local_scalar_dense", "_to_copy", "copy_")
# The host needs to know what they give: an element, a size.
_WAITS = frozenset(
    {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique", "_unique2",
     "unique_consecutive", "bincount", "allclose"}
)  # fmt: skip
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
_MAY_MIX = frozenset({"copy_", "_to_copy", "set_", "lift_fresh"})
_original_to, _original_cpu = torch.Tensor.to, torch.Tensor.cpu


# Whether Python asks for a tensor: what C++ makes for itself within an operator goes with the operator's device.
asked = threading.local()


def machine() -> Machine:
    return _MACHINE[-1]


def is_active() -> bool:
    return bool(_MACHINE)


class _Held:
    """Lets go of a storage's count with the tensor that has it."""

    __slots__ = ("key", "owner")

    def __init__(self, owner: Machine, key: int) -> None:
        self.owner, self.key = owner, key

    def __del__(self) -> None:
        self.owner.release(self.key)


class DeviceTensor(torch.Tensor):
    """A tensor of a pretended device."""

    _inner: torch.Tensor
    _index: int
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device="cpu",
        )  # fmt: skip
        made._inner, made._index = inner, index
        made._held = _Held(machine(), machine().hold(inner, index))
        return made

    @property
    def device(self) -> torch.device:
        return machine().device(self._index)

    @property
    def is_cuda(self) -> bool:
        return machine().kind == "cuda"

    @property
    def is_mps(self) -> bool:
        return machine().kind == "mps"

    @property
    def is_xpu(self) -> bool:
        return machine().kind == "xpu"

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DeviceTensor):
            raise RuntimeError("incompatible tensor type: `.data` of a device's tensor takes one of a device")
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # shape, strides, type
        self._inner, self._index = value._inner, value._index
        self._held = _Held(machine(), machine().hold(self._inner, self._index))

    def get_device(self) -> int:
        return self._index

    def is_pinned(self, *_: object) -> bool:
        return False

    def pin_memory(self, *_: object) -> torch.Tensor:
        raise RuntimeError(f"cannot pin '{self.device}' only dense CPU tensors can be pinned")

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._inner.untyped_storage()

    def data_ptr(self) -> int:
        return self._inner.data_ptr()

    def numpy(self, *_: object, **__: object) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    __array__ = numpy

    def tolist(self) -> Any:
        machine().wait_for_current("tolist", self._index)
        return self._inner.tolist()

    def record_stream(self, stream: Any) -> None:
        storage = machine().storages.get(self._inner.untyped_storage()._cdata)
        if storage is not None:
            storage.recorded_on.add(stream)

    def __reduce_ex__(self, protocol: Any) -> Any:
        machine().wait_for_current("pickle", self._index)
        inner = self._inner.detach()
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())
        if self.requires_grad and self.is_leaf:
            inner.requires_grad_()
        return inner.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[return-value]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol at the moment."
            )
        with torch.no_grad():
            copy = self.detach().clone()
        copy = torch.nn.Parameter(copy, self.requires_grad) if getattr(self, "_is_param", False) else copy
        copy.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copy
        return copy

    def __format__(self, form: str) -> str:
        return format(self.item() if self.dim() == 0 else self, form) if form else str(self)

    def __repr__(self, **_: object) -> str:
        return f"{self._inner!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func: Operator, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Kernels(TorchDispatchMode):
    """Sees what no device's tensor takes part in: what makes tensors, and what the host reads."""

    def __torch_dispatch__(self, func: Operator, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


# Operators ------------------------------------------------------------------------------------------------------------


def compute(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the tensors inside, and put what it gives on the device that it belongs to."""
    if not _MACHINE:
        return func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
    found, name = tree_flatten((args, kwargs))[0], func._schema.name.split("::")[1]
    here = [value for value in found if isinstance(value, DeviceTensor)]
    if here and any(getattr(value, "_goes_along", False) for value in found):
        args, kwargs = tree_map(lambda value: _taken_along(value, here[0]._index), (args, kwargs))
        found = tree_flatten((args, kwargs))[0]
    hosts = [value for value in found if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor)]
    for tensor in hosts:
        if name not in ("detach", "copy_", "alias"):
            machine().check_host(tensor)
    device = kwargs.get("device")
    index = here[0]._index if here else None
    if device is not None:
        index = machine().index_of(device)
    if not here and index is None:
        return _on_host(func, args, kwargs)
    if index is None and name != "_to_copy":
        if getattr(asked, "is_python", False):  # `empty_like(…, device="cpu")`
            return _on_host(func, tree_map(_inside, args), kwargs)
        index, kwargs = here[0]._index, {**kwargs, "device": None}
    if name == "copy_":
        return _copy(func, args, kwargs)
    if name == "_to_copy" and here and device is not None:
        # Python's `.to(device)` has gone through `to`: this is C++, which takes the tensor for one of the CPU
        index, kwargs = here[0]._index, {**kwargs, "device": None}
    if name == "_to_copy" and not here:
        return _moved(args[0], index, bool(kwargs.get("non_blocking"))).to(kwargs.get("dtype") or args[0].dtype)
    if here:
        _check_devices(name, here, hosts, found)
        _count(func, name, here, args)
    return _run(func, args, kwargs, here, 0 if index is None else index)


def _taken_along(value: Any, index: int) -> Any:
    return DeviceTensor(value, index) if getattr(value, "_goes_along", False) else value


def _on_host(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not kwargs.get("pin_memory"):
        made = func(*args, **kwargs)
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        by_itself = not tensors and kwargs.get("device") is not None and not getattr(asked, "is_python", False)
        if isinstance(made, torch.Tensor) and (by_itself or any(hasattr(one, "_goes_along") for one in tensors)):
            made._goes_along = True  # type: ignore[attr-defined]
        return made
    made = func(*args, **{**kwargs, "pin_memory": False})
    return machine().pin(made)


def _check_devices(name: str, here: list[DeviceTensor], hosts: list[torch.Tensor], found: list[Any]) -> None:
    if name in _MAY_MIX:
        return
    indices = {tensor._index for tensor in here if tensor.dim() or len(here) == 1}
    if len(indices) > 1:
        a, b = sorted(indices)[:2]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {machine().device(a)} and "
            f"{machine().device(b)}! ({name})"
        )
    if name in _INDEXING and isinstance(found[0], DeviceTensor):
        return
    if any(tensor.dim() for tensor in hosts):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {here[0].device} and cpu! "
            f"({name})"
        )


def _count(func: Operator, name: str, here: list[DeviceTensor], args: tuple[Any, ...]) -> None:
    if name in _WAITS:
        kind = "item" if name == "_local_scalar_dense" else name
        machine().wait_for_current(kind, here[0]._index)
    elif name in _INDEXING:
        masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]
        if masks:
            machine().wait_for_current("mask", here[0]._index)
        if any(i is not None and not isinstance(i, DeviceTensor) for i in args[1]):
            machine().wait_for_current("h2d", here[0]._index)
    elif name == "repeat_interleave" and "output_size" not in func._schema.name:
        machine().wait_for_current("repeat_interleave", here[0]._index)
    if not func.is_view and name not in _VIEWS_AND_NAMES:
        machine().count["kernels"] += 1


def _run(func: Operator, args: Any, kwargs: dict[str, Any], here: list[DeviceTensor], index: int) -> Any:
    options = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs
    options = {key: value for key, value in options.items() if not (key == "pin_memory" and value)}
    written = _written(func, args, kwargs)
    if here and not func.is_view:
        reads = [tensor._inner for tensor in here]
        machine().work(index, reads, [tensor._inner for tensor in written], func._schema.name)
    with _drawing(func, kwargs, index):
        out = func(*tree_map(_inside, args), **tree_map(_inside, options))
    for tensor in written:
        if tensor.shape != tensor._inner.shape:
            raise NotImplementedError(f"{func._schema.name} changes a shape in place")

    def outside(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor):
            return value
        for tensor in here:
            if tensor._inner is value:
                return tensor
        return DeviceTensor(value, index)

    return tree_map(outside, out)


def _written(func: Operator, args: Any, kwargs: dict[str, Any]) -> list[DeviceTensor]:
    written: list[DeviceTensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [one for one in tree_flatten(value)[0] if isinstance(one, DeviceTensor)]
    return written


def _inside(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value._inner
    return getattr(value, "_host_generator", value)


@contextlib.contextmanager
def _drawing(func: Operator, kwargs: dict[str, Any], index: int) -> Iterator[None]:
    """Draw from the device's own generator, where the operator draws."""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        yield
        return
    with RANDOMNESS.get().drawing(index):
        yield


RANDOMNESS: contextvars.ContextVar[Any] = contextvars.ContextVar("generators of the devices")


# Copies ---------------------------------------------------------------------------------------------------------------


def _copy(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`target.copy_(source, non_blocking)` within a device, between two, and from and to the host."""
    target, source = args[0], args[1]
    is_async = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        machine().count["kernels"] += 1
        machine().work(target._index, [source._inner], [target._inner], "copy_")
        target._inner.copy_(source._inner)
    elif isinstance(target, DeviceTensor):
        machine().check_host(source)
        mark = machine().work(target._index, [], [target._inner], "copy_")
        target._inner.copy_(source)
        _count_to_device(source, mark, target._index, is_async or source.dim() == 0)
    else:
        mark = machine().work(source._index, [source._inner], [], "copy_")
        _bring(source, target, mark, is_async)
    return target


def _count_to_device(source: torch.Tensor, mark: Any, index: int, is_async: bool) -> None:
    machine().count["h2d"] += 1
    if not is_async:
        machine().wait_for_current("h2d", index)
    elif machine().is_pinned(source):
        machine().leave_pending(PendingCopy(mark, source.detach(), source.detach().clone(), is_to_host=False))


def _bring(source: DeviceTensor, target: torch.Tensor, mark: Any, is_async: bool) -> None:
    """Copy to the host: at once, or garbage until it was waited for. What is not pinned comes at once."""
    machine().count["d2h"] += 1
    if is_async and machine().is_pinned(target):
        content = torch.empty_like(target)
        content.copy_(source._inner)
        machine().leave_pending(PendingCopy(mark, target.detach(), content, is_to_host=True))
        return
    machine().wait_for_current("d2h", source._index)
    target.copy_(source._inner)


def _moved(tensor: torch.Tensor, index: int | None, is_async: bool) -> torch.Tensor:
    """Copy a tensor to a device, or to the host (None)."""
    if index is None:
        assert isinstance(tensor, DeviceTensor)
        target = torch.empty_like(tensor._inner)
        if is_async:
            machine().pin(target)  # as torch does
        mark = machine().work(tensor._index, [tensor._inner], [], "to")
        _bring(tensor, target, mark, is_async)
        return target
    if isinstance(tensor, DeviceTensor):
        machine().count["kernels"] += 1
        machine().work(tensor._index, [tensor._inner], [], "to")
        return DeviceTensor(tensor._inner.clone(), index)
    machine().check_host(tensor)
    made = DeviceTensor(tensor.detach().clone(), index)
    mark = machine().work(index, [], [made._inner], "to")
    _count_to_device(tensor, mark, index, is_async)
    return made


class _Move(torch.autograd.Function):
    """A copy that gradients go back through."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, index: int | None, is_async: bool) -> torch.Tensor:
        ctx.origin = tensor._index if isinstance(tensor, DeviceTensor) else None
        return _moved(tensor, index, is_async)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _moved(gradient, ctx.origin, False), None, None


def move(tensor: torch.Tensor, index: int | None, is_async: bool = False, always: bool = False) -> torch.Tensor:
    """Return a tensor on a device, or on the host; itself where it is there."""
    origin = tensor._index if isinstance(tensor, DeviceTensor) else None
    if origin == index:
        return tensor.clone() if always else tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Move.apply(tensor, index, is_async)
    return _moved(tensor, index, is_async)


_NOWHERE = object()


def _place_and_rest(args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """Take the device out of what `Tensor.to` was given."""
    place, rest = kwargs.pop("device", _NOWHERE), []
    if place is None:
        place = _NOWHERE
    other = kwargs.pop("other", None)
    for position, value in enumerate(args):
        if isinstance(value, (str, torch.device)) or (position == 0 and type(value) is int):
            place = value
        elif isinstance(value, torch.Tensor):
            other = value
        elif value is not None:
            rest.append(value)
    if other is not None:
        place, kwargs["dtype"] = other.device, other.dtype
    return place, rest, kwargs


def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.Tensor.to`, for tensors of all devices."""
    place, rest, options = _place_and_rest(list(args), dict(kwargs))
    if place is _NOWHERE:
        return _original_to(self, *rest, **options) if rest or options else self
    dtypes = [value for value in rest if isinstance(value, torch.dtype)]
    flags = [value for value in rest if isinstance(value, bool)]
    dtype = options.get("dtype") or (dtypes[0] if dtypes else self.dtype)
    is_async = bool(options.get("non_blocking", flags[0] if flags else False))
    is_copy = bool(options.get("copy", flags[1] if len(flags) > 1 else False))
    index = machine().index_of(place)
    if index is None and torch.device(place).type != "cpu":
        return _original_to(self, *args, **kwargs)  # meta …
    leaves = index is None and isinstance(self, DeviceTensor)
    if leaves and dtype != self.dtype:  # torch converts on the device, then copies
        return move(_original_to(self, dtype), index, is_async)
    moved = move(self, index, is_async, is_copy)
    return moved if dtype == self.dtype else _original_to(moved, dtype)


def cpu(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return move(self, None) if isinstance(self, DeviceTensor) else _original_cpu(self)


DeviceTensor.to = to  # type: ignore[method-assign, assignment]
DeviceTensor.cpu = cpu  # type: ignore[method-assign, assignment]
