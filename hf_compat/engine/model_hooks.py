"""Hooks on the model: NEFTune's noise, `debug="underflow_overflow"`, and compilation.

NEFTune (https://arxiv.org/abs/2310.05914) adds uniform noise to the input embeddings in training mode. The debug hooks
show what led to the first NaN or infinite number. A compiled model is saved uncompiled.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Container, Iterator, Sequence

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from hf_compat.errors import ArgumentError, NonFiniteNumber
from hf_compat.hf.enums import DebugOption
from hf_compat.interop.deepspeed import compile_engine, is_deepspeed_engine
from hf_compat.interop.transformers_models import compile_blocks, unwrap_peft
from hf_compat.plan.lightning_plan import Compilation

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


_INDENT = " " * 17
_HEAD = f"{'abs min':8} {'abs max':8} metadata"


class DebugUnderflowOverflow:
    """Check weights, inputs and outputs of every called module, and stop at the first NaN or infinity.

    Then the last frames are printed. A frame names a module and its class, and shows the smallest and largest absolute
    value of each weight, input and output. Forward passes become much slower.

    Args:
        model: The model.
        max_frames_to_save: Number of frames to keep and print.
        trace_batch_nums: Batches to print completely, counted from 0. They never stop the run.
        abort_after_batch_num: Stop after this batch.

    Raises:
        NonFiniteNumber: In the model's forward, at the first NaN or infinity, or after `abort_after_batch_num`.

    Mirrors:
        `transformers.debug_utils.DebugUnderflowOverflow`, 5.23, including the printed text.

    Differs:
        `remove` removes the hooks from the model. Booleans and empty tensors are shown, too.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Sequence[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        self.model = model
        self.trace_batch_nums = list(trace_batch_nums or ())
        self.abort_after_batch_num = abort_after_batch_num
        self.frames: deque[str] = deque(maxlen=max_frames_to_save)
        self.frame: list[str] = []
        self.batch_number = self.total_calls = 0
        self.detected_overflow = False
        self.module_names = {module: name for name, module in model.named_modules()}
        self._handles: list[RemovableHandle] = []
        model.apply(self._hook)

    def _hook(self, module: nn.Module) -> None:
        self._handles.append(module.register_forward_hook(self.forward_hook))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forward_hook(self, module: nn.Module, inputs: object, output: object) -> None:
        """Record one module's call. The model's own call is the last of a batch."""
        is_traced = self.batch_number in self.trace_batch_nums
        if is_traced:
            self.frames.clear()
        if self.total_calls == 0:
            self._begin_batch()
        self.total_calls += 1
        self.batch_number += module is self.model
        self._note_call(module, inputs, output)
        if is_traced:
            self._show("\n".join(self.frames))
        if module is self.model:
            self._begin_batch()
        if self.detected_overflow and not is_traced:
            self._stop_at_overflow()
        last = self.abort_after_batch_num
        if last is not None and self.batch_number > last:
            raise NonFiniteNumber(
                f"DebugUnderflowOverflow: stopped after {self.batch_number} batches, as `abort_after_batch_num={last}` "
                "asks.\n\nHint: leave it out to train on."
            )

    def _begin_batch(self) -> None:
        self.frame += [f"\n\n{_INDENT} *** Starting batch number={self.batch_number} ***", _HEAD]

    def _note_call(self, module: nn.Module, inputs: object, output: object) -> None:
        name = self.module_names.get(module, "")
        self.frame.append(f"{_INDENT} {name} {type(module).__name__}")
        for name, weight in module.named_parameters(recurse=False):
            self._note(weight, name)
        for place, value in _named("input", inputs):
            self._note(value, place)
        for place, value in _named("output", output):
            for inner, part in _named(place, value):
                self._note(part, inner)
        self.frames.append("\n".join(self.frame))
        self.frame = []

    def _note(self, value: object, place: str) -> None:
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            self.frame.append(f"{_extent(whole)} {place}")
            self.detected_overflow |= detect_overflow(whole, place)
        else:
            self.frame.append(f"{'None' if value is None else 'not a tensor':>17} {place}")

    def _stop_at_overflow(self) -> None:
        self._show(
            f"\nDetected inf/nan during batch_number={self.batch_number}\n"
            f"Last {len(self.frames)} forward frames:\n{_HEAD}\n" + "\n".join(self.frames) + "\n\n\n"
        )
        raise NonFiniteNumber(
            "DebugUnderflowOverflow: inf/nan detected in the model's forward; the values that led to it are printed "
            "above.\n\nHint: look at the last frames, and lower the learning rate, or train in bf16 or fp32."
        )

    def _show(self, text: str) -> None:
        print(text)  # noqa: T201 - the user asked for it
        self.frames.clear()


def detect_overflow(value: torch.Tensor, place: str) -> bool:
    """Whether a tensor holds NaN or infinity. Print which.

    Args:
        value: The tensor, of any shape.
        place: The tensor's name in the output.

    Mirrors:
        `transformers.debug_utils.detect_overflow`, 5.23.
    """
    found = [what for what, holds in (("nans", torch.isnan), ("infs", torch.isinf)) if bool(holds(value).any().item())]
    for what in found:
        print(f"{place} has {what}")  # noqa: T201 - the user asked for it
    return bool(found)


def _named(place: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the items of a tuple with their indices, or the value itself."""
    if isinstance(value, tuple):
        yield from ((f"{place}[{i}]", member) for i, member in enumerate(value))
    else:
        yield place, value


def _extent(value: torch.Tensor) -> str:
    if value.numel() == 0:
        return f"{'empty':>17}"
    absolute = value.to(torch.uint8) if value.dtype is torch.bool else value.abs()
    return f"{absolute.min():8.2e} {absolute.max():8.2e}"


def watch_if_enabled(model: nn.Module, debug: Container[object]) -> DebugUnderflowOverflow | None:
    """Add the hooks to a model if the `debug` argument asks for them."""
    return DebugUnderflowOverflow(model) if DebugOption.UNDERFLOW_OVERFLOW in debug else None


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
        return compile_blocks(model, keywords)
    form: nn.Module = torch.compile(model, **keywords)  # type: ignore[call-overload]  # the keywords are a dict
    return form
