"""Write JSON with indents by Python's compiled encoder, which knows none. Python's own takes a call for each value."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable

_CONTAINERS = (dict, list, tuple)


def indented_json(
    value: object, indent: int, sort_keys: bool = False, default: Callable[[object], str] | None = None
) -> str:
    """Write what `json.dumps` does with the same arguments. The calls do not grow with the logs of a history.

    No text in JSON holds a line break, so those between the values are known.

    Raises:
        TypeError: A value has no form in JSON.
        RecursionError: A container holds itself. `json.dumps` raises a ValueError.
    """

    def write(part: object, line: str) -> str:
        """Write a part whose own lines begin with `line`, a line break and blanks."""
        if not isinstance(part, _CONTAINERS) or not part:
            return json.dumps(part, default=default)
        inner = line + " " * indent
        is_list = not isinstance(part, dict)
        members: Iterable[object] = part.values() if isinstance(part, dict) else part
        if is_list and _are_flat_and_filled(members):
            deeper = inner + " " * indent
            text = in_lines(part, deeper)[2:-2].replace(f"}},{deeper}{{", f"{inner}}},{inner}{{{deeper}")
            return f"[{inner}{{{deeper}{text}{inner}}}{line}]"
        if not _has_containers(members):
            text = in_lines(part, inner)[1:-1]
        elif is_list:
            text = f",{inner}".join([write(member, inner) for member in members])
        else:
            names = sorted(part) if sort_keys else list(part)
            shallow = {name: None if isinstance(part[name], _CONTAINERS) else part[name] for name in names}
            lines = in_lines(shallow, inner)[1:-1].split(f",{inner}")
            for place, name in enumerate(names):
                if isinstance(part[name], _CONTAINERS):
                    lines[place] = lines[place].removesuffix("null") + write(part[name], inner)
            text = f",{inner}".join(lines)
        begin, end = "[]" if is_list else "{}"
        return f"{begin}{inner}{text}{line}{end}"

    def in_lines(part: object, line: str) -> str:
        return json.dumps(part, sort_keys=sort_keys, default=default, separators=(f",{line}", ": "))

    return write(value, "\n")


def _has_containers(members: Iterable[object]) -> bool:
    return any(issubclass(kind, _CONTAINERS) for kind in set(map(type, members)))


def _are_flat_and_filled(members: Iterable[object]) -> bool:
    """Whether all are dicts of plain values, and none is empty, as the logs of a history are."""
    if set(map(type, members)) != {dict} or not all(members):
        return False
    values: Iterable[Iterable[object]] = map(dict.values, members)  # type: ignore[arg-type]  # all are dicts
    return not _has_containers(itertools.chain.from_iterable(values))
