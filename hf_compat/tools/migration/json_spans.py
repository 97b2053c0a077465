"""Where the parts of a JSON text stand, so that one can be changed and all others stay byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Span:
    """A value's place in a text: from its first character to after its last."""

    start: int
    end: int


def span_at(text: str, start: int) -> Span:
    """Return the value that begins at a place, or after the space there."""
    begin = _skip(text, start)
    return Span(begin, _DECODER.raw_decode(text, begin)[1])


def members(text: str, span: Span) -> dict[str, Span]:
    """Return the values of an object by their keys."""
    found: dict[str, Span] = {}
    place = _skip(text, span.start + 1)
    while text[place] != "}":
        key, place = _DECODER.raw_decode(text, place)
        found[str(key)] = value = span_at(text, _skip(text, place) + 1)
        place = _after_comma(text, value.end)
    return found


def items(text: str, span: Span) -> Iterator[Span]:
    """Yield the values of an array."""
    place = _skip(text, span.start + 1)
    while text[place] != "]":
        value = span_at(text, place)
        yield value
        place = _after_comma(text, value.end)


def _skip(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def _after_comma(text: str, place: int) -> int:
    place = _skip(text, place)
    return _skip(text, place + 1) if text[place] == "," else place


def spelled_lines(text: str, span: Span, lines: Sequence[str]) -> str:
    """Return an array of lines, or a text, spelled as the one in its place; lines that were there stay as they were.

    Args:
        text: The JSON text.
        span: The array or text in it.
        lines: The new lines, with their ends.
    """
    is_ascii = text.isascii()
    if text[span.start] == '"':
        return json.dumps("".join(lines), ensure_ascii=is_ascii)
    spans = list(items(text, span))
    held = {_DECODER.raw_decode(text, one.start)[0]: text[one.start : one.end] for one in spans}
    spelled = [held.get(line) or json.dumps(line, ensure_ascii=is_ascii) for line in lines]
    before, after = text[span.start : spans[0].start], text[spans[-1].end : span.end]
    between = text[spans[0].end : spans[1].start] if len(spans) > 1 else "," + before[1:]
    return before + between.join(spelled) + after
