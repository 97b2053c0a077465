"""Hooks on the model: NEFTune's noise, `debug="underflow_overflow"`, and compilation.

NEFTune (https://arxiv.org/abs/2310.05914) adds uniform noise to the input embeddings in training mode.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Container, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from hf_compat.errors import ArgumentError, NonFiniteNumber
from hf_compat.hf.enums import DebugOption
from hf_compat.interop.deepspeed import compile_engine, is_deepspeed_engine
from hf_compat.interop.releases import of_transformers
from hf_compat.interop.transformers_models import unwrap_peft
from hf_compat.plan.translate import Compilation
from hf_compat.runtime.text import need

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
        `transformers.integrations.neftune`, 5.23.
    """

    def __init__(self, model: nn.Module, strength: float) -> None:
        self._layer = input_embeddings(model)
        setattr(self._layer, _STRENGTH, strength)
        self._handle: RemovableHandle = self._layer.register_forward_hook(_add_noise)

    def remove(self) -> None:
        """Remove the hook from the layer. A second call does nothing."""
        self._handle.remove()
        if hasattr(self._layer, _STRENGTH):
            delattr(self._layer, _STRENGTH)


def input_embeddings(model: nn.Module) -> nn.Module:
    """Return the layer that embeds a model's input.

    Raises:
        ArgumentError: The model has no such layer, or does not name it.
    """
    inner = unwrap_peft(model)
    find = getattr(inner, "get_input_embeddings", None)
    try:
        layer = find() if callable(find) else None
    except NotImplementedError:  # raised by transformers' models without such a layer
        layer = None
    if not isinstance(layer, nn.Module):
        raise ArgumentError(
            f"`neftune_noise_alpha` adds noise to the input embeddings, and {type(inner).__name__} names no such "
            "layer.\n\n"
            "Hint: give the model a method `get_input_embeddings()` that returns the layer, or leave the argument out."
        )
    return layer


def _add_noise(layer: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    if not layer.training:
        return output
    # float32, as upstream. float64 would change the last bits of the bound, and so of the noise
    bound = getattr(layer, _STRENGTH) / torch.sqrt(torch.tensor(math.prod(output.shape[1:3])))
    return output + torch.zeros_like(output).uniform_(-bound, bound)


class NoiseOfFit(pl.Callback):
    """Removes the noise after a fit that failed. In a plain `lightning.Trainer` only callbacks learn of a failure.

    Args:
        noise: The noise of this fit.
    """

    def __init__(self, noise: EmbeddingNoise) -> None:
        self.noise = noise

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove the noise."""
        self.noise.remove()


def begin_noise(trainer: pl.Trainer, model: nn.Module, strength: float | None) -> None:
    """Add noise to a model for the fit that starts. A strength of None adds none."""
    end_noise(trainer)
    if strength is not None:
        _callbacks(trainer).append(NoiseOfFit(EmbeddingNoise(model, strength)))


def end_noise(trainer: pl.Trainer) -> None:
    """Remove the noise of a fit, if there is any."""
    for callback in [one for one in _callbacks(trainer) if isinstance(one, NoiseOfFit)]:
        callback.noise.remove()
        _callbacks(trainer).remove(callback)


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


_Debugger: Any = object  # transformers' class follows `OverflowWatch` in the class that `watch_if_enabled` makes


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


def watch_if_enabled(model: nn.Module, debug: Container[object]) -> OverflowWatch | None:
    """Check every module's weights, inputs and outputs if the `debug` argument asks for it.

    The first NaN or infinity stops the run. The last calls are printed.

    Raises:
        MissingPackage: Transformers is not installed.
        NonFiniteNumber: In the model's forward, at the first NaN or infinity.
    """
    if DebugOption.UNDERFLOW_OVERFLOW not in debug:
        return None
    make: Callable[[nn.Module], OverflowWatch] = _watch_class()
    return make(model)


@contextlib.contextmanager
def watching_for_overflow(model: nn.Module, debug: Container[object]) -> Iterator[None]:
    """Check for overflow within the context if the `debug` argument asks for it."""
    watch = watch_if_enabled(model, debug)
    try:
        yield
    finally:
        if watch is not None:
            watch.remove()


_INNER = "_orig_mod"  # the attribute in which torch.compile keeps the original module


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside a compiled one, or the model itself."""
    inner = getattr(model, _INNER, None)
    return inner if isinstance(inner, nn.Module) else model


def compiled(model: nn.Module, how: Compilation | None) -> nn.Module:
    """Compile a model. A compiled model is returned as it is, and so is any model if `how` is None.

    Both share their parameters. The original still runs uncompiled.

    Mirrors:
        The end of `accelerate.Accelerator.prepare_model`, 1.15.
    """
    if how is None or uncompiled(model) is not model or getattr(model, "_compiled_call_impl", None) is not None:
        return model
    keywords = how.keywords()
    if is_deepspeed_engine(model):  # the engine compiles the module inside it
        compile_engine(model, keywords)
        return model  # type: ignore[return-value]  # a module, though its protocol does not say so
    if how.by_blocks:
        utils = need("accelerate.utils", "accelerate", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true")
        form: nn.Module = utils.compile_regions(model, **keywords)  # it shares the model's parameters
        return form
    form = torch.compile(model, **keywords)  # type: ignore[call-overload]  # the keywords are a dict
    return form
