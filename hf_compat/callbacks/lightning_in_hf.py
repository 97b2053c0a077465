"""`LightningCallbackAdapter` runs a Lightning callback inside a real `transformers.Trainer`.

An idle Lightning trainer accompanies the HF one. Its progress is set from HF's state, and HF's events call the
callback's hooks (`PAIRS` in `bridge.py`). All hooks of an evaluation run after it.
"""

from __future__ import annotations

import base64
import inspect
import io
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from torch import nn

from hf_compat.callbacks.bridge import PAIRS
from hf_compat.callbacks.callback_set import (
    IN_TRANSFORMERS,
    NEVER_CALLED,
    check_lightning_callback,
    hooks_of_user,
    refuse,
)
from hf_compat.callbacks.loggers import HistoryLogger, refuse_other_distribution
from hf_compat.checkpoint.run_state import readable_state
from hf_compat.engine.internals import mirror_running_fit, note_metrics, set_progress
from hf_compat.engine.quiet import quietly
from hf_compat.errors import CallbackError, CheckpointError, warn_user
from hf_compat.hf.callbacks import Args, Kwarg, TrainerCallback
from hf_compat.hf.state import ExportableState, TrainerControl, TrainerState
from hf_compat.interop.releases import of_installed
from hf_compat.runtime.text import brief

# Hooks around training, and those of an evaluation that is over. The events' own methods call them.
_AROUND = {"setup", "teardown", "on_fit_start", "on_fit_end", "on_train_end"}
_OF_EVALUATION = ("start", "epoch_start", "epoch_end", "end")
_AROUND |= {f"on_{stage}_{moment}" for stage in ("validation", "test") for moment in _OF_EVALUATION}
# An evaluation's hooks run after it, so none is called for single batches.
_AT_EVENTS = {hook: event for hook, event in PAIRS.items() if event != "on_prediction_step"}
# Hooks for which HF has no event.
_WITHOUT_EVENT = [
    name
    for name, method in vars(pl.Callback).items()
    if inspect.isfunction(method)
    and name not in {*_AT_EVENTS, *_AROUND, *NEVER_CALLED, "state_dict", "load_state_dict", "_generate_state_key"}
]


class _ModuleOfModel(pl.LightningModule):
    """The HF model as a LightningModule, for callbacks that read one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model


class LightningCallbackAdapter(TrainerCallback, ExportableState):
    """Call a Lightning callback in a `transformers.Trainer`, as far as HF has events for its hooks.

    The callback sees a Lightning trainer with HF's progress (`global_step`, `current_epoch`), HF's logs as
    `callback_metrics`, and the real optimizer. `should_stop` ends the training. Values that it logs go into HF's
    `log_history`. `batch` and `outputs` of its hooks are None, as HF does not pass them to callbacks. Its `state_dict`
    is part of HF's checkpoints. `restore_callback_states_from_checkpoint=True` restores it.

    Args:
        callback: The Lightning callback. HF restores states by calling an adapter's class, so each adapter has its own
            class, which holds the callback.

    Raises:
        CallbackError: It cannot work here, for instance because it needs hooks inside the evaluation.

    Examples:
        >>> import torch, transformers
        >>> from hf_compat import LightningCallbackAdapter
        >>> from lightning.pytorch.callbacks import Timer
        >>> class Regression(torch.nn.Linear):
        ...     def forward(self, x, labels):
        ...         return {"loss": (super().forward(x) - labels).square().mean()}
        >>> data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 32
        >>> args = transformers.TrainingArguments("out", max_steps=2, save_strategy="no", use_cpu=True, report_to=[])
        >>> callbacks = [LightningCallbackAdapter(Timer("00:08:00:00"))]
        >>> trainer = transformers.Trainer(Regression(2, 1), args, train_dataset=data, callbacks=callbacks)
        >>> result = trainer.train()  # doctest: +ELLIPSIS
        {...}
        >>> result.global_step
        2
    """

    _held: pl.Callback | None = None  # set on each adapter's own class
    _saved: Mapping[str, object] | None = None  # loaded when training starts

    def __new__(cls, callback: pl.Callback | None = None) -> Self:
        """Make an adapter with its own class, which also inherits from transformers' `ExportableState`."""
        if cls._held is None and callback is not None:
            theirs = of_installed("trainer_callback", "ExportableState")
            bases = (cls, theirs) if isinstance(theirs, type) else (cls,)
            content = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            # HF stores states by class name and confuses callbacks whose classes share one
            cls = type(f"{cls.__name__}[{getattr(callback, 'state_key', '')}]", bases, {**content, "_held": callback})
        return super().__new__(cls)

    def __reduce__(self) -> tuple[object, ...]:
        return LightningCallbackAdapter, (self.callback,)

    def __init__(self, callback: pl.Callback | None = None) -> None:
        callback = callback if self._held is None else self._held
        refuse_other_distribution(callback)
        if not isinstance(callback, pl.Callback):
            raise CallbackError(f"{brief(callback)} is not a Lightning callback.\n\nHint: pass HF callbacks directly.")
        refuse(callback, IN_TRANSFORMERS)
        check_lightning_callback(callback, nn.Module())
        missing = hooks_of_user(callback, _WITHOUT_EVENT)
        if missing:
            warn_user(
                f"{type(callback).__name__}: {', '.join(missing)} will not be called, as transformers.Trainer has no "
                "event for them.",
            )
        self.callback = callback
        self.trainer: Any = None  # Lightning's, made at the start of training
        self._module: _ModuleOfModel | None = None
        self._epoch = self._index = 0

    def state(self) -> dict[str, dict[str, object]]:
        """Export the callback's state for HF's `trainer_state.json`."""
        file = io.BytesIO()
        key = self.callback.state_key
        torch.save({key: readable_state(self.callback.state_dict(), f"The state of the callback {key}")}, file)
        return {"args": {}, "attributes": {"saved": base64.b64encode(file.getvalue()).decode("ascii")}}

    @property
    def saved(self) -> str:
        """The state in HF's checkpoints, as `state` exports it. Assigning it restores the callback."""
        return str(self.state()["attributes"]["saved"])

    @saved.setter
    def saved(self, text: str) -> None:
        try:
            self._saved = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)[self.callback.state_key]
        except Exception as error:  # base64, zipfile and torch raise various types
            raise CheckpointError(f"The state of {type(self.callback).__name__} cannot be read: {error}") from error

    def _hook(self, name: str, *arguments: object) -> None:
        getattr(self.callback, name)(self.trainer, self._module, *arguments)

    def _place(self, state: TrainerState) -> None:
        set_progress(self.trainer, self._epoch, state.global_step)

    def _enter_epoch(self, state: TrainerState) -> None:
        # HF's epoch is fractional, and whole after an epoch's last step. Lightning counts when the next epoch starts.
        self._epoch = int(state.epoch or 0)
        self._place(state)

    def _evaluated(self, stage: str, metrics: Mapping[str, float] | None) -> None:
        note_metrics(self.trainer, metrics or {})
        for moment in _OF_EVALUATION:
            self._hook(f"on_{stage}_{moment}")

    def _make(self, args: Args, state: TrainerState, model: nn.Module, optimizer: Kwarg, scheduler: Kwarg) -> None:
        self._state = state
        self._module = _ModuleOfModel(model)
        device = next(model.parameters(), torch.empty(0)).device
        is_cuda = device.type == "cuda"
        evaluates = args.eval_strategy != "no"
        with quietly():
            self.trainer = pl.Trainer(
                accelerator="gpu" if is_cuda else device.type,
                devices=[device.index or 0] if is_cuda else 1,
                callbacks=[self.callback],
                logger=HistoryLogger(self._log),
                max_epochs=math.ceil(state.num_train_epochs or -1),
                default_root_dir=str(args.output_dir),
                log_every_n_steps=max(int(state.logging_steps or 1), 1),
                # an interval in batches, so that callbacks with a monitored metric check it after evaluations
                val_check_interval=max(int(state.eval_steps), 1) if evaluates else None,
                check_val_every_n_epoch=None if evaluates else 1,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=isinstance(self.callback, lightning_callbacks.Checkpoint),
            )
        mirror_running_fit(self.trainer, self._module, optimizer, scheduler)

    def _log(self, metrics: Mapping[str, float], step: int | None) -> None:
        numbers = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        self._state.log_history.append({**numbers, "epoch": self._state.epoch, "step": self._state.global_step})

    def _pass_on_stop(self, control: TrainerControl) -> TrainerControl:
        if self.trainer is not None and self.trainer.should_stop:
            control.should_training_stop = True
        return control

    def on_train_begin(
        self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg
    ) -> TrainerControl:
        self._make(args, state, kwargs["model"], kwargs.get("optimizer"), kwargs.get("lr_scheduler"))
        self._enter_epoch(state)
        self._hook("setup", "fit")
        if self._saved:
            self.callback.load_state_dict(dict(self._saved))
        self._hook("on_fit_start")
        self._hook("on_train_start")
        return self._pass_on_stop(control)

    def on_log(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> TrainerControl:
        if self.trainer is not None:
            note_metrics(self.trainer, kwargs.get("logs") or {})
        return self._pass_on_stop(control)

    def on_evaluate(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> TrainerControl:
        if self.trainer is None:  # outside training
            return control
        self._place(state)
        self.trainer.validating = True
        self._evaluated("validation", kwargs.get("metrics"))
        self.trainer.training = True
        return self._pass_on_stop(control)

    def on_predict(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> TrainerControl:  # type: ignore[override]  # metrics are among kwargs
        if self.trainer is None:
            self._make(args, state, kwargs["model"], kwargs.get("optimizer"), kwargs.get("lr_scheduler"))
        self.trainer.testing = True
        self._evaluated("test", kwargs.get("metrics"))
        return control

    def on_train_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> TrainerControl:
        self._enter_epoch(state)  # after the last one, as in Lightning
        self._hook("on_train_end")
        self._hook("on_fit_end")
        self._hook("teardown", "fit")
        return control


def _calling(hook: str) -> Callable[..., TrainerControl]:
    """Make the adapter's method of an event that calls one hook."""
    names = tuple(inspect.signature(getattr(pl.Callback, hook)).parameters)[3:]  # after trainer and module

    def call(
        self: LightningCallbackAdapter, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg
    ) -> TrainerControl:
        if hook == "on_train_epoch_start":
            self._enter_epoch(state)
        elif hook == "on_train_batch_start":
            self._index = state.global_step
        self._place(state)
        known = {"optimizer": kwargs.get("optimizer"), "batch_idx": self._index}
        self._hook(hook, *[known.get(name) for name in names])
        return self._pass_on_stop(control)

    return call


for _hook, _event in _AT_EVENTS.items():
    if _event not in vars(LightningCallbackAdapter):
        setattr(LightningCallbackAdapter, _event, _calling(_hook))
