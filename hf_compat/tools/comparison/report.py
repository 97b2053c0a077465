"""Report a comparison as lines and a table, or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from hf_compat.tools.comparison.compared import Comparison
from hf_compat.tools.comparison.running import Limits
from hf_compat.tools.comparison.verdicts import Difference, Verdict
from hf_compat.tools.terminal import Table

_WIDEST = 110  # letters of a value


def as_parts(comparison: Comparison, limits: Limits) -> list[str | Table]:
    """Report a comparison within limits as lines and a table."""
    parts: list[str | Table] = [*_conditions(comparison, limits)]
    if comparison.verdicts:
        head = ("quantity", "compared", "result", "largest difference", "first at")
        table = Table(head, [_row(verdict) for verdict in comparison.verdicts], numbers=frozenset({1}))
        parts += ["", table, ""]
        times = [one.found.seconds_of_update for one in (comparison.theirs, comparison.ours)]
        if times[0] is not None and times[1] is not None:
            parts.append(f"an update took {times[0]:.4f} s | {times[1]:.4f} s (median, without the first)")
    explained = [reason for verdict in comparison.verdicts for reason in verdict.explained]
    if explained:
        parts += ["", "explained, not counted:", *_shortened(explained)]
    if comparison.beside:
        parts += ["", f"not compared, kept in files/ of each side: {comparison.beside}"]
    first = comparison.first
    if first is not None:
        parts += ["", f"first difference: {_place(first)}"]
        for side, value in (("transformers:", str(first.theirs)), ("hf_compat:   ", str(first.ours))):
            parts.append(f"  {side} {value if len(value) <= _WIDEST else f'{value[:_WIDEST]}…'}")
    for complaint in comparison.complaints:
        parts += ["", complaint.rstrip()]
    not_compared = "Nothing was compared."
    if not comparison.is_repeatable:
        not_compared = "Not compared: a script that does not repeat itself cannot be."
    elif comparison.verdicts:
        not_compared = "Not compared to the end. What is above was compared until then."
    return [*parts, "", ("Equal, bit for bit.", "Different.", not_compared)[comparison.status]]


def _conditions(comparison: Comparison, limits: Limits) -> list[str]:
    theirs, ours = comparison.theirs, comparison.ours
    stop = f"each training stopped after {limits.max_steps} updates (--max-steps)" if limits.max_steps else "whole runs"
    processes = f"; {limits.devices} processes" if limits.devices > 1 else ""
    lines = [f"transformers {theirs.side.transformers} | {ours.side.name}: {stop}{processes}"]
    if comparison.isolation:
        lines.append(f"  {comparison.isolation}")
    if comparison.compat is not None:
        lines.append(f"  defaults here: those of transformers {comparison.compat} (--compat)")
    for name in dict.fromkeys([*theirs.found.overridden, *ours.found.overridden]):
        was, now = (theirs.found.overridden.get(name) or ours.found.overridden[name])[:2]
        now = "a folder of this comparison" if name == "output_dir" else now
        lines.append(f"  overridden: {name}: {was or 'left out'} → {now}")
    ends = [one.end for one in (theirs, ours)]
    if ends[0].status and all(end.how == "exit" and end.status == ends[0].status for end in ends):
        lines.append(f"  the script left by `sys.exit` with status {ends[0].status}, on both sides")
    return lines


def as_json(comparison: Comparison, limits: Limits) -> str:
    """Report a comparison within limits as JSON."""
    first = comparison.first
    told = {
        "status": comparison.status,
        "equal": comparison.status == 0,
        "limits": asdict(limits),
        "compat": comparison.compat,
        "isolation": comparison.isolation,
        "not_compared": comparison.beside,
        "sides": [
            {
                **asdict(one.side),
                "folder": str(one.folder),
                "end": asdict(one.end),
                "trainings": one.found.trainings,
                "updates": one.found.updates,
                "seconds_of_update": one.found.seconds_of_update,
                "overridden": {name: {"was": was, "now": now} for name, (was, now) in one.found.overridden.items()},
            }
            for one in (comparison.theirs, comparison.ours)
        ],
        "quantities": [{**asdict(verdict), "equal": verdict.is_equal} for verdict in comparison.verdicts],
        "repeatable": comparison.is_repeatable,
        "first_difference": None if first is None else asdict(first),
        "complaints": list(comparison.complaints),
    }
    return json.dumps(told, indent=2, default=str)


def _row(verdict: Verdict) -> tuple[str, ...]:
    if not verdict.compared and not verdict.differing:
        return verdict.quantity, "0", "none on either side", "", ""
    if verdict.is_equal:
        return verdict.quantity, str(verdict.compared), "equal bit for bit", "", ""
    largest = "" if verdict.largest is None else f"{verdict.largest:.3g}"
    where = "" if verdict.first is None else _place(verdict.first, with_quantity=False)
    return verdict.quantity, str(verdict.compared), f"{verdict.differing} differ", largest, where


def _place(first: Difference, with_quantity: bool = True) -> str:
    training = f"training {first.training}, " if first.training > 1 else ""
    rank = f"process {first.rank}, " if first.rank else ""
    quantity = f"{first.quantity}, " if with_quantity else ""
    return f"{training}{rank}update {first.update}, {quantity}{first.name}"


def _shortened(reasons: list[str]) -> list[str]:
    """Write reasons that differ only in the folder of a file once, with their number."""
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        path, _, rest = reason.partition(" ")
        name = path.rpartition("/")[2]
        kinds.setdefault(f"{name} {rest}" if "/" in path else reason, []).append(reason)
    return [f"  {kind}" + (f" [{len(all_of)} times]" if len(all_of) > 1 else "") for kind, all_of in kinds.items()]
