"""What the record of a run says, as values by quantity and place."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

Line = Mapping[str, object]
# Durations, and rates over them, are the machine's.
TIMED = ("_runtime", "_per_second", "_preparation_time")
# In the order in which they come about within an update: of two that differ in one update, the earlier is the cause.
LOSSES, GRADIENTS, RATES, WEIGHTS = "micro-batch losses", "gradient norms", "learning rates", "weights after updates"
LOGS, METRICS, PREDICTIONS = "log history", "evaluation metrics", "predictions"
RETURNED, EVENTS, FINAL, FILES = "what train() returned", "callback events", "final weights", "files"
QUANTITIES = (
    LOSSES, GRADIENTS, RATES, WEIGHTS, LOGS, METRICS, PREDICTIONS, RETURNED, EVENTS, FINAL, FILES,
)  # fmt: skip


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """Where a value stands: of one quantity it stands there on either side.

    Args:
        training: Which call of `train()`, from 1; 0 is before the first.
        rank: Of the process.
        name: What it is, within its quantity.
        occurrence: Which of those of this name.
    """

    training: int
    rank: int
    name: str
    occurrence: int


@dataclass(frozen=True, slots=True)
class Value:
    """One observed value.

    Args:
        update: `global_step`.
        value: A number, or text; what is compared.
        size: The number that stands for it, where `value` is a digest.
        file: Where its whole content is kept, and under which key.
    """

    update: int
    value: object
    size: float | None = None
    file: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class End:
    """How a script ended.

    Args:
        how: `finished`, `exit`, `error`, `timeout`, `interrupt` or `killed`.
        status: Its exit status.
        account: The traceback, or what `sys.exit` was told.
        rank: Of the process that this is about.
        error: The exception's class.
        missing: The package that it lacks.
        wants_input: Whether it asked for input.
    """

    how: str
    status: int = 0
    account: str = ""
    rank: int = 0
    error: str = ""
    missing: str = ""
    wants_input: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the script came to an end of its own choice."""
        return self.how in ("finished", "exit")


@dataclass(slots=True)
class Findings:
    """All that one side's records say.

    Args:
        values: By quantity, each value by its place, in the order of their coming.
        end: How the script ended, where it says so.
        trainings: Calls of `train()`.
        updates: Updates of all of them.
        resumed: Trainings that went on from a checkpoint.
        seconds: Of each update but the first of a training.
        overridden: Name → what the script said, and what counted.
    """

    values: dict[str, dict[Place, Value]] = field(default_factory=lambda: {name: {} for name in QUANTITIES})
    end: End | None = None
    trainings: int = 0
    updates: int = 0
    resumed: set[int] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)
    overridden: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def seconds_of_update(self) -> float | None:
        """The median; None where there was none but the first."""
        return median(self.seconds) if self.seconds else None


def read_records(folder: Path) -> Findings:
    """Read what the processes of a side have written down; a last line that is cut off is left out."""
    found = Findings()
    for path in sorted(folder.glob("record-*.jsonl")):
        _Reader(found, int(path.stem.rpartition("-")[2])).read(path)
    return found


class _Reader:
    """Reads the file of one process."""

    def __init__(self, found: Findings, rank: int) -> None:
        self._found = found
        self._rank = rank
        self._seen: Counter[tuple[str, int, str]] = Counter()
        self._first_updates: set[int] = set()

    def read(self, path: Path) -> None:
        for text in path.read_text(encoding="utf-8").split("\n")[:-1]:
            line: dict[str, object] = json.loads(text)
            read: Callable[[Line], None] | None = getattr(self, f"_read_{line.pop('kind')}", None)
            if read is not None:
                read(line)

    def _add(self, quantity: str, line: Line, name: str, value: object, **details: object) -> None:
        training = int(str(line["training"]))
        self._seen[quantity, training, name] += 1
        place = Place(training, self._rank, name, self._seen[quantity, training, name])
        self._found.values[quantity][place] = Value(int(str(line["update"])), value, **details)  # type: ignore[arg-type]

    def _read_loss(self, line: Line) -> None:
        self._add(LOSSES, line, f"micro-batch {line['micro_batch']}", line["value"])

    def _read_update(self, line: Line) -> None:
        if line["gradients"] is not None:
            self._add(GRADIENTS, line, "norm", line["gradients"])
        for index, rate in enumerate(line["rates"] if isinstance(line["rates"], list) else []):
            self._add(RATES, line, f"group {index}", rate)
        if line["bits"]:
            self._add(WEIGHTS, line, "norm", line["bits"], size=line["norm"])
        training, update = int(str(line["training"])), int(str(line["update"]))
        if self._rank == 0:
            self._found.updates += 1
            if training in self._first_updates:
                self._found.seconds.append(float(str(line["seconds"])))
            elif update > 1:
                self._found.resumed.add(training)
        self._first_updates.add(training)

    def _read_log(self, line: Line) -> None:
        for name, value in _without_times(line["values"]):
            self._add(LOGS, line, name, value)

    def _read_metrics(self, line: Line) -> None:
        for name, value in _without_times(line["values"]):
            self._add(METRICS, line, name, value)

    def _read_predictions(self, line: Line) -> None:
        for name, digest in _items(line["digests"]):
            self._add(PREDICTIONS, line, name.lstrip("."), digest, file=(str(line["file"]), name))

    def _read_weights(self, line: Line) -> None:
        for name, digest in _items(line["digests"]):
            self._add(FINAL, line, name, digest, file=(str(line["file"]), name))

    def _read_event(self, line: Line) -> None:
        self._add(EVENTS, line, "event", f"{line['event']} (epoch {line['epoch']}, flags {line['flags']})")

    def _read_train(self, line: Line) -> None:
        self._found.trainings = max(self._found.trainings, int(str(line["training"])))

    def _read_trained(self, line: Line) -> None:
        for name, value in _without_times(line["metrics"]):
            self._add(RETURNED, line, name, value)

    def _read_override(self, line: Line) -> None:
        self._found.overridden.setdefault(str(line["name"]), (str(line["was"]), str(line["now"])))

    def _read_end(self, line: Line) -> None:
        end = End(rank=self._rank, **line)  # type: ignore[arg-type]  # the fields are those of the record
        if self._found.end is None or (self._found.end.is_whole and not end.is_whole):
            self._found.end = end


def _items(values: object) -> Iterator[tuple[str, object]]:
    if isinstance(values, Mapping):
        yield from values.items()


def _without_times(values: object) -> Iterator[tuple[str, object]]:
    return ((name, value) for name, value in _items(values) if not name.endswith(TIMED))


def same(left: object, right: object) -> bool:
    """Return whether two values are equal to the last bit; NaN equals NaN, 0.0 does not equal -0.0."""
    if isinstance(left, float) and isinstance(right, float):
        if left != left or right != right:
            return left != left and right != right
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return left == right
