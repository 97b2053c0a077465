"""`LossLog`: the loss of a run, between logs and of the whole run; `StepAverages`: values logged beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

import torch

from hf_compat.errors import LossError
from hf_compat.runtime.collectives import gather_objects


@runtime_checkable
class ComputedMetric(Protocol):
    """A metric that gathers and averages by itself: a torchmetrics `Metric`."""

    def compute(self) -> Any:  # what a metric computes is its author's choice; `float` has to accept it
        """Return the metric's value."""

    def reset(self) -> None:
        """Forget what was gathered."""


LoggedValue = float | torch.Tensor | ComputedMetric


_UNREAD = 256  # updates whose losses lie on the device until somebody reads how many were not finite


def read_numbers(values: Iterable[torch.Tensor | float]) -> list[float]:
    """Return scalars as numbers; those of a device are read with one wait."""
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
        for place, number in zip(
            places, torch.stack(scalars).tolist() if places[1:] else [scalars[0].item()], strict=True
        ):
            numbers[place] = number
    return numbers


_EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


class AveragesState(TypedDict):
    """Sums and weights by name, in plain values."""

    sums: dict[str, float]
    weights: dict[str, float]


class StepAverages:
    """Means of named values since they were last taken."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor | float] = {}
        self._weights: dict[str, float] = {}
        self._metrics: dict[str, ComputedMetric] = {}

    def add(self, name: str, value: LoggedValue, weight: float = 1.0) -> None:
        """Add a value to a mean, or note a torchmetrics metric that computes its own.

        Args:
            name: The name in the logs.
            value: A number, a tensor (its mean counts), or a torchmetrics `Metric` that was updated.
            weight: Weight in the mean: the samples of the batch, say.
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
        """Return the means over all processes, and begin the next ones. Every process has to call it."""
        own = dict(
            zip(self._sums, zip(read_numbers(self._sums.values()), self._weights.values(), strict=True), strict=True)
        )
        parts: list[dict[str, tuple[float, float]]] = gather_objects(own)
        means = {}
        for name in dict.fromkeys(name for part in parts for name in part):  # one may have logged what another has not
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
        """Go on where a state stood."""
        self._sums, self._weights = dict(state["sums"]), dict(state["weights"])


class LossLogState(TypedDict):
    """A loss log in plain values, under the names that `run_state.pt` has for them.

    Checkpoints of the first versions lack the last two, and have a tensor as `tr_loss`.
    """

    tr_loss: float | torch.Tensor
    total_loss: float
    last_logged: int
    first_update: int
    nonfinite_steps: NotRequired[int]
    scalars: NotRequired[AveragesState]


def name_bad_loss(loss: object, device: torch.device, error: Exception) -> None:
    """Raise an error that names what is wrong with a step's loss that could not be added; return where nothing is.

    Args:
        loss: What `training_step` has returned.
        device: Where losses are added.
        error: What adding has raised.

    Raises:
        LossError: The loss is no tensor, no scalar, or on another device.
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
    """Sum up a run's loss, and give the entries of its logs.

    Args:
        device: Device of the sum. Losses are added there, so that no update waits for the device.
        first_update: `global_step` at the start of the run.
        filter_nonfinite: Replace a loss that is NaN or infinite by the mean since the last log
            (`logging_nan_inf_filter`).

    Attributes:
        since_last_log: The loss summed since the last log: HF's `_tr_loss`. It is added to in place.
        total: The loss that was logged in this run, as a sum over its updates: HF's `_total_loss_scalar`.
        last_logged: `global_step` at the last log: HF's `_globalstep_last_logged`.
        first_update: `global_step` at the start of the run: HF's `_initial_global_step`.
        nonfinite_updates: Updates in which the filter replaced a loss, as far as they are counted.
        averages: Means of the values that are logged beside the loss.
        filter_nonfinite: As above; it may be changed within the run.
    """

    def __init__(self, device: torch.device | str, first_update: int, filter_nonfinite: bool) -> None:
        self.since_last_log = torch.tensor(0.0, device=device)
        self.total = 0.0
        self.last_logged = self.first_update = first_update
        self.nonfinite_updates = 0
        self.averages = StepAverages()
        self.filter_nonfinite = filter_nonfinite
        self._replaced = False  # whether this update has a replaced loss
        # On a device: the sum of this update's losses as they were, those of updates not counted yet, and how many
        # not finite ones were among older ones
        self._raw: torch.Tensor | None = None
        self._uncounted: list[torch.Tensor] = []
        self._older: torch.Tensor | None = None

    def add(self, loss: torch.Tensor, updates_done: int) -> None:
        """Add a micro-batch's loss.

        Args:
            loss: Its share of the update's loss, detached.
            updates_done: Updates before the one that the micro-batch belongs to.
        """
        try:
            self.since_last_log += self._finite(loss, updates_done) if self.filter_nonfinite else loss
        except (AttributeError, TypeError, RuntimeError) as error:
            name_bad_loss(loss, self.since_last_log.device, error)
            raise

    def _finite(self, loss: torch.Tensor, updates_done: int) -> torch.Tensor:
        """Return the loss, or in its place the mean since the last log where it is not finite.

        Mirrors:
            `transformers.Trainer._run_epoch`, 5.23, `logging_nan_inf_filter`.
        """
        if loss.device.type != "cpu":
            return self._chosen_on_device(loss, updates_done)
        if math.isfinite(loss.item()):
            return loss
        self._replaced = True
        return self._mean_since_last_log(updates_done)

    def _chosen_on_device(self, loss: torch.Tensor, updates_done: int) -> torch.Tensor:
        """Choose where the loss is: asking for its value would wait for the device at every micro-batch."""
        self._raw = loss if self._raw is None else self._raw + loss
        return torch.where(loss - loss == 0, loss, self._mean_since_last_log(updates_done))

    def _mean_since_last_log(self, updates_done: int) -> torch.Tensor:
        updates = 1 + updates_done - self.last_logged
        return self.since_last_log if updates == 1 else self.since_last_log / updates

    def end_update(self) -> None:
        """Count the update where a loss of it was replaced."""
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
        """Return numbers, and count the updates that were not finite: on a device with one wait for all."""
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
        """Return the entries of a log, and begin the next sum. Every process has to call it.

        Args:
            updates_done: `global_step` now. It is greater than `last_logged`.
            grad_norm: Norm of the last update's gradients; without one the log has no `grad_norm`.
            learning_rate: Learning rate of the last update; without one the log has no `learning_rate`.
            gather: Joins the processes' tensors.
            summed: The sum to log in place of `since_last_log`; it is set to zero in place.

        Returns:
            `loss`, `grad_norm`, `learning_rate`, `nonfinite_steps` (where there are any), then the averages.
        """
        summed = self.since_last_log if summed is None else summed
        norms = [] if grad_norm is None else [grad_norm]
        loss_sum, *read_norms = self._read(gather(summed).mean(), *norms)
        summed -= summed  # in place: the run goes on adding to this tensor
        entries = {"loss": loss_sum / (updates_done - self.last_logged)}
        if grad_norm is not None:
            entries["grad_norm"] = read_norms[0] if isinstance(grad_norm, torch.Tensor) else grad_norm
        if learning_rate is not None:
            entries["learning_rate"] = learning_rate
        nonfinite_updates = self.nonfinite_over_processes()
        if nonfinite_updates:
            entries["nonfinite_steps"] = nonfinite_updates
        self.total += loss_sum
        self.last_logged = updates_done
        return entries | self.averages.take()

    def nonfinite_over_processes(self) -> int:
        """Return the updates whose loss was replaced, of the process that had most. Every process has to call it."""
        self._read()
        return max(gather_objects(self.nonfinite_updates))

    def mean(self, updates_done: int) -> float:
        """Return the mean loss of an update over the run; what was not logged yet goes into `total`."""
        self.total += self._read(self.since_last_log)[0]
        self.since_last_log.zero_()
        return self.total / max(updates_done - self.first_update, 0.001)  # as upstream, where nothing was trained

    def state_dict(self) -> LossLogState:
        """Return the sums and counts in plain values."""
        return self.state_and(None)[0]

    def state_and(self, number: torch.Tensor | float | None) -> tuple[LossLogState, float | None]:
        """Return the sums and counts in plain values, and a number that is read together with them."""
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
        """Go on where a state stood.

        Args:
            state: What `state_dict` returned, or a run state that has its entries among others.
        """
        self.since_last_log.fill_(float(state["tr_loss"]))
        self.total = state["total_loss"]
        self.last_logged, self.first_update = state["last_logged"], state["first_update"]
        self.nonfinite_updates = state.get("nonfinite_steps", 0)
        if "scalars" in state:
            self.averages.load_state_dict(state["scalars"])
