"""One evaluation: batches in, predictions and metrics out. Lightning drives it, this collects.

Predictions are kept batch by batch and joined once at the end, so time grows with the samples, not with their square.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from hf_compat.data.loader import PreparedDataLoader
from hf_compat.data.tree import PADDING_INDEX, find_batch_size, join_batches, nested_numpify, truncate_to
from hf_compat.engine.protocols import TrainingSteps
from hf_compat.engine.torchmetrics_evaluation import streamed_metrics
from hf_compat.errors import HfCompatWarning
from hf_compat.hf.metrics import denumpify_detensorize
from hf_compat.hf.outputs import EvalLoopOutput, EvalPrediction
from hf_compat.runtime.inspection import has_length
from hf_compat.runtime.nested import leaves

_BLOCK = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """What one evaluation keeps and computes.

    Args:
        metric_key_prefix: Prefix of every metric, added where it is missing.
        prediction_loss_only: Keep the loss only.
        ignore_keys: Outputs that are left out.
        is_prediction: `predict` rather than `evaluate`: predictions are kept whatever the metrics do.
        batch_size: Samples of a full batch.
        to_cpu_every_batches: Batches after which what is kept moves to the CPU; None at the end.
        join: Join the batches; else lists of them are given.
        keep_inputs: Keep the main input for the metrics.
        give_losses: Give the losses to the metrics.
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


class EvaluationBatch:
    """One batch of an evaluation, with its place.

    Args:
        inputs: What the loader gave.
        is_last: Whether it is known to be the last one.
        remainder: Samples of a short last batch, else 0 or less.
    """

    __slots__ = ("inputs", "is_last", "remainder")

    def __init__(self, inputs: Any, is_last: bool, remainder: int) -> None:
        self.inputs = inputs
        self.is_last = is_last
        self.remainder = remainder


class EvaluationBatches:
    """A loader's batches with their places; what Lightning's validation loop iterates over."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.length = len(loader) if has_length(loader) else None

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the evaluation data has no length")
        return self.length

    def start_if_empty(self) -> None:
        """Start the iterator of a loader without a batch: Lightning does not, and torch draws a random number there."""
        if self.length == 0:
            next(iter(self), None)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        prepared = isinstance(self.loader, PreparedDataLoader)
        for index, inputs in enumerate(self.loader):
            if prepared:
                yield EvaluationBatch(inputs, self.loader.end_of_dataloader, self.loader.remainder)
            else:
                yield EvaluationBatch(inputs, index + 1 == self.length, -1)


class Kept:
    """What is kept of the batches of one kind (losses, predictions, labels or inputs)."""

    def __init__(self) -> None:
        self.on_device: list[Any] = []
        self.arrays: list[Any] = []

    def add(self, batch: Any) -> None:
        """Keep one batch."""
        self.on_device.append(batch)

    def to_cpu(self) -> None:
        """Move what is on the device to the CPU."""
        self.arrays.extend(nested_numpify(batch) for batch in self.on_device)
        self.on_device = []

    def result(self, join: bool) -> Any:
        """Return everything as arrays: joined, or as a list of batches; None where nothing was kept."""
        if not join or self.arrays:
            self.to_cpu()
            return (join_batches(self.arrays) if join else self.arrays) if self.arrays else None
        return nested_numpify(join_batches(self.on_device)) if self.on_device else None


class RunningMean(Kept):
    """The mean of what batches that are vectors of numbers hold, in one block of memory.

    A small tensor a batch, left lying between large ones that come and go, would keep the allocator from using their
    room again: memory would grow as if the large ones had been kept.

    Args:
        skip_non_finite: Leave NaN and infinite numbers out, as long as there are others.
    """

    def __init__(self, skip_non_finite: bool) -> None:
        super().__init__()
        self.skip_non_finite = skip_non_finite
        self._block: torch.Tensor | None = None
        self._used = 0
        self._means: list[tuple[float, int]] = []
        self._bad: list[tuple[float, int]] = []

    def add(self, batch: Any) -> None:
        """Copy one batch into the block; where it does not fit the block's mean is taken first."""
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
        """Return the mean; None where there was no batch."""
        self._take_block()
        means = self._means or self._bad
        if len(means) <= 1:
            return means[0][0] if means else None
        return sum(mean * count for mean, count in means) / sum(count for _, count in means)


class EvaluationRun:
    """One evaluation from its first batch to its metrics.

    Args:
        steps: Whose `prediction_step` is called.
        model: The model to call.
        loader: The loader of its batches.
        settings: What is kept and computed.
        compute_metrics: From predictions to metrics, or a torchmetrics object that is updated batch by batch, or None.
        preprocess_logits: Applied to logits before they are kept, or None.
    """

    def __init__(
        self,
        steps: TrainingSteps,
        model: torch.nn.Module,
        loader: Any,
        settings: EvaluationSettings,
        compute_metrics: Callable[..., Any] | None = None,
        preprocess_logits: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.steps = steps
        self.model = model
        self.loader = loader
        self.settings = settings
        self.compute_metrics = compute_metrics
        self.preprocess_logits = preprocess_logits
        self.losses: Kept = Kept()
        self.predictions, self.labels, self.inputs = Kept(), Kept(), Kept()
        self.streamed = streamed_metrics(compute_metrics, steps.args.device)
        if self.streamed is not None:
            self.losses = RunningMean(settings.skip_non_finite)
        self.observed_samples = 0
        self.batches_seen = 0
        self.batch_size: int | None = settings.batch_size
        self.batch_metrics: Any = None
        self._pending: Callable[[], None] | None = None
        self.output: EvalLoopOutput | None = None
        # of all processes: HF lets a subclass choose how
        self.gather: Callable[[Any], Any] = steps.accelerator.gather
        # named values that the steps have logged meanwhile
        self.own_values: Callable[[], dict[str, float]] = dict

    @property
    def _keeps_predictions(self) -> bool:
        in_passing = self.settings.batch_metrics or self.streamed is not None
        return not in_passing or self.settings.is_prediction

    def step(self, batch: EvaluationBatch) -> Any:
        """Predict one batch and keep what is needed; returns its loss."""
        inputs = batch.inputs
        samples = find_batch_size(inputs)
        if samples is not None:
            self.observed_samples += samples
            self.batch_size = self.batch_size or samples
        loss, logits, labels = self.steps.prediction_step(
            self.model, inputs, self.settings.prediction_loss_only, ignore_keys=self.settings.ignore_keys
        )
        losses = None if loss is None else self._of_all(loss.repeat(self.batch_size), batch)
        main_input = None
        if self.settings.keep_inputs:
            main_input = self._of_all(self._padded(self._main_input(inputs)), batch)
        if labels is not None and self._gathers_logits:
            labels = self._padded(labels)
        if logits is not None:
            logits = self._padded(logits) if self._gathers_logits else logits
            if self.preprocess_logits is not None:
                logits = self.preprocess_logits(logits, labels)
        if self.streamed is not None:
            self._update_streamed(logits, labels, batch, samples)
        if self._gathers_logits:
            logits = None if logits is None else self._of_all(logits, batch)
            labels = None if labels is None else self._of_all(labels, batch)
        else:
            logits = labels = None
        if losses is not None:
            self.losses.add(losses)
        if self._keeps_predictions:
            for kept, value in ((self.predictions, logits), (self.labels, labels), (self.inputs, main_input)):
                if value is not None:
                    kept.add(value)
        self.batches_seen += 1
        if self.batches_seen == 1 and self._keeps_predictions:
            warn_of_memory((logits, labels, main_input), self.loader, self.settings.to_cpu_every_batches)
        self._pending = lambda: self._after_batch(batch, losses, logits, labels)
        return loss

    def end_batch(self) -> None:
        """Do what follows a batch's events: metrics of the batch, or the move to the CPU."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def _after_batch(self, batch: EvaluationBatch, losses: Any, logits: Any, labels: Any) -> None:
        every = self.settings.to_cpu_every_batches
        complete = logits is not None and labels is not None
        if self.streamed is None and self.settings.batch_metrics and self.compute_metrics is not None and complete:
            prediction = EvalPrediction(
                predictions=logits,
                label_ids=labels,
                losses=losses if self.settings.give_losses else None,
                inputs=batch.inputs if self.settings.keep_inputs else None,
            )
            self.batch_metrics = self.compute_metrics(prediction, compute_result=batch.is_last)
        if every is not None and self._keeps_predictions and self.batches_seen % every == 0:
            for kept in (self.losses, self.predictions, self.labels, self.inputs):
                kept.to_cpu()

    def _main_input(self, inputs: Any) -> Any:
        name = getattr(self.steps.model, "main_input_name", "input_ids")
        return self.steps._prepare_input(inputs[name])  # type: ignore[attr-defined]  # HF's name of the step

    @property
    def _gathers_logits(self) -> bool:
        """Say whether predictions leave their process: metrics that are updated in passing do without."""
        return self.streamed is None or self.settings.is_prediction

    def _padded(self, data: Any) -> Any:
        return self.steps.accelerator.pad_across_processes(data, dim=1, pad_index=PADDING_INDEX)

    def _of_all(self, data: Any, batch: EvaluationBatch) -> Any:
        """Return what all processes have; of the last batch what is no repetition (a loss stands for a full one)."""
        return self._trim(self.gather(data), batch)

    @staticmethod
    def _trim(data: Any, batch: EvaluationBatch) -> Any:
        return truncate_to(data, batch.remainder) if batch.is_last and batch.remainder > 0 else data

    def _update_streamed(self, logits: Any, labels: Any, batch: EvaluationBatch, samples: int | None) -> None:
        """Update the metrics with this process's samples, without those that fill the last round up."""
        if logits is None or labels is None or self.streamed is None:
            return
        accelerator = self.steps.accelerator
        if batch.is_last and batch.remainder > 0 and samples and accelerator.num_processes > 1:
            mine = batch.remainder - accelerator.process_index * samples
            logits, labels = truncate_to(logits, max(mine, 0)), truncate_to(labels, max(mine, 0))
            if mine <= 0:
                return
        self.streamed.update(logits, labels)

    def finish(self) -> EvalLoopOutput:
        """Join what was kept and compute the metrics."""
        join = self.settings.join
        streams = isinstance(self.losses, RunningMean)
        losses = None if streams else self.losses.result(join)
        predictions, labels = self.predictions.result(join), self.labels.result(join)
        metrics = self._metrics(predictions, labels, losses, self.inputs.result(join))
        metrics = denumpify_detensorize(metrics)
        self._add_loss(metrics, losses)
        mean = self.losses.mean() if isinstance(self.losses, RunningMean) else None
        if mean is not None:
            metrics[f"{self.settings.metric_key_prefix}_loss"] = mean
        metrics |= self.own_values()
        prefixed = _prefix_keys(metrics, self.settings.metric_key_prefix)
        self.output = EvalLoopOutput(predictions, labels, prefixed, self._num_samples())
        return self.output

    def _metrics(self, predictions: Any, labels: Any, losses: Any, inputs: Any) -> dict[str, Any]:
        if self.streamed is not None:
            return self.streamed.compute()
        if self.settings.batch_metrics:
            return self.batch_metrics if self.batch_metrics is not None else {}
        if self.compute_metrics is None or predictions is None or labels is None:
            return {}
        prediction = EvalPrediction(
            predictions=predictions,
            label_ids=labels,
            losses=losses if self.settings.give_losses else None,
            inputs=inputs if self.settings.keep_inputs else None,
        )
        return dict(self.compute_metrics(prediction))

    def _add_loss(self, metrics: dict[str, Any], losses: Any) -> None:
        joined = np.concatenate(losses) if isinstance(losses, list) and losses else losses
        if isinstance(joined, np.ndarray):
            finite = np.isfinite(joined)
            if self.settings.skip_non_finite and finite.any():
                joined = joined[finite]
            metrics[f"{self.settings.metric_key_prefix}_loss"] = joined.mean().item()

    def _num_samples(self) -> int:
        dataset = getattr(self.loader, "dataset", None)
        if dataset is not None and has_length(dataset):
            return len(dataset) or self.observed_samples
        return self.observed_samples


def warn_of_memory(batch: Any, loader: Any, to_cpu_every: int | None) -> None:
    """Warn where an evaluation will keep more than half of the memory that is free, judged by its first batch.

    Args:
        batch: What is kept of the first batch.
        loader: Says how many batches come.
        to_cpu_every: Batches after which what is kept moves to the CPU; None keeps it on its device.
    """
    if not has_length(loader):
        return
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    needed = sum(tensor.nbytes for tensor in tensors) * len(loader)
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


def _free_memory() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on every system
        return None


def _prefix_keys(metrics: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Add the prefix where it is missing; keys that have it come first, as in HF's dictionaries."""
    has: list[tuple[str, Any]] = []
    lacks: list[tuple[str, Any]] = []
    for key, value in metrics.items():
        target = has if key.startswith(f"{prefix}_") else lacks
        target.append((key if target is has else f"{prefix}_{key}", value))
    return dict(chain(has, lacks))
