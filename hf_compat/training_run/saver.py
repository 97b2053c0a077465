"""`Saver` writes checkpoints. A save has four parts:

    prepare   make the hidden folder that the checkpoint is written into
    put       write the files, list them in a manifest, rename the folder to `checkpoint-<updates>`
    push      pass it to the Hub's uploads (within `_put`)
    finish    flush and hash what `put` has only listed, then delete checkpoints beyond `save_total_limit`

`Timing` says which of them run in a thread while training continues. `OutputFolder` holds the locks.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import safetensors
import torch
from torch import nn

from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.manifest import SavingPlace
from hf_compat.checkpoint.moving import renames_folders
from hf_compat.checkpoint.reading import Listed, Weights, written_by
from hf_compat.checkpoint.run_lock import RunLock
from hf_compat.checkpoint.run_state import PlainState, RunState, readable_state
from hf_compat.checkpoint.shares import as_rows, of_rows
from hf_compat.checkpoint.torch_writer import save_torch
from hf_compat.engine.internals import is_training_batch
from hf_compat.engine.windows import as_plain
from hf_compat.errors import CheckpointWriteError, HfCompatError, warn_once
from hf_compat.hf.callbacks import CallbackHandler
from hf_compat.hf.state import export_states
from hf_compat.interop.transformers_models import is_peft_model
from hf_compat.optim.prepared import unwrap_optimizer
from hf_compat.optim.stepping import behaviour_of
from hf_compat.runtime.collectives import Rows, failing_together, float_bits, highest_each, sum_of_bits
from hf_compat.runtime.console import log_line
from hf_compat.runtime.device_copies import CopyMemory, DeviceCopies, LaterCopies, frozen_copy
from hf_compat.runtime.inspection import is_replaced
from hf_compat.runtime.seeding import read_legacy_rng, read_rng
from hf_compat.runtime.text import brief
from hf_compat.runtime.threads import BackgroundWriter, Helpers
from hf_compat.training_run.best import note_best_checkpoint
from hf_compat.training_run.interface import TrainerApi
from hf_compat.training_run.mirror import ROTATION, StoreMirror
from hf_compat.training_run.output_folder import OutputFolder, saves_checkpoints, shared_owner
from hf_compat.training_run.rotation import checkpoints_to_delete, in_order_of_rotation, is_from_run, remove_surplus
from hf_compat.training_run.same_on_ranks import StartFacts

logger = logging.getLogger(__name__)

# Methods that write. A subclass's own version writes what cannot be copied for later.
_WRITERS = ("save_model", "_save", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


class Timing(StrEnum):
    """When the parts of a save run. `prepare` always runs at once."""

    NOW = "all at once"
    LATER = "`finish` beside the training"
    SUMMED = "sums at once, `finish` beside the training once the callbacks have heard of the save"
    BACKGROUND = "`put` and `finish` beside the training, of a copy of the state; `push` at the next update"


_FINISHED_BESIDE = (Timing.LATER, Timing.SUMMED)


class Saver:
    """Write, place and rotate the checkpoints of a Trainer, whose methods write the files.

    `overrides` says whether a subclass, or the user of this instance, has replaced a method of the Trainer.
    """

    def __init__(self, host: TrainerApi, overrides: Callable[[str], bool]) -> None:
        self._host, self._overrides = host, overrides
        self.folder: OutputFolder | None = None  # within `taking_folder`
        self._lost: list[RunLock] = []  # of the folders that the last training has lost to other runs
        self.background = BackgroundWriter()
        self.copy_memory, self._state_copies = CopyMemory(), LaterCopies()
        self._device_copies = DeviceCopies()
        self._lacks_renames: dict[str, bool] = {}  # by folder, whether it is on a disk that renames no folders
        self.is_by_flag = False  # `control.should_save` has asked for this save, not user code or a signal
        self._sealed: tuple[str, manifest.FileStats] | None = None  # the checkpoint just written, and its files then
        self._unfinished: Callable[[], None] | None = None  # the rest of that save
        self._weights: Weights | None = None  # a Lightning callback's, in place of the model's
        self._extras: PlainState = {}  # entries of Lightning callbacks
        self.mirror = StoreMirror(host, overrides)

    @contextlib.contextmanager
    def taking_folder(
        self, at_once: bool, facts: StartFacts | None = None, compare: Callable[..., None] | None = None
    ) -> Iterator[None]:
        """Keep other runs from saving into the output folder while this one trains, and wait for the last write.

        Without `at_once`, each folder is taken when a save needs it. The first rank takes it before the ranks `compare`
        their arguments: the exchange tells them of its error, and who the owner is. Otherwise they exchange an owner.
        """
        args = self._host.args
        folder = self.folder = OutputFolder(shared_owner() if facts is None else facts.owner)
        if self._host.is_in_train:
            self._lost = []  # a new turn, which takes its folders anew
        takes, is_first = at_once and saves_checkpoints(args), args.process_index == 0
        take = functools.partial(self._take, folder)
        try:
            if compare is not None and facts is not None:
                compare(facts, before=take if takes and is_first else None)
                folder.owner = facts.owner
            if takes and args.save_on_each_node:
                with failing_together():  # the others need the owner for it
                    if args.should_save and not is_first:
                        take()
            yield
            self.background.wait()  # a callback may have saved at the very end
            self.mirror.finish()
        except BaseException as error:
            self._finish_beside()  # a callback has raised the error
            unwritten = self.background.settle()  # a resume right after must not begin from an older checkpoint
            if unwritten is not None:
                error.add_note(str(unwritten))
            self.mirror.settle(error, self.has_lost_folder)
            raise
        finally:
            if args.async_save:
                self.copy_memory = CopyMemory()  # all writes have ended
                self._state_copies.release()
            folder.release()
            self.folder = None
            self._lost += [lock for lock in folder.locks.values() if lock.lost is not None]

    def _take(self, folder: OutputFolder) -> None:
        folder.hold(str(self._host.args.output_dir))
        folder.note(str(self._host.args.output_dir), self.mirror.begin(folder.owner.id))

    def check_folder(self, path: str | os.PathLike[str] | None = None) -> None:
        """Refuse to write into an output folder, or below it, that this run or the last one has lost to another run.

        Without a path, look at all folders that this run saves into.

        Raises:
            OutputFolderError: It is lost. The process that saves finds that out; others have no lock.
        """
        self.mirror.check()
        held = [] if self.folder is None else [lock for lock in self.folder.locks.values() if lock.is_held]
        for lock in [*self._lost, *held]:
            if path is None or Path(path).resolve().is_relative_to(Path(lock.folder).resolve()):
                lock.acquire()

    @property
    def has_lost_folder(self) -> bool:
        """Whether the heartbeat of a lock has seen that the folder is another run's."""
        locks = [] if self.folder is None else self.folder.locks.values()
        return any(lock.lost for lock in locks) or (self.folder is not None and self.mirror.has_lost_store)

    def save(self, run_dir: str, stores_flos: bool = False) -> None:
        """Write `checkpoint-<updates>` into a folder, after the save before has ended and was pushed.

        With `stores_flos`, the ranks add up their floating-point operations, as `store_flos` does, in an exchange that
        a save makes anyway.

        Raises:
            CheckpointWriteError: The disk is full, or cannot be written to. Earlier checkpoints are unchanged.
        """
        host, args, state = self._host, self._host.args, self._host.state
        self._finish_beside()  # a callback saves once more
        self.mirror.send_held()
        unwritten = self.background.settle()
        self._weights, self._extras = None, {}
        if host._callbacks.lightning:
            self._ask_lightning_callbacks()
        final = layout.checkpoint_path(run_dir, state.global_step)
        with contextlib.ExitStack() as alone:
            if not host.is_in_train or self.folder is None:  # the folder is taken for this save only
                self.check_folder(run_dir)
                alone.enter_context(self.taking_folder(at_once=False))
            folder = self.folder
            assert folder is not None  # `taking_folder` has set it
            in_place, timing = self._where_and_when(final)
            place = SavingPlace(final, folder.owner, in_place)
            ends_at_once = [int(timing not in _FINISHED_BESIDE)]  # on any rank, after the exchange
            flos = Rows([float_bits(host.current_flos)]) if stores_flos else None
            with self._together(place, ends_at_once, flos):
                if unwritten is not None:
                    raise unwritten
                if host._pushes.unpushed is not None:
                    host._pushes.push_checkpoint(host._pushes.unpushed)
                if args.should_save:
                    self.check_folder(run_dir)
                    folder.hold(run_dir)
                    place.prepare(functools.partial(folder.hold, run_dir))
            if flos is not None:
                self._add_flos(flos)
            best_before = state.best_model_checkpoint
            note_best_checkpoint(
                state,
                lambda update: layout.checkpoint_path(run_dir, update),
                final,
                lambda path: os.path.isdir(path) and is_from_run(host._run, path, written_by(path)[1]),
            )
            log_line(f"Saving model checkpoint to {final}")
            behaviour_of(host.optimizer).tell_of_saving()
            try:
                write = self._frozen_write() if timing is Timing.BACKGROUND else self._write_files
                put = functools.partial(self._put, folder, place, timing, bool(*ends_at_once), write)
                finish = functools.partial(self._finish, final, timing, state.best_model_checkpoint)
                if timing is Timing.BACKGROUND:
                    self.background.submit(put, finish)
                elif put():
                    self._finish_in_time(final, timing, finish)
            except BaseException:
                state.best_model_checkpoint = best_before
                raise

    def _add_flos(self, told: Rows) -> None:
        """Add the operations that the ranks have told, or this rank alone has counted, to the state."""
        host = self._host
        flos = host.current_flos
        if told.of_all is not None:
            every = host.accelerator.rank_slice.sharing  # of each model one process counts
            flos = type(flos)(sum_of_bits(told.of_all[::every, 0]))
        host.state.total_flos += flos
        host.current_flos = 0

    def _ask_lightning_callbacks(self) -> None:
        """Let Lightning callbacks add entries to the checkpoint, or replace the weights by averages."""
        trainer, module = self._host._run.lightning_trainer, self._host._run.module
        if trainer is None or module is None:
            return
        weights: Weights | None = None
        checkpoint: dict[str, Any] = {}
        for callback in self._host._callbacks.lightning:
            if is_replaced(callback, "on_save_checkpoint", pl.Callback):
                if weights is None:
                    weights = checkpoint["state_dict"] = module.state_dict()
                callback.on_save_checkpoint(trainer, module, checkpoint)
        replaced = checkpoint.pop("state_dict", None)
        if replaced is not weights:
            self._weights = {name.removeprefix("model."): value for name, value in replaced.items()}
        for name, value in checkpoint.items():
            plain = as_plain(value)
            if plain is None and value is not None:
                warn_once(f"A callback puts {brief(name)} into the checkpoint: no plain value, so it is left out.")
            else:
                self._extras[name] = plain

    def _must_write_in_place(self, run_dir: str) -> bool:
        """Whether a disk of a rank that saves renames no folders. All ranks write to one place."""
        if run_dir not in self._lacks_renames:
            args, lacks = self._host.args, False
            if args.should_save:
                with contextlib.suppress(OSError):  # who takes the folder next says it
                    os.makedirs(run_dir, exist_ok=True)
                    lacks = not renames_folders(run_dir)
            self._lacks_renames[run_dir] = highest_each([lacks]) == [True]
        return self._lacks_renames[run_dir]

    def _where_and_when(self, final: str) -> tuple[bool, Timing]:
        """Decide whether a checkpoint is written in place, and when the parts of its save run.

        User code that takes part in writing may look for files beside the checkpoint, so it writes in place.
        """
        host, args = self._host, self._host.args
        model, processor = host.accelerator.unwrap_model(host.model), host.processing_class
        in_place = self._must_write_in_place(os.path.dirname(final)) or any(map(self._overrides, _WRITERS))
        for one in (model, getattr(model, "config", None), processor or getattr(host.data_collator, "tokenizer", None)):
            method = getattr(type(one), "save_pretrained", None)
            is_ours = method is None or method.__module__.partition(".")[0] in ("transformers", "peft")
            in_place = in_place or not is_ours
        if args.async_save:
            own = [name for name in (*_WRITERS, *ROTATION) if self._overrides(name)]
            reasons = {
                "with several processes checkpoints are written at once.": args.world_size > 1,
                "the model is sharded; checkpoints are written at once.": not host._model_state.can_be_copied,
                f"{type(host).__name__} overrides {', '.join(own)}; checkpoints are not async.": bool(own),
                "adapters of PEFT are small; they are written at once.": is_peft_model(model),
            }
            if not any(reasons.values()):
                return in_place, Timing.BACKGROUND
            for why, holds in reasons.items():
                if holds:
                    warn_once(f"`async_save=True`: {why}")
        # User code that sees a checkpoint may copy, change or remove it, at a time that only callbacks tell.
        is_seen = not self.is_by_flag or any(map(self._overrides, ("_save_checkpoint", *ROTATION)))
        hearing = host.callback_handler.hearing("on_save")
        is_heard = any(getattr(callback, "reads_checkpoints", True) for callback in hearing)
        # An upload takes the files as they are. An old folder of that name may go only once the new one is on the disk.
        # A system without boot ids, or one of several nodes, does not know what a power cut has taken.
        replaces, knows_boots = os.path.lexists(final), manifest.this_boot() is not None
        is_needed_whole = args.push_to_hub or replaces or args._launch.nodes != 1 or not knows_boots
        if is_seen or is_needed_whole or (is_heard and args.world_size > 1):
            return in_place, Timing.NOW
        return in_place, Timing.SUMMED if is_heard else Timing.LATER

    @contextlib.contextmanager
    def _together(
        self, place: SavingPlace, numbers: list[int] | None = None, rows: Rows | None = None, is_told: bool = True
    ) -> Iterator[None]:
        """Run a part of a save on all ranks, and continue if all have succeeded. `numbers` and `rows` are exchanged.

        Without `is_told`, each rank goes on, or fails, by itself.
        """
        with failing_together(is_wanted=is_told, numbers=numbers, rows=rows):
            try:
                yield
            except BaseException as failed:
                if self._host.args.should_save:
                    place.discard()
                is_of_disk = isinstance(failed, (OSError, RuntimeError, safetensors.SafetensorError))
                if is_of_disk and not isinstance(failed, HfCompatError):
                    self.check_folder(place.final)  # a run that has taken the folder removes the hidden one
                    raise _not_written(place.final, failed) from failed
                raise

    def _put(
        self,
        folder: OutputFolder,
        place: SavingPlace,
        timing: Timing,
        ends_at_once: bool,
        write: Callable[[str], None],
    ) -> bool:
        """Write the files and the manifest, give the folder its name, and pass it to the uploads.

        Where a save `ends_at_once`, each rank flushes and hashes what it alone has written. Where it does not, and no
        user code could look for the folder, the other ranks do not wait for its name. All hear of an error then at the
        next save or at the end, as of one beside the training.

        Returns:
            Whether this rank has done its part.
        """
        host, args, final = self._host, self._host.args, place.final
        names = layout.files_of_rank(args.process_index, args.world_size, host.state.global_step)
        listed = Rows(as_rows(names, {})) if ends_at_once and args.world_size > 1 else None
        with self._together(place, rows=listed):
            os.makedirs(place.hidden, exist_ok=True)  # this rank may have a disk of its own
            write(place.folder)
            if listed is not None:
                listed.own = as_rows(names, manifest.flushed(place.folder, names))
        is_told = ends_at_once or args.world_size == 1 or host._run.flag_agreement.sources.in_updates
        try:
            with self._together(place, is_told=is_told):
                if args.should_save:
                    folder.hold(place.run_dir)
                    writer = folder.writer(host._run, place.run_dir, args.save_total_limit)
                    flushes = timing not in _FINISHED_BESIDE
                    place.seal(writer, flushes, self._known_to_all(listed), sums=timing is Timing.SUMMED)
                    folder.hold(place.run_dir)  # sealing may have taken long
                    place.put()
        except Exception as error:
            if is_told:
                raise
            self.background.fail(error)
            return False
        if host.args.push_to_hub and timing is Timing.BACKGROUND:
            host._pushes.unpushed = final
        elif host.args.push_to_hub:
            host._pushes.push_checkpoint(final)
        return True

    def _known_to_all(self, listed: Rows | None) -> Listed:
        """What the ranks have told of their own files, which the one that writes the manifest does not read."""
        known: Listed = {}
        if listed is not None and listed.of_all is not None:
            world, updates = self._host.args.world_size, self._host.state.global_step
            for rank, row in enumerate(listed.of_all.tolist()):
                known |= of_rows(layout.files_of_rank(rank, world, updates), row)
        return known

    def _finish(self, final: str, timing: Timing, best: str | None) -> None:
        """With `LATER` and `SUMMED`, flush and hash the checkpoint. Then delete checkpoints beyond the limit.

        Checkpoints of other runs go first. The best one and the one just written stay.
        """
        host, run_dir, limit = self._host, os.path.dirname(final), self._host.args.save_total_limit
        if timing in _FINISHED_BESIDE:
            self.check_folder(final)
            try:
                is_read = timing is Timing.SUMMED and host.args.output_store is None  # a store wants hashes
                (manifest.flush_listed if is_read else manifest.flush_and_hash)(final)
            except OSError as error:  # the system has lost a part of it
                self.check_folder(final)
                with contextlib.suppress(OSError):
                    self.remove(final)
                raise _not_written(final, error) from error
        if not host.args.should_save:
            return
        self.check_folder(final)
        if self._overrides("_rotate_checkpoints"):
            host._rotate_checkpoints(use_mtime=True, output_dir=run_dir)
        elif self._overrides("_sorted_checkpoints"):
            ordered = host._sorted_checkpoints(output_dir=run_dir, use_mtime=True)
            remove_surplus([path for path in ordered if manifest.is_ours(path)], limit, [best, final], self.remove)
        elif limit:  # reading the manifests takes longer with every checkpoint
            ordered = self.in_rotation_order(run_dir, layout.checkpoint_step(final) or 0)
            remove_surplus(ordered, limit, [best, final], self.remove)
        if self.folder is not None:
            self.mirror.hold(final, best, self.folder.owner.id)
        if timing is not Timing.NOW:
            self.mirror.send_held()

    def remove(self, path: str) -> None:
        """Delete a checkpoint, unless the folder that it is in is another run's by now."""
        manifest.remove(path, functools.partial(self.check_folder, path))

    def _finish_in_time(self, final: str, timing: Timing, finish: Callable[[], None]) -> None:
        """Finish a save at once, beside the training, or after callbacks have heard of it."""
        if timing is Timing.NOW:
            finish()
        if not self._host.args.should_save:
            return
        if timing is Timing.LATER:
            self.background.submit(finish)
        else:
            self._sealed = (final, manifest.file_stats(final))
            self._unfinished = finish if timing is Timing.SUMMED else None

    def end_of_event(self) -> None:
        """After `on_save`, list anew what was changed in the checkpoint just written, and finish it beside training."""
        self._adopt_changes()
        self._finish_beside()
        self.mirror.send_held()

    def _finish_beside(self) -> None:
        """Start what is left of a save that callbacks have heard of."""
        finish, self._unfinished = self._unfinished, None
        if finish is not None:
            self.background.submit(finish)

    def _adopt_changes(self) -> None:
        (folder, file_stats), self._sealed = self._sealed or ("", {}), None
        if folder:
            self.check_folder(folder)
        try:
            changes = manifest.relist_changed_files(folder, file_stats) if folder else ()
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

    def _write_files(self, folder: str) -> None:
        """Write a checkpoint's files with the Trainer's methods."""
        host, args = self._host, self._host.args
        saves_optimizer, written = not args.save_only_model, None
        with Helpers[None](1, "hf_compat-optimizer") as beside:
            if saves_optimizer and host._model_state.can_be_copied and not any(map(self._overrides, _WRITERS)):
                os.makedirs(folder, exist_ok=True)
                written = beside.submit(host._save_optimizer_and_scheduler, folder)  # both writers work outside Python
            model = host.accelerator.unwrap_model(host.model)
            with contextlib.nullcontext() if self._weights is None else _holding(model, self._weights):
                host.save_model(folder, _internal_call=True)
            os.makedirs(folder, exist_ok=True)
            if written is not None:
                written.result()
            elif saves_optimizer:
                host._save_optimizer_and_scheduler(folder)
        if saves_optimizer:
            host._save_scaler(folder)
            host._save_rng_state(folder)
            for file in STATE_FILES:
                if not file.method:
                    self.write_state(file.name, folder)
        if args.should_save:
            host.state.stateful_callbacks = export_states([*host.callback_handler.callbacks, host.control])
            host.state.save_to_json(os.path.join(folder, layout.TRAINER_STATE_NAME))

    def write_state(self, name: str, folder: str) -> None:
        """Write a file of `STATE_FILES`, if this training has it and this rank writes it."""
        args, path = self._host.args, os.path.join(folder, name)
        if name in layout.RANK_STATES:
            path = os.path.join(folder, layout.of_rank(name, args.process_index, args.world_size))
        elif not args.should_save:
            return
        content = next(file for file in STATE_FILES if file.name == name).content(self)
        if content is not None:
            (_write_json if name.endswith(".json") else torch.save)(content, path)

    def _frozen_write(self) -> Callable[[str], None]:
        """Copy a checkpoint's content, and make the function that writes the copy.

        The optimizer's state is most of the bytes. It is copied while training continues, before its next step.
        """
        host, memory, beside = self._host, self.copy_memory, self._device_copies
        handler, later = host.callback_handler, None
        memory.begin()
        # A user's callback may change the state in any event, so the first one that is called waits for the copies.
        of_users = [c for c in host._callbacks.lightning if not type(c).__module__.startswith("lightning.")]
        if not of_users and not is_replaced(handler, "call_event", CallbackHandler):
            later = self._state_copies.before_steps_of(unwrap_optimizer(host.optimizer))
            handler.before_heard = None if later is None else self._state_copies.finish
        weights = frozen_copy(self._weights or host._model_state.whole_weights(), memory, beside)
        files: dict[str, object] = {}
        for file in () if host.args.save_only_model else STATE_FILES:
            content = file.content(self)
            if content is not None:
                where = (memory, later or beside) if file.name == layout.OPTIMIZER_NAME else ()
                files[file.name] = frozen_copy(content, *where)
        memory.end()
        beside.before_change()  # a forward pass changes buffers
        host.state.stateful_callbacks = export_states([*handler.callbacks, host.control])
        state = copy.deepcopy(host.state)

        def write(folder: str) -> None:
            beside.wait()
            if later is not None:
                later.result()
            host._save(folder, state_dict=weights)
            for name, content in files.items():
                (_write_json if name.endswith(".json") else save_torch)(content, os.path.join(folder, name))
            state.save_to_json(os.path.join(folder, layout.TRAINER_STATE_NAME))

        return write

    def _state_of_schedule(self) -> object | None:
        return None if self._host.lr_scheduler is None else self._host.lr_scheduler.state_dict()

    def _state_of_scaler(self) -> object | None:
        scaler = self._host.accelerator.scaler
        return None if scaler is None else scaler.state_dict()

    def _state_of_run(self) -> PlainState | None:
        """What a resumed run needs of the one that is training. None outside of a training."""
        host, run = self._host, self._host._run
        if run.lightning_trainer is None or run.windows is None:
            return None
        losses, grad_norm = run.losses.state_with(run.grad_norm)
        # the position after the counted updates, as a resumed run repeats an unfinished update
        is_within_update = is_training_batch(run.lightning_trainer)
        epoch_is_over = host.control.should_epoch_stop and not is_within_update  # a callback is ending the epoch
        callbacks = {}
        for callback in host._callbacks.lightning:
            key = callback.state_key
            callbacks[key] = readable_state(callback.state_dict(), f"The state of the callback {key}")
        # an override of the user's may write other random states, or none
        beside = {} if self._overrides("_save_rng_state") else read_rng(of_all_gpus=host.args.world_size > 1)
        return RunState(
            data=run.windows.position(epoch_is_over, before_last=is_within_update).beside(beside),
            moment=run.moment,
            world_size=host.args.world_size,
            sharing=host.accelerator.rank_slice.sharing,
            sequence=host.get_sp_size(),
            samples_per_micro_batch=(
                host._train_batch_size * host.accelerator.rank_slice.world_size // host.get_sp_size()
            ),
            losses=dict(losses),
            grad_norm=grad_norm,
            learning_rate=None if run.learning_rate is None else float(run.learning_rate),
            callbacks=callbacks,
            extras=self._extras,
            evaluated=sorted(run.evaluated),
            workers=getattr(run.loader, "num_workers", None),
            keeps_workers=getattr(run.loader, "persistent_workers", False),
        ).to_plain()

    def in_rotation_order(self, run_dir: str, updates_done: int) -> list[str]:
        """List this package's checkpoints in a folder, in the order in which rotation removes them."""
        found = {path: written_by(path) for path in layout.list_checkpoints(run_dir)}
        ours = {path: layout.checkpoint_step(path) or 0 for path, (is_ours, _) in found.items() if is_ours}
        run = self._host._run
        return in_order_of_rotation(ours, updates_done, lambda path: is_from_run(run, path, found[path][1]))

    def keep_best_alone(self, run_dir: str, best: str) -> None:
        """At the end of a run with a limit of one checkpoint, keep only the best."""
        ordered = self.in_rotation_order(run_dir, 0)
        for path in checkpoints_to_delete(ordered, 1, [best]):  # all go but the best
            log_line(f"Deleting older checkpoint [{path}] due to args.save_total_limit")
        remove_surplus(ordered, 1, [best], self.remove)
        self.mirror.alone = best


class StateFile(NamedTuple):
    """A file of a checkpoint that holds a part of the training, beside the model's files and `trainer_state.json`.

    The Trainer's `method` writes it, which a subclass may override. Without one `Saver` does. A content of None means
    that a training has no such file. An `async_save` writes a copy of the content.
    """

    name: str
    content: Callable[[Saver], object | None]
    method: str = ""


# `checkpoint/layout.py` names them. `STAGES` in `resumer.py` says when a resume reads them.
STATE_FILES = (
    StateFile(layout.OPTIMIZER_NAME, lambda saver: saver._host.optimizer.state_dict(), "_save_optimizer_and_scheduler"),
    StateFile(layout.SCHEDULER_NAME, Saver._state_of_schedule, "_save_optimizer_and_scheduler"),
    StateFile(layout.SCALER_NAME, Saver._state_of_scaler, "_save_scaler"),
    StateFile(
        layout.RNG_STATE_NAME,
        lambda saver: read_legacy_rng(of_all_gpus=saver._host.args.world_size > 1),
        "_save_rng_state",
    ),
    StateFile(layout.RUN_STATE_NAME, Saver._state_of_run),
)


def _write_json(content: object, path: str) -> None:
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# The way out of a write that failed, by the error's number.
_WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give write permission there"),
    **dict.fromkeys(
        (errno.ENOTEMPTY, errno.EEXIST), "another program writes there: end it, or name another `output_dir`"
    ),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (`ulimit -n`)"),
    errno.ENAMETOOLONG: "choose a shorter `output_dir`",
}


def _not_written(final: str, cause: BaseException) -> CheckpointWriteError:
    folder, number = os.path.dirname(final), cause.errno if isinstance(cause, OSError) else None
    # torch's writer only says which position it could not reach
    is_full = os.path.isdir(folder) and shutil.disk_usage(folder).free == 0
    way_out = "make room there" if is_full else _WAYS_OUT.get(number or 0, "make room or give write permission there")
    if number is not None and number not in _WAYS_OUT and not is_full:
        way_out = "look for the disk's errors in the system's log, or name another `output_dir` and checkpoint"
    return CheckpointWriteError(
        f"The checkpoint {final} could not be written: {cause}{'; no space left on the disk' if is_full else ''}.\n\n"
        f"Hint: {way_out}, then resume; earlier checkpoints are as they were."
    )


@contextlib.contextmanager
def _holding(model: nn.Module, weights: Weights) -> Iterator[None]:
    """Let a model hold other weights within the context, so that its own methods write them."""
    own = {name: value.clone() for name, value in model.state_dict().items()}
    is_pruned = own.keys() != weights.keys()  # the model has weights and masks for these
    if is_pruned:
        model.__dict__["state_dict"] = lambda *args, **kwargs: dict(weights)
    else:
        model.load_state_dict(weights)
    try:
        yield
    finally:
        if is_pruned:
            del model.__dict__["state_dict"]
        else:
            model.load_state_dict(own)
