"""Other weights in a model for a while: those that a callback wants to be written. torch words only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from hf_compat.checkpoint.reading import Weights


@contextlib.contextmanager
def holding(model: nn.Module, weights: Weights | None) -> Iterator[None]:
    """Let a model hold other weights for a while: those that are to be written."""
    if weights is None:
        yield
        return
    own = {name: value.clone() for name, value in model.state_dict().items()}
    if own.keys() != weights.keys():  # pruned weights, which the model holds as weights and masks
        model.__dict__["state_dict"] = lambda *args, **kwargs: dict(weights)
        try:
            yield
        finally:
            del model.__dict__["state_dict"]
        return
    model.load_state_dict(weights)
    try:
        yield
    finally:
        model.load_state_dict(own)
