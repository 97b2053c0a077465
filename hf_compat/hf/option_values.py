"""Options of an argument that is a dict: each by its type, from the dict or from a JSON file. HF words only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from hf_compat.errors import ArgumentError
from hf_compat.hf.value_types import Unreadable, ValueType
from hf_compat.runtime.text import did_you_mean, shown

_LARGEST_FILE = 10_000_000


def read_options_file(path: str) -> dict[str, object]:
    """Return the options that a JSON file holds.

    Raises:
        Unreadable: It cannot be read, or holds something else.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe, a device: reading might never end
            raise Unreadable("it is no regular file.")
        if os.path.getsize(path) > _LARGEST_FILE:
            raise Unreadable(f"the file has more than {_LARGEST_FILE} bytes.")
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise Unreadable(f"it is no JSON file that can be read: {error}.") from error
    if not isinstance(found, dict):
        raise Unreadable("the file holds no JSON object.")
    return found


def read_options(owner: str, known: Mapping[str, ValueType], options: Mapping[str, object]) -> dict[str, object]:
    """Read the options of an argument that is a dict.

    Raises:
        ArgumentError: An option that there is not, or one with a wrong value; the message names both.
    """
    return {name: _read_option(owner, known, name, value) for name, value in options.items()}


def _read_option(owner: str, known: Mapping[str, ValueType], name: str, value: object) -> object:
    if name not in known:
        hint = did_you_mean(name, known, f"the options are {', '.join(known)}.")
        raise ArgumentError(f"`{owner}` has no option {name!r}.\n\nHint: {hint}")
    try:
        return known[name].read(value)
    except Unreadable as error:
        expected = known[name].expected
        hint = str(error) or f"expected {expected}."
        raise ArgumentError(
            f"`{owner}` has `{shown(name, value)}`, which is not {expected}.\n\nHint: {hint}"
        ) from error
