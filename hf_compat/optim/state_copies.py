"""Copies of an optimizer's state for a checkpoint, made beside the training until the next step changes it."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hf_compat.runtime.frozen_copies import LaterCopies


class StateCopies:
    """What copies an optimizer's state while a run trains on; the optimizer's next step waits for it."""

    def __init__(self) -> None:
        self._later: LaterCopies | None = None
        self._optimizer: Optimizer | None = None
        self._hook: RemovableHandle | None = None

    def before_steps_of(self, optimizer: object) -> LaterCopies | None:
        """Return what makes copies before an optimizer's next step; None where its state may change before that.

        Only of torch's own optimizers is it known that nothing but a step changes their state, and that hooks come
        before each step, whoever calls it.
        """
        if not isinstance(optimizer, Optimizer) or not _steps_as_torch_does(optimizer):
            return None
        later = self._later
        if later is None or self._optimizer is not optimizer:
            self.release()
            later = LaterCopies()
            self._later, self._optimizer = later, optimizer
            self._hook = optimizer.register_step_pre_hook(lambda *_: later.finish())
        later.begin()
        return later

    def finish(self) -> None:
        """Make the copies that are not made yet: what comes next may change the state."""
        if self._later is not None:
            self._later.finish()

    def release(self) -> None:
        """Let go of the optimizer; nothing is copied any more."""
        if self._hook is not None:
            self._hook.remove()
        self._later = self._optimizer = self._hook = None


def _steps_as_torch_does(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is torch's own, and its step, which a schedule wraps, is too."""
    kind = type(optimizer)
    step = vars(optimizer).get("step", optimizer.step)
    if hasattr(step, "_wrapped_by_lr_sched"):
        step = getattr(step, "__wrapped__", step)
    is_own = getattr(step, "__func__", step) is kind.step and hasattr(kind.step, "hooked")
    return kind.__module__.startswith("torch.optim.") and is_own
