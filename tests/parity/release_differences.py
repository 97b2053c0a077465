"""What older releases' Trainers do otherwise than 5.23's, whose behaviour is ours: each difference with its reason.

A rule is applied to our result; what is then equal to the last bit is equal. Which releases a rule is for is read off
their own result.
"""

from __future__ import annotations

import math

from cases import CASES
from compare import first_difference, same
from differences import IN_ONE_PROCESS

# A fix of transformers' since that release: these cases differ for it, whole.
MENDED_SINCE = {
    "label_smoothing_causal_lm": "it does not divide a smoothed loss by the micro-batches of an update",
    "several_eval_sets": "it looks for the best evaluation only where it saves",
    "optim_sgd": "it does not read `optim_args` for this optimizer",
    "optim_adagrad": "it does not read `optim_args` for this optimizer",
    "optim_rmsprop": "it does not read `optim_args` for this optimizer",
}


def compare(name: str, theirs: dict, ours: dict) -> tuple[str, str]:
    """Return `equal`, `explained` with the reason, or `differs` with the first place."""
    ours = as_the_release_writes(theirs, ours)
    if same(theirs, ours):
        return "equal", ""
    if name in MENDED_SINCE:
        return "explained", MENDED_SINCE[name]
    if CASES[name]["args"].get("gradient_accumulation_steps", 1) > 1 and theirs["output"][0] < ours["output"][0]:
        return "explained", "it makes no update of an epoch's last micro-batches, where they are too few"
    if _sums_micro_batches(name, theirs, ours):
        return "explained", "it sums the losses of an update's micro-batches instead of taking their mean"
    unrated = [{**side, **_logs_without(side, "learning_rate")} for side in (theirs, ours)]
    if same(*unrated):
        return "explained", "it logs the learning rate of the next update; all else is equal"
    known = IN_ONE_PROCESS.get(name)
    if known is not None and known.mended is None and same(known.expect(theirs, None), ours):
        return "explained", f"docs/differences.md, {known.heading!r}"
    return "differs", first_difference(theirs, ours)


def _sums_micro_batches(name: str, theirs: dict, ours: dict) -> bool:
    """Return whether the first gradient is as many times ours as an update has micro-batches."""
    count = CASES[name]["args"].get("gradient_accumulation_steps", 1)
    norms = [
        next((log["grad_norm"] for log in side["first_log"] if "grad_norm" in log), 0.0) for side in (theirs, ours)
    ]
    return count > 1 and norms[0] > 0 and math.isclose(norms[0], count * norms[1], rel_tol=1e-3)


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
