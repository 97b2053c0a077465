"""Callbacks, loggers and checkpoints, as entries of `config.yaml`."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field

from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.builtin_callbacks import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    eval_metric_name,
)
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.runtime.inspection import home_of
from hf_compat.tools.ejection.expressions import Expressions
from hf_compat.tools.ejection.findings import CannotBeWritten, Findings
from hf_compat.tools.ejection.run_part import RunPart
from hf_compat.trainer import Trainer

_CALLBACKS = "lightning.pytorch.callbacks"
_LOGGERS = "lightning.pytorch.loggers"
# What `report_to` names, in Lightning.
TRACKERS = {
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
# Flags by which a callback steers the run; Lightning has a word for `should_training_stop` only.
_STEERING = ("should_epoch_stop", "should_save", "should_evaluate", "should_log")


@dataclass(frozen=True, slots=True)
class Entry:
    """An object that Lightning's command line makes: its class, and its arguments as JSON, which is YAML, too."""

    class_path: str
    init_args: str = ""


@dataclass(slots=True)
class CallbackPart:
    """What stands under `trainer` in the configuration.

    Args:
        callbacks: Callbacks, the log of training left out.
        loggers: Loggers.
        checkpoints: Whether checkpoints are written.
        best_metric: The metric of the best checkpoint that is loaded at the end; None where none is.
        threshold: Whether early stopping has a threshold, which Lightning reads in another way.
        own: Expressions of the script's own callbacks.
        left: What is left to do of them.
    """

    callbacks: list[Entry] = field(default_factory=list)
    loggers: list[Entry] = field(default_factory=list)
    checkpoints: bool = False
    best_metric: str | None = None
    threshold: bool = False
    own: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def describe_callbacks(trainer: Trainer, run: RunPart, write: Expressions, findings: Findings) -> CallbackPart:
    """Return callbacks, loggers and checkpoints of the run in Lightning's words."""
    part = CallbackPart()
    args = trainer.args
    part.loggers.append(Entry(f"{_LOGGERS}.CSVLogger", json.dumps({"save_dir": "output", "name": "logs"})))
    for tracker in args.report_to or ():
        if tracker not in TRACKERS:
            findings.tell(f"The tracker {tracker!r} is left out: Lightning has no logger for it.")
            continue
        options: dict[str, object] = {"save_dir": "output"}
        if tracker == "wandb":
            options |= {"project": "huggingface"} | ({"name": args.run_name} if args.run_name else {})
        if tracker in ("comet_ml", "neptune"):
            options = {}
        part.loggers.append(Entry(f"{_LOGGERS}.{TRACKERS[tracker]}", json.dumps(options)))
    _add_checkpoints(part, args, run, findings)
    for callback in trainer.callback_handler.callbacks:
        _add(part, callback, args, write, findings)
    for callback in trainer._callbacks.lightning:
        findings.tell(f"The Lightning callback {type(callback).__name__} is left out: add it to `config.yaml`.")
    return part


def _monitored(args: TrainingArguments) -> dict[str, object]:
    return {
        "monitor": eval_metric_name(args.metric_for_best_model or "loss"),
        "mode": "max" if args.greater_is_better else "min",
    }


def _add_checkpoints(part: CallbackPart, args: TrainingArguments, run: RunPart, findings: Findings) -> None:
    """Write the checkpoints that the arguments ask for: by updates or epochs, that of the end, and the best one."""
    strategy = args.save_strategy
    part.checkpoints = strategy != SaveStrategy.NO
    if not part.checkpoints:
        return
    path = f"{_CALLBACKS}.ModelCheckpoint"
    place: dict[str, object] = {"dirpath": "output/checkpoints", "filename": "{epoch}-{step}"}
    if strategy != SaveStrategy.BEST:
        by_step = strategy == SaveStrategy.STEPS
        by_epoch = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
        # of several the newest stay, as with `save_total_limit`
        limited = {"monitor": "step", "mode": "max", "save_top_k": args.save_total_limit}
        options = {**place, **({"every_n_train_steps": run.save_steps} if by_step else by_epoch)}
        options |= limited if args.save_total_limit else {"save_top_k": -1}
        part.callbacks.append(Entry(path, json.dumps(options)))
    if run.saves_at_end:
        # a multiple of the last update's number is that one alone
        part.callbacks.append(Entry(path, json.dumps({**place, "every_n_train_steps": run.counts.max_updates})))
        if args.save_total_limit:
            findings.tell("The last update's checkpoint is kept besides those that `save_total_limit` leaves.")
    if args.load_best_model_at_end or strategy == SaveStrategy.BEST:
        best = {"dirpath": "output/checkpoints", "filename": "best", "save_top_k": 1, **_monitored(args)}
        part.callbacks.append(Entry(path, json.dumps(best)))
    if args.load_best_model_at_end:
        part.best_metric = str(_monitored(args)["monitor"])


def _add(part: CallbackPart, callback: object, args: TrainingArguments, write: Expressions, findings: Findings) -> None:
    """Write one callback of the run."""
    home = type(callback).__module__
    if type(callback) is EarlyStoppingCallback:
        options = {**_monitored(args), "patience": callback.early_stopping_patience}
        if callback.early_stopping_threshold:
            part.threshold = True
            options["threshold"] = callback.early_stopping_threshold
            part.callbacks.append(Entry("callbacks.EarlyStoppingByThreshold", json.dumps(options)))
        else:
            part.callbacks.append(Entry(f"{_CALLBACKS}.EarlyStopping", json.dumps(options)))
    elif isinstance(callback, (DefaultFlowCallback, ProgressCallback, PrinterCallback)):
        return
    elif home.startswith(("hf_compat.", "transformers.")):
        if "tracker" not in home and "integration" not in home:
            findings.tell(f"The callback {type(callback).__name__} is left out.")
    else:
        kind = type(callback)
        try:
            unheard = [
                name
                for name in dir(kind)
                if name.startswith("on_")
                and name not in _FIRED
                and write.recorder.is_of_script(home_of(getattr(kind, name)))
            ]
            if unheard:
                raise CannotBeWritten(f"it hears {', '.join(unheard)}, and the adapter does not fire that")
            steers = {name for name in _STEERING for one in kind.__mro__ if name in _source(one, write)}
            if steers:
                raise CannotBeWritten(f"it sets {', '.join(sorted(steers))}, and Lightning's loop has no such flag")
            part.own.append(write.of(callback))
        except CannotBeWritten as error:
            part.left += findings.leave(
                f"The callback {kind.__name__} ({write.code.where(kind)}) cannot be taken over: {error}",
                "the same events as hooks of a `lightning.pytorch.Callback`",
            )


def _source(kind: type, write: Expressions) -> str:
    if not write.recorder.is_of_script(kind.__module__):
        return ""
    return ast.unparse(write.code.node_of(kind))


def logs_by_epoch(args: TrainingArguments) -> bool:
    """Return whether training is logged at the end of each epoch."""
    return args.logging_strategy == IntervalStrategy.EPOCH
