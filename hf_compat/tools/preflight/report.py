"""`PreflightReport`: what a preflight has found, for people and as JSON. Plain data."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

from hf_compat.hf.state import ShownAsPrinted

_WIDTH = 108


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # the run fails, or its result is of no use
    WARNING = "warning"  # the run goes through, and hardly does what is meant
    NOTE = "note"  # worth knowing


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that a preflight has found.

    Args:
        severity: `error`, `warning` or `note`.
        check: The check that has found it.
        problem: What is wrong.
        way_out: What to do about it; empty for a note that asks for nothing.
    """

    severity: Severity
    check: str
    problem: str
    way_out: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unchecked:
    """Something that a preflight could not look at.

    Args:
        check: The check.
        reason: Why it was left out.
    """

    check: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PreflightReport(ShownAsPrinted):
    """The findings of a preflight. `print` it, or read `to_json()`.

    Args:
        findings: Errors, warnings and notes, the worst first.
        unchecked: Parts that could not be checked, and why.
        checked: The checks that were made, in their order.
        measured: Measurements, each as a sentence.
        seconds: Duration of the preflight.
    """

    findings: tuple[Finding, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()
    checked: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is no error and no warning; notes are allowed."""
        return all(finding.severity == Severity.NOTE for finding in self.findings)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings with which the run fails."""
        return self._of(Severity.ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings with which the run hardly does what is meant."""
        return self._of(Severity.WARNING)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that are worth knowing."""
        return self._of(Severity.NOTE)

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        yield f"preflight: {self._summary()} ({self.seconds:.1f} s)"
        for finding in self.findings:
            yield ""
            yield from _paragraph(f"{finding.severity.value:<8} {finding.check}: ", finding.problem)
            if finding.way_out:
                yield from _paragraph("         → ", finding.way_out)
        if self.unchecked:
            yield from ("", "not checked")
            for left_out in self.unchecked:
                yield from _paragraph(f"  {left_out.check}: ", left_out.reason)
        if self.measured:
            yield from ("", "measured", *(f"  {line}" for line in self.measured))
        yield from ("", f"checked: {', '.join(self.checked) or 'nothing'}")

    def _summary(self) -> str:
        counts = [(len(self._of(severity)), severity.value) for severity in Severity]
        told = [f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count]
        return ", ".join(told) or "nothing found"


def _paragraph(head: str, text: str) -> Iterable[str]:
    """Yield a text under a head, its lines indented below it."""
    for place, line in enumerate(text.splitlines() or [""]):
        first = head if place == 0 else "         "
        yield from textwrap.wrap(
            line, _WIDTH, initial_indent=first, subsequent_indent="         ", break_long_words=False,
            break_on_hyphens=False, drop_whitespace=True,
        ) or [first.rstrip()]  # fmt: skip
