"""transformers' Trainer with the documented peculiarities of its resume mended: what ours is compared with.

Mended are the rows "The loss that a resumed run reports", "Resuming a run that a callback or `max_steps` has ended" and
"NEFTune after an exception" of the differences page. A checkpoint gets one more file, which says where the run stands.
"""

from __future__ import annotations

import json
import os

import torch
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler


def position_file() -> str:
    """Return the name of this process's file."""
    return f"exact_{os.environ.get('RANK', '0')}.json"


def mend() -> None:
    """Let transformers' Trainer go on exactly where a checkpoint of its own stood."""
    _count_micro_batches()
    _keep_positions()
    _go_on_from_positions()
    _end_noise_with_training()


def _wrapped(owner, name: str):
    """Replace a method by `around(original, self, *args, **kwargs)`."""

    def decorate(around):
        original = getattr(owner, name)
        setattr(owner, name, lambda self, *args, **kwargs: around(original, self, *args, **kwargs))

    return decorate


def _count_micro_batches() -> None:
    @_wrapped(Trainer, "set_initial_training_values")
    def counts(original, self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        self._cut = [found[5], self.args.gradient_accumulation_steps, self._train_batch_size]
        self._updates_of_epoch, self._is_sized = found[1], self._has_length(args, kwargs)
        return found

    def has_length(self, args, kwargs):
        loader = kwargs.get("dataloader", args[1] if len(args) > 1 else None)
        try:
            return len(loader) is not None
        except TypeError:
            return False

    Trainer._has_length = has_length

    @_wrapped(Trainer, "_track_num_input_tokens")
    def counted(original, self, inputs):
        self._micro_batches += 1
        return original(self, inputs)

    @_wrapped(CallbackHandler, "on_epoch_begin")
    def begins(original, self, *args):
        trainer = self._trainer
        trainer._micro_batches = trainer._trained = trainer._skipped
        trainer._at_epoch_end = False
        trainer._skipped = 0
        if trainer._pending is not None:  # as it was in the uninterrupted run
            control = trainer.control
            control.should_save = control.should_evaluate = control.should_log = False
            control.should_training_stop = trainer._position["updates"] >= trainer.state.max_steps
        return original(self, *args)

    @_wrapped(CallbackHandler, "on_step_end")
    def updated(original, self, *args):
        self._trainer._trained = self._trainer._micro_batches
        return original(self, *args)

    @_wrapped(CallbackHandler, "on_epoch_end")
    def ends(original, self, *args):
        self._trainer._at_epoch_end = True
        self._trainer._trained = self._trainer._micro_batches
        return original(self, *args)


def _keep_positions() -> None:
    @_wrapped(Trainer, "_maybe_log_save_evaluate")
    def remembered(original, self, tr_loss, grad_norm, model, trial, epoch, *args, **kwargs):
        norm = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
        self._last = {"grad_norm": norm, "learning_rate": kwargs.get("learning_rate")}
        return original(self, tr_loss, grad_norm, model, trial, epoch, *args, **kwargs)

    @_wrapped(Trainer, "_save_checkpoint")
    def saved(original, self, model, trial, *args, **kwargs):
        result = original(self, model, trial, *args, **kwargs)
        folder = os.path.join(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        if os.path.isdir(folder) and hasattr(self, "_last") and not self.args.save_only_model:
            with open(os.path.join(folder, position_file()), "w") as file:
                json.dump(_position(self), file)
        return result


def _position(self) -> dict:
    sums = [self._tr_loss.item(), self._total_loss_scalar, self._globalstep_last_logged, self._initial_global_step]
    is_over = self.control.should_epoch_stop or self._trained >= self._cut[0]
    return {
        **self._last,
        "epoch": self._epoch,
        "sums": sums,
        "cut": self._cut,
        "done": self._trained,
        "updates_of_epoch": self._updates_of_epoch,
        "is_over": bool(is_over),
        "at_epoch_end": self._at_epoch_end,
        "updates": self.state.global_step,
    }


def _go_on_from_positions() -> None:
    @_wrapped(Trainer, "_init_training_state")
    def placed(original, self, max_steps, updates_per_epoch, epochs, resume_from_checkpoint, trial):
        self.callback_handler._trainer = self
        self._skipped, self._sums, self._pending, self._position = 0, None, None, None
        found = original(self, max_steps, updates_per_epoch, epochs, resume_from_checkpoint, trial)
        path = os.path.join(resume_from_checkpoint or "", position_file())
        if resume_from_checkpoint and os.path.exists(path):
            with open(path) as file:
                found = _start(self, json.load(file), found, max_steps, epochs)
            if found[0] >= epochs:  # what the script draws after it goes on from the checkpoint
                self._load_rng_state(resume_from_checkpoint)
        self._skipped = found[1]
        return found

    @_wrapped(CallbackHandler, "on_train_begin")
    def sums(original, self, *args):
        trainer = self._trainer
        if trainer._sums is not None:
            trainer._tr_loss.fill_(trainer._sums[0])
            trainer._total_loss_scalar, trainer._globalstep_last_logged = trainer._sums[1:3]
            trainer._initial_global_step = trainer._sums[3]
        return original(self, *args)

    @_wrapped(Trainer, "_run_epoch")
    def end_of_epoch(original, self, **kwargs):
        self._epoch = kwargs["epoch"]
        if self._pending != kwargs["epoch"]:
            return original(self, **kwargs)
        self._pending, position = None, self._position
        self._micro_batches = position["done"]
        self._load_rng_state(kwargs["resume_from_checkpoint"])
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        given = [kwargs[name] for name in ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")]
        self._maybe_log_save_evaluate(
            self._tr_loss, position["grad_norm"], *given, learning_rate=position["learning_rate"]
        )
        return None


def _start(self, position: dict, found: tuple[int, int], max_steps: int, epochs: int) -> tuple[int, int]:
    """Return the epoch that comes first, and its micro-batches that are done."""
    now, before = list(self._cut), list(position["cut"])
    if not self._is_sized:
        before[0] = now[0]
    is_finished = position["updates"] >= max_steps
    if now == before:
        self._sums = position["sums"]
    if self.args.ignore_data_skip:
        return (epochs, 0) if is_finished else found
    if now != before:
        if is_finished:
            return epochs, 0
        epoch, updates = (
            divmod(position["updates"], position["updates_of_epoch"]) if self._is_sized else (0, position["updates"])
        )
        return epoch, updates * before[1] * before[2] // now[2]
    self._position = position
    epoch, is_open = position["epoch"], not position["at_epoch_end"]
    if position["at_epoch_end"] and position["is_over"]:
        epoch += 1
    if not is_open and not position["is_over"]:  # training stopped within the epoch
        is_open = True
        if is_finished:
            return epochs, 0
    is_finished = is_finished or epoch >= epochs
    at_the_end = position["updates"] == max_steps and epoch < epochs
    if is_finished and not (is_open and not position["at_epoch_end"] and at_the_end):
        return epochs, 0
    if is_open and (position["is_over"] or is_finished):
        self._pending = epoch
        return epoch, 0
    return epoch, position["done"] if is_open else 0


def _end_noise_with_training() -> None:
    @_wrapped(Trainer, "train")
    def trained(original, self, *args, **kwargs):
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            handle = getattr(self, "neftune_hook_handle", None)
            if self.is_in_train and self.neftune_noise_alpha is not None and handle is not None:
                from transformers.integrations.neftune import deactivate_neftune

                deactivate_neftune(self.model, handle, self.accelerator)
            raise
