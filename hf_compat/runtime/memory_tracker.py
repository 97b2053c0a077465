"""What a stage of a Trainer (its constructor, training, an evaluation) takes of memory."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import warnings
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_compat.errors import InertArgumentWarning
from hf_compat.runtime.text import is_installed

# A method that measures → the prefix of its metrics.
STAGES = {
    "__init__": "init",
    **dict.fromkeys(("train", "_inner_training_loop", "_finalize_training"), "train"),
    "evaluate": "eval",
    "predict": "test",
}
_SECONDS_BETWEEN_LOOKS = 0.001


class _Process(Protocol):
    """What is asked of `psutil.Process`."""

    def memory_info(self) -> _MemoryInfo:
        """Return what the process holds."""


class _MemoryInfo(Protocol):
    rss: int


@dataclass(frozen=True, slots=True)
class _Used:
    """Bytes that a stage took: at its beginning, more or fewer at its end, and at its peak above that end."""

    begin: int
    alloc: int
    peaked: int | str


class TrainerMemoryTracker:
    """Measure the memory of this process, and of its GPU where there is one, while a stage lasts.

    The stage is that of the method that calls `start` and `stop_and_update_metrics`. A stage within another one (an
    evaluation within training) is not measured.

    Args:
        skip_memory_metrics: Measure nothing.

    Mirrors:
        `transformers.trainer_utils.TrainerMemoryTracker`, 5.23: the same keys.

    Differs:
        The peak of the process is looked for a thousand times a second, not without a pause. Without psutil, which
        says what a process holds, a warning says that nothing is measured.
    """

    stages = STAGES

    def __init__(self, skip_memory_metrics: bool = False) -> None:
        self.skip_memory_metrics = skip_memory_metrics or not is_installed("psutil")
        if self.skip_memory_metrics and not skip_memory_metrics:
            warnings.warn(
                "`skip_memory_metrics=False` has no effect: psutil, which says what memory a process holds, is not "
                "installed. Install it: `pip install psutil`.",
                InertArgumentWarning,
                stacklevel=3,
            )
        self.cur_stage: str | None = None
        self.init_reported = False
        self.cpu: dict[str, _Used] = {}
        self.gpu: dict[str, _Used] = {}
        self._peak: _Peak | None = None

    def start(self) -> None:
        """Begin to measure the caller's stage."""
        if not self.skip_memory_metrics:
            self._start(_stage_of(sys._getframe(1).f_code.co_name))

    def stop_and_update_metrics(self, metrics: dict[str, float] | None = None) -> None:
        """End the caller's stage.

        Args:
            metrics: Where its numbers are added; None keeps them (the constructor's come with the next stage's).
        """
        if self.skip_memory_metrics:
            return
        stage = _stage_of(sys._getframe(1).f_code.co_name)
        self.stop(stage)
        if metrics is not None:
            self.update_metrics(stage, metrics)

    def _start(self, stage: str) -> None:
        if self.cur_stage not in (None, stage):
            return
        self.give_up()
        self.cur_stage = stage
        gc.collect()
        self._device_begin = _begin_on_device()
        self._peak = _Peak()

    def stop(self, stage: str) -> None:
        """End a stage; one that is not measured now is left out."""
        if self.skip_memory_metrics or self.cur_stage != stage or self._peak is None:
            return
        peak = self._peak
        peak.end()
        gc.collect()
        end = peak.look()
        self.cpu[stage] = _Used(peak.begin, end - peak.begin, max(0, peak.highest - end))
        if self._device_begin is not None:
            self.gpu[stage] = _used_on_device(self._device_begin)
        self.cur_stage = self._peak = None

    def give_up(self) -> None:
        """End what is being measured, and keep nothing of it: a stage that has failed."""
        if self._peak is not None:
            self._peak.end()
        self.cur_stage = self._peak = None

    def update_metrics(self, stage: str, metrics: dict[str, float]) -> None:
        """Add a stage's numbers to metrics; the first time also the constructor's."""
        if self.skip_memory_metrics or self.cur_stage not in (None, stage):
            return
        is_first, self.init_reported = not self.init_reported, True
        for name in ("init", stage) if is_first else (stage,):
            for kind in ("alloc", "peaked"):
                for place, used in (("cpu", self.cpu), ("gpu", self.gpu)):
                    if name in used:
                        metrics[f"{name}_mem_{place}_{kind}_delta"] = getattr(used[name], kind)
        for place, used in (("cpu", self.cpu), ("gpu", self.gpu)):
            if is_first and "init" in used:
                metrics[f"before_init_mem_{place}"] = used["init"].begin


class _Peak:
    """Looks at what this process holds until it is told to end."""

    def __init__(self) -> None:
        self._process: _Process = importlib.import_module("psutil").Process()
        self.begin = self.highest = self.look()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="memory peak")
        self._thread.start()

    def look(self) -> int:
        """Return the bytes of this process that are in memory."""
        return self._process.memory_info().rss

    def _watch(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            self.highest = max(self.highest, self.look())

    def end(self) -> None:
        """End looking."""
        self._ended.set()
        self._thread.join()
        self.highest = max(self.highest, self.look())


def _stage_of(method: str) -> str:
    if method not in STAGES:
        raise ValueError(
            f"A memory tracker was called from `{method}`, which is no stage.\n\n"
            f"Hint: call it from a method of one of these names: {', '.join(STAGES)}."
        )
    return STAGES[method]


def _begin_on_device() -> int | None:
    """Forget the GPU's last peak, and return the bytes that are allocated on it; None without one."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
        return torch.mps.current_allocated_memory()
    return None


def _used_on_device(begin: int) -> _Used:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        end = torch.cuda.memory_allocated()
        return _Used(begin, end - begin, max(0, torch.cuda.max_memory_allocated() - end))
    torch.mps.empty_cache()
    return _Used(begin, torch.mps.current_allocated_memory() - begin, "Not available")  # as upstream: no peak there
