"""What the numbers of the data mean to the model: classes, tokens, positions. Nothing is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from hf_compat.data.types import Batch
from hf_compat.interop.transformers_models import is_causal_lm, unwrap_peft
from hf_compat.tools.preflight.data_checks import rows_of
from hf_compat.tools.preflight.session import Session

CHECK = "numbers"
_IGNORED = -100
_MOST_ROWS = 100_000
_MOST_LENGTHS = 5_000
_LABELS = ("labels", "label", "label_ids")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
# Learned positions may begin behind some that stand for padding.
_MOST_OFFSET = 4


def check_numbers(session: Session) -> None:
    """Compare labels, tokens and lengths with the model, in the first batches and in what can be read without work."""
    with session.checking(CHECK):
        model = unwrap_peft(session.trainer.accelerator.unwrap_model(session.trainer.model))
        if session.trainer.model_init is None and not any(p.requires_grad for p in session.trainer.model.parameters()):
            session.error(
                CHECK,
                "No parameter of the model is trained: `requires_grad` is False for all of them.",
                "call `requires_grad_(True)` on what is to be trained; an adapter needs `inference_mode=False`",
            )
        _check_vocabulary(session, model)
        _check_labels(session, model)
        _check_tokens(session, model)
        _check_lengths(session, model)
        # Look for the padding token that a classifier of sequences finds their end by
        config = getattr(model, "config", None)
        is_decoder = type(model).__name__.endswith("ForSequenceClassification") and not getattr(
            config, "is_encoder_decoder", False
        )
        asks = is_decoder and is_causal_family(model)
        if asks and getattr(config, "pad_token_id", None) is None and session.trainer._train_batch_size > 1:
            pad = getattr(session.trainer.processing_class, "pad_token_id", None)
            if pad is None:  # the Trainer gives the model the tokenizer's
                session.error(
                    CHECK,
                    f"{type(model).__name__} finds a sequence's end by its padding, and `config.pad_token_id` is None.",
                    "set `model.config.pad_token_id`, to `tokenizer.pad_token_id` say",
                )


def _embedding_rows(model: nn.Module) -> int | None:
    """Return the tokens that the model has a vector for."""
    find = getattr(model, "get_input_embeddings", None)
    if not callable(find):
        return None
    try:
        weight = getattr(find(), "weight", None)
    except (NotImplementedError, AttributeError):  # a model of images or sound
        return None
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None


def _check_vocabulary(session: Session, model: nn.Module) -> None:
    rows, processor = _embedding_rows(model), session.trainer.processing_class
    tokenizer = getattr(processor, "tokenizer", processor)
    if rows is None or tokenizer is None or not hasattr(type(tokenizer), "__len__"):
        return
    if len(tokenizer) > rows:
        session.warn(
            CHECK,
            f"The tokenizer has {len(tokenizer)} tokens, and the model has embeddings for {rows}: a token above them "
            "ends the run.",
            "call `model.resize_token_embeddings(len(tokenizer))` after tokens were added",
        )


def _values_of(batches: Iterable[Batch], names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for batch in batches:
        if isinstance(batch, Mapping):
            found = ((name, batch[name]) for name in names if name in batch)
            yield from ((name, value) for name, value in found if isinstance(value, torch.Tensor) and value.numel())


def _label_names(session: Session) -> list[str]:
    return list(dict.fromkeys([*session.trainer.label_names, *_LABELS]))


def _classes(model: nn.Module) -> int | None:
    """Return how many classes a label may have; None where labels are no classes, or nobody says."""
    config, name = getattr(model, "config", None), type(model).__name__
    if is_causal_lm(model) or name.endswith(("LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        return _embedding_rows(model)
    classes = getattr(config, "num_labels", None)
    is_regression = getattr(config, "problem_type", None) in ("regression", "multi_label_classification")
    if "Classification" not in name or not isinstance(classes, int) or classes < 2 or is_regression:
        return None
    return classes


def _check_labels(session: Session, model: nn.Module) -> None:
    classes = _classes(model)
    if classes is None:
        return
    for name, value in _values_of(session.batches, _label_names(session)):
        if not value.is_floating_point() and value.dtype != torch.bool:
            used = value[value != _IGNORED]
            if used.numel() and (int(used.min()) < 0 or int(used.max()) >= classes):
                _tell_of_label(
                    session,
                    "the first batch",
                    name,
                    next(value for value in used.flatten().tolist() if not 0 <= value < classes),
                    classes,
                )
                return
    for dataset, told in _data_sets(session):
        for name in _label_names(session):
            for row, label in rows_of(dataset, name, _MOST_ROWS):
                is_class = isinstance(label, int) and label != _IGNORED
                if is_class and not 0 <= label < classes:  # type: ignore[operator]  # an int, as just asked
                    _tell_of_label(session, f"row {row} of `{told}`", name, int(str(int(label))), classes)  # type: ignore[call-overload]  # as above
                    return


def _data_sets(session: Session) -> Iterator[tuple[object, str]]:
    trainer = session.trainer
    yield trainer.train_dataset, "train_dataset"
    if not isinstance(trainer.eval_dataset, dict):
        yield trainer.eval_dataset, "eval_dataset"
        return
    for name, part in trainer.eval_dataset.items():
        yield part, f"eval_dataset[{name!r}]"


def _tell_of_label(session: Session, where: str, name: str, label: int, classes: int) -> None:
    session.error(
        CHECK,
        f"{where[0].upper()}{where[1:]} has {name}={label}, and the model has {classes} classes: 0 to {classes - 1}.",
        f"count labels from 0, make the model with as many classes (`num_labels`), or set what is to be ignored to "
        f"{_IGNORED}",
    )


def _check_tokens(session: Session, model: nn.Module) -> None:
    rows = _embedding_rows(model)
    if rows is None:
        return
    for name, value in _values_of(session.batches, ("input_ids", "decoder_input_ids")):
        if not value.is_floating_point() and (int(value.min()) < 0 or int(value.max()) >= rows):
            odd = int(value.max()) if int(value.max()) >= rows else int(value.min())
            session.error(
                CHECK,
                f"The first batch has the token {odd} in {name!r}, and the model has embeddings for 0 to {rows - 1}.",
                "use the model's own tokenizer, or call `model.resize_token_embeddings(len(tokenizer))`",
            )
            return


def _check_lengths(session: Session, model: nn.Module) -> None:
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in _POSITIONS)
    positions = next((number for number in found if isinstance(number, int) and number > 0), None)
    if positions is None:
        return
    is_learned = any(_is_of_positions(module, positions) for module in model.modules())
    batches = [value.shape[1] for _, value in _values_of(session.batches, ("input_ids",)) if value.ndim > 1]
    if batches and max(batches) > positions:
        tell = session.error if is_learned else session.warn
        tell(CHECK, f"The first batch is {max(batches)} tokens long; the model has {positions} positions.", _TRUNCATE)
        return
    for row, tokens in rows_of(session.trainer.train_dataset, "input_ids", _MOST_LENGTHS):
        length = len(tokens) if isinstance(tokens, (list, torch.Tensor)) else 0
        if length > positions:
            session.warn(
                CHECK, f"Row {row} of `train_dataset` is {length} tokens long; the model has {positions} positions.",
                _TRUNCATE,
            )  # fmt: skip
            return


_TRUNCATE = "truncate when tokenizing: `tokenizer(…, truncation=True, max_length=…)`"


def _is_of_positions(module: nn.Module, positions: int) -> bool:
    return isinstance(module, nn.Embedding) and 0 <= module.num_embeddings - positions <= _MOST_OFFSET


def is_causal_family(model: nn.Module) -> bool:
    """Return whether a model reads from left to right: transformers' `score` head stands on the last token."""
    return hasattr(model, "score")
