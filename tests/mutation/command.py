"""The command `tests/mutants.py`: draws mistakes, examines each, and prints what was found."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

from mutation import recording
from mutation.places import Change, all_changes, drawn
from mutation.reached import MAP, Reached, bodies, write
from mutation.static import StaticChecks
from mutation.trials import Outcome, Trials
from mutation.view import ROOT

LISTED = ROOT / "tests" / "unobservable.txt"
SEPARATOR = " ## "
STAGES = ((4.0, 6), (20.0, 20), (float("inf"), 10_000))  # most seconds and files of tests that run together
LEAST_SECONDS = 30.0  # before a trial is stopped
SURE_SECONDS = 2.0  # a failure of a test that takes longer, or starts late, is seen twice
AT_ONCE = 2
COLLECTING = 0.7  # seconds of a file, before its tests

Job = tuple[Change | None, list[str]]


@dataclass
class Verdict:
    """What became of a mistake.

    Args:
        change: The mistake.
        status: `killed`, `survived` or `listed`.
        by: The check or the test that killed it, with the reason if it did not fail.
        run: How many tests were run.
        reaching: How many reach it.
        seconds: By the clock.
    """

    change: Change
    status: str
    by: str = ""
    run: int = 0
    reaching: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        """Show it in one line."""
        change = self.change
        by = {"killed": f"by {self.by}", "listed": self.by}.get(self.status, "")
        if self.status == "survived":
            whole = "all" if self.run >= self.reaching else "ONLY"
            by = f"{whole} {self.run} of {self.reaching} tests that reach it" if self.reaching else "NO TEST REACHES IT"
        shown = change.key.split(" | ", 2)[2]
        place = f"{change.file}:{change.line} {change.function}"
        return f"{self.status:8} {self.seconds:5.1f} s  {place} | {shown}\n    {by}"

    def facts(self) -> dict[str, object]:
        """Return what a file of results holds."""
        where = {name: getattr(self.change, name) for name in ("key", "file", "line", "room")}
        return where | {name: value for name, value in vars(self).items() if name != "change"}


class Examiner:
    """Examines mistakes, several at once.

    Args:
        reached: The map.
        budget: Most seconds of tests for a mistake, by their usual durations; 0 for all tests that reach it.
        jobs: How many trials run at once.
    """

    def __init__(self, reached: Reached, budget: float, jobs: int) -> None:
        self.reached, self.budget, self.jobs = reached, budget or float("inf"), jobs
        self.sound: set[str] = set()
        self.unsound: set[str] = set()
        self.static = StaticChecks()
        self.trials = Trials()

    def verdicts(self, changes: Iterable[Change]) -> Generator[Verdict, None, None]:
        """Yield a verdict on each, as it is found."""
        waiting = iter(changes)
        running: dict[int, Generator[Job, Outcome, Verdict]] = {}

        def go_on(work: Generator[Job, Outcome, Verdict], outcome: Outcome | None) -> Verdict | None:
            try:
                change, tests = work.send(outcome) if outcome else next(work)
            except StopIteration as ended:
                return ended.value
            running[self.trials.start(change, tests, self._most_seconds(tests))] = work
            return None

        while True:
            while len(running) < self.jobs and (change := next(waiting, None)) is not None:
                if verdict := go_on(self._examined(change), None):
                    yield verdict
            if not running:
                return
            pid, outcome = self.trials.wait()
            if verdict := go_on(running.pop(pid), outcome):
                yield verdict

    def _examined(self, change: Change) -> Generator[Job, Outcome, Verdict]:
        started = time.monotonic()
        reaching = self.reached.reaching(change)
        verdict = Verdict(change, "survived", reaching=len(reaching), by=self.static.judge_text(change))
        stages = iter(self._stages(reaching))
        first = next(stages, None)
        if first and not verdict.by:  # they take less time than mypy
            yield from self._run(first, verdict)
        verdict.by = verdict.by or self.static.judge_types(change)
        while not verdict.by and (tests := next(stages, None)):
            yield from self._run(tests, verdict)
        verdict.status = "killed" if verdict.by else "survived"
        verdict.seconds = round(time.monotonic() - started, 1)
        return verdict

    def _run(self, tests: list[str], verdict: Verdict) -> Generator[Job, Outcome, None]:
        """Run tests beside a mistake, and note the one that it makes fail."""
        while tests := [test for test in tests if not self._is_unsound(test)]:
            outcome = yield verdict.change, tests
            verdict.run += len({_place(tests, test) for test in outcome.ran})  # a function has many cases
            if not outcome.killer:
                return
            if (yield from self._is_killed(verdict.change, tests, outcome)):
                verdict.by = outcome.killer + ("" if outcome.why == "failed" else f" ({outcome.why})")
                return
            tests = tests[_place(tests, outcome.killer) + 1 :]

    def close(self) -> None:
        """Stop what runs, and leave nothing behind."""
        self.static.close()
        self.trials.close()

    def _is_unsound(self, test: str) -> bool:
        """Whether a test, or its function where no case could be told, has failed without a mistake."""
        return not self.unsound.isdisjoint((test, test.partition("[")[0]))

    def _is_killed(self, change: Change, tests: list[str], outcome: Outcome) -> Generator[Job, Outcome, bool]:
        """Whether a test fails because of the mistake: it passes without, and a slow one fails again."""
        killer = outcome.killer
        if self._is_unsound(killer):
            return False
        place = _place(tests, killer)
        before = [test for test in tests[: place + 1] if not self._is_unsound(test)]
        if killer not in self.sound:
            without = yield None, before
            if without.killer and not without.ran:
                raise RuntimeError(f"tests do not start without a mistake: {before}\n{without.said}")
            if without.killer:
                print(f"    fails without a mistake, and does not count: {without.killer} ({without.why})", flush=True)
                self.unsound |= {without.killer, *before[_place(before, without.killer) :][:1]}
                return (yield from self._is_killed(change, tests, outcome)) if without.killer != killer else False
            self.sound.add(killer)
        if outcome.why != "failed" or outcome.killer_seconds > SURE_SECONDS:
            again = yield change, [tests[place]] if place < len(tests) else before
            return bool(again.killer)
        return True

    def _stages(self, tests: list[str]) -> Iterable[list[str]]:
        """Divide tests into groups that run together: a few first."""
        rest, left = list(tests), self.budget
        for most, files in STAGES:
            stage, seen, spent = [], set(), 0.0
            while rest:
                file = rest[0].partition("::")[0]
                cost = self.reached.seconds.get(rest[0], 1.0)
                cost += 0.0 if file in seen else COLLECTING + self.reached.shared.get(rest[0], 0.0)
                if stage and (spent + cost > min(most, left) or len(seen | {file}) > files):
                    break
                stage.append(rest.pop(0))
                seen.add(file)
                spent += cost
            left -= spent
            if stage:
                yield stage
            if left <= 0:
                return

    def _most_seconds(self, tests: list[str]) -> float:
        usual = sum(self.reached.seconds.get(test, 1.0) for test in tests)
        usual += sum({test.partition("::")[0]: self.reached.shared.get(test, 0.0) for test in tests}.values())
        crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        return max(LEAST_SECONDS, 5 * usual) * crowd


def _place(tests: list[str], test: str) -> int:
    """Where a test is in a list, perhaps as its function; the list's length if it is not."""
    return next((place for place, one in enumerate(tests) if one in (test, test.partition("[")[0])), len(tests))


def listed() -> dict[str, str]:
    """Read the mistakes that nothing can observe, with their reasons."""
    lines = LISTED.read_text().splitlines() if LISTED.is_file() else []
    found = dict(line.rsplit(SEPARATOR, 1) for line in lines if line and not line.startswith("# "))
    return {key.strip(): reason.strip() for key, reason in found.items()}


def record(which: str) -> None:
    """Run the tests that the map does not know yet, those of a folder or file too, or all, and write the map."""
    earlier = None if which == "all" else Reached()
    if earlier and which != "new":
        earlier.forget(which)
    keep = Path(tempfile.gettempdir()) / f"hf_compat-reached-{recording.state_of_package()}"
    words = ["-q", "-m", "not matrix", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    functions = bodies()
    write(*recording.record(words, keep, earlier.unchanged() if earlier else []), functions, earlier)
    shutil.rmtree(keep)


def _chosen(words: argparse.Namespace, changes: list[Change]) -> list[Change]:
    if not words.only:
        if words.seed is None or words.number is None:
            raise SystemExit("name a seed and a number, or --only")
        own = [change for change in changes if words.room in (None, change.room)]
        return drawn(own, words.seed, words.number)
    if words.only.endswith(".jsonl"):
        lines = map(json.loads, Path(words.only).read_text().splitlines())
        keys = {line["key"] for line in lines if line["status"] == "survived"}
        return [change for change in changes if change.key in keys]
    return [change for change in changes if words.only in (change.key, f"{change.file}:{change.line}")]


def _table(changes: list[Change], verdicts: list[Verdict]) -> str:
    places = defaultdict(set)
    for change in changes:
        places[change.room].add(change.place)
    counts = defaultdict(Counter)
    for verdict in verdicts:
        counts[verdict.change.room][verdict.status] += 1
    rows = [f"{'room':16} {'places':>7} {'planted':>8} {'killed':>7} {'listed':>7} {'survived':>9} {'score':>6}"]
    for room in [*sorted(room for room in places if counts[room]), "all"]:
        own = sum(counts.values(), Counter()) if room == "all" else counts[room]
        number = sum(map(len, places.values())) if room == "all" else len(places[room])
        score = f"{100 * (own['killed'] + own['listed']) / max(1, own.total()):.1f}"
        rows.append(
            f"{room:16} {number:7} {own.total():8} {own['killed']:7} {own['listed']:7} {own['survived']:9} {score:>6}"
        )
    return "\n".join(rows)


def _known(path: Path, by_key: dict[str, Change]) -> list[Verdict]:
    """Read the verdicts of an earlier run."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        facts = json.loads(line)
        if facts["key"] in by_key:
            kept = {name: facts[name] for name in ("status", "by", "run", "reaching", "seconds")}
            found.append(Verdict(by_key[facts["key"]], **kept))
    return found


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/mutants.py", description="Plant mistakes, and see which tests notice.")
    parser.add_argument("seed", type=int, nargs="?", help="of the draw")
    parser.add_argument("number", type=int, nargs="?", help="how many mistakes")
    parser.add_argument("--room", help="a folder of the package, or `top`")
    parser.add_argument("--only", help="KEY, FILE:LINE, or a file of results, whose survivors run again")
    parser.add_argument("--results", type=Path, help="a file of JSON lines; what it holds is not run again")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tests for a mistake; 0 for all")
    parser.add_argument("--jobs", type=int, default=AT_ONCE, help="how many run at once")
    parser.add_argument("--places", action="store_true", help="print the mistakes and run nothing")
    new = f"run what {MAP.name} does not know yet, the tests below a path too, or `all`, and write it"
    parser.add_argument("--record", nargs="?", const="new", metavar="PATH|all", help=new)
    return parser.parse_args()


def main() -> int:
    """Run the command; return 1 if a mistake survived that is not listed, or a listed one is gone."""
    words = _parsed()
    if words.record:
        record(words.record)
        return 0
    changes = all_changes()
    by_key = {change.key: change for change in changes}
    unseen = listed()
    stale = [key for key in unseen if key not in by_key]
    for key in stale:
        print(f"{LISTED.name} lists what is not there: {key}")
    chosen = _chosen(words, changes)
    if words.places:
        print(*(f"{change.file}:{change.line}  {change.key}" for change in chosen), sep="\n")
        return 0
    verdicts = _known(words.results, by_key) if words.results else []
    done = {verdict.change.key for verdict in verdicts}
    verdicts = [verdict for verdict in verdicts if verdict.change in chosen]
    left = [change for change in chosen if change.key not in done and change.key not in unseen]
    verdicts += [Verdict(change, "listed", unseen[change.key]) for change in chosen if change.key in unseen]
    if left:
        examiner = Examiner(Reached(), words.budget, words.jobs)
        try:
            for verdict in examiner.verdicts(left):
                verdicts.append(verdict)
                print(f"{len(verdicts)}/{len(chosen)} {verdict.line()}", flush=True)
                if words.results:
                    with words.results.open("a") as file:
                        file.write(json.dumps(verdict.facts()) + "\n")
        finally:
            examiner.close()
    print(_table(changes, verdicts), flush=True)
    return int(bool(stale) or any(verdict.status == "survived" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
