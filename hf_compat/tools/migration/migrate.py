"""Paths → what becomes of each file. Reads and, where it is asked to, writes; prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hf_compat.errors import MigrationError
from hf_compat.tools.migration.files import read, spelling_of, write
from hf_compat.tools.migration.folders import found_in
from hf_compat.tools.migration.notebooks import rewrite_notebook
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import FileChange, Migration, Passed, Rewritten, Target, unified_diff
from hf_compat.tools.migration.shell import rewrite_shell

_REWRITINGS: dict[str, Callable[[str, Target], Rewritten]] = {
    ".py": rewrite_python,
    ".pyi": rewrite_python,
    ".sh": rewrite_shell,
    ".ipynb": lambda text, target: rewrite_notebook(text, target, rewrite_python),
}


def migrate(paths: Sequence[str], target: Target = Target.HF_COMPAT, *, writes: bool = False) -> Migration:
    """Rewrite files, and the sources in folders.

    Args:
        paths: Files and folders.
        target: What the result is for.
        writes: Whether files that change are written; each is replaced as a whole or stays as it was.
    """
    files: list[FileChange] = []
    skipped: list[Passed] = []
    errors: list[Passed] = []
    for path in _sources(paths, skipped, errors):
        try:
            change = rewrite_path(path, target)
            if writes and change.is_changed:
                write(path, change.before, change.after)
                change = replace(change, written=True)
            files.append(change)
        except MigrationError as error:
            errors.append(Passed(str(path), str(error)))
    return Migration(target=target, files=tuple(files), skipped=tuple(skipped), errors=tuple(errors))


def _sources(paths: Sequence[str], skipped: list[Passed], errors: list[Passed]) -> Iterator[Path]:
    """Yield each file once; a file that is named is taken whatever its folder's `.gitignore` says."""
    seen: set[Path] = set()
    for path in map(Path, paths):
        found: Sequence[Path | Passed] = list(found_in(path)) if path.is_dir() else [path]
        for one in found:
            if isinstance(one, Passed):
                skipped.append(one)
            elif not one.exists():
                errors.append(Passed(str(one), "there is no such file or folder"))
            elif one.suffix not in _REWRITINGS:
                errors.append(Passed(str(one), f"no source that can be migrated ({', '.join(_REWRITINGS)})"))
            elif one.resolve() not in seen:
                seen.add(one.resolve())
                yield one


def rewrite_path(path: Path, target: Target) -> FileChange:
    """Return what becomes of one file; nothing is written.

    Raises:
        MigrationError: It cannot be read or understood.
    """
    before = read(path)
    spelling = spelling_of(before, is_python=path.suffix in (".py", ".pyi"))
    text = spelling.text(before)
    result = _REWRITINGS[path.suffix](text, target)
    try:
        after = spelling.bytes(result.text)
    except UnicodeEncodeError as error:
        raise MigrationError(f"the result cannot be spelled in {spelling.encoding}") from error
    return FileChange(
        path=str(path),
        before=before,
        after=after,
        diff=unified_diff(path.as_posix(), text, result.text),
        findings=result.findings,
        mended=result.mended,
    )
