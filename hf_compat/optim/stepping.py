"""How the optimizer steps, for each kind of optimizer.

Most optimizers step once an update, after its backward passes. Schedule-free ones hold two sets of weights, layerwise
ones step within the backward pass, and LOMO runs the backward pass itself.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from hf_compat.errors import warn_once
from hf_compat.optim.prepared import Prepared, unwrap_optimizer
from hf_compat.runtime.inspection import call_if_there


class LayerWiseDummyOptimizer(Optimizer):
    """One optimizer for torch, Lightning and callbacks in place of the optimizers of single parameters.

    Hooks step each parameter's optimizer. `step` and `zero_grad` do nothing.

    Args:
        optimizer_dict: Each parameter's optimizer.
        lr: The initial learning rate of a schedule.
        keywords: Ignored, as upstream.

    Mirrors:
        `transformers.trainer_pt_utils.LayerWiseDummyOptimizer`.

    Differs:
        It owns the hooks that step, registers them once and removes them.
    """

    def __init__(
        self, optimizer_dict: Mapping[nn.Parameter, Optimizer] | None = None, lr: float = 1e-3, **keywords: object
    ) -> None:
        self.optimizer_dict = dict(optimizer_dict or {})
        self.schedulers: dict[nn.Parameter, LRScheduler] = {}
        self._handles: list[RemovableHandle] = []
        # draws a random number, as upstream, so that dropout draws the same numbers
        super().__init__([torch.randn(1, 1)], {"lr": lr})

    def attach_hooks(self) -> None:
        """Step every parameter as soon as it has its gradient. A second call does nothing."""
        if self._handles:
            return
        for parameter in self.optimizer_dict:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._step_one)  # type: ignore[no-untyped-call]  # torch's
                self._handles.append(handle)

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _step_one(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        assert isinstance(parameter, nn.Parameter)  # a key of the dict
        optimizer = self.optimizer_dict[parameter]
        optimizer.step()
        optimizer.zero_grad()
        schedule = self.schedulers.get(parameter)
        if schedule is not None:
            schedule.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing. Each step has removed its gradient."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run the closure of Lightning's automatic optimization. The hooks have stepped."""
        return None if closure is None else closure()


class LayerWiseDummyScheduler(LRScheduler):
    """One schedule in place of the schedules of single parameters. It shows the rate of the first one.

    Args:
        optimizer_dict: Each parameter's optimizer.
        lr: The rate if no parameter has an optimizer.
        keywords: Ignored, as upstream.

    Mirrors:
        `transformers.trainer_pt_utils.LayerWiseDummyScheduler`.

    Differs:
        It has one rate for its one group. Since 2.9, torch refuses one rate for each parameter.
    """

    def __init__(
        self, optimizer_dict: Mapping[nn.Parameter, Optimizer] | None = None, *, lr: float, **keywords: object
    ) -> None:
        self.default_lr = lr
        stand_in = LayerWiseDummyOptimizer(optimizer_dict, lr=lr)
        stand_in._opt_called = True  # type: ignore[attr-defined]  # torch tests whether it has stepped
        super().__init__(stand_in, -1)

    def get_lr(self) -> list[float | torch.Tensor]:
        assert isinstance(self.optimizer, LayerWiseDummyOptimizer)
        groups = chain.from_iterable(one.param_groups for one in self.optimizer.optimizer_dict.values())
        return [next((group["lr"] for group in groups), self.default_lr)]

    def _get_closed_form_lr(self) -> list[float | torch.Tensor]:
        return self.base_lrs


class OptimizerBehaviour:
    """Apply the gradients in one `step` after an update's backward passes, as most optimizers do."""

    # whether `to_training` and `to_evaluation` do anything
    switches = False
    # whether parameters change in the backward pass, which leaves no gradients to accumulate or clip
    steps_in_backward = False
    # runs the backward pass of a loss at a learning rate, if the loss's own is not to run
    fused_backward: Callable[[torch.Tensor, float], None] | None = None
    # state outside the optimizer's `state_dict`, which checkpoints lack
    not_in_checkpoints = ""

    def __init__(self, optimizer: Prepared = None) -> None:
        self.optimizer = optimizer

    def attach(self) -> None:
        """Do nothing. Other kinds prepare for training, once."""

    detach = attach  # others undo that
    to_training = attach  # others put the trained weights into the parameters
    to_evaluation = attach  # others put there the weights to evaluate and save
    tell_of_saving = attach  # others warn of state that is not saved, as upstream

    def tell_of_resuming(self) -> None:
        """Warn of state that a checkpoint lacks, here and upstream."""
        if self.not_in_checkpoints:
            warn_once(
                f"A checkpoint does not hold {self.not_in_checkpoints}: {type(self.optimizer).__name__} begins with "
                "them anew, as in transformers."
            )


class ScheduleFreeStepping(OptimizerBehaviour):
    """Switch between the trained weights and their average by the optimizer's `train` and `eval`."""

    switches = True

    def to_training(self) -> None:
        call_if_there(self.optimizer, "train")

    def to_evaluation(self) -> None:
        call_if_there(self.optimizer, "eval")

    def tell_of_saving(self) -> None:
        """Warn that the average is not saved while the parameters hold the trained weights."""
        if any(group.get("train_mode", False) for group in getattr(self.optimizer, "param_groups", ())):
            warn_once(
                f"{type(self.optimizer).__name__}: weights are saved as they are trained, not averaged, as in "
                "transformers: an evaluation puts the average in force, until the next update.\n\nHint: evaluate at "
                "the updates that save (`eval_strategy`, `eval_steps`), and before `save_model`."
            )


class LayerwiseStepping(OptimizerBehaviour):
    """Step each parameter's own optimizer by a hook, as soon as the parameter has its gradient."""

    steps_in_backward = True
    not_in_checkpoints = "the states of the optimizers of single parameters"

    def __init__(self, optimizer: LayerWiseDummyOptimizer) -> None:
        super().__init__(optimizer)
        self.attach = optimizer.attach_hooks  # type: ignore[method-assign]  # saves a method that only calls this one
        self.detach = optimizer.remove_hooks  # type: ignore[method-assign]  # as above


class FusedStepping(OptimizerBehaviour):
    """Let the optimizer run the backward pass, in which its own hooks update the parameters."""

    steps_in_backward = True

    def __init__(self, optimizer: Prepared) -> None:
        super().__init__(optimizer)
        self.fused_backward = optimizer.fused_backward
        # AdaLomo's, by the names of the parameters
        self.not_in_checkpoints = "its moving averages" if hasattr(optimizer, "exp_avg_sq") else ""

    def attach(self) -> None:
        """Register its hooks on the parameters, and give the optimizer a `step` that does nothing."""
        optimizer = self.optimizer
        found = type(optimizer).step  # torch wraps what it finds
        if inspect.unwrap(found) is inspect.unwrap(Optimizer.step):
            optimizer.step = types.MethodType(_step_nothing, optimizer)  # it has none
            optimizer._opt_called = True  # torch's schedules test it
        for parameter in self._parameters():
            if parameter.requires_grad and optimizer.grad_func not in (parameter._backward_hooks or {}).values():
                parameter.register_hook(optimizer.grad_func)  # type: ignore[no-untyped-call]  # torch's

    def detach(self) -> None:
        """Remove its hooks from the parameters, which another optimizer may train next."""
        for parameter in self._parameters():
            own = parameter._backward_hooks or {}
            for key in [key for key, found in own.items() if found is self.optimizer.grad_func]:
                del own[key]

    def _parameters(self) -> list[torch.Tensor]:
        if not hasattr(self.optimizer, "grad_func"):  # not an optimizer of lomo_optim, so its hooks are unknown
            return []
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def _of_each(name: str) -> Callable[[SeveralSteppings], None]:
    def run(self: SeveralSteppings) -> None:
        for part in self.parts:
            getattr(part, name)()

    return run


class SeveralSteppings(OptimizerBehaviour):
    """Step the several optimizers of a module with a step of its own."""

    def __init__(self, parts: Sequence[OptimizerBehaviour]) -> None:
        super().__init__()
        self.parts = parts
        self.switches = any(part.switches for part in parts)
        self.steps_in_backward = any(part.steps_in_backward for part in parts)

    attach, detach = _of_each("attach"), _of_each("detach")
    to_training, to_evaluation = _of_each("to_training"), _of_each("to_evaluation")


def behaviour_of(*optimizers: object) -> OptimizerBehaviour:
    """The stepping of one optimizer, or of all optimizers of a fit. None and unknown optimizers step as most do."""
    if len(optimizers) != 1:
        return SeveralSteppings(list(map(behaviour_of, optimizers)))
    optimizer = unwrap_optimizer(optimizers[0])
    if isinstance(optimizer, LayerWiseDummyOptimizer):
        return LayerwiseStepping(optimizer)
    if callable(getattr(optimizer, "fused_backward", None)):
        return FusedStepping(optimizer)
    if callable(getattr(optimizer, "train", None)) or callable(getattr(optimizer, "eval", None)):
        return ScheduleFreeStepping(optimizer)
    return OptimizerBehaviour(optimizer)


def _step_nothing(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
    """Run the closure only. The backward pass has updated the parameters."""
    return None if closure is None else closure()


# torch's schedules need not watch it
_step_nothing._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
