"""Looks on while transformers' Trainer, or ours in its place, trains: what happens at which update.

Nothing is drawn at random, no callback is added, and each method that is wrapped keeps its signature and its answer.
"""

from __future__ import annotations

import copy
import functools
import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .recording import Record, digest, fingerprint, tensors_in

if TYPE_CHECKING:
    import torch

Method = Callable[..., object]
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class _State(Protocol):
    """The part of a `TrainerState` that is read."""

    global_step: int
    epoch: float | None
    log_history: list[dict[str, float]]


class _Control(Protocol):
    """The part of a `TrainerControl` that is set."""

    should_training_stop: bool


class _Optimizer(Protocol):
    """Of an optimizer, its groups."""

    param_groups: list[dict[str, float]]


class _Model(Protocol):
    """Of a model, its weights."""

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...

    def state_dict(self) -> dict[str, torch.Tensor]: ...


class _Trainer(Protocol):
    """Of a Trainer, what is recorded."""

    state: _State
    model: _Model


class _Output(Protocol):
    """What `train` and `evaluation_loop` return."""

    metrics: dict[str, float] | None


@dataclass
class _Update:
    """One update under way: when it began, and how long the recording took since."""

    began: float = 0.0
    recording: float = 0.0
    losses: int = 0
    gradients: float | None = None


@dataclass(frozen=True)
class Overrides:
    """What counts in place of what the script says.

    Args:
        output_folder: Each output folder that the script names becomes a folder of this name, numbered.
        updates: Where each training is stopped; 0 lets it run.
    """

    output_folder: str
    updates: int


@dataclass
class Observer:
    """Wraps the methods that a run passes through, in one process.

    Args:
        record: Where it is written down.
        overrides: What counts in place of what the script says.
    """

    record: Record
    overrides: Overrides
    trainings: int = 0
    _depth: int = 0
    _steps: int = 0
    _updates: int = 0
    _predictions: int = 0
    _update: _Update = field(default_factory=_Update)
    _folders: dict[str, str] = field(default_factory=dict)
    _wrapped_steps: set[object] = field(default_factory=set)

    def install(self) -> None:
        """Wrap the methods of the names that `import transformers` gives now."""
        trainer = importlib.import_module("transformers.trainer").Trainer
        self._wrap(trainer, "train", self._train)
        self._wrap(trainer, "training_step", self._training_step)
        self._wrap(trainer, "evaluation_loop", self._evaluation_loop)
        self._wrap(importlib.import_module("transformers.trainer_callback").CallbackHandler, "call_event", self._event)
        arguments = importlib.import_module("transformers.training_args").TrainingArguments
        self._wrap(arguments, "__post_init__", self._override)
        for owner in (trainer, importlib.import_module("transformers.utils.hub").PushToHubMixin):
            self._wrap(owner, "push_to_hub", self._no_push)
        self._wrap(importlib.import_module("torch"), "save", functools.partial(_save_without_tokens, arguments))

    def _wrap_own_steps(self, trainer: _Trainer) -> None:
        """Look at each `training_step` that stands in the place of the Trainer's own, in a class or on the object."""
        for owner in (trainer, *type(trainer).__mro__):
            is_own = isinstance(owner, type) and owner.__module__.partition(".")[0] in ("transformers", "hf_compat")
            if "training_step" in vars(owner) and not is_own and owner not in self._wrapped_steps:
                self._wrapped_steps.add(owner)
                takes_trainer = isinstance(owner, type)
                around = self._training_step if takes_trainer else functools.partial(self._own_step, trainer)
                self._wrap(owner, "training_step", around)

    def _own_step(self, trainer: _Trainer, step: Method, *arguments: object, **keywords: object) -> object:
        def of_trainer(_: _Trainer, *arguments: object, **keywords: object) -> object:
            return step(*arguments, **keywords)

        return self._training_step(of_trainer, trainer, *arguments, **keywords)

    def _wrap(self, owner: object, name: str, around: Callable[..., object]) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def wrapped(*arguments: object, **keywords: object) -> object:
            return around(inner, *arguments, **keywords)

        setattr(owner, name, wrapped)

    # what counts in place of what the script says

    def _override(self, finish: Method, args: object) -> None:
        given = vars(args)
        replaced: dict[str, object] = {"output_dir": self._folder_for(str(given.get("output_dir")))}
        replaced |= {} if given.get("report_to") in (None, "none", ["none"], []) else {"report_to": "none"}
        replaced |= {"push_to_hub": False} if given.get("push_to_hub") else {}
        for name, value in replaced.items():
            if given.get(name) != value:
                self.record.write("override", name=name, was=_told(given.get(name)), now=value)
                setattr(args, name, value)
        finish(args)

    def _folder_for(self, named: str) -> str:
        """Return the folder in place of one that the script names: the same for the same name."""
        if named in self._folders.values():  # arguments made of arguments
            return named
        number = len(self._folders) + 1
        place = self.overrides.output_folder + (f"-{number}" if number > 1 else "")
        return self._folders.setdefault(named, place)

    def _no_push(self, push: Method, *arguments: object, **keywords: object) -> None:
        self.record.write("override", name="push_to_hub()", was="called", now="left out")

    # what is looked at

    def _train(self, train: Method, trainer: _Trainer, *arguments: object, **keywords: object) -> object:
        self.trainings += 1
        number, self._updates = self.trainings, 0
        self.record.write("train", training=number, trainer=type(trainer).__name__)
        self._depth += 1
        self._wrap_own_steps(trainer)
        try:
            output = train(trainer, *arguments, **keywords)
        finally:
            self._depth -= 1
        metrics = getattr(output, "metrics", None)
        self.record.write("trained", training=number, update=trainer.state.global_step, metrics=dict(metrics or {}))
        if not self.record.rank:
            weights = trainer.model.state_dict()
            file = self.record.keep(f"weights-{number}", {k: v for k, v in weights.items() if hasattr(v, "dtype")})
            digests = {name: digest(tensor) for name, tensor in weights.items() if hasattr(tensor, "dtype")}
            self._write("weights", trainer.state, file=file, digests=digests)
        self.record.flush()
        return output

    def _training_step(self, step: Method, trainer: _Trainer, *arguments: object, **keywords: object) -> object:
        self._steps += 1
        try:
            loss = step(trainer, *arguments, **keywords)
        finally:
            self._steps -= 1
        if self._steps:  # an override calls the method above it: its own answer is the micro-batch's loss
            return loss
        began = time.perf_counter()
        value = float(loss.item()) if hasattr(loss, "item") else str(loss)
        self._write("loss", trainer.state, done=1, micro_batch=self._update.losses, value=value)
        self._update.losses += 1
        self._update.recording += time.perf_counter() - began
        return loss

    def _evaluation_loop(self, loop: Method, trainer: _Trainer, *arguments: object, **keywords: object) -> object:
        output = loop(trainer, *arguments, **keywords)
        predictions = getattr(output, "predictions", None)
        found = dict(tensors_in({"predictions": predictions, "labels": getattr(output, "label_ids", None)}))
        if predictions is not None and found:
            self._predictions += 1
            file = self.record.keep(f"predictions-{self._predictions}", found)
            digests = {name: digest(tensor) for name, tensor in found.items()}
            self._write("predictions", trainer.state, number=self._predictions, file=file, digests=digests)
        return output

    def _event(
        self,
        call: Method,
        handler: object,
        event: str,
        args: object,
        state: _State,
        control: object,
        **keywords: object,
    ) -> object:
        if event == "on_step_begin":
            self._update = _Update(began=time.perf_counter())
        elif event == "on_pre_optimizer_step":
            model = vars(handler).get("model")
            began = time.perf_counter()
            if model is not None:
                gradients = (one.grad for one in model.parameters() if one.grad is not None and not one.grad.is_sparse)
                self._update.gradients = fingerprint(gradients)[1]
            self._update.recording += time.perf_counter() - began
        elapsed = time.perf_counter() - self._update.began - self._update.recording
        if event == "on_log":
            self._write("log", state, values=dict(_numbers(keywords.get("logs"))))
        elif event in ("on_evaluate", "on_predict"):
            self._write("metrics", state, event=event, values=dict(_numbers(keywords.get("metrics"))))
        answer = call(handler, event, args, state, control, **keywords)
        if event == "on_step_end":
            self._end_update(handler, state, elapsed)
            self._updates += 1
            if 0 < self.overrides.updates <= self._updates:
                told: _Control = answer  # type: ignore[assignment]  # both packages' controls have the flag
                told.should_training_stop = True
        flags = "".join(str(int(bool(getattr(answer, name, False)))) for name in _FLAGS)
        self._write("event", state, event=event, epoch=float(state.epoch or 0), flags=flags)
        return answer

    def _end_update(self, handler: object, state: _State, seconds: float) -> None:
        model: _Model | None = vars(handler).get("model")
        optimizer: _Optimizer | None = vars(handler).get("optimizer")
        trained = [] if model is None else [one for one in model.parameters() if one.requires_grad]
        bits, norm = fingerprint(trained)
        rates = [float(group["lr"]) for group in getattr(optimizer, "param_groups", [])]
        told = {"gradients": self._update.gradients, "bits": bits, "norm": norm, "seconds": seconds}
        self._write("update", state, 0, rates=rates, **told)
        self.record.flush()

    def _write(self, kind: str, state: _State, done: int = 0, **values: object) -> None:
        place = {"training": self.trainings, "within": self._depth > 0, "update": state.global_step + done}
        self.record.write(kind, **place, **values)


def _save_without_tokens(arguments: type, save: Method, thing: object, *more: object, **keywords: object) -> object:
    """Save, and training arguments without what logs in: the file is kept."""
    if isinstance(thing, arguments):
        thing = copy.copy(thing)
        given = vars(thing)
        given |= {name: "<left out by hf-compat compare>" for name in given if name.endswith("_token") and given[name]}
    return save(thing, *more, **keywords)


def _numbers(values: object) -> Iterable[tuple[str, object]]:
    return values.items() if isinstance(values, Mapping) else ()


def _told(value: object) -> str:
    return "" if value is None else str(value)
