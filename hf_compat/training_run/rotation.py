"""Which checkpoints of an output folder are a run's, and which go when there are too many."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.reading import Writer
from hf_compat.errors import OutputFolderError
from hf_compat.training_run.run import TrainingRun

logger = logging.getLogger(__name__)


def checkpoints_to_delete(
    in_rotation_order: Sequence[str], save_total_limit: int | None, keep: Iterable[str | None]
) -> list[str]:
    """Choose the oldest checkpoints to delete, except those in `keep`. A limit of None or 0 keeps all.

    Mirrors:
        `transformers.trainer_utils.rotate_checkpoints`.

    Differs:
        The caller gives the order, by run and update. Upstream sorts by modification time first.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return []
    kept = {os.path.abspath(path) for path in keep if path is not None}
    candidates = [path for path in in_rotation_order if os.path.abspath(path) not in kept]
    room = max(save_total_limit, len(in_rotation_order) - len(candidates))
    return candidates[: max(len(in_rotation_order) - room, 0)]


def remove_surplus(
    in_rotation_order: Sequence[str],
    save_total_limit: int | None,
    keep: Iterable[str | None],
    remove: Callable[[str], None] | None = None,
) -> None:
    """Remove checkpoints beyond the limit. A failure is only a warning, as the newer ones are complete."""
    for path in checkpoints_to_delete(in_rotation_order, save_total_limit, keep):
        try:
            (remove or manifest.remove)(path)
        except OutputFolderError:  # the folder is another run's by now
            raise
        except OSError as error:
            logger.warning("The old checkpoint %s could not be removed: %s. Training continues.", path, error)


def in_order_of_rotation(
    checkpoints: Mapping[str, int], updates_done: int, of_this_run: Callable[[str], bool]
) -> list[str]:
    """Order checkpoints, given with their updates, by when they are deleted, the first one first.

    Those of other runs come first. Then come those that this run wrote after its current update, before it was resumed
    from an earlier checkpoint. Each group is sorted by updates.
    """

    def rank(path: str) -> tuple[bool, bool, int]:
        update, is_own = checkpoints[path], of_this_run(path)
        return is_own, is_own and update <= updates_done, update

    return sorted(checkpoints, key=rank)


def is_from_run(run: TrainingRun, path: str, writer: Writer | None) -> bool:
    """Whether a run, or the one that it resumes, wrote a checkpoint, whose manifest names the writer."""
    if writer is not None:
        return writer.run == run.run_id
    # transformers and our first versions wrote no run ids. Accept checkpoints up to the one that this run resumes
    origin, update = run.checkpoint, layout.checkpoint_step(path)
    if origin is None or update is None:
        return False
    is_beside = os.path.realpath(os.path.dirname(origin)) == os.path.realpath(os.path.dirname(path))
    return is_beside and update <= run.updates_before
