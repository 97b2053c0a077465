"""`debug="underflow_overflow"`: forward hooks that show what led to the first NaN or infinite number."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Container, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from hf_compat.errors import NonFiniteNumber
from hf_compat.hf.enums import DebugOption

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
