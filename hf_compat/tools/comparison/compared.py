"""A whole comparison: both sides are run one after the other, and their results are compared."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from hf_compat.errors import ArgumentError
from hf_compat.interop.user_script import require_script
from hf_compat.runtime.paths import local_path
from hf_compat.tools.comparison.reading import FILES, End, Findings, read_records, same
from hf_compat.tools.comparison.running import Limits, Progress, Side, Tell, run_side, sides_of
from hf_compat.tools.comparison.verdicts import (
    Difference,
    KeptTensors,
    Verdict,
    files_under,
    first_of,
    verdict_on_files,
    verdicts_of,
)
from hf_compat.tools.isolation.isolated import offered
from hf_compat.tools.isolation.plan import files_below, in_words, is_of_the_command
from hf_compat.tools.until_train import UserScript

_UNREPEATABLE = (
    "The script does not repeat itself: it was run under transformers a second time, and this value differed there, "
    "too. The difference above does not come from the engines.\n"
    "Hint: call `set_seed(…)` before the model and the data are made, and draw no random numbers before it."
)
# How a script fails on a release that has dropped a name, in the last line of the traceback.
_DROPPED = re.compile(r"unexpected keyword argument '(\w+)'|cannot import name '(\w+)'|has no attribute '(\w+)'")
_KEPT_LINES = 12  # of the output of a failed side
# Packages whose name on the index is not that of the module.
_PIP_NAMES = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "cv2": "opencv-python",
    "bs4": "beautifulsoup4",
}


def limits_up_to(first: Difference, limits: Limits) -> Limits:
    """Limit a second run to one update after the first difference, because the last update has more events."""
    wanted = first.update + 1
    is_enough = first.training <= 1 and (limits.max_steps == 0 or wanted < limits.max_steps)
    return replace(limits, max_steps=wanted) if is_enough else limits


def repeats(first: Difference, once: Findings, again: Findings) -> bool:
    """Whether a second run, which may be shorter, agrees with the first one up to the first difference of the sides."""
    theirs, others = once.values[first.quantity], again.values[first.quantity]
    until = (first.training, first.update)
    return all(
        same(value.value, others[place].value)
        for place, value in theirs.items()
        if place in others and (place.training, value.update) <= until
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SideReport:
    """The result of one side."""

    side: Side
    folder: Path
    end: End
    found: Findings
    last_lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The result of a comparison."""

    theirs: SideReport
    ours: SideReport
    verdicts: tuple[Verdict, ...]
    complaints: tuple[str, ...]  # reasons why it is not, or not wholly, a comparison
    status: int  # the exit status: 0 equal, 1 different, 2 not compared
    compat: str | None = None  # generation of transformers whose defaults counted here, unless it was the newest
    is_repeatable: bool = True  # whether transformers repeats itself. It is only checked if the sides differ
    isolation: str = ""
    beside: str = ""

    @property
    def first(self) -> Difference | None:
        return first_of(self.verdicts)


def compare(
    script: UserScript,
    limits: Limits,
    against: str | None,
    output: str | None,
    allowed: tuple[str, ...],
    copy_limit: float,
    compat: str | None,
    progress: Progress,
    tell: Tell,
) -> Comparison:
    """Run a script under transformers and here, and compare the results.

    Args:
        script: The script.
        limits: Its limits.
        against: Interpreter of the side of transformers. None is this one.
        output: Folder for everything that the runs write. None makes one.
        allowed: Folders that the script may change.
        copy_limit: Bound in GiB on copied files, if the system offers no overlay.
        compat: Generation of transformers whose defaults count here. None is that of the other side.
        progress: Called when updates were done.
        tell: Called with lines for the user, before and while scripts run.

    Raises:
        ArgumentError: The script or interpreter is missing, the folder holds something, or there is too much to copy.
    """
    if not script.is_module:
        require_script(script.path, "hf-compat compare [options] SCRIPT [arguments]")
    sides = sides_of(against)
    try:
        place = tempfile.mkdtemp(prefix="hf_compat_compare_") if output is None else local_path("--output", output)
        os.makedirs(place, exist_ok=True)
        is_empty = not os.listdir(place)
    except OSError as error:
        raise ArgumentError(f"`--output {output}` cannot be made: {error}\n\nHint: another folder.") from error
    if not is_empty:
        raise ArgumentError(
            f"`--output {output}` is not empty, and nothing in it is overwritten.\n\n"
            "Hint: a new folder; or leave it out for one among the temporary files."
        )
    folder = Path(os.path.realpath(place))
    compat = compat or ("4" if sides[0].transformers.startswith("4.") else None)
    isolation = offered(str(folder), allowed, copy_limit)
    tell(isolation.told)
    tell(f"both runs write into {folder}")
    reports: list[SideReport] = []
    for side in sides:
        if reports and reports[0].end.how == "interrupt":
            end = End(how="not run")
            reports.append(SideReport(side=side, folder=folder / side.name, end=end, found=Findings(), last_lines=()))
            break
        ended = run_side(
            side, script, folder / side.name, limits, isolation, compat=compat, progress=progress, tell=tell
        )
        reports.append(_report(side, folder / side.name, *ended))
    theirs, ours = reports
    script_folder = os.getcwd() if script.is_module else os.path.dirname(os.path.abspath(script.path))
    found = replace(judge(theirs, ours, compat=compat, script_folder=script_folder), isolation=isolation.told)
    first = found.first
    # Files are not recorded by update, so a second run cannot be cut short for them
    if first is None or first.quantity == FILES or first.rank or not theirs.end.is_whole:
        return found
    again = folder / "again"
    ended = run_side(theirs.side, script, again, limits_up_to(first, limits), isolation, progress=progress)
    if repeats(first, theirs.found, _report(theirs.side, again, *ended).found):
        return found
    return replace(found, complaints=(*found.complaints, _UNREPEATABLE), status=2, is_repeatable=False)


def _report(side: Side, folder: Path, status: int, ended_by: str) -> SideReport:
    found = read_records(folder / "record")
    end = found.end
    if ended_by:
        end = End(how=ended_by, status=status)
    elif end is None or (end.how == "finished" and status):  # it failed when Python ended, or was killed
        end = End(how="killed", status=status)
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    end = replace(end, account=end.account.replace(str(folder / "files"), ""))  # paths as the user knows them
    lines = tuple(log.strip().splitlines()[-_KEPT_LINES:])
    return SideReport(side=side, folder=folder, end=end, found=found, last_lines=lines)


def judge(
    theirs: SideReport, ours: SideReport, compat: str | None = None, script_folder: str | None = None
) -> Comparison:
    """Compare the results of two sides."""
    own = tuple(map(os.path.realpath, (os.getcwd(), script_folder or os.getcwd())))
    # Files in output folders and elsewhere, and paths in caches and the like
    written: list[dict[str, Path]] = []
    beside: list[str] = []
    for one in (theirs, ours):
        files = str(one.folder / "files")
        paths = {path: is_of_the_command(path, own) for path in files_below(files)}
        compared = {f"files/{os.path.relpath(path, own[0])}": Path(files + path) for path in paths if paths[path]}
        written.append(files_under(one.folder / "output", *sorted(one.folder.glob("output-*"))) | compared)
        beside += [path for path, is_compared in paths.items() if not is_compared]
    are_whole = theirs.end.is_whole and ours.end.is_whole
    verdicts: list[Verdict] = []
    if theirs.found.trainings and ours.found.trainings:
        kept = KeptTensors(theirs.folder / "record", ours.folder / "record")
        verdicts = verdicts_of(theirs.found, ours.found, kept, are_whole)
        if are_whole:
            other_release = theirs.side.transformers != ours.side.transformers
            verdicts.append(verdict_on_files(written[0], written[1], theirs.found.updates, other_release))
    ends = [theirs.end, ours.end]
    fails = [not end.is_whole for end in ends]
    was_ended = any(end.how in ("timeout", "interrupt") for end in ends)
    if any(not verdict.is_equal for verdict in verdicts):
        status = 1
    elif all(fails) or was_ended or not verdicts:
        status = 1 if fails[0] != fails[1] and not was_ended else 2
    else:
        status = int(any(fails) or (ends[0].how, ends[0].status) != (ends[1].how, ends[1].status))
    return Comparison(
        theirs=theirs, ours=ours, verdicts=tuple(verdicts), complaints=tuple(_complaints(theirs, ours)), status=status,
        compat=compat, beside=in_words(set(beside)) if beside else "",
    )  # fmt: skip


def _complaints(theirs: SideReport, ours: SideReport) -> list[str]:
    both, ends = (theirs, ours), (theirs.end, ours.end)
    if all(end.how == "error" for end in ends) and ends[0].error == ends[1].error:
        told = [f"On both sides, {_account(theirs)}"]
    else:
        told = [f"{one.side.name}: {_account(one)}" for one in both if not one.end.is_whole]
        dropped = _DROPPED.search((theirs.end.account.strip().splitlines() or [""])[-1])
        if theirs.end.how == "error" and dropped:
            name = next(filter(None, dropped.groups()))
            told.append(
                f"Hint: if transformers {theirs.side.transformers} has dropped `{name}`, compare with the release that "
                "the script is for (`--against PYTHON`), or compare what `hf-compat migrate --to transformers-5` "
                "writes."
            )
    for one in both:
        if not one.end.is_whole or one.found.trainings:
            continue
        if one.end.how == "exit":
            words = f": {one.end.account}" if one.end.account else "."
            what = f"the script left by `sys.exit` with status {one.end.status} before it called `train()`{words}"
        else:
            what = (
                "the script ended, and never called `train()` of a Trainer.\n"
                "Hint: give it the arguments that make it train, `--do_train` say. If the script imports its "
                "Trainer from hf_compat, give the version that imports it from transformers."
            )
        told.append(f"{one.side.name}: {what}")
    if all(end.is_whole for end in ends) and ends[0].status != ends[1].status:
        told.append(f"The script leaves with status {ends[0].status} under transformers, {ends[1].status} here.")
    return list(dict.fromkeys(told))


def _account(report: SideReport) -> str:
    """Explain how a side failed, until when it was recorded, and the way out."""
    end, found = report.end, report.found
    number = f" of training {found.trainings}" if found.trainings > 1 else ""
    until = f"after {found.updates} updates{number}" if found.trainings else "before it called `train()`"
    rank = f" in process {end.rank}" if end.rank else ""
    if end.missing:
        return (
            f"the package {end.missing} is missing, {until}.\n{end.account}"
            f"Hint: {report.side.python} -m pip install {_PIP_NAMES.get(end.missing, end.missing)}"
        )
    if end.wants_input:
        asked = f"the script asked for input, {until}, and a comparison gives none."
        return f"{asked}\n{end.account}Hint: pass it as an argument."
    lines = "\n".join(f"    {line}" for line in report.last_lines)
    cause = f"signal {-end.status}" if end.status < 0 else f"status {end.status}"
    told = {
        "error": f"the script failed{rank}, {until}.\n{end.account}",
        "timeout": f"not ended in the time that `--timeout` gives; it was stopped, {until}.",
        "interrupt": f"interrupted, {until}.",
        "not run": "not run.",
    }
    return told.get(end.how, f"its process ended by {cause}, {until}. The last that it printed:\n{lines}")
