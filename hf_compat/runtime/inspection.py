"""Inspect models, data sets and callables, and call methods written for any release of HF.

`parameters_of` finds the parameters of a model at every update. The file imports nothing of the package.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, overload

from torch import nn

Answer = TypeVar("Answer")


def find_labels(model_class: type[nn.Module]) -> list[str]:
    """List the parameters of a model's `forward` that are labels.

    Mirrors:
        `transformers.utils.find_labels`, 5.23.
    """
    parameters = inspect.signature(model_class.forward).parameters
    spans = ("start_positions", "end_positions") if "QuestionAnswering" in model_class.__name__ else ()
    return [name for name in parameters if "label" in name or name in spans]


def can_return_loss(model_class: type[nn.Module]) -> bool:
    """Return whether `forward` has `return_loss=True` by default (CLIP-like models).

    Mirrors:
        `transformers.utils.can_return_loss`, 5.23.
    """
    parameter = inspect.signature(model_class.forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True


class Delegated(Generic[Answer]):
    """An attribute whose value another object holds.

    Args:
        path: The attribute to read and write, from the owner on, with dots.
    """

    def __init__(self, path: str) -> None:
        self._path = path.split(".")

    def _holder(self, owner: object) -> object:
        for name in self._path[:-1]:
            owner = getattr(owner, name)
        return owner

    @overload
    def __get__(self, owner: None, kind: type) -> Delegated[Answer]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> Answer: ...
    def __get__(self, owner: object | None, kind: type) -> object:
        """Read the value. On a class, give this descriptor."""
        return self if owner is None else getattr(self._holder(owner), self._path[-1])

    def __set__(self, owner: object, value: Answer) -> None:
        """Write the value."""
        setattr(self._holder(owner), self._path[-1], value)


def is_replaced(owner: object, name: str, original: type) -> bool:
    """Return whether something stands in the place of a class's own method or property.

    Args:
        owner: An object whose class, or which itself, may have another one: a subclass, a monkeypatch, an attribute.
        name: The method's name.
        original: The class that has it.
    """
    return name in vars(owner) or getattr(type(owner), name) is not getattr(original, name)


def attribute_of(module: nn.Module, name: str) -> object:
    """Return `getattr(module, name, None)`, without the error that `nn.Module` writes out where there is none."""
    kind, fields = type(module), module.__dict__
    is_plain = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    if not is_plain or name in fields or hasattr(kind, name):
        return getattr(module, name, None)
    if name in fields["_modules"] or name in fields["_parameters"] or name in fields["_buffers"]:
        return getattr(module, name, None)
    return None


def home_of(function: object) -> str:
    """Return the module that a callable was written in: of a wrapper its own, whatever it says of what it wraps."""
    names = getattr(getattr(function, "__func__", function), "__globals__", {})
    written_in = str(names.get("__name__", "contextlib"))
    if written_in not in ("contextlib", "functools"):  # else it was made by one of these
        return written_in
    return str(getattr(function, "__module__", type(function).__module__))


def has_var_keyword(function: Callable[..., object]) -> bool:
    """Return whether a function takes `**kwargs`."""
    kinds = (parameter.kind for parameter in inspect.signature(function).parameters.values())
    return any(kind is inspect.Parameter.VAR_KEYWORD for kind in kinds)


def number_of_arguments(function: Callable[..., object]) -> int:
    """Count the arguments that a function, or what is left of a partial, still takes.

    Mirrors:
        `transformers.trainer_utils.number_of_arguments`, 5.23.
    """
    if isinstance(function, functools.partial):
        bound = len(function.args) + len(function.keywords)
        return len(inspect.signature(function.func).parameters) - bound
    return len(inspect.signature(function).parameters)


class AcceptedParameters(NamedTuple):
    """What a plain function can be called with, `self` included.

    Args:
        positional: How many positional arguments.
        takes_any_positional: Whether it has `*args`.
        names: Names that can be given by keyword.
        takes_any_keyword: Whether it has `**kwargs`.
    """

    positional: int
    takes_any_positional: bool
    names: frozenset[str]
    takes_any_keyword: bool


@functools.lru_cache(maxsize=1024)
def accepted_parameters(function: Callable[..., object]) -> AcceptedParameters:
    """Return what a plain function can be called with; a function is inspected once."""
    parameters = inspect.signature(function).parameters.values()
    kinds = {p.kind for p in parameters}
    return AcceptedParameters(
        positional=sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters),
        takes_any_positional=inspect.Parameter.VAR_POSITIONAL in kinds,
        names=frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)),
        takes_any_keyword=inspect.Parameter.VAR_KEYWORD in kinds,
    )


def call_with_optional(method: Callable[..., Answer], *args: object, optional: dict[str, Any]) -> Answer:
    """Call a method of any HF era: `args` always, each of `optional` by keyword where the signature accepts it.

    A subclass written for an older release lacks the later parameters (`num_items_in_batch` …); newer ones may take
    them under `**kwargs`. What upstream passes by keyword is passed by keyword here. A function is inspected once.

    Args:
        method: A bound method, or a plain callable.
        args: Positional arguments that every era has.
        optional: Keyword arguments that came with later releases.
    """
    accepted = _accepted_by(method)
    if accepted is None:
        return method(*args)
    if accepted.takes_any_keyword or accepted.names.issuperset(optional):
        return method(*args, **optional)
    return method(*args, **{name: value for name, value in optional.items() if name in accepted.names})


def _accepted_by(method: Callable[..., object]) -> AcceptedParameters | None:
    """Return what a bound method (`self` included) or a plain callable takes; None for builtins without a signature."""
    function = getattr(method, "__func__", None)
    try:
        # what is no method may hold a trainer: it is not kept for the next time
        return accepted_parameters(function) if function is not None else accepted_parameters.__wrapped__(method)
    except (TypeError, ValueError):
        return None


def needs_parameter(method: Callable[..., object], name: str) -> bool:
    """Return whether a bound method, or a plain callable, cannot be called without a parameter of this name."""
    try:
        parameter = inspect.signature(method).parameters.get(name)
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return parameter is not None and parameter.default is parameter.empty


def accepts_keyword(method: Callable[..., object], name: str) -> bool:
    """Return whether a bound method, or a plain callable, can be called with a keyword."""
    accepted = _accepted_by(method)
    return accepted is not None and (accepted.takes_any_keyword or name in accepted.names)


def takes_place(method: Callable[..., object], name: str, index: int) -> bool:
    """Return whether a bound method, or a plain callable, takes a value at a place, counted from 0, or under a name."""
    accepted = _accepted_by(method)
    if accepted is None or accepted.takes_any_positional or accepted.takes_any_keyword:
        return True
    places = accepted.positional - hasattr(method, "__func__")
    return places > index or name in accepted.names


class PassingWay(NamedTuple):
    """How a list of named values is handed to a function.

    Args:
        positional: How many of them positionally, from the first.
        by_keyword: Place and name of those that follow by keyword.
    """

    positional: int
    by_keyword: tuple[tuple[int, str], ...]


def passing_way(parameters: list[inspect.Parameter], names: tuple[str, ...], last_by_keyword: int) -> PassingWay:
    """Return how a user's override gets what upstream passes under `names`, positionally but for the last ones.

    Positionally, as far as the override's parameters stand in upstream's order (names of its own included) and it takes
    as many. An override of an older release, which lacks one in the middle, gets by keyword what it names.
    """
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    by_name = len(names) - last_by_keyword
    # a wrapper of the same signature looks for them among its keywords
    most = by_name if takes_any or named.issuperset(names[by_name:]) else len(names)
    positional = 0
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        positional = most
    elif all(place == name or place not in names for place, name in zip(places, names, strict=False)):
        positional = min(len(places), most)
    rest = enumerate(names[positional:], start=positional)
    return PassingWay(positional, tuple((index, name) for index, name in rest if takes_any or name in named))


@functools.lru_cache(maxsize=1024)
def _way_to_method(function: Callable[..., object], names: tuple[str, ...], last_by_keyword: int) -> PassingWay:
    return passing_way(list(inspect.signature(function).parameters.values())[1:], names, last_by_keyword)


def call_by_place(
    method: Callable[..., Answer], names: tuple[str, ...], values: tuple[object, ...], last_by_keyword: int = 0
) -> Answer:
    """Call a method of any HF era with what upstream passes positionally; the later ones only where there is a place.

    Args:
        method: A bound method, or a plain callable.
        names: Upstream's names of the parameters, in order.
        values: One value for each name.
        last_by_keyword: How many of the last ones upstream passes by keyword.
    """
    function = getattr(method, "__func__", None)
    if function is not None:
        way = _way_to_method(function, names, last_by_keyword)
    else:
        try:
            way = passing_way(list(inspect.signature(method).parameters.values()), names, last_by_keyword)
        except (TypeError, ValueError):  # a builtin without a signature
            return method(*values)
    if not way.by_keyword:
        return method(*values[: way.positional])
    return method(*values[: way.positional], **{name: values[index] for index, name in way.by_keyword})


def reads_parameter(function: Callable[..., object], name: str) -> bool:
    """Return whether a function's own lines use what it was given under a name, or hand on all that they were given."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:  # of a builtin nobody knows
        return True
    parameters = inspect.signature(function).parameters.values()
    gathers = {p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    used = {str(step.argval) for step in dis.get_instructions(code) if step.opname.startswith("LOAD_")}
    return bool(used & ({name} | gathers))


def fitting_arguments(method: Callable[..., object], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cut positional arguments to as many as a bound method takes (for parameters whose names changed over time)."""
    function = getattr(method, "__func__", None)
    if function is None:
        return args
    accepted = accepted_parameters(function)
    return args if accepted.takes_any_positional else args[: accepted.positional - 1]


def has_length(candidate: object) -> bool:
    """Return whether `len()` works on a data set or loader. Mirrors `transformers.trainer_utils.has_length`, 5.23."""
    try:
        return len(candidate) is not None  # type: ignore[arg-type]  # asked here
    except (TypeError, AttributeError, NotImplementedError):
        return False


# What decides what `parameters()` gives; a module that overrides one of them is asked itself.
_SEARCHES = frozenset(("parameters", "named_parameters", "named_modules", "_named_members"))
_known: dict[type, bool] = {}


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return what `list(model.parameters())` returns, in the same order.

    torch's own search is four generators within each other. An update needs it twice, to clip and to forget the
    gradients, and it costs as much as a small layer.
    """
    found: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        fields = vars(module)
        # Whether modules of a class are searched as torch's base class says
        kind = type(module)
        answer = _known.get(kind)
        if answer is None:
            answer = _known[kind] = all(getattr(kind, name) is getattr(nn.Module, name) for name in _SEARCHES)
        if not (
            answer
            and _SEARCHES.isdisjoint(fields)
            and (isinstance(fields.get("_parameters"), dict) and isinstance(fields.get("_modules"), dict))
        ):
            return list(model.parameters())
        seen.add(id(module))
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
        waiting.extend(reversed(module._modules.values()))
    return list(found.values())


def forget_gradients(model: nn.Module) -> None:
    """Do what `model.zero_grad()` does, by way of it where the model's class has its own."""
    own = type(model).zero_grad is not nn.Module.zero_grad or "zero_grad" in vars(model)
    if own or getattr(model, "_is_replica", False):
        model.zero_grad()
        return
    for parameter in parameters_of(model):
        parameter.grad = None
