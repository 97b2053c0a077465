"""What an ejection comes across: what forbids it, and what its user should know."""

from __future__ import annotations

from dataclasses import dataclass, field


class CannotBeWritten(Exception):
    """A value of the run has no form in which another program could make it again; the message says why."""


@dataclass(slots=True)
class Findings:
    """What has been found so far, in the order in which it was found.

    Args:
        problems: What forbids the ejection, a sentence each. All of them are told at once, and nothing is written.
        notes: What the project does otherwise, or leaves to its user; its README lists them.
        inexact: Why losses differ from the script's in the last digits; empty where they are the same bit for bit.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)

    def forbid(self, problem: str, hint: str) -> None:
        """Note something that forbids the ejection, with the way out."""
        told = f"{problem}\n    Hint: {hint}"
        if told not in self.problems:
            self.problems.append(told)

    def tell(self, note: str) -> None:
        """Note something that the user should know."""
        if note not in self.notes:
            self.notes.append(note)
