"""Make batches from samples, and explain why data cannot be read.

Collators pad, and remove columns that the model does not accept. Checks run once before reading, or after an error,
and never for every batch.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from hf_compat.data.types import Batch, Collator, DataSource, Sample
from hf_compat.errors import DataError, OverrideError
from hf_compat.interop.releases import of_transformers
from hf_compat.runtime.console import log_ignored_columns
from hf_compat.runtime.text import brief

_LONGEST = 80


def shown_value(value: object) -> str:
    """Format a value as its type, with its shape or a short representation."""
    if value is None:
        return "None"
    form = f" of shape {tuple(value.shape)}" if isinstance(value, (torch.Tensor, np.ndarray)) else ""
    text = "" if form else brief(value, _LONGEST)
    return f"{type(value).__name__}{form}" + (f" ({text})" if text and len(text) <= _LONGEST else "")


def check_dataset(name: str, dataset: DataSource) -> None:
    """Refuse an object that no loader can read."""
    kind = type(dataset).__name__
    if isinstance(dataset, type):
        wrong, way = f"is the class {dataset.__name__}, not an object of it", f"pass `{dataset.__name__}(…)`"
    elif isinstance(dataset, (str, bytes, int, float)):
        wrong, way = f"is {shown_value(dataset)}, not data", "load it first, for example with `datasets.load_dataset`"
    elif isinstance(dataset, DataLoader):
        wrong = "is a DataLoader, but the Trainer makes its own"
        way = "pass its `dataset`, or override `get_train_dataloader`"
    elif isinstance(dataset, Mapping) and 0 not in dataset:
        keys = ", ".join(map(brief, list(dataset)[:5]))
        wrong = f"is a {kind} with the keys {keys}, not a sequence of samples"
        way = "pass one of its values if these are data sets, or make a list of samples if these are columns"
    elif isinstance(dataset, IterableDataset) or hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"):
        check_length(name, dataset)
        return
    else:
        once = "can be read once only and has" if isinstance(dataset, Iterator) else "has"
        wrong = f"is a {kind}, which {once} no `__getitem__`"
        way = (
            "make a list of it. If it does not fit into memory, subclass `torch.utils.data.IterableDataset`, or use "
            "`datasets.IterableDataset.from_generator`"
        )
    raise DataError(f"`{name}` {wrong}.\n\nHint: {way}.")


def check_length(name: str, dataset: DataSource) -> None:
    """Refuse a data set whose `__len__` returns an invalid length. One without a length is accepted."""
    count = getattr(type(dataset), "__len__", None)
    if count is None:
        return
    try:
        length = count(dataset)
    except (TypeError, AttributeError, NotImplementedError):  # `__len__` raises these if the length is unknown
        return
    try:
        is_count = operator.index(length) >= 0
    except TypeError:
        is_count = False
    if not is_count:
        raise DataError(
            f"`{name}`: `{type(dataset).__name__}.__len__` returned {shown_value(length)}, not a length.\n\n"
            "Hint: return the number of samples, a whole number."
        )


def check_iterable(method: str, returned: object, wanted: str) -> None:
    """Refuse the result of an overridden method if it is not iterable."""
    if not hasattr(returned, "__iter__") and not hasattr(returned, "__getitem__"):
        raise OverrideError(
            f"`{method}` returned {shown_value(returned)}.\n\nHint: return {wanted}, or any other iterable."
        )


def raise_for_bad_samples(samples: Sequence[Sample], error: Exception) -> None:
    """Explain why samples could not be joined. Return if no cause is found."""
    raise_for_unnamed_samples(samples, error)
    rows = [sample if isinstance(sample, Mapping) else vars(sample) for sample in samples]
    names = {name: None for row in rows for name in row}
    for place, row in enumerate(rows, start=1):
        absent = [name for name in names if name not in row]
        if absent:
            lacks = f"sample {place} of {len(rows)} lacks {', '.join(map(repr, absent))}, which others have"
            raise _not_joined(lacks) from error
    for name in rows[0]:
        values = [row[name] for row in rows]
        for form in (_kind_of, _shape_of):
            forms = sorted(set(map(form, values)))
            if len(forms) > 1:
                raise _not_joined(f"{brief(name)} is {forms[0]} in one sample and {forms[1]} in another") from error


def raise_for_unnamed_samples(samples: Sequence[Sample], error: Exception) -> None:
    """Explain the error if a sample has no named values. Return if all have them."""
    for place, sample in enumerate(samples, start=1):
        has_names = isinstance(sample, Mapping) or (
            hasattr(sample, "__dict__") and not (isinstance(sample, (torch.Tensor, type)) or callable(sample))
        )
        if not has_names:
            found = f"sample {place} of {len(samples)} is {shown_value(sample)}, not a mapping of names to values"
            raise _not_joined(found) from error


def _not_joined(wrong: str) -> DataError:
    return DataError(
        f"The samples of a batch cannot be joined: {wrong}.\n\nHint: correct the data set, or pass a `data_collator` "
        "that joins such samples."
    )


def _kind_of(value: object) -> str:
    if isinstance(value, (bool, int, float, np.number)):
        return "a number"
    return "None" if value is None else f"a {type(value).__name__}"


def _shape_of(value: Sample) -> str:
    try:
        return f"of shape {tuple(np.shape(value))}"
    except (ValueError, TypeError, RuntimeError):
        return "of varying shapes"


def raise_for_bad_batch(batch: Batch, taker: str) -> None:
    """Raise an error if a batch is not a mapping of names to values. Return otherwise."""
    if isinstance(batch, Mapping):
        odd = [key for key in batch if not isinstance(key, str)]
        if not odd:
            return
        found = f"with the key {brief(odd[0])}"
    else:
        found = (
            f"that is {shown_value(batch)}"
            if (batch is None or isinstance(batch, (str, int, float, torch.Tensor, np.ndarray)))
            else f"that is a {type(batch).__name__}"
        )
    raise DataError(
        f"The collator made a batch {found}, but {taker} needs a mapping of names to tensors.\n\n"
        "Hint: let `data_collator` return a dict with the names of the forward's parameters, or override the method in "
        "a subclass."
    )


def is_raised_by_user_code(error: StopIteration, is_map_style: bool, auto_collates: bool) -> bool:
    """Whether user code, rather than the end of the data, ended a pass over torch's loader.

    A `StopIteration` from `__getitem__` or a collator looks like the end of the data. Its traceback shows the origin. A
    loader that makes batches of samples (`auto_collates`) handles the end of a stream itself.
    """
    modules, trace = [], error.__traceback__
    while trace is not None:
        modules.append(trace.tb_frame.f_globals.get("__name__"))
        trace = trace.tb_next
    if "torch._utils" in modules:  # sent by a worker
        return True
    within_fetch = "torch.utils.data._utils.fetch" in modules
    return within_fetch and (is_map_style or (auto_collates and modules[-1] != "torch.utils.data._utils.fetch"))


def stop_iteration_error() -> DataError:
    """Make the error for a `StopIteration` of user code, which would silently end an epoch."""
    return DataError(
        "The data set's `__getitem__`, or the collator, raised StopIteration. In training or evaluation this looks "
        "like the end of the data, and the rest would be skipped.\n\n"
        "Hint: raise another error, or call `next(…)` with a default."
    )


logger = logging.getLogger(__name__)


def default_data_collator(features: Sequence[Sample], return_tensors: str = "pt") -> dict[str, Any]:
    """Join samples into a batch of tensors, key by key.

    `label` (a number, or a list, which becomes floats) and `label_ids` (a list) become `labels`. Strings and missing
    values are left out. The first sample's keys decide which values a batch has.

    Args:
        features: Mappings, or objects with attributes.
        return_tensors: `pt` for torch tensors, `np` for NumPy arrays, which transformers makes.

    Raises:
        ValueError: `return_tensors` has another value.
        DataError: A sample has no named values, lacks one of the first sample's, or has one that does not fit.

    Mirrors:
        `transformers.default_data_collator`.
    """
    if return_tensors not in ("pt", "np"):
        raise ValueError(f"`return_tensors={brief(return_tensors)}` is not known; choose 'pt' or 'np'.")
    if return_tensors == "np":
        theirs = of_transformers("data.data_collator", "default_data_collator", "`return_tensors='np'`")
        arrays: dict[str, np.ndarray] = theirs(list(features), "np")
        return arrays
    batch: dict[str, Batch] = {}
    try:
        rows = features
        if set(map(type, features)) != {dict}:  # the usual samples, which need no slower test
            rows = [row if isinstance(row, Mapping) else vars(row) for row in features]
        first = rows[0]
        label_key = "label" if first.get("label") is not None else "label_ids"
        if first.get(label_key) is not None:
            batch["labels"] = _join_labels(label_key, [row[label_key] for row in rows])
        for key, value in first.items():
            if key in ("label", "label_ids") or value is None or isinstance(value, str):
                continue
            values = list(map(itemgetter(key), rows))
            join = torch.stack if isinstance(value, torch.Tensor) else torch.tensor
            batch[key] = torch.from_numpy(np.stack(values)) if isinstance(value, np.ndarray) else join(values)
    except Exception as error:
        raise_for_bad_samples(features, error)
        raise
    if not batch:
        raise_for_bad_samples(features, DataError("Nothing is left of the samples."))
    return batch


def _join_labels(key: str, values: list[Sample]) -> torch.Tensor:
    first = values[0]
    if isinstance(first, torch.Tensor) and (key == "label_ids" or first.ndim > 0):
        return torch.stack(values)
    label: Sample = first.item() if isinstance(first, torch.Tensor) else first
    # as upstream, a list under `label` (several labels) is one of floats
    number = label[0] if key == "label_ids" and np.ndim(label) else label
    return torch.tensor(values, dtype=torch.long if isinstance(number, (int, np.integer)) else torch.float)


class PaddingCollator:
    """Pads samples with a tokenizer's (or feature extractor's) own `pad`, and renames the labels to `labels`.

    Args:
        processing_class: The object with the `pad` method.

    Mirrors:
        `transformers.DataCollatorWithPadding`.
    """

    def __init__(self, processing_class: Any) -> None:  # of transformers, or any other class
        self.tokenizer = processing_class

    def __call__(self, features: list[Sample]) -> Batch:
        warnings = getattr(self.tokenizer, "deprecation_warnings", None)
        if warnings is not None:  # fast tokenizers warn once against `pad`, which is intended here
            warnings["Asking-to-pad-a-fast-tokenizer"] = True
        try:
            batch = self.tokenizer.pad(features, padding=True, return_tensors="pt")
        except Exception as error:
            raise_for_unnamed_samples(features, error)
            raise
        for key in ("label", "label_ids"):
            if key in batch:
                batch["labels"] = batch.pop(key)
        return batch


class RemoveColumnsCollator:
    """Drops keys that the model does not accept before collating.

    Args:
        data_collator: The collator to call.
        signature_columns: Keys to keep.
        logger: Where a line lists dropped keys. None logs nothing.
        model_name: The model's name in the log line that lists dropped keys.
        description: The data set's name in that line.

    Mirrors:
        `transformers.trainer_utils.RemoveColumnsCollator`.
    """

    def __init__(
        self,
        data_collator: Collator,
        signature_columns: Sequence[str],
        logger: logging.Logger | None = logger,
        model_name: str | None = None,
        description: str | None = None,
    ) -> None:
        self.data_collator = data_collator
        self.signature_columns = list(signature_columns)
        self.logger = logger
        self.model_name = model_name
        self.description = description
        self.message_logged = False
        self.dropped: tuple[str, ...] = ()  # the keys that were dropped from a sample, in this process

    def __call__(self, features: list[Sample]) -> Batch:
        columns = frozenset(self.signature_columns)
        # always a copy, as a collator may change its input and the data set's samples must stay unchanged
        kept = []
        for feature in features:
            is_kept_whole = type(feature) is dict and columns.issuperset(feature)
            kept.append(feature.copy() if is_kept_whole else self._keep(feature))
        try:
            return self.data_collator(kept)
        except StopIteration as error:  # a loader's worker would take it for the end of a stream
            raise stop_iteration_error() from error

    def _keep(self, feature: Sample) -> Sample:
        if not isinstance(feature, dict):
            return feature
        kept = {key: value for key, value in feature.items() if key in self.signature_columns}
        if len(kept) < len(feature) and not self.dropped:
            self.dropped = tuple(sorted(set(feature) - set(kept)))
        if self.logger is not None and len(kept) < len(feature) and not self.message_logged:
            log_ignored_columns(set(feature) - set(kept), self.description, self.model_name, self.logger)
            self.message_logged = True
        if feature and not kept:
            raise_no_columns(list(feature), self.signature_columns, self.description, self.model_name)
        return kept


def raise_no_columns(
    columns: Sequence[str], signature: Sequence[str], description: str | None, model_name: str | None
) -> NoReturn:
    """Raise the error for a data set without any accepted column."""
    raise DataError(
        f"No columns in the {description or 'given'} data set match what `{model_name}.forward` takes "
        f"({', '.join(signature)}). The following columns have been ignored: [{', '.join(sorted(columns))}].\n\n"
        "Hint: rename the columns, or set `remove_unused_columns=False`."
    )
