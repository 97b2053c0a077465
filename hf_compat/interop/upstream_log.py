"""Lines that transformers' Trainer logs on its own logger, for scripts that run patched.

`transformers.utils.logging.set_verbosity_info()` shows them. By default they are hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hf_compat.interop.patching import is_patched

_logger = logging.getLogger("transformers.trainer")


def log_line(line: str, otherwise: logging.Logger | None = None) -> None:
    """Log a line of transformers' Trainer at level info. Without a patch it goes to another logger, if any."""
    logger = _logger if is_patched() else otherwise
    if logger is not None:
        logger.info(line)


def log_ignored_columns(
    columns: Iterable[str], description: str | None, model: str | None, ours: logging.Logger
) -> None:
    """Log the columns of a data set that the model does not take."""
    where = "" if description is None else f"in the {description} set "
    names = ", ".join(sorted(columns))
    log_line(
        f"The following columns {where}don't have a corresponding argument in `{model}.forward` and have been ignored: "
        f"{names}.",
        ours,
    )


def follow_level(level: int | None) -> None:
    """Set transformers' verbosity in a patched process, as its Trainer does. None does not change it."""
    if is_patched() and level is not None:
        logging.getLogger("transformers").setLevel(level)


def log_evaluation(description: str, num_examples: int | None, batch_size: int) -> None:
    """Log the start of an evaluation or a prediction. An unknown `num_examples` is None."""
    log_line(f"\n***** Running {description} *****")
    log_line("  Num examples: Unknown" if num_examples is None else f"  Num examples = {num_examples}")
    log_line(f"  Batch size = {batch_size}")
