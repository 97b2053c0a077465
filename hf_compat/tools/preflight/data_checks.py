"""Check the training data up to its first update, and compare its numbers with the model."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import numpy as np
import torch
from torch import nn

from hf_compat.data.collators import raise_for_bad_batch
from hf_compat.engine.windows import READ_PARAMETERS
from hf_compat.errors import HfCompatError
from hf_compat.interop.transformers_models import is_causal_lm, unwrap_peft
from hf_compat.runtime.inspection import calling_like_upstream, has_length
from hf_compat.runtime.nested import find_batch_size
from hf_compat.tools.preflight.report import line_of
from hf_compat.tools.preflight.session import Session, without_workers
from hf_compat.tools.preflight.snapshot import one_shot_iterators
from hf_compat.tools.until_train import overrides
from hf_compat.trainer import Trainer

CHECK, NUMBERS = "training data", "numbers"
_NOT_AGAIN = (
    "it reads from an iterator, which gives each sample once: a look at them would take them away from the run "
    "({kind}). Nothing was read."
)
_IGNORED = -100
_MOST_ROWS = 100_000
_MOST_LENGTHS = 5_000
_LABELS = ("labels", "label", "label_ids")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
# Learned positions may begin behind some that stand for padding.
_MOST_OFFSET = 4
_TRUNCATE = "truncate when tokenizing: `tokenizer(…, truncation=True, max_length=…)`"


def check_training_data(session: Session) -> None:
    """Make the training loader, count its updates, and collate the micro-batches of the first update."""
    trainer = session.trainer
    held = one_shot_iterators(trainer.train_dataset)
    if held:
        session.leave_out(CHECK, _NOT_AGAIN.format(kind=type(held[0]).__name__))
        with session.on_a_copy(name="data"):
            try:
                session.counts = trainer.run_counts(trainer.args, trainer.get_train_dataloader())
            except Exception as error:
                session.raised(error, CHECK, "The training loader cannot be made")
        return
    with session.on_a_copy(name="data"):
        try:
            _read(session)
            session.checked.append(CHECK)
        except Exception as error:
            session.raised(error, CHECK, "The first batch cannot be made", _way_out(session, error))
        if trainer.args.remove_unused_columns:  # columns that are removed before the collator sees them
            trainer._set_signature_columns_if_needed()
            known, first = trainer._signature_columns or [], _first_sample(trainer)
            session.dropped_columns = tuple(str(name) for name in first if name not in known)


def _read(session: Session) -> None:
    trainer = session.trainer
    without_workers(trainer.args)
    loader = session.loader = trainer.get_train_dataloader()
    session.counts = trainer.run_counts(trainer.args, loader)
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(0)
    read = calling_like_upstream(trainer.get_batch_samples, READ_PARAMETERS)
    batches, _ = read(iter(loader), trainer.args.gradient_accumulation_steps, trainer.args.device)
    if not batches:
        session.error(CHECK, "The training data gives no batch: nothing would be trained.", "look how it was filtered")
    if not any(overrides(trainer, name) for name in ("training_step", "compute_loss", "_prepare_inputs")):
        for batch in batches:
            raise_for_bad_batch(batch, "the model")
    session.batches = list(batches)


def _way_out(session: Session, error: Exception) -> str:
    """Name the columns from which a collator cannot make a tensor."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, HfCompatError) or ("pad" in text and "token" in text):
        return ""
    odd = columns_without_numbers(session.trainer)
    if not odd:
        return ""
    return (
        f"the collator was given {odd}, of which no tensor can be made: remove it from the data set, or let "
        "`data_collator` leave it out"
    )


def columns_without_numbers(trainer: Trainer) -> str:
    """Name the columns of the first training sample that reach the collator and hold no numbers."""
    first = _first_sample(trainer)
    kept = set(first)
    if trainer.args.remove_unused_columns:
        kept &= set(trainer._signature_columns or first)
    odd = {name: value for name, value in first.items() if name in kept and not _is_numeric(value)}
    return ", ".join(f"{name!r} ({_kind_of(value)})" for name, value in odd.items())


def _is_numeric(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_numeric(part) for part in value[:4])
    return not isinstance(value, (str, bytes, Mapping, type(None)))


def _kind_of(value: object) -> str:
    inner = value[0] if isinstance(value, (list, tuple)) and value else None
    return "None" if value is None else type(value).__name__ if inner is None else f"list of {type(inner).__name__}"


def _first_sample(trainer: Trainer) -> Mapping[object, object]:
    """The columns of the first sample of a map-style data set. Empty for others, and for a stream."""
    dataset = trainer.train_dataset
    is_stream = isinstance(dataset, torch.utils.data.IterableDataset) or not has_length(dataset)
    if is_stream or not hasattr(dataset, "__getitem__"):
        return {}
    try:
        first = dataset[0] if len(dataset) else None
    except Exception:  # the check of the data reports it
        return {}
    return first if isinstance(first, Mapping) else {}


def check_columns(session: Session) -> None:
    """Report removed columns that overridden steps mention."""
    # The texts in the code of overridden steps, each with its function
    trainer, asked = session.trainer, dict[str, str]()
    methods = [getattr(type(trainer), name) for name in ("compute_loss", "training_step") if overrides(trainer, name)]
    for function in (*methods, trainer.compute_loss_func):
        if inspect.isfunction(function):
            asked |= {text: function.__name__ for text in function.__code__.co_consts if isinstance(text, str)}
    told = " ".join(finding.problem + finding.way_out for finding in session.findings)
    for name in session.dropped_columns:
        if name in asked and repr(name) not in told:
            session.warn("columns", *removed_column(session, name, asked[name]))


def removed_column(session: Session, name: str, who: str) -> tuple[str, str]:
    """The problem of code that asks for a removed column, and the way out."""
    return (
        f"`{who}` asks for {name!r}, and `remove_unused_columns=True` removes that column: "
        f"{type(session.trainer.model).__name__}.forward does not take it.",
        "set `remove_unused_columns=False`, and let the collator make a tensor of it",
    )


class _Sender(pickle.Pickler):
    """Pickles as for workers, but without tensors and arrays, which may be large and can always be sent."""

    def reducer_override(self, thing: object) -> object:  # type: ignore[override]  # pickle accepts any reduction
        return (int, ()) if isinstance(thing, (torch.Tensor, np.ndarray)) else NotImplemented


def check_workers(session: Session) -> None:
    """Pickle the objects that are sent to workers, unless workers are forked or the data can be read only once."""
    trainer, args = session.trainer, session.trainer.args
    context = args.dataloader_multiprocessing_context or multiprocessing.get_start_method(allow_none=True) or "fork"
    is_forked = getattr(context, "_name", context) == "fork"
    if not args.dataloader_num_workers or is_forked or one_shot_iterators(trainer.train_dataset):
        return
    # A loader of the user's own may have no workers
    parts = {"train_dataset": trainer.train_dataset, "eval_dataset": trainer.eval_dataset}
    loaders = {name: f"get_{name.removesuffix('_dataset')}_dataloader" for name in parts}
    parts = {name: part for name, part in parts.items() if not overrides(trainer, loaders[name])}
    if parts:
        parts["data_collator"] = trainer.data_collator
    for name, part in parts.items():
        try:
            with open(os.devnull, "wb") as nowhere:
                _Sender(nowhere).dump(part)
        except Exception as error:
            session.error(
                "workers",
                f"`{name}` cannot be sent to the {args.dataloader_num_workers} workers, which are started by "
                f"{getattr(context, '_name', context)!r}: {line_of(error)}",
                "define its class and its functions at the top of a module, or set `dataloader_num_workers=0`",
            )


def check_numbers(session: Session) -> None:
    """Compare labels, tokens and lengths with the model, in the first batches and in cheap columns."""
    trainer = session.trainer
    with session.checking(NUMBERS):
        model = unwrap_peft(trainer.accelerator.unwrap_model(trainer.model))
        if trainer.model_init is None and not any(p.requires_grad for p in trainer.model.parameters()):
            session.error(
                NUMBERS,
                "No parameter of the model is trained: `requires_grad` is False for all of them.",
                "call `requires_grad_(True)` on what is to be trained; an adapter needs `inference_mode=False`",
            )
        find = getattr(model, "get_input_embeddings", None)
        try:
            weight = getattr(find(), "weight", None) if callable(find) else None
        except (NotImplementedError, AttributeError):  # a model of images or sound
            weight = None
        rows = int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None
        if rows is not None:
            _check_tokens(session, rows)
        _check_labels(session, model, rows)
        _check_lengths(session, model)
        # A classifier that reads from left to right finds the end of a sequence by its padding token
        config = getattr(model, "config", None)
        is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
        is_classifier = type(model).__name__.endswith("ForSequenceClassification") and hasattr(model, "score")
        pads = [getattr(one, "pad_token_id", None) for one in (config, trainer.processing_class)]
        is_batched = any((find_batch_size(batch) or 0) > 1 for batch in session.batches)
        if is_classifier and not is_encoder_decoder and is_batched and pads == [None, None]:
            session.error(
                NUMBERS,
                f"{type(model).__name__} finds a sequence's end by its padding, and `config.pad_token_id` is None.",
                "set `model.config.pad_token_id`, to `tokenizer.pad_token_id` say",
            )


def _values_of(session: Session, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for batch in session.batches:
        if isinstance(batch, Mapping):
            found = ((name, batch[name]) for name in names if name in batch)
            yield from ((name, value) for name, value in found if isinstance(value, torch.Tensor) and value.numel())


def _check_tokens(session: Session, rows: int) -> None:
    processor = session.trainer.processing_class
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is not None and hasattr(type(tokenizer), "__len__") and len(tokenizer) > rows:
        session.warn(
            NUMBERS,
            f"The tokenizer has {len(tokenizer)} tokens, and the model has embeddings for {rows}: a token above them "
            "ends the run.",
            "call `model.resize_token_embeddings(len(tokenizer))` after tokens were added",
        )
    for name, value in _values_of(session, ("input_ids", "decoder_input_ids")):
        if not value.is_floating_point() and (int(value.min()) < 0 or int(value.max()) >= rows):
            odd = int(value.max()) if int(value.max()) >= rows else int(value.min())
            session.error(
                NUMBERS,
                f"The first batch has the token {odd} in {name!r}, and the model has embeddings for 0 to {rows - 1}.",
                "use the model's own tokenizer, or call `model.resize_token_embeddings(len(tokenizer))`",
            )
            return


def _check_labels(session: Session, model: nn.Module, rows: int | None) -> None:
    config, kind = getattr(model, "config", None), type(model).__name__
    classes = getattr(config, "num_labels", None)
    is_other = getattr(config, "problem_type", None) in ("regression", "multi_label_classification")
    if is_causal_lm(model) or kind.endswith(("LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        classes = rows
    elif "Classification" not in kind or not isinstance(classes, int) or classes < 2 or is_other:
        return
    if classes is None:
        return
    for where, name, label in _labels(session):
        if label != _IGNORED and not 0 <= label < classes:
            session.error(
                NUMBERS,
                f"{where} has {name}={label}, and the model has {classes} classes: 0 to {classes - 1}.",
                "count labels from 0, make the model with as many classes (`num_labels`), or set what is to be ignored "
                f"to {_IGNORED}",
            )
            return


def _labels(session: Session) -> Iterator[tuple[str, str, int]]:
    """Yield the whole-number labels with their places and names: of the first batches, then of cheap columns."""
    trainer, evaluated = session.trainer, session.trainer.eval_dataset
    names = list(dict.fromkeys([*trainer.label_names, *_LABELS]))
    for name, value in _values_of(session, names):
        if not value.is_floating_point() and value.dtype != torch.bool:
            yield from (("The first batch", name, label) for label in value.flatten().tolist())
    sets = {"train_dataset": trainer.train_dataset, "eval_dataset": evaluated}
    if isinstance(evaluated, dict):
        del sets["eval_dataset"]
        sets |= {f"eval_dataset[{name!r}]": part for name, part in evaluated.items()}
    for told, dataset in sets.items():
        for name in names:
            for row, label in _rows_of(dataset, name, _MOST_ROWS):
                if isinstance(label, int):
                    yield f"Row {row} of `{told}`", name, int(label)


def _check_lengths(session: Session, model: nn.Module) -> None:
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in _POSITIONS)
    positions = next((number for number in found if isinstance(number, int) and number > 0), None)
    if positions is None:
        return
    has = f"the model has {positions} positions."
    embeddings = (one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding))
    is_learned = any(0 <= size - positions <= _MOST_OFFSET for size in embeddings)
    longest = max((one.shape[1] for _, one in _values_of(session, ("input_ids",)) if one.ndim > 1), default=0)
    if longest > positions:
        report = session.error if is_learned else session.warn
        report(NUMBERS, f"The first batch is {longest} tokens long; {has}", _TRUNCATE)
        return
    for row, tokens in _rows_of(session.trainer.train_dataset, "input_ids", _MOST_LENGTHS):
        length = len(tokens) if isinstance(tokens, (list, torch.Tensor)) else 0
        if length > positions:
            session.warn(NUMBERS, f"Row {row} of `train_dataset` is {length} tokens long; {has}", _TRUNCATE)
            return


def _rows_of(dataset: object, column: str, most: int) -> Iterator[tuple[int, object]]:
    """Yield the first values of a column with their rows, if that runs no code of the user."""
    names = getattr(dataset, "column_names", None)
    if isinstance(dataset, (list, tuple)):
        rows = islice(enumerate(dataset), most)
        yield from ((place, row[column]) for place, row in rows if isinstance(row, Mapping) and column in row)
    elif isinstance(names, list) and column in names and hasattr(dataset, "with_format"):
        table = dataset.with_format(None).select_columns([column])
        yield from ((place, table[place][column]) for place in range(min(len(table), most)))
