"""What an ejection comes across: what forbids it, and what its user should know."""

from __future__ import annotations

from dataclasses import dataclass, field

TODO = "TODO: "


class CannotBeWritten(Exception):
    """A value of the run has no form in which another program could make it again; the message says why."""


@dataclass(slots=True)
class Findings:
    """What has been found so far, in the order in which it was found.

    Args:
        problems: What forbids the ejection, a sentence each. All of them are told at once, and nothing is written.
        todos: What the project leaves to its user, marked where it belongs.
        notes: What the project does otherwise, or leaves to its user; its README lists them.
        inexact: Why losses differ from the script's in the last digits; empty where they are the same bit for bit.
    """

    problems: list[str] = field(default_factory=list)
    todos: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)

    def forbid(self, problem: str, hint: str) -> None:
        """Note something that forbids the ejection, with the way out."""
        told = f"{problem}\n    Hint: {hint}"
        if told not in self.problems:
            self.problems.append(told)

    def mark(self, what: str, offer: str) -> list[str]:
        """Note something that is left to do and changes no number; returns the comment for its place in the project.

        Args:
            what: What the script does there, with file and line.
            offer: What Lightning has for it.
        """
        self.todos.append(" ".join(f"{what}. Lightning has {offer}.".split()))
        return [f"# {TODO}{self.todos[-1]}"]

    def leave(self, what: str, offer: str) -> list[str]:
        """Note something that is left to do; returns a comment and an error: without it, the numbers were others."""
        return [*self.mark(what, offer), f"raise NotImplementedError({self.todos[-1]!r})"]

    def tell(self, note: str) -> None:
        """Note something that the user should know."""
        if note not in self.notes:
            self.notes.append(note)
