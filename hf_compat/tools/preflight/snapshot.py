"""`Snapshot` keeps the state of everything that a Trainer reaches, and restores it in place, bit for bit.

It follows attributes, containers and closures, and keeps their contents, so that references to them stay valid. Tensors
are copied to the CPU, except those of data sets, which nothing trains.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import types
from collections.abc import Callable, Iterable

import numpy as np
import torch

from hf_compat.errors import warn_once
from hf_compat.runtime.seeding import read_rng, write_rng

Restore = Callable[[], object]

# Bounds on visited objects, and on the items of a container, because data sets may have millions.
_MOST_OBJECTS = 500_000
_MOST_ITEMS = 20_000
_LARGEST_ARRAY_BYTES = 2**20
# Packages whose objects represent something outside of Python: threads, files, connections.
_FOREIGN = frozenset(
    (
        "_io", "_queue", "_thread", "_weakref", "asyncio", "concurrent", "ctypes", "io", "logging", "multiprocessing",
        "pyarrow", "queue", "socket", "sqlite3", "subprocess", "tensorboard", "threading", "tqdm", "wandb", "weakref",
    )
)  # fmt: skip
_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, types.CodeType)


class Snapshot:
    """The state of some objects and of all that they reach. The tensors of `data` are not copied."""

    def __init__(self, trained: Iterable[object], data: Iterable[object] = ()) -> None:
        states = read_rng()
        on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

        def put_back() -> None:
            write_rng(states)
            if on_gpus:
                torch.cuda.set_rng_state_all(on_gpus)

        self._restores: list[Restore] = [put_back]
        self._seen: dict[int, object] = {}  # keeps the objects, so that no other one gets their id
        self.iterators: list[object] = []
        for root, copies_tensors in [*((one, False) for one in data), *((one, True) for one in trained)]:
            waiting = [root]
            while waiting and len(self._seen) < _MOST_OBJECTS:
                thing = waiting.pop()
                if not isinstance(thing, _ATOMS) and id(thing) not in self._seen:
                    self._seen[id(thing)] = thing
                    waiting.extend(self._keep(thing, copies_tensors))

    def restore(self) -> None:
        for put_back in self._restores:
            put_back()
        warn_once.cache_clear()  # warnings of the checks are shown again by the run

    def _keep(self, thing: object, copies_tensors: bool) -> Iterable[object]:
        if isinstance(thing, torch.Tensor):
            if copies_tensors:
                self._restores.append(_of_tensor(thing))
            return (thing.grad,) if thing.is_leaf and copies_tensors else ()
        restore = _of_generator(thing)
        if restore is not None:
            self._restores.append(restore)
            return ()
        if isinstance(thing, types.MethodType):
            return [thing.__self__, thing.__func__]
        if isinstance(thing, functools.partial):
            return [thing.func, thing.args, thing.keywords]
        if isinstance(thing, types.FunctionType):
            held: list[object] = []
            for cell in thing.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty one raises
                    held.append(cell.cell_contents)
                    self._restores.append(functools.partial(setattr, cell, "cell_contents", held[-1]))
            drawn = [thing.__globals__.get(name) for name in thing.__code__.co_names]
            generators = [value for value in drawn if _of_generator(value) is not None]
            return [*held, *generators, *(thing.__defaults__ or ()), *vars(thing).values()]
        module = getattr(type(thing), "__module__", None)
        if isinstance(module, str) and module.partition(".")[0] in _FOREIGN:
            return ()
        return [*self._keep_container(thing), *self._keep_attributes(thing)]

    def _keep_container(self, thing: object) -> list[object]:
        if isinstance(thing, tuple):
            return list(thing) if len(thing) <= _MOST_ITEMS else []
        if isinstance(thing, np.ndarray):
            if thing.nbytes <= _LARGEST_ARRAY_BYTES and thing.flags.writeable:
                kept = thing.copy()
                self._restores.append(lambda: np.copyto(thing, kept))
            return []
        if not isinstance(thing, (dict, list, set, collections.deque)) or len(thing) > _MOST_ITEMS:
            return []
        self._restores.append(_of_container(thing))
        return [*thing, *thing.values()] if isinstance(thing, dict) else list(thing)

    def _keep_attributes(self, thing: object) -> list[object]:
        if isinstance(thing, _ITERATORS):
            self.iterators.append(thing)
        attributes = getattr(thing, "__dict__", None)
        found: list[object] = []
        if isinstance(attributes, dict):
            self._restores.append(_of_container(attributes))
            found += attributes.values()
        slotted = [base for base in type(thing).__mro__ if "__slots__" in vars(base)]
        slots = {name: part for base in slotted for name, part in vars(base).items()}
        for name, part in slots.items():
            if isinstance(part, types.MemberDescriptorType) and hasattr(thing, name):
                found.append(getattr(thing, name))
                self._restores.append(functools.partial(object.__setattr__, thing, name, found[-1]))
        return found


_ITERATORS: tuple[type, ...] = (
    types.GeneratorType, map, filter, zip, enumerate, reversed, type(iter([])), type(iter(())), type(iter({})),
    type(iter(range(0))), type(iter("")),
)  # fmt: skip


def one_shot_iterators(dataset: object) -> list[object]:
    """List the iterators in a data set. Reading them would take samples away from the run."""
    return Snapshot((), (dataset,)).iterators


def _of_container(thing: dict[object, object] | list[object] | set[object] | collections.deque[object]) -> Restore:
    """Keep the items of a container. An unchanged container is not touched."""
    kept = list(thing)
    values = list(thing.values()) if isinstance(thing, dict) else kept

    def put_back() -> None:
        now = list(thing.values()) if isinstance(thing, dict) else kept
        both = [*zip(thing, kept, strict=False), *zip(now, values, strict=False)]
        if len(thing) == len(kept) and all(one is other for one, other in both):
            return
        thing.clear()
        if isinstance(thing, dict):
            thing.update(zip(kept, values, strict=True))
        else:
            thing.update(kept) if isinstance(thing, set) else thing.extend(kept)

    return put_back


def _of_tensor(tensor: torch.Tensor) -> Restore:
    """Keep a tensor's numbers, memory, gradient and `requires_grad`."""
    try:
        tensor.data_ptr()
        has_memory = tensor.layout == torch.strided and not tensor.is_meta
    except RuntimeError:  # a fake one, or a wrapper around others
        has_memory = False
    if not has_memory:
        return lambda: None
    memory, wanted = tensor.data, tensor.requires_grad
    kept = memory.to("cpu", copy=True)
    gradient = tensor.grad if tensor.is_leaf else None

    def put_back() -> None:
        with torch.no_grad():
            memory.copy_(kept)
            if tensor.data_ptr() != memory.data_ptr() or tensor.dtype != memory.dtype:
                tensor.data = memory
        if tensor.is_leaf:
            tensor.requires_grad_(wanted)
            tensor.grad = gradient

    return put_back


def _of_generator(thing: object) -> Restore | None:
    """Keep the state of a generator of random numbers. None for any other object."""
    if isinstance(thing, torch.Generator):
        return functools.partial(thing.set_state, thing.get_state())
    if isinstance(thing, np.random.RandomState):
        return functools.partial(thing.set_state, thing.get_state())
    if isinstance(thing, np.random.Generator):
        return _of_generator(thing.bit_generator)
    if isinstance(thing, np.random.BitGenerator):
        return functools.partial(setattr, thing, "state", thing.state)
    if isinstance(thing, random.Random):
        return functools.partial(thing.setstate, thing.getstate())
    return None
