"""`OutputFolder` holds the locks of the folders that a run saves into, and finds the run's own checkpoints there."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.disks import flush
from hf_compat.checkpoint.moving import try_disk
from hf_compat.checkpoint.reading import Writer
from hf_compat.checkpoint.run_lock import Owner, RunLock
from hf_compat.errors import OutputFolderError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import SaveStrategy
from hf_compat.runtime.collectives import broadcast_text
from hf_compat.runtime.console import in_notebook
from hf_compat.runtime.text import brief
from hf_compat.training_run.rotation import is_from_run
from hf_compat.training_run.run import TrainingRun

logger = logging.getLogger(__name__)

_begun_here: set[str] = set()  # the ids of this process's runs


def shared_owner() -> Owner:
    """An owner of locks that is equal on every rank."""
    owner = Owner.of_id(broadcast_text(Owner().id))
    assert owner is not None  # it is the id of an owner
    return owner


class OutputFolder:
    """The locks of one call of `train`, or of a save outside of it. They keep other runs from writing there."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner  # of the locks, equal on every rank
        self._runs = 0
        self.locks: dict[str, RunLock] = {}  # by folder
        self._found: dict[str, dict[str, Writer | None]] = {}  # by folder, its checkpoints when it was locked

    def hold(self, folder: str) -> None:
        """Lock a folder and remove remains of killed runs. If this run has locked it, check that it still owns it.

        With node-local disks, each node has a rank that saves. No other rank calls it.

        Raises:
            OutputFolderError: Another run saves there, this run has lost the folder, or it cannot be written to.
        """
        is_first, is_new = folder not in self._found, not os.path.isdir(folder)
        # noted before it is acquired, so that `release` works if that fails
        self.locks.setdefault(folder, RunLock(folder, Owner(token=self.owner.token))).acquire()
        if is_first or is_new:
            place = Path(folder).resolve()  # the entries of the folder, and of those above it on the same disk
            with contextlib.suppress(OSError):  # some systems have folders that cannot be flushed
                while not os.path.ismount(place):
                    place = place.parent
                    flush(place)
        if is_first:
            self._found[folder] = manifest.recover(folder, has_lock=True)

    def writer(self, run: TrainingRun, folder: str, save_total_limit: int | None) -> Writer:
        """Return a manifest's entries about a run. The first save warns of other runs' checkpoints in the folder.

        A notebook shows warnings in red, and people run a cell again. There a plain line tells of this kernel's runs.
        """
        if run.turn is None:
            writers = self._found[folder]
            run.turn = 1
            others, level = [], logging.INFO if in_notebook() and not save_total_limit else logging.WARNING
            for path, writer in writers.items():
                if writer is not None:
                    run.turn = max(run.turn, 1 + writer.turn)
                if not is_from_run(run, path, writer):
                    others.append(os.path.basename(path))
                    if writer is None or writer.run not in _begun_here:
                        level = logging.WARNING
            if others:
                fate = "each stays until this run saves a checkpoint of the same name"
                if save_total_limit:
                    fate = f"`save_total_limit={save_total_limit}` removes them first"
                logger.log(level, "%s holds checkpoints of an earlier run: %s; %s.", folder, ", ".join(others), fate)
        return Writer(run.run_id, run.turn)

    def note(self, folder: str, writers: Mapping[str, Writer | None]) -> None:
        """Count the checkpoints that the store of a folder has among those that were there before."""
        self._found[folder] = {**writers, **self._found[folder]}

    def new_run_id(self) -> str:
        """An id for a run that resumes none, which is equal on every rank."""
        self._runs += 1
        run_id = hashlib.sha256(f"{self.owner.id} {self._runs}".encode()).hexdigest()[:8]
        _begun_here.add(run_id)
        return run_id

    def release(self) -> None:
        """Unlock every folder."""
        with contextlib.ExitStack() as each:  # Ctrl-C in one leaves no other one locked
            for lock in self.locks.values():
                each.callback(lock.release)


def saves_checkpoints(args: TrainingArguments) -> bool:
    """Whether a training writes checkpoints, at intervals or when stopped."""
    return args.save_strategy != SaveStrategy.NO or args.push_to_hub or args.enable_jit_checkpoint


def make_output_folder(args: TrainingArguments, saves: bool) -> None:
    """Make the output folder, because callbacks write to it, as upstream does. If a run saves there, try its disk.

    Raises:
        OutputFolderError: It is a file, or a run saves there and it cannot be created or written to. An evaluation
            works in a read-only folder.
    """
    folder = str(args.output_dir)
    try:
        if not folder.strip():
            raise ValueError("the name is empty")
        os.makedirs(folder, exist_ok=True)
        if saves:
            try_disk(folder)
    except (OSError, ValueError) as error:
        if not saves and not isinstance(error, FileExistsError):
            reason = getattr(error, "strerror", None) or error  # without the path
            logger.warning("`output_dir=%s` cannot be created (%s), so nothing is saved there.", brief(folder), reason)
            return
        raise OutputFolderError(
            f"`output_dir={brief(folder)}` cannot be saved to: {error}.\n\n"
            "Hint: name a folder that can be written to"
            + ("." if isinstance(error, FileExistsError) else ", or set `save_strategy='no'`.")
        ) from error
