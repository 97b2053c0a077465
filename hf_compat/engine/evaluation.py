"""One evaluation, from batches to predictions and metrics. Lightning drives the loop.

Predictions are kept (`kept_batches.py`) and joined once, so time grows linearly with the samples.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass

import numpy as np
import torch

from hf_compat.data.collators import shown_value
from hf_compat.data.loader import PreparedDataLoader
from hf_compat.data.tree import PADDING_INDEX, find_batch_size, truncate_to
from hf_compat.data.types import Batch
from hf_compat.engine.kept_batches import (
    ComputeMetrics,
    CountedRows,
    KeptBatches,
    Metrics,
    RepeatedNumbers,
    RunningMean,
    TorchMetrics,
    torch_metrics,
)
from hf_compat.engine.windows import PredictionSteps
from hf_compat.errors import ArgumentError, HfCompatWarning, OverrideError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.metrics import Arrays, EvalLoopOutput, EvalPrediction, plain_metrics
from hf_compat.runtime.inspection import has_length
from hf_compat.runtime.nested import Nested, leaves

# loss, logits and labels
Predicted = tuple[torch.Tensor | None, Nested | None, Nested | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """What an evaluation keeps and computes.

    Args:
        metric_key_prefix: Prefix of every metric, added if missing.
        prediction_loss_only: Keep the loss only.
        ignore_keys: Outputs to leave out.
        is_prediction: True for `predict`, which keeps predictions whatever the metrics are.
        batch_size: Samples in a full batch.
        to_cpu_every_batches: Number of batches after which kept results move to the CPU. None moves them at the end.
        join: Join the batches. Otherwise the results are lists of batches.
        keep_inputs: Keep the main input for the metrics.
        give_losses: Pass the losses to the metrics.
        batch_metrics: Compute metrics batch by batch.
        skip_non_finite: Leave NaN and infinite losses out of the mean.
    """

    metric_key_prefix: str = "eval"
    prediction_loss_only: bool = False
    ignore_keys: list[str] | None = None
    is_prediction: bool = False
    batch_size: int = 8
    to_cpu_every_batches: int | None = None
    join: bool = True
    keep_inputs: bool = False
    give_losses: bool = False
    batch_metrics: bool = False
    skip_non_finite: bool = True

    @classmethod
    def of(
        cls,
        args: TrainingArguments,
        prefix: str,
        prediction_loss_only: bool = False,
        ignore_keys: list[str] | None = None,
        is_prediction: bool = False,
    ) -> EvaluationSettings:
        """Make the settings from the training arguments."""
        return cls(
            metric_key_prefix=prefix,
            prediction_loss_only=prediction_loss_only,
            ignore_keys=ignore_keys,
            is_prediction=is_prediction,
            batch_size=args.eval_batch_size,
            to_cpu_every_batches=args.eval_accumulation_steps,
            join=args.eval_do_concat_batches,
            keep_inputs="inputs" in args.include_for_metrics,
            give_losses="loss" in args.include_for_metrics,
            batch_metrics=args.batch_eval_metrics,
            skip_non_finite=args.logging_nan_inf_filter,
        )


class EvaluationBatch:
    """One batch of an evaluation, with its position.

    Callbacks can read it as a mapping: `batch["input_ids"]`. Like a `Window` it has a length and can be iterated.
    It holds one micro-batch.

    Args:
        inputs: The loader's batch.
        is_last: Whether this is known to be the last batch.
        remainder: Samples in a short last batch. 0 or less otherwise.
    """

    __slots__ = ("inputs", "is_last", "remainder")

    def __init__(self, inputs: Batch, is_last: bool, remainder: int) -> None:
        self.inputs = inputs
        self.is_last = is_last
        self.remainder = remainder

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Batch]:
        return iter((self.inputs,))

    def __getitem__(self, key: object) -> Batch:
        """Return an entry of the batch. Key 0 returns the batch itself."""
        return (self.inputs,)[key] if isinstance(key, (int, slice)) else self.inputs[key]

    def __contains__(self, key: object) -> bool:
        return key in self.inputs

    def change_batches(self, change: Callable[[Batch], Batch]) -> None:
        """Replace the loader's batch."""
        self.inputs = change(self.inputs)

    def keys(self) -> Iterable[object]:
        """Return the keys of the batch."""
        return self.inputs.keys()

    def trim(self, data: Nested) -> Nested:
        """Drop the filler samples from the gathered last batch."""
        return truncate_to(data, self.remainder) if self.is_last and self.remainder > 0 else data


class EvaluationBatches:
    """A loader's batches with their positions, as Lightning's validation loop iterates over them.

    Args:
        loader: A `PreparedDataLoader`, or any iterable of batches.
    """

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader = loader
        self.length = _length_of(loader)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the evaluation data has no length")
        return self.length

    def start_if_empty(self) -> None:
        """Start the iterator of an empty loader, as torch draws a random number there. Lightning would not."""
        if self.length == 0:
            next(iter(self), None)

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


@dataclass(slots=True)
class BatchResults:
    """Results of one batch, gathered from all ranks. A field is None if it is missing or not gathered.

    Args:
        losses: The batch's loss, repeated for each sample of a full batch.
        inputs: The main input.
        predictions: The logits, after `preprocess_logits_for_metrics`.
        labels: The labels.
    """

    losses: torch.Tensor | None = None
    inputs: Nested | None = None
    predictions: Nested | None = None
    labels: Nested | None = None


class EvaluationRun:
    """One evaluation from its first batch to its metrics.

    Args:
        steps: Owner of `prediction_step`.
        model: The model to call.
        loader: The loader of the batches.
        settings: What to keep and compute.
        compute_metrics: A function of the predictions, a torchmetrics object updated batch by batch, or None.
        preprocess_logits: Applied to logits before they are kept, or None.
        gather: Gathers one rank's results from all ranks. A subclass may choose it. None uses the accelerator's.
        logged_values: Returns the values that the steps have logged by name. None if they cannot log.
        drops_fillers: Drop the samples that fill up the last batch. Otherwise that is left to `gather`.
    """

    def __init__(
        self,
        steps: PredictionSteps,
        model: torch.nn.Module,
        loader: Iterable[Batch],
        settings: EvaluationSettings,
        compute_metrics: ComputeMetrics | None = None,
        preprocess_logits: Callable[[Nested, Nested], Nested] | None = None,
        gather: Callable[[Nested], Nested] | None = None,
        logged_values: Callable[[], Mapping[str, float]] | None = None,
        drops_fillers: bool = True,
    ) -> None:
        self.steps, self.model, self.loader, self.settings = steps, model, loader, settings
        self.compute_metrics = compute_metrics
        self.preprocess_logits = preprocess_logits
        self.gather = gather or steps.accelerator.gather
        # one process has all the results, so nothing is padded or gathered
        is_own = self.gather == steps.accelerator.gather
        self._is_alone = is_own and getattr(steps.accelerator, "is_alone", False) is True  # a script may replace it
        self.logged_values = logged_values or dict
        self.drops_fillers = drops_fillers
        self.torch_metrics = torch_metrics(compute_metrics, steps.args.device)
        by_batch = settings.batch_metrics or self.torch_metrics is not None
        self._keeps_predictions = not by_batch or settings.is_prediction
        # predictions are gathered from all ranks, unless only metrics updated batch by batch use them
        self._gathers_predictions = self.torch_metrics is None or settings.is_prediction
        # whether something is to be done after a batch's events
        self._ends_batches = settings.batch_metrics or settings.to_cpu_every_batches is not None
        self.losses = self._losses_to_keep()
        self.predictions, self.labels, self.inputs = self._to_keep(), self._to_keep(), self._to_keep()
        self.observed_samples = 0
        self.batches_seen = 0
        self.metrics_so_far: Metrics = {}
        self.output: EvalLoopOutput | None = None
        self._pending: Callable[[], None] | None = None

    def _losses_to_keep(self) -> KeptBatches:
        if self.torch_metrics is not None:
            return RunningMean(self.settings.skip_non_finite)
        joins_at_end = self.settings.join and not self._ends_batches
        return RepeatedNumbers() if joins_at_end and self._is_alone else KeptBatches()

    def _to_keep(self) -> KeptBatches:
        settings = self.settings
        if not settings.join or settings.to_cpu_every_batches is not None:
            return KeptBatches()
        together = settings.batch_size * self.steps.accelerator.num_processes
        samples, batches = _length_of(getattr(self.loader, "dataset", None)), _length_of(self.loader)
        return CountedRows(0 if samples is None or batches is None else min(samples, batches * together))

    def step(self, batch: EvaluationBatch) -> torch.Tensor | None:
        """Predict one batch, keep its results and return its loss."""
        self._end_batch()
        settings = self.settings
        samples = find_batch_size(batch.inputs)
        self.observed_samples += samples or 0
        loss, logits, labels = _unpacked(
            self.steps.prediction_step(
                self.model, batch.inputs, settings.prediction_loss_only, ignore_keys=settings.ignore_keys
            )
        )
        results = BatchResults()
        if loss is not None:
            results.losses = self._losses_of(loss, batch)
        if settings.keep_inputs:
            results.inputs = self._gathered(self._padded(self._main_input(batch.inputs)), batch)
        logits, labels = self._prepared(logits, labels)
        if self.torch_metrics is not None:
            self._update(self.torch_metrics, logits, labels, batch, samples)
        if self._is_alone and not batch.is_last:
            results.predictions, results.labels = logits, labels
        elif self._gathers_predictions:
            results.predictions, results.labels = self._gathered(logits, batch), self._gathered(labels, batch)
        self._keep(results)
        if self._ends_batches:
            self._pending = lambda: self._after_batch(batch, results)
        return loss

    def _end_batch(self) -> None:
        """Compute the last batch's metrics or move results to the CPU, after the batch's events."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending()

    def _losses_of(self, loss: torch.Tensor, batch: EvaluationBatch) -> Nested | None:
        """Return the loss repeated for each sample of all ranks, or None if its number is kept already."""
        samples, losses = self.settings.batch_size, self.losses
        if type(losses) is RepeatedNumbers and type(loss) is torch.Tensor and not loss.ndim and loss.is_cpu:
            is_short = self.drops_fillers and batch.is_last and batch.remainder > 0
            losses.add_number(loss, min(samples, batch.remainder) if is_short else samples)
            return None
        return self._gathered(_repeated(loss, samples), batch)

    def _main_input(self, inputs: Batch) -> Nested:
        name = getattr(self.steps.model, "main_input_name", "input_ids")
        if name not in inputs:
            raise ArgumentError(
                f"`include_for_metrics=['inputs']` keeps the input {name!r}, and the batch has {', '.join(inputs)}.\n\n"
                "Hint: set `main_input_name` on the model to the one that is meant."
            )
        return self.steps._prepare_input(inputs[name])

    def _padded(self, data: Nested | None) -> Nested | None:
        if data is None or self._is_alone:
            return data
        return self.steps.accelerator.pad_across_processes(data, dim=1, pad_index=PADDING_INDEX)

    def _gathered(self, data: Nested | None, batch: EvaluationBatch) -> Nested | None:
        """Gather from all ranks, without the filler samples of the last batch."""
        if data is None:
            return None
        gathered = data if self._is_alone else self.gather(data)
        return batch.trim(gathered) if self.drops_fillers and batch.is_last else gathered

    def _prepared(self, logits: Nested | None, labels: Nested | None) -> tuple[Nested | None, Nested | None]:
        """Pad logits and labels to the longest of all ranks, and apply `preprocess_logits`."""
        if self._gathers_predictions and not self._is_alone:
            labels, logits = self._padded(labels), self._padded(logits)
        if logits is not None and self.preprocess_logits is not None:
            logits = self.preprocess_logits(logits, labels)
        return logits, labels

    def _update(
        self,
        metrics: TorchMetrics,
        logits: Nested | None,
        labels: Nested | None,
        batch: EvaluationBatch,
        samples: int | None,
    ) -> None:
        """Update metrics with this rank's samples, without the fillers of the last round."""
        if logits is None or labels is None:
            return
        accelerator = self.steps.accelerator
        if batch.is_last and batch.remainder > 0 and samples and accelerator.num_processes > 1:
            mine = batch.remainder - accelerator.process_index * samples
            if mine <= 0:
                return
            logits, labels = truncate_to(logits, mine), truncate_to(labels, mine)
        metrics.update(logits, labels)

    def _keep(self, results: BatchResults) -> None:
        self.batches_seen += 1
        if results.losses is not None:
            self.losses.add(results.losses)
        if not self._keeps_predictions:
            return
        if results.predictions is not None:
            self.predictions.add(results.predictions)
        if results.labels is not None:
            self.labels.add(results.labels)
        if results.inputs is not None:
            self.inputs.add(results.inputs)
        if self.batches_seen == 1:
            values = (results.predictions, results.labels, results.inputs)
            warn_of_memory(values, self.loader, self.settings.to_cpu_every_batches)

    def _after_batch(self, batch: EvaluationBatch, results: BatchResults) -> None:
        settings = self.settings
        if settings.batch_metrics and self.torch_metrics is None:
            self._compute_by_batch(batch, results)
        every = settings.to_cpu_every_batches
        if every is not None and self._keeps_predictions and self.batches_seen % every == 0:
            for kept in (self.losses, self.predictions, self.labels, self.inputs):
                kept.to_cpu()

    def _compute_by_batch(self, batch: EvaluationBatch, results: BatchResults) -> None:
        if self.compute_metrics is None or results.predictions is None or results.labels is None:
            return
        prediction = self._prediction(results.predictions, results.labels, results.losses, batch.inputs)
        computed = self.compute_metrics(prediction, compute_result=batch.is_last)
        # `compute_metrics` may return nothing before the last batch
        self.metrics_so_far = plain_metrics(computed, "compute_metrics") if batch.is_last or computed else {}

    def _prediction(
        self, predictions: Nested, labels: Nested, losses: Nested | None, inputs: Nested | None
    ) -> EvalPrediction:
        return EvalPrediction(
            predictions=predictions,
            label_ids=labels,
            losses=losses if self.settings.give_losses else None,
            inputs=inputs if self.settings.keep_inputs else None,
        )

    def finish(self) -> EvalLoopOutput:
        """Join the kept results and compute the metrics."""
        self._end_batch()
        if isinstance(self.loader, PreparedDataLoader):  # Lightning does not read past the last batch
            self.loader.passes.end(self.loader)
        kept = (self.losses, self.predictions, self.labels, self.inputs)
        losses, predictions, labels, inputs = (batches.result(self.settings.join) for batches in kept)
        metrics = plain_metrics(self._metrics(predictions, labels, losses, inputs), "compute_metrics")
        loss = self._mean_loss(losses)
        if loss is not None:
            metrics[f"{self.settings.metric_key_prefix}_loss"] = loss
        metrics |= self.logged_values()
        has = {key: value for key, value in metrics.items() if key.startswith(f"{self.settings.metric_key_prefix}_")}
        prefixed = has | {
            f"{self.settings.metric_key_prefix}_{key}": value for key, value in metrics.items() if key not in has
        }
        self.output = EvalLoopOutput(predictions, labels, prefixed, self._num_samples())
        return self.output

    def _metrics(
        self, predictions: Arrays | None, labels: Arrays | None, losses: Arrays | None, inputs: Arrays | None
    ) -> Metrics:
        if self.torch_metrics is not None:
            return self.torch_metrics.compute()
        if self.settings.batch_metrics:
            return self.metrics_so_far
        if self.compute_metrics is None or predictions is None or labels is None:
            return {}
        return self.compute_metrics(self._prediction(predictions, labels, losses, inputs))

    def _mean_loss(self, losses: Arrays | None) -> float | None:
        if isinstance(self.losses, RunningMean):
            return self.losses.mean()
        joined = np.concatenate(losses) if isinstance(losses, list) and losses else losses
        if not isinstance(joined, np.ndarray):
            return None
        finite = np.isfinite(joined)
        kept = joined[finite] if self.settings.skip_non_finite and finite.any() else joined
        return float(kept.mean().item())

    def _num_samples(self) -> int:
        dataset = getattr(self.loader, "dataset", None)
        return _length_of(dataset) or self.observed_samples


def _unpacked(predicted: Predicted) -> Predicted:
    try:
        loss, logits, labels = predicted  # a subclass may return anything
    except (TypeError, ValueError) as error:
        raise OverrideError(
            f"`prediction_step` returned {shown_value(predicted)}.\n\nHint: return loss, logits and labels. Each may "
            "be None."
        ) from error
    return loss, logits, labels


def _repeated(loss: torch.Tensor, samples: int) -> torch.Tensor:
    """Repeat a loss for each sample. Filling new memory takes a third of the time of torch's `repeat`."""
    if type(loss) is not torch.Tensor or loss.ndim:  # returned by an overridden `prediction_step`
        return loss.repeat(samples)
    return loss.expand(samples).clone(memory_format=torch.contiguous_format)


def warn_of_memory(batch: Nested, loader: Iterable[Batch], to_cpu_every: int | None) -> None:
    """Warn if an evaluation will keep more than half of the free memory, judging by its first batch.

    Args:
        batch: The kept results of the first batch.
        loader: Gives the number of batches.
        to_cpu_every: Number of batches after which results move to the CPU. None keeps them on their device.
    """
    batches = _length_of(loader)
    if batches is None:
        return
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    needed = sum(tensor.nbytes for tensor in tensors) * batches
    on_gpu = to_cpu_every is None and any(tensor.is_cuda for tensor in tensors)
    free = torch.cuda.mem_get_info()[0] if on_gpu else _free_memory()
    if free is not None and needed > free / 2:
        way = "set `eval_accumulation_steps`, " if on_gpu else ""
        warnings.warn(
            f"This evaluation keeps about {needed / 2**30:.1f} GiB of predictions, and {free / 2**30:.1f} GiB of "
            f"{'GPU memory' if on_gpu else 'memory'} are free.\n\nHint: {way}reduce them by "
            "`preprocess_logits_for_metrics` (argmax, say), or pass a torchmetrics metric as `compute_metrics`.",
            HfCompatWarning,
            stacklevel=2,
        )


def _length_of(data: object) -> int | None:
    return len(data) if isinstance(data, Sized) and has_length(data) else None


def _free_memory() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on every system
        return None
