"""What a model's forward takes, whether data has a length, how to call a user's method of any HF era.

Imports nothing of the package.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def find_labels(model_class: type[nn.Module]) -> list[str]:
    """List the parameters of a model's `forward` that are labels.

    Mirrors:
        `transformers.utils.find_labels`, 5.23.
    """
    parameters = inspect.signature(model_class.forward).parameters
    spans = ("start_positions", "end_positions") if "QuestionAnswering" in model_class.__name__ else ()
    return [name for name in parameters if "label" in name or name in spans]


def can_return_loss(model_class: type[nn.Module]) -> bool:
    """Say whether `forward` has `return_loss=True` by default (CLIP-like models).

    Mirrors:
        `transformers.utils.can_return_loss`, 5.23.
    """
    parameter = inspect.signature(model_class.forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True


def has_var_keyword(function: Callable[..., Any]) -> bool:
    """Say whether a function takes `**kwargs`."""
    kinds = (parameter.kind for parameter in inspect.signature(function).parameters.values())
    return any(kind is inspect.Parameter.VAR_KEYWORD for kind in kinds)


def number_of_arguments(function: Callable[..., Any]) -> int:
    """Count the arguments that a function, or what is left of a partial, still takes.

    Mirrors:
        `transformers.trainer_utils.number_of_arguments`, 5.23.
    """
    if isinstance(function, functools.partial):
        bound = len(function.args) + len(function.keywords)
        return len(inspect.signature(function.func).parameters) - bound
    return len(inspect.signature(function).parameters)


@functools.lru_cache(maxsize=1024)
def _accepted(function: Callable[..., Any]) -> tuple[int, bool, frozenset[str], bool]:
    """Return (positional places, takes *args, names, takes **kwargs) of a plain function, `self` included."""
    parameters = inspect.signature(function).parameters.values()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    kinds = {p.kind for p in parameters}
    return (
        len(places),
        inspect.Parameter.VAR_POSITIONAL in kinds,
        names,
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


def call_by_signature(method: Callable[..., Any], *args: Any, optional: dict[str, Any]) -> Any:
    """Call a method of any HF era: `args` always, each of `optional` only where the signature has a place for it.

    A subclass written for an older release lacks the later parameters (`num_items_in_batch`, `start_time` …); newer
    ones may take them under `**kwargs`. Inspected once a function, so this is cheap on the hot path.

    Args:
        method: A bound method, or a plain callable.
        args: Positional arguments that every era has.
        optional: Keyword arguments that came with later releases, in the order of their places.
    """
    function = getattr(method, "__func__", None)
    if function is None:
        return method(*args, **_only_accepted(method, optional))
    _, takes_more, names, takes_any = _accepted(function)
    if takes_any:
        return method(*args, **optional)
    if takes_more:
        return method(*args, *optional.values())
    return method(*args, **{name: value for name, value in optional.items() if name in names})


def _only_accepted(function: Callable[..., Any], optional: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins without a signature: they get what every era has
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return optional
    return {name: value for name, value in optional.items() if name in parameters}


def fitting_arguments(method: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cut positional arguments to as many as a bound method takes (for parameters whose names changed over time)."""
    function = getattr(method, "__func__", None)
    if function is None:
        return args
    places, takes_any, _, _ = _accepted(function)
    return args if takes_any else args[: places - 1]


def has_length(candidate: Any) -> bool:
    """Say whether `len()` works on a data set or loader. Mirrors `transformers.trainer_utils.has_length`, 5.23."""
    try:
        return len(candidate) is not None
    except (TypeError, AttributeError, NotImplementedError):
        return False
