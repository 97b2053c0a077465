"""`hf-compat plot`: the curves of one or several runs, as a PNG and as one self-contained HTML page."""

from __future__ import annotations

import html
import io
import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_compat.checkpoint.layout import TRAINER_STATE_NAME, list_checkpoints
from hf_compat.errors import ArgumentError
from hf_compat.runtime.text import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Written into every file, and looked for before one is written over.
MARK = "drawn by hf-compat plot"
_TIMED = ("_runtime", "_per_second", "_preparation_time")
_NO_CURVES = frozenset({"epoch", "step", "total_flos", "train_loss"})
_FIRST = ("loss", "learning_rate", "grad_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCurves:
    """What a run has logged.

    Args:
        name: How the run is called in legends.
        folder: Where its state was read.
        step: Updates done.
        max_steps: Updates planned; 0 where the state does not say.
        curves: Name of a value → points (update, epoch, value).
    """

    name: str
    folder: str
    step: int
    max_steps: int
    curves: dict[str, list[tuple[int, float, float]]]


def read_run(path: str, name: str | None = None) -> RunCurves:
    """Read a run's logs: of its output folder, finished or not, of one checkpoint, or of a `trainer_state.json`.

    Raises:
        ArgumentError: There is no state, or it cannot be read.
    """
    file = _state_file(path)
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        history, step = state["log_history"], int(state.get("global_step", 0))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{file} is no readable trainer state: {error}.") from error
    curves: dict[str, list[tuple[int, float, float]]] = {}
    for log in history:
        for key, value in log.items():
            if key in _NO_CURVES or key.endswith(_TIMED) or not isinstance(value, (int, float)):
                continue
            curves.setdefault(key, []).append((int(log.get("step", 0)), float(log.get("epoch") or 0.0), float(value)))
    chosen = name or os.path.basename(os.path.abspath(path if os.path.isdir(path) else os.path.dirname(path) or "."))
    return RunCurves(
        name=chosen, folder=str(file.parent), step=step, max_steps=int(state.get("max_steps") or 0), curves=curves
    )


def _state_file(path: str) -> Path:
    """Return the newest state of a run: a finished one's own, else its last checkpoint's."""
    if os.path.isfile(path):
        return Path(path)
    if not os.path.isdir(path):
        raise ArgumentError(f"There is no run at {path}.\n\nHint: name the output folder of a run.")
    candidates = [Path(path), *map(Path, list_checkpoints(path))]
    files = [folder / TRAINER_STATE_NAME for folder in candidates if (folder / TRAINER_STATE_NAME).is_file()]
    if not files:
        raise ArgumentError(
            f"{path} has no {TRAINER_STATE_NAME} yet, nor has a checkpoint in it.\n\n"
            "Hint: training writes one with each checkpoint (`save_steps`), `trainer.save_state()` at its end."
        )
    return max(files, key=lambda file: file.stat().st_mtime_ns)


def panels_of(runs: Sequence[RunCurves]) -> list[tuple[str, list[str]]]:
    """Return which values share a picture: the losses of training and evaluation, and every other value by itself."""
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    losses = [name for name in names if name == "loss" or (name.startswith("eval") and name.endswith("_loss"))]
    rest = [name for name in names if name not in losses]
    ordered = sorted(rest, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    return ([("loss", losses)] if losses else []) + [(name, [name]) for name in ordered]


def draw(runs: Sequence[RunCurves], by: str = "step") -> list[tuple[str, Figure]]:
    """Draw a matplotlib figure for each panel.

    Args:
        runs: The runs; one colour each.
        by: `step` or `epoch`.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    figures = []
    for title, names in panels_of(runs):
        figure = _figure(1)
        _draw_panel(figure.subplots(), runs, title, names, by)
        figures.append((title, figure))
    return figures


def _figure(panels: int) -> Figure:
    matplotlib = need("matplotlib.figure", "'hf-compat[plot]'", "`hf-compat plot`")
    columns = min(panels, 3)
    rows = math.ceil(panels / columns)
    figure: Figure = matplotlib.Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
    return figure


def _draw_panel(axes: Axes, runs: Sequence[RunCurves], title: str, names: Sequence[str], by: str) -> None:
    for index, run in enumerate(runs):
        for name in names:
            label = run.name if len(names) == 1 else f"{run.name}: {name}"
            _draw_curve(axes, run, index, name, by, label, "-" if name == names[0] else "--")
    axes.set_title(title)
    axes.set_xlabel("epoch" if by == "epoch" else "update")
    axes.grid(alpha=0.3)
    if len(runs) > 1 or len(names) > 1:
        axes.legend(fontsize="small")


def _draw_curve(axes: Axes, run: RunCurves, index: int, name: str, by: str, label: str, dashes: str) -> None:
    """Draw one value of one run; points that are not finite are left out."""
    points = [point for point in run.curves.get(name, []) if math.isfinite(point[2])]
    if not points:
        return
    along = [point[1 if by == "epoch" else 0] for point in points]
    (line,) = axes.plot(
        along, [point[2] for point in points],
        color=f"C{index % 10}", linestyle=dashes, marker="o" if len(points) < 20 else "", markersize=3, linewidth=1.5,
        label=label,
    )  # fmt: skip
    line.set_gid(f"run-{index}-{re.sub('[^A-Za-z0-9]+', '-', name)}")


def write_png(runs: Sequence[RunCurves], path: Path, by: str = "step") -> None:
    """Draw all panels into one PNG."""
    panels = panels_of(runs)
    figure = _figure(len(panels))
    grid = figure.subplots(math.ceil(len(panels) / 3), min(len(panels), 3), squeeze=False).flat
    for axes, (title, names) in zip(grid, panels, strict=False):
        _draw_panel(axes, runs, title, names, by)
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=130, metadata={"Software": MARK})


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{mark}">{refresh}
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1500px; padding: 0 1rem; color: #222; }}
h1 {{ font-size: 1.3rem; }}
.panels {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem; }}
figure {{ margin: 0; border: 1px solid #ddd; border-radius: 8px; padding: .5rem; background: #fff; }}
svg {{ width: 100%; height: auto; }}
label {{ margin-right: 1rem; cursor: pointer; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #eee; font-variant-numeric: tabular-nums; }}
th:first-child, td:first-child {{ text-align: left; }}
.hidden {{ display: none; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{switches}</p>
<div class="panels">
{figures}
</div>
<table><thead><tr><th>run</th><th>update</th>{heads}</tr></thead><tbody>
{rows}
</tbody></table>
<script>
document.querySelectorAll("input[data-run]").forEach(function (box) {{
  box.addEventListener("change", function () {{
    document.querySelectorAll("g[id^='run-" + box.dataset.run + "-']").forEach(function (line) {{
      line.classList.toggle("hidden", !box.checked);
    }});
  }});
}});
</script>
</body>
</html>
"""


def write_page(runs: Sequence[RunCurves], path: Path, by: str = "step", refresh: float | None = None) -> None:
    """Write one HTML page that holds everything: curves as SVG, a switch a run, and a table of last values."""
    panels = panels_of(runs)
    drawn = [f'<figure data-panel="{html.escape(title)}">{_svg(figure)}</figure>' for title, figure in draw(runs, by)]
    switches = [
        f'<label><input type="checkbox" data-run="{index}" checked> {html.escape(run.name)}</label>'
        for index, run in enumerate(runs)
    ]
    names = [name for _, group in panels for name in group]
    page = _PAGE.format(
        mark=MARK,
        refresh="" if refresh is None else f'\n<meta http-equiv="refresh" content="{refresh:g}">',
        title=html.escape(", ".join(run.name for run in runs)),
        switches="".join(switches),
        figures="\n".join(drawn),
        heads="".join(f"<th>{html.escape(name)}</th>" for name in names),
        rows="\n".join(_row(run, names) for run in runs),
    )
    path.write_text(page, encoding="utf-8")


def _row(run: RunCurves, names: Sequence[str]) -> str:
    values = [f"{run.curves[name][-1][2]:.4g}" if name in run.curves else "" for name in names]
    done = f"{run.step:,}" + (f" of {run.max_steps:,}" if run.max_steps else "")
    return f"<tr><td>{html.escape(run.name)}</td><td>{done}</td>{''.join(f'<td>{v}</td>' for v in values)}</tr>"


def _svg(figure: Figure) -> str:
    import matplotlib

    buffer = io.StringIO()
    # text stays text: it is found, scaled and read aloud
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _may_write(path: Path) -> None:
    if path.exists() and MARK.encode() not in path.read_bytes():
        raise ArgumentError(f"{path} is there already and was not {MARK}.\n\nHint: choose another `--output`.")


def plot(
    paths: Sequence[str], output: str = "curves", kind: str = "both", by: str = "step", watch: float | None = None
) -> list[Path]:
    """Draw runs, once or again and again.

    Args:
        paths: The runs; `name=path` gives one another name.
        output: Path of the files without their suffix.
        kind: `png`, `html` or `both`.
        by: `step` or `epoch`.
        watch: Seconds until they are drawn again; None draws once.

    Returns:
        The files.

    Raises:
        ArgumentError: A run cannot be read, has no curve, or a file is somebody else's.
    """
    files = [Path(f"{output}.{suffix}") for suffix in ("png", "html") if kind in (suffix, "both")]
    for file in files:
        _may_write(file)
        file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        runs = _distinct([_read_named(path) for path in paths])
        if not panels_of(runs):
            raise ArgumentError(f"Nothing is logged in {', '.join(paths)} yet.\n\nHint: lower `logging_steps`.")
        for file in files:
            if file.suffix == ".png":
                write_png(runs, file, by)
            else:
                write_page(runs, file, by, watch)
        if watch is None or all(run.max_steps and run.step >= run.max_steps for run in runs):
            return files
        time.sleep(watch)


def _read_named(path: str) -> RunCurves:
    name, equals, rest = path.partition("=")
    return read_run(rest, name) if equals and not os.path.exists(path) else read_run(path)


def _distinct(runs: list[RunCurves]) -> list[RunCurves]:
    """Give runs that are called the same the names of their folders."""
    names = [run.name for run in runs]
    return [
        RunCurves(name=run.folder, folder=run.folder, step=run.step, max_steps=run.max_steps, curves=run.curves)
        if names.count(run.name) > 1
        else run
        for run in runs
    ]
