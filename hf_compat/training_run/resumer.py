"""`Resumer` chooses the checkpoint that a run resumes from, and restores it.

`STAGES` lists all parts of a resume in their order. The Trainer and its module call `Resumer.restore` at each moment.
`Windows` does so for the last one. The Trainer's methods load the files. `Windows` takes up the position, and the
bridge the last update's gradient norm and learning rate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import lightning.pytorch as pl
from torch.utils.data import IterableDataset

from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.choice import candidates, newest_of
from hf_compat.checkpoint.convert import read_lightning, to_hf
from hf_compat.checkpoint.files import first_line, naming, open_regular, problem, reading
from hf_compat.checkpoint.hints import no_checkpoint, nothing_to_resume
from hf_compat.checkpoint.layout import TRAINER_STATE_NAME, TRAINING_ARGS_NAME, checkpoint_step, list_checkpoints
from hf_compat.checkpoint.reading import Contents, Writer, read_manifest, read_torch_file
from hf_compat.checkpoint.run_state import RunState, read_random_states, resume_point
from hf_compat.checkpoint.shares import Share
from hf_compat.checkpoint.store import fetch_checkpoint, looking
from hf_compat.checkpoint.unlisted_checkpoints import holds_model_alone, reading_named_folder, tell_of_model_alone
from hf_compat.checkpoint.validation import read_trainer_state
from hf_compat.checkpoint.verifying import Unread, comparing, loading, sha256_of
from hf_compat.errors import ArgumentError, CheckpointError, CheckpointMismatch
from hf_compat.hf.state import INTERVALS, TrainerState
from hf_compat.runtime.addresses import store_address
from hf_compat.runtime.collectives import (
    broadcast_object,
    broadcast_text,
    failing_together,
    gather_objects,
    highest_each,
)
from hf_compat.runtime.console import SharedLogger
from hf_compat.runtime.inspection import dataset_of, home_of, is_replaced
from hf_compat.runtime.launch import slurm_job_id
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.signals import is_requeued
from hf_compat.runtime.text import shown
from hf_compat.training_run.best import tell_of_other_best
from hf_compat.training_run.interface import TrainerApi
from hf_compat.training_run.run import TrainingRun
from hf_compat.training_run.same_on_ranks import refuse_differences
from hf_compat.training_run.saver import Saver

logger = logging.getLogger(__name__)
shared_logger = SharedLogger(__name__, "transformers.trainer_utils")

_FILE, _MODEL = "a file", "a model without a training"  # to what a path leads
# What they load may be hashed while they do so: they do not use it before. An override may
_LARGE_READERS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler")
_NONE: Mapping[str, str] = MappingProxyType({})


class ResumeAt(StrEnum):
    """When a stage is due, in the order of a run."""

    MODEL_READY = "before the fit: the model is made and on its device; shards of FSDP 2, once the fit has sharded it"
    STATE_NEW = "before the fit: `_init_training_state` has made a new state"
    RUN_NEW = "before the fit: the run's record is made, its data is not cut into updates yet"
    CALLBACKS_SET_UP = "Lightning has called `setup` of all callbacks"
    OPTIMIZER_MADE = "Lightning's `on_fit_start`: optimizer and schedule are made"
    DATA_OPENED = "the first pass over the training data begins; if nothing is left to train, before the fit"


class Stage(NamedTuple):
    """A part of a resume.

    `method` is the Trainer's, which a subclass may override. Without an `action` the stage calls it, with the folder if
    it takes one.
    """

    at: ResumeAt
    restores: str
    method: str = ""
    action: Callable[[Resumer, str], None] | None = None
    takes_folder: bool = True


def wanted_checkpoint(given: object) -> str | bool | None:
    """Read the checkpoint that a training is to resume from: True for the newest one, False or None for none.

    Raises:
        ArgumentError: It is neither a path of this machine nor a truth value.
    """
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise ArgumentError(
            f"`{shown('resume_from_checkpoint', given)}` is neither a path nor a truth value.\n\n"
            "Hint: `train` takes the folder of a checkpoint, or True for the newest one. The Trainer itself takes the "
            "data, `train_dataset=…`."
        )
    return store_address(os.fspath(given)) or local_path("resume_from_checkpoint", given)


class Resumer:
    """Choose the checkpoint of a Trainer's run, and restore its parts."""

    def __init__(self, host: TrainerApi, saver: Saver) -> None:
        self._host, self._saver = host, saver
        self.is_loading = False  # a checkpoint is being loaded, and this call has trained nothing yet
        self.later_weights: str | None = None  # the folder whose shards are loaded once the fit has sharded the model
        self._unread = Unread()  # the files that are to be loaded, once they are known
        self._fetched: set[str] = set()  # checkpoints that came from the store
        self.weights_alone: str | None = None  # the folder of a model without a training state that `train` was given

    @contextlib.contextmanager
    def attempting_resume(self, wanted: str | bool | None, unloadable: dict[str, str]) -> Iterator[str | None]:
        """Choose the checkpoint that is trained from within the context.

        If a file turns out to be damaged, the automatic resume notes the checkpoint as unloadable. The next try takes
        an older one.

        Raises:
            CheckpointMismatch: The checkpoint is of another model.
        """
        is_automatic, given_optimizer = wanted is True or not wanted, self._host.optimizer
        self.weights_alone = self.later_weights = None
        with self.choosing_checkpoint(wanted, unloadable) as checkpoint:
            self.is_loading = checkpoint is not None
            try:
                yield checkpoint
            except CheckpointError as error:
                is_whole = isinstance(error, CheckpointMismatch)
                if is_whole or not is_automatic or checkpoint is None or not self.is_loading:
                    raise
                reason = first_line(error).removesuffix(".")
                unloadable[checkpoint] = problem(f"it cannot be loaded ({reason})", error)
                self._host.optimizer = given_optimizer  # the one made for this checkpoint may have loaded a part
            finally:
                self.is_loading = False

    @contextlib.contextmanager
    def choosing_checkpoint(
        self, wanted: str | bool | None, unloadable: Mapping[str, str] = _NONE
    ) -> Iterator[str | None]:
        """Yield the folder to resume from. A folder made of a Lightning checkpoint exists within the context only.

        `unloadable` are folders that could not be loaded, with the reasons.

        Raises:
            ArgumentError: What is named is not a path of this machine.
            CheckpointError: There is none, or the named one is damaged.
        """
        output_dir = str(self._host.args.output_dir)
        if wanted == "":  # from an empty shell variable, for example. Upstream refuses it, too
            raise CheckpointError(
                "Can't find a valid checkpoint at '': `resume_from_checkpoint` is empty.\n\n"
                "Hint: leave it out to train from the start, or name a checkpoint-<updates> folder."
            )
        wanted = wanted_checkpoint(wanted)
        is_job = not wanted and slurm_job_id() is not None
        if is_job and highest_each([self._host.is_world_process_zero() and is_requeued(output_dir)]) == [True]:
            logger.warning("SLURM has started this job again: training continues from the newest checkpoint.")
            wanted = True
        loaders = [getattr(self._host, stage.method) for stage in STAGES if stage.method in _LARGE_READERS]
        own = __name__.partition(".")[0]
        self._unread = Unread(defers=all(home_of(loader).partition(".")[0] == own for loader in loaders))
        with contextlib.ExitStack() as reading:
            reading.enter_context(loading(self._unread))
            folder = None
            if isinstance(wanted, str) and (self._host.args.output_store or store_address(wanted)):
                wanted = self._brought(wanted, reading)
            if wanted is True:
                folder = self._newest(output_dir, unloadable)
            elif wanted:
                kind = self._kind(str(wanted))
                with failing_together():
                    folder = self._named(str(wanted), kind, reading)
            self._bring_best(folder)
            self._unread.only(folder)
            yield folder

    def _newest(self, output_dir: str, unloadable: Mapping[str, str]) -> str:
        """Find the newest whole checkpoint. The first process names them all, and each verifies its share of each."""
        paths: list[str] = []
        is_first = self._host.is_world_process_zero()
        with failing_together():
            if is_first:
                manifest.recover(output_dir)  # finishes a killed save
                paths = candidates(output_dir, self._stored(output_dir))
        paths, unloadable = broadcast_object((paths, dict(unloadable)))
        problems: Callable[[str], list[str]] = self._problems
        if self._host.args.output_store is not None:
            problems = looking(self._bring, self._problems)
            for path in [path for path in unloadable if path not in self._fetched]:
                if self._bring(path, anew=True):  # the folder's was damaged, and the store has it, too
                    del unloadable[path]
        choice = newest_of(paths, unloadable, problems)
        if is_first:
            choice.tell()
        if choice.newest is None:
            raise nothing_to_resume(output_dir, choice.skipped)
        return choice.newest

    def _stored(self, output_dir: str) -> Mapping[str, Writer | None]:
        """The checkpoints in the store, by their path in the output folder, and who wrote them."""
        uploads = self._saver.mirror.uploads
        if uploads is None:
            return {}
        uploads.look()
        for name, why in sorted(uploads.store.incomplete.items()):
            logger.warning("%s in %s is not whole and is skipped: %s.", name, uploads.store.address, why)
        return uploads.writers(output_dir)

    def _bring(self, path: str, anew: bool) -> bool:
        """Fetch a checkpoint from the store if the output folder lacks it. All processes learn whether it was done."""
        brought = [0]
        with failing_together(numbers=brought):
            uploads = self._saver.mirror.uploads
            if uploads is not None and self._host.is_world_process_zero():
                brought[0] = int(uploads.bring(path, anew))
        if brought[0]:
            self._fetched.add(path)
        return bool(brought[0])

    def _bring_best(self, checkpoint: str | None) -> None:
        """Fetch the best checkpoint so far, too, whose weights the end of the run may load."""
        uploads = self._saver.mirror.uploads
        with failing_together() if self._host.args.output_store is not None else contextlib.nullcontext():
            if uploads is not None and checkpoint is not None:
                path = os.path.join(checkpoint, TRAINER_STATE_NAME)
                best = read_state(checkpoint).best_model_checkpoint if os.path.isfile(path) else None
                uploads.bring_best(checkpoint, best)

    def _brought(self, wanted: str, reading: contextlib.ExitStack) -> str:
        """Return the path of a named checkpoint that may be in a store, and is fetched then.

        One of this run's store comes into the output folder. One of another store exists within the context only.
        """
        args, address = self._host.args, store_address(wanted)
        path = wanted
        if address is not None and args.output_store is not None and address.startswith(f"{args.output_store}/"):
            path = os.path.join(str(args.output_dir), *address[len(args.output_store) + 1 :].split("/"))
            address = None
        with failing_together():
            uploads = self._saver.mirror.uploads
            if address is not None and self._host.is_world_process_zero():
                os.makedirs(str(args.output_dir), exist_ok=True)
                place = reading.enter_context(layout.hidden_folder(str(args.output_dir), layout.CONVERTING))
                path = fetch_checkpoint(address, place)
            elif uploads is not None:
                uploads.look()
                uploads.bring(path)
        return broadcast_text(path)

    @property
    def _share(self) -> Share:
        """The files that this process verifies. With node-local disks, it verifies all that it sees."""
        args = self._host.args
        place = (0, 1) if args.save_on_each_node else (args.process_index, args.world_size)
        return Share(*place, self._unread)

    def _problems(self, path: str) -> list[str]:
        """List what any rank finds wrong with its share of a checkpoint's files."""
        found: list[str] = []
        have_any = [0]
        with failing_together(numbers=have_any):
            found = manifest.problems(path, self._share)
            have_any[0] = int(bool(found))
        return [one for of_rank in gather_objects(found) for one in of_rank] if have_any[0] else found

    def _kind(self, wanted: str) -> str:
        """Say what a path leads to, on every rank. Ranks that see different things would wait in different places."""
        if os.path.isfile(wanted):
            kind = _FILE
        elif holds_model_alone(Path(wanted)):
            kind = _MODEL
        else:
            kind = "a folder" if os.path.isdir(wanted) else "not there"
        hint = "let every process see the same files."
        refuse_differences({"resume_from_checkpoint": kind}, "files", hint)
        return kind

    def _named(self, wanted: str, kind: str, reading: contextlib.ExitStack) -> str | None:
        """Return the folder of the checkpoint that the user names. None for a saved model without a training state.

        An edited one is read as it is, with a warning.
        """
        output_dir = str(self._host.args.output_dir)
        if kind == _FILE:
            reading.enter_context(naming(wanted))
            place = reading.enter_context(tempfile.TemporaryDirectory(prefix="hf_compat_"))
            folder = os.path.join(place, "checkpoint")
            try:
                to_hf(read_lightning(wanted), folder)
            except CheckpointError as error:
                raise no_checkpoint(wanted, error, output_dir) from error
            return folder
        warns = self._host.is_world_process_zero()
        if kind == _MODEL:
            # to begin with its weights in its own folder would replace its checkpoints
            if list_checkpoints(wanted) and os.path.realpath(wanted) == os.path.realpath(output_dir):
                raise no_checkpoint(wanted, output_dir=output_dir)
            if warns:
                tell_of_model_alone(wanted)
            self.weights_alone = wanted
            return None
        reading.enter_context(reading_named_folder(wanted, warns, output_dir, self._share))
        if warns and list_checkpoints(wanted):
            logger.warning("%s is an output folder, and is read as the checkpoint that its own files are.", wanted)
        return wanted

    def restore(self, moment: ResumeAt, checkpoint: str | None) -> None:
        """Restore the stages of a moment. Without a checkpoint, do nothing."""
        for stage in STAGES if checkpoint is not None else ():
            if stage.at is moment and checkpoint is not None:
                if stage.action is not None:
                    stage.action(self, checkpoint)
                else:
                    getattr(self._host, stage.method)(*[checkpoint] if stage.takes_folder else [])

    def start(self, run: TrainingRun) -> None:
        """Set the id of a run for manifests, and its position before its data is cut into updates.

        A resumed run keeps the id of its checkpoint. One that has nothing left to train gets its random states here.
        """
        writer = read_manifest(run.checkpoint).writer if run.checkpoint is not None else None
        written_by = "" if run.checkpoint is None else broadcast_text("" if writer is None else writer.run)
        folder = self._saver.folder
        if written_by:
            run.run_id = written_by
        elif folder is not None:
            run.run_id = folder.new_run_id()
        self.restore(ResumeAt.RUN_NEW, run.checkpoint)
        if run.start.is_finished:
            self.restore(ResumeAt.DATA_OPENED, run.checkpoint)

    def _load_state(self, checkpoint: str) -> None:
        """Read `trainer_state.json`. Its intervals apply, with a warning if the arguments differ."""
        host = self._host
        now = (host.state.logging_steps, host.state.eval_steps, host.state.save_steps)
        state = host.state = read_state(checkpoint, dict(zip(INTERVALS, now, strict=True)))
        saved = (state.logging_steps, state.eval_steps, state.save_steps)
        how = (host.args.logging_strategy, host.args.eval_strategy, host.args.save_strategy)
        for name, had, strategy in zip(INTERVALS, saved, how, strict=True):
            if had == 0 and strategy == "steps":
                raise CheckpointError(
                    f"{checkpoint}: `{name}` is 0 in {TRAINER_STATE_NAME}, and this run counts by it."
                )
        names = (*INTERVALS, "per_device_train_batch_size")
        size = host.args.per_device_train_batch_size
        lines = ""
        for name, given, had in zip(names, (*now, size), (*saved, state.train_batch_size or size), strict=True):
            if given != had:
                lines += f"\n\t{name}: {given} (from args) != {had} (from {TRAINER_STATE_NAME})"
        if lines:
            shared_logger.warning(f"The arguments are not those of the checkpoint, whose intervals count:{lines}")
        if host.is_world_process_zero():
            tell_of_other_best(host.args, state)
        state.best_model_checkpoint = self.best_of_state(state.best_model_checkpoint, checkpoint)

    def best_of_state(self, best: str | None, checkpoint: str) -> str | None:
        """Return the best checkpoint if it is this run's. Weights are read from it, and a state may name any folder.

        In a moved output folder, it lies beside the state's checkpoint.
        """
        if best is None:
            return None
        places = [str(self._host.args.output_dir), os.path.dirname(os.path.abspath(checkpoint))]
        beside = os.path.join(places[1], os.path.basename(best))
        is_checkpoint = checkpoint_step(best) is not None
        home = os.path.realpath(os.path.dirname(os.path.abspath(best)))
        if is_checkpoint and os.path.isdir(best) and home in map(os.path.realpath, places):
            return best
        if is_checkpoint and os.path.isdir(beside):
            shared_logger.warning(f"The best checkpoint of the resumed state is taken from {beside}, not {best}.")
            return beside
        what = "is not in the output folder" if os.path.isdir(best) else "does not exist anymore"
        shared_logger.warning(f"The best checkpoint {best} of the resumed state {what}.")
        return None

    def _load_position(self, checkpoint: str) -> None:
        """Restore the position in the data, and the loss since the last log."""
        host, run = self._host, self._host._run
        assert run.counts is not None  # they are set for a fit
        ranks = (host.args.process_index, host.args.world_size)
        random_states = read_random_states(checkpoint, *ranks)  # before the fit, so a damaged file is found in time
        run.resumed = RunState.load(checkpoint, *ranks, random_states)
        readers = host.accelerator.rank_slice
        samples, sequence = host._train_batch_size * readers.world_size // host.get_sp_size(), host.get_sp_size()
        run.start = resume_point(
            run.resumed, run.updates_before, run.counts, host.args, samples, readers.sharing, sequence
        )
        # with another number of ranks the sums are joined, so that `train_loss` is the mean over the whole run
        resumed, now = run.resumed, (host.args.world_size, readers.sharing, sequence)
        if resumed is not None and (
            run.start.has_same_cut or (resumed.world_size, resumed.sharing, resumed.sequence) != now
        ):
            run.losses.load_state_dict(resumed.losses)
        if run.resumed is not None and run.start.has_same_cut:
            run.evaluated |= set(run.resumed.evaluated)
        if run.start.rng is None:
            run.start = dataclasses.replace(run.start, rng=random_states)
        self._warn_of_workers(run)
        if run.updates_before >= run.counts.max_updates:
            shared_logger.warning(
                f"Nothing is left to train: {checkpoint} is of update {run.updates_before}, and the run has "
                f"{run.counts.max_updates}. For more updates, raise `num_train_epochs` or `max_steps`."
            )
        elif host.is_world_process_zero() and not (host.args.ignore_data_skip or run.start.epoch_is_over):
            self._warn_of_order(checkpoint)

    def _warn_of_order(self, checkpoint: str) -> None:
        """Warn of arguments that give the interrupted epoch another order than its beginning had."""
        path = Contents(checkpoint).find(TRAINING_ARGS_NAME)
        try:
            saved = {} if path is None else dict(read_torch_file(path))
        except (CheckpointError, TypeError, ValueError):  # transformers saves an object
            return
        now = self._host.args.to_dict()
        lines = [
            f"{name}: {now[name]} (from args) != {saved[name]} (from {TRAINING_ARGS_NAME})"
            for name in ("data_seed", "train_sampling_strategy")
            if name in saved and saved[name] != now[name]
        ]
        if lines:
            shared_logger.warning(
                f"The rest of the epoch has another order than its beginning: {'; '.join(lines)}. Some samples are "
                "read twice, and others never. Resume with the values of before."
            )

    def _warn_of_workers(self, run: TrainingRun) -> None:
        """Warn where the loader's workers make a resumed run differ from the uninterrupted one."""
        workers, keeps_workers = getattr(run.loader, "num_workers", 0), getattr(run.loader, "persistent_workers", False)
        before, kept_before = workers, keeps_workers
        if run.resumed is not None and run.resumed.workers is not None:
            before, kept_before = run.resumed.workers, run.resumed.keeps_workers
        if isinstance(dataset_of(run.loader), IterableDataset) and max(workers, 1) != max(before, 1):
            shared_logger.warning(
                f"`dataloader_num_workers={workers}`, in the interrupted run {before}: the workers share the stream's "
                "samples, so the order is another one. Some samples may be read twice, and others never."
            )
        if keeps_workers != kept_before:
            shared_logger.warning(
                f"`dataloader_persistent_workers={keeps_workers}`, in the interrupted run {kept_before}: each start of "
                "workers draws a random number, so later ones are not those of the uninterrupted run."
            )
        elif keeps_workers and (run.evaluated or run.start.epoch or run.start.epoch_is_over):
            logger.warning(
                "`dataloader_persistent_workers=True`: new workers take the place of the interrupted run's. What the "
                "data set or the collator draws or keeps within a worker begins anew. All else is as in an "
                "uninterrupted run."
            )

    def _hash_the_rest(self, checkpoint: str) -> None:
        """Compare the hashes of the large files that nothing has loaded."""
        for path in self._unread.left():
            with open_regular(path, buffering=0) as file, reading(path), comparing(path, partial(sha256_of, file)):
                pass
        self._unread.only(None)

    def _load_lightning_callbacks(self, checkpoint: str) -> None:
        run = self._host._run
        assert run.lightning_trainer is not None and run.module is not None  # it is fitting
        if run.resumed is None:
            return
        for callback in self._host._callbacks.lightning:
            saved, extras = run.resumed.callbacks.get(callback.state_key), run.resumed.extras
            if saved:
                callback.load_state_dict(saved)
            if extras and is_replaced(callback, "on_load_checkpoint", pl.Callback):
                entries = {"state_dict": run.module.state_dict(), **extras}
                callback.on_load_checkpoint(run.lightning_trainer, run.module, entries)


STAGES: Sequence[Stage] = (
    Stage(ResumeAt.MODEL_READY, "the model's weights", "_load_from_checkpoint"),
    Stage(
        ResumeAt.STATE_NEW,
        "`state`: updates done, log history, best metric, intervals",
        "_init_training_state",
        Resumer._load_state,
    ),
    Stage(
        ResumeAt.STATE_NEW,
        "states of HF callbacks and the flags, with `restore_callback_states_from_checkpoint`",
        "_load_callback_state",
        takes_folder=False,
    ),
    Stage(ResumeAt.RUN_NEW, "the place in the data, the loss sums", action=Resumer._load_position),
    Stage(ResumeAt.CALLBACKS_SET_UP, "states of Lightning callbacks", action=Resumer._load_lightning_callbacks),
    Stage(ResumeAt.OPTIMIZER_MADE, "optimizer and schedule", "_load_optimizer_and_scheduler"),
    Stage(ResumeAt.OPTIMIZER_MADE, "the gradient scaler", "_load_scaler"),
    Stage(
        ResumeAt.OPTIMIZER_MADE,
        "nothing: large files that no stage has loaded are hashed",
        action=Resumer._hash_the_rest,
    ),
    Stage(ResumeAt.DATA_OPENED, "random states of Python, NumPy and torch", "_load_rng_state"),
)


def read_state(checkpoint: str, where_missing: Mapping[str, float] | None = None) -> TrainerState:
    """Read a checkpoint's state. `where_missing` has the values of missing fields."""
    return read_trainer_state(Contents(checkpoint).need(TRAINER_STATE_NAME), where_missing)
