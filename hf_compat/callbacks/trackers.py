"""TensorBoard and Weights & Biases as HF callbacks, with HF's keys, and the continuing of MLflow's runs.

`trackers.json` names the runs of an output folder in wandb and MLflow, so that a resumed training continues them. A
damaged file costs a warning, and new runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, cast

from torch import nn

from hf_compat.checkpoint.files import first_line, read_json
from hf_compat.errors import CheckpointError, MissingPackage
from hf_compat.hf.callbacks import Args, Kwarg, TrainerCallback
from hf_compat.hf.enums import default_logdir, rewrite_logs
from hf_compat.hf.legacy import chosen_logging_dir
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.interop.transformers_models import reporting_callback
from hf_compat.runtime.inspection import is_replaced
from hf_compat.runtime.launch import environment
from hf_compat.runtime.text import need

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


logger = logging.getLogger(__name__)

TRACKERS_NAME = "trackers.json"
_FILE_BYTES = 2**20  # a record takes about 100
_RUN_ID = re.compile(r"[^/\\#?%:\x00-\x1f\ud800-\udfff]{1,128}")  # the ids that wandb accepts


class RunRecord(TypedDict, total=False):
    """The record of a tracker's run."""

    id: str
    step: int  # update of the last log
    logs: int  # of that update


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 2**63


_FIELDS: dict[str, Callable[[object], bool]] = {
    "id": lambda value: isinstance(value, str) and _RUN_ID.fullmatch(value) is not None,
    "step": _is_count,
    "logs": _is_count,
}


class RunMemory:
    """The run of a tracker that an output folder belongs to."""

    def __init__(self, folder: str, tracker: str) -> None:
        self.path = os.path.join(folder, TRACKERS_NAME)
        self.tracker = tracker
        self._warned: set[str] = set()

    def read(self) -> RunRecord:
        """Read the run's record."""
        return cast(RunRecord, self._records()[self.tracker])

    def write(self, **values: Unpack[RunRecord]) -> None:
        """Add to the record. A kill leaves the old record. A file that cannot be written costs a warning."""
        known = self._records()
        known[self.tracker] |= values
        partial = f"{self.path}.tmp"
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            with open(partial, "x", encoding="utf-8") as file:  # never follow an existing link
                json.dump(known, file, indent=2)
            os.replace(partial, self.path)
        except OSError as error:
            self._warn_once(
                f"{self.path} cannot be written ({error.strerror}). A resumed training will start new runs."
            )

    def _records(self) -> dict[str, dict[str, object]]:
        """Read the records of all trackers. If any of them is damaged, there are none."""
        try:
            known = read_json(self.path, _FILE_BYTES) if os.path.lexists(self.path) else {}
            # a later release may write further fields
            if not isinstance(known, dict) or not all(
                isinstance(record, dict) and all(fits(record[name]) for name, fits in _FIELDS.items() if name in record)
                for record in known.values()
            ):
                raise CheckpointError(f"{self.path} holds no valid records of trackers.")
        except CheckpointError as error:
            self._warn_once(f"{first_line(error)} Trackers start new runs.")
            known = {}
        return {self.tracker: {}, **known}

    def _warn_once(self, message: str) -> None:
        """Warn once, as a run writes its record at every log."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


class TensorBoardCallback(TrainerCallback):
    """Report to TensorBoard: scalars under HF's keys, the arguments and the model's configuration as text.

    Args:
        tb_writer: The `SummaryWriter` to use. By default one is made.

    Mirrors:
        `transformers.integrations.TensorBoardCallback`, 5.23, with the same tags, values and steps. Files go to the old
        argument `logging_dir`, to the variable `TENSORBOARD_LOGGING_DIR`, or to `runs/…` in the output folder.

    Differs:
        A resumed training continues in the newest folder of `runs`. Points after the checkpoint are replaced.
    """

    def __init__(self, tb_writer: SummaryWriter | None = None) -> None:
        if tb_writer is None:
            need("tensorboard", "'hf-compat[tensorboard]'", "`report_to='tensorboard'`")
        self.tb_writer = tb_writer
        self.logging_dir: str | None = None
        self._is_training = False
        self._is_own = tb_writer is None

    def experiment(self, args: Args, state: TrainerState) -> SummaryWriter:
        """TensorBoard's writer, opened if needed. Lightning callbacks read it as `trainer.logger.experiment`."""
        if self.tb_writer is not None:
            return self.tb_writer
        from torch.utils.tensorboard import SummaryWriter

        chosen = chosen_logging_dir(args) or environment.get("TENSORBOARD_LOGGING_DIR")
        if chosen is None:
            chosen = os.path.join(str(args.output_dir), default_logdir())
            runs = Path(chosen).parent
            if state.global_step > 0 and runs.is_dir():  # the folder of the last run
                chosen = str(max(filter(Path.is_dir, runs.iterdir()), key=os.path.getmtime, default=chosen))
        if state.is_hyper_param_search and state.trial_name:
            chosen = os.path.join(chosen, state.trial_name)  # one run for each trial
        self.logging_dir = os.path.expanduser(chosen)
        purge = state.global_step + 1 if state.global_step > 0 else None
        self.tb_writer = SummaryWriter(log_dir=self.logging_dir, purge_step=purge)
        return self.tb_writer

    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        self._is_training = True
        if not state.is_world_process_zero:
            return
        writer = self.experiment(args, state)
        writer.add_text("args", args.to_json_string())
        config: Any = getattr(kwargs.get("model"), "config", None)
        if hasattr(config, "to_json_string"):
            writer.add_text("model_config", config.to_json_string())

    def on_log(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if not state.is_world_process_zero:
            return
        writer = self.experiment(args, state)
        for name, value in rewrite_logs(kwargs["logs"]).items():
            if isinstance(value, (int, float)):
                writer.add_scalar(name, value, state.global_step)
            elif isinstance(value, str):
                writer.add_text(name, value, state.global_step)
            else:
                logger.warning("TensorBoard accepts numbers and text. %s=%r was left out.", name, value)
        if self._is_training or not self._is_own:
            writer.flush()
        else:  # an open file has a thread, and this may be the last evaluation. The next log opens another file
            writer.close()

    def on_train_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and end their thread, after training or after an error."""
        self._is_training = False
        if self.tb_writer is not None:
            self.tb_writer.close()
            self.tb_writer, self._is_own = None, True


def integration_of(tracker: str) -> type:
    """Transformers' callback of a tracker.

    Raises:
        MissingPackage: transformers is not installed.
    """
    theirs = reporting_callback(tracker)
    if theirs is None:
        raise MissingPackage(
            f"`report_to={tracker!r}` needs the integration of transformers, which is not installed.\n\n"
            "Hint: pip install 'hf-compat[transformers]', or pass a Lightning logger."
        )
    return theirs


_Theirs: Any = object  # transformers' class follows ours in the class of each object


class WandbCallback(_Theirs):
    """Report to Weights & Biases. Each object is one of transformers' `WandbCallback`, too, which does so.

    Raises:
        MissingPackage: transformers is not installed.

    Mirrors:
        `transformers.integrations.WandbCallback`, 5.23.

    Differs:
        A resumed training continues its run. Logs that the run already has are skipped, so steps never go backwards.
    """

    _memory: RunMemory | None = None  # of a run that this callback has started
    _skip_to = (-1, 0)  # the last step that a resumed run already has, and its number of logs
    _logged = (-1, 0)

    def __new__(cls) -> Self:
        theirs, names = integration_of("wandb"), ("__module__", "__qualname__", "__doc__")
        if not issubclass(cls, theirs):
            cls = type(cls.__name__, (cls, theirs, TrainerCallback), {name: getattr(cls, name) for name in names})
        made: Self = super().__new__(cls)
        return made

    def setup(self, args: Args, state: TrainerState, model: nn.Module | None, **kwargs: Kwarg) -> None:
        """Start a run, or continue the checkpoint's run. A run that the program has started is used unchanged."""
        begins = state.is_world_process_zero and self._wandb.run is None
        if begins:
            self._memory = RunMemory(str(args.output_dir), "wandb")
            known = self._memory.read() if state.global_step > 0 else {}
            if "id" in known:
                project = environment.get("WANDB_PROJECT", "huggingface")
                self._wandb.init(project=project, id=known["id"], resume="allow")
                self._skip_to = (known.get("step", -1), known.get("logs", 0))
        super().setup(args, state, model, **kwargs)
        if begins and self._memory is not None:
            self._memory.write(id=self._wandb.run.id)

    def experiment(self, args: Args, state: TrainerState) -> object:
        """Wandb's run, started if needed. Lightning callbacks read it as `trainer.logger.experiment`."""
        if self._wandb.run is None:
            self.setup(args, state, nn.Module())
            self._initialized = False  # the start of the training adds the model
        return self._wandb.run

    def on_log(
        self,
        args: Args,
        state: TrainerState,
        control: TrainerControl,
        model: Kwarg = None,
        logs: Kwarg = None,
        **kwargs: Kwarg,
    ) -> None:
        if not self._initialized:
            self.setup(args, state, model)
        step, count = self._logged
        self._logged = (state.global_step, count + 1 if step == state.global_step else 1)
        if self._logged <= self._skip_to:  # the resumed run has this log
            return
        super().on_log(args, state, control, model=model, logs=logs, **kwargs)
        if self._memory is not None:
            self._memory.write(step=self._logged[0], logs=self._logged[1])

    @property
    def reads_checkpoints(self) -> bool:
        """Whether this callback reads a saved checkpoint's files, so that the Trainer must finish them first."""
        return self._log_model == "checkpoint" or is_replaced(self, "on_save", integration_of("wandb"))


RUN_ID = "MLFLOW_RUN_ID"  # MLflow reads and removes it at the next start of a run


class MLflowRuns(_Theirs):
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
        if known is not None and environment.get(RUN_ID) is None and self._ml_flow.active_run() is None:
            try:
                environment[RUN_ID] = known
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
