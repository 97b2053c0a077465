"""The numbers that a run ends with. HF words only."""

from __future__ import annotations

import logging

from hf_compat.hf.metrics import speed_metrics

logger = logging.getLogger(__name__)


def run_summary(
    start_time: float,
    num_samples: float | None,
    num_updates: int,
    total_flos: float,
    train_loss: float,
    nonfinite_updates: int = 0,
) -> dict[str, float]:
    """Return `train_runtime`, `train_samples_per_second`, `train_steps_per_second`, `total_flos` and `train_loss`.

    Where losses were not finite it also has `nonfinite_steps`, and warns.

    Args:
        start_time: `time.time()` at the start of this call of `train`, in seconds.
        num_samples: Samples trained in this call; None where they are not known.
        num_updates: Updates made in this call.
        total_flos: Floating-point operations of the whole run.
        train_loss: Mean loss of the whole run.
        nonfinite_updates: Updates of the whole run whose loss was NaN or infinite, and was left out of the mean.
    """
    speeds = speed_metrics("train", start_time, num_samples=num_samples, num_steps=num_updates)
    summary = {**speeds, "total_flos": total_flos, "train_loss": train_loss}
    if not nonfinite_updates:
        return summary
    logger.warning(
        "The loss of %d updates was not finite (NaN or infinite); `logging_nan_inf_filter` leaves it out of the logs "
        "and of `train_loss`.",
        nonfinite_updates,
    )
    return {**summary, "nonfinite_steps": nonfinite_updates}
