"""`hf-compat plot` draws the curves of one or several runs as a PNG and as one self-contained HTML page."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import html
import io
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from hf_compat.checkpoint.files import open_regular
from hf_compat.errors import ArgumentError, CheckpointError
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.text import need
from hf_compat.tools.curves import Point, RunCurves, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

logger = logging.getLogger(__name__)

# Every file has this mark, and a file without it is not overwritten.
MARK = "drawn by hf-compat plot"
_MARK_WITHIN = 2**16  # bytes from the beginning of a file
_FIRST = ("loss", "learning_rate", "grad_norm")
_MOST_PANELS = 99  # a picture of more is too large for its format
_LARGEST_DRAWN = 1e300  # an axis needs room beyond its values
_MOST_WIDTHS = 3  # of lines that are wider than the last run's
_LONGEST_NAME = 60  # characters
_MOST_POINTED_AT = 2_000  # points of a curve that the pointer finds
_LONGEST_WAIT_SECONDS = 86_400


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-compat plot",
        description="Draw the curves of runs as a picture and as a web page. Exit status: 0 drawn, 2 a run could not "
        "be read, or a file not be written.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output folder (or name=folder)")
    parser.add_argument("-o", "--output", default="curves", help="path of the files, without suffix (default: curves)")
    parser.add_argument("--kind", choices=("png", "html", "both"), default="both", help="what is written")
    parser.add_argument("--by", choices=("step", "epoch"), default="step", help="what the curves run along")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="draw again every so often until the runs end")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    chosen = make_parser().parse_args(list(words))
    for file in plot(chosen.runs, chosen.output, chosen.kind, chosen.by, chosen.watch):
        print(f"written: {file}")  # noqa: T201 - the command's answer
    return 0


def panels_of(runs: Sequence[RunCurves]) -> list[tuple[str, list[str]]]:
    """Group values into panels: the losses of training and evaluation, and every other value by itself.

    Values with the same curves share a panel, such as the rates of parameter groups.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    losses = [name for name in names if name == "loss" or (name.startswith("eval") and name.endswith("_loss"))]
    rest = [name for name in names if name not in set(losses)]
    ordered = sorted(rest, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    by_curves: dict[tuple[tuple[Point, ...], ...], list[str]] = {}
    for name in ordered:
        by_curves.setdefault(tuple(tuple(run.curves.get(name, ())) for run in runs), []).append(name)
    panels = [("loss", losses)] if losses else []
    panels += [(", ".join(names), names[:1]) for names in by_curves.values()]
    panels = [panel for panel in panels if _has_points(runs, panel[1])]
    if len(panels) > _MOST_PANELS:
        logger.warning("%d values are logged; the first %d panels are drawn.", len(names), _MOST_PANELS)
    return panels[:_MOST_PANELS]


def _has_points(runs: Sequence[RunCurves], names: Sequence[str]) -> bool:
    return any(_is_drawn(value) for run in runs for name in names for _, _, value in run.curves.get(name, []))


def _not_drawn(runs: Sequence[RunCurves]) -> str:
    """List the values without a panel, because they have no finite point."""
    names = dict.fromkeys(name for run in runs for name in run.curves if not _has_points(runs, [name]))
    return ", ".join(f"{_shown(name)}{_left_out(runs, [name])}".replace("\n", " ") for name in names)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Draw with this module's settings instead of the user's matplotlibrc."""
    matplotlib = need("matplotlib", "[plot]", "`hf-compat plot`")
    # Text stays text, so that it can be found, scaled and read aloud. TeX never reads a run's name
    with matplotlib.rc_context({"text.usetex": False, "svg.fonttype": "none", "agg.path.chunksize": 10_000}):
        yield


def _figure(panels: int) -> Figure:
    matplotlib = need("matplotlib.figure", "[plot]", "`hf-compat plot`")
    columns = min(panels, 3)
    rows = math.ceil(panels / columns)
    figure: Figure = matplotlib.Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
    return figure


def _draw_panel(axes: Axes, runs: Sequence[RunCurves], title: str, names: Sequence[str], by: str) -> None:
    lines: list[Line2D] = []
    labels: list[str] = []
    for index, run in enumerate(runs):
        for name in names:
            points = [point for point in run.curves.get(name, []) if _is_drawn(point[2])]
            if not points:
                continue
            along = [point[1 if by == "epoch" else 0] for point in points]
            (line,) = axes.plot(
                along, [point[2] for point in points], color=f"C{index % 10}", markersize=3,
                linewidth=1.5 + 2.5 * min(len(runs) - index - 1, _MOST_WIDTHS),  # equal runs show
                linestyle="-" if name == names[0] else "--", marker="o" if len(points) < 20 else "",
            )  # fmt: skip
            line.set_gid(_id_of(index, name))
            lines.append(line)
            labels.append(_shown(run.name) if len(names) == 1 else f"{_shown(run.name)}: {_shown(name)}")
            if name in run.best:
                step, epoch, value = run.best[name]
                place = epoch if by == "epoch" else step
                (star,) = axes.plot([place], [value], "*", color=f"C{index % 10}", markersize=11)
                star.set_gid(f"{_id_of(index, name)}-best")
    # names are plain text: `$` begins no formula
    axes.set_title(_shown(title) + _left_out(runs, names), parse_math=False)
    axes.set_xlabel("epoch" if by == "epoch" else "update")
    axes.grid(alpha=0.3)
    if lines and (len(runs) > 1 or len(names) > 1):
        # matplotlib 3.8 leaves out a label that begins with `_`
        for text, label in zip(axes.legend(lines, "-" * len(lines), fontsize="small").get_texts(), labels, strict=True):
            text.set_text(label)
            text.set_parse_math(False)


def _id_of(index: int, name: str) -> str:
    return f"run-{index}-{re.sub('[^A-Za-z0-9]+', '-', name)}"


def _is_drawn(value: float) -> bool:
    return abs(value) <= _LARGEST_DRAWN  # no NaN either


def _left_out(runs: Sequence[RunCurves], names: Sequence[str]) -> str:
    """Write how many values of a panel are not drawn."""
    values = (point[2] for run in runs for name in names for point in run.curves.get(name, []))
    count = sum(not _is_drawn(value) for value in values)
    return f"\n(without {count} not finite)" if count else ""


def _shown(name: str) -> str:
    """Replace the characters of a name that no font has, and shorten it."""
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"


def write_png(runs: Sequence[RunCurves], path: Path, by: str = "step") -> None:
    """Draw all panels into one PNG."""
    panels, picture = panels_of(runs), io.BytesIO()
    if missing := _not_drawn(runs):
        logger.warning("Not drawn: %s.", missing)
    with _settings():
        figure = _figure(len(panels))
        grid = list(figure.subplots(math.ceil(len(panels) / 3), min(len(panels), 3), squeeze=False).flat)
        for axes, (title, names) in zip(grid, panels, strict=False):
            _draw_panel(axes, runs, title, names, by)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        figure.savefig(picture, format="png", dpi=130, metadata={"Software": MARK})
    _write(path, picture.getvalue())


def _write(path: Path, content: bytes) -> None:
    """Write a file as a whole, so that a browser and a kill find the old one or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            partial.unlink()
        raise _not_writable(path, error) from error


def _not_writable(path: Path, error: Exception) -> ArgumentError:
    cause = error.strerror if isinstance(error, OSError) else error
    return ArgumentError(f"{str(path)!r} cannot be written: {cause}.\n\nHint: choose another `--output`.")


_PAGE = Path(__file__).with_name("page.html")


def write_page(runs: Sequence[RunCurves], path: Path, by: str = "step", refresh: float | None = None) -> None:
    """Write one HTML page that holds everything.

    Curves are SVG, on a linear and on a logarithmic scale. Pointing at one shows its values. Each run has a switch. A
    table has the last values.
    """
    panels = [
        (title, [(scale, *_panel(runs, title, names, by, scale)) for scale in ("linear", "log")])
        for title, names in panels_of(runs)
    ]
    names = list(dict.fromkeys(name for run in runs for name in run.curves if _has_points(runs, [name])))
    cut = ", ".join(f"{_shown(run.name)} ({_shown(os.path.basename(run.folder))})" for run in runs if run.ends_at_save)
    page = jinja2.Template(_PAGE.read_text(encoding="utf-8"), keep_trailing_newline=True).render(
        mark=MARK, refresh=refresh, runs=runs, panels=panels, names=names,
        title=html.escape(", ".join(_shown(run.name) for run in runs)), missing=_not_drawn(runs), cut=cut,
        escape=html.escape, shown=lambda name: html.escape(_shown(name)),
    )  # fmt: skip
    _write(path, page.encode("utf-8"))


def _panel(runs: Sequence[RunCurves], title: str, names: Sequence[str], by: str, scale: str) -> tuple[str, str]:
    """Draw a panel. Returns its curves for the pointer, as JSON, and the SVG."""
    buffer = io.StringIO()
    with _settings():
        figure = _figure(1)
        axes = figure.subplots()
        if scale == "log":
            axes.set_yscale("log", nonpositive="mask")
        _draw_panel(axes, runs, title, names, by)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    curves = []
    for index, run in enumerate(runs):
        for name in names:
            points = [point for point in run.curves.get(name, []) if _is_drawn(point[2])]
            points = points[:: math.ceil(len(points) / _MOST_POINTED_AT) or 1]
            along = [(point[1 if by == "epoch" else 0], point[2]) for point in points]
            # A page has 72 dots an inch
            places = [figure.axes[0].transData.transform((x, 1.0)) for x, _ in along]
            across = [float(place[0]) * 72 / figure.dpi for place in places]
            curves.append(
                {
                    "run": index,
                    "label": _shown(run.name) if len(names) == 1 else f"{_shown(run.name)}: {_shown(name)}",
                    "points": [
                        [round(place, 1), f"{x:g}", f"{y:.6g}"]
                        for place, (x, y) in zip(across, along, strict=True)
                        if scale == "linear" or y > 0
                    ],
                }
            )
    return json.dumps(curves), text[text.index("<svg") :]


def _check_target(path: Path) -> None:
    """Make the folder of a file, and refuse to overwrite a file that was not drawn here."""
    try:
        os.makedirs(path.parent, exist_ok=True)
    except (OSError, ValueError) as error:
        raise _not_writable(path, error) from error
    if not os.path.lexists(path):
        return
    try:
        with open_regular(path) as file:
            is_ours = MARK.encode() in file.read(_MARK_WITHIN)
    except (CheckpointError, OSError):
        is_ours = False
    if not is_ours:
        raise ArgumentError(f"{path} is there already and was not {MARK}.\n\nHint: choose another `--output`.")


def plot(
    paths: Sequence[str], output: str = "curves", kind: str = "both", by: str = "step", watch: float | None = None
) -> list[Path]:
    """Draw runs once or repeatedly, and return the files.

    Args:
        paths: The runs. `name=path` renames one.
        output: Path of the files without their suffix.
        kind: `png`, `html` or `both`.
        by: `step` or `epoch`.
        watch: Seconds until they are drawn again. None draws once.

    Raises:
        ArgumentError: A run cannot be read or has no curve, a file was not drawn here or cannot be written, or an
            argument has an impossible value.
    """
    choices = {"kind": (kind, ("png", "html", "both")), "by": (by, ("step", "epoch"))}
    for name, (value, known) in choices.items():
        if value not in known:
            raise ArgumentError(f"`--{name}` is {value!r}.\n\nHint: choose one of {', '.join(known)}.")
    if watch is not None and not 0 < watch <= _LONGEST_WAIT_SECONDS:
        raise ArgumentError(
            f"`--watch` is {watch:g}: so many seconds cannot be waited.\n\n"
            f"Hint: give a number above 0 and up to {_LONGEST_WAIT_SECONDS}."
        )
    output = local_path("--output", output)
    files = [Path(f"{output}.{suffix}") for suffix in ("png", "html") if kind in (suffix, "both")]
    for file in files:
        _check_target(file)
    runs = _read_runs(paths)
    while True:
        for file in files:
            if file.suffix == ".png":
                write_png(runs, file, by)
            else:
                write_page(runs, file, by, watch)
        if watch is None or all(run.max_steps and run.step >= run.max_steps for run in runs):
            return files
        time.sleep(watch)
        try:
            runs = _read_runs(paths)
        except (ArgumentError, CheckpointError) as error:  # a state that is being written, say
            logger.warning("The curves stay as they are: %s", error)


def _read_runs(paths: Sequence[str]) -> list[RunCurves]:
    """Read runs. Those with the same name get the names of their folders."""
    runs = []
    for path in paths:
        name, equals, rest = path.partition("=")
        runs.append(read_run(rest, name) if equals and not os.path.exists(path) else read_run(path))
    if not any(run.curves for run in runs):
        raise ArgumentError(f"Nothing is logged in {', '.join(paths)} yet.\n\nHint: lower `logging_steps`.")
    names = [run.name for run in runs]
    return [dataclasses.replace(run, name=run.folder) if names.count(run.name) > 1 else run for run in runs]
