"""Continue MLflow's run when a training resumes, and end it with the training's status."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from torch import nn

from hf_compat.callbacks.trackers import RunMemory
from hf_compat.checkpoint.files import first_line
from hf_compat.hf.callbacks import Args, Kwarg
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.launch import set_for_children, variable

logger = logging.getLogger(__name__)

RUN_ID = "MLFLOW_RUN_ID"  # MLflow reads and removes it at the next start of a run

_MLflowCallback: Any = object  # transformers' class follows `MLflowRuns` in the class that `continuing` makes


class MLflowRuns(_MLflowCallback):
    """Our additions to transformers' `MLflowCallback`."""

    _has: Counter[int]  # logs of each update that a continued run already has
    _seen: Counter[int]

    def setup(self, args: Args, state: TrainerState, model: nn.Module | None) -> None:
        """Start a run, or continue the run of the output folder if the training is resumed.

        A run that the program has started, or that `MLFLOW_RUN_ID` names, is used as upstream.
        """
        self._has, self._seen = Counter(), Counter()
        if not state.is_world_process_zero:
            super().setup(args, state, model)
            return
        memory = RunMemory(str(args.output_dir), "mlflow")
        known = memory.read().get("id") if state.global_step > 0 and not state.is_hyper_param_search else None
        if known is not None and variable(RUN_ID) is None and self._ml_flow.active_run() is None:
            try:
                set_for_children(RUN_ID, known)
                super().setup(args, state, model)
                history = self._ml_flow.MlflowClient().get_metric_history(known, "epoch")  # every log has an epoch
                self._has = Counter(point.step for point in history)
                return
            except Exception as error:  # a tracking server's client raises more than MLflow's own errors
                if self._ml_flow.active_run() is not None:
                    raise
                # the run may be deleted, of another experiment, or on another server
                text = "%s names MLflow's run %s, and a new run is started: %s"
                logger.warning(text, memory.path, known, first_line(error))
        super().setup(args, state, model)
        if self._auto_end_run:
            memory.write(id=self._ml_flow.active_run().info.run_id)

    def on_log(
        self, args: Args, state: TrainerState, control: TrainerControl, logs: Kwarg = None, **kwargs: Kwarg
    ) -> None:
        if not self._initialized:
            self.setup(args, state, kwargs.get("model"))
        self._seen[state.global_step] += 1
        if self._seen[state.global_step] > self._has[state.global_step]:
            super().on_log(args, state, control, logs, **kwargs)

    def finalize(self, status: str) -> None:
        """End the run that this callback has started, with `FAILED` or `KILLED`. A later training continues it."""
        if self._auto_end_run and self._ml_flow.active_run() is not None:
            self._ml_flow.end_run(status)
            self._initialized = False


def continuing(theirs: type) -> type:
    """Make a subclass of transformers' `MLflowCallback`, or of its `DagsHubCallback`, that is an `MLflowRuns`."""
    return type(theirs.__name__, (MLflowRuns, theirs), {"__module__": __name__})
