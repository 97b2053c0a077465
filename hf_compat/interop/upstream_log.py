"""The lines that transformers' Trainer logs, on its own logger, for scripts that run patched.

They follow `transformers.utils.logging`: `set_verbosity_info()` shows them, the default shows none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hf_compat.interop.patching import is_patched

_logger = logging.getLogger("transformers.trainer")


def log_line(line: str, otherwise: logging.Logger | None = None) -> None:
    """Log a line of transformers' Trainer at level info, in a patched process; elsewhere on another logger, if any."""
    logger = _logger if is_patched() else otherwise
    if logger is not None:
        logger.info(line)


def log_ignored_columns(
    columns: Iterable[str], description: str | None, model: str | None, ours: logging.Logger
) -> None:
    """Log which columns of a data set the model does not take; outside of a patched process on a logger of ours.

    Args:
        columns: The names.
        description: Which data set it is.
        model: The name of the model's class.
        ours: Logs the line where transformers' logger does not.
    """
    where = "" if description is None else f"in the {description} set "
    names = ", ".join(sorted(columns))
    log_line(
        f"The following columns {where}don't have a corresponding argument in `{model}.forward` and have been ignored: "
        f"{names}.",
        ours,
    )


def follow_level(level: int | None) -> None:
    """Set transformers' verbosity in a patched process, as its Trainer does; None leaves it."""
    if is_patched() and level is not None:
        logging.getLogger("transformers").setLevel(level)


def log_training(
    counts: tuple[int, int, int, float, int, int, int],
    micro_batch_size: int,
    accumulation: int,
    parameters: int,
    ours: logging.Logger | None,
) -> None:
    """Log what a training begins with.

    Args:
        counts: What `set_initial_training_values` returns.
        micro_batch_size: Samples of a micro-batch of one process.
        accumulation: Micro-batches of an update.
        parameters: Trainable parameters.
        ours: Logs the lines where transformers' logger does not; None leaves them out.
    """
    epochs, updates_per_epoch, num_examples, _, total_batch_size, _, max_updates = counts
    log_line("***** Running training *****", ours)
    for name, count in (
        ("Num examples", f"{num_examples:,}"),
        ("Num Epochs", f"{epochs:,}"),
        ("Num update steps per epoch", f"{updates_per_epoch:,}"),
        ("Instantaneous batch size per device", f"{micro_batch_size:,}"),
        ("Total train batch size (w. parallel, distributed & accumulation)", f"{total_batch_size:,}"),
        ("Gradient Accumulation steps", f"{accumulation}"),
        ("Total optimization steps", f"{max_updates:,}"),
        ("Number of trainable parameters", f"{parameters:,}"),
    ):
        log_line(f"  {name} = {count}", ours)


def log_resumption(
    updates_done: int,
    updates_per_epoch: int,
    accumulation: int,
    ignore_data_skip: bool,
    ours: logging.Logger | None,
) -> None:
    """Log where a resumed run continues, in whole epochs and micro-batches of the next one."""
    epochs, updates = divmod(updates_done, updates_per_epoch)
    log_line(f"  Resuming training from checkpoint with epoch {epochs} and global step {updates_done}", ours)
    if not ignore_data_skip:
        log_line(
            f"  Fast-forwarding the dataloader past {epochs} epochs and {updates * accumulation} batches to resume "
            "from the exact training state.",
            ours,
        )


def log_evaluation(description: str, num_examples: int | None, batch_size: int) -> None:
    """Log what an evaluation or a prediction begins with; `num_examples` is None where it is unknown."""
    log_line(f"\n***** Running {description} *****")
    log_line("  Num examples: Unknown" if num_examples is None else f"  Num examples = {num_examples}")
    log_line(f"  Batch size = {batch_size}")
