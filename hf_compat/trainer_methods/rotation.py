"""Rotation: which checkpoints go when one was written, and at the end of a run. HF's method names of 4.x."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint import manifest
from hf_compat.interop.upstream_log import log_line
from hf_compat.runtime.inspection import is_replaced
from hf_compat.trainer_methods.output_folder import OutputFolderMethods
from hf_compat.training_run.rotation import (
    checkpoints_to_delete,
    checkpoints_to_delete_at_end,
    in_order_of_rotation,
)

logger = logging.getLogger(__name__)

# Override points of 4.x, which 5.23 has not; an override runs in the thread that trains.
ROTATION_METHODS = ("_rotate_checkpoints", "_sorted_checkpoints")


class RotationMethods(OutputFolderMethods):
    """How `save_total_limit` is kept."""

    def _make_room(self, written: str, best: str | None) -> None:
        """Remove what the limit has no room for: other runs' checkpoints first, never the one just written or the best.

        Args:
            written: The checkpoint that was just written.
            best: The best one.
        """
        run_dir = os.path.dirname(written)
        if self._overrides_rotation("_rotate_checkpoints"):
            self._rotate_checkpoints(use_mtime=True, output_dir=run_dir)
        elif self._overrides_rotation("_sorted_checkpoints"):
            ordered = self._sorted_checkpoints(output_dir=run_dir, use_mtime=True)
            self._remove_surplus([path for path in ordered if manifest.is_ours(path)], [best, written])
        else:
            self._remove_surplus(self._oldest_first(run_dir, names.checkpoint_step(written) or 0), [best, written])

    def _remove_surplus(self, oldest_first: Sequence[str], keep: Sequence[str | None]) -> None:
        for path in checkpoints_to_delete(oldest_first, self.args.save_total_limit, keep=keep):
            _remove_or_warn(path)

    def _oldest_first(self, run_dir: str, updates_done: int) -> list[str]:
        return in_order_of_rotation(_own_checkpoints(run_dir), updates_done, self._is_of_this_run)

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Remove what `save_total_limit` has no room for; an override is called after each save, in its place.

        Args:
            use_mtime: Not read: manifests say which checkpoint is older.
            output_dir: The run's folder; without it the arguments'.

        Mirrors:
            `transformers.Trainer._rotate_checkpoints`, 4.57: 5.23 calls a function, and no override.
        """
        ordered = self._sorted_checkpoints(output_dir, use_mtime=use_mtime)
        own = [path for path in ordered if manifest.is_ours(path)]
        self._remove_surplus(own, [self.state.best_model_checkpoint, *own[-1:]])

    def _sorted_checkpoints(
        self,
        output_dir: str | None = None,
        checkpoint_prefix: str = names.PREFIX_CHECKPOINT_DIR,
        use_mtime: bool = False,
    ) -> list[str]:
        """Return a folder's checkpoints, oldest first; the best one stands just before the newest.

        Args:
            output_dir: The run's folder; without it the arguments'.
            checkpoint_prefix: What their names begin with.
            use_mtime: Not read: manifests say which checkpoint is older.

        Mirrors:
            `transformers.Trainer._sorted_checkpoints`, 4.57: an override's order is the one that rotation goes by.
        """
        run_dir = str(output_dir or self.args.output_dir)
        ordered = self._oldest_first(run_dir, self.state.global_step)
        ordered = [path for path in ordered if os.path.basename(path).startswith(f"{checkpoint_prefix}-")]
        best = self.state.best_model_checkpoint
        if best in ordered[:-1]:
            ordered.remove(best)
            ordered.insert(-1, best)
        return ordered

    def _rotate_checkpoints_at_end(self, run_dir: str, best: str | None) -> None:
        """With a limit of one, keep the best checkpoint alone."""
        for path in checkpoints_to_delete_at_end(list(_own_checkpoints(run_dir)), self.args.save_total_limit, best):
            log_line(f"Deleting older checkpoint [{path}] due to args.save_total_limit")
            _remove_or_warn(path)

    def _overrides_rotation(self, *names_of_methods: str) -> bool:
        """Return whether a subclass, or the user of this instance, has put something in the place of these."""
        return any(is_replaced(self, name, RotationMethods) for name in names_of_methods)


def _own_checkpoints(run_dir: str) -> dict[str, int]:
    """List the checkpoints of a folder that this package wrote, each with its update, oldest update first."""
    paths = names.list_checkpoints(run_dir)
    return {path: names.checkpoint_step(path) or 0 for path in paths if manifest.is_ours(path)}


def _remove_or_warn(checkpoint: str) -> None:
    """Remove a checkpoint; where that fails the newer ones are good all the same, and the run goes on."""
    try:
        manifest.remove(checkpoint)
    except OSError as error:
        logger.warning("The old checkpoint %s could not be removed: %s. Training goes on.", checkpoint, error)
