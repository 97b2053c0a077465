"""Names of the user's that nothing calls or reads, and that nearly are names of a Trainer, a callback or its flags."""

from __future__ import annotations

import difflib
import dis
import types
from collections.abc import Collection, Iterable, Iterator, Mapping

import lightning.pytorch as pl

from hf_compat.errors import warn_once
from hf_compat.hf.callbacks import EVENTS, TrainerCallback
from hf_compat.runtime.inspection import kept_per_class

_PACKAGES = frozenset(("builtins", "hf_compat", "transformers", "lightning", "lightning_fabric", "pytorch_lightning"))
_NEAR = 0.88
_NEAR_EVENT = 0.8  # they are few, and less alike
_HOOKS = frozenset(name for name in dir(pl.Callback) if not name.startswith("_"))


def near_name(name: str, known: Collection[str], cutoff: float = _NEAR) -> str | None:
    """The known name that a name differs from by a few letters, or by underscores and capitals alone."""
    squeezed = name.replace("_", "").lower()
    same = [one for one in known if one.replace("_", "").lower() == squeezed]
    same = sorted(same, key=lambda one: one.startswith("_")) or difflib.get_close_matches(name, known, 1, cutoff)
    return same[0] if same else None


def tell_of_trainer_names(trainer: object, own_attributes: Collection[str]) -> None:
    """Warn of methods of a user's Trainer, and of attributes set on it, that nearly are those of the Trainer."""
    kind = type(trainer)
    ours = [one for one in kind.__mro__ if _is_packages(one)]
    methods = set().union(*map(_members, ours))
    known = methods.union(*(vars(one).get("__annotations__", {}) for one in ours))
    for name in _methods_of(kind, known):
        near = near_name(name, methods)
        if near is not None and not _overrides(kind, near):
            _tell(f"{kind.__name__} has a method `{name}`, which no Trainer calls", near)
    attributes = known | set(own_attributes)
    public = {name for name in attributes if not name.startswith("_")}
    for name in vars(trainer).keys() - attributes:
        near = None if name.startswith("_") or hasattr(kind, name) else near_name(name, public)
        if near is not None and not _is_read(kind, name):
            _tell(f"`trainer.{name}` was set, which no Trainer reads", near)


def tell_of_callback_names(callbacks: Iterable[object]) -> None:
    """Warn of methods of the user's callbacks that nearly are events or hooks, and so are never called."""
    for callback in callbacks:
        kind = type(callback)
        is_lightnings = isinstance(callback, pl.Callback)
        of_hf = frozenset(EVENTS) if isinstance(callback, TrainerCallback) or not is_lightnings else frozenset()
        known = of_hf | (_HOOKS if is_lightnings else frozenset())
        base = "transformers.TrainerCallback" if is_lightnings else "lightning.pytorch.Callback"
        inherited = set(dir(TrainerCallback)) | set(dir(callback)) - set(dir(kind))
        for name in _methods_of(kind, known | inherited - set(EVENTS)):
            fact = f"{kind.__name__} has a method `{name}`, which is never called"
            near = near_name(name, known, _NEAR if is_lightnings else _NEAR_EVENT)
            if name.startswith("on_") and name in _HOOKS | EVENTS.keys():
                warn_once(f"{fact}.\n\nHint: `{name}` is of `{base}`, which {kind.__name__} does not inherit from.")
            elif near is not None and not _overrides(kind, near):
                _tell(fact, near)


def tell_of_flags(control: object, flags: Collection[str]) -> None:
    """Warn of attributes of a control that nearly are flags."""
    for name in vars(control).keys() - set(flags):
        near = near_name(name, flags)
        if near is not None:
            _tell(f"`control.{name}` was set, which no Trainer reads", near)


@kept_per_class
def _members(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("__")}


def _tell(fact: str, near: str) -> None:
    warn_once(f"{fact}.\n\nHint: did you mean `{near}`? Ignore this if your own code uses it.")


def _is_packages(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES


def _methods_of(kind: type, known: Collection[str]) -> list[str]:
    """The methods that the user's classes define under other names, and that their own code does not call."""
    own = [one for one in kind.__mro__ if not _is_packages(one)]
    names = {name: value for one in own for name, value in vars(one).items() if name not in known}
    functions = (types.FunctionType, staticmethod, classmethod, property)
    return sorted(
        name
        for name, value in names.items()
        if isinstance(value, functions) and not name.startswith("__") and not _is_read(kind, name)
    )


def _overrides(kind: type, name: str) -> bool:
    """Whether one of the user's classes defines a name itself."""
    return any(name in vars(one) for one in kind.__mro__ if not _is_packages(one))


def _is_read(kind: type, name: str) -> bool:
    """Whether the code of the user's classes reads an attribute of that name."""
    return any(
        step.opname.startswith("LOAD_") and step.argval == name
        for one in kind.__mro__
        if not _is_packages(one)
        for code in _codes_in(vars(one))
        for step in dis.get_instructions(code)
    )


def _codes_in(members: Mapping[str, object]) -> Iterator[types.CodeType]:
    for value in members.values():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        waiting = [getattr(function, "__code__", None)]
        while waiting:
            code = waiting.pop()
            if isinstance(code, types.CodeType):
                yield code
                waiting += [one for one in code.co_consts if isinstance(one, types.CodeType)]
