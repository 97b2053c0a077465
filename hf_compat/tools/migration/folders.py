"""Which files of a folder are migrated, and which are skipped: environments, caches, what `.gitignore` names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_compat.tools.migration.report import Passed

SUFFIXES = (".py", ".ipynb", ".sh")
_FOLDERS = {
    "__pycache__": "a cache",
    "node_modules": "packages of others",
    "site-packages": "packages of others",
    ".ipynb_checkpoints": "a cache",
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """One line of a `.gitignore`.

    Args:
        expression: Matches a path below the file's folder.
        is_exception: Whether what matches is not ignored after all.
        for_folders: Whether it is about folders only.
    """

    expression: re.Pattern[str]
    is_exception: bool
    for_folders: bool


def found_in(folder: Path) -> Iterator[Path | Passed]:
    """Yield the sources in a folder, in order of their names, and what was skipped; links are not followed."""
    yield from _walk(folder, folder, [])


def _walk(root: Path, folder: Path, above: Sequence[tuple[Path, list[Pattern]]]) -> Iterator[Path | Passed]:
    ignoring = [*above, (folder, patterns_of(folder / ".gitignore"))]
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield Passed(str(folder), f"cannot be read: {error.strerror or error}")
        return
    for entry in entries:
        path = folder / entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if not is_folder and path.suffix not in SUFFIXES:
            continue
        reason = _reason(entry, path, ignoring)
        if reason is not None:
            yield Passed(str(path), reason)
        elif is_folder:
            yield from _walk(root, path, ignoring)
        else:
            yield path


def _reason(entry: os.DirEntry[str], path: Path, ignoring: Sequence[tuple[Path, list[Pattern]]]) -> str | None:
    """Return why an entry is skipped; None where it is not."""
    is_folder = entry.is_dir(follow_symlinks=False)
    if entry.is_symlink():
        return "a link"
    if is_folder and (path / "pyvenv.cfg").exists():
        return "an environment"
    if is_folder and entry.name in _FOLDERS:
        return _FOLDERS[entry.name]
    if is_folder and entry.name.startswith("."):
        return "a hidden folder"
    return "named in .gitignore" if is_ignored(path, is_folder, ignoring) else None


def patterns_of(file: Path) -> list[Pattern]:
    """Return the patterns of a `.gitignore`; none where there is no such file."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [pattern for line in lines if (pattern := _pattern(line)) is not None]


def _pattern(line: str) -> Pattern | None:
    text = line.rstrip()
    if not text or text.startswith("#"):
        return None
    is_exception = text.startswith("!")
    text = text.removeprefix("!").removeprefix("\\")
    for_folders = text.endswith("/")
    text = text.rstrip("/")
    anchored = "/" in text
    # The regular expression of git's wildcards: `*` and `?` stop at a slash, `**` does not
    glob = text.removeprefix("/")
    parts = {"**/": "(?:.*/)?", "/**": "/.*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.findall(r"\*\*/|/\*\*$|\*\*|\*|\?|\[[^\]]+\]|.", glob)
    expression = "".join(
        parts.get(token) or (token.replace("[!", "[^") if len(token) > 1 else re.escape(token)) for token in tokens
    )
    return Pattern(re.compile(expression if anchored else f"(?:.*/)?{expression}"), is_exception, for_folders)


def is_ignored(path: Path, is_folder: bool, ignoring: Sequence[tuple[Path, list[Pattern]]]) -> bool:
    """Return whether the last pattern that matches a path says that it is ignored.

    Args:
        path: A file or folder.
        is_folder: Which of both.
        ignoring: The folders above it, from the outermost, with the patterns of each.
    """
    verdict = False
    for folder, patterns in ignoring:
        relative = path.relative_to(folder).as_posix()
        for pattern in patterns:
            if (is_folder or not pattern.for_folders) and pattern.expression.fullmatch(relative):
                verdict = not pattern.is_exception
    return verdict
