"""Whether a loss depends on the number of items by which it is to be divided.

transformers passes `num_items_in_batch` to whatever takes it, and does not divide by the micro-batches then. Code that
ignores the number gives losses and gradients that are too large, by the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

# Methods that return the value, and methods that hand it on.
_READING = frozenset(
    ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "__complex__", "__reduce_ex__")
)
_PASSING = frozenset(("to", "cpu", "cuda", "clone", "detach", "float", "double", "long", "int", "sum"))


class Count(torch.Tensor):
    """A number, over the memory of another tensor, that notes whether something was computed from it."""

    uses: list[str]  # what was computed, also from the number on another device, or of another type

    @classmethod
    def of(cls, items: torch.Tensor, uses: list[str] | None = None) -> Count:
        """Look at a tensor, of no other subclass, as a count."""
        count = items.as_subclass(cls)
        count.uses = [] if uses is None else uses
        return count

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        values = [*args, *(kwargs or {}).values()]
        with torch._C.DisableTorchFunctionSubclass():
            # methods of Python, as `__format__`, look at the type
            plain = [one.as_subclass(torch.Tensor) if isinstance(one, Count) else one for one in args]
            result = func(*plain, **(kwargs or {}))
        name, tensor = getattr(func, "__name__", ""), result if isinstance(result, torch.Tensor) else None
        if type(result) is torch.Tensor and name in _PASSING and isinstance(args[0], Count):
            return cls.of(result, args[0].uses)
        if name in _READING or (tensor is not None and tensor.dtype != torch.bool):
            for one in values + [part for value in values if isinstance(value, (list, tuple)) for part in value]:
                if isinstance(one, Count):
                    one.uses.append(name)
        return result
