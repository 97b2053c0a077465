"""A comparison from its beginning to its end: both sides are run, one after the other, and what they left compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hf_compat.errors import ArgumentError
from hf_compat.interop.user_script import require_script
from hf_compat.tools.comparison.contents import KeptTensors, files_under, verdict_on_files
from hf_compat.tools.comparison.reading import FILES, End, Findings, Place, read_records, same
from hf_compat.tools.comparison.running import Limits, Progress, SideRun, Tell, run_side, script_folder_of
from hf_compat.tools.comparison.sides import Side, other_side, own_side
from hf_compat.tools.comparison.verdicts import Difference, Verdict, first_of, verdicts_of
from hf_compat.tools.isolation.isolated import COPY_LIMIT_GIB, Isolation, offered
from hf_compat.tools.isolation.written import files_below, in_words, is_of_the_command
from hf_compat.tools.until_train import UserScript

UNREPEATABLE = (
    "The script does not repeat itself: it was run under transformers a second time, and this value differed there, "
    "too. The difference above is no difference of the engines.\n"
    "Hint: call `set_seed(…)` before the model and the data are made, and draw no random numbers before it."
)


def can_be_asked(first: Difference | None) -> bool:
    """Return whether a second run could tell: files are not recorded by update."""
    return first is not None and first.quantity != FILES and first.rank == 0


def limits_up_to(first: Difference, limits: Limits) -> Limits:
    """Return limits by which a second run ends one update after the first difference: the last update has more."""
    wanted = first.update + 1
    is_enough = first.training <= 1 and (limits.max_steps == 0 or wanted < limits.max_steps)
    return replace(limits, max_steps=wanted) if is_enough else limits


def repeats(first: Difference, once: Findings, again: Findings) -> bool:
    """Return whether two runs under transformers agree on all of a quantity up to where the two sides differ.

    Args:
        first: Where the sides differ first.
        once: The run that was compared.
        again: A second run of the same side; it may be shorter.
    """
    theirs, others = once.values[first.quantity], again.values[first.quantity]
    return all(
        same(value.value, others[place].value)
        for place, value in theirs.items()
        if place in others and _is_up_to(first, place, value.update)
    )


def _is_up_to(first: Difference, place: Place, update: int) -> bool:
    return (place.training, update) <= (first.training, first.update)


_KEPT_LINES = 12  # of what a failed side has printed


@dataclass(frozen=True, kw_only=True, slots=True)
class SideReport:
    """What there is to say of one side.

    Args:
        side: Which.
        folder: What it has left.
        end: How its script ended.
        found: What was recorded.
        last_lines: The last that it printed.
    """

    side: Side
    folder: Path
    end: End
    found: Findings
    last_lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What a comparison has found.

    Args:
        theirs: The side of transformers.
        ours: This package's.
        verdicts: Quantity by quantity; empty where there is nothing to compare.
        complaints: Why it is not, or not wholly, a comparison; empty where it is.
        status: The exit status: 0 equal, 1 different, 2 not compared.
        compat: Generation of transformers whose defaults counted here, where it was not the newest.
        is_repeatable: Whether transformers alone gives the same twice; asked only where the sides differ.
        isolation: How the user's files were kept from the script, in words.
        beside: What the script has written that is not compared, in words.
    """

    theirs: SideReport
    ours: SideReport
    verdicts: tuple[Verdict, ...]
    complaints: tuple[str, ...]
    status: int
    compat: str | None = None
    is_repeatable: bool = True
    isolation: str = ""
    beside: str = ""

    @property
    def first(self) -> Difference | None:
        """Where the sides differ first."""
        return first_of(list(self.verdicts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be compared.

    Args:
        script: The script.
        limits: How far it is run.
        against: Interpreter of the side of transformers; None is this one.
        output: Folder for all that the runs leave; None makes one.
        allowed: Folders that stay real.
        copy_limit: GiB that are copied, where the system offers no overlay.
        compat: Generation of transformers whose defaults count here; None is that of the other side.
    """

    script: UserScript
    limits: Limits = Limits()
    against: str | None = None
    output: str | None = None
    allowed: tuple[str, ...] = ()
    copy_limit: float = COPY_LIMIT_GIB
    compat: str | None = None


def compare(request: Request, progress: Progress | None = None, tell: Tell = print) -> Comparison:
    """Run a script under transformers and here, and compare what happened.

    Args:
        request: What is compared.
        progress: Told of updates as they are done.
        tell: Told lines for the user, before and while scripts run.

    Raises:
        ArgumentError: There is no such script or interpreter, the folder holds something, or there is too much to copy.
    """
    if not request.script.is_module:
        require_script(request.script.path, "hf-compat compare [options] SCRIPT [arguments]")
    sides = (other_side(request.against), own_side())
    # An empty folder for both sides
    output = request.output
    if output is None:
        folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="hf_compat_compare_")))
    else:
        try:
            os.makedirs(output, exist_ok=True)
            is_empty = not os.listdir(output)
        except OSError as error:
            raise ArgumentError(f"`--output {output}` cannot be made: {error}\n\nHint: another folder.") from error
        if not is_empty:
            raise ArgumentError(
                f"`--output {output}` is not empty, and nothing in it is overwritten.\n\n"
                "Hint: a new folder; or leave it out for one among the temporary files."
            )
        folder = Path(os.path.realpath(output))
    compat = request.compat or ("4" if sides[0].transformers.startswith("4.") else None)
    isolation = offered(str(folder), request.allowed, request.copy_limit)
    tell(isolation.told)
    tell(f"the runs leave all in {folder}")
    reports = []
    for side in sides:
        ran = run_side(
            side, request.script, folder / side.name, request.limits, isolation,
            compat=compat, progress=progress, tell=tell,
        )  # fmt: skip
        reports.append(_report(ran))
        if ran.ended_by == "interrupt":
            break
    if len(reports) < len(sides):
        reports.append(
            SideReport(
                side=sides[1], folder=folder / sides[1].name, end=End(how="not run"), found=Findings(), last_lines=()
            )
        )
    theirs, ours = reports
    found = replace(
        judge(theirs, ours, compat=compat, script_folder=script_folder_of(request.script)), isolation=isolation.told
    )
    return (
        found
        if _repeats(found, request, isolation, progress)
        else replace(found, complaints=(*found.complaints, UNREPEATABLE), status=2, is_repeatable=False)
    )


def _repeats(found: Comparison, request: Request, isolation: Isolation, progress: Progress | None) -> bool:
    """Return whether transformers, run again up to the first difference, gives the same there."""
    first, theirs = found.first, found.theirs
    if first is None or not can_be_asked(first) or not theirs.end.is_whole:
        return True
    ran = run_side(
        theirs.side, request.script, theirs.folder.with_name("again"), limits_up_to(first, request.limits), isolation,
        progress=progress,
    )  # fmt: skip
    return repeats(first, theirs.found, _report(ran).found)


def judge(
    theirs: SideReport, ours: SideReport, compat: str | None = None, script_folder: str | None = None
) -> Comparison:
    """Compare what two sides have left.

    Args:
        theirs: Under transformers.
        ours: Here.
        compat: As in `Comparison`.
        script_folder: Where the script lies; None is the working folder.
    """
    own = tuple(map(os.path.realpath, (os.getcwd(), script_folder or os.getcwd())))
    written = [_written(one.folder, own) for one in (theirs, ours)]
    beside = {path for _, others in written for path in others}
    complaints = tuple(_complaints(theirs, ours))
    are_whole = theirs.end.is_whole and ours.end.is_whole
    verdicts: list[Verdict] = []
    if theirs.found.trainings and ours.found.trainings:
        kept = KeptTensors(theirs.folder / "record", ours.folder / "record")
        verdicts = verdicts_of(theirs.found, ours.found, kept, are_whole)
        if are_whole:
            other_release = theirs.side.transformers != ours.side.transformers
            verdicts.append(verdict_on_files(written[0][0], written[1][0], theirs.found.updates, other_release))
    status = _status(theirs, ours, verdicts)
    return Comparison(
        theirs=theirs, ours=ours, verdicts=tuple(verdicts), complaints=complaints, status=status, compat=compat,
        beside=in_words(beside) if beside else "",
    )  # fmt: skip


def _written(folder: Path, own: tuple[str, ...]) -> tuple[dict[str, Path], list[str]]:
    """Return what a side has written into its output folders and elsewhere, and its paths in caches and the like."""
    found = files_under(folder / "output", *sorted(folder.glob("output-*")))
    files = str(folder / "files")
    beside = []
    for path in files_below(files):
        if is_of_the_command(path, own):
            found[f"files/{os.path.relpath(path, own[0])}"] = Path(files + path)
        else:
            beside.append(path)
    return found, beside


def _status(theirs: SideReport, ours: SideReport, verdicts: Sequence[Verdict]) -> int:
    ends = [(one.end.how, one.end.status) for one in (theirs, ours)]
    fails = [not one.end.is_whole for one in (theirs, ours)]
    was_ended = any(how in ("timeout", "interrupt") for how, _ in ends)
    if any(not verdict.is_equal for verdict in verdicts):
        return 1
    if all(fails) or was_ended or not verdicts:
        return 1 if fails[0] != fails[1] and not was_ended else 2
    return int(any(fails) or ends[0] != ends[1])


def _complaints(theirs: SideReport, ours: SideReport) -> list[str]:
    """Return what is to be said where a script did not come to its end, or never trained."""
    both = (theirs, ours)
    told = []
    alike = [one.end.error for one in both] if all(one.end.how == "error" for one in both) else []
    if alike and alike[0] == alike[1]:
        told.append(f"On both sides, {_account(theirs)}")
    else:
        told += [f"{one.side.name}: {_account(one)}" for one in both if not one.end.is_whole]
    for one in both:
        if one.end.is_whole and not one.found.trainings:
            told.append(f"{one.side.name}: {_without_training(one.end)}")
    if theirs.end.is_whole and ours.end.is_whole and theirs.end.status != ours.end.status:
        told.append(f"The script leaves with status {theirs.end.status} under transformers, {ours.end.status} here.")
    return list(dict.fromkeys(told))


def _without_training(end: End) -> str:
    if end.how == "exit":
        words = f": {end.account}" if end.account else "."
        return f"the script left by `sys.exit` with status {end.status} before it called `train()`{words}"
    return (
        "the script ended, and never called `train()` of a Trainer.\n"
        "Hint: give it the arguments that make it train, `--do_train` say."
    )


def _account(report: SideReport) -> str:
    """Return how a side failed, until when it was recorded, and the way out."""
    end = report.end
    found = report.found
    if not found.trainings:
        until = "before it called `train()`"
    else:
        number = f" of training {found.trainings}" if found.trainings > 1 else ""
        until = f"after {found.updates} updates{number}"
    if end.missing:
        return (
            f"the package {end.missing} is missing, {until}.\n{end.account}"
            f"Hint: {report.side.python} -m pip install {_PIP_NAMES.get(end.missing, end.missing)}"
        )
    if end.wants_input:
        asked = f"the script asked for input, {until}; there is nobody to answer."
        return f"{asked}\n{end.account}Hint: pass it as an argument."
    rank = f" in process {end.rank}" if end.rank else ""
    if end.how == "error":
        return f"the script failed{rank}, {until}.\n{end.account}"
    if end.how == "timeout":
        return f"not ended in the time that `--timeout` gives; it was stopped, {until}."
    if end.how == "interrupt":
        return f"interrupted, {until}."
    if end.how == "not run":
        return "not run."
    lines = "\n".join(f"    {line}" for line in report.last_lines)
    cause = f"signal {-end.status}" if end.status < 0 else f"status {end.status}"
    return f"its process ended by {cause}, {until}. The last that it printed:\n{lines}"


# Packages whose name on the index is not that of the module.
_PIP_NAMES = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "cv2": "opencv-python",
    "bs4": "beautifulsoup4",
}


def _report(ran: SideRun) -> SideReport:
    found = read_records(ran.folder / "record")
    end = found.end
    if ran.ended_by:
        end = End(how=ran.ended_by, status=ran.status)
    elif end is None or (end.how == "finished" and ran.status):  # it broke when Python ended, or was killed
        end = End(how="killed", status=ran.status)
    lines = ran.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_KEPT_LINES:]
    if end.account:  # paths as the user knows them
        end = replace(end, account=end.account.replace(str(ran.folder / "files"), ""))
    return SideReport(side=ran.side, folder=ran.folder, end=end, found=found, last_lines=tuple(lines))
