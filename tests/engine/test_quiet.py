"""What Lightning says of its own code, or of what HF intends, is hidden while a Trainer runs; the rest is shown."""

from __future__ import annotations

import contextlib
import logging
import warnings

import pytest

from hf_compat.engine.quiet import quietly

HIDDEN = (
    "`isinstance(treespec, LeafSpec)` is deprecated, use `isinstance(treespec, TreeSpec)` instead.",
    "Saving a checkpoint, but no pre-optimization state was saved.",
    "It is recommended to use `self.log('loss', ..., sync_dist=True)` when logging on epoch level.",
    "The number of training batches (2) is smaller than the logging interval Trainer(log_every_n_steps=50).",
    "SWA is currently only supported every epoch. Found scheduler.",
    "Total length of `EvaluationBatches` across ranks is zero. Please make sure this was your intention.",
)


@pytest.mark.parametrize("text", HIDDEN)
def test_a_warning_that_says_nothing_to_the_user_is_hidden(text):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with quietly():
            warnings.warn(text, FutureWarning, stacklevel=1)
            warnings.warn("the user's", stacklevel=1)
        warnings.warn(text, FutureWarning, stacklevel=1)
    assert [str(one.message) for one in shown] == ["the user's", text]


@pytest.mark.parametrize("name", ["lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"])
def test_announcements_are_hidden_and_warnings_heard(name, caplog):
    chatty = logging.getLogger(name)
    with caplog.at_level(logging.DEBUG, name):
        for context in (quietly(), contextlib.nullcontext()):
            with context:
                for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
                    chatty.log(level, "said")
    assert [one.levelno for one in caplog.records] == [30, 40, 10, 20, 30, 40]


def test_what_is_raised_within_leaves_everything_as_it_was():
    before = list(logging.getLogger("lightning.pytorch.utilities.rank_zero").filters)
    with pytest.raises(ValueError, match="within"), quietly():
        raise ValueError("within")
    assert logging.getLogger("lightning.pytorch.utilities.rank_zero").filters == before
