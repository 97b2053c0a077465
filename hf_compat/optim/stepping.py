"""How an optimizer's step goes about: the one place that knows optimizers which are more than a `step`.

Most optimizers step once an update, after its backward passes. Schedule-free ones hold two sets of weights, layerwise
ones step parameter by parameter within the backward pass, and LOMO runs the backward pass itself.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch.optim import Optimizer

from hf_compat.errors import warn_once
from hf_compat.optim.layerwise import LayerWiseDummyOptimizer


@runtime_checkable
class FusedOptimizer(Protocol):
    """An optimizer that updates each parameter as soon as its gradient is there, as `lomo_optim` does."""

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        """Run the backward pass, and update the parameters in it."""


class Stepping:
    """Gradients are applied in one `step` after an update's backward passes: most optimizers.

    Args:
        optimizer: The optimizer, as the steps or Lightning hold it.
    """

    # whether `to_training` and `to_evaluation` do anything
    switches = False
    # whether parameters change in the backward pass: there are no gradients left to accumulate or to clip
    steps_in_backward = False
    # what runs the backward pass of a loss, at a learning rate; None where it is the loss's own
    fused_backward: Callable[[torch.Tensor, float], None] | None = None
    # what the optimizer keeps beside its `state_dict`, which no checkpoint holds; empty for nothing
    not_in_checkpoints = ""

    def __init__(self, optimizer: object = None) -> None:
        self.optimizer = optimizer

    def attach(self) -> None:
        """Make ready for training; done once however often it is called."""

    def detach(self) -> None:
        """Take back what `attach` has put on the parameters."""

    def to_training(self) -> None:
        """Put the weights that are trained into the parameters."""

    def to_evaluation(self) -> None:
        """Put the weights that are evaluated and saved into the parameters."""

    @property
    def holds_training_weights(self) -> bool:
        """Whether the parameters hold weights that are trained, and are not those to be evaluated."""
        return False

    def tell_of_saving(self) -> None:
        """Warn that a schedule-free optimizer's average is not what is saved, as upstream."""
        if self.holds_training_weights:
            warn_once(
                f"{type(self.optimizer).__name__}: weights are saved as they are trained, not averaged, as in "
                "transformers: an evaluation puts the average in force, until the next update.\n\nHint: evaluate at "
                "the updates that save (`eval_strategy`, `eval_steps`), and before `save_model`."
            )

    def tell_of_resuming(self) -> None:
        """Warn of what a checkpoint does not hold, as upstream's does not."""
        if self.not_in_checkpoints:
            warn_once(
                f"A checkpoint does not hold {self.not_in_checkpoints}: {type(self.optimizer).__name__} begins with "
                "them anew, as in transformers."
            )


class ScheduleFreeStepping(Stepping):
    """The parameters hold one of two sets of weights, the trained or their average: `train` and `eval` switch."""

    switches = True

    def to_training(self) -> None:
        _call_if_there(self.optimizer, "train")

    def to_evaluation(self) -> None:
        _call_if_there(self.optimizer, "eval")

    @property
    def holds_training_weights(self) -> bool:
        return any(group.get("train_mode", False) for group in getattr(self.optimizer, "param_groups", ()))


class LayerwiseStepping(Stepping):
    """Each parameter has an optimizer of its own, stepped by a hook once its gradient is there."""

    steps_in_backward = True
    not_in_checkpoints = "the states of the optimizers of single parameters"

    def __init__(self, optimizer: LayerWiseDummyOptimizer) -> None:
        super().__init__(optimizer)
        self.attach = optimizer.attach_hooks  # type: ignore[method-assign]  # the optimizer's own
        self.detach = optimizer.remove_hooks  # type: ignore[method-assign]  # as above


class FusedStepping(Stepping):
    """The optimizer runs the backward pass, and hooks of its own update the parameters in it."""

    steps_in_backward = True

    def __init__(self, optimizer: FusedOptimizer) -> None:
        super().__init__(optimizer)
        self.fused_backward = optimizer.fused_backward
        # AdaLomo's, by the names of the parameters
        self.not_in_checkpoints = "its moving averages" if hasattr(optimizer, "exp_avg_sq") else ""

    def attach(self) -> None:
        """Put its hooks on the parameters, and a `step` that does nothing into the optimizer."""
        optimizer = cast(Optimizer, self.optimizer)
        found = type(optimizer).step  # torch wraps what it finds
        if getattr(found, "__wrapped__", found) is getattr(Optimizer.step, "__wrapped__", Optimizer.step):
            optimizer.step = types.MethodType(_step_nothing, optimizer)  # type: ignore[method-assign]  # it has none
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what a schedule of torch's asks for
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        for parameter in [one for one in trained if self._hook not in (one._backward_hooks or {}).values()]:
            parameter.register_hook(self._hook)  # type: ignore[no-untyped-call]  # torch's

    def detach(self) -> None:
        """Take its hooks off the parameters: another optimizer may train them from now on."""
        hook = self._hook
        for parameter in self._parameters():
            own = parameter._backward_hooks or {}
            for key in [key for key, found in own.items() if found is hook]:
                del own[key]

    @property
    def _hook(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.optimizer.grad_func  # type: ignore[attr-defined]  # of Lomo and AdaLomo

    def _parameters(self) -> list[torch.Tensor]:
        if not hasattr(self.optimizer, "grad_func"):  # not of lomo_optim: what it hooks is its own
            return []
        groups = cast(Optimizer, self.optimizer).param_groups
        return [parameter for group in groups for parameter in group["params"]]


class SeveralSteppings(Stepping):
    """Several optimizers, of a module with a step of its own.

    Args:
        parts: How each of them steps.
    """

    def __init__(self, parts: Sequence[Stepping]) -> None:
        super().__init__()
        self.parts = parts
        self.switches = any(part.switches for part in parts)
        self.steps_in_backward = any(part.steps_in_backward for part in parts)

    def attach(self) -> None:
        for part in self.parts:
            part.attach()

    def detach(self) -> None:
        for part in self.parts:
            part.detach()

    def to_training(self) -> None:
        for part in self.parts:
            part.to_training()

    def to_evaluation(self) -> None:
        for part in self.parts:
            part.to_evaluation()


def stepping_of(optimizer: object) -> Stepping:
    """Return how an optimizer steps; None and what is unknown step as most do."""
    if isinstance(optimizer, LayerWiseDummyOptimizer):
        return LayerwiseStepping(optimizer)
    if isinstance(optimizer, FusedOptimizer):
        return FusedStepping(optimizer)
    if any(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        return ScheduleFreeStepping(optimizer)
    return Stepping(optimizer)


def stepping_of_all(optimizers: Iterable[object]) -> Stepping:
    """Return how the optimizers of a fit step."""
    parts = [stepping_of(optimizer) for optimizer in optimizers]
    return parts[0] if len(parts) == 1 else SeveralSteppings(parts)


def _call_if_there(optimizer: object, name: str) -> None:
    switch = getattr(optimizer, name, None)
    if callable(switch):
        switch()


def _step_nothing(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
    """Run the closure only: the parameters have been updated."""
    return None if closure is None else closure()


# a schedule of torch's need not watch it
_step_nothing._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
