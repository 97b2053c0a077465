"""How the benchmarks measure: contestants in turn, round by round, in one process; medians, their spread, ratios."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import os
import statistics
from collections.abc import Callable, Iterator, Mapping

import torch
from tqdm import tqdm

Contestant = Callable[[], float]  # one measurement; smaller is better


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What is measured, of whom.

    Args:
        name: What the table calls it.
        unit: Of a contestant's number.
        contestants: Each gives one measurement a call, of a cost: smaller is better.
        reference: The contestant that ratios refer to.
        goal: The ratio that hf_compat is to reach.
        floor: A contestant whose median is subtracted from all before ratios are taken: what is left is overhead.
        rounds: Measurements of each contestant.
        threads: torch's threads meanwhile. One: two wait for each other where other work takes one's turn.
    """

    name: str
    unit: str
    contestants: Mapping[str, Contestant]
    reference: str = "transformers"
    goal: float = 1.0
    floor: str | None = None
    rounds: int = 5
    threads: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant's result: median, smallest and largest measurement, and its ratio to the reference."""

    contestant: str
    median: float
    smallest: float
    largest: float
    ratio: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A benchmark's rows, in the order of its contestants, and the machine's load in the minutes before."""

    name: str
    unit: str
    goal: float
    rounds: int
    load: float
    rows: list[Row]

    def as_text(self) -> str:
        lines = [f"{self.name}   ({self.unit}, medians of {self.rounds} rounds)"]
        for row in self.rows:
            spread = f"{row.smallest:,.3g} to {row.largest:,.3g}"
            lines.append(f"  {row.contestant:<18} {row.median:>10,.3g}   {spread:<20} {row.ratio:>7.3f} ×")
        return "\n".join(lines)


def measure(benchmark: Benchmark, rounds: int | None = None) -> Result:
    """Measure: each contestant once for nothing (imports, caches, allocators), then in turn, round by round."""
    rounds = rounds or benchmark.rounds
    found: dict[str, list[float]] = {name: [] for name in benchmark.contestants}
    load, threads = os.getloadavg()[1], torch.get_num_threads()
    torch.set_num_threads(benchmark.threads)
    for round_number in tqdm(range(-1, rounds), desc=benchmark.name, leave=False):
        for name, contestant in benchmark.contestants.items():
            gc.collect()
            with quiet():
                value = contestant()
            if round_number >= 0:
                found[name].append(value)
    torch.set_num_threads(threads)
    return _result(benchmark, rounds, load, found)


def _result(benchmark: Benchmark, rounds: int, load: float, found: dict[str, list[float]]) -> Result:
    medians = {name: statistics.median(values) for name, values in found.items()}
    floor = medians[benchmark.floor] if benchmark.floor else 0.0
    whole = medians[benchmark.reference] - floor
    rows = [
        Row(
            contestant=name, median=medians[name], smallest=min(values), largest=max(values),
            ratio=(medians[name] - floor) / whole,
        )
        for name, values in found.items()
    ]  # fmt: skip
    return Result(
        name=benchmark.name, unit=benchmark.unit, goal=benchmark.goal, rounds=rounds, load=load, rows=rows
    )  # fmt: skip


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what trainers print out of the table."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
