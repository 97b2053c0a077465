"""The faults in user code that `user_code.py` tries: each is a way in which a script's own part fails.

A fault is a function that takes a `Switch` and returns the Trainer's parts. While the switch is on they fail; when it
is off they are those of a healthy run, so that the same Trainer can be trained again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from helpers import toy
from hf_compat import Trainer
from hf_compat.errors import (
    HfCompatError,
)

ROWS = toy.rows(24)
EVAL_ROWS = toy.rows(6, seed=4)
UPDATES = 12  # of a healthy run: 24 samples, 2 a micro-batch, 2 micro-batches an update, 2 epochs
MARK = "the user's own words"


class UserError(Exception):
    """What a script raises."""


class Switch:
    """Whether the fault is in force, and how often each place was reached while it was."""

    def __init__(self) -> None:
        self.on = True
        self.counts: dict[str, int] = {}

    def reaches(self, place: str, at: int) -> bool:
        """Count a visit; return whether it is the one to fail at."""
        if not self.on:
            return False
        self.counts[place] = self.counts.get(place, 0) + 1
        return self.counts[place] == at


@dataclass(frozen=True, kw_only=True)
class Expected:
    """How a fault has to end.

    Args:
        kinds: The error's types; none: the run ends well.
        words: What the error, or a warning, has to name.
        updates: Updates that a run which ends well has made.
        own: The error is the user's, or torch's own about the user's code: it comes out as it is.
    """

    kinds: tuple[type[BaseException], ...] = ()
    words: tuple[str, ...] = ()
    updates: int | None = None
    own: bool = False


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the table."""

    subject: str
    name: str
    expected: Expected
    parts: Callable[[Switch], dict[str, Any]]
    in_workers: Expected | None = None
    columns: tuple[str, ...] = ("plain", "workers", "async_save")
    then: str = "again"
    repair: Callable[[Trainer], None] = field(default=lambda trainer: None)

    @property
    def key(self) -> str:
        return f"{self.subject}: {self.name}"


FAULTS: list[Fault] = []


def own(kind: type[BaseException] = UserError, *words: str) -> Expected:
    return Expected(kinds=(kind,), words=words or ((MARK,) if kind is UserError else ()), own=True)


def ours(kind: type[HfCompatError], *words: str) -> Expected:
    return Expected(kinds=(kind,), words=words)


def well(*words: str, updates: int | None = UPDATES) -> Expected:
    return Expected(words=words, updates=updates)


DEAD_WORKER = own(RuntimeError, "exited unexpectedly")


def fault(subject: str, name: str, expected: Expected, **options: Any) -> Callable:
    def keep(parts: Callable[[Switch], dict[str, Any]]) -> Callable:
        FAULTS.append(Fault(subject=subject, name=name, expected=expected, parts=parts, **options))
        return parts

    return keep


def throw(error: BaseException | type[BaseException] = UserError) -> Any:
    # always a new one: an error that is kept keeps the frames of its last traceback, and all that is in them
    raise error(MARK) if isinstance(error, type) else type(error)(*error.args)
