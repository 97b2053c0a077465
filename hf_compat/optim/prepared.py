"""Optimizers and schedules of a script's own, as Accelerate prepares them: one step an update."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch.optim import Optimizer

# Anybody's optimizer or schedule, of torch's shape, and what it keeps: states, groups, defaults.
Prepared: TypeAlias = Any


class MicroBatchRhythm(Protocol):
    """What says whether a micro-batch is the last of its update."""

    sync_gradients: bool


class UpdateRhythm(MicroBatchRhythm, Protocol):
    """What the wrappers ask of the Accelerator."""

    scaler: torch.amp.GradScaler | None

    @property
    def num_processes(self) -> int:
        """Processes that train together."""

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is split between the processes."""


class PreparedOptimizer(Optimizer):
    """An optimizer whose `step` and `zero_grad` do nothing before an update's last micro-batch.

    Args:
        optimizer: The script's own.
        rhythm: Says which micro-batch is the last, and has the gradient scaler.

    Mirrors:
        `accelerate.optimizer.AcceleratedOptimizer`, 1.15.
    """

    _is_accelerate_prepared = True

    def __init__(self, optimizer: Prepared, rhythm: UpdateRhythm) -> None:  # torch's own would make groups anew
        self.optimizer = optimizer
        self.step_was_skipped = False
        self._rhythm = rhythm

    def __getattr__(self, name: str) -> Prepared:
        if name == "optimizer":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def state(self) -> Prepared:  # type: ignore[override]  # torch has an attribute there
        """States by parameter."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Prepared:  # type: ignore[override]  # as above
        """Groups of parameters with their options."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Prepared:  # type: ignore[override]  # as above
        """Options of groups that set none."""
        return self.optimizer.defaults

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # as Accelerate's
        """Step where the update ends; a step whose scaled gradients are not finite is skipped."""
        if not self._rhythm.sync_gradients:
            return
        scaler = self._rhythm.scaler
        if scaler is None:
            self.optimizer.step(closure)
            return
        stepped: list[bool] = []
        handle = self.optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        scaler.step(self.optimizer)  # the engine updates the scale at the end of its own step
        handle.remove()
        self.step_was_skipped = not stepped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients where the update ends."""
        if self._rhythm.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> Prepared:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Prepared) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: Prepared) -> None:
        self.optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class PreparedScheduler:
    """A schedule that steps with its optimizer: once an update for each process.

    Args:
        scheduler: The script's own.
        optimizers: What it follows.
        rhythm: Says which micro-batch is the last, and how many processes there are.

    Mirrors:
        `accelerate.scheduler.AcceleratedScheduler`, 1.15.
    """

    def __init__(self, scheduler: Prepared, optimizers: Sequence[PreparedOptimizer], rhythm: UpdateRhythm) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._rhythm = rhythm

    def __getattr__(self, name: str) -> Prepared:
        if name == "scheduler":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Prepared, **kwargs: Prepared) -> None:
        """Step where the update ends and its optimizers have stepped."""
        if not self._rhythm.sync_gradients or any(one.step_was_skipped for one in self.optimizers):
            return
        end = getattr(self.scheduler, "total_steps", None)  # beyond it OneCycleLR raises
        for _ in range(1 if self._rhythm.split_batches else self._rhythm.num_processes):
            if end is None or self.scheduler._step_count <= end:
                self.scheduler.step(*args, **kwargs)


class HeldOptimizer:
    """The engine's optimizer, whose `step` and `zero_grad` a script may call: nothing before the last micro-batch.

    Args:
        optimizer: What the engine steps.
        rhythm: Says which micro-batch is the last.
    """

    def __init__(self, optimizer: Optimizer, rhythm: MicroBatchRhythm) -> None:
        self.optimizer = optimizer
        self._rhythm = rhythm
        self._is_stepping = False  # whether it is the engine that calls
        self._own = {name: vars(optimizer)[name] for name in ("step", "zero_grad") if name in vars(optimizer)}
        self._held = {name: self._hold(getattr(optimizer, name)) for name in ("step", "zero_grad")}
        vars(optimizer).update(self._held)

    def _hold(self, method: Callable[..., Prepared]) -> Callable[..., Prepared]:
        @functools.wraps(method)  # a schedule has marked `step`
        def held(*args: Prepared, **kwargs: Prepared) -> Prepared:
            return method(*args, **kwargs) if self._is_stepping or self._rhythm.sync_gradients else None

        return held

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Let the engine step, whatever the script has made of the rhythm."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def release(self) -> None:
        """Give the optimizer its own methods back; what a schedule has wrapped since stays."""
        for name, held in self._held.items():
            if vars(self.optimizer).get(name) is held:
                del vars(self.optimizer)[name]
                vars(self.optimizer).update({name: self._own[name]} if name in self._own else {})
        self._is_stepping = True  # what stays wrapped steps as before


def unprepared(optimizer: Prepared) -> Prepared:
    """Return the optimizer itself, where this wrapper or Accelerate's own is around it: the engine has the rhythm."""
    while getattr(optimizer, "_is_accelerate_prepared", False) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
