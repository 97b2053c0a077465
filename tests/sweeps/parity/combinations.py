"""Draws combinations of features and of calls, and runs each under transformers' Trainer and under ours.

    python tests/sweeps/parity/combinations.py COUNT SEED [--only ROW] [--features A,B,CALLS] [--shrink] [--devices 2]

A row is a task, two to six features and a sequence of calls. Everything that a run leaves is compared to the last bit:
logs, weights, states of optimizer and schedule, events, files and their contents, returned values, kinds of errors,
random states. A resumed run is compared with the uninterrupted one as well. What differs has to be a row of
docs/differences.md; `exact_resume.py` and `combination_rules.py` say how. The status is 1 where anything else does.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm

from helpers.parity.compare import first_difference, same
from sweeps.parity.combination_calls import CALLS
from sweeps.parity.combination_features import FEATURES, Feature
from sweeps.parity.combination_rules import RULES, expected

HERE = Path(__file__).resolve().parent
RARE = {"workers": 0.1, "memory": 0.3, "auto_batch": 0.5, "patched": 0.3}


@dataclass(frozen=True)
class Row:
    """A combination: the names of its features, the task first, and of its calls; how many processes run it."""

    features: tuple[str, ...]
    calls: str
    devices: int = 1

    def __str__(self) -> str:
        return ",".join([*self.features, self.calls])


def drawn(seed: str, row: int) -> Row:
    """Return a row of a table."""
    chance = random.Random(f"{seed}:{row}")
    calls = _one_of_a_family(chance, list(CALLS.values()))
    tasks = [f for f in FEATURES.values() if f.family == "task" and (not calls.tasks or f.name in calls.tasks)]
    chosen = [chance.choice(tasks)]
    rest = [f for f in FEATURES.values() if f.family != "task" and _fits(f, chosen[0])]
    for _ in range(chance.randint(2, 6)):
        left = [f for f in rest if not any(f.places & one.places for one in chosen)]
        found = _one_of_a_family(chance, left)
        if chance.random() < RARE.get(found.family, 1.0):
            chosen.append(found)
    return Row(tuple(f.name for f in chosen), calls.name)


def _one_of_a_family(chance: random.Random, things: list):
    family = chance.choice(sorted({thing.family for thing in things}))
    return chance.choice([thing for thing in things if thing.family == family])


def _fits(one: Feature, task: Feature) -> bool:
    return not one.tasks or task.name in one.tasks


class Side:
    """A process that runs rows under one api."""

    def __init__(self, api: str, folder: Path) -> None:
        self.folder = folder / api
        self.folder.mkdir(parents=True)
        self.log = (self.folder / "side.log").open("w")
        command = [sys.executable, str(HERE / "combination_runner.py"), api]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def ask(self, row: Row, interrupts: bool = True) -> None:
        self.place = self.folder / "row"
        shutil.rmtree(self.place, ignore_errors=True)
        asked = {"features": row.features, "calls": row.calls, "folder": str(self.place), "interrupts": interrupts,
                 "devices": row.devices}  # fmt: skip
        self.devices = row.devices
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def answers(self) -> list[dict]:
        """Return what each of the row's processes has left; the files are the first one's."""
        if not self.process.stdout.readline():
            raise RuntimeError((self.folder / "side.log").read_text()[-3000:])
        found = [self._answer(rank) for rank in range(self.devices)]
        found[0]["files"] = pickle.loads((self.place / "files.pickle").read_bytes())
        return found

    def _answer(self, rank: int) -> dict:
        error = self.place / f"answer.{rank}.error"
        if error.exists():
            return {"said": [("process", "breaks", [], error.read_text())], "trace": [], "begun": 0}
        return pickle.loads((self.place / f"answer.{rank}.pickle").read_bytes())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


@dataclass
class Verdict:
    """What a row has shown: nothing, a reason of the differences page, or a fault and where it shows."""

    fault: str = ""
    reason: str = ""


class Table:
    """Both sides, and the folder that they work in."""

    def __init__(self, folder: Path) -> None:
        self.sides = {api: Side(api, folder) for api in ("transformers", "hf_compat")}

    def verdict(self, row: Row) -> Verdict:
        for side in self.sides.values():
            side.ask(row)
        theirs, ours = (side.answers() for side in self.sides.values())
        against = [self._against_theirs(row, *answers) for answers in zip(theirs, ours, strict=True)]
        first = next((found for found in against if found.fault), against[0])
        if first.fault or not _has_a_whole(row, ours[0]):
            return first
        self.sides["hf_compat"].ask(row, interrupts=False)
        wholes = self.sides["hf_compat"].answers()
        where = "".join(map(unlike_the_whole, ours, wholes))
        return Verdict(fault=f"resumed: {where}") if where else first

    def _against_theirs(self, row: Row, theirs: dict, ours: dict) -> Verdict:
        for rule in RULES:
            if rule.applies(row, theirs, ours):
                return Verdict(reason=rule.heading)
        theirs, ours = expected(row, theirs, ours)
        if same(theirs, ours):
            return Verdict()
        return Verdict(fault=first_difference(theirs, ours))

    def close(self) -> None:
        for side in self.sides.values():
            side.close()


def _has_a_whole(row: Row, ours: dict) -> bool:
    """Return whether the row's run has to be the one without the interruption."""
    knows = not any(FEATURES[name].volatile for name in row.features)
    interrupted = any(what == "raises" for _, what, *_ in ours["said"])
    fine = all(what == "gives" or "Interruption" in kinds for _, what, kinds, _ in ours["said"])
    return CALLS[row.calls].resumes and knows and interrupted and fine


def unlike_the_whole(ours: dict, whole: dict) -> str:
    """Return where a resumed run is not the uninterrupted one."""
    left, right = ({k: r[k] for k in ("log_history", "weights", "optimizer", "schedule", "state", "best", "flags",
                                      "modes", "random", "files") if k in r}
                   for r in (whole, ours))  # fmt: skip
    left["gives"], right["gives"] = whole["said"][-1][2], ours["said"][-1][2]
    ends, resumed = (_training_events(r["trace"][r["begun"] :]) for r in (whole, ours))
    left["events"], right["events"] = ends[len(ends) - len(resumed) :], resumed
    return "" if same(left, right) else first_difference(left, right).replace("transformers", "whole")


def _training_events(trace: list) -> list:
    """Return what comes from the first update, or end of an epoch, on."""
    first = next((i for i, e in enumerate(trace) if e[0] in ("on_step_begin", "on_epoch_end")), len(trace))
    return trace[first:]


def shrunk(table: Table, row: Row) -> Row:
    """Leave out features, as long as the row still shows a fault."""
    for name in row.features[1:]:
        fewer = replace(row, features=tuple(n for n in row.features if n != name))
        if table.verdict(fewer).fault:
            return shrunk(table, fewer)
    for calls in ("train", "train_twice"):
        fewer = replace(row, calls=calls)
        if row.calls not in ("train", calls) and table.verdict(fewer).fault:
            return fewer
    return row


def parse(text: str) -> Row:
    *features, calls = text.split(",")
    return Row(tuple(features), calls)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=0)
    parser.add_argument("seed", nargs="?", default="0")
    parser.add_argument("--only", type=int, help="repeat one row of the table")
    parser.add_argument("--features", type=parse, help="run this combination: the task, features, the calls")
    parser.add_argument("--shrink", action="store_true", help="leave out of each fault what it does not need")
    parser.add_argument("--folder", type=Path, help="where the sides work; it stays")
    parser.add_argument("--devices", type=int, default=1, help="how many processes train each row together")
    chosen = parser.parse_args()
    rows = {n: drawn(chosen.seed, n) for n in ([chosen.only] if chosen.only is not None else range(chosen.count))}
    if chosen.features:
        rows = {0: chosen.features}
    rows = {number: replace(row, devices=chosen.devices) for number, row in rows.items()}
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="hf_compat_combinations_"))
    table = Table(folder)
    try:
        return report(table, rows, chosen.shrink)
    finally:
        table.close()
        if not chosen.folder:
            shutil.rmtree(folder, ignore_errors=True)


def report(table: Table, rows: dict[int, Row], shrinks: bool) -> int:
    counted: Counter = Counter()
    bar = tqdm(rows.items(), disable=None)
    for number, row in bar:
        verdict = table.verdict(row)
        counted["faults" if verdict.fault else verdict.reason or "equal"] += 1
        if verdict.fault:
            tqdm.write(f"row {number}: {row}\n    {verdict.fault[:700]}", file=sys.stdout)
            if shrinks:
                least = shrunk(table, row)
                tqdm.write(f"    least: --features {least}\n    {table.verdict(least).fault[:700]}", file=sys.stdout)
            sys.stdout.flush()
        bar.set_postfix_str(f"{counted['faults']} faults")
    print(f"{len(rows)} rows: " + ", ".join(f"{n} {what}" for what, n in counted.most_common()))
    return int(counted["faults"] > 0)


if __name__ == "__main__":
    sys.exit(main())
