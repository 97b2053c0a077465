"""Rotation: which checkpoints go when a new one was written, and at the end of the run. Pure; HF words only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence


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
        The caller gives the order, by update; upstream goes by modification time first.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return []
    candidates = _without(oldest_first, keep)
    kept = len(oldest_first) - len(candidates)
    surplus = len(oldest_first) - max(save_total_limit, kept)
    return candidates[: max(surplus, 0)]


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
