"""One evaluation, from batches to predictions and metrics. Lightning drives the loop.

Predictions are kept and joined once, so time grows linearly with the samples. With torchmetrics memory does not grow.
Ranks then exchange the states of metrics, and no logits.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torchmetrics import Metric, MetricCollection

from hf_compat.data.collators import shown_value
from hf_compat.data.loader import PreparedDataLoader, last_shares
from hf_compat.data.types import Batch
from hf_compat.engine.evaluation_contract import (
    EvaluationFacts,
    RowOrder,
    dropped_samples,
    expected_rows,
    most_rows,
    rows_of,
    tell_of_breaches,
)
from hf_compat.engine.padded_rows import PaddedRows
from hf_compat.engine.windows import BatchGroup, TrainingSteps
from hf_compat.errors import ArgumentError, DataError, OverrideError
from hf_compat.hf.metrics import Arrays, EvalLoopOutput, EvalPrediction, returned_metrics
from hf_compat.runtime.collectives import is_distributed
from hf_compat.runtime.inspection import dataset_of, home_of, length_of
from hf_compat.runtime.nested import (
    PADDING_INDEX,
    Array,
    Nested,
    find_batch_size,
    join_batches,
    map_nested,
    nested_numpify,
    slice_nested,
)
from hf_compat.runtime.text import brief

Metrics = dict[str, Any]  # mostly numbers, by name, as the user's function returns them
# A function of an `EvalPrediction` (and `compute_result`), torchmetrics, or a function that makes torchmetrics.
ComputeMetrics = Callable[..., Any] | Metric | MetricCollection
# losses, predictions, labels and inputs of a batch, from all ranks
Results = tuple[Nested | None, Nested | None, Nested | None, Nested | None]


class EvaluationBatch(BatchGroup):
    """One batch of an evaluation, with its position. It reads as a `Window` of one micro-batch.

    Args:
        inputs: The loader's batch.
        is_last: Whether this is known to be the last batch.
        remainder: Samples in a short last batch. 0 or less otherwise.
    """

    __slots__ = ("is_last", "remainder")

    def __init__(self, inputs: Batch, is_last: bool, remainder: int) -> None:
        self.micro_batches = [inputs]
        self.is_last = is_last
        self.remainder = remainder

    @property
    def inputs(self) -> Batch:
        """The loader's batch."""
        return self.micro_batches[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPart:
    """The part of an evaluation that one run of Lightning's loop covers. HF evaluates each data set separately."""

    is_first: bool = True  # calls the callbacks' hooks for the start of a validation
    is_last: bool = True  # calls their hooks for its end
    earlier: Mapping[str, object] = field(default_factory=dict)  # metrics of the previous parts


WHOLE = EvaluationPart()


class EvaluationBatches:
    """The batches of any loader with their positions, as Lightning's validation loop iterates over them.

    To callbacks the loop presents them as one part of an evaluation.
    """

    def __init__(self, loader: Iterable[Batch], part: EvaluationPart = WHOLE) -> None:
        self.loader, self.part = loader, part
        self.length = length_of(loader)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the evaluation data has no length")
        return self.length

    def __iter__(self) -> Iterator[EvaluationBatch]:
        if not isinstance(self.loader, PreparedDataLoader):
            yield from (
                EvaluationBatch(inputs, place == self.length, -1) for place, inputs in enumerate(self.loader, 1)
            )
            return
        try:
            for inputs in self.loader:
                yield EvaluationBatch(inputs, self.loader.end_of_dataloader, self.loader.remainder)
        finally:
            self.loader.lookahead = None  # an error leaves a batch in it


# What waits to be copied together. Larger copies are not faster, and waiting batches take memory. A small tensor among
# the large ones of other batches also keeps the allocator from reusing their memory.
_BYTES_AT_ONCE, _BATCHES_AT_ONCE = 2**18, 8
_NUMBERS = 65536  # losses in one tensor. Their number is not known beforehand


class KeptBatches:
    """Batches of one kind: losses, predictions, labels or inputs.

    Tensors are copied into one, so that joining makes no second copy. On the CPU those of different lengths are padded
    there at the end. A batch that does not fit (another shape, type or device, nested data, too many rows) ends this.
    From then on batches are kept separately and joined at the end. Plain numbers, which take little memory, begin
    another tensor instead.

    Args:
        rows: Rows of the tensor, which is made for all batches if their number is known. 0 keeps batches separately.
    """

    def __init__(self, rows: int = 0) -> None:
        self.on_device: list[Nested] = []
        self.arrays: list[Arrays] = []
        self._rows = rows
        self._whole: torch.Tensor | None = None
        self._padded: PaddedRows | None = None  # in place of the tensor, for more dimensions on the CPU
        self._used = 0
        self._waiting: list[torch.Tensor] = []
        self._waiting_bytes = 0

    def add(self, batch: Nested) -> None:
        """Keep one batch. Small ones are copied together, as single copies take longer."""
        if not self._rows or not (type(batch) is torch.Tensor and batch.ndim > 0):
            self._take_apart()
            self._rows = 0
            self.on_device.append(batch)
            return
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= _BYTES_AT_ONCE or len(self._waiting) >= _BATCHES_AT_ONCE:
            self._place()

    def _place(self) -> None:
        """Copy the waiting batches into the tensor."""
        parts, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not parts:
            return
        if self._whole is None and self._padded is None and parts[0].is_cpu and parts[0].ndim > 1:
            self._padded = PaddedRows(parts[0], self._rows)
        if self._padded is not None:
            if all(map(self._padded.fits, parts)):
                self._padded.add(parts)
                return
            self._take_apart()
            self.on_device.extend(parts)
            self._rows = 0
            return
        if self._whole is None:
            self._whole = parts[0].new_empty((self._rows, *parts[0].shape[1:]))
        whole, end = self._whole, self._used + sum([part.shape[0] for part in parts])
        form = (whole.dtype, whole.device, whole.shape[1:])
        is_odd = end > len(whole)
        for part in parts:  # written out, as `any` takes longer and this runs for every batch
            is_odd |= (part.dtype, part.device, part.shape[1:]) != form
        if is_odd:
            self._take_apart()
            self.on_device.extend(parts)
            self._rows = self._rows if whole.ndim == 1 else 0
            return
        with torch.no_grad():  # an overridden `prediction_step` may return tensors with gradients
            torch.cat(parts, out=whole[self._used : end])
        self._used = end

    def _take_apart(self) -> None:
        """Turn what was copied into one kept batch."""
        self._place()
        if self._whole is not None and self._used:
            self.on_device.append(self._whole[: self._used])
        if self._padded is not None:
            self.on_device.extend(self._padded.parts())
        self._whole, self._padded, self._used = None, None, 0

    def to_cpu(self) -> None:
        """Move the batches that are kept separately to the CPU."""
        self.arrays.extend(nested_numpify(self.on_device))
        self.on_device = []

    def result(self, join: bool) -> Arrays | None:
        """Return everything as arrays, either joined or as a list of batches. None if nothing was kept."""
        self._place()
        if self._whole is not None and join and not (self.on_device or self.arrays):
            return nested_numpify(self._whole[: self._used])
        padded = self._padded if join and not (self.on_device or self.arrays) else None
        if padded is None:
            self._take_apart()
        if not join or self.arrays:
            self.to_cpu()
        batches = self.arrays or self.on_device
        if not join or not (batches or padded):
            return batches or None
        try:
            if padded is not None:
                return nested_numpify(padded.padded(PADDING_INDEX))
            return nested_numpify(join_batches(batches))
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            forms = []
            for batch in batches:
                shapes = map_nested(lambda tensor: tuple(tensor.shape), batch, lambda leaf: tuple(np.shape(leaf)))
                form = f"of shape {shapes}" if isinstance(batch, (torch.Tensor, np.ndarray)) else f"{shapes}"
                forms += [form] if form not in forms else []
            raise DataError(
                f"The batches of an evaluation cannot be joined ({error}): they are {' and '.join(forms[:3])}.\n\n"
                "Hint: let the model and `preprocess_logits_for_metrics` return the same shapes for every batch, or "
                "set `eval_do_concat_batches=False`."
            ) from error


def finite_numbers(numbers: Array) -> Array:
    """Leave out NaN and infinite numbers, unless all are."""
    finite = np.isfinite(numbers)
    return numbers[finite] if finite.any() else numbers


class RunningMean(KeptBatches):
    """The mean of numbers. A full tensor of them is reduced to its mean.

    Args:
        skip_non_finite: Leave out NaN and infinite numbers, unless all are.
    """

    def __init__(self, skip_non_finite: bool) -> None:
        super().__init__(_NUMBERS)
        self.skip_non_finite = skip_non_finite
        self._means: list[tuple[float, int]] = []

    def add(self, batch: Nested) -> None:
        """Copy one batch at once, so that the allocator can use the memory of this batch's outputs for the next."""
        super().add(batch)
        self._place()

    def _take_apart(self) -> None:
        """Reduce what was copied to its mean."""
        super()._take_apart()
        batches, self.on_device = self.on_device, []
        if batches:
            numbers = nested_numpify(join_batches(batches))
            numbers = finite_numbers(numbers) if self.skip_non_finite else numbers
            self._means.append((numbers.mean().item(), len(numbers)))

    def result(self, join: bool) -> Arrays | None:
        """Return the mean as an array of one number. None without any batch."""
        self._take_apart()
        means = [one for one in self._means if not self.skip_non_finite or math.isfinite(one[0])] or self._means
        if len(means) > 1:
            count = sum(count for _, count in means)
            means = [(sum(mean * count for mean, count in means) / count, count)]
        return np.array([means[0][0]]) if means else None


def is_metric_source(candidate: object) -> bool:
    """Whether `compute_metrics` is a torchmetrics object or makes one."""
    if isinstance(candidate, (Metric, MetricCollection)):
        return True
    kind = candidate.func if isinstance(candidate, functools.partial) else candidate
    if isinstance(kind, type):
        return issubclass(kind, (Metric, MetricCollection))
    if isinstance(candidate, Mapping) or not callable(candidate):
        return False
    try:
        parameters = inspect.signature(candidate).parameters.values()
    except (TypeError, ValueError):
        return False
    # HF gives the predictions to every function that can take them. One that cannot makes the metrics
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return all(one.kind in by_name for one in parameters)


def torch_metrics(source: ComputeMetrics | None, device: torch.device) -> MetricCollection | None:
    """Return the torchmetrics of one evaluation, reset. None if `compute_metrics` is a function of predictions.

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
            f"`compute_metrics` takes no argument and gave {brief(made)}.\n\n"
            "Hint: take an `EvalPrediction`, or return a torchmetrics Metric or MetricCollection."
        )
    metrics = (made if isinstance(made, MetricCollection) else MetricCollection([made])).to(device)
    metrics.reset()
    return metrics


def values_of(metrics: MetricCollection) -> Metrics:
    """Return torchmetrics by name, as numbers or lists of numbers, and reset them. Empty if no batch had labels."""
    # every rank must compute, even one without samples
    if not is_distributed() and not any(metric.update_called for metric in metrics.values()):
        return {}
    computed = metrics.compute()
    metrics.reset()
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in computed.items()}


def check_metrics(
    compute_metrics: ComputeMetrics | Mapping[str, ComputeMetrics] | None, eval_dataset: object, by_batch: bool
) -> None:
    """Refuse metrics that cannot be computed. `by_batch` is the argument `batch_eval_metrics`.

    Raises:
        ArgumentError: A value is not callable, a dict names an unknown data set, or a function lacks a parameter.
    """
    parts: Iterable[ComputeMetrics | None]
    if not isinstance(compute_metrics, Mapping):
        parts = (compute_metrics,)
    else:
        parts = compute_metrics.values()
        known = list(eval_dataset) if isinstance(eval_dataset, Mapping) else []
        unknown = [name for name in compute_metrics if name not in known]
        if unknown:
            raise ArgumentError(
                f"`compute_metrics` has metrics for {unknown}, and the evaluation data sets are {known}.\n\n"
                "Hint: pass `eval_dataset` as a dict of the same names."
            )
    for part in parts:
        if part is None or is_metric_source(part):
            continue
        if not callable(part):
            raise ArgumentError(
                f"`compute_metrics={brief(part)}` cannot be called.\n\n"
                "Hint: pass a function of an `EvalPrediction`, or a torchmetrics metric."
            )
        if by_batch and "compute_result" not in inspect.signature(part).parameters:
            raise ArgumentError(
                "`batch_eval_metrics=True` calls `compute_metrics` with `compute_result`, which it does not take.\n\n"
                "Hint: add a `compute_result: bool` parameter; it is True after the last batch."
            )


class EvaluationRun:
    """One evaluation from its first batch to its metrics. The arguments say what it keeps and computes.

    Args:
        steps: Owner of `prediction_step`.
        prefix: Prefix of every metric, added if missing.
        ignore_keys: Outputs to leave out.
        is_prediction: True for `predict`, which keeps predictions whatever the metrics are.
        compute_metrics: A function of the predictions, a torchmetrics object updated batch by batch, or None.
        preprocess_logits: Applied to logits before they are kept, or None.
        gather: Gathers one rank's results from all ranks. A subclass may choose it. None uses the accelerator's.
        logged_values: Returns the values that the steps have logged by name. None if they cannot log.
        drops_fillers: Drop the samples that fill up the last batch. Otherwise that is left to `gather`.
        reads_all: Whether all batches of the loader are evaluated. A user's Lightning trainer may limit them.

    Attributes:
        output: The result, once the evaluation is finished.
    """

    def __init__(
        self,
        steps: TrainingSteps,
        model: torch.nn.Module,
        loader: Iterable[Batch],
        prefix: str,
        *,
        loss_only: bool = False,
        ignore_keys: list[str] | None = None,
        is_prediction: bool = False,
        compute_metrics: ComputeMetrics | None = None,
        preprocess_logits: Callable[[Nested, Nested], Nested] | None = None,
        gather: Callable[[Nested], Nested] | None = None,
        logged_values: Callable[[], Mapping[str, float]] | None = None,
        drops_fillers: bool = True,
        reads_all: bool = True,
    ) -> None:
        args, accelerator = steps.args, steps.accelerator
        self.ranks = accelerator.rank_slice
        self.steps, self.model, self.loader, self.prefix = steps, model, loader, prefix
        self.loss_only, self.ignore_keys, self.is_prediction = loss_only, ignore_keys, is_prediction
        self.compute_metrics, self.preprocess_logits = compute_metrics, preprocess_logits
        self.gather = gather or accelerator.gather
        shares = last_shares(loader) if self.ranks.world_size > 1 else []
        if shares and not (loss_only and shares[-1]):
            raise ArgumentError(
                f"`accelerator_config={{'even_batches': False}}` gives the first rank {shares[0]} samples in the last "
                f"round of an evaluation, and the last rank {shares[-1]}. Their results cannot be gathered.\n\n"
                "Hint: set `dataloader_drop_last=True`, or leave `even_batches` at True."
            )
        # one process has all the results, so nothing is padded or gathered
        is_own = self.gather == accelerator.gather
        self._is_alone = is_own and getattr(accelerator, "is_alone", False) is True  # a script may replace it
        if is_own and self.ranks.sharing > 1:
            self.gather = lambda data: self.ranks.once_each(accelerator.gather(data))
        self.logged_values = logged_values or dict
        self.drops_fillers = drops_fillers
        self.batch_size, self._included = args.eval_batch_size, args.include_for_metrics
        self._joins, self._to_cpu_every = args.eval_do_concat_batches, args.eval_accumulation_steps
        self._skips_non_finite, self._by_batch = args.logging_nan_inf_filter, args.batch_eval_metrics
        self.torch_metrics = torch_metrics(compute_metrics, args.device)
        self._keeps_predictions = is_prediction or not (self._by_batch or self.torch_metrics is not None)
        # predictions are gathered from all ranks, unless only metrics updated batch by batch use them
        self._gathers_predictions = self.torch_metrics is None or is_prediction
        # whether something is to be done after a batch's events
        self._ends_batches = self._by_batch or self._to_cpu_every is not None
        joins_at_end = self._joins and self._to_cpu_every is None
        losses = KeptBatches(_NUMBERS if joins_at_end else 0)
        if self.torch_metrics is not None:
            losses = RunningMean(self._skips_non_finite)
        self._samples, batches = length_of(dataset_of(loader)), length_of(loader)
        rows = 0
        if joins_at_end and self._samples is not None and batches is not None:
            rows = min(self._samples, batches * self.batch_size * self.ranks.world_size)
        self.kept = (losses, KeptBatches(rows), KeptBatches(rows), KeptBatches(rows))
        self.observed_samples = self.batches_seen = 0
        self.metrics_so_far: Metrics = {}
        self.output: EvalLoopOutput | None = None
        self._pending: tuple[EvaluationBatch, Results] | None = None
        self._order = RowOrder(loader) if is_prediction else None
        self._names: tuple[str, ...] = ()  # of the first batch's inputs
        self._called_metrics, self._reads_all = False, reads_all
        # the losses of batches and their target tokens, with `eval_loss_by_token`
        self._weighted: list[torch.Tensor] | None = [] if args.eval_loss_by_token else None
        self._tokens: list[torch.Tensor] = []  # target tokens a sample, of the first two batches
        self._counts_tokens = True

    def step(self, batch: EvaluationBatch) -> torch.Tensor | None:
        """Predict one batch, keep its results and return its loss."""
        if self._pending is not None:
            self._end_batch(*self._pending, is_last=False)
        samples = find_batch_size(batch.inputs)
        if not self._names and isinstance(batch.inputs, Mapping):
            self._names = tuple([name for name, value in batch.inputs.items() if value is not None])
        self.observed_samples += samples or 0
        weight = None if self._weighted is None else self.steps._weight_in_evaluation(batch.inputs)
        predicted = self.steps.prediction_step(self.model, batch.inputs, self.loss_only, ignore_keys=self.ignore_keys)
        try:
            loss, logits, labels = predicted  # a subclass may return anything
        except (TypeError, ValueError) as error:
            raise OverrideError(
                f"`prediction_step` returned {shown_value(predicted)}.\n\nHint: return loss, logits and labels. Each "
                "may be None."
            ) from error
        losses = None if loss is None else self._repeated(loss, batch, weight)
        inputs = self._main_input(batch) if "inputs" in self._included else None
        if self._gathers_predictions and not self._is_alone:
            labels, logits = self._padded(labels), self._padded(logits)
        if logits is not None and self.preprocess_logits is not None:
            logits = self.preprocess_logits(logits, labels)
        if self.torch_metrics is not None and logits is not None and labels is not None:
            self._update(self.torch_metrics, logits, labels, batch, samples)
        if not self._gathers_predictions:
            logits = labels = None
        elif batch.is_last or not self._is_alone:
            logits, labels = self._gathered(logits, batch), self._gathered(labels, batch)
        self._keep(losses, logits, labels, inputs)
        if self._ends_batches:
            self._pending = batch, (losses, logits, labels, inputs)
        return loss

    def _repeated(self, loss: torch.Tensor, batch: EvaluationBatch, weight: torch.Tensor | None) -> Nested | None:
        """Gather a batch's loss from all ranks, once for each of its samples. Note its weight or its tokens."""
        if isinstance(loss, (int, float)):
            raise OverrideError(
                f"`prediction_step` returned the loss {brief(loss)}, and losses are gathered as tensors.\n\n"
                "Hint: return the tensor, without `.item()` or `float(…)`."
            )
        if self._weighted is not None and weight is not None:
            self._weighted.append(torch.stack([loss.detach().mean().double(), weight.double()]))
        elif self._counts_tokens:
            labels = batch.inputs.get("labels") if self._names else None
            self._counts_tokens = False
            if type(labels) is torch.Tensor and labels.ndim > 1 and not labels.is_floating_point():
                self._tokens.append(labels.ne(PADDING_INDEX).sum() / len(labels))
                self._counts_tokens = len(self._tokens) < 2
        size, full = self.batch_size, torch.contiguous_format
        if type(loss) is torch.Tensor and not loss.ndim:  # filling new memory takes a third of the time of `repeat`
            return self._gathered(loss.expand(size).clone(memory_format=full), batch)
        return self._gathered(loss.repeat(size), batch)  # an overridden `prediction_step` may return others

    def _main_input(self, batch: EvaluationBatch) -> Nested:
        name = getattr(self.steps.model, "main_input_name", "input_ids")
        if name not in batch.inputs:
            given = ", ".join(batch.inputs)
            raise ArgumentError(
                f"`include_for_metrics=['inputs']` keeps the input {brief(name)}, and the batch has {given}.\n\n"
                "Hint: set `main_input_name` on the model to the one that is meant."
            )
        return self._gathered(self._padded(self.steps._prepare_input(batch.inputs[name])), batch)

    def _padded(self, data: Nested | None) -> Nested | None:
        if data is None or self._is_alone:
            return data
        return self.steps.accelerator.pad_across_processes(data, dim=1, pad_index=PADDING_INDEX)

    def _gathered(self, data: Nested | None, batch: EvaluationBatch) -> Nested | None:
        """Gather from all ranks, without the filler samples of the last batch."""
        if data is None:
            return None
        gathered = data if self._is_alone else self.gather(data)
        is_filled = self.drops_fillers and batch.is_last and batch.remainder > 0
        return slice_nested(gathered, 0, batch.remainder) if is_filled else gathered

    def _update(
        self, metrics: MetricCollection, logits: Nested, labels: Nested, batch: EvaluationBatch, samples: int | None
    ) -> None:
        """Update metrics with this rank's samples, without the fillers of the last round.

        Raises:
            ArgumentError: Outputs (after `preprocess_logits_for_metrics`) or labels are not one tensor.
        """
        if self.ranks.place > 0:  # a neighbour has the same samples
            return
        if batch.is_last and batch.remainder > 0 and samples and self.ranks.world_size > 1:
            mine = batch.remainder - self.ranks.rank * samples
            if mine <= 0:
                return
            logits, labels = slice_nested(logits, 0, mine), slice_nested(labels, 0, mine)
        for name, value in (("outputs", logits), ("labels", labels)):
            if not isinstance(value, torch.Tensor):
                raise ArgumentError(
                    f"`compute_metrics` is a torchmetrics metric, and there are several {name} "
                    f"({type(value).__name__}).\n\n"
                    "Hint: let `preprocess_logits_for_metrics` choose the output, or `label_names` the labels."
                )
        metrics.update(logits, labels)
        self._called_metrics = True

    def _keep(self, *results: Nested | None) -> None:
        """Keep a batch's losses, predictions, labels and inputs. Predictions need not be kept for some metrics."""
        self.batches_seen += 1
        for kept, part in zip(self.kept, results if self._keeps_predictions else results[:1], strict=False):
            if part is not None:
                kept.add(part)

    def _end_batch(self, batch: EvaluationBatch, results: Results, is_last: bool) -> None:
        """Compute a batch's metrics or move results to the CPU, after the batch's events.

        `is_last` is exact, `batch.is_last` follows the length of a loader, which may be wrong or missing.
        """
        self._pending = None
        losses, predictions, labels, _ = results
        compute = self.compute_metrics if self._by_batch and self.torch_metrics is None else None
        if compute is not None and predictions is not None and labels is not None:
            prediction = self._prediction(losses, predictions, labels, batch.inputs)
            computed = compute(prediction, compute_result=is_last)
            self._called_metrics = True
            # `compute_metrics` may return nothing before the last batch
            self.metrics_so_far = returned_metrics(computed, "compute_metrics") if is_last or computed else {}
        every = self._to_cpu_every
        if every is not None and self._keeps_predictions and self.batches_seen % every == 0:
            for kept in self.kept:
                kept.to_cpu()

    def _prediction(
        self, losses: Nested | None, predictions: Nested, labels: Nested, inputs: Nested | None
    ) -> EvalPrediction:
        return EvalPrediction(
            predictions=predictions,
            label_ids=labels,
            losses=losses if "loss" in self._included else None,
            inputs=inputs if "inputs" in self._included else None,
        )

    def finish(self) -> EvalLoopOutput:
        """Join the kept results and compute the metrics."""
        if self._pending is not None:
            self._end_batch(*self._pending, is_last=True)
        if isinstance(self.loader, PreparedDataLoader):  # Lightning does not read past the last batch
            self.loader.passes.end(self.loader)
        join, (of_losses, of_predictions, of_labels, of_inputs) = self._joins, self.kept
        losses, predictions = of_losses.result(join), of_predictions.result(join)
        labels, inputs = of_labels.result(join), of_inputs.result(join)
        metrics = returned_metrics(self._computed(losses, predictions, labels, inputs), "compute_metrics")
        start = f"{self.prefix}_"
        numbers = np.concatenate(losses) if isinstance(losses, list) else losses
        if self._weighted:
            metrics[f"{start}loss"] = self._mean_by_token(torch.stack(self._weighted))
        elif isinstance(numbers, np.ndarray):
            numbers = finite_numbers(numbers) if self._skips_non_finite else numbers
            metrics[f"{start}loss"] = float(numbers.mean().item())
        seconds = getattr(self.steps, "model_preparation_time", None)
        if seconds is not None:
            metrics[f"{start}model_preparation_time"] = seconds
        metrics |= self.logged_values()
        for name in list(metrics):  # metrics that lack the prefix come last
            if not name.startswith(start):
                metrics[f"{start}{name}"] = metrics.pop(name)
        way_to_order, left_out = None, 0
        if self._order is not None and self._order.is_other:
            self._order.end()
            left_out = self._order.left_out(predictions)
            (predictions, way_to_order), (labels, _) = self._order.undone(predictions), self._order.undone(labels)
        if self.steps.accelerator.process_index == 0:
            facts = self._facts(way_to_order, left_out, predictions, labels, has_loss=numbers is not None)
            tell_of_breaches(facts)
        self.output = EvalLoopOutput(predictions, labels, metrics, self._samples or self.observed_samples)
        return self.output

    def _mean_by_token(self, weighted: torch.Tensor) -> float:
        """The mean of batches' losses, weighted by their target tokens, over all ranks."""
        gathered = self.ranks.once_each(self.steps.accelerator.gather(weighted))
        losses, counts = gathered.unbind(-1)
        if self._skips_non_finite and losses.isfinite().any():
            losses, counts = losses[losses.isfinite()], counts[losses.isfinite()]
        return float((losses * counts).sum() / counts.sum())

    def _computed(
        self, losses: Arrays | None, predictions: Arrays | None, labels: Arrays | None, inputs: Arrays | None
    ) -> Metrics:
        """The metrics of all batches, as `compute_metrics` gives them."""
        if self.torch_metrics is not None:
            return values_of(self.torch_metrics)
        if self._by_batch:
            return self.metrics_so_far
        if self.compute_metrics is None or predictions is None or labels is None:
            return {}
        computed: Metrics = self.compute_metrics(self._prediction(losses, predictions, labels, inputs))
        self._called_metrics = True
        return computed

    def _facts(
        self,
        way_to_order: str | None,
        left_out: int,
        predictions: Arrays | None,
        labels: Arrays | None,
        has_loss: bool,
    ) -> EvaluationFacts:
        """Collect what this evaluation has read and computed."""
        steps, dropped = self.steps, dropped_samples(self.loader)
        is_used = self._joins and (self.is_prediction or self._called_metrics)
        return EvaluationFacts(
            is_prediction=self.is_prediction,
            batches=self.batches_seen,
            expected_batches=length_of(self.loader) if self._reads_all else None,
            samples=self._samples,
            expected_rows=expected_rows(self.loader) if self._is_alone and self._reads_all else None,
            rows_read=self.observed_samples,
            rows=most_rows(predictions) if is_used else None,
            label_rows=rows_of(labels) if is_used else None,
            dropped=dropped,
            drops_by_argument=steps.args.dataloader_drop_last,
            unsampled=max(left_out - dropped, 0),
            way_to_order=way_to_order,
            names=self._names,
            removed=getattr(getattr(self.loader, "collate_fn", None), "dropped", ()),
            label_names=steps.label_names,
            forward=steps.model.forward,
            has_loss=has_loss,
            weighs_batches_alike=self._tokens != [] and len({float(one) for one in self._tokens}) > 1,
            has_labels=labels is not None,
            has_own_step=home_of(steps.prediction_step).partition(".")[0] != "hf_compat",
            has_metrics=self.compute_metrics is not None,
            called_metrics=self._called_metrics,
            loss_only=self.loss_only,
        )
