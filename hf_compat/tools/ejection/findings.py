"""The findings of an ejection: what forbids it, what is left to do, and what its user should know."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.rows import ROWS
from hf_compat.plan.argument_support import default_of
from hf_compat.runtime.text import shown

TODO = "TODO: "


class CannotBeWritten(Exception):
    """No Python makes a value of the run again. The message says why."""


@dataclass(slots=True)
class Findings:
    """All findings so far, in their order."""

    problems: list[str] = field(default_factory=list)  # reasons that forbid the ejection, reported all at once
    todos: list[str] = field(default_factory=list)  # work for the user, marked in the project's files
    notes: list[str] = field(default_factory=list)  # differences between project and script, for the README
    inexact: list[str] = field(default_factory=list)  # reasons why losses differ in the last digits

    def forbid(self, problem: str, hint: str) -> None:
        """Add a reason that forbids the ejection, with the way out."""
        told = f"{problem}\n    Hint: {hint}"
        if told not in self.problems:
            self.problems.append(told)

    def mark(self, what: str, offer: str) -> list[str]:
        """Add work that changes no number, and make the comment for its place in the project."""
        self.todos.append(" ".join(f"{what}. Lightning has {offer}.".split()))
        return [f"# {TODO}{self.todos[-1]}"]

    def leave(self, what: str, offer: str) -> list[str]:
        """Add work on which numbers depend, and make its comment and a statement that raises."""
        return [*self.mark(what, offer), f"raise NotImplementedError({self.todos[-1]!r})"]

    def tell(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def check_arguments(self, args: TrainingArguments) -> None:
        """Add what becomes of the arguments that are set and that the project does not take over."""
        for argument in fields(TrainingArguments):
            row, default, value = ROWS[argument.name], default_of(argument), getattr(args, argument.name)
            is_set = (value is not None) if default is None else bool(value != default)
            if not is_set or row.ejected in ("taken", "nothing"):
                continue
            told = shown(argument.name, value)
            if row.ejected == "refused":
                self.forbid(f"`{told}`: {row.says} cannot be written in plain Lightning here.", "leave it out.")
            elif row.ejected == "sharded":
                self.forbid(
                    f"`{told}` spreads the weights over devices. The project clips gradients, chooses parameter groups "
                    "and saves the model by whole weights.",
                    f"leave it out; Lightning's {row.says} goes into `config.yaml` afterwards, with its own clipping "
                    "in the place of the project's.",
                )
            else:
                self.tell(f"`{told}` is left out: {row.says}.")
