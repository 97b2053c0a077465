"""Which lines of the package ask about devices, and which of them a program reaches.

`tracing()` notes the lines in a process. Where REACHED_LINES names a folder, it adds them to a file there, so that
processes that a test starts count, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "hf_compat"
ASKS = re.compile(
    r"device\.type|is_cuda|torch\.cuda|copies_beside\(|get_device_module|torch\.(?:backends\.)?mps|torch\.accelerator"
)
FOLDER = "REACHED_LINES"
Line = tuple[str, int]


def asking() -> dict[str, set[int]]:
    """The numbers of the lines that ask, by file, without comments, texts and imports."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        lines = path.read_text().splitlines()
        numbers = {n for n, line in enumerate(lines, 1) if ASKS.search(line.partition("#")[0]) and not _is_text(line)}
        if numbers:
            found[str(path)] = numbers
    return found


def _is_text(line: str) -> bool:
    return line.strip().startswith(('"', "'", 'f"', "`", "import", "from"))


@contextlib.contextmanager
def tracing(wanted: dict[str, set[int]] | None = None) -> Iterator[set[Line]]:
    """Note the reached lines of the wanted files.

    Args:
        wanted: Lines by file. None asks the environment whether a process that was started has to trace.
    """
    folder = os.environ.get(FOLDER)
    reached: set[Line] = set()
    if wanted is None and folder is None:
        yield reached
        return
    files = asking() if wanted is None else wanted

    def trace(frame, event, _):
        file = frame.f_code.co_filename
        if file not in files:
            return None
        reached.add((file, frame.f_lineno))
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield reached
    finally:
        sys.settrace(None)
        threading.settrace(None)
        if wanted is None and folder is not None:
            text = "".join(f"{line}\t{file}\n" for file, line in reached if line in files[file])
            (Path(folder) / str(os.getpid())).write_text(text)


def of_started_processes(folder: Path) -> set[Line]:
    """The lines that processes have noted in a folder."""
    rows = [row.split("\t") for path in folder.iterdir() for row in path.read_text().splitlines()]
    return {(file, int(line)) for line, file in rows}
