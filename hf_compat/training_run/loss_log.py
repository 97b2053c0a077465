"""`LossLog`: a run's loss, since the last log and in total. `StepAverages`: the values logged beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

import torch

from hf_compat.errors import LossError
from hf_compat.runtime.collectives import gather_objects, is_distributed


@runtime_checkable
class ComputedMetric(Protocol):
    """A metric that gathers and averages its own values, as torchmetrics' `Metric` does."""

    def compute(self) -> Any:  # whatever the metric's author returns, if `float` accepts it
        """Return the metric's value."""

    def reset(self) -> None:
        """Clear the gathered values."""


LoggedValue = float | torch.Tensor | ComputedMetric

_UNREAD = 256  # updates after which unread losses on a device are reduced to a count of non-finite ones
_EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


def read_numbers(values: Iterable[torch.Tensor | float]) -> list[float]:
    """Convert scalars to numbers. All tensors of a device are read with a single wait."""
    found = list(values)
    numbers = [0.0] * len(found)
    together: dict[torch.device, list[int]] = {}
    for place, value in enumerate(found):
        if not isinstance(value, torch.Tensor):
            numbers[place] = float(value)
        elif value.dtype not in _EXACT_IN_FLOAT32:
            numbers[place] = float(value.item())
        else:
            together.setdefault(value.device, []).append(place)
    for places in together.values():
        scalars = [found[place].detach().reshape(()).float() for place in places]  # type: ignore[union-attr]  # tensors
        read = torch.stack(scalars).tolist() if places[1:] else [scalars[0].item()]
        for place, number in zip(places, read, strict=True):
            numbers[place] = number
    return numbers


class AveragesState(TypedDict):
    """Sums and weights by name, in plain values."""

    sums: dict[str, float]
    weights: dict[str, float]


class StepAverages:
    """Means of named values since the last `take`."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor | float] = {}
        self._weights: dict[str, float] = {}
        self._metrics: dict[str, ComputedMetric] = {}

    def add(self, name: str, value: LoggedValue, weight: float = 1.0) -> None:
        """Add a value to a mean, or register a torchmetrics metric that computes its own.

        Args:
            name: The name in the logs.
            value: A number, a tensor (which adds its mean), or an updated torchmetrics `Metric`.
            weight: Weight in the mean, for instance the samples of the batch.
        """
        if isinstance(value, torch.Tensor):
            number: float | torch.Tensor = value.detach().float().mean()
        elif not isinstance(value, float) and isinstance(value, ComputedMetric):
            self._metrics[name] = value
            return
        else:
            number = float(value)
        self._sums[name] = self._sums.get(name, 0.0) + number * weight
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def take(self) -> dict[str, float]:
        """Return the means over all ranks, and start the next ones. Every rank has to call it."""
        if not (self._sums or self._metrics or is_distributed()):  # as for most logs
            return {}
        sums = read_numbers(self._sums.values())
        own = {name: (number, self._weights[name]) for name, number in zip(self._sums, sums, strict=True)}
        parts: list[dict[str, tuple[float, float]]] = gather_objects(own)
        means = {}
        for name in dict.fromkeys(name for part in parts for name in part):  # ranks may have logged different names
            totals, weights = zip(*(part[name] for part in parts if name in part), strict=True)
            means[name] = sum(totals) / sum(weights)
        for name, metric in self._metrics.items():
            means[name] = float(metric.compute())
            metric.reset()
        self._sums, self._weights, self._metrics = {}, {}, {}
        return means

    def state_dict(self) -> AveragesState:
        """Return sums and weights, in plain values."""
        sums = dict(zip(self._sums, read_numbers(self._sums.values()), strict=True))
        return {"sums": sums, "weights": dict(self._weights)}

    def load_state_dict(self, state: AveragesState) -> None:
        """Continue from a saved state."""
        self._sums, self._weights = dict(state["sums"]), dict(state["weights"])


class LossLogState(TypedDict):
    """A loss log in plain values, under the names in `run_state.pt`.

    Checkpoints of the first versions lack the last two, and hold a tensor as `tr_loss`.
    """

    tr_loss: float | torch.Tensor
    total_loss: float
    last_logged: int
    first_update: int
    nonfinite_steps: NotRequired[int]
    scalars: NotRequired[AveragesState]


def raise_for_bad_loss(loss: object, device: torch.device, error: Exception) -> None:
    """Explain why a step's loss could not be added. Return if it is a valid loss.

    Args:
        loss: The result of `training_step`.
        device: The device on which losses are summed.
        error: The error raised by the addition.

    Raises:
        LossError: The loss is not a tensor, not a scalar, or on another device.
    """
    if not isinstance(loss, torch.Tensor):
        found = f"{loss!r}, not a tensor"
    elif loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}, not a scalar"
    elif loss.device != device:
        found = f"a tensor on {loss.device}, and the run is on {device}"
    else:
        return
    raise LossError(f"`training_step` returned {found}.\n\nHint: return the loss, detached.") from error


class LossLog:
    """Sums up a run's loss and returns the entries of its logs.

    Args:
        device: Device of the sum. Losses are added there, so that no update waits for the device.
        first_update: `global_step` at the start of the run.
        filter_nonfinite: Replace a loss that is NaN or infinite by the mean since the last log
            (`logging_nan_inf_filter`).

    Attributes:
        since_last_log: Sum of the loss since the last log, HF's `_tr_loss`. It is changed in place.
        total: Sum over updates of the loss that this run has logged, HF's `_total_loss_scalar`.
        last_logged: `global_step` at the last log, HF's `_globalstep_last_logged`.
        first_update: `global_step` at the start of the run, HF's `_initial_global_step`.
        nonfinite_updates: Number of updates in which the filter replaced a loss, as far as counted.
        averages: Means of the values that are logged beside the loss.
        filter_nonfinite: As above. It may change during the run.
    """

    _READ_AT_ONCE = ("cpu",)  # devices whose numbers are read without a wait

    def __init__(self, device: torch.device | str, first_update: int, filter_nonfinite: bool) -> None:
        self.since_last_log = torch.tensor(0.0, device=device)
        self.total = 0.0
        self.last_logged = self.first_update = first_update
        self.nonfinite_updates = 0
        self.averages = StepAverages()
        self.filter_nonfinite = filter_nonfinite
        self._replaced = False  # whether this update has a replaced loss
        # On a device: the unfiltered loss sum of this update, those of updates not yet counted, and the number of
        # non-finite ones among older updates
        self._raw: torch.Tensor | None = None
        self._uncounted: list[torch.Tensor] = []
        self._older: torch.Tensor | None = None

    def add(self, loss: torch.Tensor, updates_done: int) -> None:
        """Add a micro-batch's loss. The filter replaces a loss that is not finite by the mean since the last log.

        Args:
            loss: Its share of the update's loss, detached.
            updates_done: Updates before the one that the micro-batch belongs to.

        Mirrors:
            `transformers.Trainer._run_epoch`, 5.23, `logging_nan_inf_filter`.
        """
        try:
            if self.filter_nonfinite:
                if loss.device.type not in self._READ_AT_ONCE:
                    # chosen on the loss's device, as reading it would wait for the device at every micro-batch
                    self._raw = loss if self._raw is None else self._raw + loss
                    loss = torch.where(loss - loss == 0, loss, self._mean_since_last_log(updates_done))
                elif not math.isfinite(loss.item()):
                    self._replaced = True
                    loss = self._mean_since_last_log(updates_done)
            self.since_last_log += loss
        except (AttributeError, TypeError, RuntimeError) as error:
            raise_for_bad_loss(loss, self.since_last_log.device, error)
            raise

    def _mean_since_last_log(self, updates_done: int) -> torch.Tensor:
        updates = 1 + updates_done - self.last_logged
        return self.since_last_log if updates == 1 else self.since_last_log / updates

    def end_update(self) -> None:
        """Count the update if one of its losses was replaced."""
        self.nonfinite_updates += self._replaced
        self._replaced = False
        if self._raw is None:
            return
        self._uncounted.append(self._raw)
        self._raw = None
        if len(self._uncounted) == _UNREAD:
            raw = torch.stack(self._uncounted)
            more = (raw - raw != 0).sum()
            self._older = more if self._older is None else self._older + more
            self._uncounted = []

    def _read(self, *numbers: torch.Tensor | float) -> list[float]:
        """Read numbers and count the non-finite updates, with a single wait for a device."""
        if self._older is None and not self._uncounted:
            return read_numbers(numbers)
        older = [] if self._older is None else [self._older.float()]
        found = read_numbers((*numbers, *older, *self._uncounted))
        rest = found[len(numbers) :]
        if older:
            self.nonfinite_updates += int(rest.pop(0))
        self.nonfinite_updates += sum(not math.isfinite(loss) for loss in rest)
        self._older, self._uncounted = None, []
        return found[: len(numbers)]

    def take(
        self,
        updates_done: int,
        grad_norm: torch.Tensor | float | None,
        learning_rate: float | None,
        gather: Callable[[torch.Tensor], torch.Tensor],
        summed: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """Return the entries of a log, and start the next sum. Every rank has to call it.

        Args:
            updates_done: The current `global_step`, greater than `last_logged`.
            grad_norm: Gradient norm of the last update. If None, the log has no `grad_norm`.
            learning_rate: Learning rate of the last update. If None, the log has no `learning_rate`.
            gather: Joins the ranks' tensors.
            summed: The sum to log instead of `since_last_log`. It is set to zero in place.

        Returns:
            `loss`, `grad_norm`, `learning_rate`, `nonfinite_steps` (if there are any), then the averages.
        """
        summed = self.since_last_log if summed is None else summed
        norms = [] if grad_norm is None else [grad_norm]
        loss_sum, *read_norms = self._read(gather(summed).mean(), *norms)
        summed -= summed  # in place, as the run keeps adding to this tensor
        entries = {"loss": loss_sum / (updates_done - self.last_logged)}
        if grad_norm is not None:
            entries["grad_norm"] = read_norms[0] if isinstance(grad_norm, torch.Tensor) else grad_norm
        if learning_rate is not None:
            entries["learning_rate"] = learning_rate
        nonfinite_updates = max(gather_objects(self.nonfinite_updates))
        if nonfinite_updates:
            entries["nonfinite_steps"] = nonfinite_updates
        self.total += loss_sum
        self.last_logged = updates_done
        return entries | self.averages.take()

    def nonfinite_over_processes(self) -> int:
        """Return the largest number of updates with a replaced loss among the ranks. Every rank has to call it."""
        self._read()
        return max(gather_objects(self.nonfinite_updates))

    def mean(self, updates_done: int) -> float:
        """Return the run's mean loss over updates. The sum since the last log moves to `total`."""
        self.total += self._read(self.since_last_log)[0]
        self.since_last_log.zero_()
        return self.total / max(updates_done - self.first_update, 0.001)  # as upstream, for a run without updates

    def state_dict(self) -> LossLogState:
        """Return sums and counts in plain values."""
        return self.state_with(None)[0]

    def state_with(self, number: torch.Tensor | float | None) -> tuple[LossLogState, float | None]:
        """Return sums and counts in plain values, and a number that is read in the same wait."""
        tr_loss, *read = self._read(self.since_last_log, *([] if number is None else [number]))
        state: LossLogState = {
            "tr_loss": tr_loss,
            "total_loss": self.total,
            "last_logged": self.last_logged,
            "first_update": self.first_update,
            "nonfinite_steps": self.nonfinite_updates,
            "scalars": self.averages.state_dict(),
        }
        return state, read[0] if read else None

    def load_state_dict(self, state: LossLogState) -> None:
        """Continue from a saved state.

        Args:
            state: A result of `state_dict`, or a run state that contains its entries.
        """
        self.since_last_log.fill_(float(state["tr_loss"]))
        self.total = state["total_loss"]
        self.last_logged, self.first_update = state["last_logged"], state["first_update"]
        self.nonfinite_updates = state.get("nonfinite_steps", 0)
        if "scalars" in state:
            self.averages.load_state_dict(state["scalars"])
