"""What a notebook shows of our objects: tables, and text as it is printed. HTML only."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence


class ShownAsPrinted:
    """What is made to be printed is shown so as a cell's last line and at a prompt. A dataclass takes `repr=False`."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre style='font-family: monospace'>{html.escape(str(self))}</pre>"

    def __repr__(self) -> str:
        return str(self)


def table_of(rows: Sequence[Mapping[str, object]], numbers: str = ".6f") -> str:
    """Return rows as an HTML table; the columns are all names, in the order in which they came."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)

    def text_of(value: object) -> str:
        return format(value, numbers) if isinstance(value, float) else str(value)

    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text_of(row.get(name, '')))}</td>" for name in columns) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
