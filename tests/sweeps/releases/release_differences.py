"""What older releases' Trainers do otherwise than 5.23's, whose behaviour is ours: each difference with its reason.

A rule is applied to our result; what is then equal to the last bit is equal. Which releases a rule is for is read off
their own result.
"""

from __future__ import annotations

from helpers.parity.compare import first_difference, same
from helpers.parity.differences import IN_ONE_PROCESS
from sweeps.releases.mends import REASONS


def compare(name: str, of_release: tuple[dict, dict | None], ours: dict, used: list[str]) -> tuple[str, str]:
    """Return `equal`, `explained` with the reasons, or `differs` with the first place.

    Args:
        name: The case.
        of_release: What the release's Trainer gave, and what it gave with 5.23's fixes (`mends.py`) where it was run.
        ours: What ours gave.
        used: The fixes that had something to do.
    """
    theirs, mended = of_release
    if same(theirs, as_the_release_writes(theirs, ours)):
        return "equal", ""
    reasons = [REASONS[one] for one in used]
    for found in (mended, theirs) if mended is not None else (theirs,):
        as_written = as_the_release_writes(found, ours)
        known = IN_ONE_PROCESS.get(name)
        if known is not None and same(known.expect(found, found), as_written):
            return "explained", "; ".join([f"docs/differences.md, {known.heading!r}", *reasons])
        if found is mended and same(found, as_written):
            return "explained", "; ".join(reasons)
    without_rates = [
        {**side, **_logs_without(side, "learning_rate")} for side in (theirs, as_the_release_writes(theirs, ours))
    ]
    if same(*without_rates):
        return "explained", REASONS["rate_of_this_update"]
    return "differs", first_difference(theirs if mended is None else mended, as_the_release_writes(theirs, ours))


def _logs_without(side: dict, key: str) -> dict:
    return {part: _without(side[part], key) for part in ("log_history", "first_log")}


def as_the_release_writes(theirs: dict, ours: dict) -> dict:
    """Return our result as the release's Trainer would have written it down."""
    for rule in (_epoch_of_nothing, _rounded, _without_norm, _without_last_state):
        ours = rule(theirs, ours)
    return ours


def _epoch_of_nothing(theirs: dict, ours: dict) -> dict:
    """Before a training an older state has no epoch: None, and no key of logs."""
    if theirs["trace"][0][2] is not None:
        return ours
    begun = next((i for i, event in enumerate(ours["trace"]) if event[0] == "on_train_begin"), 0)
    before = [(event, step, None, *rest) for event, step, _, *rest in ours["trace"][:begun]]
    return {**ours, "trace": before + ours["trace"][begun:], "before": _without(ours["before"], "epoch")}


def _rounded(theirs: dict, ours: dict) -> dict:
    """Releases before 5.0 round the logged loss to four places."""
    losses = [log["loss"] for log in theirs["log_history"] if "loss" in log]
    if not losses or any(loss == loss and loss != round(loss, 4) for loss in losses):
        return ours
    logs = {part: [_rounded_log(log) for log in ours[part]] for part in ("log_history", "first_log")}
    return {**ours, **logs}


def _rounded_log(log: dict) -> dict:
    return {key: round(value, 4) if key == "loss" else value for key, value in log.items()}


def _without_norm(theirs: dict, ours: dict) -> dict:
    """Older releases log no gradient norm where nothing is clipped."""
    if any("grad_norm" in log for log in theirs["log_history"]):
        return ours
    return {**ours, **_logs_without(ours, "grad_norm")}


def _without_last_state(theirs: dict, ours: dict) -> dict:
    """Fields of the state that a release has not."""
    return {**ours, "state": {name: value for name, value in ours["state"].items() if name in theirs["state"]}}


def _without(value, key: str):
    if isinstance(value, dict):
        return {name: _without(one, key) for name, one in value.items() if name != key}
    return [_without(one, key) for one in value] if isinstance(value, list) else value
