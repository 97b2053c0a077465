"""Callbacks, loggers and checkpoints, as entries of `config.yaml`."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.callbacks import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    eval_metric_name,
)
from hf_compat.hf.enums import SaveStrategy
from hf_compat.runtime.inspection import home_of
from hf_compat.tools.ejection.expressions import Expressions
from hf_compat.tools.ejection.findings import CannotBeWritten, Findings
from hf_compat.tools.ejection.training_part import RunPart
from hf_compat.trainer import Trainer

_CALLBACKS = "lightning.pytorch.callbacks"
_LOGGERS = "lightning.pytorch.loggers"
# Lightning's loggers by the names of `report_to`.
_TRACKERS = {
    "tensorboard": "TensorBoardLogger",
    "wandb": "WandbLogger",
    "mlflow": "MLFlowLogger",
    "comet_ml": "CometLogger",
    "neptune": "NeptuneLogger",
}
# Events that `hf_events.py` fires.
_FIRED = frozenset(
    (
        "on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin",
        "on_step_end", "on_evaluate", "on_save", "on_log", "on_prediction_step", "on_predict", "on_push_begin",
    )
)  # fmt: skip
# Flags by which a callback steers the run. Lightning has only a counterpart of `should_training_stop`.
_STEERING = ("should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Entry(NamedTuple):
    """An object that Lightning's command line makes, with its arguments as JSON, which is also YAML."""

    class_path: str
    init_args: str = ""


@dataclass
class CallbackPart:
    """The entries under `trainer` in the configuration."""

    callbacks: list[Entry] = field(default_factory=list)
    loggers: list[Entry] = field(default_factory=list)
    checkpoints: bool = False
    best_metric: str | None = None  # the metric of the best checkpoint, which is loaded at the end
    early_stopping_threshold: bool = False  # whether early stopping has a threshold, which Lightning reads differently
    own_callbacks: list[str] = field(default_factory=list)
    callbacks_left: list[str] = field(default_factory=list)


def describe_callbacks(trainer: Trainer, run: RunPart, write: Expressions, findings: Findings) -> CallbackPart:
    """Translate the callbacks, loggers and checkpoints of the run to Lightning's."""
    part = CallbackPart()
    args = trainer.args
    part.loggers.append(Entry(f"{_LOGGERS}.CSVLogger", json.dumps({"save_dir": "output", "name": "logs"})))
    for tracker in args.report_to or ():
        if tracker not in _TRACKERS:
            findings.tell(f"The tracker {tracker!r} is left out: Lightning has no logger for it.")
            continue
        options: dict[str, object] = {} if tracker in ("comet_ml", "neptune") else {"save_dir": "output"}
        if tracker == "wandb":
            options |= {"project": "huggingface"} | ({"name": args.run_name} if args.run_name else {})
        part.loggers.append(Entry(f"{_LOGGERS}.{_TRACKERS[tracker]}", json.dumps(options)))
    monitored: dict[str, object] = {
        "monitor": eval_metric_name(args.metric_for_best_model or "loss"),
        "mode": "max" if args.greater_is_better else "min",
    }
    part.checkpoints = args.save_strategy != SaveStrategy.NO
    if part.checkpoints:
        options_of = list(_checkpoints(args, run, monitored, findings))
        part.callbacks += [Entry(f"{_CALLBACKS}.ModelCheckpoint", json.dumps(one)) for one in options_of]
        part.best_metric = str(monitored["monitor"]) if args.load_best_model_at_end else None
    for callback in trainer.callback_handler.callbacks:
        _add(part, callback, monitored, write, findings)
    for other in trainer._callbacks.lightning:
        findings.tell(f"The Lightning callback {type(other).__name__} is left out: add it to `config.yaml`.")
    return part


def _checkpoints(
    args: TrainingArguments, run: RunPart, monitored: dict[str, object], findings: Findings
) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    place: dict[str, object] = {"dirpath": "output/checkpoints", "filename": "{epoch}-{step}"}
    if args.save_strategy != SaveStrategy.BEST:
        by_step = args.save_strategy == SaveStrategy.STEPS
        by_epoch = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
        # of several the newest stay, as with `save_total_limit`
        limited = {"monitor": "step", "mode": "max", "save_top_k": args.save_total_limit}
        options = {**place, **({"every_n_train_steps": run.save_steps} if by_step else by_epoch)}
        found.append(options | (limited if args.save_total_limit else {"save_top_k": -1}))
    if run.saves_at_end:
        # the only multiple of the last update's number is that update
        found.append({**place, "every_n_train_steps": run.max_steps})
        if args.save_total_limit:
            findings.tell("The last update's checkpoint is kept besides those that `save_total_limit` leaves.")
    if args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST:
        found.append({"dirpath": "output/checkpoints", "filename": "best", "save_top_k": 1, **monitored})
    return found


def _add(
    part: CallbackPart, callback: object, monitored: dict[str, object], write: Expressions, findings: Findings
) -> None:
    kind = type(callback)
    if type(callback) is EarlyStoppingCallback:
        options = {**monitored, "patience": callback.early_stopping_patience}
        path = f"{_CALLBACKS}.EarlyStopping"
        if callback.early_stopping_threshold:
            part.early_stopping_threshold = True
            options["threshold"] = callback.early_stopping_threshold
            path = "callbacks.EarlyStoppingByThreshold"
        part.callbacks.append(Entry(path, json.dumps(options)))
    elif isinstance(callback, (DefaultFlowCallback, ProgressCallback, PrinterCallback)):
        return
    elif kind.__module__.startswith(("hf_compat.", "transformers.")):
        if "tracker" not in kind.__module__ and "integration" not in kind.__module__:
            findings.tell(f"The callback {kind.__name__} is left out.")
    else:
        is_of_script = write.recorder.is_of_script
        try:
            events = [name for name in dir(kind) if name.startswith("on_") and name not in _FIRED]
            unheard = [name for name in events if is_of_script(home_of(getattr(kind, name)))]
            if unheard:
                raise CannotBeWritten(f"it hears {', '.join(unheard)}, and the adapter does not fire that")
            texts = [ast.unparse(write.code.node_of(one)) for one in kind.__mro__ if is_of_script(one.__module__)]
            steers = [name for name in sorted(_STEERING) if any(name in text for text in texts)]
            if steers:
                raise CannotBeWritten(f"it sets {', '.join(steers)}, and Lightning's loop has no such flag")
            part.own_callbacks.append(write.of(callback))
        except CannotBeWritten as error:
            part.callbacks_left += findings.leave(
                f"The callback {kind.__name__} ({write.code.where(kind)}) cannot be taken over: {error}",
                "the same events as hooks of a `lightning.pytorch.Callback`",
            )
