"""Checkpoints in HF's layout: what is written. HF's method names.

Every method is an override point of `transformers.Trainer` under its own name and signature. Nothing is ever unpickled
but tensors and plain containers (`weights_only=True`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from hf_compat.callbacks.lightning_states import ask_callbacks
from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint import manifest, sealing
from hf_compat.checkpoint.held_weights import holding
from hf_compat.checkpoint.lightning_io import write_weights
from hf_compat.checkpoint.reading import (
    COMPILED,
    Weights,
    plain_names,
)
from hf_compat.checkpoint.run_state import RUN_STATE_NAME, RunState
from hf_compat.checkpoint.saving_place import SavingPlace
from hf_compat.checkpoint.torch_writer import save_torch
from hf_compat.engine.windows import as_plain
from hf_compat.errors import CheckpointWriteError, HfCompatError, warn_once
from hf_compat.hf.callbacks import CallbackHandler
from hf_compat.hf.state import export_states, is_exportable
from hf_compat.interop.transformers_models import is_peft_model, is_pretrained_model
from hf_compat.interop.upstream_log import log_line
from hf_compat.optim.prepared import unprepared
from hf_compat.optim.stepping import stepping_of
from hf_compat.runtime.collectives import agree
from hf_compat.runtime.frozen_copies import LaterCopies, frozen_copy
from hf_compat.runtime.inspection import is_replaced, reads_parameter
from hf_compat.runtime.rng import read_rng, unpack_rng
from hf_compat.trainer_methods.base import Trial
from hf_compat.trainer_methods.checkpoint_loading import CheckpointLoadingMethods
from hf_compat.trainer_methods.rotation import ROTATION_METHODS, RotationMethods
from hf_compat.trainer_methods.search_backends import name_of_trial
from hf_compat.training_run.best_metric import note_best_checkpoint

logger = logging.getLogger(__name__)

# Methods that write; what a subclass writes in their place cannot be copied for later.
_WRITERS = (
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)

_SAVE = "_save_checkpoint"  # who overrides it may look at the checkpoint afterwards


class CheckpointMethods(RotationMethods, CheckpointLoadingMethods):
    """The public methods and override points of saving and resuming."""

    _other_weights: dict[str, Any] | None = None
    _sealed: tuple[str, sealing.Stamps] | None = None  # the checkpoint just written, and its files then
    _extras: dict[str, Any] = {}

    def _get_output_dir(self, trial: Trial) -> str:
        """Return the folder that checkpoints go to; a trial of a search has one of its own in the output folder.

        Mirrors:
            `transformers.Trainer._get_output_dir`, 5.23.
        """
        folder = str(self.args.output_dir)
        if self.hp_search_backend is None or trial is None:
            return folder
        return os.path.join(folder, name_of_trial(self.hp_search_backend, trial, self.hp_name))

    def _save_checkpoint(self, model: nn.Module, trial: Trial, metrics: object = None) -> None:
        """Write `checkpoint-<updates>`: in a hidden folder first, renamed once it is whole; then rotate.

        Args:
            model: The wrapped model.
            trial: The hyperparameter search's trial.
            metrics: Of releases before 4.47, whose overrides hand it on; nothing reads it.

        Mirrors:
            `transformers.Trainer._save_checkpoint`, 5.23.
        """
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        agree(self._background.settle())
        self._push_what_was_written()
        # Let Lightning callbacks add to the checkpoint; what is no plain value or tensor could not be read back
        self._other_weights, self._extras = None, {}
        run = self._run
        if not (run.module is None or run.lightning_trainer is None):
            self._other_weights, extras = ask_callbacks(self._lightning_callbacks, run.lightning_trainer, run.module)
            for name, value in extras.items():
                plain = as_plain(value)
                if plain is None and value is not None:
                    warn_once(f"A callback puts {name!r} into the checkpoint: no plain value, so it is left out.")
                else:
                    self._extras[name] = plain
        run_dir = self._get_output_dir(trial=trial)
        with self._saving_into(run_dir) as owner:
            self._save_as(names.checkpoint_path(run_dir, self.state.global_step), SavingPlace(run_dir, owner))

    def _save_as(self, final: str, place: SavingPlace) -> None:
        """Write a checkpoint, at once or in the background."""
        run_dir = os.path.dirname(final)
        agree(self._attempt(lambda: self._prepare_place(place), place, final))
        best_before = self.state.best_model_checkpoint
        path_of = functools.partial(names.checkpoint_path, run_dir)
        note_best_checkpoint(self.state, path_of, final, self._has_written)
        best = self.state.best_model_checkpoint
        log_line(f"Saving model checkpoint to {final}")
        stepping_of(self.optimizer).tell_of_saving()
        if self._may_save_in_background():
            write = self._frozen_write()
            self._background.submit(lambda: self._write_and_seal(write, place, final, best, self._push_when_written))
            return
        try:
            # Code of the user's that looks at it may copy, change or remove it, and nothing is written into it from
            # then on. An upload takes what is there. The old folder of that name may not go before that either; and a
            # system that does not tell its starts apart, or another one that has written a part of it, could not tell
            # what a power cut has taken.
            if (
                not self._may_be_seen()
                and self.args._launch.nodes == 1
                and not self.args.push_to_hub
                and not os.path.lexists(final)
                and sealing.this_boot() is not None
            ):
                # Write a folder and put it into its place; its files are flushed and hashed, and room is made,
                # meanwhile
                agree(self._attempt(lambda: self._write_into(place, self._write_checkpoint, final), place, final))
                agree(self._attempt(lambda: self._put_in_place_unflushed(place, final), place, final))
                if self.args.should_save:
                    self._background.submit(lambda: self._finish_later(final, best))
            else:
                self._write_and_seal(self._write_checkpoint, place, final, best, self._push_checkpoint)
                self._sealed = (final, sealing.stamps(final)) if self.args.should_save else None
        except BaseException:
            self.state.best_model_checkpoint = best_before
            raise

    def _prepare_place(self, place: SavingPlace) -> None:
        if self.args.should_save:
            self._keep(place.run_dir)
            place.prepare()

    def _has_written(self, path: str) -> bool:
        return os.path.isdir(path) and self._is_of_this_run(path)

    def _write_and_seal(
        self,
        write: Callable[[str], None],
        place: SavingPlace,
        final: str,
        best: str | None,
        push: Callable[[str], None],
    ) -> None:
        """Write a folder in a hidden place, seal it, put it into its own; then push it, and make room.

        With several processes, each writes its part; all have to succeed before the first one seals the folder.
        """
        # no name here for what went wrong: it would keep the frames of the writers, and their open files, alive
        agree(self._attempt(lambda: self._write_into(place, write, final), place, final))
        agree(self._attempt(lambda: self._seal(place, final), place, final))
        push(final)
        if self.args.should_save:
            self._make_room(final, best)

    def _put_in_place_unflushed(self, place: SavingPlace, final: str) -> None:
        if not self.args.should_save:
            return
        place.adopt(final)
        if os.path.lexists(final):  # an override has written there: that may go only when the new one is on the disk
            self._seal(place, final)
            return
        sealing.list_unflushed(place.inside(final), self._writer(place.run_dir))
        self._keep(place.run_dir)
        place.land(final)
        os.replace(place.inside(final), final)
        place.discard()

    def _finish_later(self, final: str, best: str | None) -> None:
        """Force a checkpoint to the disk, write its hashes, then remove what there is no room for; in a thread."""
        with self._removing_lost(final):
            sealing.finish(final)
        self._make_room(final, best)

    @contextlib.contextmanager
    def _removing_lost(self, final: str) -> Iterator[None]:
        """Remove a checkpoint of which the system has lost what it had taken."""
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                manifest.remove(final)
            raise _not_written(final, error) from error

    def _may_be_seen(self) -> bool:
        """Return whether code of the user's may look at a checkpoint before training goes on."""
        return (
            not self._is_saving_by_flag  # whoever has called the method goes on with what it has written
            or any(getattr(c, "reads_checkpoints", True) for c in self.callback_handler.hearing("on_save"))
            or self._overrides_saving(_SAVE)
            or self._overrides_rotation(*ROTATION_METHODS)
        )

    def _overrides_saving(self, name: str) -> bool:
        return is_replaced(self, name, CheckpointMethods)

    def _write_into(self, place: SavingPlace, write: Callable[[str], None], final: str) -> None:
        os.makedirs(place.path, exist_ok=True)  # this process may have a disk of its own
        write(place.inside(final))
        place.note_deletions()

    def _seal(self, place: SavingPlace, final: str) -> None:
        if self.args.should_save:
            place.adopt(final)
            manifest.seal(place.inside(final), self._writer(place.run_dir))
            self._keep(place.run_dir)
            place.land(final)
            manifest.put_in_place(place.inside(final), final)
            place.discard()

    def _adopt_changes(self) -> None:
        """List anew what the run's own code has changed in the checkpoint just written: `on_save`, or an override."""
        (folder, stamps), self._sealed = self._sealed or ("", {}), None
        try:
            changes = sealing.adopt_changes(folder, stamps) if folder else ()
        except OSError as error:
            if not os.path.isdir(folder):  # removed, or moved elsewhere
                return
            raise _not_written(folder, error) from error
        if changes:
            logger.warning(
                "%s: the run's callbacks or overrides have changed it (%s). A resume reads it as it is now.",
                folder,
                "; ".join(changes),
            )

    def _attempt(self, write: Callable[[], None], place: SavingPlace, final: str) -> Exception | None:
        """Write, and return what went wrong: the other processes have to know before it is raised."""
        try:
            write()
            return None
        except BaseException as error:
            if self.args.should_save:
                place.discard()
            is_named = isinstance(error, HfCompatError)
            if isinstance(error, (OSError, RuntimeError, safetensors.SafetensorError)) and not is_named:
                return _not_written(final, error)
            if isinstance(error, Exception):  # of a method or a callback of the user's
                return error
            raise

    def _may_save_in_background(self) -> bool:
        """Return whether all that a checkpoint holds can be copied first: what a subclass writes cannot."""
        if not self.args.async_save:
            return False
        if self.args.world_size > 1:
            warn_once("`async_save=True`: with several processes checkpoints are written at once.")
            return False
        if not self._model_state.can_be_copied:
            warn_once("`async_save=True`: the model is sharded; checkpoints are written at once.")
            return False
        own = [name for name in _WRITERS if self._overrides_saving(name)]
        own += [name for name in ROTATION_METHODS if self._overrides_rotation(name)]
        if own:
            warn_once(
                f"`async_save=True`: {type(self).__name__} overrides {', '.join(own)}; checkpoints are not async."
            )
        is_adapter = is_peft_model(self.accelerator.unwrap_model(self.model))
        if is_adapter:
            warn_once("`async_save=True`: adapters of PEFT are small; they are written at once.")
        return not own and not is_adapter

    def _frozen_write(self) -> Callable[[str], None]:
        """Copy everything that a checkpoint holds, and return what writes the copy.

        The optimizer's state is copied while training goes on, before its next step; it is most of the bytes.
        """
        self._copy_memory.begin()
        later = self._later_copies()
        weights = frozen_copy(self._other_weights or self._model_state.whole_weights(), self._copy_memory)
        files = {} if self.args.save_only_model else self._frozen_files(later)
        self._copy_memory.end()
        self.state.stateful_callbacks = export_states(self._stateful())
        state = copy.deepcopy(self.state)

        def write(folder: str) -> None:
            if later is not None:
                later.result()
            self._save(folder, state_dict=weights)
            for name, content in files.items():
                save_torch(content, os.path.join(folder, name))
            state.save_to_json(os.path.join(folder, names.TRAINER_STATE_NAME))

        return write

    def _later_copies(self) -> LaterCopies | None:
        """Return what copies the optimizer's state before its next step; None where somebody may change it first.

        A callback may, in any event: the first one that is heard waits for the copies.
        """
        handler = self.callback_handler
        of_others = [c for c in self._lightning_callbacks if not type(c).__module__.startswith("lightning.")]
        if of_others or is_replaced(handler, "call_event", CallbackHandler):
            return None
        later = self._state_copies.before_steps_of(unprepared(self.optimizer))
        handler.before_heard = None if later is None else self._state_copies.finish
        return later

    def _frozen_files(self, later: LaterCopies | None) -> dict[str, object]:
        """Copy what it takes to resume, under the names of its files."""
        optimizer = frozen_copy(self.optimizer.state_dict(), self._copy_memory, later)
        files: dict[str, object] = {names.OPTIMIZER_NAME: optimizer}
        files |= frozen_copy(self._schedule_file())
        if self.accelerator.scaler is not None:
            files[names.SCALER_NAME] = self.accelerator.scaler.state_dict()
        files[names.RNG_STATE_NAME] = unpack_rng(read_rng())
        run_state = self._run_state_now()
        if run_state is not None:
            files[RUN_STATE_NAME] = frozen_copy(run_state.to_plain())
        return files

    def _write_checkpoint(self, folder: str) -> None:
        # Of a model that every process holds whole, one of them writes
        if (
            not self.args.save_only_model
            and self._model_state.can_be_copied
            and not any(self._overrides_saving(name) for name in _WRITERS)
        ):
            # Both take their time outside Python
            os.makedirs(folder, exist_ok=True)
            with ThreadPoolExecutor(1, "hf_compat-optimizer") as beside:
                written = beside.submit(self._save_optimizer_and_scheduler, folder)
                self._write_model(folder)
                written.result()
        else:
            self._write_model(folder)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(folder)
        if not self.args.save_only_model:
            self._save_scaler(folder)
            self._save_rng_state(folder)
            # What it takes to go on as if the run had not stopped
            state = self._run_state_now()
            if state is not None and (self.args.should_save or self.args.world_size > 1):
                state.save(folder, self.args.process_index, self.args.world_size)
        if self.args.should_save:
            self.state.stateful_callbacks = export_states(self._stateful())
            self.state.save_to_json(os.path.join(folder, names.TRAINER_STATE_NAME))

    def _write_model(self, folder: str) -> None:
        with holding(self.accelerator.unwrap_model(self.model), self._other_weights):
            self.save_model(folder, _internal_call=True)
        os.makedirs(folder, exist_ok=True)

    def _run_state_now(self) -> RunState | None:
        together = self._train_batch_size * self.args.world_size
        return self._run.state(
            self.control.should_epoch_stop, self.args.world_size, together, self._lightning_callbacks, self._extras
        )

    def _stateful(self) -> list[Any]:
        return [c for c in [*self.callback_handler.callbacks, self.control] if is_exportable(c)]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write `optimizer.pt` and `scheduler.pt`."""
        self._model_state.write_optimizer(output_dir, self.optimizer, self.args.should_save)
        if self.args.should_save:
            for name, content in self._schedule_file().items():
                torch.save(content, os.path.join(output_dir, name))

    def _schedule_file(self) -> dict[str, object]:
        """Return the schedule's state under its file's name; nothing where there is no schedule."""
        return {} if self.lr_scheduler is None else {names.SCHEDULER_NAME: self.lr_scheduler.state_dict()}

    def _save_scaler(self, output_dir: str) -> None:
        """Write the gradient scaler's state, where there is one."""
        scaler = self.accelerator.scaler
        if scaler is not None and self.args.should_save:
            torch.save(scaler.state_dict(), os.path.join(output_dir, names.SCALER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the states of all random generators."""
        states = unpack_rng(read_rng())
        torch.save(states, os.path.join(output_dir, self._own(names.RNG_STATE_NAME)))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, its configuration and its processor, so that `from_pretrained` reads them.

        Args:
            output_dir: The folder; the output folder where none is given.
            _internal_call: Whether the caller sees to the Hub; with `push_to_hub=True` the model is pushed otherwise.
        """
        folder = output_dir if output_dir is not None else self.args.output_dir
        if not _internal_call:
            log_line(f"Saving model checkpoint to {folder}")
            stepping_of(self.optimizer).tell_of_saving()
        asks_the_model = any(not reads_parameter(method, "state_dict") for method in self._overrides_of_save())
        with self._model_state.giving_whole() if asks_the_model else contextlib.nullcontext():
            self._model_state.write_weights(str(folder), self._save, for_checkpoint=_internal_call)
        if self.args.push_to_hub and not _internal_call:
            self._push_saved_model()

    def _overrides_of_save(self) -> Iterator[Callable[..., object]]:
        """Yield what subclasses, or the user of this instance, have put in the place of `_save`."""
        for holder in (self, *type(self).__mro__):
            method = vars(holder).get("_save")
            if holder is CheckpointMethods:
                return
            if method is not None:
                yield method

    def _save(self, output_dir: str | None = None, state_dict: Weights | None = None) -> None:
        """Write weights, configuration, processor and arguments to a folder."""
        if not self.args.should_save:
            return
        folder = str(output_dir if output_dir is not None else self.args.output_dir)
        os.makedirs(folder, exist_ok=True)
        self._save_weights_and_config(folder, state_dict)
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None and hasattr(processor, "save_pretrained"):
            if self.processing_class is None:
                log_line("Saving Trainer.data_collator.tokenizer by default as Trainer.processing_class is `None`")
            processor.save_pretrained(folder)
        # Plain values that are read as `saved.learning_rate`, too; secrets are masked. An OrderedDict is the one type
        # with attributes that `torch.load` makes with `weights_only=True`, on any machine.
        values = json.loads(self.args.to_json_string())
        saved = OrderedDict(values)
        saved.__dict__.update({name: value for name, value in values.items() if not hasattr(saved, name)})
        torch.save(saved, os.path.join(folder, names.TRAINING_ARGS_NAME))

    def _save_weights_and_config(self, folder: str, state_dict: Weights | None) -> None:
        model = self.accelerator.unwrap_model(self.model)
        if state_dict is not None and not state_dict:  # shards hold the weights
            if hasattr(getattr(model, "config", None), "save_pretrained"):
                model.config.save_pretrained(folder)  # type: ignore[union-attr,operator]  # transformers'
        elif is_pretrained_model(model):
            weights = state_dict or model.state_dict()
            if any(COMPILED in name for name in weights):
                state_dict = plain_names(weights)
            model.save_pretrained(folder, state_dict=state_dict)  # type: ignore[operator]  # transformers' or peft's
        else:
            log_line("Trainer.model is not a `PreTrainedModel`, only saving its state dict.")
            write_weights(state_dict or model.state_dict(), os.path.join(folder, names.SAFE_WEIGHTS_NAME))


def _if_full(folder: str) -> str:
    """Return that a disk is full, where it is: torch's writer only says which position it could not reach."""
    full = os.path.isdir(folder) and shutil.disk_usage(folder).free == 0
    return "; no space left on the disk" if full else ""


def _not_written(final: str, cause: Exception) -> CheckpointWriteError:
    error = CheckpointWriteError(
        f"The checkpoint {final} could not be written: {cause}{_if_full(os.path.dirname(final))}.\n\n"
        "Hint: make room or give write permission there, then resume; earlier checkpoints are as they were."
    )
    error.__cause__ = cause
    return error
