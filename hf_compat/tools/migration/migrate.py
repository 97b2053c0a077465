"""Find the sources below some paths, rewrite each, and write the changed files if that is asked for."""

from __future__ import annotations

import codecs
import difflib
import functools
import io
import itertools
import os
import stat
import subprocess
import tempfile
import tokenize
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hf_compat.checkpoint.disks import force
from hf_compat.errors import MigrationError
from hf_compat.tools.migration.class_graph import lines_of_plain_imports, lines_reached_by
from hf_compat.tools.migration.notebooks import rewrite_notebook
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Effect, FileChange, Migration, Passed, Rewritten, Spot, Target
from hf_compat.tools.migration.shell import rewrite_shell

_REWRITINGS: dict[str, Callable[[str, Target, Path], Rewritten]] = {
    ".py": rewrite_python,
    ".pyi": rewrite_python,
    ".sh": lambda text, target, _: rewrite_shell(text, target),
    ".ipynb": lambda text, target, file: rewrite_notebook(text, target, partial(rewrite_python, file=file)),
}
_SEARCHED_SUFFIXES = (".py", ".ipynb", ".sh")
_SKIPPED_FOLDERS = {
    "__pycache__": "a cache",
    "node_modules": "packages of others",
    "site-packages": "packages of others",
    ".ipynb_checkpoints": "a cache",
}
_LARGEST = 16 * 2**20


def migrate(
    paths: Sequence[str], target: Target = Target.HF_COMPAT, *, writes: bool = False, runs_as_is: bool = False
) -> Migration:
    """Rewrite files, and the sources in folders.

    Args:
        paths: Files and folders.
        target: The package that the results are for.
        writes: Whether each changed file is replaced as a whole.
        runs_as_is: Whether the files are only judged. Then no file is named only because it would be rewritten, too.
    """
    files: list[FileChange] = []
    skipped: list[Passed] = []
    errors: list[Passed] = []
    seen: set[Path] = set()
    # A file that is named counts even if its folder's `.gitignore` excludes it
    below = (_walk(one, _ignored_by_git(one)) if one.is_dir() else [one] for one in map(Path, paths))
    for path in itertools.chain.from_iterable(below):
        if isinstance(path, Passed):
            skipped.append(path)
            continue
        try:
            if not path.exists():
                raise MigrationError("there is no such file or folder")
            if path.suffix not in _REWRITINGS:
                raise MigrationError(f"not a source that can be migrated ({', '.join(_REWRITINGS)})")
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            change = rewrite_path(path, target)
            if writes and change.is_changed:
                _write(path, change.before, change.after)
                change = replace(change, written=True)
            files.append(change)
        except MigrationError as error:
            errors.append(Passed(str(path), str(error)))
    named = frozenset() if runs_as_is else frozenset(seen)
    read = functools.cache(partial(rewrite_path, target=target))
    whole = (_with_followed(one, read, named, runs_as_is) for one in files)
    return Migration(target=target, files=tuple(whole), skipped=tuple(skipped), errors=tuple(errors))


def rewrite_path(path: Path, target: Target) -> FileChange:
    """Rewrite one file in memory."""
    before = _read(path)
    mark = codecs.BOM_UTF8 if before.startswith(codecs.BOM_UTF8) else b""
    encoding = "utf-8"
    if b"\0" in before:
        raise MigrationError("it is not text")
    try:
        if path.suffix in (".py", ".pyi"):
            encoding, _ = tokenize.detect_encoding(io.BytesIO(before).readline)
            encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        text = before.removeprefix(mark).decode(encoding)
    except UnicodeDecodeError as error:
        raise MigrationError(f"byte {error.start} is not {encoding}") from error
    except SyntaxError as error:
        raise MigrationError(f"its encoding cannot be read: {error}") from error
    result = _REWRITINGS[path.suffix](text, target, path.resolve())
    try:
        after = mark + result.text.encode(encoding)
    except UnicodeEncodeError as error:
        raise MigrationError(f"{encoding} cannot encode the result") from error
    # As `patch` accepts it, with the line endings kept
    before_lines, after_lines = text.splitlines(keepends=True), result.text.splitlines(keepends=True)
    lines = difflib.unified_diff(before_lines, after_lines, f"a/{path.as_posix()}", f"b/{path.as_posix()}")
    whole = (one if one.endswith(("\n", "\r")) else f"{one}\n\\ No newline at end of file\n" for one in lines)
    return FileChange(
        path=str(path),
        before=before,
        after=after,
        diff="".join(whole),
        findings=result.findings,
        mended=result.mended,
        followed=result.followed,
    )


def _with_followed(
    change: FileChange, read: Callable[[Path], FileChange], named: Container[Path], runs_as_is: bool
) -> FileChange:
    """Add what other files do to a source: those on whose classes it builds, and those that it imports.

    Args:
        change: The source.
        read: Rewrites another file.
        named: Files that are migrated with it, and have findings of their own.
        runs_as_is: As in `migrate`.
    """
    found: set[Spot] = set()
    imported = {one.file for one in change.followed if one.is_import}
    for one in (one for one in change.followed if one.file not in named):
        try:
            other = read(one.file)
        except MigrationError:
            if not one.is_import:
                raise
            continue  # Python says more of a file that it cannot import
        place = os.path.relpath(one.file)
        grave = [spot for spot in other.by_gravity if spot.effect is not Effect.LOOK]
        if one.is_import:
            lines = lines_of_plain_imports(one.file)
            grave = [spot for spot in grave if spot.line in lines and spot.what.startswith(("from ", "import "))]
        else:
            lines = lines_reached_by(one.file, one.name)
            lines -= lines_of_plain_imports(one.file) if one.file in imported else set()  # told once
            grave = [spot for spot in grave if spot.line in lines]
        what = f"import of {one.file.name}" if one.is_import else f"{one.name} of {one.file.name}"
        for spot in grave:
            found.add(Spot(one.line, what, f"{place}:{spot.line}: {spot.what}: {spot.reason}", effect=spot.effect))
        if other.is_changed and not runs_as_is and not one.is_import:
            found.add(Spot(one.line, what, f"`hf-compat migrate` has to rewrite {place}, too", effect=Effect.LOOK))
    return replace(change, findings=tuple(sorted({*change.findings, *found})))


def _read(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise MigrationError("it is not a regular file")
        if path.stat().st_size > _LARGEST:
            raise MigrationError(f"it has more than {_LARGEST // 2**20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise MigrationError(f"it cannot be read: {error.strerror or error}") from error


def _write(path: Path, before: bytes, after: bytes) -> None:
    """Replace a file's bytes all at once. Its mode stays, and a link stays a link.

    Raises:
        MigrationError: It cannot be written, or has changed since it was read. Then it is left as it is.
    """
    real = path.resolve()
    if not os.access(real, os.W_OK):
        raise MigrationError("it is write-protected")
    if _read(real) != before:
        raise MigrationError("it has changed since it was read: nothing is written")
    name = ""
    try:
        held = real.stat()
        descriptor, name = tempfile.mkstemp(prefix=f".{real.name}-", dir=real.parent)
        with open(descriptor, "wb") as file:
            file.write(after)
            file.flush()
            force(file.fileno(), name)
        os.chmod(name, stat.S_IMODE(held.st_mode))
        if (held.st_uid, held.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(name, held.st_uid, held.st_gid)
        os.replace(name, real)
    except OSError as error:
        if name:
            os.unlink(name)
        raise MigrationError(f"it cannot be written: {error.strerror or error}") from error


def _ignored_by_git(folder: Path) -> frozenset[Path]:
    """The paths below a folder that git ignores. None outside of a repository, or without git."""
    words = ["git", "-C", str(folder), "ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z"]
    try:
        listed = subprocess.run(words, capture_output=True, text=True, errors="surrogateescape").stdout
    except OSError:
        return frozenset()
    return frozenset(folder / one for one in listed.split("\0") if one)


def _walk(folder: Path, ignored: frozenset[Path]) -> Iterator[Path | Passed]:
    """Yield the sources in a folder by name, and the skipped entries. Links are not followed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield Passed(str(folder), f"cannot be read: {error.strerror or error}")
        return
    for entry in entries:
        path = folder / entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if not is_folder and path.suffix not in _SEARCHED_SUFFIXES:
            continue
        reasons = {
            "a link": entry.is_symlink(),
            "an environment": is_folder and (path / "pyvenv.cfg").exists(),
            _SKIPPED_FOLDERS.get(entry.name, ""): is_folder and entry.name in _SKIPPED_FOLDERS,
            "a hidden folder": is_folder and entry.name.startswith("."),
            "named in .gitignore": path in ignored,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None:
            yield Passed(str(path), reason)
        elif is_folder:
            yield from _walk(path, ignored)
        else:
            yield path
