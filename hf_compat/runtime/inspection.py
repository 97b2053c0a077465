"""Inspect models, data sets and callables, and call methods written for any release of HF."""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import nn

Answer = TypeVar("Answer")


def find_labels(model_class: type[nn.Module]) -> list[str]:
    """List the parameters of a model's `forward` that are labels.

    Mirrors:
        `transformers.utils.find_labels`.
    """
    parameters = inspect.signature(model_class.forward).parameters
    spans = ("start_positions", "end_positions") if "QuestionAnswering" in model_class.__name__ else ()
    return [name for name in parameters if "label" in name or name in spans]


def can_return_loss(model_class: type[nn.Module]) -> bool:
    """Whether `forward` has `return_loss=True` by default (CLIP-like models).

    Mirrors:
        `transformers.utils.can_return_loss`.
    """
    parameter = inspect.signature(model_class.forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True


def delegated(path: str, doc: str | None = None) -> Any:
    """A property that is another attribute, to read and to write. `path` leads there, with dots to another object's."""
    holder, _, name = path.rpartition(".")
    find = operator.attrgetter(holder) if holder else None
    return property(
        operator.attrgetter(path),
        lambda owner, value: setattr(owner if find is None else find(owner), name, value),
        doc=doc,
    )


def is_replaced(owner: object, name: str, original: type) -> bool:
    """Whether a subclass, a monkeypatch or the object itself overrides a method or property of a class."""
    of_class = getattr(type(owner), name, None)  # the class of a mock has none
    return name in vars(owner) or of_class is not getattr(original, name)


def home_of(function: object) -> str:
    """The module that a callable was written in. A wrapper's is its own, not that of the function that it wraps."""
    names = getattr(getattr(function, "__func__", function), "__globals__", {})
    written_in = str(names.get("__name__", "contextlib"))
    if written_in not in ("contextlib", "functools"):  # else it was made by one of these
        return written_in
    return str(getattr(function, "__module__", type(function).__module__))


def package_of(value: object) -> str:
    """The top-level package of a class or function."""
    return str(getattr(value, "__module__", "")).partition(".")[0]


def kept_per_class(find: Callable[[type], Answer]) -> Callable[[type], Answer]:
    """Keep what a function finds out about the members of a class, until one is added, replaced or removed.

    The classes are never forgotten, so it is for those of packages.
    """
    known: dict[type, tuple[list[str], list[object], Answer]] = {}

    @functools.wraps(find)
    def found(kind: type) -> Answer:
        names, members = list(vars(kind)), list(vars(kind).values())
        before = known.get(kind)
        if before is not None and before[0] == names and all(map(operator.is_, before[1], members)):
            return before[2]
        answer = find(kind)
        known[kind] = names, members, answer
        return answer

    return found


def number_of_arguments(func: Callable[..., object]) -> int:
    """Count the arguments that a function or a partial still takes.

    Mirrors:
        `transformers.trainer_utils.number_of_arguments`.
    """
    if isinstance(func, functools.partial):
        bound = len(func.args) + len(func.keywords)
        return len(inspect.signature(func.func).parameters) - bound
    return len(inspect.signature(func).parameters)


class AcceptedParameters(NamedTuple):
    """The parameters of a callable. A builtin without a signature takes any place and no keyword."""

    places: tuple[str, ...]  # names of positional parameters, in order
    takes_any_place: bool  # whether it has `*args`
    names: frozenset[str]  # names that can be given by keyword
    takes_any_keyword: bool  # whether it has `**kwargs`
    required: frozenset[str]  # names without a default


def _parameters_of(function: Callable[..., object], skips_self: bool = False) -> AcceptedParameters:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return AcceptedParameters((), True, frozenset(), False, frozenset())
    places, names, required, kinds = [], [], [], set()
    for p in parameters[int(skips_self) :]:
        kinds.add(p.kind)
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            places.append(p.name)
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            names.append(p.name)
        if p.default is p.empty:
            required.append(p.name)
    takes_places, takes_keywords = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    return AcceptedParameters(tuple(places), takes_places, frozenset(names), takes_keywords, frozenset(required))


_kept_parameters_of = functools.lru_cache(maxsize=1024)(_parameters_of)


def accepted_parameters(method: Callable[..., object]) -> AcceptedParameters:
    """The parameters of a bound method, without `self`, or of another callable.

    A method's function is inspected once. Other callables may hold a trainer, so they are not cached.
    """
    function = getattr(method, "__func__", None)
    return _parameters_of(method) if function is None else _kept_parameters_of(function, skips_self=True)


def accepts_keyword(method: Callable[..., object], name: str) -> bool:
    """Whether a callable can be called with a keyword."""
    accepted = accepted_parameters(method)
    return accepted.takes_any_keyword or name in accepted.names


def accepts_positionally(method: Callable[..., object], name: str, index: int) -> bool:
    """Whether a callable takes a value at a place, counted from 0, or under a name."""
    accepted = accepted_parameters(method)
    takes_any = accepted.takes_any_place or accepted.takes_any_keyword
    return takes_any or len(accepted.places) > index or name in accepted.names


def dropping_unknown_keywords(method: Callable[..., Answer], *names: str) -> Callable[..., Answer]:
    """Return a method of any HF release as a callable that also takes these keywords, and drops those it lacks.

    A subclass written for an older release lacks later parameters such as `num_items_in_batch`. A newer one may take
    them as `**kwargs`.
    """
    accepted = accepted_parameters(method)
    if accepted.takes_any_keyword or accepted.names.issuperset(names):
        return method
    known = accepted.names
    return lambda *args, **optional: method(*args, **{n: value for n, value in optional.items() if n in known})


# How to pass values: the number of positional ones, then place and name of those that follow by keyword.
Way = tuple[int, tuple[tuple[int, str], ...]]


@functools.lru_cache(maxsize=1024)
def _way_of(accepted: AcceptedParameters, names: tuple[str, ...], last_by_keyword: int) -> Way:
    by_name = len(names) - last_by_keyword
    # a wrapper of the same signature looks for the last ones among its keywords
    has_last = accepted.takes_any_keyword or accepted.names.issuperset(names[by_name:])
    most = by_name if has_last else len(names)
    positional = 0
    if accepted.takes_any_place:
        positional = most
    elif all(place == name or place not in names for place, name in zip(accepted.places, names, strict=False)):
        positional = min(len(accepted.places), most)
    rest = enumerate(names[positional:], start=positional)
    return positional, tuple((at, name) for at, name in rest if accepted.takes_any_keyword or name in accepted.names)


def calling_like_upstream(
    method: Callable[..., Answer], names: tuple[str, ...], last_by_keyword: int = 0
) -> Callable[..., Answer]:
    """Return a method of any HF release as a callable that takes what upstream passes, in upstream's form.

    The method gets it positionally if its parameters are in upstream's order, whatever their names, and as many as it
    takes. An override of an older release may lack a parameter in the middle. It gets by keyword those that it names.

    Args:
        method: A bound method, or another callable. It is returned itself if it takes upstream's form.
        names: Upstream's names of the parameters, in order.
        last_by_keyword: How many of the last ones upstream passes by keyword.
    """
    positional, by_keyword = _way_of(accepted_parameters(method), names, last_by_keyword)
    if positional == len(names) - last_by_keyword and len(by_keyword) == last_by_keyword:
        return method

    def call(*places: object, **last: object) -> Answer:
        values = (*places, *last.values())
        return method(*values[:positional], **{name: values[at] for at, name in by_keyword})

    return call


PACKAGES = frozenset(("builtins", "hf_compat", "transformers", "lightning", "lightning_fabric", "pytorch_lightning"))


def is_of_packages(kind: type) -> bool:
    """Whether a class is ours, or of a package that we stand on, and not the user's."""
    return kind.__module__.partition(".")[0] in PACKAGES


class UntilSet:
    """Reads an attribute by a property, until an object has a value of its own in its place."""

    def __init__(self, read: property) -> None:
        self.read = read

    def __get__(self, holder: object, kind: type) -> object:
        return self if holder is None else self.read.__get__(holder, kind)


def codes_of(member: object) -> Iterator[types.CodeType]:
    """Yield the code of a function, method or property, of what decorators stand around, and of inner functions."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    waiting = list[object]()
    while function is not None:
        waiting.append(getattr(function, "__code__", None))
        function = getattr(function, "__dict__", {}).get("__wrapped__")
    while waiting:
        code = waiting.pop()
        if isinstance(code, types.CodeType):
            yield code
            waiting += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]


def own_codes(kind: type) -> Iterator[types.CodeType]:
    """Yield the code of all functions that the user's classes among a class's bases define."""
    for one in kind.__mro__:
        for member in () if is_of_packages(one) else vars(one).values():
            yield from codes_of(member)


def mentions(kind: type, word: str) -> bool:
    """Whether the user's classes among a class's bases name an attribute or a global that has a word."""
    return any(word in name for code in own_codes(kind) for name in code.co_names)


def reads_parameter(function: Callable[..., object], name: str) -> bool:
    """Whether the body reads parameter `name` or forwards `*args/**kwargs`. True for builtins."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    parameters = inspect.signature(function).parameters.values()
    gathers = {p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    loads = (step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_"))
    # one instruction of Python 3.13 loads two
    used = {str(name) for names in loads for name in (names if isinstance(names, tuple) else (names,))}
    return bool(used & ({name} | gathers))


def length_of(candidate: object) -> int | None:
    """The length of a data set or loader, or None if `len()` does not work on it."""
    try:
        return len(candidate)  # type: ignore[arg-type]  # asked here
    except (TypeError, AttributeError, NotImplementedError):
        return None


def has_length(dataset: object) -> bool:
    """Whether `len()` works on a data set or loader. Mirrors `transformers.trainer_utils.has_length`."""
    return length_of(dataset) is not None


# What a user's model, loader, schedule or collator may lack, each read here alone.
def has_device_map(model: object) -> bool:
    """Whether `from_pretrained(device_map=…)` has placed a model."""
    return getattr(model, "hf_device_map", None) is not None


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside a wrapper of torch.compile, or the model itself."""
    inner: nn.Module | None = getattr(model, "_orig_mod", None)
    return model if inner is None else inner


def dataset_of(loader: object) -> object:
    """The data set that a loader reads, or None."""
    return getattr(loader, "dataset", None)


def call_if_there(owner: object, name: str, *args: object) -> None:
    """Call a method that a user's object may lack."""
    method = getattr(owner, name, None)
    if callable(method):
        method(*args)
