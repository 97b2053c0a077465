"""The numbers that a run ends with. Pure; HF words only."""

from __future__ import annotations

from hf_compat.hf.metrics import speed_metrics


def run_summary(
    start_time: float, num_samples: float | None, num_updates: int, total_flos: float, train_loss: float
) -> dict[str, float]:
    """Return `train_runtime`, `train_samples_per_second`, `train_steps_per_second`, `total_flos` and `train_loss`.

    Args:
        start_time: `time.time()` at the start of this call of `train`, in seconds.
        num_samples: Samples trained in this call; None where they are not known.
        num_updates: Updates made in this call.
        total_flos: Floating-point operations of the whole run.
        train_loss: Mean loss of the whole run.
    """
    speeds = speed_metrics("train", start_time, num_samples=num_samples, num_steps=num_updates)
    return {**speeds, "total_flos": total_flos, "train_loss": train_loss}
