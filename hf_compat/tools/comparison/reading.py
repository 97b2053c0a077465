"""Read the records of a run into values by quantity and place."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

Line = Mapping[str, object]
# Durations and rates depend on the machine.
TIMED = ("_runtime", "_per_second", "_preparation_time", "elapsed_time", "remaining_time")
# In the order in which they arise within an update. Of two differences in one update, the earlier is the cause.
LOSSES, GRADIENTS, RATES, WEIGHTS = "micro-batch losses", "gradient norms", "learning rates", "weights after updates"
LOGS, METRICS, PREDICTIONS = "log history", "evaluation metrics", "predictions"
RETURNED, EVENTS, FINAL, FILES = "what train() returned", "callback events", "final weights", "files"
QUANTITIES = (
    LOSSES, GRADIENTS, RATES, WEIGHTS, LOGS, METRICS, PREDICTIONS, RETURNED, EVENTS, FINAL, FILES,
)  # fmt: skip
# Ends the names of values from the end of an epoch whose updates were all made before a resume.
AT_RESUME = " at the end of the resumed epoch"
# Kinds of lines with named numbers: the quantity and the field.
_OF_NUMBERS = {"log": (LOGS, "values"), "metrics": (METRICS, "values"), "trained": (RETURNED, "metrics")}
# Kinds of lines with digests of kept tensors.
_OF_TENSORS = {"predictions": PREDICTIONS, "weights": FINAL}


class Place(NamedTuple):
    """The place of a value in its quantity, which is the same on both sides."""

    training: int  # from 1, while 0 is before the first
    rank: int
    name: str
    occurrence: int  # among the values of that name


class Value(NamedTuple):
    """One observed value."""

    update: int
    value: object
    size: float | None = None  # a number for a `value` that is a digest
    file: tuple[str, str] | None = None  # the file and key of its whole content


@dataclass(frozen=True, slots=True)
class End:
    """The end of a script."""

    how: str  # `finished`, `exit`, `error`, `timeout`, `interrupt`, `killed` or `not run`
    status: int = 0
    account: str = ""  # the traceback, or the text of `sys.exit`
    rank: int = 0
    error: str = ""
    missing: str = ""
    wants_input: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the script ended by itself without an error."""
        return self.how in ("finished", "exit")


@dataclass(slots=True)
class Findings:
    """The content of one side's records."""

    values: dict[str, dict[Place, Value]] = field(default_factory=lambda: {name: {} for name in QUANTITIES})
    end: End | None = None
    trainings: int = 0
    updates: int = 0
    resumed: set[int] = field(default_factory=set)  # trainings that resumed a checkpoint
    seconds: list[float] = field(default_factory=list)  # duration of each update but the first of a training
    overridden: dict[str, tuple[str, str]] = field(default_factory=dict)  # the script's value, and that which counted

    @property
    def seconds_of_update(self) -> float | None:
        """The median duration. None if there is at most one update."""
        return median(self.seconds) if self.seconds else None


def read_records(folder: Path) -> Findings:
    """Read the records of all processes of a side. An incomplete last line is skipped."""
    found = Findings()
    for path in sorted(folder.glob("record-*.jsonl")):
        _Reader(found, int(path.stem.rpartition("-")[2])).read(path)
    return found


class _Reader:
    def __init__(self, found: Findings, rank: int) -> None:
        self._found = found
        self._rank = rank
        self._seen: Counter[tuple[str, int, str]] = Counter()
        self._first_updates: set[int] = set()
        self._event = self._moment = ""

    def read(self, path: Path) -> None:
        for text in path.read_text(encoding="utf-8").split("\n")[:-1]:
            line: dict[str, object] = json.loads(text)
            kind = str(line.pop("kind"))
            if kind == "loss":
                self._add(LOSSES, line, f"micro-batch {line['micro_batch']}", line["value"])
            elif kind == "update":
                self._read_update(line)
            elif kind in _OF_NUMBERS:
                quantity, name = _OF_NUMBERS[kind]
                for key, value in _items(line[name]).items():
                    if not key.endswith(TIMED):
                        self._add(quantity, line, key, value)
            elif kind in _OF_TENSORS:
                for key, value in _items(line["digests"]).items():
                    self._add(_OF_TENSORS[kind], line, key.lstrip("."), value, file=(str(line["file"]), key))
            elif kind == "event":
                self._read_event(line)
            else:
                self._read_other(kind, line)

    def _read_event(self, line: Line) -> None:
        before, self._event = self._event, str(line["event"])
        if (before, self._event) == ("on_epoch_begin", "on_epoch_end") and line["update"]:
            self._moment = AT_RESUME
        elif self._event == "on_train_end":
            self._moment = ""
        self._add(EVENTS, line, "event", f"{self._event} (epoch {line['epoch']}, flags {line['flags']})")
        self._moment = "" if self._event == "on_epoch_begin" else self._moment

    def _add(
        self,
        quantity: str,
        line: Line,
        name: str,
        value: object,
        size: float | None = None,
        file: tuple[str, str] | None = None,
    ) -> None:
        training, name = int(str(line["training"])), name + self._moment
        self._seen[quantity, training, name] += 1
        place = Place(training, self._rank, name, self._seen[quantity, training, name])
        self._found.values[quantity][place] = Value(int(str(line["update"])), value, size, file)

    def _read_update(self, line: Line) -> None:
        if line["gradients"] is not None:
            self._add(GRADIENTS, line, "norm", line["gradients"])
        for index, rate in enumerate(line["rates"] if isinstance(line["rates"], list) else []):
            self._add(RATES, line, f"group {index}", rate)
        if line["bits"]:
            self._add(WEIGHTS, line, "norm", line["bits"], size=float(str(line["norm"])))
        training, update = int(str(line["training"])), int(str(line["update"]))
        if self._rank == 0:
            self._found.updates += 1
            if training in self._first_updates:
                self._found.seconds.append(float(str(line["seconds"])))
            elif update > 1:
                self._found.resumed.add(training)
        self._first_updates.add(training)

    def _read_other(self, kind: str, line: dict[str, object]) -> None:
        found = self._found
        if kind == "train":
            found.trainings = max(found.trainings, int(str(line["training"])))
        elif kind == "override":
            found.overridden.setdefault(str(line["name"]), (str(line["was"]), str(line["now"])))
        elif kind == "end":
            end = End(rank=self._rank, **line)  # type: ignore[arg-type]  # the fields are those of the record
            if found.end is None or (found.end.is_whole and not end.is_whole):
                found.end = end


def _items(values: object) -> Mapping[str, object]:
    return values if isinstance(values, Mapping) else {}


def same(left: object, right: object) -> bool:
    """Whether two values are equal to the last bit. NaN equals NaN, and 0.0 does not equal -0.0."""
    if isinstance(left, float) and isinstance(right, float):
        if left != left or right != right:
            return left != left and right != right
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return left == right
