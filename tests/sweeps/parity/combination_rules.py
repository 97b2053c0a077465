"""Which rows differ for a reason of docs/differences.md, and what exactly is left out of the comparison for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sweeps.parity.combination_calls import CALLS


@dataclass(frozen=True)
class Rule:
    """A heading of the differences page, and which rows it explains."""

    heading: str
    applies: Callable[[object, dict, dict], bool]


def _resumes(row) -> bool:
    return CALLS[row.calls].family in RESUMING


RESUMING = (
    "killed", "killed_by_name", "same", "finished", "changed", "stopped", "resumed_twice", "resumed_then_more",
    "evaluated_then_resumed",
)  # fmt: skip
# What is drawn from torch's global generator: the uninterrupted run is what counts then.
DRAWING = {"not_seedable", "rows_noisy", "tags_masked", "train_loader", "train_loader_prepared", "train_sampler_random"}


def _is_named_earlier(row, theirs: dict, ours: dict) -> bool:
    """Return whether both fail, and ours says what is wrong: at the same call, or before anything was done."""
    (name, what, kinds, _), found = ours["said"][-1], theirs["said"]
    if what != "raises" or "HfCompatError" not in kinds:
        return False
    if found[-1][1] == "breaks":  # theirs goes on and on without an update
        return what == "raises"
    both = what == found[-1][1] == "raises"
    return both and (name == "constructor" or len(found) == len(ours["said"]))


# Calls that evaluate or predict outside a training, and then train.
EVALUATED = ("evaluate_around", "predict_around", "evaluate_named_around", "evaluated_then_resumed",
             "then_evaluate_then_train", "then_predict_then_train", "resumed_then_more")  # fmt: skip


def _trains_apart(row, theirs: dict, ours: dict) -> bool:
    """Return whether their processes no longer exchange gradients."""
    return row.devices > 1 and row.calls in EVALUATED


def _draws_again(row, theirs: dict, ours: dict) -> bool:
    """Return whether they resume an epoch whose order was drawn already from the states after it was drawn."""
    return _resumes(row) and any(name.startswith("calls_save_checkpoint_on_") for name in row.features)


def _keeps_buffers(row, theirs: dict, ours: dict) -> bool:
    """Return whether their second training goes on with each process's own running means."""
    trains = sum(name in ("train", "again", "resumed", "anew") for name, *_ in ours["said"])
    return row.devices > 1 and "rows_normed" in row.features and trains > 1


def _makes_one_more(row, theirs: dict, ours: dict) -> bool:
    """Return whether they make an update too many: `exact_resume.py` knows of checkpoints with a state only."""
    steps = [run["state"]["global_step"] if "state" in run else 0 for run in (theirs, ours)]
    return _resumes(row) and "model_only" in row.features and steps[0] == steps[1] + 1


def _trains_nothing(row, theirs: dict, ours: dict) -> bool:
    """Return whether ours refuses an optimizer whose parameters are those of a model that was replaced."""
    *_, (_, what, _, message) = ours["said"]
    return what == "raises" and "so nothing is trained" in message and "other_model" in row.calls


RULES: list[Rule] = [
    Rule("Resuming a run that a callback or `max_steps` has ended", _makes_one_more),
    Rule("The order of samples in a resumed run", _draws_again),
    Rule("A second training in several processes", _keeps_buffers),
    Rule("Evaluating before training, in several processes", _trains_apart),
    Rule("Values of arguments", _is_named_earlier),
    Rule("What is told, and not changed", _trains_nothing),
    Rule("The order of samples in a resumed run", lambda row, t, o: _resumes(row) and bool(DRAWING & {*row.features})),
]


def expected(row, theirs: dict, ours: dict) -> tuple[dict, dict]:
    """Return both sides as they have to be equal: errors by their kinds, none of what the page leaves out."""
    theirs, ours = dict(theirs), dict(ours)
    theirs["said"], ours["said"] = _kinds(theirs["said"], ours["said"])
    theirs.pop("begun"), ours.pop("begun")
    if row.devices > 1:  # a row of the page: where its evaluations say how long they have prepared the model
        theirs, ours = _without_preparation(theirs), _without_preparation(ours)
    if any(what == "raises" for _, what, *_ in ours["said"]) and "modes" in theirs:
        theirs["modes"], ours["modes"] = theirs["modes"][:1], ours["modes"][:1]  # `is_in_train` stays there
    return theirs, ours


def _kinds(theirs: list, ours: list) -> tuple[list, list]:
    """Return what calls gave; an error of ours is one of theirs where it inherits from it."""
    left, right = [list(s[:3]) for s in theirs], [list(s[:3]) for s in ours]
    for one, other, full in zip(left, right, theirs, strict=False):
        if one[1] == other[1] == "raises" and full[2][0] in other[2]:
            other[2] = one[2]
    return left, right


def _without_preparation(value):
    if isinstance(value, dict):
        return {key: _without_preparation(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_preparation(item) for item in value if not str(item).endswith("_model_preparation_time")]
    return value
