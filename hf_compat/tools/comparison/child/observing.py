"""Observe the training of transformers' Trainer, or of ours in its place, update by update.

It draws no random numbers and adds no callback. A wrapped method keeps its signature and its result.
"""

from __future__ import annotations

import copy
import functools
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .recording import Record, digest, fingerprint, tensors_in

if TYPE_CHECKING:  # transformers' classes have the same attributes
    from hf_compat.hf.state import TrainerControl, TrainerState
    from hf_compat.trainer import Trainer

Method = Callable[..., object]
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


@dataclass
class _Update:
    began: float = 0.0
    recording: float = 0.0
    losses: int = 0
    gradients: float | None = None


@dataclass
class Observer:
    """Wraps the methods that a run passes through, in one process."""

    record: Record
    output_folder: str
    max_updates: int
    trainings: int = 0
    _depth: int = 0
    _steps: int = 0
    _updates: int = 0
    _predictions: int = 0
    _update: _Update = field(default_factory=_Update)
    _folders: dict[str, str] = field(default_factory=dict)
    _wrapped_steps: set[object] = field(default_factory=set)

    def install(self) -> None:
        """Wrap the methods of the current names of transformers."""
        trainer = importlib.import_module("transformers.trainer").Trainer
        self._wrap(trainer, "train", self._train)
        self._wrap(trainer, "training_step", self._training_step)
        self._wrap(trainer, "evaluation_loop", self._evaluation_loop)
        self._wrap(importlib.import_module("transformers.trainer_callback").CallbackHandler, "call_event", self._event)
        arguments = importlib.import_module("transformers.training_args").TrainingArguments
        self._wrap(arguments, "__post_init__", self._override)
        note = functools.partial(self.record.write, "override", name="push_to_hub()", was="called", now="left out")
        for owner in (trainer, importlib.import_module("transformers.utils.hub").PushToHubMixin):
            self._wrap(owner, "push_to_hub", lambda *_, **__: note())

        def save_without_tokens(save: Method, thing: object, *more: object, **keywords: object) -> object:
            if isinstance(thing, arguments):
                thing = copy.copy(thing)
                given = vars(thing)
                tokens = [name for name in given if name.endswith("_token") and given[name]]
                given |= dict.fromkeys(tokens, "<left out by hf-compat compare>")
            return save(thing, *more, **keywords)

        # The file of the training arguments is kept
        self._wrap(importlib.import_module("torch"), "save", save_without_tokens)

    def _own_step(self, trainer: Trainer, step: Method, *arguments: object, **keywords: object) -> object:
        def of_trainer(_: Trainer, *arguments: object, **keywords: object) -> object:
            return step(*arguments, **keywords)

        return self._training_step(of_trainer, trainer, *arguments, **keywords)

    def _wrap(self, owner: object, name: str, around: Callable[..., object]) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def wrapped(*arguments: object, **keywords: object) -> object:
            return around(inner, *arguments, **keywords)

        setattr(owner, name, wrapped)

    # Overridden values of the script

    def _override(self, finish: Method, args: object) -> None:
        given = vars(args)
        folder = str(given.get("output_dir"))
        if folder not in self._folders.values():  # else these arguments are made of others
            place = self.output_folder + (f"-{len(self._folders) + 1}" if self._folders else "")
            folder = self._folders.setdefault(folder, place)
        replaced: dict[str, object] = {"output_dir": folder}
        replaced |= {} if given.get("report_to") in (None, "none", ["none"], []) else {"report_to": "none"}
        replaced |= {"push_to_hub": False} if given.get("push_to_hub") else {}
        for name, value in replaced.items():
            if given.get(name) != value:
                self.record.write(
                    "override", name=name, was="" if given.get(name) is None else str(given[name]), now=value
                )
                setattr(args, name, value)
        finish(args)

    # Observed methods

    def _train(self, train: Method, trainer: Trainer, *arguments: object, **keywords: object) -> object:
        self.trainings += 1
        number, self._updates = self.trainings, 0
        self.record.write("train", training=number, trainer=type(trainer).__name__)
        self._depth += 1
        # Each `training_step` that overrides the Trainer's, in a class or on the object
        for owner in (trainer, *type(trainer).__mro__):
            is_own = isinstance(owner, type) and owner.__module__.partition(".")[0] in ("transformers", "hf_compat")
            if "training_step" in vars(owner) and not is_own and owner not in self._wrapped_steps:
                self._wrapped_steps.add(owner)
                takes_trainer = isinstance(owner, type)
                around = self._training_step if takes_trainer else functools.partial(self._own_step, trainer)
                self._wrap(owner, "training_step", around)
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

    def _training_step(self, step: Method, trainer: Trainer, *arguments: object, **keywords: object) -> object:
        self._steps += 1
        try:
            loss = step(trainer, *arguments, **keywords)
        finally:
            self._steps -= 1
        if self._steps:  # an override calls the method that it overrides, and only its own result counts
            return loss
        began = time.perf_counter()
        value = float(loss.item()) if hasattr(loss, "item") else str(loss)
        self._write("loss", trainer.state, done=1, micro_batch=self._update.losses, value=value)
        self._update.losses += 1
        self._update.recording += time.perf_counter() - began
        return loss

    def _evaluation_loop(self, loop: Method, trainer: Trainer, *arguments: object, **keywords: object) -> object:
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
        state: TrainerState,
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
            self._write("log", state, values=_numbers(keywords.get("logs")))
        elif event in ("on_evaluate", "on_predict"):
            self._write("metrics", state, event=event, values=_numbers(keywords.get("metrics")))
        answer = call(handler, event, args, state, control, **keywords)
        if event == "on_step_end":
            known = vars(handler)
            parameters = () if known.get("model") is None else known["model"].parameters()
            bits, norm = fingerprint([one for one in parameters if one.requires_grad])
            rates = [float(group["lr"]) for group in getattr(known.get("optimizer"), "param_groups", [])]
            values = {"gradients": self._update.gradients, "bits": bits, "norm": norm, "seconds": elapsed}
            self._write("update", state, 0, rates=rates, **values)
            self.record.flush()
            self._updates += 1
            if 0 < self.max_updates <= self._updates:
                told: TrainerControl = answer  # type: ignore[assignment]  # both packages' controls have the flag
                told.should_training_stop = True
        flags = "".join(str(int(bool(getattr(answer, name, False)))) for name in _FLAGS)
        self._write("event", state, event=event, epoch=float(state.epoch or 0), flags=flags)
        return answer

    def _write(self, kind: str, state: TrainerState, done: int = 0, **values: object) -> None:
        place = {"training": self.trainings, "within": self._depth > 0, "update": state.global_step + done}
        self.record.write(kind, **place, **values)


def _numbers(values: object) -> dict[str, object]:
    return dict(values) if isinstance(values, Mapping) else {}
