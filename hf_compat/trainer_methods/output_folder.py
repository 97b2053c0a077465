"""The output folder of a run: whether it can be written to, who saves there, and which checkpoints are this run's."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.contents import Writer
from hf_compat.checkpoint.run_lock import Owner, RunLock
from hf_compat.errors import HfCompatError, OutputFolderError
from hf_compat.hf.enums import SaveStrategy
from hf_compat.runtime.collectives import agree, broadcast_object
from hf_compat.trainer_methods.base import TrainerBase

logger = logging.getLogger(__name__)


class OutputFolderMethods(TrainerBase):
    """How a run takes an output folder, and gives it back."""

    _owner: Owner | None = None  # of the call of `train` under way, the same on every process
    _locks: dict[str, RunLock | None] = {}  # by folder; a process that does not save has none

    def _will_save(self) -> bool:
        args = self.args
        return args.save_strategy != SaveStrategy.NO or args.push_to_hub or args.enable_jit_checkpoint

    def _prepare_output_folder(self, saves: bool) -> None:
        """Make the output folder, as upstream: callbacks write to it. Try whether a run that will save can write to it.

        Args:
            saves: Whether the Trainer will save there: one that only evaluates may name a folder that is read-only.

        Raises:
            OutputFolderError: It cannot.
        """
        if not self.args.should_save:
            return
        if saves:
            _probe(str(self.args.output_dir))
            return
        try:
            os.makedirs(str(self.args.output_dir), exist_ok=True)
        except (OSError, ValueError) as error:
            logger.warning("`output_dir=%r` cannot be made (%s); nothing is saved there.", self.args.output_dir, error)

    @contextlib.contextmanager
    def _output_folder_taken(self, at_once: bool) -> Iterator[None]:
        """Keep other runs from saving into the output folder while this one trains; wait for the last write.

        Args:
            at_once: Take the folder before training; else each folder is taken when something is saved into it.
        """
        self._owner = broadcast_object(Owner.of_this_process())
        try:
            if at_once and self._will_save():
                self._take(str(self.args.output_dir))
            yield
            self._background.wait()  # a callback may have saved at the very end
        except BaseException as error:
            unwritten = self._background.settle()  # a `True` right after would begin from an older checkpoint
            if unwritten is not None:
                error.add_note(str(unwritten))
            raise
        finally:
            self._give_back()

    @contextlib.contextmanager
    def _saving_into(self, folder: str) -> Iterator[Owner]:
        """Take a folder for a save: until the end of training, or for this save alone where nothing is trained."""
        if self.is_in_train and self._owner is not None:
            self._take(folder)
            yield self._owner
            return
        self._owner = broadcast_object(Owner.of_this_process())
        try:
            self._take(folder)
            yield self._owner
            self._background.wait()
        finally:
            self._give_back()

    def _take(self, folder: str) -> None:
        """Lock a folder, once; every process takes part.

        Raises:
            OutputFolderError: Another run saves there, or nobody can.
            ProcessError: That is so where another process of this run saves.
        """
        if folder in self._locks:
            return
        assert self._owner is not None  # whoever takes a folder has set it
        # every node has a process that saves where its disk is its own
        own = Owner.of_this_process(self._owner.token)
        lock = RunLock(folder, own) if self.args.should_save else None
        self._locks = {**self._locks, folder: lock}  # at once: where another process fails, it is given back
        agree(None if lock is None else lock.try_to_acquire() or _tidied(folder))

    def _keep(self, folder: str) -> None:
        """Make sure that a folder is still this run's.

        Raises:
            OutputFolderError: Another run has taken it over.
        """
        lock = self._locks.get(folder)
        if lock is not None:
            lock.renew()

    def _give_back(self) -> None:
        self._copy_memory.release()  # nothing is written any more
        self._state_copies.release()
        locks, self._locks, self._owner = self._locks, {}, None
        for lock in locks.values():
            if lock is not None:
                lock.release()

    def _is_of_this_run(self, path: str) -> bool:
        """Return whether this run, or the one that it goes on from, wrote a checkpoint."""
        run_id = manifest.run_of(path)
        if run_id is not None:
            return run_id == self._run.run_id
        # of transformers, or of a version before runs had ids: what led to the checkpoint that this run goes on from
        origin, update = self._run.checkpoint, names.checkpoint_step(path)
        if origin is None or update is None:
            return False
        is_beside = os.path.realpath(os.path.dirname(origin)) == os.path.realpath(os.path.dirname(path))
        return is_beside and update <= self._run.updates_before

    def _writer(self, run_dir: str) -> Writer:
        """Return what a manifest says about this run; its first save looks at what is in the folder."""
        if self._run.turn is None:
            self._run.turn = manifest.next_turn(run_dir)
            # Say once a run which checkpoints in its folder are another's, and what becomes of them
            ours = [path for path in names.list_checkpoints(run_dir) if manifest.is_ours(path)]
            others = [os.path.basename(path) for path in ours if not self._is_of_this_run(path)]
            if others:
                limit = self.args.save_total_limit
                is_one = len(others) == 1
                fate = f"`save_total_limit={limit}` removes {'it' if is_one else 'them'} first"
                if not limit:
                    fate = "it stays" if is_one else "they stay"
                comes = "comes" if is_one else "come"
                logger.warning("%s: %s %s from an earlier run; %s.", run_dir, ", ".join(others), comes, fate)
        return Writer(self._run.run_id, self._run.turn)


def _tidied(folder: str) -> Exception | None:
    """Remove what killed runs have left in a folder that is this run's now; return what went wrong."""
    try:
        manifest.tidy(folder)
    except (HfCompatError, OSError) as error:
        return error
    return None


def _probe(folder: str) -> None:
    """Make a folder and write a file into it.

    Raises:
        OutputFolderError: That is not possible.
    """
    try:
        if not folder.strip():
            raise ValueError("the name is empty")
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hf_compat_"):
            pass
    except (OSError, ValueError) as error:
        raise OutputFolderError(
            f"`output_dir={folder!r}` cannot be saved to: {error}.\n\n"
            "Hint: name a folder that can be written to, or set `save_strategy='no'`."
        ) from error
