"""`Row`: all columns of an argument, and the tables of rows, which `fields.py` fills.

A column may hold conditions (`Inert`) and derivations (`Derived`). `inert.py` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from hf_compat.hf.value_types import Range, ValueType

Arguments = TypeVar("Arguments")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """What a run is given beside its arguments. With the defaults, only the arguments are known."""

    optimizer: str | None = None  # the parameter with which the user passes an optimizer
    has_schedule: bool = False  # whether the user passes a schedule
    unread: Callable[[], Mapping[str, str]] = dict  # returns the arguments that the optimizer does not read, and why
    loss: str | None = None  # the user's own function or method that computes the loss
    metrics: Literal["unknown", "none", "function", "torchmetrics"] = "unknown"  # what `compute_metrics` is
    generates: bool = True  # whether predictions may be generated
    trains_on_stream: bool = False  # whether the training data are an `IterableDataset`
    has_length: bool = True  # whether the training data set has one
    has_other_sets: bool = True  # whether there may be a data set that is no `IterableDataset`
    has_config: bool = True  # whether the model has a configuration
    has_trackers: bool = False  # whether a callback reports to a tracker
    prints_logs: bool = True  # whether ProgressCallback or PrinterCallback of ours prints logs
    reads: Callable[[str], bool] = lambda _: False  # whether the user's own callbacks and methods mention a name


@dataclass(frozen=True)
class Inert(Generic[Arguments]):
    """A condition under which an argument has no effect.

    Args:
        why: The reason, for the table and for messages.
        when: Whether it holds. A text is a more precise reason.
        in_evaluation: Whether it concerns evaluations outside of a training, too.
    """

    why: str
    when: Callable[[Arguments, RunParts], bool | str]
    _: KW_ONLY
    in_evaluation: bool = False


@dataclass(frozen=True)
class Derived(Generic[Arguments]):
    """How an argument follows from another one. The user did not set such a value.

    Args:
        source: The other argument.
        value: Returns what the argument becomes.
    """

    source: str
    value: Callable[[Arguments], object]


@dataclass(frozen=True, slots=True)
class Row:
    """All about one argument except name, type hint, default and help."""

    to: str  # the setting of Lightning or of this package that the value becomes
    # How `hf-compat eject` treats a value other than the default. The project sets it (`taken`), does not need it
    # (`nothing`), or omits it (`left out`). `refused` and `sharded` values cannot be ejected.
    ejected: Literal["taken", "nothing", "left out", "refused", "sharded"]
    _: KW_ONLY
    # eject's message about a value that it omits or refuses, or Lightning's strategy for a sharded one
    says: str = "the project has no word for it"
    subject: str | None = None  # Its group in `--help`. None puts it among the less common ones.
    kind: ValueType | None = None  # its type, in place of the hint's
    allowed: Range | None = None  # the range of its numbers, if its type is the hint's
    takes_none: bool = False  # accept None, and leave it to the rules over several fields or to upstream's meaning
    none_means: object = None  # the value that None becomes
    way_out: str = ""  # The hint for a wrong value. Empty uses the type's hint.
    # normalises an allowed value, when the arguments are complete and at every later assignment
    form: Callable[..., object] | None = None
    # The equivalent setting of the user's own `lightning.Trainer`, which decides in a native run. Empty compares
    # the two. None means that the argument applies in a native run, too.
    native: str | None = None
    data: bool = False  # Whether data loading reads it. HFModule or HFDataModule then sets it for both.
    loader: str = ""  # the attribute of a training DataLoader that holds it
    of_trainer: bool = False  # whether the Trainer reads it in its constructor, so that a trial's value comes too late
    reaches_out: bool = False  # Whether it works beyond an update or a folder. A preflight takes its default instead.
    normal: object = None  # the default's form in complete arguments, if it is not that of the field
    derived: Derived[Any] | None = None  # how it follows from another argument
    inert: tuple[Inert[Any], ...] = ()  # the conditions under which a value other than the default has no effect
    per_rank: bool = False  # whether each rank may have its own value. All others are compared when training begins


# One row per field, in field order, as `fields.py` and `arguments.py` declare them.
ROWS: dict[str, Row] = {}


class OwnArgument(NamedTuple):
    """An argument that transformers does not have. As a class attribute it becomes its default."""

    default: object
    help: str
    row: Row

    def __set_name__(self, owner: type, name: str) -> None:
        OWN_ARGUMENTS[name], OWN_ROWS[name] = self, self.row
        setattr(owner, name, self.default if self.row.normal is None else self.row.normal)


OWN_ARGUMENTS: dict[str, OwnArgument] = {}
OWN_ROWS: dict[str, Row] = {}


def without_effect(*conditions: object) -> list[str]:
    """Name the arguments that any of the conditions leaves without effect."""
    return [name for name, row in ROWS.items() if not set(conditions).isdisjoint(row.inert)]
