"""Count what becomes of every argument's name, optimizer and schedule: `python tests/hf/count_support.py`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hf_compat.hf.enums import OptimizerNames, SchedulerType
from hf_compat.hf.inert import NO_SUCH_SAMPLER
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.hf.rows import ROWS
from hf_compat.optim.lr_schedulers import FACTORS, OF_TRANSFORMERS
from hf_compat.optim.optimizers import OPTIMIZERS

NAMES = (Path(__file__).parent / "names_of_all_releases.txt").read_text().split()
TRANSLATED, INERT, LATER = "translated", "inert with a warning", "not supported yet"
# Made by `get_scheduler` itself (tests/parity has a case of each): they follow a metric, or never change.
MADE_APART = {SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY, SchedulerType.CONSTANT}


def of_name(name: str) -> str:
    """Say what becomes of a name of any release; one that nothing is known of raises KeyError."""
    if name in OLD_NAMES:
        return INERT if OLD_NAMES[name].inert else TRANSLATED
    return INERT if NO_SUCH_SAMPLER in ROWS[name].inert else TRANSLATED


def counts() -> dict[str, Counter[str]]:
    """Return the counts of names, optimizers and schedules."""
    schedules = {*FACTORS, *OF_TRANSFORMERS, *MADE_APART}
    return {
        "names": Counter(of_name(name) for name in NAMES),
        "optimizers": Counter(TRANSLATED if name.value in OPTIMIZERS else LATER for name in OptimizerNames),
        "schedules": Counter(TRANSLATED if name in schedules else LATER for name in SchedulerType),
    }


def lines() -> list[str]:
    """Return a line a kind: how many there are, and what becomes of them."""
    return [
        f"{sum(count.values())} {kind}: " + ", ".join(f"{count[w]} {w}" for w in (TRANSLATED, INERT, LATER))
        for kind, count in counts().items()
    ]


if __name__ == "__main__":
    print("\n".join(lines()))
