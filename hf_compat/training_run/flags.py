"""What happens after an update or an epoch: log → evaluate → save, as the control's flags say. HF words only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from hf_compat.hf.enums import SaveStrategy
from hf_compat.hf.state import TrainerControl

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments


class Controlled(Protocol):
    """A run with its arguments and flags; a callback may put another control in place at any event."""

    args: TrainingArguments
    control: TrainerControl


def log_evaluate_save(
    run: Controlled, *, log: Callable[[], None], evaluate: Callable[[], bool], save: Callable[[], None]
) -> None:
    """Log, evaluate and save, in this order, as the flags say when it is their turn.

    With `save_strategy="best"` an evaluation decides whether to save.

    Args:
        run: Whose flags and arguments.
        log: Logs the loss.
        evaluate: Evaluates, and returns whether the tracked metric is the best so far.
        save: Writes a checkpoint.

    Mirrors:
        `transformers.Trainer._maybe_log_save_evaluate`, 5.23.
    """
    if run.control.should_log:
        log()
    if run.control.should_evaluate:
        is_best = evaluate()
        if run.args.save_strategy == SaveStrategy.BEST:
            run.control.should_save = is_best
    if run.control.should_save:
        save()
