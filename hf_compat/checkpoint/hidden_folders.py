"""Hidden folders for work under way in an output folder: the one place that says what is ours there and may go.

A folder is ours where its name ends in the id of an owner and the owner's record lies in it. Nothing else is deleted as
left over, whatever its name is. Reading an output folder deletes nothing: `remove_ended` is for a run with its lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator

from hf_compat.checkpoint.files import write_new
from hf_compat.checkpoint.run_lock import Owner

SAVING = ".saving-"  # a save, a removal, a manifest
CONVERTING = ".converting-"  # needs no lock: only its own process knows whether it goes on
# What begins so in a hidden folder is the run's; the rest is what overrides have written beside their checkpoint.
OWN_PREFIX = ".hf_compat"
_RECORD = OWN_PREFIX
# A checkpoint that makes room for a new one of its name; a killed save may have left no other.
REPLACED = f"{OWN_PREFIX}.replaced"
DELETED = f"{OWN_PREFIX}.deleted"


def make_hidden(folder: str, prefix: str, owner: Owner) -> str:
    """Make an owner's hidden folder, its record first.

    Raises:
        OSError: It exists, or cannot be made.
    """
    path = os.path.join(folder, prefix + owner.id)
    os.mkdir(path)
    write_new(os.path.join(path, _RECORD), owner.id.encode())
    return path


def hidden_folders(folder: str, prefix: str) -> list[tuple[str, Owner]]:
    """List the hidden folders that runs have made, each with its owner. A link is never one of them."""
    if not os.path.isdir(folder):
        return []
    with os.scandir(folder) as inside:
        entries = [entry for entry in inside if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False)]
    found = ((entry.path, Owner.of_id(entry.name.removeprefix(prefix))) for entry in entries)
    return sorted((path, owner) for path, owner in found if owner is not None and _has_record(path))


def _has_record(path: str) -> bool:
    """Whether a run made this folder. A power cut may leave the record empty, so its content does not count."""
    try:
        return stat.S_ISREG(os.lstat(os.path.join(path, _RECORD)).st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def hidden_folder(folder: str, prefix: str) -> Iterator[str]:
    """Give a hidden folder for a short piece of work, and remove it afterwards."""
    owner = Owner.of_this_process()
    with owner.shown_alive():
        path = make_hidden(folder, prefix, owner)
        try:
            yield path
        finally:
            remove_hidden(path)


def remove_hidden(path: str) -> None:
    """Remove a hidden folder as far as possible, the record last: what is left stays known as ours."""
    if not os.path.isdir(path):
        return
    with contextlib.suppress(OSError):  # something cannot be deleted: the next run tries again
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name == _RECORD):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        os.rmdir(path)


def remove_ended(folder: str, prefix: str, is_locked: bool = False) -> None:
    """Remove the hidden folders of owners that have ended.

    Args:
        folder: The output folder.
        prefix: Which of them.
        is_locked: Whether the caller has the folder's lock: who cannot be asked, on another host, has ended then.
    """
    for path, owner in hidden_folders(folder, prefix):
        if has_ended(owner, is_locked):
            remove_hidden(path)


def has_ended(owner: Owner, is_alone: bool) -> bool:
    """Whether an owner's work is over; that of one who cannot be asked is, where no other run saves into the folder."""
    alive = owner.is_alive()
    return is_alone if alive is None else not alive
