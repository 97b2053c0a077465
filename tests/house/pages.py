"""Write those parts of the documentation that are made from tables of the code.

python tests/house/pages.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hf_compat.checkpoint import layout
from hf_compat.runtime.launch import LAUNCHERS, Launcher
from hf_compat.training_run.resumer import STAGES, Stage
from house.arguments_page import arguments_page
from house.events_page import with_events


def _with_rows(page: str, after: str, before: str, rows: Iterable[str]) -> str:
    """Replace the rows of a table between its head or a row and another line, of which the beginnings are given."""
    pattern = rf"(^{re.escape(after)}[^\n]*\n(?:\|---[^\n]*\n)?)(?:\|[^\n]*\n)*?(?=^{re.escape(before)})"
    made, count = re.subn(pattern, lambda found: found[1] + "".join(rows), page, flags=re.MULTILINE)
    assert count == 1, f"{after} is followed by no such table"
    return made


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def with_launchers(page: str) -> str:
    """Write the table of launchers."""
    return _with_rows(page, "| launcher |", "\n", map(_launcher, LAUNCHERS))


def _launcher(row: Launcher) -> str:
    def names(found: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in found) or "–"

    machines = ", or one a machine" if row.may_start_machines else ""
    on_machine = f"{names(row.local_rank)} of {names(row.local_world_size)}"
    return _row(
        f"[{row.name}]({row.link})",
        "one a machine" if row.starts_machines else f"each{machines}",
        f"{names(row.rank)} of {names(row.world_size)}",
        "–" if on_machine == "– of –" else on_machine,
        f"{names(row.node_rank + row.nodes)}; {names(row.address + row.port)}",
    )


def with_states(page: str) -> str:
    """Write the rows of the files that hold the states of a training."""
    return _with_rows(page, "| `adapter_model.safetensors`", "| `trainer_state.json`", map(_state, layout.STATES))


def _state(state: layout.State) -> str:
    stem, _, suffix = state.name.rpartition(".")
    names = f"`{state.name}`" + (f", or `{stem}_<rank>.{suffix}`" if state.of_each_rank else "")
    return _row(names, state.holds, "ours" if state.is_ours else "HF's")


def with_stages(page: str) -> str:
    """Write the table of a resume."""
    return _with_rows(page, "| moment |", "\n", map(_stage, STAGES))


def _stage(stage: Stage) -> str:
    return _row(stage.at, stage.restores, f"`{stage.method}`" if stage.method else "")


# Page → what makes it of its present text.
PAGES: dict[str, Callable[[str], str]] = {
    "arguments.md": lambda _: arguments_page(),
    "checkpoints.md": with_states,
    "events_and_hooks.md": with_events,
    "how_it_works.md": with_stages,
    "scale.md": with_launchers,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        path = ROOT / "docs" / name
        path.write_text(make(path.read_text(encoding="utf-8")), encoding="utf-8")
