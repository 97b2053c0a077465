"""`Pushes` decides what a Trainer sends to the Hub and when, and writes the model card. `client.py` sends it."""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import torch
from torch import nn

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.layout import SAVING
from hf_compat.checkpoint.run_lock import LOCK_NAME
from hf_compat.data.types import DataSource
from hf_compat.errors import HubError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import HubStrategy, OptimizerNames, SaveStrategy, SchedulerType
from hf_compat.hf.state import TrainerState
from hf_compat.hub.client import Commit, HubClient, files_below, hub_error, set_aside
from hf_compat.runtime.collectives import agree
from hf_compat.runtime.text import is_installed
from hf_compat.training_run.run import RunHost

logger = logging.getLogger(__name__)

# What a push of the output folder leaves out: upstream's two, and what a run under way has there.
IGNORED = [
    "_*",
    f"{names.PREFIX_CHECKPOINT_DIR}-*",
    f".{names.PREFIX_CHECKPOINT_DIR}-*",
    f"{LOCK_NAME}*",
    f"{SAVING}*",
]
_MODEL_FILES = [
    "config.json",
    "generation_config.json",
    names.WEIGHTS_NAME,
    names.SAFE_WEIGHTS_NAME,
    names.ADAPTER_CONFIG_NAME,
    names.ADAPTER_WEIGHTS_NAME,
    names.ADAPTER_SAFE_WEIGHTS_NAME,
    names.TRAINING_ARGS_NAME,
]
_LINK_FROM_BYTES = 10_000_000


class Pushes:
    """Push a Trainer's model and checkpoints.

    Args:
        host: The Trainer.
    """

    def __init__(self, host: RunHost) -> None:
        self._host = host
        self._unpushed: str | None = None  # a checkpoint written in the background, and pushed when it is whole

    @cached_property
    def client(self) -> HubClient:
        """The Hub, and the commits under way.

        Raises:
            MissingPackage: huggingface_hub is not installed.
        """
        return HubClient("Pushing to the Hub")

    @property
    def _has_client(self) -> bool:
        return "client" in self.__dict__

    # The repository

    def prepare(self) -> None:
        """Make the repository, where the arguments ask for pushes; every process takes part.

        Raises:
            HubError: It cannot be pushed to.
            MissingPackage: huggingface_hub is not installed.
            ProcessError: Another process has found one of these.
        """
        if not self._host.args.push_to_hub:
            return
        failed: Exception | None = None
        try:
            self._host.init_hf_repo()
        except Exception as error:
            failed = error
        agree(failed)

    def create_repository(self, token: str | None, private: bool | None) -> str:
        """Make `args.hub_model_id` where there is none; the arguments say what is not given.

        Returns:
            The repository's whole name.
        """
        args = self._host.args
        name = args.hub_model_id if args.hub_model_id is not None else Path(str(args.output_dir)).absolute().name
        token = token if token is not None else args.hub_token
        private = private if private is not None else args.hub_private_repo
        return self.client.create_repo(name, token, private)

    def create_for_push(self, token: str | None, private: bool | None) -> None:
        """Make the repository of a push that the arguments do not ask for; within a training a failure is a warning."""
        try:
            self._host.init_hf_repo(token=token, private=private)
        except HubError as error:
            if not self._host.is_in_train:
                raise
            logger.warning("Nothing is pushed; training goes on. %s", error)

    # The output folder

    def push_folder(self, message: str, *, blocking: bool, token: str | None, revision: str | None) -> object:
        """Push the output folder.

        Args:
            message: The commit's message.
            blocking: Whether to wait until it has arrived.
            token: A token that may write there.
            revision: The branch.

        Returns:
            huggingface_hub's `CommitInfo`, or a `Future` of it without `blocking`; None where a push has failed within
            a training.

        Raises:
            HubError: It has not arrived, and nothing is training.
        """
        output_dir = str(self._host.args.output_dir)
        commit = Commit(
            repo_id=str(self._host.hub_model_id),
            message=message,
            source=output_dir if blocking else set_aside(self._files_of_output(), output_dir, unchanging={}),
            ignored=tuple(IGNORED) if blocking else (),
            is_stage=not blocking,
            token=token,
            revision=revision,
        )
        future = self.client.submit(commit)
        if not blocking:
            return future
        self.client.wait()
        error = future.exception() if future.done() else TimeoutError("the Hub has not taken it")
        if not isinstance(error, Exception) or self._host.is_in_train:
            return None if error is not None else future.result()
        self.client.missing.pop(commit.folder, None)  # the error tells it
        raise hub_error(
            f"The push {commit.message!r} to {commit.repo_id} has failed", error, commit.token, self._push_later()
        ) from error

    def push_saved_model(self) -> None:
        """Push what `save_model` has just saved, where the arguments ask for pushes; a failure is a warning."""
        try:
            self._host.push_to_hub(commit_message="Model save", revision=self._host.args.hub_revision)
        except HubError as error:
            logger.warning("The model is saved, but not pushed. %s", error)

    # Checkpoints

    def push_checkpoint(self, folder: str) -> None:
        """Push a checkpoint that was just written, where the arguments ask for it; called by every process."""
        if not self._host.args.push_to_hub:
            return
        try:
            self._host._push_from_checkpoint(folder)
        except OSError as error:
            commit = Commit(repo_id=str(self._host.hub_model_id), message=self._progress(folder))
            self.client.note_failure(commit, error)

    def push_when_written(self, folder: str) -> None:
        """Note a checkpoint that was written in the background: what is overridden runs in the main thread alone."""
        self._unpushed = folder

    def push_what_was_written(self) -> None:
        """Push the checkpoint that was written in the background, if there is one."""
        if self._unpushed is not None:
            folder, self._unpushed = self._unpushed, None
            self.push_checkpoint(folder)

    def submit_checkpoint(self, checkpoint: str) -> list[Future[object]]:
        """Send the model of a checkpoint, and the checkpoint itself as `hub_strategy` says, beside the training.

        Raises:
            OSError: There is no room for what is set aside, or something cannot be read.
        """
        host, output_dir = self._host, str(self._host.args.output_dir)
        written = {name: os.path.join(checkpoint, name) for name in _model_files(checkpoint)}
        for name, file in written.items():
            shutil.copyfile(file, os.path.join(output_dir, name))
        if hasattr(host.processing_class, "save_pretrained"):
            host.processing_class.save_pretrained(output_dir)
        message = self._progress(checkpoint)
        jobs = [self._submit(self._files_of_output(), written, message, "")]
        if host.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            is_last = host.args.hub_strategy == HubStrategy.CHECKPOINT
            folder = "last-checkpoint" if is_last else Path(checkpoint).name
            files = files_below(checkpoint, lambda paths: self.client.kept(paths, []))
            jobs.append(self._submit(files, files, f"{message}, checkpoint", folder))
        return jobs

    # The end

    def wait(self) -> None:
        """Wait until what is under way has arrived or failed."""
        if self._has_client:
            self.client.wait()

    def tell_what_has_not_arrived(self) -> None:
        """Say at the end of a training which pushes have failed, and how to push later."""
        if self._has_client:
            self.client.tell_what_is_missing(self._push_later())

    def _submit(self, files: dict[str, str], unchanging: dict[str, str], message: str, folder: str) -> Future[object]:
        args = self._host.args
        commit = Commit(
            repo_id=str(self._host.hub_model_id),
            message=message,
            source=set_aside(files, str(args.output_dir), unchanging, _LINK_FROM_BYTES),
            is_stage=True,
            folder=folder,
            token=args.hub_token,
            revision=args.hub_revision,
        )
        return self.client.submit(commit)

    def _progress(self, checkpoint: str) -> str:
        """Return the message of a commit within training; the state may be ahead of a checkpoint by now."""
        state = self._host.state
        if self._host.args.save_strategy == SaveStrategy.STEPS:
            update = names.checkpoint_step(checkpoint)
            return f"Training in progress, step {state.global_step if update is None else update}"
        path = os.path.join(checkpoint, names.TRAINER_STATE_NAME)
        epoch = TrainerState.load_from_json(path).epoch if os.path.isfile(path) else state.epoch
        return f"Training in progress, epoch {int(epoch or 0)}"

    def _files_of_output(self) -> dict[str, str]:
        return files_below(str(self._host.args.output_dir), lambda paths: self.client.kept(paths, IGNORED))

    def _push_later(self) -> str:
        folder, excluded = self._host.args.output_dir, f"{names.PREFIX_CHECKPOINT_DIR}-*"
        return (
            "everything is on this disk; push it later with `trainer.push_to_hub()`, or "
            f'`hf upload {self._host.hub_model_id} {folder} . --exclude "{excluded}"`'
        )


def _model_files(checkpoint: str) -> list[str]:
    """Return the names of a checkpoint's files that make up the model: also all shards that an index lists."""
    found = list(_MODEL_FILES)
    for index in (names.WEIGHTS_INDEX_NAME, names.SAFE_WEIGHTS_INDEX_NAME):
        path = os.path.join(checkpoint, index)
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                found += [index, *sorted(set(json.load(file)["weight_map"].values()))]
    return [name for name in found if os.path.isfile(os.path.join(checkpoint, name))]


Facts: TypeAlias = dict[str, str | list[str] | None]
Logs: TypeAlias = Sequence[Mapping[str, object]]

_MARK = "<!-- This model card has been generated automatically"
_OWN_MARK = f"{_MARK} by hf_compat. You\nshould probably proofread and complete it, then remove this comment. -->"
_KEPT_NAME = "_README.before"  # a push leaves out what begins with an underscore


class CardArguments:
    """Training arguments as transformers' card reads them: with its own enums.

    Args:
        args: The training arguments.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args
        self.optim = OptimizerNames(args.optim)
        self.lr_scheduler_type = SchedulerType(args.lr_scheduler_type)

    @property
    def parallel_mode(self) -> object:
        kind = importlib.import_module("transformers.training_args").ParallelMode
        return kind(self._args.parallel_mode.value)

    def __getattr__(self, name: str) -> object:
        return getattr(self._args, name)


def card_of(
    model: nn.Module,
    args: TrainingArguments,
    log_history: Logs,
    datasets: tuple[DataSource, DataSource],
    facts: Facts,
) -> str:
    """Return the text of a card.

    Args:
        model: The model.
        args: The training arguments.
        log_history: What was logged.
        datasets: The training data and the evaluation data.
        facts: What `Trainer.create_model_card` is told.
    """
    if not is_installed("transformers"):
        front = {
            "language": facts["language"],
            "license": facts["license"],
            "base_model": facts["finetuned_from"],
            "tags": [*listed(facts["tags"]), "generated_from_trainer"],
            "pipeline_tag": next(iter(listed(facts["tasks"])), None),
            "datasets": listed(facts["dataset_tags"]) or listed(facts["dataset"]),
        }
        name = facts["model_name"] or os.path.basename(os.path.abspath(str(args.output_dir)))
        lines = [
            "---",
            *(f"{key}: {value}" for key, value in front.items() if value),
            "---",
            "",
            _OWN_MARK,
            "",
            f"# {name}",
        ]
        about_data = listed(facts["dataset_args"])
        if about_data:
            lines += ["", f"Data: {', '.join(about_data)}."]
        shown = ("learning_rate", "train_batch_size", "eval_batch_size", "gradient_accumulation_steps", "seed")
        values: dict[str, object] = {name: getattr(args, name) for name in shown}
        kinds = {"optimizer": OptimizerNames(args.optim).value, "schedule": SchedulerType(args.lr_scheduler_type).value}
        lines += ["", "## Arguments", "", *(f"- {key}: {value}" for key, value in (values | kinds).items())]
        versions = {"PyTorch": torch.__version__, "Python": platform.python_version()}
        lines += [*_table_of_evaluations(log_history), "", "## Framework versions", ""]
        return "\n".join([*lines, *(f"- {key} {value}" for key, value in versions.items())]) + "\n"
    # Transformers' card asks every model for one
    trainer = SimpleNamespace(
        model=model if hasattr(model, "config") else type(type(model).__name__, (), {"config": None})(),
        args=CardArguments(args),
        state=SimpleNamespace(log_history=list(log_history)),
        train_dataset=datasets[0],
        eval_dataset=datasets[1],
    )
    cards = importlib.import_module("transformers.modelcard")
    try:
        return str(cards.TrainingSummary.from_trainer(trainer, **facts).to_model_card())
    except OSError as error:  # the licence of the model that this one was made from is asked of the Hub
        logger.warning("The model card names no licence: the Hub did not tell it (%s).", error)
    summary = cards.TrainingSummary.from_trainer(trainer, **{**facts, "license": "unknown"})
    summary.license = None
    return str(summary.to_model_card())


def keep_written_card(path: str) -> None:
    """Keep a card that somebody has written, under another name beside it: the new one takes its place.

    Args:
        path: Where the card stands, if there is one.
    """
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
    logger.warning("%s was not written by a Trainer: it is %s now, and a new card takes its place.", path, kept)


def read_tags(path: str) -> tuple[list[str], str | None]:
    """Return the tags and the library that a card names; nothing where it names none or cannot be read."""
    if not os.path.isfile(path) or not is_installed("huggingface_hub"):
        return [], None
    try:
        data = importlib.import_module("huggingface_hub").ModelCard.load(path).data
    except Exception as error:  # of YAML that somebody has written
        logger.warning("The tags of %s cannot be read, and are not in the new card: %s", path, error)
        return [], None
    return listed(data.get("tags")), data.get("library_name")


def listed(value: str | list[str] | None) -> list[str]:
    """Return one or several words as a list of one's own."""
    return [value] if isinstance(value, str) else list(value or [])


def _table_of_evaluations(history: Logs) -> list[str]:
    evaluations = [log for log in history if any(key.startswith("eval_") for key in log)]
    if not evaluations:
        return []
    kept = [key for key in evaluations[-1] if not key.endswith(("_runtime", "_per_second", "_time"))]
    rows = (f"| {' | '.join(_short(log.get(key, '')) for key in kept)} |" for log in evaluations)
    return ["", "## Evaluations", "", f"| {' | '.join(kept)} |", "|---" * len(kept) + "|", *rows]


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
