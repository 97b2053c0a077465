"""The model card that `Trainer.create_model_card` writes."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

from torch import nn

from hf_compat.data.types import DataSource
from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import optimizer
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import SchedulerType
from hf_compat.runtime.text import is_installed, shown

logger = logging.getLogger(__name__)

Facts: TypeAlias = dict[str, str | list[str] | None]
Logs: TypeAlias = Sequence[Mapping[str, object]]

_MARK = "<!-- This model card has been generated automatically"
_OWN_MARK = f"{_MARK} by hf_compat. You\nshould probably proofread and complete it, then remove this comment. -->"
_KEPT_NAME = "_README.before"  # a push leaves out what begins with an underscore


class CardArguments:
    """Training arguments with transformers' own enums, for its card."""

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args
        self.optim = optimizer.read(args.optim)
        self.lr_scheduler_type = SchedulerType(args.lr_scheduler_type)

    @property
    def parallel_mode(self) -> object:
        # the enum with which the card's code compares, be it replaced by `patch()` or not
        kind = importlib.import_module("transformers.modelcard").ParallelMode
        return kind(self._args.parallel_mode.value)

    def __getattr__(self, name: str) -> object:
        return getattr(self._args, name)


def check_facts(facts: Mapping[str, object]) -> None:
    """Refuse facts that are neither texts nor lists of texts.

    Raises:
        ArgumentError: One is neither.
    """
    for name, value in facts.items():
        texts = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
        if not all(text is None or isinstance(text, str) for text in texts):
            raise ArgumentError(f"`{shown(name, value)}` is not a text.\n\nHint: pass a text, or a list of texts.")


def card_of(
    model: nn.Module,
    args: TrainingArguments,
    log_history: Logs,
    datasets: tuple[DataSource, DataSource],
    facts: Facts,
) -> str:
    """Write the text of a card. Without transformers it has little more than its front matter."""
    if not is_installed("transformers"):
        return _short_card(args, facts)
    trainer = SimpleNamespace(
        # transformers' card reads the configuration of every model
        model=model if hasattr(model, "config") else type(type(model).__name__, (), {"config": None})(),
        args=CardArguments(args),
        state=SimpleNamespace(log_history=list(log_history)),
        train_dataset=datasets[0],
        eval_dataset=datasets[1],
    )
    cards = importlib.import_module("transformers.modelcard")
    try:
        return str(cards.TrainingSummary.from_trainer(trainer, **facts).to_model_card())
    except OSError as error:  # the Hub knows the licence of the model that this one was made from
        logger.warning("The model card names no licence, as the Hub did not give it (%s).", error)
    summary = cards.TrainingSummary.from_trainer(trainer, **{**facts, "license": "unknown"})
    summary.license = None
    return str(summary.to_model_card())


def keep_written_card(path: str) -> None:
    """Rename a card that a user has written, so that a new one can take its place."""
    if not os.path.isfile(path):
        return
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if _MARK in text or "library_name: peft" in text:
        return
    folder = Path(path).parent
    if any(other.read_text(encoding="utf-8") == text for other in folder.glob(f"{_KEPT_NAME}*.md")):
        return
    number = 1
    while os.path.lexists(kept := f"{folder / _KEPT_NAME!s}{'' if number == 1 else f'-{number}'}.md"):
        number += 1
    os.replace(path, kept)
    logger.warning("A Trainer did not write %s, so it is %s now, and a new card takes its place.", path, kept)


def read_tags(path: str) -> tuple[list[str], str | None]:
    """Read the tags and the library that a card names, if there is one that can be read."""
    if not os.path.isfile(path) or not is_installed("huggingface_hub"):
        return [], None
    try:
        data = importlib.import_module("huggingface_hub").ModelCard.load(path).data
    except Exception as error:  # the YAML of a user
        logger.warning("The tags of %s cannot be read, and are not in the new card: %s", path, error)
        return [], None
    return listed(data.get("tags")), data.get("library_name")


def listed(value: str | list[str] | None) -> list[str]:
    """Put one or several words into a new list."""
    return [value] if isinstance(value, str) else list(value or [])


def _short_card(args: TrainingArguments, facts: Facts) -> str:
    front = {
        "language": facts["language"],
        "license": facts["license"],
        "base_model": facts["finetuned_from"],
        "tags": [*listed(facts["tags"]), "generated_from_trainer"],
        "pipeline_tag": next(iter(listed(facts["tasks"])), None),
        "datasets": listed(facts["dataset_tags"]) or listed(facts["dataset"]),
    }
    name = facts["model_name"] or os.path.basename(os.path.abspath(str(args.output_dir)))
    lines = [f"{key}: {value}" for key, value in front.items() if value]
    return "\n".join(["---", *lines, "---", "", _OWN_MARK, "", f"# {name}", ""])
