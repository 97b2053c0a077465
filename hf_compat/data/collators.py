"""Make batches from samples: collate, pad, and remove columns that the model does not accept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from hf_compat.data.checks import raise_for_bad_samples, raise_for_unnamed_samples, stop_iteration_error
from hf_compat.data.types import Batch, Collator, Sample
from hf_compat.errors import DataError
from hf_compat.interop.upstream_log import log_ignored_columns

logger = logging.getLogger(__name__)


def default_data_collator(features: Sequence[Sample], return_tensors: str = "pt") -> dict[str, Any]:
    """Join samples into a batch of tensors, key by key.

    `label` (a number, or a list, which becomes floats) and `label_ids` (a list) become `labels`. Strings and missing
    values are left out. The first sample's keys decide which values a batch has.

    Args:
        features: Mappings, or objects with attributes.
        return_tensors: `pt` for torch tensors, `np` for NumPy arrays.

    Raises:
        ValueError: `return_tensors` has another value.
        DataError: A sample has no named values, lacks one of the first sample's, or has one that does not fit.

    Mirrors:
        `transformers.default_data_collator`, 5.23.
    """
    if return_tensors not in ("pt", "np"):
        raise ValueError(f"`return_tensors={return_tensors!r}` is not known; choose 'pt' or 'np'.")
    join, join_labels = (_join, _join_labels) if return_tensors == "pt" else (_join_arrays, _join_label_arrays)
    try:
        batch = _joined(features, join, join_labels)
    except Exception as error:
        raise_for_bad_samples(features, error)
        raise
    if not batch:
        raise_for_bad_samples(features, DataError("Nothing is left of the samples."))
    return batch


def _joined(
    features: Sequence[Sample],
    join: Callable[[list[Sample]], Batch],
    join_labels: Callable[[str, list[Sample]], Batch],
) -> dict[str, Batch]:
    # the type check avoids `Mapping`'s slow one for each sample
    rows = [row if type(row) is dict or isinstance(row, Mapping) else vars(row) for row in features]
    first = rows[0]
    batch: dict[str, Batch] = {}
    label_key = next((key for key in ("label", "label_ids") if first.get(key) is not None), None)
    if label_key is not None:
        batch["labels"] = join_labels(label_key, [row[label_key] for row in rows])
    for key, value in first.items():
        if key in ("label", "label_ids") or value is None or isinstance(value, str):
            continue
        batch[key] = join([row[key] for row in rows])
    return batch


def _join(values: list[Sample]) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)


def _join_arrays(values: list[Sample]) -> np.ndarray:
    return np.stack(values) if isinstance(values[0], np.ndarray) else np.array(values)


def _join_labels(key: str, values: list[Sample]) -> torch.Tensor:
    first = values[0]
    if isinstance(first, torch.Tensor) and first.ndim > 0:
        return torch.stack(values)
    sample = first.item() if isinstance(first, torch.Tensor) else first
    return torch.tensor(values, dtype=torch.long if _is_whole(key, sample) else torch.float)


def _join_label_arrays(key: str, values: list[Sample]) -> np.ndarray:
    first = values[0]
    if isinstance(first, np.ndarray) and (key == "label_ids" or first.ndim > 0):
        return np.stack(values)
    sample = first.item() if isinstance(first, np.ndarray) else first
    return np.array(values, dtype=np.int64 if _is_whole(key, sample) else np.float32)


def _is_whole(key: str, label: Sample) -> bool:
    """Whether labels are whole numbers. As upstream, a list under `label` (several labels) is one of floats."""
    first = label[0] if key == "label_ids" and np.ndim(label) else label
    return isinstance(first, (int, np.integer))


class Padder(Protocol):
    """A tokenizer or feature extractor with a `pad` method."""

    def pad(self, features: list[Sample], *, padding: bool, return_tensors: str) -> Batch:
        """Join samples into a batch, padded to the longest sample."""


class PaddingCollator:
    """Pads samples with a tokenizer's (or feature extractor's) own `pad`, and renames the labels to `labels`.

    Args:
        processing_class: The object with the `pad` method.

    Mirrors:
        `transformers.DataCollatorWithPadding`, 5.23.
    """

    def __init__(self, processing_class: Padder) -> None:
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
        model_name: The model's name in the log line that lists dropped keys.
        description: The data set's name in that line.

    Mirrors:
        `transformers.trainer_utils.RemoveColumnsCollator`, 5.23.
    """

    def __init__(
        self,
        data_collator: Collator,
        signature_columns: Sequence[str],
        model_name: str | None = None,
        description: str | None = None,
    ) -> None:
        self.data_collator = data_collator
        self.signature_columns = list(signature_columns)
        self.model_name = model_name
        self.description = description
        self.message_logged = False

    def __call__(self, features: list[Sample]) -> Batch:
        columns = frozenset(self.signature_columns)
        # always a copy, as a collator may change its input and the data set's samples must stay unchanged
        kept = [
            feature.copy() if type(feature) is dict and columns.issuperset(feature) else self._keep(feature)
            for feature in features
        ]
        try:
            return self.data_collator(kept)
        except StopIteration as error:  # a loader's worker would take it for the end of a stream
            raise stop_iteration_error() from error

    def _keep(self, feature: Sample) -> Sample:
        if not isinstance(feature, dict):
            return feature
        kept = {key: value for key, value in feature.items() if key in self.signature_columns}
        if len(kept) < len(feature) and not self.message_logged:
            log_ignored_columns(set(feature) - set(kept), self.description, self.model_name, logger)
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
