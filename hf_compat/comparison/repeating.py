"""Does a script repeat itself under transformers alone? If not, a difference between the sides says nothing of them."""

from __future__ import annotations

from dataclasses import replace

from hf_compat.comparison.reading import FILES, Findings, Place, same
from hf_compat.comparison.running import Limits
from hf_compat.comparison.verdicts import Difference

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
