"""GreedyLR: a schedule that raises the learning rate while a metric improves and lowers it while it does not."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

from torch.optim import Optimizer

# What `state_dict` gives: numbers, strings and lists of numbers by name.
ScheduleState: TypeAlias = dict[str, Any]
# torch's own form of a parameter group.
Group: TypeAlias = dict[str, Any]
_COUNTERS = (
    "factor",
    "min_lrs",
    "max_lrs",
    "patience",
    "verbose",
    "cooldown",
    "warmup",
    "cooldown_counter",
    "warmup_counter",
    "mode",
    "threshold",
    "threshold_mode",
    "best",
    "num_bad_epochs",
    "num_good_epochs",
    "eps",
    "last_epoch",
    "smooth",
    "window_size",
    "reset_start",
    "reset_start_original",
    "_last_lr",
    "_init_lrs",
)


class RunningMean:
    """Mean of the last `window_size` values, kept as a running sum (so its rounding is upstream's)."""

    def __init__(self, window_size: int) -> None:
        self.window_size = window_size
        self.values: deque[float] = deque()
        self.sum = 0.0

    def add(self, value: float) -> float:
        """Take a value in and return the mean."""
        self.values.append(value)
        self.sum += value
        if len(self.values) > self.window_size:
            self.sum -= self.values.popleft()
        return self.sum / len(self.values)

    def state_dict(self) -> ScheduleState:
        """Return what `load_state_dict` takes."""
        return {"window_size": self.window_size, "values": list(self.values), "sum": self.sum}

    def load_state_dict(self, state: ScheduleState) -> None:
        """Take a state back."""
        self.window_size, self.sum = state["window_size"], state["sum"]
        self.values = deque(state["values"])


class GreedyLR:
    """Follow a metric both ways.

    Args:
        optimizer: The optimizer whose learning rates it sets.
        mode: `min` or `max`: which way the metric improves.
        factor: Learning rates are multiplied, or divided, by it; below 1.
        patience: Steps of one tendency that are waited for.
        threshold: Smaller changes do not count.
        threshold_mode: `abs` or `rel`: how `threshold` is meant.
        cooldown: Steps to wait after lowering.
        warmup: Steps to wait after raising.
        min_lr: Lowest learning rate: one number, or one for each parameter group.
        max_lr: Highest learning rate: one number, or one for each parameter group.
        eps: Smaller changes of the learning rate are not made.
        verbose: Print changes.
        smooth: Follow the running mean of the metric.
        window_size: Values in that mean.
        reset_start: Lowerings at the lowest learning rate before everything starts again.

    Raises:
        ValueError: A value outside its range.

    Mirrors:
        `transformers.optimization.GreedyLR`, 5.23: the same state too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | list[float] = 1e-3,
        max_lr: float | list[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        _check(optimizer, factor, mode, threshold_mode)
        self.optimizer = optimizer
        self.mode, self.factor, self.patience = mode, factor, patience
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.cooldown, self.warmup, self.eps, self.verbose = cooldown, warmup, eps, verbose
        self.smooth, self.window_size = smooth, window_size
        self.reset_start = self.reset_start_original = reset_start
        self.min_lrs = self._per_group(min_lr, "min_lrs")
        self.max_lrs = self._per_group(max_lr, "max_lrs")
        self._init_lrs = [group["lr"] for group in optimizer.param_groups]
        self._last_lr = list(self._init_lrs)
        self.last_epoch = 0
        self._forget()

    def _per_group(self, value: float | list[float], name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [value] * groups
        if len(value) != groups:
            raise ValueError(f"expected {groups} {name}, got {len(value)}")
        return list(value)

    def _forget(self) -> None:
        self.best = float("inf") if self.mode == "min" else float("-inf")
        self.num_bad_epochs = self.num_good_epochs = 0
        self.cooldown_counter = self.warmup_counter = 0
        self._mean = RunningMean(self.window_size) if self.smooth else None

    def step(self, metrics: float, epoch: int | None = None) -> None:
        """Take a value of the metric in and change the learning rates where it is time."""
        value = float(metrics)
        if self._mean is not None:
            value = self._mean.add(value)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = self.num_good_epochs = 0
        elif self.warmup_counter > 0:
            self.warmup_counter -= 1
            self.num_bad_epochs = self.num_good_epochs = 0
        else:
            self._count(value)
            if self.num_good_epochs > self.patience:
                for index, (group, highest) in enumerate(zip(self.optimizer.param_groups, self.max_lrs, strict=True)):
                    self._change(index, group, min(float(group["lr"]) / self.factor, highest))
                self.reset_start = self.reset_start_original
                self.warmup_counter, self.num_good_epochs = self.warmup, 0
            elif self.num_bad_epochs > self.patience:
                self._lower_lrs()
                self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _count(self, value: float) -> None:
        if self.is_better(value, self.best):
            self.best = value
            self.num_bad_epochs, self.num_good_epochs = 0, self.num_good_epochs + 1
        else:
            self.num_bad_epochs, self.num_good_epochs = self.num_bad_epochs + 1, 0

    def is_better(self, current: float, best: float) -> bool:
        """Return whether a value improves on the best by more than the threshold."""
        relative = self.threshold_mode == "rel"
        if self.mode == "min":
            return current < (best * (1.0 - self.threshold) if relative else best - self.threshold)
        return current > (best * (1.0 + self.threshold) if relative else best + self.threshold)

    def _lower_lrs(self) -> None:
        groups = self.optimizer.param_groups
        for index, (group, lowest) in enumerate(zip(groups, self.min_lrs, strict=True)):
            self._change(index, group, max(float(group["lr"]) * self.factor, lowest))
        if all(group["lr"] <= lowest for group, lowest in zip(groups, self.min_lrs, strict=True)):
            self.reset_start -= 1
            if self.reset_start <= 0:
                for group, lr in zip(self.optimizer.param_groups, self._init_lrs, strict=True):
                    group["lr"] = lr
                self.reset_start = self.reset_start_original
                self._forget()

    def _change(self, index: int, group: Group, new: float) -> None:
        old = float(group["lr"])
        # A learning rate outside its bounds is not moved against the tendency, hence no abs() here.
        grows = new > old
        if (new - old if grows else old - new) > self.eps and (new > old) == (self.num_good_epochs > self.patience):
            group["lr"] = new
            if self.verbose:
                print(f"Epoch {self.last_epoch}: learning rate of group {index} is now {new:.4e}.")  # noqa: T201 - asked for

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the groups."""
        return self._last_lr

    def state_dict(self) -> ScheduleState:
        """Return what `load_state_dict` takes."""
        state = {name: getattr(self, name) for name in _COUNTERS}
        if self._mean is not None:
            state["_streaming_avg"] = self._mean.state_dict()
        return state

    def load_state_dict(self, state_dict: ScheduleState) -> None:
        """Take a state back, learning rates included."""
        for name in _COUNTERS:
            if name in state_dict:
                setattr(self, name, state_dict[name])
        if "_streaming_avg" in state_dict:
            self._mean = RunningMean(self.window_size)
            self._mean.load_state_dict(state_dict["_streaming_avg"])
        if "_last_lr" in state_dict:
            for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
                group["lr"] = lr


def _check(optimizer: object, factor: float, mode: str, threshold_mode: str) -> None:
    if factor >= 1.0:
        raise ValueError(f"Factor should be < 1.0, got {factor}.")
    if mode not in ("min", "max"):
        raise ValueError(f"mode {mode} is unknown!")
    if threshold_mode not in ("rel", "abs"):
        raise ValueError(f"threshold mode {threshold_mode} is unknown!")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is not an Optimizer")
