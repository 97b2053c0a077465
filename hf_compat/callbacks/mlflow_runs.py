"""MLflow over restarts: a resumed training continues its run, and the run's status says how the training ended."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_compat.callbacks.trackers import RunMemory
from hf_compat.checkpoint.files import first_line
from hf_compat.hf.callbacks import Args, Kwarg
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.launch import set_for_children, variable

logger = logging.getLogger(__name__)

RUN_ID = "MLFLOW_RUN_ID"  # MLflow takes it at the next start of a run, and removes it

_MLflowCallback: Any = object  # transformers' comes next to `MLflowRuns` in the class that `continuing` makes


class MLflowRuns(_MLflowCallback):
    """What our subclass of transformers' `MLflowCallback` adds to it."""

    _has: Counter[int]  # logs of each update that a continued run already has
    _seen: Counter[int]

    def setup(self, args: Args, state: TrainerState, model: nn.Module | None) -> None:
        """Start a run, or continue the run of the output folder where the training is resumed.

        A run that the program has started, or that `MLFLOW_RUN_ID` names, is used as upstream uses it.
        """
        self._has, self._seen = Counter(), Counter()
        if not state.is_world_process_zero:
            super().setup(args, state, model)
            return
        memory = RunMemory(str(args.output_dir), "mlflow")
        known = memory.read().get("id") if state.global_step > 0 and not state.is_hyper_param_search else None
        if known is not None and variable(RUN_ID) is None and self._ml_flow.active_run() is None:
            with self._or_a_new_run(memory.path, known):
                set_for_children(RUN_ID, known)
                super().setup(args, state, model)
                self._has = self._logs_of(known)
                return
        super().setup(args, state, model)
        if self._auto_end_run:
            memory.write(id=self._ml_flow.active_run().info.run_id)

    @contextlib.contextmanager
    def _or_a_new_run(self, path: str, run_id: str) -> Iterator[None]:
        """Warn where MLflow cannot continue a run: it may be deleted, of another experiment, or on another server."""
        try:
            yield
        except Exception as error:  # a tracking server's client raises more than MLflow's own errors
            if self._ml_flow.active_run() is not None:
                raise
            logger.warning("%s names MLflow's run %s, and a new run is started: %s", path, run_id, first_line(error))

    def _logs_of(self, run_id: str) -> Counter[int]:
        """Count a run's logs by update. Every log has an `epoch`."""
        history = self._ml_flow.MlflowClient().get_metric_history(run_id, "epoch")
        return Counter(point.step for point in history)

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
    """Return transformers' `MLflowCallback`, or its `DagsHubCallback`, with what `MLflowRuns` adds."""
    return type(theirs.__name__, (MLflowRuns, theirs), {"__module__": __name__})
