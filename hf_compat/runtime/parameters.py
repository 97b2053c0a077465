"""The parameters of a model, found at every update."""

from __future__ import annotations

from torch import nn

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
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
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
        waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found.values())


def forget_gradients(model: nn.Module) -> None:
    """Do what `model.zero_grad()` does, by way of it where the model's class has its own."""
    own = type(model).zero_grad is not nn.Module.zero_grad or "zero_grad" in vars(model)
    if own or getattr(model, "_is_replica", False):
        model.zero_grad()
        return
    for parameter in parameters_of(model):
        parameter.grad = None
