"""An exception as a finding: what happened, in whose line, and the way out."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from hf_compat.errors import HfCompatError
from hf_compat.tools.preflight.report import Finding, Severity

_OWN = str(Path(__file__).resolve().parents[2])
_HINT = "\n\nHint: "
_LONGEST = 600

# What errors of torch and transformers say, and what to do about it; the first that fits counts.
_WAYS_OUT = (
    ("does not have a padding token", "set one: `tokenizer.pad_token = tokenizer.eos_token`"),
    ("no padding token is defined", "set `model.config.pad_token_id = tokenizer.pad_token_id`"),
    ("Unable to create tensor", "remove columns that hold no numbers, tokenize, and let the collator pad and truncate"),
    ("stack expects each tensor to be equal size", "let a collator pad: `DataCollatorWithPadding(tokenizer)`, say"),
    ("out of memory", "use a smaller batch with more `gradient_accumulation_steps`, or `gradient_checkpointing=True`"),
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


def finding_of(
    error: BaseException, check: str, doing: str, way_out: str = "", severity: Severity = Severity.ERROR
) -> Finding:
    """Return what an exception says.

    Args:
        error: The exception.
        check: The check that has met it.
        doing: What was being done, as the beginning of a sentence.
        way_out: What to do, where the caller knows better than the exception.
        severity: How bad it is.
    """
    said, _, hint = str(error).partition(_HINT)
    if isinstance(error, HfCompatError):
        return Finding(severity=severity, check=check, problem=said, way_out=way_out or hint)
    problem = f"{doing}: {type(error).__name__}: {_shortened(said)}{_place_of(error)}"
    return Finding(severity=severity, check=check, problem=problem, way_out=way_out or _way_out(error))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _way_out(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    known = next((way for words, way in _WAYS_OUT if words.lower() in text.lower()), None)
    return known or "correct the code at that place; the run would stop there"


def _place_of(error: BaseException) -> str:
    """Return the innermost line of the user's own code, else of any package but this one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = _last(frame for frame in frames if not _is_packaged(frame.filename))
    place = own or _last(frame for frame in frames if not frame.filename.startswith(_OWN))
    return "" if place is None else f"\n(in {place.name}, {_short(place.filename)}:{place.lineno})"


def _last(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    found = list(frames)
    return found[-1] if found else None


def _is_packaged(file: str) -> bool:
    """Return whether a file belongs to an installed package, to Python itself or to this package."""
    parts = os.path.normpath(file).split(os.sep)
    of_python = file.startswith(os.path.dirname(os.__file__)) or file.startswith("<")
    return "site-packages" in parts or "dist-packages" in parts or file.startswith(_OWN) or of_python


def _short(file: str) -> str:
    """Return a path as seen from the working folder, where it is in there."""
    relative = os.path.relpath(file) if os.path.splitdrive(file)[0] == os.path.splitdrive(os.getcwd())[0] else file
    return file if relative.startswith("..") else relative


def line_of(error: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def has_been_lost(error: BaseException) -> bool:
    """Return whether an error leaves the process unfit for more: a GPU that has failed an assertion answers nothing."""
    return "device-side assert" in str(error) and "torch" in sys.modules
