"""The results of a migration, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Target(StrEnum):
    """The package that the rewritten source is for."""

    HF_COMPAT = "hf_compat"
    TRANSFORMERS_5 = "transformers-5"


class Effect(StrEnum):
    """What happens at a place, gravest first."""

    DIFFERS = "differs silently"
    FAILS = "fails"
    LOOK = "to look at"

    @property
    def gravity(self) -> int:
        return list(Effect).index(self)


@dataclass(frozen=True, order=True, slots=True)
class Spot:
    """A place that a person has to look at, or that was rewritten."""

    line: int  # line of the original file, from 1. In a notebook it counts within the cell
    what: str  # the code or word in question
    reason: str  # why it is left, or what differs after the change
    cell: int | None = None  # number of the notebook cell, from 1
    effect: Effect = Effect.LOOK  # what happens there


@dataclass(frozen=True, order=True, slots=True)
class Followed:
    """A class of another file, on which the source builds, or a file that it imports."""

    line: int  # of the source
    name: str
    file: Path
    is_import: bool = False  # only what fails when the file is imported matters


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A text after migration."""

    text: str
    findings: tuple[Spot, ...] = ()
    mended: tuple[Spot, ...] = ()
    followed: tuple[Followed, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChange:
    """One file, as `path` named it, before and after migration. `Rewritten` explains the findings."""

    path: str
    before: bytes
    after: bytes
    diff: str
    findings: tuple[Spot, ...]
    mended: tuple[Spot, ...] = ()
    followed: tuple[Followed, ...] = ()
    written: bool = False

    @property
    def is_changed(self) -> bool:
        return self.before != self.after

    @property
    def by_gravity(self) -> list[Spot]:
        """All findings about the file as it is, gravest first, then by line and text."""

        def place(one: Spot) -> tuple[int, int, int, str, str]:
            return one.effect.gravity, one.cell or 0, one.line, one.what, one.reason

        return sorted({*self.findings, *self.mended}, key=place)

    @property
    def verdict(self) -> str:
        return self.by_gravity[0].effect.value if self.by_gravity else "fine"


@dataclass(frozen=True, slots=True)
class Passed:
    """A path that was not migrated, and why."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """All files of one command."""

    target: Target
    files: tuple[FileChange, ...]
    skipped: tuple[Passed, ...]
    errors: tuple[Passed, ...]

    @property
    def is_sound(self) -> bool:
        """Whether no file fails or differs silently as it is."""
        return all(one.effect is Effect.LOOK for file in self.files for one in file.by_gravity)
