"""Two sides' values, quantity by quantity: equal, explained, or where they differ first and by how much. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_compat.tools.comparison.reading import FILES, LOGS, METRICS, QUANTITIES, RETURNED, Findings, Place, Value, same

ABSENT = "<absent>"
# The largest difference between two kept contents, in words; None where there is none to tell.
Measure = Callable[[Value, Value], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One place where the sides differ.

    Args:
        quantity: Of which quantity.
        training: Which call of `train()`.
        update: `global_step` there.
        rank: Of the process.
        name: What differs.
        theirs: The value under transformers.
        ours: The value here.
        size: Of the difference, where it has one.
    """

    quantity: str
    training: int
    update: int
    rank: int
    name: str
    theirs: object
    ours: object
    size: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is to be said of one quantity.

    Args:
        quantity: Which.
        compared: Values that were compared.
        differing: How many of them differ.
        first: Where they differ first.
        largest: The largest difference.
        explained: What differs as the documentation says, each with its reason.
    """

    quantity: str
    compared: int
    differing: int = 0
    first: Difference | None = None
    largest: float | None = None
    explained: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs that is not explained."""
        return not self.differing


def verdicts_of(theirs: Findings, ours: Findings, measure: Measure, are_whole: bool = True) -> list[Verdict]:
    """Compare everything that was recorded but files.

    Args:
        theirs: What was recorded under transformers.
        ours: What was recorded here.
        measure: Tells how much two values differ whose contents are kept.
        are_whole: Whether both scripts came to their end; if not, what one of them lacks is no difference.
    """
    resumed = theirs.resumed & ours.resumed
    return [
        _verdict(name, theirs.values[name], ours.values[name], measure, are_whole, resumed)
        for name in QUANTITIES
        if name != FILES
    ]


def first_of(verdicts: list[Verdict]) -> Difference | None:
    """Return the difference that came about first: of one update, in the order of the quantities."""
    found = [verdict.first for verdict in verdicts if verdict.first is not None]
    return min(found, key=lambda one: (one.training, one.update, QUANTITIES.index(one.quantity)), default=None)


def _verdict(
    quantity: str,
    theirs: Mapping[Place, Value],
    ours: Mapping[Place, Value],
    measure: Measure,
    are_whole: bool,
    resumed: set[int],
) -> Verdict:
    places = [place for place in {**theirs, **ours} if are_whole or (place in theirs and place in ours)]
    differences: list[Difference] = []
    explained: list[str] = []
    for place in places:
        left, right = theirs.get(place), ours.get(place)
        if left is not None and right is not None and left.update == right.update and same(left.value, right.value):
            continue
        reason = _reason(quantity, place, left, right, resumed)
        if reason:
            explained.append(reason)
        else:
            differences.append(_difference(quantity, place, left, right, measure))
    sizes = [one.size for one in differences if one.size is not None]
    return Verdict(
        quantity=quantity,
        compared=len(places) - len(explained),
        differing=len(differences),
        first=min(differences, key=lambda one: (one.training, one.update), default=None),
        largest=max(sizes, key=lambda size: math.inf if size != size else size, default=None),
        explained=tuple(dict.fromkeys(explained)),
    )


def _difference(quantity: str, place: Place, left: Value | None, right: Value | None, measure: Measure) -> Difference:
    at = left or right
    assert at is not None  # one side has it
    size = None if left is None or right is None else _size(left, right, measure)
    updates = "" if left is None or right is None or left.update == right.update else f" at update {right.update}"
    return Difference(
        quantity=quantity,
        training=place.training,
        update=at.update,
        rank=place.rank,
        name=place.name,
        theirs=_shown(left),
        ours=f"{_shown(right)}{updates}" if updates else _shown(right),
        size=size,
    )


def _shown(value: Value | None) -> object:
    if value is None:
        return ABSENT
    return value.value if value.size is None else f"{value.size!r} ({value.value})"


def _size(left: Value, right: Value, measure: Measure) -> float | None:
    if left.file is not None:
        return measure(left, right)
    pair = (left.value, right.value) if left.size is None else (left.size, right.size)
    if all(isinstance(one, (int, float)) for one in pair):
        return abs(float(str(pair[0])) - float(str(pair[1])))
    return None


def _reason(quantity: str, place: Place, left: Value | None, right: Value | None, resumed: set[int]) -> str:
    """Return why a difference is as documented; empty where it is not."""
    if place.name == "nonfinite_steps" and left is None and quantity in (LOGS, RETURNED):
        return "`nonfinite_steps` is logged here only (docs/differences.md, Losses that are not finite)"
    sums = {LOGS: ("loss", "train_loss"), RETURNED: ("train_loss",), METRICS: ()}.get(quantity, ())
    is_first = place.name == "train_loss" or place.occurrence == 1
    if place.training in resumed and place.name in sums and is_first:
        return (
            f"`{place.name}` of training {place.training}, which was resumed: transformers {_shown(left)}, here "
            f"{_shown(right)} (docs/differences.md, The loss that a resumed run reports)"
        )
    return ""
