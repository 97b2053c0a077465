"""Faults in training code: models, losses, overrides, metrics, callbacks, optimizers, saving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers import toy
from hf_compat import Trainer, TrainerCallback
from hf_compat.errors import (
    CallbackError,
    CheckpointWriteError,
    DataError,
    HfCompatError,
    LossError,
    MissingMetric,
    OverrideError,
)
from sweeps.faults.data_faults import Data
from sweeps.faults.user_faults import (
    DEAD_WORKER,
    EVAL_ROWS,
    MARK,
    UPDATES,
    Expected,
    Switch,
    UserError,
    fault,
    ours,
    own,
    throw,
    well,
)

# ---- models ----


def forward(do: Callable[[dict], Any], at: int = 6, training: bool = True) -> Callable[[Switch], dict[str, Any]]:
    """Return parts whose model answers a forward pass by `do` of its right answer."""

    def parts(switch: Switch) -> dict[str, Any]:
        class Model(toy.Classifier):
            def forward(self, x, labels=None):
                answer = super().forward(x, labels)
                place = "training" if self.training else "evaluation"
                is_here = self.training is training and switch.reaches(place, at)
                return do(answer) if is_here else answer

        return {"model": Model}

    return parts


ANSWERS: list[tuple[str, Callable[[dict], Any], Expected]] = [
    ("returns None", lambda out: None, ours(LossError, "None")),
    ("returns an empty dict", lambda out: {}, ours(LossError, "loss")),
    ("returns no loss", lambda out: {"logits": out["logits"]}, ours(LossError, "loss", "logits")),
    ("returns text", lambda out: "text", ours(LossError, "str")),
    ("returns a number", lambda out: 0.5, ours(LossError, "float")),
    ("returns a float loss", lambda out: {**out, "loss": 0.5}, ours(LossError, "float")),
    ("returns a loss that is None", lambda out: {**out, "loss": None}, ours(LossError, "loss")),
    ("returns a loss for each sample", lambda out: {**out, "loss": out["logits"].sum(1)}, ours(LossError, "(2,)")),
    ("returns a loss without gradients", lambda out: {**out, "loss": out["loss"].detach()}, ours(LossError, "grad")),
    ("returns an integer loss", lambda out: {**out, "loss": torch.tensor(1)}, ours(LossError, "grad")),
    ("returns a loss elsewhere", lambda out: {**out, "loss": out["loss"].to("meta")}, ours(LossError, "meta")),
    ("raises", lambda out: throw(), own()),
    ("raises StopIteration", lambda out: throw(StopIteration), own(StopIteration)),
    ("raises KeyboardInterrupt", lambda out: throw(KeyboardInterrupt), own(KeyboardInterrupt)),
    ("raises SystemExit", lambda out: throw(SystemExit(3)), own(SystemExit, "3")),
    ("raises GeneratorExit", lambda out: throw(GeneratorExit), own(GeneratorExit)),
]

for _name, _do, _expected in ANSWERS:
    fault("model", _name, _expected)(forward(_do))

fault("model", "raises at its first pass", own())(forward(lambda out: throw(), at=1))
fault("model", "raises in the last update", own(), then="resume")(forward(lambda out: throw(), at=24))
fault("model", "raises in an evaluation", own(), then="resume")(forward(lambda out: throw(), at=4, training=False))
fault("model", "stops an evaluation", own(StopIteration))(
    forward(lambda out: throw(StopIteration), at=2, training=False)
)
fault("model", "gives NaN", well("nonfinite_steps", "not finite"))(
    forward(lambda out: {**out, "loss": out["loss"] * 0 + out["loss"].new_tensor(float("nan")).detach()})
)


@fault("model", "has nothing to train", ours(LossError, "grad"))
def _(switch: Switch) -> dict[str, Any]:
    def freeze(model: nn.Module, wanted: bool) -> None:
        for parameter in model.parameters():
            parameter.requires_grad = wanted

    class Model(toy.Classifier):
        def __init__(self):
            super().__init__()
            freeze(self, not switch.on)

    return {"model": Model, "repair": lambda trainer: freeze(trainer.model, True)}


@fault("model_init", "raises", own())
def _(switch: Switch) -> dict[str, Any]:
    return {"model_init": lambda: throw() if switch.reaches("made", 2) else toy.Classifier()}


@fault("model_init", "returns None", Expected(kinds=(RuntimeError,), words=("model_init", "None")))
def _(switch: Switch) -> dict[str, Any]:
    return {"model_init": lambda: None if switch.reaches("made", 2) else toy.Classifier()}


# ---- losses and steps ----


def loss_function(do: Callable[[torch.Tensor], Any], at: int = 6) -> Callable[[Switch], dict[str, Any]]:
    def parts(switch: Switch) -> dict[str, Any]:
        def loss(outputs, labels, num_items_in_batch=None):
            right = nn.functional.cross_entropy(outputs["logits"], labels)
            return do(right) if switch.reaches("loss", at) else right

        class Model(toy.Classifier):
            def forward(self, x, labels=None):
                return super().forward(x)

        return {"compute_loss_func": loss, "model": Model}

    return parts


fault("compute_loss_func", "raises", own())(loss_function(lambda loss: throw()))
fault("compute_loss_func", "raises at once", own())(loss_function(lambda loss: throw(), at=1))
fault("compute_loss_func", "returns None", ours(LossError, "None"))(loss_function(lambda loss: None))
fault("compute_loss_func", "returns a number", ours(LossError, "float"))(loss_function(lambda loss: loss.item()))


def method(name: str, do: Callable[[Any, Any], Any], at: int = 2) -> Callable[[Switch], dict[str, Any]]:
    """Return parts whose Trainer's method answers a call by `do(trainer, right answer)`."""

    def parts(switch: Switch) -> dict[str, Any]:
        def override(self, *args, **kwargs):
            answer = getattr(super(Own, self), name)(*args, **kwargs)
            return do(self, answer) if switch.reaches(name, at) else answer

        Own = type("Own", (Trainer,), {name: override})
        return {"trainer": Own}

    return parts


METHODS: list[tuple[str, str, Callable[[Any, Any], Any], int, Expected]] = [
    ("compute_loss", "raises", lambda t, a: throw(), 6, own()),
    ("compute_loss", "returns None", lambda t, a: None, 6, ours(LossError, "compute_loss", "None")),
    ("compute_loss", "returns a tuple", lambda t, a: (a, {}), 6, ours(LossError, "compute_loss", "tuple")),
    ("compute_loss", "returns a number", lambda t, a: 0.5, 6, ours(LossError, "compute_loss", "float")),
    ("training_step", "raises", lambda t, a: throw(), 6, own()),
    ("training_step", "returns None", lambda t, a: None, 6, ours(LossError, "training_step", "None")),
    ("training_step", "returns a number", lambda t, a: 0.5, 6, ours(LossError, "training_step", "0.5")),
    ("get_batch_samples", "raises", lambda t, a: throw(), 4, own()),
    ("get_batch_samples", "returns None", lambda t, a: None, 4, ours(OverrideError, "get_batch_samples", "None")),
    ("prediction_step", "raises", lambda t, a: throw(), 2, own()),
    ("prediction_step", "returns None", lambda t, a: None, 2, ours(OverrideError, "prediction_step", "None")),
    ("evaluation_loop", "raises", lambda t, a: throw(), 1, own()),
    ("evaluate", "raises", lambda t, a: throw(), 1, own()),
    ("log", "raises", lambda t, a: throw(), 3, own()),
    ("create_optimizer", "raises", lambda t, a: throw(), 1, own()),
    ("create_scheduler", "raises", lambda t, a: throw(), 1, own()),
    ("floating_point_ops", "raises", lambda t, a: throw(), 3, own()),
    ("save_model", "raises", lambda t, a: throw(), 2, own()),
    ("_save", "raises", lambda t, a: throw(), 2, own()),
    ("_save", "runs out of disk", lambda t, a: throw(OSError(28, MARK)), 2, ours(CheckpointWriteError, "checkpoint-6")),
    ("_save_checkpoint", "raises", lambda t, a: throw(), 2, own()),
    ("_save_optimizer_and_scheduler", "raises", lambda t, a: throw(), 2, own()),
    ("_load_best_model", "raises", lambda t, a: throw(), 1, own()),
]

for _method, _name, _do, _at, _expected in METHODS:
    fault(_method, _name, _expected, then="resume" if "save" in _method else "again")(method(_method, _do, _at))


# ---- evaluation ----


def metrics(do: Callable[[Any], Any], **args: Any) -> Callable[[Switch], dict[str, Any]]:
    def parts(switch: Switch) -> dict[str, Any]:
        def compute(prediction: Any) -> Any:
            right = {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}
            return do(right) if switch.reaches("metrics", 2) else right

        return {"compute_metrics": compute, "args": args}

    return parts


fault("compute_metrics", "raises", own())(metrics(lambda right: throw()))
fault("compute_metrics", "raises KeyboardInterrupt", own(KeyboardInterrupt))(
    metrics(lambda right: throw(KeyboardInterrupt))
)
fault("compute_metrics", "raises StopIteration", own(StopIteration))(metrics(lambda right: throw(StopIteration)))
fault("compute_metrics", "returns None", ours(HfCompatError, "compute_metrics", "None"))(metrics(lambda right: None))
fault("compute_metrics", "returns a number", ours(HfCompatError, "compute_metrics", "float"))(
    metrics(lambda right: 0.5)
)
fault("compute_metrics", "leaves the best metric out", ours(MissingMetric, "eval_right"))(
    metrics(lambda right: {}, metric_for_best_model="right")
)


def logits(do: Callable[[Any], Any]) -> Callable[[Switch], dict[str, Any]]:
    def parts(switch: Switch) -> dict[str, Any]:
        def preprocess(values: Any, labels: Any) -> Any:
            return do(values) if switch.reaches("logits", 4) else values

        return {**metrics(lambda right: right)(switch), "preprocess_logits_for_metrics": preprocess}

    return parts


fault("preprocess_logits", "raises", own())(logits(lambda values: throw()))
fault("preprocess_logits", "changes the shape", ours(DataError, "(2, 3)", "(2, 3, 1)"))(
    logits(lambda values: values.unsqueeze(-1))
)


EVALS: list[tuple[str, Callable[[Switch], Any], Expected, Expected | None]] = [
    ("has a sample None", lambda s: Data(s, lambda i: None, 3, EVAL_ROWS), ours(DataError, "None", "sample"), None),
    ("raises", lambda s: Data(s, lambda i: throw(), 3, EVAL_ROWS), own(), None),
    (
        "raises StopIteration",
        lambda s: Data(s, lambda i: throw(StopIteration), 3, EVAL_ROWS),
        ours(DataError, "StopIteration"),
        None,
    ),
    (
        "raises KeyboardInterrupt",
        lambda s: Data(s, lambda i: throw(KeyboardInterrupt), 3, EVAL_ROWS),
        own(KeyboardInterrupt),
        DEAD_WORKER,
    ),
    (
        "is a generator",
        lambda s: (row for row in EVAL_ROWS) if s.on else EVAL_ROWS,
        ours(DataError, "eval_dataset", "generator"),
        None,
    ),
    ("is a path", lambda s: "eval.json" if s.on else EVAL_ROWS, ours(DataError, "eval_dataset", "str"), None),
    (
        "has a bad part",
        lambda s: {"a": EVAL_ROWS, "b": 3} if s.on else EVAL_ROWS,
        ours(DataError, "eval_dataset", "'b'", "int"),
        None,
    ),
    ("is empty", lambda s: [] if s.on else EVAL_ROWS, ours(MissingMetric, "eval_loss"), None),
    (
        "has no labels",
        lambda s: [{"x": row["x"]} for row in EVAL_ROWS] if s.on else EVAL_ROWS,
        ours(MissingMetric, "eval_loss"),
        None,
    ),
]


def healthy_eval(trainer: Trainer) -> None:
    if not isinstance(trainer.eval_dataset, Data):
        trainer.eval_dataset = EVAL_ROWS


for _name, _make, _expected, _in_workers in EVALS:

    @fault("eval_dataset", _name, _expected, in_workers=_in_workers, repair=healthy_eval)
    def _(switch: Switch, make=_make) -> dict[str, Any]:
        return {"eval_dataset": make(switch)}


# ---- callbacks ----


def callback(event: str, error: type[BaseException] | BaseException, at: int = 1) -> Callable[[Switch], dict[str, Any]]:
    def parts(switch: Switch) -> dict[str, Any]:
        def react(self, args, state, control, **kwargs):
            if switch.reaches(event, at):
                throw(error)

        return {"callbacks": [type("Fails", (TrainerCallback,), {event: react})()]}

    return parts


for _event in toy.EVENTS:
    if _event != "on_predict":
        fault("callback", f"{_event} raises", own(), then="resume" if _event == "on_epoch_end" else "again")(
            callback(_event, UserError)
        )
for _event in ("on_step_end", "on_save", "on_evaluate", "on_epoch_end", "on_train_begin"):
    fault("callback", f"{_event} interrupts", own(KeyboardInterrupt))(callback(_event, KeyboardInterrupt))
    fault("callback", f"{_event} leaves", own(SystemExit, "3"))(callback(_event, SystemExit(3)))
    fault("callback", f"{_event} raises StopIteration", own(StopIteration))(callback(_event, StopIteration))
fault("callback", "raises in the last update", own(), then="resume")(callback("on_step_end", UserError, UPDATES))


@fault("callback", "returns a dict", ours(CallbackError, "on_step_end", "stop"))
def _(switch: Switch) -> dict[str, Any]:
    class Odd(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return {"stop": True} if switch.on else control

    return {"callbacks": [Odd()]}


@fault("callback", "its state raises", own())
def _(switch: Switch) -> dict[str, Any]:
    from transformers.trainer_callback import ExportableState

    class Stateful(TrainerCallback, ExportableState):
        def state(self):
            return throw() if switch.reaches("state", 3) else {"args": {}, "attributes": {}}

    return {"callbacks": [Stateful()]}


# ---- optimizers and schedules ----


def optimizer(name: str, do: Callable[[], Any], at: int) -> Callable[[Switch], dict[str, Any]]:
    def parts(switch: Switch) -> dict[str, Any]:
        def override(self, *args, **kwargs):
            if switch.reaches(name, at):
                do()
            return getattr(super(Own, self), name)(*args, **kwargs)

        Own = type("Own", (torch.optim.AdamW,), {name: override})
        return {"optimizer_cls_and_kwargs": (Own, {"lr": 1e-2})}

    return parts


fault("optimizer", "__init__ raises", own())(optimizer("__init__", throw, 1))
fault("optimizer", "step raises", own())(optimizer("step", throw, 4))
fault("optimizer", "step raises StopIteration", own(StopIteration))(optimizer("step", lambda: throw(StopIteration), 4))
fault("optimizer", "state_dict raises", own(), then="resume")(optimizer("state_dict", throw, 2))


def schedule(name: str, at: int) -> Callable[[Switch], dict[str, Any]]:
    def parts(switch: Switch) -> dict[str, Any]:
        def override(self, *args, **kwargs):
            if switch.reaches(name, at):
                throw()
            return getattr(super(Own, self), name)(*args, **kwargs)

        Own = type("Own", (torch.optim.lr_scheduler.ExponentialLR,), {name: override})

        class Scheduling(Trainer):
            def create_scheduler(self, num_training_steps, optimizer=None):
                if self.lr_scheduler is None:
                    self.lr_scheduler = Own(optimizer or self.optimizer, 0.9)
                    self._created_lr_scheduler = True
                return self.lr_scheduler

        return {"trainer": Scheduling}

    return parts


fault("schedule", "step raises", own())(schedule("step", 5))
fault("schedule", "state_dict raises", own(), then="resume")(schedule("state_dict", 2))


# ---- what is saved with the model ----


@fault("processing_class", "cannot be saved", own(), then="resume")
def _(switch: Switch) -> dict[str, Any]:
    class Processor:
        def save_pretrained(self, folder: str) -> None:
            if switch.reaches("saved", 2):
                throw()

    return {"processing_class": Processor()}


@fault("model", "state_dict raises", own(), then="resume")
def _(switch: Switch) -> dict[str, Any]:
    class Model(toy.Classifier):
        def state_dict(self, *args, **kwargs):
            return throw() if switch.reaches("weights", 3) else super().state_dict(*args, **kwargs)

    return {"model": Model}
