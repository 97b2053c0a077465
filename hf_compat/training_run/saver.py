"""`Saver`: how a checkpoint is written. One sequence, of which a part or all may run beside the training.

    prepare   make the hidden folder that the checkpoint is written into
    put       write the files, list them in a manifest, rename the folder to `checkpoint-<updates>`
    push      give it to the Hub's uploads
    finish    flush and hash what `put` has only listed, then remove what `save_total_limit` has no room for

`Timing` says which of them run beside the training. The files themselves are written by the Trainer's methods, each of
which a subclass may override.

Rotation: choose the checkpoints to delete after a save, and at the end of the run. Pure functions.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, Protocol

import safetensors
import torch
from torch import nn

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint import manifest as sealing
from hf_compat.checkpoint.layout import SavingPlace
from hf_compat.checkpoint.model_state import ModelState
from hf_compat.checkpoint.reading import Weights
from hf_compat.checkpoint.run_lock import Owner
from hf_compat.checkpoint.run_state import RUN_STATE_NAME, PlainState, RunState
from hf_compat.checkpoint.torch_writer import save_torch
from hf_compat.data.types import Collator
from hf_compat.engine.windows import as_plain
from hf_compat.errors import CheckpointWriteError, HfCompatError, warn_once
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.callbacks import CallbackHandler
from hf_compat.hf.state import TrainerControl, TrainerState, export_states, is_exportable
from hf_compat.interop.transformers_models import is_peft_model
from hf_compat.interop.upstream_log import log_line
from hf_compat.optim.stepping import stepping_of, unprepared
from hf_compat.runtime.collectives import agree
from hf_compat.runtime.device_copies import CopyMemory, DeviceCopies, LaterCopies, StateCopies, frozen_copy
from hf_compat.runtime.inspection import is_replaced
from hf_compat.runtime.seeding import read_rng, unpack_rng
from hf_compat.training_run.output_folder import OutputFolder, is_from_run, saves_checkpoints, writer_of_run
from hf_compat.training_run.run import (
    LightningCallbacks,
    TrainingRun,
    collect_callback_entries,
    holding,
    note_best_checkpoint,
)


def checkpoints_to_delete(
    oldest_first: Sequence[str], save_total_limit: int | None, keep: Iterable[str | None]
) -> list[str]:
    """Choose the oldest checkpoints to delete, except those in `keep`.

    Args:
        oldest_first: All checkpoints, folders or files.
        save_total_limit: Number of checkpoints to keep. None or 0 keeps all.
        keep: The best one, and the newest or the one just written. None for one that does not exist.

    Mirrors:
        `transformers.trainer_utils.rotate_checkpoints`, 5.23.

    Differs:
        The caller gives the order, by run and update. Upstream sorts by modification time first.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return []
    candidates = _without(oldest_first, keep)
    kept = len(oldest_first) - len(candidates)
    surplus = len(oldest_first) - max(save_total_limit, kept)
    return candidates[: max(surplus, 0)]


def in_order_of_rotation(
    checkpoints: Mapping[str, int], updates_done: int, of_this_run: Callable[[str], bool]
) -> list[str]:
    """Order checkpoints by when they are deleted, the first one first.

    Those of other runs come first. Then come those that this run wrote after its current update, before it was resumed
    from an earlier checkpoint. Each group is sorted by updates.

    Args:
        checkpoints: Paths, each with its update.
        updates_done: Updates that this run has made.
        of_this_run: Whether this run wrote a checkpoint.
    """

    def rank(path: str) -> tuple[bool, bool, int]:
        update, is_own = checkpoints[path], of_this_run(path)
        return is_own, is_own and update <= updates_done, update

    return sorted(checkpoints, key=rank)


def checkpoints_to_delete_at_end(
    checkpoints: Sequence[str], save_total_limit: int | None, best: str | None
) -> list[str]:
    """Choose the checkpoints to delete at the end of a run. With a limit of one, only the best is kept.

    Args:
        checkpoints: All checkpoints, folders or files.
        save_total_limit: Number of checkpoints to keep.
        best: The best one. If None, all are kept.
    """
    return _without(checkpoints, [best]) if save_total_limit == 1 and best is not None else []


def _without(paths: Sequence[str], excluded: Iterable[str | None]) -> list[str]:
    outside = {os.path.abspath(path) for path in excluded if path is not None}
    return [path for path in paths if os.path.abspath(path) not in outside]


logger = logging.getLogger(__name__)


# Methods that write; what a subclass writes in their place cannot be copied for later.
_WRITERS = ("save_model", "_save", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
# Override points of 4.x, which 5.23 has not; an override runs in the thread that trains.
_ROTATION = ("_rotate_checkpoints", "_sorted_checkpoints")


class Timing(StrEnum):
    """When the parts of a save run; `prepare` is always at once."""

    NOW = "all at once"
    LATER = "`finish` beside the training"
    BACKGROUND = "`put`, `push` and `finish` beside the training, of a copy of the state"


class _Accelerator(Protocol):
    def unwrap_model(self, model: nn.Module) -> nn.Module: ...

    @property
    def scaler(self) -> torch.amp.GradScaler | None: ...


class _Pushes(Protocol):
    def push_checkpoint(self, folder: str) -> None: ...

    def push_when_written(self, folder: str) -> None: ...


class SavingHost(Protocol):
    """What a `Saver` asks of the Trainer that it saves; the methods are override points."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    model: nn.Module
    optimizer: Any  # torch's or anybody's
    lr_scheduler: Any
    callback_handler: CallbackHandler
    processing_class: object
    data_collator: Collator
    is_in_train: bool
    _run: TrainingRun
    _train_batch_size: int

    @property
    def accelerator(self) -> _Accelerator: ...

    @property
    def _callbacks(self) -> LightningCallbacks: ...

    @property
    def _model_state(self) -> ModelState: ...

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...

    def _save(self, output_dir: str | None = None, state_dict: Weights | None = None) -> None: ...

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...

    def _save_scaler(self, output_dir: str) -> None: ...

    def _save_rng_state(self, output_dir: str) -> None: ...

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None: ...

    def _sorted_checkpoints(
        self, output_dir: str | None = None, checkpoint_prefix: str = ..., use_mtime: bool = False
    ) -> list[str]: ...

    @property
    def _pushes(self) -> _Pushes: ...


class Saver:
    """Write, place and rotate the checkpoints of a Trainer.

    Args:
        host: The Trainer, whose methods write the files.
        overrides: Whether a subclass, or the user of this instance, has replaced a method of the Trainer.

    Attributes:
        folder: The locks of the folders that are saved into.
        background: Runs what is done beside the training; its error comes out at the next update.
    """

    def __init__(self, host: SavingHost, overrides: Callable[[str], bool]) -> None:
        self._host, self._overrides = host, overrides
        self.folder = OutputFolder()
        self.background = BackgroundWriter()
        self.copy_memory, self._state_copies = CopyMemory(), StateCopies()
        self._device_copies = DeviceCopies()
        self._is_by_flag = False
        self._sealed: tuple[str, sealing.Stamps] | None = None  # the checkpoint just written, and its files then
        self._weights: Weights | None = None  # those that a Lightning callback puts in the model's place
        self._extras: PlainState = {}  # what Lightning callbacks add

    @contextlib.contextmanager
    def taking_folder(self, at_once: bool) -> Iterator[None]:
        """Keep other runs from saving into the output folder while this one trains; wait for the last write.

        Args:
            at_once: Take the folder before training; else each folder is taken when something is saved into it.
        """
        args = self._host.args
        self.folder.begin()
        try:
            if at_once and saves_checkpoints(args):
                self.folder.take(str(args.output_dir), args.should_save)
            yield
            self.background.wait()  # a callback may have saved at the very end
        except BaseException as error:
            unwritten = self.background.settle()  # a `True` right after would begin from an older checkpoint
            if unwritten is not None:
                error.add_note(str(unwritten))
            raise
        finally:
            self._release()

    @contextlib.contextmanager
    def _saving_into(self, run_dir: str) -> Iterator[Owner]:
        """Take a folder for a save: until the end of training, or for this save alone where nothing is trained."""
        is_alone = not self._host.is_in_train or self.folder.owner is None
        if is_alone:
            self.folder.begin()
        try:
            self.folder.take(run_dir, self._host.args.should_save)
            assert self.folder.owner is not None  # `begin` has set it
            yield self.folder.owner
            if is_alone:
                self.background.wait()
        finally:
            if is_alone:
                self._release()

    def _release(self) -> None:
        self.copy_memory.release()  # nothing is written any more
        self._state_copies.release()
        self.folder.release()

    @contextlib.contextmanager
    def by_flag(self) -> Iterator[None]:
        """Mark a save that `control.should_save` asked for: no code of the user's goes on with the files at once."""
        self._is_by_flag = True
        try:
            yield
        finally:
            self._is_by_flag = False

    def save(self, run_dir: str) -> None:
        """Write `checkpoint-<updates>` into a folder.

        Raises:
            CheckpointWriteError: The disk is full, or cannot be written to. Earlier checkpoints are as they were.
        """
        host, args, state = self._host, self._host.args, self._host.state
        self._ask_lightning_callbacks()
        final = names.checkpoint_path(run_dir, state.global_step)
        with self._saving_into(run_dir) as owner:
            place = SavingPlace(run_dir, owner, mirrors=self._writes_beside())

            def prepare() -> None:
                if args.should_save:
                    self.folder.keep(run_dir)
                    place.prepare()

            self._together(prepare, place, final)
            best_before = state.best_model_checkpoint
            note_best_checkpoint(
                state,
                lambda update: names.checkpoint_path(run_dir, update),
                final,
                lambda path: os.path.isdir(path) and is_from_run(path, host._run),
            )
            log_line(f"Saving model checkpoint to {final}")
            stepping_of(host.optimizer).tell_of_saving()
            try:
                self._write(place, final)
            except BaseException:
                state.best_model_checkpoint = best_before
                raise

    def _ask_lightning_callbacks(self) -> None:
        """Let Lightning callbacks add to the checkpoint. What cannot be read back as a plain value is left out."""
        self._weights, self._extras = None, {}
        run = self._host._run
        if run.module is None or run.lightning_trainer is None:
            return
        self._weights, extras = collect_callback_entries(
            self._host._callbacks.lightning, run.lightning_trainer, run.module
        )
        for name, value in extras.items():
            plain = as_plain(value)
            if plain is None and value is not None:
                warn_once(f"A callback puts {name!r} into the checkpoint: no plain value, so it is left out.")
            else:
                self._extras[name] = plain

    def _writes_beside(self) -> bool:
        """Return whether code of the user's takes part in writing: it may look for files beside the checkpoint."""
        host = self._host
        model, processor = host.accelerator.unwrap_model(host.model), host.processing_class
        saved = (model, getattr(model, "config", None), processor or getattr(host.data_collator, "tokenizer", None))
        own = (getattr(type(one), "save_pretrained", None) for one in saved)
        return any(map(self._overrides, _WRITERS)) or any(
            method is not None and method.__module__.partition(".")[0] not in ("transformers", "peft") for method in own
        )

    def _write(self, place: SavingPlace, final: str) -> None:
        """Run the parts of a save in their order, at once or beside the training."""
        host, best = self._host, self._host.state.best_model_checkpoint
        timing = self._timing(final)
        write = self._frozen_write() if timing is Timing.BACKGROUND else self._write_files

        def put() -> None:
            self._together(lambda: self._write_into(place, write, final), place, final)
            self._together(lambda: self._put_in_place(place, final, timing), place, final)
            if timing is Timing.BACKGROUND:
                host._pushes.push_when_written(
                    final
                )  # the next update pushes: an override runs in the thread that trains
            else:
                host._pushes.push_checkpoint(final)

        def finish() -> None:
            if timing is Timing.LATER:
                self._flush(final)
            if host.args.should_save:
                self._make_room(final, best)

        if timing is Timing.BACKGROUND:

            def put_and_finish() -> None:
                put()
                finish()

            self.background.submit(put_and_finish)
            return
        put()
        if timing is Timing.NOW:
            finish()
            self._sealed = (final, sealing.stamps(final)) if host.args.should_save else None
        elif host.args.should_save:
            self.background.submit(finish)

    def _timing(self, final: str) -> Timing:
        """Decide when the parts of a save run. Every process decides alike."""
        host = self._host
        if host.args.async_save and self._can_be_copied():
            return Timing.BACKGROUND
        # Code of the user's that looks at a checkpoint may copy, change or remove it; nothing may be written into it
        # from then on.
        is_seen = (
            not self._is_by_flag
            or any(getattr(c, "reads_checkpoints", True) for c in host.callback_handler.hearing("on_save"))
            or any(map(self._overrides, ("_save_checkpoint", *_ROTATION)))
        )
        # An upload takes what is there. An old folder of that name may go only when the new one is on the disk. And a
        # system without boot ids, or one of several nodes, cannot tell what a power cut has taken.
        is_needed_whole = (
            host.args.push_to_hub
            or os.path.lexists(final)
            or host.args._launch.nodes != 1
            or sealing.this_boot() is None
        )
        return Timing.NOW if is_seen or is_needed_whole else Timing.LATER

    def _can_be_copied(self) -> bool:
        """Return whether all that a checkpoint holds can be copied first; warn of the reason where it cannot."""
        host = self._host
        if host.args.world_size > 1:
            warn_once("`async_save=True`: with several processes checkpoints are written at once.")
            return False
        if not host._model_state.can_be_copied:
            warn_once("`async_save=True`: the model is sharded; checkpoints are written at once.")
            return False
        own = [name for name in (*_WRITERS, *_ROTATION) if self._overrides(name)]
        if own:
            warn_once(
                f"`async_save=True`: {type(host).__name__} overrides {', '.join(own)}; checkpoints are not async."
            )
        is_adapter = is_peft_model(host.accelerator.unwrap_model(host.model))
        if is_adapter:
            warn_once("`async_save=True`: adapters of PEFT are small; they are written at once.")
        return not own and not is_adapter

    def _together(self, act: Callable[[], None], place: SavingPlace, final: str) -> None:
        """Do a part of a save on every process, and go on where all have succeeded.

        Raises:
            CheckpointWriteError: The files could not be written, here or in another process.
        """
        error: Exception | None = None
        try:
            act()
        except BaseException as failed:
            if self._host.args.should_save:
                place.discard()
            is_of_disk = isinstance(failed, (OSError, RuntimeError, safetensors.SafetensorError))
            if is_of_disk and not isinstance(failed, HfCompatError):
                error = _not_written(final, failed)
            elif isinstance(failed, Exception):  # of a method or a callback of the user's
                error = failed
            else:
                raise
        # not in the handler: there the exception would keep the frames of the writers, and their open files
        agree(error)

    def _write_into(self, place: SavingPlace, write: Callable[[str], None], final: str) -> None:
        os.makedirs(place.path, exist_ok=True)  # this process may have a disk of its own
        write(place.inside(final))
        place.note_deletions()

    def _put_in_place(self, place: SavingPlace, final: str, timing: Timing) -> None:
        """Write the manifest and rename the folder; with `Timing.LATER` its files may not be on the disk yet."""
        host = self._host
        if not host.args.should_save:
            return
        place.adopt(final)
        partial, writer = place.inside(final), writer_of_run(host._run, place.run_dir, host.args.save_total_limit)
        # an override may have written a folder of that name just now; it may go only when the new one is on the disk
        is_flushed = timing is not Timing.LATER or os.path.lexists(final)
        if is_flushed:
            manifest.seal(partial, writer)
        else:
            sealing.list_unflushed(partial, writer)
        self.folder.keep(place.run_dir)
        place.land(final)
        if is_flushed:
            manifest.put_in_place(partial, final)
        else:
            os.replace(partial, final)
        place.discard()

    def _flush(self, final: str) -> None:
        """Force a checkpoint to the disk and write its hashes; remove one of which the system has lost a part."""
        try:
            sealing.finish(final)
        except OSError as error:
            with contextlib.suppress(OSError):
                manifest.remove(final)
            raise _not_written(final, error) from error

    def adopt_changes(self) -> None:
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

    def _write_files(self, folder: str) -> None:
        """Write what a checkpoint holds, by the Trainer's methods."""
        host = self._host
        saves_optimizer = not host.args.save_only_model
        if saves_optimizer and host._model_state.can_be_copied and not any(map(self._overrides, _WRITERS)):
            # both take their time outside Python
            os.makedirs(folder, exist_ok=True)
            with ThreadPoolExecutor(1, "hf_compat-optimizer") as beside:
                written = beside.submit(host._save_optimizer_and_scheduler, folder)
                self._write_model(folder)
                written.result()
        else:
            self._write_model(folder)
            if saves_optimizer:
                host._save_optimizer_and_scheduler(folder)
        if saves_optimizer:
            host._save_scaler(folder)
            host._save_rng_state(folder)
            run_state = self._run_state()
            if run_state is not None and (host.args.should_save or host.args.world_size > 1):
                run_state.save(folder, host.args.process_index, host.args.world_size)
        if host.args.should_save:
            host.state.stateful_callbacks = self._exported_states()
            host.state.save_to_json(os.path.join(folder, names.TRAINER_STATE_NAME))

    def _write_model(self, folder: str) -> None:
        with holding(self._host.accelerator.unwrap_model(self._host.model), self._weights):
            self._host.save_model(folder, _internal_call=True)
        os.makedirs(folder, exist_ok=True)

    def _run_state(self) -> RunState | None:
        """Return what it takes to go on as if the run had not stopped; None where nothing is being trained."""
        host = self._host
        size = host.args.world_size
        together = host._train_batch_size * size
        ends_epoch = host.control.should_epoch_stop
        return host._run.state(ends_epoch, size, together, host._callbacks.lightning, self._extras)

    def _exported_states(self) -> dict[str, Any]:
        host = self._host
        return export_states([c for c in [*host.callback_handler.callbacks, host.control] if is_exportable(c)])

    def _frozen_write(self) -> Callable[[str], None]:
        """Copy everything that a checkpoint holds, and return what writes the copy.

        The optimizer's state is copied while training goes on, before its next step; it is most of the bytes.
        """
        host = self._host
        self.copy_memory.begin()
        later, beside = self._later_copies(), self._device_copies
        weights = frozen_copy(self._weights or host._model_state.whole_weights(), self.copy_memory, None, beside)
        files: dict[str, object] = {}
        if not host.args.save_only_model:
            files[names.OPTIMIZER_NAME] = frozen_copy(host.optimizer.state_dict(), self.copy_memory, later, beside)
            if host.lr_scheduler is not None:
                files[names.SCHEDULER_NAME] = frozen_copy(host.lr_scheduler.state_dict())
            if host.accelerator.scaler is not None:
                files[names.SCALER_NAME] = host.accelerator.scaler.state_dict()
            files[names.RNG_STATE_NAME] = unpack_rng(read_rng())
            run_state = self._run_state()
            if run_state is not None:
                files[RUN_STATE_NAME] = frozen_copy(run_state.to_plain())
        self.copy_memory.end()
        beside.before_change()  # a forward pass changes buffers
        host.state.stateful_callbacks = self._exported_states()
        state = copy.deepcopy(host.state)

        def write(folder: str) -> None:
            beside.wait()
            if later is not None:
                later.result()
            host._save(folder, state_dict=weights)
            for name, content in files.items():
                save_torch(content, os.path.join(folder, name))
            state.save_to_json(os.path.join(folder, names.TRAINER_STATE_NAME))

        return write

    def _later_copies(self) -> LaterCopies | None:
        """Return what copies the optimizer's state before its next step; None where the user's code may change it.

        A callback may, in any event: the first one that is heard waits for the copies.
        """
        handler = self._host.callback_handler
        of_others = [c for c in self._host._callbacks.lightning if not type(c).__module__.startswith("lightning.")]
        if of_others or is_replaced(handler, "call_event", CallbackHandler):
            return None
        later = self._state_copies.before_steps_of(unprepared(self._host.optimizer))
        handler.before_heard = None if later is None else self._state_copies.finish
        return later

    def _make_room(self, written: str, best: str | None) -> None:
        """Remove what the limit has no room for: other runs' checkpoints first, never the one just written or the best.

        Args:
            written: The checkpoint that was just written.
            best: The best one.
        """
        run_dir = os.path.dirname(written)
        if self._overrides("_rotate_checkpoints"):
            self._host._rotate_checkpoints(use_mtime=True, output_dir=run_dir)
            return
        if self._overrides("_sorted_checkpoints"):
            ordered = self._host._sorted_checkpoints(output_dir=run_dir, use_mtime=True)
            ordered = [path for path in ordered if manifest.is_ours(path)]
        elif not self._host.args.save_total_limit:
            return  # none goes, and reading the manifests takes longer with every checkpoint
        else:
            ordered = self.oldest_first(run_dir, names.checkpoint_step(written) or 0)
        self.remove_surplus(ordered, [best, written])

    def oldest_first(self, run_dir: str, updates_done: int) -> list[str]:
        """List the checkpoints of a folder that this package wrote; what rotation removes first stands first."""
        ours = {
            path: names.checkpoint_step(path) or 0 for path in names.list_checkpoints(run_dir) if manifest.is_ours(path)
        }
        return in_order_of_rotation(ours, updates_done, lambda path: is_from_run(path, self._host._run))

    def remove_surplus(self, ordered: list[str], keep: list[str | None]) -> None:
        """Remove what `save_total_limit` has no room for."""
        for path in checkpoints_to_delete(ordered, self._host.args.save_total_limit, keep=keep):
            _remove_or_warn(path)

    def rotate_at_end(self, run_dir: str, best: str | None) -> None:
        """With a limit of one, keep the best checkpoint alone."""
        limit = self._host.args.save_total_limit
        for path in checkpoints_to_delete_at_end(self.oldest_first(run_dir, 0) if limit == 1 else (), limit, best):
            log_line(f"Deleting older checkpoint [{path}] due to args.save_total_limit")
            _remove_or_warn(path)


class BackgroundWriter:
    """Run one write at a time beside the training. The next call raises its error; the process exits after it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Start a write, after waiting for the one before; raise the error of that one."""
        self.wait()
        # no daemon: the interpreter does not exit before the checkpoint is whole
        self._thread = threading.Thread(target=self._run, args=(write,), name="hf_compat-checkpoint", daemon=False)
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise the error of a write that has ended."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the write under way, and raise its error."""
        error = self.settle()
        if error is not None:
            raise error

    def settle(self) -> BaseException | None:
        """Wait for the write under way, and return its error: for whoever has another one to raise."""
        if self._thread is not None:
            if self._thread.ident is not None:  # else Ctrl-C came before it had begun
                self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error


def _remove_or_warn(checkpoint: str) -> None:
    """Remove a checkpoint; where that fails the newer ones are good all the same, and the run goes on."""
    try:
        manifest.remove(checkpoint)
    except OSError as error:
        logger.warning("The old checkpoint %s could not be removed: %s. Training goes on.", checkpoint, error)


def _not_written(final: str, cause: BaseException) -> CheckpointWriteError:
    folder = os.path.dirname(final)
    # torch's writer only says which position it could not reach
    is_full = os.path.isdir(folder) and shutil.disk_usage(folder).free == 0
    error = CheckpointWriteError(
        f"The checkpoint {final} could not be written: {cause}{'; no space left on the disk' if is_full else ''}.\n\n"
        "Hint: make room or give write permission there, then resume; earlier checkpoints are as they were."
    )
    error.__cause__ = cause
    return error
