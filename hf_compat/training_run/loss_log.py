"""`LossLog`: a run's loss, since the last log and in total. `StepAverages`: the values logged beside it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import torch
from torchmetrics import Metric

from hf_compat.checkpoint.run_state import PlainState
from hf_compat.errors import LossError, MetricError
from hf_compat.runtime.collectives import gather_numbers, gather_objects, highest_each, is_distributed
from hf_compat.runtime.text import brief

# The bytes of a hash that become a number each
_DIGEST_PARTS = (slice(0, 3), slice(3, 6))

LoggedValue = float | torch.Tensor | Metric

# What a training log has of its own, so that no logged value can have the name.
ENTRIES = frozenset({"loss", "grad_norm", "learning_rate", "epoch", "step", "nonfinite_steps"})

_EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


def read_numbers(values: Iterable[torch.Tensor | float]) -> list[float]:
    """Convert scalars to numbers. All tensors of a device are read with a single wait."""
    found = list(values)
    numbers = [0.0] * len(found)
    together: dict[torch.device, dict[int, torch.Tensor]] = {}
    for place, value in enumerate(found):
        if not isinstance(value, torch.Tensor):
            numbers[place] = float(value)
        elif value.dtype not in _EXACT_IN_FLOAT32:
            numbers[place] = float(value.item())
        else:
            together.setdefault(value.device, {})[place] = value.detach().reshape(()).float()
    for scalars in together.values():
        for place, number in zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True):
            numbers[place] = number
    return numbers


@dataclass
class StepAverages:
    """Means of named values since the last `take`."""

    sums: dict[str, torch.Tensor | float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)

    def add(self, name: str, value: LoggedValue, weight: float = 1.0) -> None:
        """Add a number, or a tensor's mean, to a weighted mean. A torchmetrics metric computes its own.

        Raises:
            MetricError: The value is not a number.
        """
        if isinstance(value, torch.Tensor):
            number: float | torch.Tensor = value.detach().float().mean()
        elif isinstance(value, Metric):
            self.metrics[name] = value
            return
        else:
            try:
                number = float(value)
            except (TypeError, ValueError) as error:
                raise MetricError(
                    f"`log_metric({brief(name)}, {brief(value)})`: the value is not a number.\n\n"
                    "Hint: log a number, a tensor, or a metric of torchmetrics."
                ) from error
        self.sums[name] = self.sums.get(name, 0.0) + number * weight
        self.weights[name] = self.weights.get(name, 0.0) + weight

    def digest(self) -> list[int]:
        """The names as numbers that float32 holds exactly. Zeros without any name."""
        if not self.sums:
            return [0] * len(_DIGEST_PARTS)
        content = hashlib.sha256("\0".join(self.sums).encode(errors="surrogateescape")).digest()
        return [int.from_bytes(content[part], "big") for part in _DIGEST_PARTS]

    def take(self, digests: tuple[Sequence[float], Sequence[float]] | None = None) -> dict[str, float]:
        """Return the means over all ranks, and start the next ones. Every rank has to call it.

        `digests` are the highest and the lowest of all ranks, if they are known.
        """
        if not (self.sums or self.metrics or is_distributed()):  # as for most logs
            return {}
        if digests is None:
            own = self.digest()
            found = highest_each([*own, *(-number for number in own)])
            digests = found[: len(own)], [-number for number in found[len(own) :]]
        highest, lowest = digests
        means = self._means(have_equal_names=list(highest) == list(lowest)) if any(highest) else {}
        for name, metric in self.metrics.items():
            means[name] = float(metric.compute())
            metric.reset()
        self.sums, self.weights, self.metrics = {}, {}, {}
        return means

    def _means(self, have_equal_names: bool) -> dict[str, float]:
        numbers = [*read_numbers(self.sums.values()), *(self.weights[name] for name in self.sums)]
        if have_equal_names:
            named, rows = [list(self.sums)], gather_numbers(numbers)
        else:
            parts: list[tuple[list[str], list[float]]] = gather_objects((list(self.sums), numbers))
            named, rows = [names for names, _ in parts], [row for _, row in parts]
        means = {}
        for name in dict.fromkeys(name for names in named for name in names):
            totals, weights = 0.0, 0.0
            for names, row in zip(cycle(named), rows):
                if name in names:
                    totals += row[names.index(name)]
                    weights += row[len(names) + names.index(name)]
            means[name] = totals / weights
        return means


def raise_for_bad_loss(loss: object, device: torch.device, error: Exception) -> None:
    """Explain why an own step's loss could not be added on a device. Return if it is a valid loss."""
    hint = "end it with `return loss.detach()`"
    if not isinstance(loss, torch.Tensor):
        found = f"{brief(loss, 80)}, not a tensor"
        hint += ", without `.item()`" if isinstance(loss, (int, float)) else "" if loss is None else " alone"
    elif loss.ndim:
        found = f"a tensor of shape {tuple(loss.shape)}, not a scalar"
        hint = "return the number that its backward pass began at, or of losses their mean, `loss.mean().detach()`"
    elif loss.device != device:
        found = f"a tensor on {loss.device}, and the run is on {device}"
    else:
        return
    raise LossError(f"`training_step` returned {found}.\n\nHint: {hint}.") from error


class LossLog:
    """Sums up a run's loss and returns the entries of its logs.

    Losses are added on the device, so that no update waits for it. With `filter_nonfinite` (`logging_nan_inf_filter`,
    which a callback may change during the run) the mean since the last log replaces a loss that is NaN or infinite.
    """

    _READ_AT_ONCE = ("cpu",)  # devices whose numbers are read without a wait

    def __init__(self, device: torch.device | str, first_update: int, filter_nonfinite: bool) -> None:
        self.since_last_log = torch.tensor(0.0, device=device)  # HF's `_tr_loss`, changed in place
        self.total = 0.0  # the loss of all logs, summed over updates, HF's `_total_loss_scalar`
        self.last_logged = first_update  # `global_step` at the last log, HF's `_globalstep_last_logged`
        self.first_update = first_update  # `global_step` at the start of the run
        self.nonfinite_updates = 0  # updates in which the filter has replaced a loss, as far as counted
        self.averages = StepAverages()  # of the values that are logged beside the loss
        self.filter_nonfinite = filter_nonfinite
        self._replaced = False  # whether this update has a replaced loss
        # On a device: whether all losses of this update are finite, and for how many of the last updates they were
        self._is_finite: torch.Tensor | None = None
        self._finite_updates: torch.Tensor | None = None
        self._uncounted_updates = 0

    def add(self, loss: torch.Tensor, updates_done: int) -> None:
        """Add a micro-batch's share of the loss of an update. `updates_done` are those before it.

        Mirrors:
            `transformers.Trainer._run_epoch`, `logging_nan_inf_filter`.
        """
        try:
            if self.filter_nonfinite:
                if loss.device.type not in self._READ_AT_ONCE:
                    # chosen on the loss's device, as reading it would wait for the device at every micro-batch
                    is_finite = loss - loss == 0
                    self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite
                    loss = torch.where(is_finite, loss, self._mean_since_last_log(updates_done))
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
        if self._is_finite is not None:
            if self._finite_updates is None:
                self._finite_updates = self._is_finite.float()
            else:
                self._finite_updates += self._is_finite
            self._is_finite = None
            self._uncounted_updates += 1

    def _read(self, *numbers: torch.Tensor | float) -> list[float]:
        """Read numbers and count the non-finite updates, with a single wait for a device."""
        if self._finite_updates is None:
            return read_numbers(numbers)
        *found, finite_updates = read_numbers((*numbers, self._finite_updates))
        self.nonfinite_updates += self._uncounted_updates - int(finite_updates)
        self._finite_updates, self._uncounted_updates = None, 0
        return found

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
        digests, nonfinite_updates = None, None
        if is_distributed():
            mean, highest, lowest = self._exchange(summed, gather)
            size = len(highest) - 1
            loss_sum, *read = self._read(mean, *highest, *lowest, *norms)
            nonfinite_updates, digests = int(read[0]), (read[1 : 1 + size], read[2 + size : 2 + 2 * size])
            read_norms = read[2 + 2 * size :]
        else:
            loss_sum, *read_norms = self._read(gather(summed).mean(), *norms)
            nonfinite_updates = self.nonfinite_updates
        summed -= summed  # in place, as the run keeps adding to this tensor
        entries = {"loss": loss_sum / (updates_done - self.last_logged)}
        if grad_norm is not None:
            entries["grad_norm"] = read_norms[0] if isinstance(grad_norm, torch.Tensor) else grad_norm
        if learning_rate is not None:
            entries["learning_rate"] = learning_rate
        if nonfinite_updates:
            entries["nonfinite_steps"] = nonfinite_updates
        self.total += loss_sum
        self.last_logged = updates_done
        return entries | self.averages.take(digests)

    def _exchange(
        self, summed: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange in one tensor the loss, the number of updates that were not finite, and the averages' names.

        Return the mean of the losses, then the highest and the lowest of the other numbers.
        """
        exact = torch.float64 if summed.dtype == torch.float64 else torch.float32
        counts = torch.tensor([self.nonfinite_updates, *self.averages.digest()], dtype=exact, device=summed.device)
        if self._finite_updates is not None:
            counts[0] += self._uncounted_updates - self._finite_updates
        every = gather(torch.cat([summed.detach().reshape(1).to(exact), counts])).reshape(-1, 1 + len(counts))
        losses = every[:, 0].to(summed.dtype).contiguous()
        return losses.mean(), every[:, 1:].amax(0), every[:, 1:].amin(0)

    def mean(self, updates_done: int) -> float:
        """Return the run's mean loss over updates. The sum since the last log moves to `total`.

        Afterwards `nonfinite_updates` counts all updates of this rank.
        """
        [since_last_log] = self._read(self.since_last_log)
        self.total += since_last_log
        self.since_last_log.zero_()
        return self.total / max(updates_done - self.first_update, 0.001)  # as upstream, for a run without updates

    def state_dict(self) -> PlainState:
        """Return sums and counts in plain values."""
        return self.state_with(None)[0]

    def state_with(self, number: torch.Tensor | float | None) -> tuple[PlainState, float | None]:
        """Return sums and counts in plain values, and a number that is read in the same wait."""
        sums = self.averages.sums
        tr_loss, *read = self._read(self.since_last_log, *sums.values(), *([] if number is None else [number]))
        state: PlainState = {
            "tr_loss": tr_loss,
            "total_loss": self.total,
            "last_logged": self.last_logged,
            "first_update": self.first_update,
            "nonfinite_steps": self.nonfinite_updates,
            "scalars": {"sums": dict(zip(sums, read, strict=False)), "weights": dict(self.averages.weights)},
        }
        return state, None if number is None else read[-1]

    def load_state_dict(self, state: PlainState) -> None:
        """Continue from a result of `state_dict`, or from a run state that contains its entries."""
        self.since_last_log.fill_(state["tr_loss"])
        self.total = state["total_loss"]
        self.last_logged, self.first_update = state["last_logged"], state["first_update"]
        self.nonfinite_updates = state.get("nonfinite_steps", 0)  # a converted `.ckpt` lacks it, and `scalars`
        if "scalars" in state:
            self.averages.sums = dict(state["scalars"]["sums"])
            self.averages.weights = dict(state["scalars"]["weights"])
