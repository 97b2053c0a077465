"""Batches to predict, which say what samples they hold: `BasePredictionWriter` writes by them. Lightning's words."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch.utils.data import DataLoader, SequentialSampler

from hf_compat.data.types import Batch
from hf_compat.engine.evaluation import EvaluationBatches
from hf_compat.engine.internals import known_batches


class PredictionBatches(EvaluationBatches):
    """A loader's batches; where these are in the data's order, Lightning finds the indices of their samples.

    With several processes the indices are those of this rank's batches: samples that fill up the last one come twice.
    """

    @functools.cached_property
    def batch_sampler(self) -> object:
        """Where Lightning looks for the indices; None where nobody knows them before they are drawn."""
        batches = self.loader.batch_sampler if isinstance(self.loader, DataLoader) else None
        if batches is None or not isinstance(getattr(batches, "sampler", None), SequentialSampler):
            return None
        return known_batches([list(indices) for indices in batches])


class PlainEvaluationBatches(PredictionBatches):
    """The batches as the loader gives them, for a module of another kind.

    They are no `DataLoader`, which Lightning would share out among the processes once more.
    """

    def __iter__(self) -> Iterator[Batch]:
        return (batch.inputs for batch in super().__iter__())
