"""Keep the results of evaluation batches and join them at the end, or update torchmetrics batch by batch.

With torchmetrics memory does not grow. Ranks then exchange the states of metrics, and no logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torchmetrics import Metric, MetricCollection

from hf_compat.errors import ArgumentError, DataError
from hf_compat.hf.metrics import Arrays
from hf_compat.runtime.collectives import is_distributed
from hf_compat.runtime.nested import Nested, join_batches, map_nested, nested_numpify

_BLOCK = 65536  # numbers
_BYTES_AT_ONCE = 2**18  # larger copies are not faster, and waiting batches take memory


class KeptBatches:
    """Batches of one kind: losses, predictions, labels or inputs.

    If the number of rows is known, tensors are copied into one, so that joining makes no second copy. A batch that does
    not fit (another shape, type or device, nested data, too many rows) ends this. From then on batches are kept
    separately and joined at the end.

    Args:
        rows: Upper bound of the number of rows. 0 keeps batches separately.
    """

    def __init__(self, rows: int = 0) -> None:
        self.on_device: list[Nested] = []
        self.arrays: list[Arrays] = []
        self._rows = rows
        self._whole: torch.Tensor | None = None
        self._used = 0
        self._waiting: list[torch.Tensor] = []
        self._waiting_bytes = 0

    def add(self, batch: Nested) -> None:
        """Keep one batch. Small ones are copied together, as single copies take longer."""
        if not self._rows or not (type(batch) is torch.Tensor and batch.ndim > 0):
            self._take_apart()
            self.on_device.append(batch)
            return
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= _BYTES_AT_ONCE:
            self._place()

    def _place(self) -> None:
        """Copy the waiting batches into the tensor."""
        parts, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not parts:
            return
        if self._whole is None:
            self._whole = parts[0].new_empty((self._rows, *parts[0].shape[1:]))
        whole, end = self._whole, self._used + sum([part.shape[0] for part in parts])
        if end > self._rows or not _are_alike(whole, parts):
            self._take_apart()
            self.on_device.extend(parts)
            return
        torch.cat(parts, out=whole[self._used : end])
        self._used = end

    def _take_apart(self) -> None:
        """Turn what was copied into one kept batch, and keep later batches beside it."""
        self._place()
        if self._whole is not None and self._used:
            self.on_device.append(self._whole[: self._used])
        self._whole, self._rows = None, 0

    def to_cpu(self) -> None:
        """Move what is on the device to the CPU."""
        self._take_apart()
        self.arrays.extend(nested_numpify(self.on_device))
        self.on_device = []

    def result(self, join: bool) -> Arrays | None:
        """Return everything as arrays, either joined or as a list of batches. None if nothing was kept."""
        self._place()
        if self._whole is not None and join:
            return nested_numpify(self._whole[: self._used])
        if not join or self.arrays:
            self.to_cpu()
        self._take_apart()
        batches = self.arrays or self.on_device
        if not join or not batches:
            return batches or None
        try:
            return nested_numpify(join_batches(batches))
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            forms = list(dict.fromkeys(_form_of(batch) for batch in batches))
            raise DataError(
                f"The batches of an evaluation cannot be joined ({error}): they are {' and '.join(forms[:3])}.\n\n"
                "Hint: let the model and `preprocess_logits_for_metrics` return the same shapes for every batch, or "
                "set `eval_do_concat_batches=False`."
            ) from error


def _are_alike(rows: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    """Whether all parts have the shape of the rows, their type and device."""
    shape, dtype, device = rows.shape[1:], rows.dtype, rows.device
    for part in parts:  # noqa: SIM110  # written out, as `all` takes longer and this runs for every batch
        if part.dtype != dtype or part.shape[1:] != shape or part.device != device:
            return False
    return True


def _form_of(batch: Nested) -> str:
    """Format the shapes of nested data."""
    shapes = map_nested(lambda tensor: tuple(tensor.shape), batch, lambda leaf: tuple(np.shape(leaf)))
    return f"of shape {shapes}" if isinstance(batch, (torch.Tensor, np.ndarray)) else f"{shapes}"


class RepeatedNumbers(KeptBatches):
    """Numbers that count for several samples each (a batch's mean loss), kept once and repeated at the end.

    A small tensor between the large ones of each batch would keep the allocator from reusing their memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: list[float] = []
        self._times: list[int] = []
        self._dtype: torch.dtype | None = None

    def add_number(self, number: torch.Tensor, times: int) -> None:
        """Keep a CPU tensor's number. Reading it from another device would wait for the device's work.

        Args:
            number: A tensor without dimensions.
            times: Number of samples that it counts for.
        """
        if number.dtype is not self._dtype:
            self._take_apart()
            self._dtype = number.dtype
        self._numbers.append(number.item())
        self._times.append(times)

    def _take_apart(self) -> None:
        """Turn the kept numbers into one batch."""
        if self._numbers:
            numbers = torch.tensor(self._numbers, dtype=self._dtype)
            self.on_device.append(numbers.repeat_interleave(torch.tensor(self._times)))
            self._numbers, self._times = [], []


class RunningMean(KeptBatches):
    """The mean of one-dimensional batches, computed within one block of memory.

    A small tensor between the large, short-lived ones of each batch would keep the allocator from reusing their memory.
    Memory would grow as if the large ones had been kept.

    Args:
        skip_non_finite: Leave out NaN and infinite numbers, unless there are no others.
    """

    def __init__(self, skip_non_finite: bool) -> None:
        super().__init__()
        self.skip_non_finite = skip_non_finite
        self._block: torch.Tensor | None = None
        self._used = 0
        self._means: list[tuple[float, int]] = []
        self._bad: list[tuple[float, int]] = []

    def add(self, batch: torch.Tensor) -> None:
        """Copy one batch into the block. A full block is reduced to its mean first."""
        if self._block is None or self._used + len(batch) > len(self._block):
            self._take_block()
            self._block = batch.new_empty(max(_BLOCK, len(batch)))
        self._block[self._used : self._used + len(batch)] = batch
        self._used += len(batch)

    def _take_block(self) -> None:
        if self._block is None or not self._used:
            return
        numbers = nested_numpify(self._block[: self._used])
        finite = np.isfinite(numbers)
        kept = numbers[finite] if self.skip_non_finite and finite.any() else numbers
        means = self._means if not self.skip_non_finite or finite.any() else self._bad
        means.append((kept.mean().item(), len(kept)))
        self._used = 0

    def mean(self) -> float | None:
        """Return the mean, or None without any batch."""
        self._take_block()
        means = self._means or self._bad
        if len(means) <= 1:
            return means[0][0] if means else None
        return sum(mean * count for mean, count in means) / sum(count for _, count in means)


Metrics = dict[str, Any]  # mostly numbers, by name, as the user's function returns them
# A function of an `EvalPrediction` (and `compute_result`), torchmetrics, or a function that makes torchmetrics.
ComputeMetrics = Callable[..., Any] | Metric | MetricCollection


class TorchMetrics:
    """The torchmetrics of one evaluation, updated batch by batch.

    Args:
        metrics: The metrics, which are reset first.
        device: The device of their states.
    """

    def __init__(self, metrics: MetricCollection, device: torch.device) -> None:
        self.metrics = metrics.to(device)
        self.metrics.reset()
        self._updated = False

    def update(self, predictions: Nested, labels: Nested) -> None:
        """Update the metrics with a batch.

        Args:
            predictions: The model's output (after `preprocess_logits_for_metrics`), the metrics' first argument.
            labels: The labels, their second argument.

        Raises:
            ArgumentError: Outputs or labels are not one tensor.
        """
        for name, value in (("outputs", predictions), ("labels", labels)):
            if not isinstance(value, torch.Tensor):
                raise ArgumentError(
                    f"`compute_metrics` is a torchmetrics metric, and there are several {name} "
                    f"({type(value).__name__}).\n\n"
                    "Hint: let `preprocess_logits_for_metrics` choose the output, or `label_names` the labels."
                )
        self.metrics.update(predictions, labels)
        self._updated = True

    def compute(self) -> Metrics:
        """Return the metrics by name, as numbers or lists of numbers. Empty if no batch had labels."""
        if not self._updated and not is_distributed():  # every rank must compute, even one without samples
            return {}
        computed = self.metrics.compute()
        self.metrics.reset()
        return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in computed.items()}


def is_metric_source(candidate: object) -> bool:
    """Whether `compute_metrics` is a torchmetrics object or makes one."""
    if isinstance(candidate, (Metric, MetricCollection)):
        return True
    if isinstance(candidate, type):
        return issubclass(candidate, (Metric, MetricCollection))
    if isinstance(candidate, Mapping) or not callable(candidate):
        return False
    try:
        parameters = inspect.signature(candidate).parameters.values()
    except (TypeError, ValueError):
        return False
    # a function without required parameters makes the metrics, as one of metrics needs the predictions
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def torch_metrics(source: ComputeMetrics | None, device: torch.device) -> TorchMetrics | None:
    """Return the torchmetrics of one evaluation. None if `compute_metrics` is a function of predictions.

    Args:
        source: A `Metric`, a `MetricCollection`, one of these classes, or a function without arguments that makes one.
        device: The device of their states.

    Raises:
        ArgumentError: The function returns something else.
    """
    if source is None or not is_metric_source(source):
        return None
    made = source if isinstance(source, (Metric, MetricCollection)) else source()
    if not isinstance(made, (Metric, MetricCollection)):
        raise ArgumentError(
            f"`compute_metrics` takes no argument and gave {made!r}.\n\n"
            "Hint: take an `EvalPrediction`, or return a torchmetrics Metric or MetricCollection."
        )
    return TorchMetrics(made if isinstance(made, MetricCollection) else MetricCollection([made]), device)


def check_metrics(
    compute_metrics: ComputeMetrics | Mapping[str, ComputeMetrics] | None, eval_dataset: object, by_batch: bool
) -> None:
    """Refuse metrics that cannot be computed.

    Args:
        compute_metrics: A function, a torchmetrics object, a function that makes one, or a dict of these.
        eval_dataset: The evaluation data, or a dict of data sets.
        by_batch: `batch_eval_metrics`.

    Raises:
        ArgumentError: A value is not callable, a dict names an unknown data set, or a function lacks a parameter.
    """
    if not isinstance(compute_metrics, Mapping):
        _check_one(compute_metrics, by_batch)
        return
    known = list(eval_dataset) if isinstance(eval_dataset, Mapping) else []
    unknown = [name for name in compute_metrics if name not in known]
    if unknown:
        raise ArgumentError(
            f"`compute_metrics` has metrics for {unknown}, and the evaluation data sets are {known}.\n\n"
            "Hint: pass `eval_dataset` as a dict of the same names."
        )
    for part in compute_metrics.values():
        _check_one(part, by_batch)


def _check_one(compute_metrics: ComputeMetrics | None, by_batch: bool) -> None:
    if compute_metrics is None or is_metric_source(compute_metrics):
        return
    if not callable(compute_metrics):
        raise ArgumentError(
            f"`compute_metrics={compute_metrics!r}` cannot be called.\n\n"
            "Hint: pass a function of an `EvalPrediction`, or a torchmetrics metric."
        )
    if by_batch and "compute_result" not in inspect.signature(compute_metrics).parameters:
        raise ArgumentError(
            "`batch_eval_metrics=True` calls `compute_metrics` with `compute_result`, which it does not take.\n\n"
            "Hint: add a `compute_result: bool` parameter; it is True after the last batch."
        )
