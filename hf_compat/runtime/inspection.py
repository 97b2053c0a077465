"""What a model's forward takes, whether data has a length, how to call a user's method of any HF era.

Imports nothing of the package.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

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


def call_by_signature(method: Callable[..., Answer], *args: object, optional: dict[str, Any]) -> Answer:
    """Call a method of any HF era: `args` always, each of `optional` only where the signature accepts it.

    A subclass written for an older release lacks the later parameters (`num_items_in_batch`, `start_time` …); newer
    ones may take them under `**kwargs`. A function is inspected once, so this is cheap at every step.

    Args:
        method: A bound method, or a plain callable.
        args: Positional arguments that every era has.
        optional: Keyword arguments that came with later releases, in the order of their parameters.
    """
    function = getattr(method, "__func__", None)
    if function is None:
        return method(*args, **_only_accepted(method, optional))
    accepted = accepted_parameters(function)
    if accepted.takes_any_keyword:
        return method(*args, **optional)
    if accepted.takes_any_positional:
        return method(*args, *optional.values())
    return method(*args, **{name: value for name, value in optional.items() if name in accepted.names})


def _only_accepted(function: Callable[..., object], optional: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins without a signature: they get what every era has
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return optional
    return {name: value for name, value in optional.items() if name in parameters}


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
