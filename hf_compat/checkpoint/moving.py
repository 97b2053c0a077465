"""Give a folder another name, also on a disk that renames no folders.

There it is copied and deleted. Until a copy is whole, and while a folder is deleted, its manifest lists no files and
names the owner of the hidden folder: readers skip it as a save that did not end, and the next run removes it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from pathlib import Path

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.disks import NOT_OFFERED, flush, tell
from hf_compat.checkpoint.files import write_new
from hf_compat.checkpoint.reading import MANIFEST_KIND, MANIFEST_NAME, MANIFEST_WRITTEN_FIRST
from hf_compat.checkpoint.run_lock import Owner

_RENAME = (
    "the rename of a folder",
    "Checkpoints are written under their final names there. Until one is whole, its `manifest.json` lists no files.",
)
# By folder, whether its disk renames folders
_RENAMES: dict[str, bool] = {}


def renames_folders(folder: str) -> bool:
    """Whether the disk of an output folder renames folders. It is tried once."""
    return _RENAMES[folder] if folder in _RENAMES else try_disk(folder)


def try_disk(folder: str) -> bool:
    """Try what a save asks of a disk, in hidden folders that are removed. Whether it renames folders.

    A warning names what it does not offer.

    Raises:
        OSError: It cannot be written to. A disk without room is left to the save.
    """
    try:
        hidden = layout.hidden_folder(folder, layout.CONVERTING), layout.hidden_folder(folder, layout.CONVERTING)
        with hidden[0] as outer, hidden[1] as inner:
            write_new(os.path.join(inner, "tried"), b"", is_durable=True)
            flush(inner)
            within = os.path.join(outer, os.path.basename(inner))
            _RENAMES[folder] = _is_renamed(inner, within) and _is_renamed(within, inner)
            flush(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return True
    return _RENAMES[folder]


def marker_of(owner_id: str, name: str) -> bytes:
    """The manifest of a folder of that name that is not whole, or not any more."""
    return json.dumps({"kind": MANIFEST_KIND, "saving": owner_id, "name": name}).encode()


def move(source: str, target: str) -> None:
    """Rename a folder from or into a hidden folder. Nothing has the other name."""
    if not _is_renamed(source, target):
        _copy(Path(source), Path(target))
        _delete(source, _owner_of(target))


def take_out(source: str, target: str) -> None:
    """Move a folder into a hidden folder that is deleted next. Where that cannot be done, it is deleted at once."""
    if not _is_renamed(source, target):
        _delete(source, _owner_of(target))


def _is_renamed(source: str, target: str) -> bool:
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno not in NOT_OFFERED or os.path.islink(source) or not os.path.isdir(source):
            raise
        tell(os.path.dirname(source), _RENAME, error)
        return False
    return True


def _owner_of(path: str) -> str:
    """The id of the owner of the hidden folder that a path is in. Empty for a path in none."""
    for name in Path(path).parent.parts:
        for prefix in (layout.SAVING, layout.CONVERTING):
            if name.startswith(prefix) and Owner.of_id(name.removeprefix(prefix)) is not None:
                return name.removeprefix(prefix)
    return ""


def _put_manifest(folder: Path, content: bytes) -> None:
    written = folder / f"{MANIFEST_WRITTEN_FIRST}{secrets.token_hex(8)}"
    write_new(written, content, is_durable=True)
    os.replace(written, folder / MANIFEST_NAME)


def _copy(source: Path, target: Path) -> None:
    """Copy a folder and force it to the disk. Until it is whole, it has a marker, unless it is hidden."""
    is_hidden = bool(_owner_of(str(target)))
    own = source / MANIFEST_NAME
    content = own.read_bytes() if own.is_file() else None

    def left_out(folder: str, names: list[str]) -> set[str]:
        """Its manifest, which comes last, and what has no content."""
        found = {name for name in names if not os.path.isdir(p := os.path.join(folder, name)) and not _is_copied(p)}
        return found | ({MANIFEST_NAME} if Path(folder) == source else set())

    os.mkdir(target)
    if not is_hidden:
        _put_manifest(target, marker_of(_owner_of(str(source)), target.name))
    shutil.copytree(source, target, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    for path in (*target.rglob("*"), target, target.parent):
        if not path.is_symlink():
            flush(path)
    if content is not None:
        _put_manifest(target, content)
        shutil.copystat(own, target / MANIFEST_NAME)
    elif not is_hidden:
        os.unlink(target / MANIFEST_NAME)
    flush(target)


def _is_copied(path: str) -> bool:
    return os.path.islink(path) or os.path.isfile(path)


def _delete(folder: str, owner_id: str) -> None:
    """Delete a folder. One that is not hidden is marked first, on the disk, too, and its marker goes last."""
    marker = os.path.join(folder, MANIFEST_NAME)
    if owner_id and not _owner_of(folder):
        _put_manifest(Path(folder), marker_of(owner_id, os.path.basename(folder)))
        flush(Path(folder))
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.path != marker:
            os.unlink(entry.path)
    if os.path.lexists(marker):
        os.unlink(marker)
    os.rmdir(folder)
