"""The memory that transformers' Trainer reports for its stages."""

from __future__ import annotations

from hf_compat.errors import InertArgumentWarning, warn_user
from hf_compat.interop.releases import of_installed
from hf_compat.runtime.text import is_installed


class UnmeasuredMemory:
    """Replaces transformers' `TrainerMemoryTracker` and measures nothing."""

    skip_memory_metrics = True
    peak_monitoring = False
    cur_stage: str | None = None

    def start(self, *_: object) -> None:
        """Do nothing."""

    stop = update_metrics = stop_and_update_metrics = start


def memory_tracker(skip_memory_metrics: bool) -> UnmeasuredMemory:
    """Make a tracker of the memory in a Trainer's stages, transformers' own if `skip_memory_metrics` is False."""
    if skip_memory_metrics:
        return UnmeasuredMemory()
    missing = [package for package in ("transformers", "psutil") if not is_installed(package)]
    if missing:
        warn_user(
            "`skip_memory_metrics=False` has no effect: transformers measures memory with psutil, and these are not "
            f"installed: {', '.join(missing)}. Install it: `pip install {' '.join(missing)}`.",
            InertArgumentWarning,
        )
        return UnmeasuredMemory()
    tracker: UnmeasuredMemory = of_installed("trainer_utils", "TrainerMemoryTracker")()
    return tracker
