"""Hooks on the model: NEFTune's noise, and `debug="underflow_overflow"`.

NEFTune (https://arxiv.org/abs/2310.05914) adds uniform noise to the input embeddings in training mode.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Self

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from hf_compat.errors import ArgumentError, NonFiniteNumber
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import DebugOption
from hf_compat.interop.releases import of_transformers
from hf_compat.interop.transformers_models import unwrap_peft

_STRENGTH = "neftune_noise_alpha"  # the layer's attribute, as upstream, because callbacks change it


class EmbeddingNoise:
    """Adds noise to the input embeddings of one model until `remove` is called.

    Args:
        model: The model without the wrappers of a strategy. A PEFT adapter may wrap it.
        strength: NEFTune's alpha, >= 0.

    Raises:
        ArgumentError: The model has no layer that embeds its input.

    Shapes:
        The layer's output is `[batch, sequence, features]`. The noise is within ±alpha / sqrt(sequence · features).

    Mirrors:
        `transformers.integrations.neftune`.
    """

    def __init__(self, model: nn.Module, strength: float) -> None:
        inner = unwrap_peft(model)
        find = getattr(inner, "get_input_embeddings", None)
        try:
            layer = find() if callable(find) else None
        except NotImplementedError:  # raised by transformers' models without such a layer
            layer = None
        if not isinstance(layer, nn.Module):
            raise ArgumentError(
                f"`neftune_noise_alpha` adds noise to the input embeddings, and {type(inner).__name__} names no such "
                "layer.\n\nHint: give the model a method `get_input_embeddings()` that returns the layer, or leave the "
                "argument out."
            )
        self._layer = layer
        setattr(self._layer, _STRENGTH, strength)
        self._handle: RemovableHandle = self._layer.register_forward_hook(_add_noise)

    def remove(self) -> None:
        """Remove the hook from the layer. A second call does nothing."""
        self._handle.remove()
        if hasattr(self._layer, _STRENGTH):
            delattr(self._layer, _STRENGTH)


def _add_noise(layer: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    if not layer.training:
        return output
    # float32, as upstream. float64 would change the last bits of the bound, and so of the noise
    bound = getattr(layer, _STRENGTH) / torch.sqrt(torch.tensor(math.prod(output.shape[1:3])))
    return output + torch.zeros_like(output).uniform_(-bound, bound)


_Debugger: Any = object  # transformers' class follows `OverflowWatch` in the class that `watch_for_overflow` makes


class OverflowWatch(_Debugger):
    """Our additions to transformers' `DebugUnderflowOverflow`: removable hooks, and tensors that it cannot show."""

    _handles: list[RemovableHandle]

    def _register_forward_hook(self, module: nn.Module) -> None:
        self.__dict__.setdefault("_handles", []).append(module.register_forward_hook(self.forward_hook))

    def analyse_variable(self, var: object, ctx: str) -> None:
        """Note a variable's extent. Booleans, empty tensors and sharded tensors are shown, too."""
        if isinstance(var, torch.Tensor):
            whole = var.full_tensor() if isinstance(var, DTensor) else var
            var = whole.to(torch.uint8) if whole.dtype is torch.bool else whole
            if not whole.numel():
                self.expand_frame(f"{'empty':>17} {ctx}")
                return
        super().analyse_variable(var, ctx)

    def forward_hook(self, module: nn.Module, input: object, output: object) -> None:
        """Record a module's call, and stop at the first NaN or infinity."""
        try:
            super().forward_hook(module, input, output)
        except ValueError as error:
            raise NonFiniteNumber(
                f"{error}\n\nHint: look at the last frames, and lower the learning rate, or train in bf16 or fp32."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> tuple[Callable[[], OverflowWatch], tuple[()], dict[str, object]]:
        """Pickle without the class, which has no name in this file: the hooks are part of a model."""
        return _empty_watch, (), self.__dict__


@functools.cache
def _watch_class() -> type[OverflowWatch]:
    theirs = of_transformers("debug_utils", "DebugUnderflowOverflow", "`debug='underflow_overflow'`")
    return type("Watch", (OverflowWatch, theirs), {})


def _empty_watch() -> OverflowWatch:
    kind = _watch_class()
    return kind.__new__(kind)


def watch_for_overflow(model: nn.Module) -> OverflowWatch:
    """Check every module's weights, inputs and outputs, for `debug="underflow_overflow"`.

    The first NaN or infinity stops the run. The last calls are printed.

    Raises:
        MissingPackage: Transformers is not installed.
        NonFiniteNumber: In the model's forward, at the first NaN or infinity.
    """
    make: Callable[[nn.Module], OverflowWatch] = _watch_class()
    return make(model)


class HooksOfFit(pl.Callback):
    """Removes a fit's hooks from its model. In a plain `lightning.Trainer` only callbacks learn of a failure."""

    def __init__(self, hooks: list[EmbeddingNoise | OverflowWatch]) -> None:
        self.hooks = hooks

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()


def begin_hooks(trainer: pl.Trainer, model: nn.Module, args: TrainingArguments) -> None:
    """Add noise to a model, and check it for overflow, in the fit that starts, if the arguments ask for it."""
    end_hooks(trainer)
    hooks: list[EmbeddingNoise | OverflowWatch] = []
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        hooks.append(watch_for_overflow(model))
    if args.neftune_noise_alpha is not None:
        hooks.append(EmbeddingNoise(model, args.neftune_noise_alpha))
    if hooks:
        trainer.callbacks.append(HooksOfFit(hooks))  # type: ignore[attr-defined]  # set by a connector


def end_hooks(trainer: pl.Trainer) -> None:
    """Remove the hooks of a fit, if there are any."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in [one for one in callbacks if isinstance(one, HooksOfFit)]:
        for hook in callback.hooks:
            hook.remove()
        callbacks.remove(callback)
