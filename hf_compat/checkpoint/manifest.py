"""What makes a checkpoint folder whole: it is written durably, listed last and checked before it is read.

HF words; files only.

A folder of ours holds `manifest.json`: every file with its size and SHA-256, written when all of them are on disk. A
folder without one (written by `transformers`) is judged by what it needs to contain.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from hf_compat.checkpoint import layout as names

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
PARTIAL_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"
DELETED_SUFFIX = ".deleted"
_KIND = "hf_compat checkpoint"
_WEIGHTS_NAMES = (
    names.SAFE_WEIGHTS_NAME,
    names.WEIGHTS_NAME,
    names.SAFE_WEIGHTS_INDEX_NAME,
    names.WEIGHTS_INDEX_NAME,
    names.ADAPTER_SAFE_WEIGHTS_NAME,
    names.ADAPTER_WEIGHTS_NAME,
)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST_NAME)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Force a file or folder to disk; folders cannot be opened for that everywhere."""
    with contextlib.suppress(PermissionError, IsADirectoryError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def seal(folder: str) -> None:
    """Flush every file of a folder to disk, then write its manifest."""
    root = Path(folder)
    listed = {}
    for path in _files(root):
        _flush(path)
        listed[path.relative_to(root).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    text = json.dumps({"kind": _KIND, "version": 1, "files": listed}, indent=1)
    with open(root / MANIFEST_NAME, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    for subfolder in {path.parent for path in _files(root)} | {root}:
        _flush(subfolder)


def put_in_place(partial: str, final: str) -> None:
    """Rename a sealed folder to its final name. At every instant the old folder of that name or the new one is whole.

    Files of the old folder that no checkpoint lists are the user's: they are copied into the new one.
    """
    if os.path.isdir(final):
        _copy_user_files(Path(final), Path(partial))
        replaced = final + REPLACED_SUFFIX
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
        os.replace(partial, final)
        shutil.rmtree(replaced)
    else:
        os.replace(partial, final)
    _flush(Path(final).parent)


def _copy_user_files(old: Path, new: Path) -> None:
    ours = set(_listed(old) or ()) | {MANIFEST_NAME}
    for path in _files(old):
        relative = path.relative_to(old).as_posix()
        target = new / relative
        if relative not in ours and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def remove(folder: str) -> None:
    """Delete the files of a checkpoint of ours; files that its manifest does not list stay where they are.

    The folder is renamed first: one that is half deleted is never taken for a checkpoint.
    """
    root = Path(folder)
    listed = _listed(root)
    if listed is None:
        return
    if any(path.relative_to(root).as_posix() not in listed for path in _files(root)):
        (root / MANIFEST_NAME).unlink()
        for name in listed:
            (root / name).unlink(missing_ok=True)
        return
    deleted = folder + DELETED_SUFFIX
    os.replace(folder, deleted)
    shutil.rmtree(deleted)


def is_ours(folder: str) -> bool:
    """Return whether a folder holds a manifest of ours, whole or not."""
    return _listed(Path(folder)) is not None


def _listed(folder: Path) -> dict[str, object] | None:
    """Return the files that a manifest lists, each with what it says about them; None without a readable manifest."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        listed = manifest["files"] if manifest["kind"] == _KIND else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(listed) if isinstance(listed, dict) else None


def tidy(run_dir: str) -> None:
    """Remove what a run that was killed while saving or deleting has left behind."""
    if not os.path.isdir(run_dir):
        return
    for entry in list(os.scandir(run_dir)):
        for suffix in (PARTIAL_SUFFIX, DELETED_SUFFIX, REPLACED_SUFFIX):
            stem = entry.name.removesuffix(suffix)
            if stem != entry.name and names.checkpoint_step(stem) is not None and entry.is_dir():
                shutil.rmtree(entry.path, ignore_errors=True)


def recover(run_dir: str) -> None:
    """Finish a save that was killed after everything was on disk, between two renames."""
    if not os.path.isdir(run_dir):
        return
    for suffix in (PARTIAL_SUFFIX, REPLACED_SUFFIX):
        for entry in list(os.scandir(run_dir)):
            final = entry.path.removesuffix(suffix)
            is_left_over = final != entry.path and names.checkpoint_step(final) is not None
            if is_left_over and not os.path.exists(final) and is_ours(entry.path) and not problems(entry.path):
                os.replace(entry.path, final)


def problems(folder: str) -> list[str]:
    """List what is wrong with a checkpoint folder; nothing is wrong with a whole one."""
    root = Path(folder)
    if not root.is_dir():
        return [f"{folder} is no folder"]
    if (root / MANIFEST_NAME).exists():
        listed = _listed(root)
        if listed is None:
            return [f"{MANIFEST_NAME} is not readable"]
        return [problem for name, facts in listed.items() if (problem := _compare(root, name, facts))]
    return list(_judge_unlisted(root))


def _compare(root: Path, name: str, facts: object) -> str | None:
    """Return what is wrong with a file, going by what the manifest says about it."""
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        return f"{name} is outside the folder"
    if not path.is_file():
        return f"{name} is missing"
    if not isinstance(facts, dict) or path.stat().st_size != facts.get("bytes"):
        return f"{name} has {path.stat().st_size} bytes, not what {MANIFEST_NAME} says"
    return None if _sha256(path) == facts.get("sha256") else f"{name} is damaged (its hash differs)"


def _judge_unlisted(root: Path) -> Iterator[str]:
    """Judge a folder of `transformers`, which writes `trainer_state.json` last."""
    yield from _judge_json(root / names.TRAINER_STATE_NAME)
    yield from _judge_weights(root)
    has_optimizer = (root / names.OPTIMIZER_NAME).exists()
    if has_optimizer != (root / names.SCHEDULER_NAME).exists():
        yield f"{names.SCHEDULER_NAME if has_optimizer else names.OPTIMIZER_NAME} is missing"
    for path in _files(root):
        if path.suffix == ".safetensors":
            yield from _judge_safetensors(path)
        elif path.suffix in (".pt", ".pth", ".bin"):
            yield from _judge_torch_file(path)


def _judge_weights(root: Path) -> Iterator[str]:
    weights = [root / name for name in _WEIGHTS_NAMES if (root / name).exists()]
    if not weights:
        yield f"{names.SAFE_WEIGHTS_NAME} is missing"
    for index in (path for path in weights if path.name.endswith(".index.json")):
        yield from _judge_json(index)
        yield from _judge_shards(root, index)


def _judge_json(path: Path) -> Iterator[str]:
    if not path.is_file():
        yield f"{path.name} is missing"
        return
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        yield f"{path.name} is no valid JSON"


def _judge_shards(root: Path, index: Path) -> Iterator[str]:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return  # _judge_json reports it, or the reader of the weights
    yield from (f"{shard} is missing" for shard in sorted(map(str, shards)) if not (root / shard).is_file())


def _judge_safetensors(path: Path) -> Iterator[str]:
    try:
        whole = _bytes_of_safetensors(path) == path.stat().st_size
    except (ValueError, KeyError, AttributeError, TypeError, MemoryError, OverflowError):
        whole = False
    if not whole:
        yield f"{path.name} is cut off or damaged"


def _bytes_of_safetensors(path: Path) -> int:
    """Return the size that a file's header says it has: its own length comes first, then where each tensor ends."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes < path.stat().st_size:
            raise ValueError("the header does not fit into the file")
        header = json.loads(file.read(header_bytes))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + header_bytes + int(max(ends, default=0))


def _judge_torch_file(path: Path) -> Iterator[str]:
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes zip files, with checksums
            whole = archive.testzip() is None
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError):
        whole = False
    if not whole:
        yield f"{path.name} is cut off or damaged"


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest whole checkpoint of a folder, or None.

    Newer ones that are incomplete or damaged are skipped; a warning names each of them and what is wrong.

    Raises:
        FileNotFoundError: `folder` does not exist.

    Mirrors:
        `transformers.trainer_utils.get_last_checkpoint`, 5.23.

    Differs:
        Upstream goes by the names alone.
    """
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"No such directory: {os.fspath(folder)!r}")
    for path in reversed(names.list_checkpoints(folder)):
        wrong = problems(path)
        if not wrong:
            return path
        logger.warning("%s is not whole and is skipped: %s.", path, "; ".join(wrong))
    return None
