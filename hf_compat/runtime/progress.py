"""Progress bars: lines in a terminal; HTML in a notebook, which needs no widgets and stays in the saved page."""

from __future__ import annotations

import html
import io
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar

from tqdm import tqdm

_T = TypeVar("_T")

# The text beside an HTML bar: its values are those of `tqdm.format_meter`.
_TEXT = "{desc}{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class _Display(Protocol):
    """What a notebook shows and can show anew: IPython's `DisplayHandle`."""

    def update(self, obj: object) -> None:
        """Show another object in the place of this one."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookOutput:
    """HTML that a cell shows, and shows anew in its place whenever it changes."""

    def __init__(self) -> None:
        self._handle: _Display | None = None

    def show(self, text: str) -> None:
        """Show a text of HTML in place of the one before."""
        from IPython.display import HTML, display

        shown = HTML(text)  # type: ignore[no-untyped-call]  # IPython's
        if self._handle is None:
            self._handle = display(shown, display_id=True)  # type: ignore[no-untyped-call]  # IPython's
        else:
            self._handle.update(shown)


class HtmlBar(tqdm):
    """A bar of tqdm that is an element of HTML.

    Args:
        iterable: Whose items are counted; None where `update` counts.
        show: Called with the HTML whenever it changes, at most four times a second; default: an output of its own.
        options: Those of `tqdm`.
    """

    def __init__(
        self, iterable: Iterable[object] | None = None, *, show: Callable[[str], None] | None = None, **options: object
    ) -> None:
        self.show = show or NotebookOutput().show
        super().__init__(iterable, **{"mininterval": 0.25, "bar_format": _TEXT, **options, "file": io.StringIO()})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Show the bar as it stands; tqdm calls it. An empty `msg` removes the bar."""
        values = self.format_dict
        size = f"value='{values['n']}' max='{values['total']}'" if values["total"] else ""
        bar = f"<progress {size} style='width: 300px; vertical-align: middle'></progress>"
        self.show("" if msg == "" else f"<div>{bar} {html.escape(self.format_meter(**values))}</div>")


def progress_bar(
    iterable: Iterable[_T] | None = None,
    total: int | None = None,
    initial: int = 0,
    leave: bool = True,
    desc: str | None = None,
) -> tqdm[_T]:
    """Return a bar of tqdm for where this process shows its output; the arguments are those of `tqdm`."""
    kind = HtmlBar if in_notebook() else partial(tqdm, dynamic_ncols=True)
    return kind(iterable, total=total, initial=initial, leave=leave, desc=desc)
