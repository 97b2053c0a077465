"""Type aliases for the user's own objects, such as data sets, samples and batches. Their types are left open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

# A map-style or iterable data set: torch's, a table or stream of `datasets`, a list.
DataSource: TypeAlias = Any
# A data set's entry for an index.
Sample: TypeAlias = Any
# A collator's result, mostly a mapping of tensors.
Batch: TypeAlias = Any
# HF lets overridden methods return any iterable of batches.
Loader: TypeAlias = Any
Collator: TypeAlias = Callable[[list[Sample]], Batch]
# The result of a model's forward: a mapping, an object with attributes, or a tuple, mostly of tensors.
ModelOutput: TypeAlias = Any
# The position returned by `state_dict()` of an iterable data set or a loader.
PositionState: TypeAlias = Any
