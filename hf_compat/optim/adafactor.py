"""Adafactor (Shazeer and Stern, 2018) in HF's variant.

The floating-point operations keep upstream's order, because parity is bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

# Options and tensors by name, as in torch.
Group: TypeAlias = dict[str, Any]
State: TypeAlias = dict[str, Any]
HALF_PRECISION = (torch.float16, torch.bfloat16)


class Adafactor(Optimizer):
    """Adam with a factored second moment, so its state is a fraction of the weights' size.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate. None with `relative_step=True`.
        eps: Constants for the squared gradient and for the parameter scale.
        clip_threshold: Root mean square above which an update is scaled down.
        decay_rate: Exponent of the running mean's decay.
        beta1: Decay of the first moment. None keeps no first moment.
        weight_decay: Decoupled weight decay.
        scale_parameter: Scale the learning rate by the parameter's root mean square.
        relative_step: Let the learning rate follow the step count.
        warmup_init: Start that learning rate low.

    Raises:
        ValueError: `lr` with `relative_step`, or `warmup_init` without it.

    Mirrors:
        `transformers.optimization.Adafactor`, 5.23, with the same state.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if lr is not None and relative_step:
            raise ValueError("Cannot combine manual `lr` and `relative_step=True` options")
        if warmup_init and not relative_step:
            raise ValueError("`warmup_init=True` requires `relative_step=True`")
        numbers = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate, "beta1": beta1}
        switches = {"scale_parameter": scale_parameter, "relative_step": relative_step, "warmup_init": warmup_init}
        defaults = {**numbers, "weight_decay": weight_decay, **switches}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's do
        """Do one update of every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: Group) -> None:
        gradient = parameter.grad
        assert gradient is not None  # step() has tested it
        if gradient.is_sparse:
            raise RuntimeError("Adafactor does not support sparse gradients.")
        gradient = gradient.float() if gradient.dtype in HALF_PRECISION else gradient
        weights = parameter.float() if parameter.dtype in HALF_PRECISION else parameter
        state = self._state_of(parameter, gradient, group)
        state["step"] += 1
        state["RMS"] = _root_mean_square(weights)
        lr = self._get_lr(group, state)
        # the second moment takes this gradient in, and its root divides the gradient
        decay = 1.0 - math.pow(state["step"], group["decay_rate"])
        squared = (gradient**2) + group["eps"][0]
        if "exp_avg_sq" in state:
            update = state["exp_avg_sq"].mul_(decay).add_(squared, alpha=1.0 - decay).rsqrt().mul_(gradient)
        else:
            rows = state["exp_avg_sq_row"].mul_(decay).add_(squared.mean(dim=-1), alpha=1.0 - decay)
            columns = state["exp_avg_sq_col"].mul_(decay).add_(squared.mean(dim=-2), alpha=1.0 - decay)
            row_factor = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = torch.mul(row_factor, columns.unsqueeze(-2).rsqrt()).mul_(gradient)
        update.div_((_root_mean_square(update) / group["clip_threshold"]).clamp_(min=1.0)).mul_(lr)
        if group["beta1"] is not None:
            update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"] != 0:
            weights.add_(weights, alpha=-group["weight_decay"] * lr)
        weights.add_(-update)
        if weights is not parameter:
            parameter.copy_(weights)

    # `transformers.optimization.AdafactorSchedule` calls it by this name
    @staticmethod
    def _get_lr(group: Group, state: State) -> float | torch.Tensor:
        lr = group["lr"]
        if group["relative_step"]:
            lowest = 1e-6 * state["step"] if group["warmup_init"] else 1e-2
            lr = min(lowest, 1.0 / math.sqrt(state["step"]))
        scale = max(group["eps"][1], state["RMS"]) if group["scale_parameter"] else 1.0
        return scale * lr

    def _state_of(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group) -> State:
        state: State = self.state[parameter]
        if state:
            for name in ("exp_avg", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"):
                if name in state:
                    state[name] = state[name].to(gradient)
            return state
        state["step"] = 0
        shape = gradient.shape
        if group["beta1"] is not None:
            state["exp_avg"] = torch.zeros_like(gradient)
        if gradient.ndim >= 2:
            state["exp_avg_sq_row"] = gradient.new_zeros(shape[:-1])
            state["exp_avg_sq_col"] = gradient.new_zeros(shape[:-2] + shape[-1:])
        else:
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        state["RMS"] = 0
        return state


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = tensor.norm(2)
    return norm / (tensor.numel() ** 0.5)
