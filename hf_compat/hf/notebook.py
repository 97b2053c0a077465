"""Progress in a notebook: bars, and a table of losses and metrics that grows with the run. HF words only."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Protocol

from hf_compat.hf.builtin_callbacks import ProgressCallback
from hf_compat.hf.callbacks import Args, Kwarg
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.hf.html_text import table_of
from hf_compat.hf.state import TrainerControl, TrainerState

# What an evaluation reports besides its metrics.
_SPEED = re.compile(r"epoch|total_flos|.*_(runtime|samples_per_second|steps_per_second|model_preparation_time)")


class _Shown(Protocol):
    """What a notebook shows and can show anew: IPython's `DisplayHandle`."""

    def update(self, obj: object) -> None: ...


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookProgressCallback(ProgressCallback):
    """Show bars, and in the place of lines of logs a table: one row an evaluation, or a log where nothing is evaluated.

    Mirrors:
        `transformers.utils.notebook.NotebookProgressCallback`, 5.23.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        super().__init__(max_str_len)
        self.rows: list[dict[str, object]] = []
        self._shown: _Shown | None = None

    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.rows, self._shown = [], None

    def on_log(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        logs = kwargs["logs"]
        if args.eval_strategy == IntervalStrategy.NO and "loss" in logs:
            self._add({"Step": state.global_step, "Training Loss": logs["loss"]})

    def on_evaluate(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        by_epoch = args.eval_strategy == IntervalStrategy.EPOCH
        place = {"Epoch": round(state.epoch or 0)} if by_epoch else {"Step": state.global_step}
        last = next((log["loss"] for log in reversed(state.log_history) if "loss" in log), "No log")
        self._add({**place, "Training Loss": last, **_named(kwargs.get("metrics") or {})})

    def _add(self, row: dict[str, object]) -> None:
        if self.training_bar is None:  # nothing is trained, or another process shows it
            return
        if self.rows and next(iter(row.items())) == next(iter(self.rows[-1].items())):  # another data set's metrics
            self.rows[-1].update(row)
        else:
            self.rows.append(row)
        self._show()

    def _show(self) -> None:
        from IPython.display import HTML, display

        table = HTML(table_of(self.rows))  # type: ignore[no-untyped-call]  # IPython's
        if self._shown is None:
            self._shown = display(table, display_id=True)  # type: ignore[no-untyped-call]  # IPython's
        else:
            self._shown.update(table)


def _named(metrics: Mapping[str, object]) -> dict[str, object]:
    """Return an evaluation's metrics under the names of the table's columns."""
    kept = {key: value for key, value in metrics.items() if not _SPEED.fullmatch(key)}
    names = {key: " ".join(word.capitalize() for word in key.split("_")[1:]) or key for key in kept}
    return {"Validation Loss" if names[key] == "Loss" else names[key]: value for key, value in kept.items()}
