"""What a migration has done, and what it leaves to a person. Plain data; imports nothing of the package."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum


class Target(StrEnum):
    """What the rewritten source is for."""

    HF_COMPAT = "hf_compat"
    TRANSFORMERS_5 = "transformers-5"


class Effect(StrEnum):
    """What happens at a place, gravest first."""

    DIFFERS = "differs silently"
    FAILS = "fails"
    LOOK = "to look at"

    @property
    def gravity(self) -> int:
        """Place from the gravest."""
        return list(Effect).index(self)


@dataclass(frozen=True, order=True, slots=True)
class Finding:
    """One thing that a person has to look at.

    Args:
        line: In the file as it was, from 1.
        what: The code or word that it is about.
        reason: Why it is left, or what differs after the change.
        cell: In a notebook, the cell, from 1; `line` then counts within it.
        effect: What happens there.
    """

    line: int
    what: str
    reason: str
    cell: int | None = None
    effect: Effect = Effect.LOOK


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A text after migration.

    Args:
        text: The text.
        findings: What is left to a person.
        mended: What has been rewritten, where the text as it was would fail or differ.
    """

    text: str
    findings: tuple[Finding, ...] = ()
    mended: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChange:
    """One file.

    Args:
        path: As it was named, or found in a folder that was.
        before: Its bytes.
        after: Its bytes after migration.
        diff: Unified diff of its text; empty where nothing changes.
        findings: What needs a person, by line.
        mended: What is rewritten, where the file as it is would fail or differ.
        written: Whether `after` is on the disk.
    """

    path: str
    before: bytes
    after: bytes
    diff: str
    findings: tuple[Finding, ...]
    mended: tuple[Finding, ...] = ()
    written: bool = False

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to change."""
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class Passed:
    """A path that was not migrated, and why."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """All files of one command.

    Args:
        target: What the result is for.
        files: Every file that was read, changed or not.
        skipped: Paths in folders that were left out on purpose.
        errors: Paths that could not be read, understood or written.
    """

    target: Target
    files: tuple[FileChange, ...]
    skipped: tuple[Passed, ...]
    errors: tuple[Passed, ...]


def unified_diff(path: str, before: str, after: str) -> str:
    """Return the difference of two texts as `patch` takes it; line endings are kept."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n" for line in lines)
