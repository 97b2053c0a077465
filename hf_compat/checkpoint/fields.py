"""What the fields of a state may hold: a table of kinds, and which field of a state is none. Plain values only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeGuard

from hf_compat.checkpoint.files import short

Fits = Callable[[object], bool]
Kind = tuple[str, Fits]  # in words, and whether a value is of it
_LARGEST_COUNT = 2**63


def wrong_field(values: Mapping[str, object], kinds: Mapping[str, Kind]) -> str | None:
    """Return in words which value is not of its kind; fields that are missing are left to the caller."""
    for name, (expected, fits) in kinds.items():
        if name in values and not fits(values[name]):
            return f"`{name}` is {short(values[name])}, not {expected}"
    return None


def or_none(kind: Kind) -> Kind:
    """Return the kind of values that may also be missing."""
    expected, fits = kind
    return f"{expected}, or null", lambda value: value is None or fits(value)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; truth values are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number from 0 on that fits 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_COUNT


def _is_amount(value: object) -> bool:
    return is_number(value) and 0 <= value < math.inf


COUNT: Kind = ("a whole number from 0 on", is_count)
AMOUNT: Kind = ("a number from 0 on", _is_amount)
NUMBER: Kind = ("a number", is_number)
SEED: Kind = ("a seed", lambda value: isinstance(value, int) and is_count(value >> 1))
FLAG: Kind = ("true or false", lambda value: isinstance(value, bool))
TEXT: Kind = ("text", lambda value: isinstance(value, str))
MAPPING: Kind = ("a mapping", lambda value: isinstance(value, dict))
