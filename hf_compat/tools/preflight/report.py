"""`PreflightReport` with its findings, for people and as JSON, and exceptions as findings."""

from __future__ import annotations

import json
import os
import textwrap
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from hf_compat.errors import HfCompatError
from hf_compat.tools.terminal import ShownAsPrinted

_WIDTH = 108
_OWN = str(Path(__file__).resolve().parents[2])
_PACKAGED, _OF_PYTHON = {"site-packages", "dist-packages"}, (os.path.dirname(os.__file__), "<")
_LONGEST = 600

# Words of errors of torch and transformers, and the way out. The first that fits counts.
_WAYS_OUT = (
    ("does not have a padding token", "set one: `tokenizer.pad_token = tokenizer.eos_token`"),
    ("no padding token is defined", "set `model.config.pad_token_id = tokenizer.pad_token_id`"),
    ("Unable to create tensor", "remove columns that hold no numbers, tokenize, and let the collator pad and truncate"),
    ("stack expects each tensor to be equal size", "let a collator pad: `DataCollatorWithPadding(tokenizer)`, say"),
    ("out of memory", "use a smaller batch with more `gradient_accumulation_steps`, or `gradient_checkpointing=True`"),
    ("out of bounds for dimension", "an index is larger than the tensor that it is looked up in: compare both shapes"),
    ("is out of bounds", "labels count from 0: give the model as many classes (`num_labels`) as the data has"),
    ("index out of range in self", "an input is larger than an embedding: compare tokens with the vocabulary, and "
                                   "lengths with the model's positions"),
    ("device-side assert", "run it on the CPU (`use_cpu=True`), which names the index that is out of range"),
    ("pickle", "define what the workers need at the top of a module, or set `dataloader_num_workers=0`"),
    ("expected scalar type", "cast what the loss is computed from to one type"),
    ("must match the size of tensor", "compare the shapes of the logits and the labels"),
    ("Expected input batch_size", "compare the shapes of the logits and the labels"),
    ("unexpected keyword argument", "let the collator leave that entry out, or let the forward take it"),
    ("missing", "let the data set or the collator give that entry"),
    ("different dtypes", "cast what is compared to one type"),
    ("Only one class", "it was called with one batch only; let the metric take that, or look whether the data has all "
                       "classes"),
)  # fmt: skip


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # the run fails, or its result is of no use
    WARNING = "warning"  # the run goes through, and hardly does what the user means
    NOTE = "note"  # worth knowing


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A finding of a preflight.

    Args:
        severity: `error`, `warning` or `note`.
        way_out: The way out. Empty for a note that asks for nothing.
    """

    severity: Severity
    check: str
    problem: str
    way_out: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unchecked:
    """A check that could not be made, and why."""

    check: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PreflightReport(ShownAsPrinted):
    """The findings of a preflight. `print` it, or read `to_json()`.

    Args:
        findings: Errors, warnings and notes, the worst first.
        unchecked: Parts that could not be checked, and why.
        measured: Measurements, each as a sentence.
    """

    findings: tuple[Finding, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()
    checked: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is no error and no warning. Notes are allowed."""
        return all(finding.severity == Severity.NOTE for finding in self.findings)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings with which the run fails."""
        return self._of(Severity.ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings with which the run hardly does what the user means."""
        return self._of(Severity.WARNING)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that are worth knowing."""
        return self._of(Severity.NOTE)

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def to_json(self) -> str:
        """Write everything as JSON."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        counts = [(len(self._of(severity)), severity.value) for severity in Severity]
        told = ", ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count)
        lines = [f"preflight: {told or 'nothing found'} ({self.seconds:.1f} s)"]
        for finding in self.findings:
            lines += ["", *_paragraph(f"{finding.severity.value:<8} {finding.check}: ", finding.problem)]
            lines += _paragraph("         → ", finding.way_out) if finding.way_out else ()
        lines += ["", "not checked"] if self.unchecked else []
        for left_out in self.unchecked:
            lines += _paragraph(f"  {left_out.check}: ", left_out.reason)
        lines += ["", "measured", *(f"  {line}" for line in self.measured)] if self.measured else []
        return "\n".join([*lines, "", f"checked: {', '.join(self.checked) or 'nothing'}"])


def _paragraph(head: str, text: str) -> Iterable[str]:
    for place, line in enumerate(text.splitlines() or [""]):
        first = head if place == 0 else "         "
        yield from textwrap.wrap(
            line, _WIDTH, initial_indent=first, subsequent_indent="         ", break_long_words=False,
            break_on_hyphens=False, drop_whitespace=True,
        ) or [first.rstrip()]  # fmt: skip


def finding_of(
    error: BaseException, check: str, doing: str, way_out: str = "", severity: Severity = Severity.ERROR
) -> Finding:
    """Turn an exception into a finding."""
    said, _, hint = str(error).partition("\n\nHint: ")
    if isinstance(error, HfCompatError):
        return Finding(severity=severity, check=check, problem=said, way_out=way_out or hint)
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost line of the user's own code, or else of any package but this one
    others = [frame for frame in frames if not frame.filename.startswith(_OWN)]
    not_packaged = [frame for frame in others if not _PACKAGED & {*os.path.normpath(frame.filename).split(os.sep)}]
    places = [frame for frame in not_packaged if not frame.filename.startswith(_OF_PYTHON)] or others
    place = ""
    if places:
        file, here = places[-1].filename, os.getcwd()
        relative = os.path.relpath(file) if os.path.splitdrive(file)[0] == os.path.splitdrive(here)[0] else file
        place = f"\n(in {places[-1].name}, {file if relative.startswith('..') else relative}:{places[-1].lineno})"
    text = said if len(said) <= _LONGEST else f"{said[:_LONGEST]} …"
    known = way_out_of(error)
    return Finding(
        severity=severity,
        check=check,
        problem=f"{doing}: {type(error).__name__}: {text}{place}",
        way_out=way_out or known or "correct the code at that place; the run would stop there",
    )


def way_out_of(error: BaseException) -> str | None:
    """The way out of an error of torch or transformers, by its words. None if it is not known."""
    searched = f"{type(error).__name__}: {error}".lower()
    return next((way for words, way in _WAYS_OUT if words.lower() in searched), None)


def line_of(error: BaseException) -> str:
    """Write an exception in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
