"""Names of what is the user's own: data sets, samples, batches. They say what a value is, and leave its type open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

# A map-style or iterable data set: torch's, a table or stream of `datasets`, a list.
DataSource: TypeAlias = Any
# What a data set gives for an index.
Sample: TypeAlias = Any
# What a collator makes of samples: a mapping of tensors, mostly.
Batch: TypeAlias = Any
# HF lets overridden methods return any iterable of batches.
Loader: TypeAlias = Any
Collator: TypeAlias = Callable[[list[Sample]], Batch]
# What a model's forward returns: a mapping or object with names, or a tuple, of tensors mostly.
ModelOutput: TypeAlias = Any
# The position that an iterable data set or a loader reports by `state_dict()`.
PositionState: TypeAlias = Any
