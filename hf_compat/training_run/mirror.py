"""`StoreMirror` keeps the store of a Trainer's output folder: it begins, is told of saves, and ends with the training.

`Uploads` does the work in a thread. Only the rank that saves has it. The other ranks wait for it at the end.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.reading import Writer, written_by
from hf_compat.errors import OutputFolderError, StoreError, UnsupportedArgument
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.runtime.collectives import failing_together, highest_each
from hf_compat.runtime.stores import are_reachable
from hf_compat.runtime.text import shown
from hf_compat.training_run.interface import TrainerApi
from hf_compat.training_run.rotation import checkpoints_to_delete, in_order_of_rotation, is_from_run
from hf_compat.training_run.run import TrainingRun
from hf_compat.training_run.uploads import Uploads


def check_store(args: TrainingArguments) -> None:
    """Refuse a store that a run on several machines would not be stored in as a whole.

    Raises:
        UnsupportedArgument: There are several machines.
    """
    if args.output_store is not None and (args._launch.nodes != 1 or args.save_on_each_node):
        raise UnsupportedArgument(
            f"`{shown('output_store', args.output_store)}`: each of {args._launch.nodes} machines writes its files of "
            "a checkpoint into a folder of its own, and none knows when all of them are stored.\n\n"
            "Hint: train on one machine, or name a folder that all machines share as `output_dir`, and no store."
        )


# Override points of 4.x, which 5.23 lacks. An override runs in the training thread.
ROTATION = ("_rotate_checkpoints", "_sorted_checkpoints")


class StoreMirror:
    """The store of a Trainer's output folder. `overrides` says whether a method of the Trainer was replaced."""

    def __init__(self, host: TrainerApi, overrides: Callable[[str], bool]) -> None:
        self._host, self._overrides = host, overrides
        self._uploads: Uploads | None = None
        self._held: tuple[str, str] | None = None  # a checkpoint that callbacks may still change, and the run
        self._best_of: dict[str, str | None] = {}  # by checkpoint of this process, the best one then
        self.alone: str | None = None  # the checkpoint that is kept at the end, where it is the only one

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is on its way, in threads of this process."""
        return {**vars(self), "_uploads": None}

    @property
    def uploads(self) -> Uploads | None:
        """What is on its way to the store, on the rank that saves. None without a store."""
        args = self._host.args
        address, folder = args.output_store, str(args.output_dir)
        if address is None or not args.should_save or not are_reachable():
            return None
        held = self._uploads
        if held is None or (held.store.address, held.folder) != (address, folder):
            held = self._uploads = Uploads(address, folder)
        return held

    @property
    def has_lost_store(self) -> bool:
        """Whether another run has taken the store."""
        return self._uploads is not None and self._uploads.lost is not None

    def check(self) -> None:
        """Raise an error in a training whose store another run has taken."""
        if self._uploads is not None and self._uploads.lost is not None and self._host.is_in_train:
            raise self._uploads.lost

    def begin(self, owner_id: str) -> Mapping[str, Writer | None]:
        """Take the store for a run. Give the writers of the checkpoints in it, by their paths in the output folder."""
        uploads = self.uploads
        if uploads is None:
            return {}
        self._best_of, self.alone = {}, None
        uploads.begin(owner_id)
        return uploads.writers(uploads.folder)

    def hold(self, final: str, best: str | None, owner_id: str) -> None:
        """Note a checkpoint that is whole on this machine, and the best one at that time."""
        self._best_of[final], self._held = best, (final, owner_id)

    def send_held(self) -> None:
        """Upload the last checkpoint, which nothing changes any more."""
        held, self._held = self._held, None
        uploads, run = self.uploads, self._host._run
        if held is None or uploads is None:
            return
        final, owner_id = held
        found = {path: written_by(path) for path in layout.list_checkpoints(os.path.dirname(final))}
        own = [path for path, (is_ours, writer) in found.items() if is_ours and is_from_run(run, path, writer)]
        surplus = functools.partial(self._surplus, run, layout.checkpoint_step(final) or 0)
        uploads.saved(final, own, surplus, owner_id)

    def _surplus(self, run: TrainingRun, updates: int, writers: dict[str, Writer | None]) -> list[str]:
        """List the checkpoints in the store that are to be removed, after the one with so many updates.

        Where a subclass rotates, those go that this process has saved and that are gone here.
        """
        if any(map(self._overrides, ROTATION)):
            return [path for path in writers if path in self._best_of and not os.path.isdir(path)]
        known = {path: layout.checkpoint_step(path) or 0 for path in writers}
        ordered = in_order_of_rotation(known, updates, lambda path: is_from_run(run, path, writers[path]))
        # a resume begins with the newest one that is stored, and wants the best one of that time
        newest = ordered[-1] if ordered else None
        bests = [self._best_of.get(newest or ""), self._host.state.best_model_checkpoint]
        return checkpoints_to_delete(ordered, self._host.args.save_total_limit, [newest, *bests])

    def finish(self) -> None:
        """Wait until everything is stored. The other ranks wait, too.

        Raises:
            StoreError: Something could not be stored.
            OutputFolderError: Another run has taken the store.
        """
        if self._host.args.output_store is None:
            return
        self.send_held()
        uploads, began = self.uploads, time.monotonic()
        if uploads is not None:
            uploads.retry()
        while highest_each([uploads is not None and not uploads.is_over(began)]) != [False]:
            pass
        with failing_together():
            if uploads is not None:
                uploads.check()
                if self.alone is not None:
                    uploads.keep_alone(self.alone)

    def settle(self, error: BaseException, has_lost_folder: bool) -> None:
        """Store what is saved, although the training ends by an error. That says what is not stored."""
        uploads = self._uploads if self._host.args.output_store is not None else None
        is_of_store = isinstance(error, (OutputFolderError, StoreError)) or has_lost_folder
        if uploads is not None and uploads.has_begun and not is_of_store:
            self.send_held()
            self.settle_now()
            if uploads.missing():
                error.add_note(uploads.missing())

    def settle_now(self) -> None:
        """Wait until what is saved is stored, or has failed, before this process ends."""
        if self._uploads is not None and self._uploads.has_begun:
            self._uploads.retry()
            self._uploads.settle()

    def store_files(self) -> None:
        """Upload what was written into the output folder outside of a training. Within one, the next save does.

        Raises:
            StoreError: It could not be stored.
        """
        if not self._host.is_in_train and (uploads := self.uploads) is not None:
            uploads.finish()
