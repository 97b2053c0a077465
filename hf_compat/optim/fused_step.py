"""`FusedStep`: the step of torch's fused Adam and AdamW, with nothing around the kernel."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as of_torch

from hf_compat.optim.prepared import Prepared

Tensors = list[torch.Tensor]

_FOLDER = Path(of_torch.__file__).parent
_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")


class FusedStep:
    """Steps an optimizer as its own `step` does, to the bit.

    At each step torch sorts the tensors by device and type, looks for hooks and opens a range for its profiler. For a
    small model that takes five times as long as the kernel. Here one loop collects the tensors. What it does not know,
    such as a first step, a hook or a replaced method, is left to the optimizer's `step`.

    Attributes:
        optimizer: The one that steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._looked_at: tuple[object, ...] = ()
        self._is_torchs = False

    def __reduce__(self) -> tuple[type[FusedStep], tuple[Optimizer]]:
        return FusedStep, (self.optimizer,)  # functions of classes cannot be pickled, nor a schedule's

    def __call__(self) -> None:
        """Step."""
        optimizer = self.optimizer
        found = self._collect() if self._may_be_direct() else None
        if found is None:
            optimizer.step()
            return
        with torch.no_grad():
            for group, (parameters, gradients, averages, squares, steps) in found:
                torch._foreach_add_(steps, 1)
                kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
                beta1, beta2 = group["betas"]
                kernel(
                    parameters, gradients, averages, squares, [], steps,
                    lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
                    amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
                )  # fmt: skip
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedules test it

    def _may_be_direct(self) -> bool:
        """Whether nothing takes part in a step but torch's own code."""
        optimizer, kind = self.optimizer, type(self.optimizer)
        own = vars(optimizer)
        looked_at = (kind, kind.step, own.get("step"))  # a schedule sets the last
        if looked_at != self._looked_at:
            self._looked_at = looked_at
            self._is_torchs = kind in (Adam, AdamW) and all(map(_is_of_torch, looked_at[1:]))
        if not self._is_torchs:
            return False
        hooks = (
            *(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
            *(of_torch._global_optimizer_pre_hooks, of_torch._global_optimizer_post_hooks),
        )
        is_scaled = own.get("found_inf") is not None or own.get("grad_scale") is not None  # a gradient scaler's
        return not any(hooks) and not is_scaled and not torch._C._autograd._profiler_enabled()

    def _collect(self) -> list[tuple[Prepared, tuple[Tensors, ...]]] | None:
        """Return each group with gradients, and the tensors of its step. None if one wants more than the kernel."""
        found = []
        for group in self.optimizer.param_groups:
            has_tensors = any(isinstance(one, torch.Tensor) for one in (group["lr"], *group["betas"]))
            if not group["fused"] or has_tensors or any(map(group.get, _FLAGS)):
                return None
            tensors = self._tensors_of(group["params"])
            if tensors is None:
                return None
            if tensors[0]:
                found.append((group, tensors))
        return found

    def _tensors_of(self, parameters: list[nn.Parameter]) -> tuple[Tensors, ...] | None:
        """Return parameters, gradients and states. None if they are not of one kind, or have no states yet."""
        state: Prepared = self.optimizer.state
        tensors: tuple[Tensors, ...] = ([], [], [], [], [])
        stepped, gradients, averages, squares, steps = tensors
        kind = None
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            own, kind = state.get(parameter), kind or (parameter.device, parameter.dtype)
            is_plain = type(parameter) is nn.Parameter and not gradient.is_sparse and kind[1].is_floating_point
            if not own or not is_plain or (parameter.device, parameter.dtype) != kind:
                return None
            stepped.append(parameter)
            gradients.append(gradient)
            averages.append(own["exp_avg"])
            squares.append(own["exp_avg_sq"])
            steps.append(own["step"])
        return tensors


def _is_of_torch(function: object) -> bool:
    """Whether a function, and all that it wraps, are in torch's files of optimizers. None is."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or Path(code.co_filename).parent != _FOLDER:
            return False
        function = getattr(function, "__wrapped__", None)
    return True
