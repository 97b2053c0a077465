"""Names of the user's that nothing calls or reads, and that nearly are names of a Trainer, a callback or its flags."""

from __future__ import annotations

import difflib
import dis
import types
from collections.abc import Collection, Iterable

import lightning.pytorch as pl

from hf_compat.errors import warn_once
from hf_compat.hf.callbacks import EVENTS, TrainerCallback
from hf_compat.runtime.inspection import PACKAGES, home_of, is_of_packages, kept_per_class, own_codes

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
    others = vars(trainer).keys() - own_attributes
    if is_of_packages(kind) and not others:
        return
    ours = [one for one in kind.__mro__ if is_of_packages(one)]
    methods = set().union(*map(_members, ours))
    known = methods.union(*(vars(one).get("__annotations__", {}) for one in ours))
    if not is_of_packages(kind):
        _tell_of_methods(trainer, methods, known - methods)
    attributes = known | set(own_attributes)
    public = {name for name in attributes if not name.startswith("_")} if others - attributes else set()
    for name in others - attributes:
        near = None if name.startswith("_") or hasattr(kind, name) else near_name(name, public)
        if near is not None and name not in _names_read(kind):
            _tell(f"`trainer.{name}` was set, which no Trainer reads", near)


def _tell_of_methods(trainer: object, methods: Collection[str], attributes: Collection[str]) -> None:
    kind = type(trainer)
    for name in _methods_of(kind, {*methods, *attributes}):
        near = near_name(name, methods)
        if near is not None and not _overrides(kind, near):
            _tell(f"{kind.__name__} has a method `{name}`, which no Trainer calls", near)
    for name in _hidden_methods(trainer, attributes):
        warn_once(
            f"{kind.__name__} has a method `{name}`, which no Trainer calls: the constructor sets an attribute of that "
            f"name.\n\nHint: set `trainer.{name}`, or pass it to the constructor."
        )


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
        near, fact = near_name(name, flags), f"`control.{name}` was set, which no Trainer reads"
        if near is not None:
            _tell(fact, near)
        elif name.startswith("should_"):
            warn_once(f"{fact}.\n\nHint: its flags are {', '.join(flags)}. Ignore this if your own code uses it.")


@kept_per_class
def _members(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("__")}


def _tell(fact: str, near: str) -> None:
    warn_once(f"{fact}.\n\nHint: did you mean `{near}`? Ignore this if your own code uses it.")


def _methods_of(kind: type, known: Collection[str]) -> list[str]:
    """The methods that the user's classes define under other names, and that their own code does not call."""
    own = [one for one in kind.__mro__ if not is_of_packages(one)]
    names = {name: value for one in own for name, value in vars(one).items() if name not in known}
    functions = (types.FunctionType, staticmethod, classmethod, property)
    methods = {name for name, value in names.items() if isinstance(value, functions) and not name.startswith("__")}
    return sorted(methods - _names_read(kind)) if methods else []


def _hidden_methods(trainer: object, attributes: Iterable[str]) -> list[str]:
    """The methods of the user's classes in whose place the constructor has set None, or something of ours."""
    own = [vars(one) for one in type(trainer).__mro__ if not is_of_packages(one)]
    values = vars(trainer)
    return sorted(
        name
        for name in values.keys() & attributes
        if any(isinstance(members.get(name), types.FunctionType) for members in own)
        and (values[name] is None or home_of(values[name]).partition(".")[0] in PACKAGES)
    )


def _overrides(kind: type, name: str) -> bool:
    """Whether one of the user's classes defines a name itself."""
    return any(name in vars(one) for one in kind.__mro__ if not is_of_packages(one))


def _names_read(kind: type) -> set[str]:
    """The names, and the words of text, that the code of the user's classes reads."""
    steps = (step for code in own_codes(kind) for step in dis.get_instructions(code))
    return {step.argval for step in steps if step.opname.startswith("LOAD_") and isinstance(step.argval, str)}
