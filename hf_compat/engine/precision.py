"""Mixed precision around the model's forward only, as in HF.

Lightning's own mixed precision covers the whole training step, including a loss computed outside the model. It also
refuses to clip with fused optimizers, while here the module itself clips.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import Strategy
from torch import nn

from hf_compat.engine.internals import call_hooks_before_step
from hf_compat.plan.translate import PrecisionName
from hf_compat.runtime.nested import Nested, map_nested

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_HALF = (torch.float16, torch.bfloat16)
_NO_CONTEXT = contextlib.nullcontext()  # reusable and reentrant

ModelOutput = Any  # any result of the user's model


def outputs_in_float32(data: Nested) -> Nested:
    """Convert the half-precision tensors in nested outputs to float32."""
    return map_nested(lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor, data)


class AutocastForward:
    """A model's forward under autocast, with outputs in float32. As a class it can be pickled and copied.

    Args:
        forward: The model's own forward.
        device_type: `cpu`, `cuda` …
        dtype: The half precision to compute in.
    """

    def __init__(self, forward: Callable[..., ModelOutput], device_type: str, dtype: torch.dtype) -> None:
        self.forward = forward
        self.__wrapped__ = forward  # `inspect.signature` finds the model's own
        self.device_type = device_type
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> ModelOutput:
        with torch.autocast(self.device_type, dtype=self.dtype):
            outputs = self.forward(*args, **kwargs)
        return outputs_in_float32(outputs)


def wrap_forward(model: nn.Module, precision: str, device_type: str) -> None:
    """Put a model's forward under autocast, once. Do nothing for full precision.

    As with Accelerate it stays so after training, so that later evaluations give the same numbers.
    """
    dtype = DTYPES.get(precision)
    if dtype is None or isinstance(model.__dict__.get("forward"), AutocastForward):
        return
    model.forward = AutocastForward(model.forward, device_type, dtype)


def unwrap_forward(model: nn.Module) -> None:
    """Restore a model's own forward."""
    if isinstance(model.__dict__.get("forward"), AutocastForward):
        del model.forward


class ForwardPrecision(Precision):
    """A Lightning precision plugin without autocast around the steps, as the model's forward has it.

    Args:
        precision: Lightning's name for the precision.
        scaler: Gradient scaler, for `16-mixed`.
    """

    def __init__(self, precision: PrecisionName = "32-true", scaler: torch.amp.GradScaler | None = None) -> None:
        self.precision = precision
        self.scaler = scaler
        self.step_was_skipped = False
        self._is_unscaled = False
        # the context for each user-defined step, by Lightning's name of the step
        self.of_own_steps: Mapping[str, contextlib.AbstractContextManager[None]] = {}

    def train_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.of_own_steps.get("training_step", _NO_CONTEXT)

    def val_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.of_own_steps.get("validation_step", _NO_CONTEXT)

    def test_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.of_own_steps.get("test_step", _NO_CONTEXT)

    def predict_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.of_own_steps.get("predict_step", _NO_CONTEXT)

    def pre_backward(self, tensor: torch.Tensor, module: LightningModule) -> torch.Tensor:  # type: ignore[override]
        scaled = tensor if self.scaler is None else self.scaler.scale(tensor)
        return super().pre_backward(scaled, module)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients before they are clipped, once an update, as a script may have done it."""
        if self.scaler is not None and not self._is_unscaled:
            self.scaler.unscale_(optimizer)
            self._is_unscaled = True

    def optimizer_step(  # type: ignore[override]  # Lightning's parameter types differ from its base's as well
        self, optimizer: torch.optim.Optimizer, model: LightningModule, closure: Callable[[], object], **kwargs: Any
    ) -> float | None:
        """Call the hooks before a step, then step. The gradients exist already, so the closure is not passed on."""
        closure()
        call_hooks_before_step(self, model, optimizer)
        if self.scaler is None:
            return optimizer.step(**kwargs)
        # As in Accelerate, a step is skipped if the scaler does not call it. The scaler always calls a fused optimizer,
        # which checks the gradients on the device. Reading the scale would wait for the device.
        called: list[bool] = []
        handle = optimizer.register_step_pre_hook(lambda *_: called.append(True))
        try:
            result: float | None = self.scaler.step(optimizer, **kwargs)
        finally:
            handle.remove()
        self.scaler.update()
        self._is_unscaled = False
        self.step_was_skipped = not called
        return result

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)


def autocast_of(plugin: Precision, device_type: str) -> contextlib.AbstractContextManager[None]:
    """Return the autocast of a precision plugin. A null context for full and true precision."""
    dtype = DTYPES.get(plugin.precision) if isinstance(plugin, ForwardPrecision) else None
    return _NO_CONTEXT if dtype is None else torch.autocast(device_type, dtype=dtype)


def move_autocast_to_forward(
    strategy: Strategy, model: nn.Module, device_type: str, own_steps: Iterable[str] = ()
) -> None:
    """Replace a strategy's mixed precision by autocast around a model's forward.

    Args:
        strategy: The strategy of a trainer that has not set it up yet.
        model: The model.
        device_type: `cpu`, `cuda` …
        own_steps: User-defined steps, which run under autocast as in any LightningModule.
    """
    plugin = strategy.precision_plugin
    if type(plugin) is MixedPrecision:
        precision: PrecisionName = "bf16-mixed" if plugin.precision == "bf16-mixed" else "16-mixed"
        strategy.precision_plugin = plugin = ForwardPrecision(precision, plugin.scaler)
    if isinstance(plugin, ForwardPrecision):  # possibly from an earlier call on the same trainer
        wrap_forward(model, plugin.precision, device_type)
        plugin.of_own_steps = {name: autocast_of(plugin, device_type) for name in own_steps}
