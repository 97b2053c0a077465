"""What the result of an evaluation has to hold, and the warning if it does not.

It has as many rows as the data set has samples, and `predict` gives them in its order. The metrics that are given were
called. There is a loss, if labels are expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler, SequentialSampler

from hf_compat.data.types import Batch
from hf_compat.errors import warn_once
from hf_compat.hf.metrics import Arrays
from hf_compat.runtime.collectives import gather_objects
from hf_compat.runtime.inspection import accepted_parameters, dataset_of, length_of
from hf_compat.runtime.nested import map_nested
from hf_compat.runtime.text import brief

# Inputs of models that are optional and no labels.
_NO_LABELS = ("attention_mask", "token_type_ids", "position_ids", "decoder_input_ids", "decoder_attention_mask")


class NotedSampler(Sampler[object]):
    """A sampler that notes the order of its last pass."""

    def __init__(self, sampler: Iterable[object]) -> None:
        self.sampler, self.order = sampler, list[object]()

    def __iter__(self) -> Iterator[object]:
        self.order = order = []
        for place in self.sampler:
            order.append(place)
            yield place

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # it may have none, as others

    def __getattr__(self, name: str) -> object:
        if name == "sampler":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.sampler, name)


class RowOrder:
    """The order in which a loader gives the samples, noted while an evaluation reads it."""

    def __init__(self, loader: Iterable[Batch]) -> None:
        batches, self._batches = _batch_samplers_of(loader)
        sampler = getattr(loader, "sampler", None) if batches is None else batches
        if self._batches is not None:
            sampler = self._batches.sampler
        if isinstance(sampler, NotedSampler):  # an error has ended the evaluation before
            sampler = sampler.sampler
        in_order = sampler is None or isinstance(sampler, SequentialSampler)
        self.is_other = not in_order and type(sampler).__name__ != "_InfiniteConstantSampler"
        self._noted = NotedSampler(() if sampler is None else sampler)
        self._dispatches, self._samples = getattr(loader, "dispatches", False), dataset_of(loader)
        if self.is_other and self._batches is not None:
            self._batches.sampler = self._noted  # type: ignore[assignment]  # of any places

    def end(self) -> None:
        """Stop to note the order."""
        if self.is_other and self._batches is not None:
            self._batches.sampler = self._noted.sampler  # type: ignore[assignment]  # of any places
            if self._dispatches:  # rank 0 has read for all
                self._noted.order = gather_objects(self._noted.order)[0]

    def left_out(self, results: Arrays | None) -> int:
        """The number of samples that the sampler does not give, or that have no row."""
        given, samples = len(self._noted.order), length_of(self._samples)
        return max(samples - min(rows_of(results) or given, given), 0) if given and samples else 0

    def places(self, rows: int) -> list[int] | None:
        """The rows in the data set's order, by their numbers. None if it cannot be known.

        A loader that drops a short last batch gives fewer rows than the sampler.
        """
        order = [place for place in self._noted.order if isinstance(place, int)]
        if len(order) < max(rows, len(self._noted.order)) or len(set(order)) < len(order):
            return None
        return sorted(range(rows), key=order.__getitem__)

    def undone(self, results: Arrays | None) -> tuple[Arrays | None, str | None]:
        """Put rows into the data set's order. The second value is what would make that possible."""
        rows = rows_of(results)
        places = None if rows is None else self.places(rows)
        if places is not None:
            ordered = map_nested(lambda tensor: tensor[places], results, lambda leaf: np.asarray(leaf)[places])
            return ordered, None
        if isinstance(results, list):
            return results, "set `eval_do_concat_batches=True`, so that rows can be put in order"
        return results, None if results is None else "use a `SequentialSampler`, or a sampler of single samples"


def _batch_samplers_of(loader: Iterable[Batch]) -> tuple[Iterable[object] | None, BatchSampler | None]:
    """A loader's batch sampler, and again if it joins the samples of a sampler as they come."""
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # of which the loader reads one rank's share
    is_plain = isinstance(batches, BatchSampler) and type(batches).__iter__ is BatchSampler.__iter__
    return batches, batches if is_plain else None


def dropped_samples(loader: Iterable[Batch], samples: int | None = None) -> int:
    """The number of samples in a short last batch that a loader drops. By default, of its data set's."""
    drops_last = getattr(loader, "drops_last", getattr(loader, "drop_last", False))
    if not drops_last or isinstance(dataset_of(loader), IterableDataset):
        return 0
    samples = length_of(dataset_of(loader)) if samples is None else samples
    size = getattr(loader, "total_batch_size", getattr(loader, "batch_size", None))
    return 0 if samples is None or size is None else samples % size


def expected_rows(loader: Iterable[Batch]) -> int | None:
    """The number of samples that a loader reads, a row for each. None if that is not known."""
    _, batches = _batch_samplers_of(loader)
    is_stream = isinstance(dataset_of(loader), IterableDataset)
    samples = None if batches is None or is_stream else length_of(batches.sampler)
    return None if samples is None else samples - dropped_samples(loader, samples)


def most_rows(results: object) -> int | None:
    """The most rows of any part of joined results, as a model may return parts that are not of samples."""
    if isinstance(results, (np.ndarray, torch.Tensor)):
        return len(results) if results.ndim else None
    parts = results.values() if isinstance(results, Mapping) else results if isinstance(results, (list, tuple)) else ()
    return max((rows for rows in map(most_rows, parts) if rows is not None), default=None)


def rows_of(results: object) -> int | None:
    """The number of rows of joined results. None if they are a list of batches, or their parts differ."""
    if isinstance(results, (np.ndarray, torch.Tensor)):
        return len(results) if results.ndim else None
    parts: Iterable[object] = results.values() if isinstance(results, dict) else results  # type: ignore[assignment]
    if not isinstance(results, (tuple, dict)):
        return None
    counts = {rows_of(part) for part in parts}
    return counts.pop() if len(counts) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFacts:
    """What an evaluation has read and computed."""

    is_prediction: bool
    batches: int  # that were read
    expected_batches: int | None  # by the loader's length
    samples: int | None  # of the data set
    expected_rows: int | None  # by the loader's sampler. None if that is not known, or several processes share them
    rows_read: int  # rows of the batches
    rows: int | None  # of the predictions. None if they are not kept as one array, or nothing uses them
    label_rows: int | None
    dropped: int  # samples of a last batch that the loader drops
    drops_by_argument: bool  # because of `dataloader_drop_last`
    unsampled: int  # samples that the loader's sampler leaves out
    way_to_order: str | None  # that puts rows into the data set's order, if they are in another one
    names: Sequence[str]  # of the inputs of the first batch
    removed: Sequence[str]  # the columns that were removed, because the model does not take them
    label_names: Sequence[str]
    forward: Callable[..., object]  # the function that the model is called with
    has_loss: bool
    weighs_batches_alike: bool  # in the mean of the losses, though some have more target tokens than others
    has_labels: bool
    has_own_step: bool  # whether the user's own `prediction_step` makes the results
    has_metrics: bool  # whether `compute_metrics` is given
    called_metrics: bool
    loss_only: bool


def tell_of_breaches(facts: EvaluationFacts) -> None:
    """Warn once of each way in which a result is not what an evaluation has to give."""
    if not (facts.batches or facts.dropped):
        tell_of_nothing(facts.is_prediction, bool(facts.samples))
        return
    if facts.dropped:
        by_argument = "`dataloader_drop_last=True` drops short batches of every loader"
        why = by_argument if facts.drops_by_argument else "its loader drops a short last batch"
        _tell(f"left out the last {facts.dropped} samples, as {why}", _way_to_last_samples(facts))
    if not facts.batches:
        return
    _tell_of_lost_rows(facts)
    if facts.expected_batches is not None and facts.batches < facts.expected_batches:
        _tell(
            f"got {facts.batches} batches, and the length of its loader says {facts.expected_batches}",
            "check `__len__` of the data set, or of the loader",
        )
    if facts.is_prediction:
        if facts.unsampled:
            _tell(f"left out {facts.unsampled} samples, as its sampler does not give all", "use another sampler")
        if facts.way_to_order is not None:
            _tell("gave its rows in the order of its sampler, which may not be the data set's", facts.way_to_order)
        return  # a set to predict may have no labels
    _tell_of_lacks(facts)


def _tell_of_lacks(facts: EvaluationFacts) -> None:
    """Warn of metrics and losses that are missing, and of a loss that would be another one in other batches."""
    if facts.weighs_batches_alike:
        _tell(
            "has batches with more target tokens than others, which weigh alike in `eval_loss`, as in transformers. So "
            "it depends on `per_device_eval_batch_size`",
            "set `eval_loss_by_token=True`",
        )
    lacks_metrics = facts.has_metrics and not facts.called_metrics
    lacks_loss = not facts.has_loss and not facts.has_own_step
    if lacks_metrics and facts.loss_only:
        _tell(
            "did not call `compute_metrics`, as `prediction_loss_only=True` keeps no predictions",
            "leave `prediction_loss_only` out",
        )
    elif lacks_metrics or lacks_loss:
        parts = ["did not call `compute_metrics`"] if lacks_metrics else []
        parts += ["computed no loss"] if lacks_loss else []
        _tell(f"{' and '.join(parts)}, {_reason(facts)}", _way_to_labels(facts))


def tell_of_nothing(is_prediction: bool, has_samples: bool = False) -> None:
    """Warn of an evaluation without samples."""
    told = "data set to predict" if is_prediction else "evaluation data set"
    if has_samples:
        _tell(f"gave nothing, as its loader gives no samples of the {told}", "look at the loader's sampler")
    else:
        _tell(f"gave nothing, as the {told} has no samples", "check how it was loaded or filtered")


def _way_to_last_samples(facts: EvaluationFacts) -> str:
    if not facts.drops_by_argument:
        return "make the loader with `drop_last=False`"
    return (
        "set `trainer.args.dataloader_drop_last = False` before it, or a `per_device_eval_batch_size` that divides the "
        "samples"
    )


def _tell_of_lost_rows(facts: EvaluationFacts) -> None:
    """Warn of rows that a collator, the end of a sampler or the model has lost. One row a batch is meant."""
    read, expected, batches = facts.rows_read, facts.expected_rows, facts.batches
    if expected is None:
        return
    if batches < read < expected:
        way_out = "let the collator give a row for each sample, or filter the data set before"
        _tell(f"has {read} rows of {expected} samples, as the collator leaves out {expected - read}", way_out)
    elif facts.label_rows is not None and batches < facts.label_rows < read:
        cut = read - facts.label_rows
        told = "as the number of samples in the data set, not in the sampler, says how many are in the last batch"
        _tell(f"left out {cut} of {read} rows, {told}", "pass a `torch.utils.data.Subset` in place of a sampler")
    elif facts.rows is not None and batches < facts.rows < read:
        way_out = "let the model and `preprocess_logits_for_metrics` return a row for each sample"
        _tell(f"has {facts.rows} rows of predictions for {read} samples", way_out)


def _reason(facts: EvaluationFacts) -> str:
    names = ", ".join(f"`{name}`" for name in facts.names) or "no names"
    missing = [name for name in facts.label_names if name not in facts.names]
    if facts.has_labels:
        return "as `prediction_step` returned no predictions or no labels"
    if not facts.label_names:
        return f"as `label_names` is empty, and no parameter of the model's `forward` has a name with `label` ({names})"
    return f"as the batches have {names}, and `label_names` expects {', '.join(f'`{name}`' for name in missing)}"


def _way_to_labels(facts: EvaluationFacts) -> str:
    if facts.has_own_step:
        return "return loss, predictions and labels from `prediction_step`"
    takes = accepted_parameters(facts.forward)
    optional = [name for name in facts.names if name in takes.names and name not in (*takes.required, *_NO_LABELS)]
    found = [name for name in optional if name not in facts.label_names]
    there = [name for name in facts.label_names if name in facts.names]
    if found or there:
        return f"set `label_names={found or there}`, if these are the labels"
    column = facts.label_names[0] if facts.label_names else "labels"
    if facts.removed:
        removed = ", ".join(f"`{name}`" for name in facts.removed)
        return (
            f"give the data's labels the name {brief(column)}. `remove_unused_columns=True` removes {removed}, as "
            "`forward` does not take that name"
        )
    return f"give the data a column {brief(column)}, or evaluate without `compute_metrics` and loss"


def _tell(what: str, way_out: str) -> None:
    warn_once(f"This evaluation {what}.\n\nHint: {way_out}.")
