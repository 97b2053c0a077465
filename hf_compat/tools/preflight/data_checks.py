"""The training data up to its first update: loader, samples, collator, and the columns that are taken away."""

from __future__ import annotations

import inspect
import io
import multiprocessing
import pickle
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
import torch

from hf_compat.data.collators import raise_for_bad_batch
from hf_compat.errors import HfCompatError
from hf_compat.runtime.inspection import fitting_arguments, has_length
from hf_compat.tools.preflight.explaining import line_of
from hf_compat.tools.preflight.session import Session
from hf_compat.tools.preflight.snapshot import one_shot_iterators
from hf_compat.tools.preflight.subject import overrides, without_workers

CHECK = "training data"
_NOT_AGAIN = (
    "it reads from an iterator, which gives each sample once: a look at them would take them away from the run "
    "({kind}). Nothing was read."
)


def check_training_data(session: Session) -> None:
    """Make the training loader, count its updates, and collate the micro-batches of the first update."""
    held = one_shot_iterators(session.trainer.train_dataset)
    if held:
        session.leave_out(CHECK, _NOT_AGAIN.format(kind=type(held[0]).__name__))
        _count_unread(session)
        return
    _check_workers(session)
    with session.on_a_copy(name="data"):
        try:
            _read(session)
            session.checked.append(CHECK)
        except Exception as error:
            session.raised(error, CHECK, "The first batch cannot be made", _way_out(session, error))
        session.dropped_columns = tuple(_dropped_columns(session))


def _count_unread(session: Session) -> None:
    """Count the updates of data that is not to be read."""
    with session.on_a_copy(name="data"):
        try:
            trainer = session.trainer
            loader = trainer.get_train_dataloader()
            session.counts = trainer.run_counts(trainer.args, loader)
        except Exception as error:
            session.raised(error, CHECK, "The training loader cannot be made")


def _read(session: Session) -> None:
    trainer = session.trainer
    without_workers(trainer.args)
    loader = trainer.get_train_dataloader()
    session.counts = trainer.run_counts(trainer.args, loader)
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(0)
    wanted = (iter(loader), trainer.args.gradient_accumulation_steps, trainer.args.device)
    batches, _ = trainer.get_batch_samples(*fitting_arguments(trainer.get_batch_samples, wanted))
    if not batches:
        session.error(CHECK, "The training data gives no batch: nothing would be trained.", "look how it was filtered")
    if not any(overrides(trainer, name) for name in ("training_step", "compute_loss", "_prepare_inputs")):
        for batch in batches:
            raise_for_bad_batch(batch, "the model")
    session.batches = list(batches)


def _way_out(session: Session, error: Exception) -> str:
    """Name the columns that a collator cannot make a tensor of, where there are some."""
    if isinstance(error, HfCompatError):
        return ""
    text = f"{type(error).__name__}: {error}"
    if "pad" in text and "token" in text:
        return ""
    named = list(_columns_without_numbers(session))
    if not named:
        return ""
    return (
        f"the collator was given {', '.join(named)}, of which no tensor can be made: remove it from the data set, or "
        "let `data_collator` leave it out"
    )


def _columns_without_numbers(session: Session) -> Iterator[str]:
    """Yield the columns that reach the collator and hold text, nothing, or lists of these."""
    first = next(iter(samples_of(session.trainer.train_dataset, 1)), None)
    if not isinstance(first, Mapping):
        return
    kept = set(first)
    if session.trainer.args.remove_unused_columns:
        kept &= set(session.trainer._signature_columns or first)
    for name in first:
        value = first[name]
        if name in kept and not _is_numeric(value):
            yield f"{name!r} ({_kind_of(value)})"


def _is_numeric(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_numeric(part) for part in value[:4])
    return not isinstance(value, (str, bytes, Mapping, type(None)))


def _kind_of(value: object) -> str:
    inner = value[0] if isinstance(value, (list, tuple)) and value else None
    return "None" if value is None else type(value).__name__ if inner is None else f"list of {type(inner).__name__}"


def samples_of(dataset: object, most: int) -> list[object]:
    """Return the first samples of a map-style data set; none of a stream, whose reading is the run's."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not has_length(dataset):
        return []
    if not hasattr(dataset, "__getitem__"):
        return []
    try:
        return [dataset[index] for index in range(min(len(dataset), most))]  # type: ignore[arg-type]  # has_length
    except Exception:  # the check of the data says what is wrong with it
        return []


def _dropped_columns(session: Session) -> Iterator[str]:
    """Yield the columns that are removed before the collator sees them."""
    trainer = session.trainer
    if not trainer.args.remove_unused_columns:
        return
    first = next(iter(samples_of(trainer.train_dataset, 1)), None)
    trainer._set_signature_columns_if_needed()
    known = trainer._signature_columns or []
    if isinstance(first, Mapping):
        yield from (str(name) for name in first if name not in known)


def check_columns(session: Session) -> None:
    """Name columns that are removed, and that code of a subclass asks its inputs for."""
    # The texts in the code of overridden steps, each with its method's name
    found: dict[str, str] = {}
    for method in ("compute_loss", "training_step"):
        if overrides(session.trainer, method):
            found |= _texts_in(getattr(type(session.trainer), method))
    asked = found | _texts_in(session.trainer.compute_loss_func)
    told = " ".join(finding.problem + finding.way_out for finding in session.findings)
    for name in session.dropped_columns:
        if name in asked and repr(name) not in told:
            session.warn("columns", *removed_column(session, name, asked[name]))


def removed_column(session: Session, name: str, who: str) -> tuple[str, str]:
    """Return what is wrong where somebody asks for a column that is removed, and the way out."""
    return (
        f"`{who}` asks for {name!r}, and `remove_unused_columns=True` removes that column: "
        f"{type(session.trainer.model).__name__}.forward does not take it.",
        "set `remove_unused_columns=False`, and let the collator make a tensor of it",
    )


def _texts_in(function: object) -> dict[str, str]:
    if not inspect.isfunction(function):
        return {}
    return {text: function.__name__ for text in function.__code__.co_consts if isinstance(text, str)}


class _Nowhere(io.RawIOBase):
    """Takes what is written, and keeps nothing."""

    def write(self, data: object) -> int:
        return len(memoryview(data)) if isinstance(data, (bytes, bytearray, memoryview)) else 0


class _Sender(pickle.Pickler):
    """Pickles as it is done for workers, without their numbers, which may be large and can always be sent."""

    def reducer_override(self, thing: object) -> object:  # type: ignore[override]  # pickle takes what is said here
        return (int, ()) if isinstance(thing, (torch.Tensor, np.ndarray)) else NotImplemented


def _check_workers(session: Session) -> None:
    """Pickle what workers are sent, where they are started anew and not forked."""
    trainer = session.trainer
    args = trainer.args
    if not args.dataloader_num_workers:
        return
    context = args.dataloader_multiprocessing_context or multiprocessing.get_start_method(allow_none=True) or "fork"
    if getattr(context, "_name", context) == "fork":
        return
    parts = {"train_dataset": trainer.train_dataset, "eval_dataset": trainer.eval_dataset}
    for name, part in {**parts, "data_collator": trainer.data_collator}.items():
        try:
            _Sender(_Nowhere()).dump(part)
        except Exception as error:
            session.error(
                "workers",
                f"`{name}` cannot be sent to the {args.dataloader_num_workers} workers, which are started by "
                f"{getattr(context, '_name', context)!r}: {line_of(error)}",
                "define its class and its functions at the top of a module, or set `dataloader_num_workers=0`",
            )


def rows_of(dataset: object, column: str, most: int) -> Iterator[tuple[int, object]]:
    """Yield a column's values with their rows, where that costs no work of the user's code.

    Args:
        dataset: A list of mappings, or a table of `datasets`; nothing is yielded of others.
        column: Its name.
        most: Rows that are looked at.
    """
    names = getattr(dataset, "column_names", None)
    if isinstance(dataset, (list, tuple)):
        rows = islice(enumerate(dataset), most)
        yield from ((place, row[column]) for place, row in rows if isinstance(row, Mapping) and column in row)
    elif isinstance(names, list) and column in names and hasattr(dataset, "with_format"):
        table = dataset.with_format(None).select_columns([column])
        yield from ((place, table[place][column]) for place in range(min(len(table), most)))
