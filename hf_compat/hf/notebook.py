"""Progress in a notebook: bars, and a table of losses and metrics that grows with the run."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hf_compat.hf.builtin_callbacks import ProgressCallback
from hf_compat.hf.callbacks import Args, Kwarg
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.hf.html_text import table_of
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.progress import HtmlBar, NotebookOutput

# What an evaluation reports besides its metrics.
_SPEED = re.compile(r"epoch|total_flos|.*_(runtime|samples_per_second|steps_per_second|model_preparation_time)")


class NotebookProgressCallback(ProgressCallback):
    """Show in one output of a cell the bar of training, a table, and the bar of an evaluation. Needs no widgets.

    The table has a row for each evaluation, or for each log where nothing is evaluated.

    Mirrors:
        `transformers.utils.notebook.NotebookProgressCallback`, 5.23.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        super().__init__(max_str_len)
        self.rows: list[dict[str, object]] = []
        self._begin()

    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(f"Epoch {state.epoch or 0:.4g}/{state.num_train_epochs}", refresh=False)
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        logs = kwargs["logs"]
        if self.training_bar is not None and args.eval_strategy == IntervalStrategy.NO and "loss" in logs:
            self._add({"Step": state.global_step, "Training Loss": logs["loss"]})

    def on_evaluate(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if self.training_bar is None and self.prediction_bar is None:  # data of unknown length have no bar
            self._begin()
        super().on_evaluate(args, state, control, **kwargs)
        if not state.is_world_process_zero:
            return
        by_epoch = args.eval_strategy == IntervalStrategy.EPOCH
        place = {"Epoch": round(state.epoch or 0)} if by_epoch else {"Step": state.global_step}
        last = next((log["loss"] for log in reversed(state.log_history) if "loss" in log), "No log")
        self._add({**place, "Training Loss": last, **_named(kwargs.get("metrics") or {})})

    def make_bar(self, total: int, initial: int = 0, leave: bool = True) -> HtmlBar:
        """Return a bar in the output; one that stays begins a new output, others go below the table."""
        if leave:
            self._begin()
        part = "bar" if leave else "evaluation"
        return HtmlBar(total=total, initial=initial, leave=leave, show=lambda text: self._put(part, text))

    def _begin(self) -> None:
        self.rows = []
        self._output = NotebookOutput()
        self._parts = dict.fromkeys(("bar", "table", "evaluation"), "")

    def _add(self, row: dict[str, object]) -> None:
        if self.rows and next(iter(row.items())) == next(iter(self.rows[-1].items())):  # another data set's metrics
            self.rows[-1].update(row)
        else:
            self.rows.append(row)
        self._put("table", table_of(self.rows))

    def _put(self, part: str, text: str) -> None:
        self._parts[part] = text
        self._output.show("".join(self._parts.values()))


def _named(metrics: Mapping[str, object]) -> dict[str, object]:
    """Return an evaluation's metrics under the names of the table's columns."""
    kept = {key: value for key, value in metrics.items() if not _SPEED.fullmatch(key)}
    names = {key: " ".join(word.capitalize() for word in key.split("_")[1:]) or key for key in kept}
    return {"Validation Loss" if names[key] == "Loss" else names[key]: value for key, value in kept.items()}
