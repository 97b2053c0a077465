"""Rotation: which checkpoints go when a new one was written, and at the end of the run. Pure; HF words only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence


def checkpoints_to_delete(
    oldest_first: Sequence[str], save_total_limit: int | None, keep: Iterable[str | None]
) -> list[str]:
    """Choose what rotation removes: the oldest, without those that are kept whatever their age.

    Args:
        oldest_first: The checkpoints that count, folders or files.
        save_total_limit: Checkpoints to keep; None or 0 keeps all.
        keep: The best one, and the newest or the one just written. None among them means that there is none.

    Mirrors:
        `transformers.trainer_utils.rotate_checkpoints`, 5.23.

    Differs:
        The caller gives the order, by run and update; upstream goes by modification time first.
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
    """Order checkpoints by how long they are kept; what goes first stands first.

    Those of other runs go first, then those that this run wrote beyond the update where it stands: it was taken back to
    an earlier checkpoint since. Each of these groups is in the order of updates.

    Args:
        checkpoints: Paths, each with its update.
        updates_done: Updates that this run has done.
        of_this_run: Whether this run wrote a checkpoint.
    """

    def rank(path: str) -> tuple[bool, bool, int]:
        update, is_own = checkpoints[path], of_this_run(path)
        return is_own, is_own and update <= updates_done, update

    return sorted(checkpoints, key=rank)


def checkpoints_to_delete_at_end(
    checkpoints: Sequence[str], save_total_limit: int | None, best: str | None
) -> list[str]:
    """Choose what goes when the run is over: with a limit of one the best stays alone, as nothing will be resumed.

    Args:
        checkpoints: The checkpoints that count, folders or files.
        save_total_limit: Checkpoints to keep.
        best: The best one; without one all stay.
    """
    return _without(checkpoints, [best]) if save_total_limit == 1 and best is not None else []


def _without(paths: Sequence[str], excluded: Iterable[str | None]) -> list[str]:
    outside = {os.path.abspath(path) for path in excluded if path is not None}
    return [path for path in paths if os.path.abspath(path) not in outside]
