"""The wrapper in which callbacks and scripts see an optimizer, as they see Accelerate's under transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from hf_compat.runtime.inspection import call_if_there, delegated

# An optimizer or schedule like torch's, and its states, groups and defaults.
Prepared: TypeAlias = Any


class UpdateTiming(Protocol):
    """Says when an update ends: the Trainer's accelerator, or that of HF callbacks in Lightning's own Trainer."""

    sync_gradients: bool  # whether the micro-batch is the update's last
    scaler: torch.amp.GradScaler | None
    distributed_type: str


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` and `zero_grad` do nothing before an update's last micro-batch.

    Those of `.optimizer`, the optimizer inside, always work. The engine calls them. With DeepSpeed, which steps by
    itself, those of the wrapper never do anything.

    Args:
        optimizer: The optimizer inside.
        timing: Says when an update ends.
        is_trained: The engine steps it, too. A script's own optimizer leaves the gradients' scale to the engine.

    Mirrors:
        `accelerate.optimizer.AcceleratedOptimizer`, 1.15. With Accelerate loaded, objects are instances of it.
    """

    _is_accelerate_prepared = True
    _opt_called = True  # torch's schedules test it. The engine steps the optimizer inside
    device_placement = True

    def __init__(self, optimizer: Prepared, timing: UpdateTiming, is_trained: bool = False) -> None:
        # torch's own would make groups anew
        self.optimizer = optimizer
        self.timing = timing
        self.is_trained = is_trained
        self.step_was_skipped = False

    @property  # type: ignore[misc]  # callbacks ask `isinstance(optimizer, AcceleratedOptimizer)`, which reads this, too
    def __class__(self) -> type:
        theirs = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
        return type(self) if theirs is None else theirs

    def __reduce__(self) -> tuple[object, ...]:
        return PreparedOptimizer, (self.optimizer, self.timing, self.is_trained)

    def __getattr__(self, name: str) -> Prepared:
        return getattr(self.optimizer, name)

    # torch's class has these, so `__getattr__` does not see them
    state: Prepared = delegated("optimizer.state")
    param_groups: Prepared = delegated("optimizer.param_groups")
    defaults: Prepared = delegated("optimizer.defaults")
    state_dict: Prepared = delegated("optimizer.state_dict")
    load_state_dict: Prepared = delegated("optimizer.load_state_dict")
    add_param_group: Prepared = delegated("optimizer.add_param_group")
    # Accelerate's has these
    scaler: torch.amp.GradScaler | None = delegated("timing.scaler")
    gradient_state: object = delegated("timing.gradient_state")
    accelerator_state: object = delegated("timing.state")

    @property
    def _waits(self) -> bool:
        return not self.timing.sync_gradients or self.timing.distributed_type == "DEEPSPEED"

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # as Accelerate's
        """Step if the update ends, unless scaled gradients are not finite."""
        if self._waits:
            return
        scaler = self.timing.scaler
        if scaler is None:
            self.optimizer.step(closure)
            return
        stepped: list[bool] = []
        handle = self.optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        scaler.step(self.optimizer)
        handle.remove()
        self.step_was_skipped = not stepped
        if self.is_trained:  # else the engine updates the scale at the end of its own step
            scaler.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients if the update ends."""
        if not self._waits:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def train(self) -> None:
        """Switch to the trained weights, if the optimizer has two sets."""
        call_if_there(self.optimizer, "train")

    def eval(self) -> None:
        """Switch to the averaged weights, if the optimizer has two sets."""
        call_if_there(self.optimizer, "eval")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def unwrap_optimizer(optimizer: Prepared) -> Prepared:
    """Return the optimizer inside our wrapper, or Accelerate's, whose `step` always works."""
    while getattr(optimizer, "_is_accelerate_prepared", False) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
