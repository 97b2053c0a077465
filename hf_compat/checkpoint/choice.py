"""Choose the newest whole checkpoint of an output folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.files import Refused, refusal_behind
from hf_compat.checkpoint.manifest import is_ours, problems, recover
from hf_compat.checkpoint.reading import Writer, read_manifest
from hf_compat.errors import CheckpointError
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.stores import store_of
from hf_compat.runtime.text import brief

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Choice:
    """Which checkpoint of an output folder is taken, and which are not."""

    newest: str | None = None
    beyond: list[str] = field(default_factory=list)  # names of whole ones of an earlier run, with more updates
    skipped: dict[str, str] = field(default_factory=dict)  # newer ones, and what is wrong with each

    def tell(self) -> None:
        """Warn of those that are not taken."""
        for path, why in self.skipped.items():
            if isinstance(why, Refused):
                logger.warning("%s cannot be read and is skipped: %s. It may be whole.", path, why)
            else:
                way_out = f" If it was edited on purpose: `hf-compat seal {path}`." if is_ours(path) else ""
                logger.warning("%s is not whole and is skipped: %s.%s", path, why, way_out)
        if self.beyond:
            message = "%s is taken: the last run wrote it. Of an earlier run: %s. Name one of them to resume from it."
            logger.warning(message, self.newest, ", ".join(reversed(self.beyond)))


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Find the newest complete checkpoint of a folder, or None.

    This first finishes the save of a killed run, if all of its files were on disk. It takes no lock, so processes that
    ask at the same time find the same checkpoint. It deletes only the lock of a dead process of this host. The next run
    that saves there removes everything else that killed runs have left. Newer checkpoints that are incomplete or
    damaged are skipped. A warning names each of them, with the reason.

    Raises:
        ArgumentError: `folder` is an address that fsspec does not know.
        FileNotFoundError: It does not exist.
        CheckpointError: It cannot be listed.

    Mirrors:
        `transformers.trainer_utils.get_last_checkpoint`.

    Differs:
        Upstream compares the names only. Here, checkpoints of the last run come before those of earlier runs. The
        address of a store gives that of a checkpoint. What the store of an output folder has is fetched.
    """
    address = store_of(os.fspath(folder)) if isinstance(folder, (str, os.PathLike)) else None
    if address is not None:
        from hf_compat.checkpoint.store import newest_in_store  # it builds on this file

        return newest_in_store(address, os.fspath(folder))
    if not os.path.isdir(local_path("folder", folder)):
        try:
            os.stat(folder)
        except OSError as error:
            if refusal_behind(error) is not None:
                raise CheckpointError(f"{os.fspath(folder)} cannot be listed: {error.strerror}.") from error
        raise FileNotFoundError(f"No such directory: {brief(os.fspath(folder))}")
    recover(os.fspath(folder))
    return newest_checkpoint(folder)[0]


def candidates(folder: str | os.PathLike[str], stored: Mapping[str, Writer | None] = MappingProxyType({})) -> list[str]:
    """List the checkpoints of an output folder in the order in which a resume tries them.

    The first is the one of the last turn with the most updates. An earlier turn may have left one with more.
    Checkpoints that name no turn, of `transformers` or of an earlier version, are ordered with those of the last turn.
    The `stored` ones, by their path there, are in the folder's store.
    """
    paths, turns = layout.list_checkpoints(folder), {}
    for path in paths:
        writer = read_manifest(path).writer
        if writer is not None:
            turns[path] = writer.turn
    for path, writer in stored.items():
        if writer is not None:
            turns[path] = max(turns.get(path, 0), writer.turn)
    paths = sorted({*paths, *stored}, key=lambda path: (_updates(path), path))
    turns = dict.fromkeys(paths, max(turns.values(), default=0)) | turns
    return sorted(paths, key=turns.__getitem__)[::-1]


def newest_checkpoint(folder: str | os.PathLike[str]) -> tuple[str | None, dict[str, str]]:
    """Find the newest whole checkpoint of an output folder, and tell of the others.

    Return the checkpoint, or None, and what is wrong with each newer one.
    """
    choice = newest_of(candidates(folder))
    choice.tell()
    return choice.newest, choice.skipped


def newest_of(
    paths: Sequence[str],
    unloadable: Mapping[str, str] = MappingProxyType({}),
    find_problems: Callable[[str], list[str]] = problems,
) -> Choice:
    """Find the newest whole checkpoint.

    Args:
        paths: The `candidates`.
        unloadable: Checkpoints that could not be loaded, with the reasons.
        find_problems: Lists what is wrong with a checkpoint.
    """
    choice = Choice()
    for path in paths:
        if choice.newest is not None and _updates(path) < _updates(choice.newest):
            continue
        wrong = [unloadable[path]] if path in unloadable else find_problems(path)
        if choice.newest is not None:
            choice.beyond += [] if wrong else [os.path.basename(path)]
        elif not wrong:
            choice.newest = path
        else:
            text = "; ".join(wrong)
            choice.skipped[path] = Refused(text) if any(isinstance(one, Refused) for one in wrong) else text
    return choice


def _updates(path: str) -> int:
    return layout.checkpoint_step(path) or 0
