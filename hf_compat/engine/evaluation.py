"""One evaluation, from batches to predictions and metrics. Lightning drives the loop.

Predictions are kept (`kept_batches.py`) and joined once, so time grows linearly with the samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch

from hf_compat.data.collators import shown_value
from hf_compat.data.loader import PreparedDataLoader
from hf_compat.data.types import Batch
from hf_compat.engine.kept_batches import (
    ComputeMetrics,
    KeptBatches,
    Metrics,
    RepeatedNumbers,
    RunningMean,
    TorchMetrics,
    torch_metrics,
)
from hf_compat.engine.windows import TrainingSteps
from hf_compat.errors import ArgumentError, OverrideError, warn_user
from hf_compat.hf.metrics import Arrays, EvalLoopOutput, EvalPrediction, returned_metrics
from hf_compat.runtime.inspection import length_of
from hf_compat.runtime.nested import PADDING_INDEX, Nested, find_batch_size, leaves, truncate_to

# losses, predictions, labels and inputs of a batch, from all ranks
Results = tuple[Nested | None, Nested | None, Nested | None, Nested | None]


class EvaluationBatch:
    """One batch of an evaluation, with its position.

    Callbacks can read it as a mapping: `batch["input_ids"]`. It has a length and can be iterated, as a `Window` of one
    micro-batch.

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


class EvaluationBatches:
    """The batches of any loader with their positions, as Lightning's validation loop iterates over them."""

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader = loader
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


class EvaluationRun:
    """One evaluation from its first batch to its metrics. The arguments say what it keeps and computes.

    Args:
        steps: Owner of `prediction_step`.
        model: The model to call.
        loader: The loader of the batches.
        prefix: Prefix of every metric, added if missing.
        loss_only: Keep the loss only.
        ignore_keys: Outputs to leave out.
        is_prediction: True for `predict`, which keeps predictions whatever the metrics are.
        compute_metrics: A function of the predictions, a torchmetrics object updated batch by batch, or None.
        preprocess_logits: Applied to logits before they are kept, or None.
        gather: Gathers one rank's results from all ranks. A subclass may choose it. None uses the accelerator's.
        logged_values: Returns the values that the steps have logged by name. None if they cannot log.
        drops_fillers: Drop the samples that fill up the last batch. Otherwise that is left to `gather`.

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
    ) -> None:
        args, accelerator = steps.args, steps.accelerator
        self.steps, self.model, self.loader, self.prefix = steps, model, loader, prefix
        self.loss_only, self.ignore_keys, self.is_prediction = loss_only, ignore_keys, is_prediction
        self.compute_metrics, self.preprocess_logits = compute_metrics, preprocess_logits
        self.gather = gather or accelerator.gather
        # one process has all the results, so nothing is padded or gathered
        is_own = self.gather == accelerator.gather
        self._is_alone = is_own and getattr(accelerator, "is_alone", False) is True  # a script may replace it
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
        rows = 0
        if self._joins and self._to_cpu_every is None:
            samples, batches = length_of(getattr(loader, "dataset", None)), length_of(loader)
            if samples is not None and batches is not None:
                rows = min(samples, batches * self.batch_size * accelerator.num_processes)
        if self.torch_metrics is not None:
            self.losses: KeptBatches = RunningMean(self._skips_non_finite)
        else:
            joins_at_end = self._joins and not self._ends_batches
            self.losses = RepeatedNumbers() if joins_at_end and self._is_alone else KeptBatches()
        self.kept = (self.losses, KeptBatches(rows), KeptBatches(rows), KeptBatches(rows))
        self.observed_samples = self.batches_seen = 0
        self.metrics_so_far: Metrics = {}
        self.output: EvalLoopOutput | None = None
        self._pending: tuple[EvaluationBatch, Results] | None = None

    def step(self, batch: EvaluationBatch) -> torch.Tensor | None:
        """Predict one batch, keep its results and return its loss."""
        if self._pending is not None:
            self._end_batch(*self._pending)
        samples = find_batch_size(batch.inputs)
        self.observed_samples += samples or 0
        predicted = self.steps.prediction_step(self.model, batch.inputs, self.loss_only, ignore_keys=self.ignore_keys)
        try:
            loss, logits, labels = predicted  # a subclass may return anything
        except (TypeError, ValueError) as error:
            raise OverrideError(
                f"`prediction_step` returned {shown_value(predicted)}.\n\nHint: return loss, logits and labels. Each "
                "may be None."
            ) from error
        losses = None if loss is None else self._losses_of(loss, batch)
        inputs = self._main_input(batch) if "inputs" in self._included else None
        if self._gathers_predictions and not self._is_alone:
            labels, logits = self._padded(labels), self._padded(logits)
        if logits is not None and self.preprocess_logits is not None:
            logits = self.preprocess_logits(logits, labels)
        if self.torch_metrics is not None:
            self._update(self.torch_metrics, logits, labels, batch, samples)
        if not self._gathers_predictions:
            logits = labels = None
        elif batch.is_last or not self._is_alone:
            logits, labels = self._gathered(logits, batch), self._gathered(labels, batch)
        self._keep(losses, logits, labels, inputs)
        if self._ends_batches:
            self._pending = batch, (losses, logits, labels, inputs)
        return loss

    def _losses_of(self, loss: torch.Tensor, batch: EvaluationBatch) -> Nested | None:
        """Return the loss repeated for each sample of all ranks, or None if its number is kept already."""
        samples, losses = self.batch_size, self.losses
        is_one = type(loss) is torch.Tensor and not loss.ndim  # an overridden `prediction_step` may return others
        if type(losses) is RepeatedNumbers and is_one and loss.is_cpu:
            is_short = self.drops_fillers and batch.is_last and batch.remainder > 0
            losses.add_number(loss, min(samples, batch.remainder) if is_short else samples)
            return None
        # filling new memory takes a third of the time of torch's `repeat`
        full = torch.contiguous_format
        return self._gathered(loss.expand(samples).clone(memory_format=full) if is_one else loss.repeat(samples), batch)

    def _main_input(self, batch: EvaluationBatch) -> Nested:
        name = getattr(self.steps.model, "main_input_name", "input_ids")
        if name not in batch.inputs:
            given = ", ".join(batch.inputs)
            raise ArgumentError(
                f"`include_for_metrics=['inputs']` keeps the input {name!r}, and the batch has {given}.\n\n"
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
        return truncate_to(gathered, batch.remainder) if is_filled else gathered

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

    def _keep(self, *results: Nested | None) -> None:
        """Keep a batch's losses, predictions, labels and inputs. Predictions need not be kept for some metrics."""
        self.batches_seen += 1
        for kept, part in zip(self.kept, results if self._keeps_predictions else results[:1], strict=False):
            if part is not None:
                kept.add(part)
        if self._keeps_predictions and self.batches_seen == 1:
            warn_of_memory(results[1:], self.loader, self._to_cpu_every)

    def _end_batch(self, batch: EvaluationBatch, results: Results) -> None:
        """Compute the last batch's metrics or move results to the CPU, after the batch's events."""
        self._pending = None
        losses, predictions, labels, _ = results
        compute = self.compute_metrics if self._by_batch and self.torch_metrics is None else None
        if compute is not None and predictions is not None and labels is not None:
            prediction = self._prediction(losses, predictions, labels, batch.inputs)
            computed = compute(prediction, compute_result=batch.is_last)
            # `compute_metrics` may return nothing before the last batch
            self.metrics_so_far = returned_metrics(computed, "compute_metrics") if batch.is_last or computed else {}
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
            self._end_batch(*self._pending)
        if isinstance(self.loader, PreparedDataLoader):  # Lightning does not read past the last batch
            self.loader.passes.end(self.loader)
        join, (of_losses, of_predictions, of_labels, of_inputs) = self._joins, self.kept
        losses, predictions = of_losses.result(join), of_predictions.result(join)
        labels, inputs = of_labels.result(join), of_inputs.result(join)
        computed: Metrics = {}
        if self.torch_metrics is not None:
            computed = self.torch_metrics.compute()
        elif self._by_batch:
            computed = self.metrics_so_far
        elif self.compute_metrics is not None and predictions is not None and labels is not None:
            computed = self.compute_metrics(self._prediction(losses, predictions, labels, inputs))
        metrics = returned_metrics(computed, "compute_metrics")
        loss = self._mean_loss(losses)
        start = f"{self.prefix}_"
        if loss is not None:
            metrics[f"{start}loss"] = loss
        seconds = vars(self.steps).get("model_preparation_time")
        if seconds is not None:
            metrics[f"{start}model_preparation_time"] = seconds
        metrics |= self.logged_values()
        for name in list(metrics):  # metrics that lack the prefix come last
            if not name.startswith(start):
                metrics[f"{start}{name}"] = metrics.pop(name)
        samples = length_of(getattr(self.loader, "dataset", None)) or self.observed_samples
        self.output = EvalLoopOutput(predictions, labels, metrics, samples)
        return self.output

    def _mean_loss(self, losses: Arrays | None) -> float | None:
        if isinstance(self.losses, RunningMean):
            return self.losses.mean()
        joined = np.concatenate(losses) if isinstance(losses, list) and losses else losses
        if not isinstance(joined, np.ndarray):
            return None
        finite = np.isfinite(joined)
        kept = joined[finite] if self._skips_non_finite and finite.any() else joined
        return float(kept.mean().item())


def warn_of_memory(batch: Nested, loader: Iterable[Batch], to_cpu_every: int | None) -> None:
    """Warn if an evaluation will keep more than half of the free memory, judging by the results of its first batch."""
    batches, needed, on_gpu = length_of(loader), 0, False
    for leaf in leaves(batch) if batches is not None else ():
        if isinstance(leaf, torch.Tensor):
            needed += leaf.nbytes * (batches or 0)
            on_gpu |= to_cpu_every is None and leaf.is_cuda
    if not needed:
        return
    free = torch.cuda.mem_get_info()[0] if on_gpu else _free_memory()
    if free is not None and needed > free / 2:
        way = "set `eval_accumulation_steps`, " if on_gpu else ""
        warn_user(
            f"This evaluation keeps about {needed / 2**30:.1f} GiB of predictions, and {free / 2**30:.1f} GiB of "
            f"{'GPU memory' if on_gpu else 'memory'} are free.\n\nHint: {way}reduce them by "
            "`preprocess_logits_for_metrics` (argmax, say), or pass a torchmetrics metric as `compute_metrics`.",
        )


def _free_memory() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on every system
        return None
