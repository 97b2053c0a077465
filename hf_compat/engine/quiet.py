"""Silence what Lightning announces for each new trainer, and its warnings about intended behaviour."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

# Loggers that announce devices and tips for each new trainer.
_CHATTY = tuple(
    map(logging.getLogger, ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"))
)

# A warning of Lightning about its own code (2.6.6 under torch 2.13). Remove when it calls `is_leaf` itself
OF_LIGHTNING = r".*isinstance\(treespec, LeafSpec\).*"
# Patterns of Lightning's warnings about its own code, or about intended behaviour of HF.
EXPECTED = (
    OF_LIGHTNING,
    # like HF, our checkpoints hold the state after the update
    ".*no pre-optimization state was saved.*",
    # logged values are already gathered and equal on every rank
    ".*sync_dist=True.*",
    # HF's logging interval counts updates across epochs
    ".*smaller than the logging interval.*",
    # the module steps the active schedule, including that of averaged weights
    ".*SWA is currently only supported every epoch.*",
    # sentence-transformers runs its own evaluators and passes an empty loader
    ".*Total length of `EvaluationBatches` across ranks is zero.*",
)
_EXPECTED = "|".join(EXPECTED)


class _WarningsOnly(logging.Filter):
    """Drop records below warnings. Changing a logger's level would clear the level caches of all loggers."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence Lightning's announcements and expected warnings. Its other warnings remain."""
    warnings_only = _WarningsOnly()
    for chatty in _CHATTY:
        chatty.addFilter(warnings_only)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_EXPECTED)
            yield
    finally:
        for chatty in _CHATTY:
            chatty.removeFilter(warnings_only)
