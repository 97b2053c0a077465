"""`RunState` holds what a run needs beyond HF's files to continue exactly.

`run_state.pt` holds plain values and tensors only, so it loads with `weights_only=True`. `resume_point` says where a
run continues, also from a checkpoint of transformers. States of users' callbacks and modules are made plain here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import logging
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import nn

from hf_compat.checkpoint.files import Named, first_line, naming, refuse_huge_content
from hf_compat.checkpoint.layout import RNG_STATE_NAME, RUN_STATE_NAME, of_rank
from hf_compat.checkpoint.reading import Contents, read_torch_file
from hf_compat.checkpoint.validation import (
    COUNT,
    FLAG,
    LOSSES,
    MAPPING,
    NUMBER,
    SEED,
    TEXT,
    FieldSpec,
    list_of,
    random_states_problem,
    refuse,
    wrong_field,
)
from hf_compat.errors import CallbackError, CheckpointError, UnreadObjects, warn_once
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.translate import RunCounts
from hf_compat.runtime.seeding import LEGACY_GLOBALS, RandomStates, is_same, pack_legacy_rng, read_rng
from hf_compat.runtime.text import brief

State = TypeVar("State")
Value = Any  # of the user's own kind
Global = Any  # what torch's allow-list takes: a class, a function, or one with a name

# Weights and moments are tensors, and large: they are not walked through.
_TENSORS = frozenset({"state_dict", "optimizer_states"})
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_TYPES_OF_HYPERPARAMETERS = ("hparams_type", "datamodule_hparams_type")  # OmegaConf's
_PLAIN = (bool, int, float, complex, str, bytes, torch.Tensor, type(None))


class _Unreadable(Exception):
    """A value, and the keys and indices that lead to it, which the reader of checkpoints refuses."""

    def __init__(self, where: str, value: object) -> None:
        super().__init__(where)
        self.where = where
        self.value = value


def readable_checkpoint(checkpoint: Mapping[str, Value]) -> dict[str, Value]:
    """Make the entries of a Lightning checkpoint readable without running code, where they can be.

    NumPy's scalars become plain numbers, and arguments among hyperparameters dicts. Other values stay as they are,
    with a warning. Lightning itself warns of a torch module among hyperparameters, whose weights are saved once.

    Raises:
        CallbackError: The state of a callback, or an entry of a hook, cannot be pickled.
    """
    readable = dict(checkpoint)
    kept: list[str] = []

    def made_plain(value: Value, whose: str) -> Value:
        try:
            return readable_state(value, whose)
        except CallbackError as error:
            if not _can_be_pickled(value):
                raise
            kept.append(first_line(error).removesuffix("."))
            return value

    for key, value in checkpoint.items():
        if key in _HYPERPARAMETERS and type(value) is dict:
            readable[key] = _readable_hyperparameters(value, kept)
        elif key == "callbacks" and isinstance(value, Mapping):
            readable[key] = {name: made_plain(one, f"The state of the callback {name}") for name, one in value.items()}
        elif key not in (*_TENSORS, *_TYPES_OF_HYPERPARAMETERS):
            readable[key] = made_plain(value, f"The entry {brief(key)} of the checkpoint")
    for one in kept:
        warn_once(
            f"{one}. Reading it runs its code.\n\n"
            "Hint: give `weights_only=False` to the `fit` or `load_from_checkpoint` that needs it. Or keep numbers, "
            "texts, tensors, NumPy arrays, and lists or dicts of these."
        )
    return readable


def _can_be_pickled(value: Value) -> bool:
    try:
        torch.save(value, io.BytesIO())
    except Exception:  # a class may raise anything
        return False
    return True


def readable_state(state: State, whose: str) -> State:
    """Replace NumPy's scalars in a state by plain numbers.

    Args:
        state: Containers, numbers, texts, tensors and arrays.
        whose: Beginning of the error's sentence.

    Raises:
        CallbackError: It holds, nests or shares something that would make the whole checkpoint unreadable.
    """
    try:
        refuse_huge_content(whose, state)
        plain: State = _readable(state, "")
        return plain
    except CheckpointError as error:
        raise CallbackError(f"{error}\n\nHint: return what is nested less, and shares less.") from None
    except _Unreadable as found:
        raise CallbackError(
            f"{whose} cannot be read back from a checkpoint: it holds a {type(found.value).__name__}"
            f"{found.where and f' at {found.where}'}.\n\n"
            "Hint: return numbers, texts, tensors, NumPy arrays, and lists or dicts of these."
        ) from None


def _readable_hyperparameters(held: Mapping[str, object], kept: list[str]) -> dict[str, object]:
    """Make hyperparameters plain, and add to `kept` what stays an object."""
    readable: dict[str, object] = {}
    for name, value in held.items():
        plain = value.to_dict() if isinstance(value, TrainingArguments) else value
        plain = vars(plain) if isinstance(plain, Namespace) else plain
        if isinstance(plain, enum.Enum) and plain == plain.value:  # else its value would pass for another thing
            plain = plain.value
        plain = str(plain) if isinstance(plain, PurePath) else plain
        try:
            readable[name] = _readable(plain, name)
        except _Unreadable as found:
            readable[name] = plain
            if not isinstance(found.value, nn.Module):  # of which `save_hyperparameters` warns
                what = f"The hyperparameter {found.where} is a {type(found.value).__name__}"
                kept.append(f"{what}, which cannot be read back from a checkpoint")
    return readable


def plain_checkpoint(path: str, checkpoint: Mapping[str, Value]) -> dict[str, Value]:
    """Leave objects, for which a `Named` stands, out of the hyperparameters of a checkpoint.

    Raises:
        CheckpointError: Another entry has one.
    """
    plain: dict[str, Value] = {}
    for key, value in checkpoint.items():
        of_module = key in (*_HYPERPARAMETERS, *_TYPES_OF_HYPERPARAMETERS)
        parts = value if of_module and isinstance(value, dict) else {key: value}
        objects = {name: found for name, part in parts.items() if (found := _named_in(part)) is not None}
        if objects and not of_module:
            raise UnreadObjects(f"{path} holds a {objects[key]} under {brief(key)}, and reading it runs its code.")
        if parts is value:
            plain[key] = {name: part for name, part in value.items() if name not in objects}
        elif not objects:
            plain[key] = value
        if objects and key not in _TYPES_OF_HYPERPARAMETERS:
            told = (
                "%s: hyperparameters that are read by running code are left out: %s. `weights_only=False` reads them."
            )
            logger.warning(told, path, ", ".join(f"{name} ({kind})" for name, kind in objects.items()))
    return plain


def _named_in(value: Value) -> str | None:
    """The name of the first class for whose object or for which itself a `Named` stands. None if there is none."""
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, Named):
        return f"{kind.module}.{kind.name}"
    parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    inside = parts if isinstance(parts, (list, tuple, set)) else ()
    return next((name for part in inside if (name := _named_in(part)) is not None), None)


def _readable(value: Value, where: str) -> Value:
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        return value.item()
    if type(value) in (dict, OrderedDict):
        return type(value)(
            (_readable(key, where), _readable(item, f"{where}[{brief(key)}]")) for key, item in value.items()
        )
    if type(value) in (list, tuple, set):
        return type(value)(_readable(item, f"{where}[{index}]") for index, item in enumerate(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return value
    if isinstance(value, nn.Module):
        raise _Unreadable(where, value)
    # torch may know how to read other values back without running anything in them
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        with reading_arrays():
            torch.load(file, weights_only=True)
    except Exception:
        raise _Unreadable(where, value) from None
    return value


# The types and functions that make up NumPy's arrays of numbers and texts, for torch's allow-list
ARRAY_GLOBALS: Sequence[Global] = (*LEGACY_GLOBALS, *{type(np.dtype(kind)) for kind in "?bhilqBHILQefdFDSU"})


def reading_arrays() -> contextlib.AbstractContextManager[None]:
    """Let torch read NumPy's arrays back as it reads tensors. Nothing in them is run."""
    return torch.serialization.safe_globals([*ARRAY_GLOBALS])


logger = logging.getLogger(__name__)

RUN_STATE_FILE = re.compile(r"run_state(_\d+)?\.pt")  # of one process, or of one of several
RUN_STATE_VERSION = 2

PlainState = dict[str, Any]  # dicts, lists, numbers, strings and tensors, nested: what `weights_only=True` loads


class SavedAt(StrEnum):
    """When a checkpoint was written. What came before is not repeated, and what comes after is complete."""

    UPDATE = "update"  # after an update's log and evaluation, before the epoch's end
    EPOCH_END = "epoch_end"  # after the log and evaluation of the epoch's end


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """Values that a checkpoint holds as a dict."""

    KINDS: ClassVar[Mapping[str, FieldSpec]]
    NEEDED: ClassVar[tuple[str, ...]]

    def to_plain(self) -> PlainState:
        """Convert them to nested dicts, with the version."""
        return {"version": RUN_STATE_VERSION, **vars(self)}

    @classmethod
    def read(cls, plain: object, what: str = "The position of the data", known: RandomStates | None = None) -> Self:
        """Read the values from a content of unknown origin. `what` begins an error's sentence.

        `known` are the random states that the content leaves out.
        """
        if not isinstance(plain, Mapping):
            raise CheckpointError(f"{what} is {brief(plain, 60)}, not fields.")
        if plain.get("version") != RUN_STATE_VERSION:
            raise CheckpointError(f"{what} was written by another version of hf_compat, or by another program.")
        wrong = wrong_field({**dict.fromkeys(cls.NEEDED), **plain}, cls.KINDS)
        for name in ("rng", "epoch_rng"):
            if wrong is None and plain.get(name) is not None:
                if isinstance(plain[name], Mapping):
                    plain = {**plain, name: {**(known or {}), **plain[name]}}
                problem = random_states_problem(plain[name])
                wrong = None if problem is None else f"`{name}` {problem.removeprefix('it ')}"
        if wrong is not None:
            raise CheckpointError(f"{what} cannot be read: {wrong}.")
        return cls(**{name: plain[name] for name in cls.__dataclass_fields__ if name in plain})


@dataclass(frozen=True, kw_only=True)
class DataPosition(_Stored):
    """How far one rank has read its training data."""

    KINDS = {
        **dict.fromkeys(("epoch", "micro_batches_done", "updates_done"), COUNT),
        **dict.fromkeys(("window_size", "micro_batches_per_epoch", "micro_batch_size"), COUNT.or_none()),
        "shuffle_seed": SEED.or_none(),
        "shared": FieldSpec("a list of batches", list).or_none(),
        **dict.fromkeys(("is_open", "is_over"), FLAG),
    }
    NEEDED = ("epoch",)

    epoch: int  # the current epoch, or between two epochs the next one
    is_open: bool = False  # the pass over the data of `epoch` has begun
    is_over: bool = False  # no window of `epoch` is left, as its data has ended or a callback has ended it
    micro_batches_done: int = 0  # micro-batches of `epoch` that are trained
    window_size: int | None = None  # micro-batches of an update
    micro_batches_per_epoch: int | None = None  # micro-batches of an epoch. For endless data, those of the whole run.
    micro_batch_size: int | None = None  # samples of a micro-batch of this rank, if the loader says so
    lookahead: Any = None  # the batch that the loader has read ahead
    shared: list[object] | None = None  # parts of the batches that processes exchanged last, which are not trained yet
    source: Any = None  # the state of a data set, or loader, that knows its own position
    epoch_rng: PlainState | None = None  # the random states from which the epoch's order was drawn
    rng: PlainState | None = None  # the random states at this moment
    shuffle_seed: int | None = None  # Torch's seed for each epoch's order, if no `data_seed` was given
    updates_done: int = 0  # updates of `epoch`, if nothing else is known. `transformers` writes no more.

    def beside(self, known: RandomStates) -> Self:
        """Leave out the random states that equal those `known`, which a file of their own holds."""
        rng, epoch_rng = (
            None if states is None else {name: one for name, one in states.items() if not is_same(one, known.get(name))}
            for states in (self.rng, self.epoch_rng)
        )
        return dataclasses.replace(self, rng=rng, epoch_rng=epoch_rng)


@dataclass(frozen=True, kw_only=True)
class RunState(_Stored):
    """The state of an unfinished run, as `run_state.pt` holds it."""

    KINDS = {
        "data": MAPPING,
        "moment": FieldSpec("a moment of a save", str, fits=list(SavedAt).__contains__),
        **dict.fromkeys(("world_size", "sharing", "sequence"), COUNT),
        **dict.fromkeys(("samples_per_micro_batch", "workers"), COUNT.or_none()),
        **dict.fromkeys(("grad_norm", "learning_rate"), NUMBER.or_none()),
        **dict.fromkeys(("losses", "callbacks", "extras"), MAPPING),
        "evaluated": list_of("names", TEXT),
        "keeps_workers": FLAG,
    }
    NEEDED = ("data", "moment")

    data: DataPosition  # how far this rank has read its data
    moment: SavedAt = SavedAt.UPDATE  # when it was written
    world_size: int = 1
    sharing: int = 1  # processes of a model, which read the same batches
    sequence: int = 1  # processes of a sequence, which exchange their batches
    # Samples of a micro-batch of all processes together. None if it is not known.
    samples_per_micro_batch: int | None = None
    losses: PlainState = field(default_factory=dict)  # the loss log's state (`LossLog.state_dict`)
    grad_norm: float | None = None  # norm of the last update's gradients, which the log of the epoch's end repeats
    learning_rate: float | None = None  # of the last update
    callbacks: PlainState = field(default_factory=dict)  # states of Lightning callbacks by `state_key`
    extras: PlainState = field(default_factory=dict)  # what Lightning callbacks have put into the checkpoint
    evaluated: list[str] = field(default_factory=list)  # evaluation sets whose persistent workers had begun
    workers: int | None = None  # loader workers of the training data. None if it is not known.
    keeps_workers: bool = False  # whether they were persistent

    def to_plain(self) -> PlainState:
        return {**super().to_plain(), "data": self.data.to_plain(), "moment": self.moment.value}

    @classmethod
    def load(
        cls, checkpoint: str, rank: int = 0, world_size: int = 1, random_states: RandomStates | None = None
    ) -> RunState | None:
        """Read a rank's state from a checkpoint folder. None if another program wrote it.

        `random_states` are those of the folder's own file for them. If another number of processes wrote it, the first
        file says how far all were. Its loss is their mean.
        """
        contents = Contents(checkpoint)
        own = contents.find(of_rank(RUN_STATE_NAME, rank, world_size))
        # without a list of the files of all ranks, which each of them would make
        further = (of_rank(RUN_STATE_NAME, place, 2) for place in (world_size - 1, world_size))
        has_last, has_more = (contents.find(name) is not None for name in further)
        if own is not None and not has_more and (has_last or world_size == 1):
            return cls.read_file(own, random_states)
        names = list(filter(RUN_STATE_FILE.fullmatch, contents.names()))
        states = [cls.read_file(contents.need(name), random_states) for name in names]
        if not states:
            return None
        sums = [float(state.losses["tr_loss"]) for state in states if "tr_loss" in state.losses]
        joined = {"tr_loss": sum(sums) / len(sums)} if sums else {}
        return dataclasses.replace(states[0], losses={**states[0].losses, **joined})

    @classmethod
    def read_file(cls, path: str, random_states: RandomStates | None = None) -> RunState:
        """Read one `run_state.pt`. Without the file of random states beside it, those of this process count."""
        content = read_torch_file(path, allowed=ARRAY_GLOBALS)
        state = cls.read(content, path)
        with naming(path):
            data = DataPosition.read(state.data, known=random_states or read_rng())
            if random_states is None and content["data"].get("rng") == {}:
                logger.info("Didn't find an RNG file beside %s, reproducibility is not guaranteed.", path)
            state = dataclasses.replace(state, data=data, moment=SavedAt(state.moment))
        needed = ("tr_loss", "total_loss", "last_logged", "first_update") if state.losses else ()
        wrong = wrong_field({**dict.fromkeys(needed), **state.losses}, LOSSES, "losses.")
        if wrong is not None:
            raise CheckpointError(f"{path} cannot be read: {wrong}.")
        return state


def read_random_states(checkpoint: str, rank: int = 0, world_size: int = 1) -> PlainState | None:
    """Read a rank's states from the file that `transformers` has for them. With another number of ranks, rank 0's."""
    contents = Contents(checkpoint)
    for name in (of_rank(RNG_STATE_NAME, rank, world_size), of_rank(RNG_STATE_NAME, 0, 2), RNG_STATE_NAME):
        path = contents.find(name)
        if path is not None:
            states = read_torch_file(path, allowed=LEGACY_GLOBALS)
            refuse(path, random_states_problem(states))
            return pack_legacy_rng(states)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Where a run continues."""

    epoch: int = 0  # the epoch that comes first
    skip_micro_batches: int = 0  # micro-batches of it to skip
    position: DataPosition | None = None  # the exact position of the data in that epoch
    epoch_is_over: bool = False  # only the end of that epoch is left
    is_finished: bool = False  # nothing is left to train
    rng: PlainState | None = None  # the random states to restore once the data is in place, as upstream does
    has_same_cut: bool = False  # the data is cut into updates as before, so the loss sums continue
    shuffle_seed: int | None = None  # Torch's seed for the orders of the run, whatever torch was seeded with since

    @classmethod
    def at(cls, data: DataPosition, is_over: bool, is_finished: bool = False) -> Self:
        """Continue at an exact position. `is_over` says that no window of its epoch is left."""
        return cls(
            epoch=data.epoch,
            position=data,
            epoch_is_over=data.is_open and is_over and not is_finished,
            is_finished=is_finished,
            rng=data.rng,
            has_same_cut=True,
            shuffle_seed=data.shuffle_seed,
        )


def resume_point(
    state: RunState | None,
    updates_done: int,
    counts: RunCounts,
    args: TrainingArguments,
    samples: int,
    sharing: int = 1,
    sequence: int = 1,
) -> ResumePoint:
    """Decide where a run continues, from a checkpoint of this package, of Lightning or of transformers (no `state`).

    `samples` are those of a micro-batch of all processes together, `sharing` the processes of a model, `sequence` those
    of a sequence. A warning tells of data that was cut in another way.
    """
    same_cut = False
    if state is not None:
        ranks_now = args.world_size, samples, sharing, sequence
        ranks_before = state.world_size, state.samples_per_micro_batch or samples, state.sharing, state.sequence
        epochs_now = counts.micro_batches_per_epoch, args.gradient_accumulation_steps
        # the only epoch of endless data is as long as the run
        length_before = epochs_now[0] if counts.is_endless else state.data.micro_batches_per_epoch
        epochs_before = length_before, state.data.window_size
        same_cut = (ranks_before, epochs_before) == (ranks_now, epochs_now)
        if ranks_before != ranks_now:
            before, now = (
                f"{world} process(es){f', {of_model} to a model,' * (of_model > 1)}"
                f"{f', {of_sequence} to a sequence,' * (of_sequence > 1)} with {size} samples to a micro-batch"
                for world, size, of_model, of_sequence in (ranks_before, ranks_now)
            )
            logger.warning(
                "The checkpoint is of %s, now there are %s: the data goes on after as many samples; random numbers are "
                "not those of the uninterrupted run.",
                before,
                now,
            )
        elif epochs_before != epochs_now:
            logger.warning(
                "The checkpoint's epochs had %s micro-batches in windows of %s, now they have %s in windows of %s: "
                "the data goes on after as many updates, but the run is not the one that was interrupted.",
                *epochs_before,
                *epochs_now,
            )
    if state is not None and same_cut and not args.ignore_data_skip:
        # Take the very position that the state holds
        data = state.data
        run_is_over = updates_done >= counts.max_updates or data.epoch >= counts.num_train_epochs
        at_the_end = updates_done == counts.max_updates and data.epoch < counts.num_train_epochs
        is_finished = run_is_over and not (data.is_open and state.moment is SavedAt.UPDATE and at_the_end)
        is_over = run_is_over or data.is_over or data.micro_batches_done >= counts.micro_batches_per_epoch
        return ResumePoint.at(data, is_over, is_finished)
    window_size = length = None
    if state is not None and not args.ignore_data_skip:
        window_size, length = state.data.window_size, state.data.micro_batches_per_epoch
    if state is not None and window_size is not None and length is not None:
        # Count samples: the data goes on after as many as were trained, however they were cut
        size = state.samples_per_micro_batch or samples
        epoch, updates = (0, updates_done) if counts.is_endless else divmod(updates_done, -(-length // window_size))
        skip = updates * window_size * size // samples
    else:
        # Count updates, as upstream does
        epoch, updates = divmod(updates_done, counts.updates_per_epoch)
        skip = 0 if args.ignore_data_skip else updates * args.gradient_accumulation_steps
    return ResumePoint(
        epoch=epoch,
        skip_micro_batches=skip,
        is_finished=updates_done >= counts.max_updates or epoch >= counts.num_train_epochs,
        has_same_cut=same_cut,
        shuffle_seed=None if state is None else state.data.shuffle_seed,
    )
