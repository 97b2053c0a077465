"""Rotation: choose the checkpoints to delete after a save, and at the end of the run. Pure functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence


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
