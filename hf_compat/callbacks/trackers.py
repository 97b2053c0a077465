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
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from torch import nn

from hf_compat.checkpoint.files import first_line, read_json, write_new
from hf_compat.errors import ArgumentError, CheckpointError
from hf_compat.hf.callbacks import Args, Kwarg, TrainerCallback
from hf_compat.hf.enums import SUMMARY_KEYS, default_logdir, numbers_of, rewrite_logs
from hf_compat.hf.legacy import chosen_logging_dir
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.inspection import is_replaced
from hf_compat.runtime.launch import environment
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.text import brief, need

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


def _is_record(value: object) -> bool:
    """Whether each field of a record is valid, as far as it is there. A later release may write further fields."""
    if not isinstance(value, dict):
        return False
    run, counts = value.get("id", "a"), (value.get("step", 0), value.get("logs", 0))
    is_run = isinstance(run, str) and _RUN_ID.fullmatch(run) is not None
    return is_run and all(type(count) is int and 0 <= count < 2**63 for count in counts)


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
            local_path("output_dir", self.path)  # Lightning's folder may be elsewhere
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            write_new(partial, json.dumps(known, indent=2).encode())
            os.replace(partial, self.path)
        except (ArgumentError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not on this machine"
            self._warn_once(f"{self.path} cannot be written ({why}). A resumed training will start new runs.")

    def _records(self) -> dict[str, dict[str, object]]:
        """Read the records of all trackers. If any of them is damaged, there are none."""
        try:
            known = read_json(self.path, _FILE_BYTES) if os.path.lexists(self.path) else {}
            if not isinstance(known, dict) or not all(map(_is_record, known.values())):
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
        `transformers.integrations.TensorBoardCallback`, with the same tags, values and steps. Files go to the old
        argument `logging_dir`, to the variable `TENSORBOARD_LOGGING_DIR`, or to `runs/…` in the output folder.

    Differs:
        A resumed training continues in the newest folder of `runs`. Points after the checkpoint are replaced.
    """

    def __init__(self, tb_writer: SummaryWriter | None = None) -> None:
        if tb_writer is None:
            need("tensorboard", "[tensorboard]", "`report_to='tensorboard'`")
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
                logger.warning("TensorBoard accepts numbers and text. %s=%s was left out.", name, brief(value))
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


class WandbCallback(TrainerCallback):
    """Report to Weights & Biases, under HF's keys.

    The variables `WANDB_PROJECT` (`huggingface` by default), `WANDB_WATCH` (`gradients`, `parameters`, `all`) and
    `WANDB_LOG_MODEL` (`end`, `checkpoint`) are read here. wandb itself reads all others (`WANDB_MODE` …).

    Mirrors:
        `transformers.integrations.WandbCallback`, with the same keys, configuration, summary and run name.

    Differs:
        A resumed training continues its run. Logs that the run already has are skipped, so steps never go backwards.
    """

    def __init__(self) -> None:
        self._wandb: Any = need("wandb", "[wandb]", "`report_to='wandb'`")
        self._is_set_up = False
        wanted = environment.get("WANDB_LOG_MODEL", "false")
        self._log_model = wanted.lower() if wanted.lower() in ("end", "checkpoint") else "false"
        if wanted.lower() not in ("end", "checkpoint", "false"):
            logger.warning("WANDB_LOG_MODEL=%s is unknown (end, checkpoint, false), so no model is logged.", wanted)
        self._memory: RunMemory | None = None
        self._skip_to = (-1, 0)  # the last step that a resumed run already has, and its number of logs
        self._logged = (-1, 0)

    def setup(self, args: Args, state: TrainerState, model: nn.Module | None, **kwargs: Kwarg) -> None:
        """Start a run, or continue the checkpoint's run. A run that the program has started is used unchanged."""
        self._is_set_up = True
        if not state.is_world_process_zero:
            return
        if self._wandb.run is None:
            self._begin(args, state)
        config: Any = getattr(model, "config", None)
        described = config if isinstance(config, dict) else config.to_dict() if hasattr(config, "to_dict") else {}
        adapters = getattr(model, "peft_config", None)
        self._wandb.config.update(
            {**({"peft_config": adapters} if adapters is not None else {}), **described, **args.to_dict()},
            allow_val_change=True,
        )
        self._wandb.define_metric("train/global_step")
        self._wandb.define_metric("*", step_metric="train/global_step", step_sync=True)
        watched = environment.get("WANDB_WATCH", "false")
        if watched in ("all", "parameters", "gradients"):
            self._wandb.watch(model, log=watched, log_freq=max(100, state.logging_steps))
        count = getattr(model, "num_parameters", None)
        if callable(count):
            self._wandb.config.update({"model/num_parameters": count()}, allow_val_change=True)
        if self._log_model != "false":
            facts = {
                "model_config": None if config is None else config.to_dict(),
                "num_parameters": self._wandb.config.get("model/num_parameters"),
                "initial_model": True,
            }
            artifact = self._artifact(args, facts)
            with artifact.new_file("model_architecture.txt") as file:
                file.write(str(model))
            self._wandb.run.log_artifact(artifact, aliases=["base_model"])

    def experiment(self, args: Args, state: TrainerState) -> object:
        """Wandb's run, started if needed. Lightning callbacks read it as `trainer.logger.experiment`."""
        if self._wandb.run is None:
            self._begin(args, state)
        return self._wandb.run

    def _begin(self, args: Args, state: TrainerState) -> None:
        self._memory = RunMemory(str(args.output_dir), "wandb")
        options: dict[str, Any] = {}
        if state.trial_name is not None:
            options = {"name": state.trial_name, "group": args.run_name or args.output_dir}
        elif args.run_name is not None and not state.is_hyper_param_search:  # wandb itself names the runs of a search
            options = {"name": args.run_name}
        known = self._memory.read() if state.global_step > 0 else {}
        if "id" in known:
            options |= {"id": known["id"], "resume": "allow"}
            self._skip_to = (known.get("step", -1), known.get("logs", 0))
        self._wandb.init(project=environment.get("WANDB_PROJECT", "huggingface"), **options)
        self._memory.write(id=self._wandb.run.id)

    def _artifact(self, args: Args, facts: Mapping[str, object]) -> Any:  # wandb's
        run = self._wandb.run
        name = run.id if args.run_name in (None, args.output_dir) else run.name
        accepted = re.sub(r"[^A-Za-z0-9_.-]", "-", name)  # by wandb
        return self._wandb.Artifact(name=f"model-{accepted}", type="model", metadata=dict(facts))

    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if state.is_hyper_param_search:
            self._wandb.finish()
            self._is_set_up = False
        if not self._is_set_up:
            self.setup(args, state, kwargs.get("model"))

    def on_log(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if not self._is_set_up:
            self.setup(args, state, kwargs.get("model"))
        if not state.is_world_process_zero:
            return
        step, count = self._logged
        self._logged = (state.global_step, count + 1 if step == state.global_step else 1)
        if self._logged <= self._skip_to:  # the resumed run has this log
            return
        logs = kwargs["logs"]
        for name in SUMMARY_KEYS:
            if name in logs:
                self._wandb.run.summary[name] = logs[name]
        rest = rewrite_logs({name: value for name, value in logs.items() if name not in SUMMARY_KEYS})
        self._wandb.log({**rest, "train/global_step": state.global_step})
        if self._memory is not None:
            self._memory.write(step=self._logged[0], logs=self._logged[1])

    @property
    def reads_checkpoints(self) -> bool:
        """Whether this callback reads a saved checkpoint's files, so that the Trainer must finish them first."""
        return self._log_model == "checkpoint" or is_replaced(self, "on_save", WandbCallback)

    def on_save(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if self._log_model != "checkpoint" or not self._is_set_up or not state.is_world_process_zero:
            return
        facts = self._summary() | {"model/num_parameters": self._wandb.config.get("model/num_parameters")}
        artifact = self._artifact(args, facts)
        artifact.add_dir(os.path.join(str(args.output_dir), f"checkpoint-{state.global_step}"))
        aliases = [f"epoch_{round(state.epoch, 2)}", f"checkpoint_global_step_{state.global_step}"]
        self._wandb.log_artifact(artifact, aliases=aliases)

    def on_train_end(
        self, args: Args, state: TrainerState, control: TrainerControl, trainer: Kwarg = None, **kwargs: Kwarg
    ) -> None:
        if self._log_model == "false" or not self._is_set_up or not state.is_world_process_zero or trainer is None:
            return
        facts = self._summary()
        if args.load_best_model_at_end:
            facts = {
                f"eval/{args.metric_for_best_model}": state.best_metric,
                "train/total_floss": state.total_flos,
                "model/num_parameters": self._wandb.config.get("model/num_parameters"),
            }
        artifact = self._artifact(args, {**facts, "final_model": True})
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_model(folder)
            artifact.add_dir(folder)
            self._wandb.run.log_artifact(artifact, aliases=["final_model"])

    def _summary(self) -> dict[str, float | None]:
        return {k: v for k, v in numbers_of(dict(self._wandb.summary)).items() if not k.startswith("_")}

    def on_predict(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:  # type: ignore[override]  # metrics are among kwargs
        if not self._is_set_up:
            self.setup(args, state, kwargs.get("model"))
        if state.is_world_process_zero:
            self._wandb.log(rewrite_logs(kwargs["metrics"]))


RUN_ID = "MLFLOW_RUN_ID"  # MLflow reads and removes it at the next start of a run

_MLflowCallback: Any = object  # transformers' class follows `MLflowRuns` in the class that `report_to` makes


class MLflowRuns(_MLflowCallback):
    """Our additions to transformers' `MLflowCallback`, and to its `DagsHubCallback`."""

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
