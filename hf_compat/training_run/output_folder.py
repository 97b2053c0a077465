"""`OutputFolder`: who saves into a run's folders, and which checkpoints there are this run's."""

from __future__ import annotations

import logging
import os
import tempfile

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.contents import Writer
from hf_compat.checkpoint.run_lock import Owner, RunLock
from hf_compat.errors import HfCompatError, OutputFolderError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import SaveStrategy
from hf_compat.runtime.collectives import agree, broadcast_object
from hf_compat.training_run.run import TrainingRun

logger = logging.getLogger(__name__)


class OutputFolder:
    """The locks of one call of `train`, or of a save outside of it: no other run writes there meanwhile.

    Attributes:
        owner: Who saves, the same on every process; None while nothing is taken.
    """

    def __init__(self) -> None:
        self.owner: Owner | None = None
        self._locks: dict[str, RunLock | None] = {}  # by folder; a process that does not save has none

    def begin(self) -> None:
        """Give all processes one owner; folders are taken in its name until `release`."""
        self.owner = broadcast_object(Owner.of_this_process())

    def take(self, folder: str, should_save: bool) -> None:
        """Lock a folder, once, and remove what killed runs have left there; every process takes part.

        Raises:
            OutputFolderError: Another run saves there, or the folder cannot be written to.
            ProcessError: That is so where another process of this run saves.
        """
        if folder in self._locks:
            return
        assert self.owner is not None  # `begin` has set it
        # every node has a process that saves where its disk is its own
        lock = RunLock(folder, Owner.of_this_process(self.owner.token)) if should_save else None
        self._locks[folder] = lock  # at once: where another process fails, it is given back
        error: Exception | None = None
        if lock is not None:
            try:
                error = lock.try_to_acquire()
                if error is None:
                    manifest.tidy(folder)
            except (HfCompatError, OSError) as failed:
                error = failed
        agree(error)

    def keep(self, folder: str) -> None:
        """Make sure that a folder is still this run's.

        Raises:
            OutputFolderError: Another run has taken it over.
        """
        lock = self._locks.get(folder)
        if lock is not None:
            lock.renew()

    def release(self) -> None:
        """Unlock every folder."""
        locks, self._locks, self.owner = self._locks, {}, None
        for lock in locks.values():
            if lock is not None:
                lock.release()


def is_of_run(path: str, run: TrainingRun) -> bool:
    """Return whether a run, or the one that it resumes, wrote a checkpoint."""
    run_id = manifest.run_of(path)
    if run_id is not None:
        return run_id == run.run_id
    # of transformers, or of a version before runs had ids: what led to the checkpoint that this run resumes
    origin, update = run.checkpoint, names.checkpoint_step(path)
    if origin is None or update is None:
        return False
    is_beside = os.path.realpath(os.path.dirname(origin)) == os.path.realpath(os.path.dirname(path))
    return is_beside and update <= run.updates_before


def writer_of_run(run: TrainingRun, folder: str, save_total_limit: int | None) -> Writer:
    """Return what a manifest says about a run; the first save warns of other runs' checkpoints in the folder."""
    if run.turn is None:
        run.turn = manifest.next_turn(folder)
        ours = [path for path in names.list_checkpoints(folder) if manifest.is_ours(path)]
        others = [os.path.basename(path) for path in ours if not is_of_run(path, run)]
        if others:
            is_one = len(others) == 1
            fate = f"`save_total_limit={save_total_limit}` removes {'it' if is_one else 'them'} first"
            if not save_total_limit:
                fate = "it stays" if is_one else "they stay"
            comes = "comes" if is_one else "come"
            logger.warning("%s: %s %s from an earlier run; %s.", folder, ", ".join(others), comes, fate)
    return Writer(run.run_id, run.turn)


def saves_checkpoints(args: TrainingArguments) -> bool:
    """Return whether a training writes checkpoints, at intervals or when it is stopped."""
    return args.save_strategy != SaveStrategy.NO or args.push_to_hub or args.enable_jit_checkpoint


def make_output_folder(args: TrainingArguments, saves: bool) -> None:
    """Make the output folder, as upstream: callbacks write to it.

    Args:
        args: The arguments, which name it.
        saves: Whether a run will save there. If so, try to write a file: evaluating alone works in a read-only folder.

    Raises:
        OutputFolderError: It cannot be made or written to.
    """
    folder = str(args.output_dir)
    try:
        if not folder.strip():
            raise ValueError("the name is empty")
        os.makedirs(folder, exist_ok=True)
        if saves:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".hf_compat_"):
                pass
    except (OSError, ValueError) as error:
        if not saves:
            logger.warning("`output_dir=%r` cannot be made (%s); nothing is saved there.", args.output_dir, error)
            return
        raise OutputFolderError(
            f"`output_dir={folder!r}` cannot be saved to: {error}.\n\n"
            "Hint: name a folder that can be written to, or set `save_strategy='no'`."
        ) from error
