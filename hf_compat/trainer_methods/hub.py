"""Pushing to the Hub, model cards, and the public methods that are refused so far. HF's method names."""

from __future__ import annotations

import json
import logging
import os
import shutil
from concurrent.futures import Future
from pathlib import Path

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.hidden_folders import SAVING
from hf_compat.checkpoint.run_lock import LOCK_NAME
from hf_compat.errors import HubError
from hf_compat.hf.enums import HubStrategy, SaveStrategy
from hf_compat.hf.state import TrainerState
from hf_compat.runtime.collectives import agree
from hf_compat.trainer_methods.base import TrainerBase
from hf_compat.trainer_methods.hub_client import Commit, HubClient, hub_error
from hf_compat.trainer_methods.hub_uploads import PushInProgress, Uploads, files_below, set_aside
from hf_compat.trainer_methods.model_card import Facts, card_of, keep_written_card, listed, read_tags

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


class HubMethods(TrainerBase):
    """The public methods and override points around the Hub, and around hyperparameter search."""

    hub_model_id: str | None = None
    push_in_progress: PushInProgress | None = None
    _uploads: Uploads | None = None
    _unpushed: str | None = None  # a checkpoint that is written in the background, and pushed when it is whole

    def _prepare_hub(self) -> None:
        """Make the repository, where the arguments ask for pushes; every process takes part.

        Raises:
            HubError: It cannot be pushed to.
            MissingPackage: huggingface_hub is not installed.
            ProcessError: Another process has found one of these.
        """
        if not self.args.push_to_hub:
            return
        failed: Exception | None = None
        try:
            self.init_hf_repo()
        except Exception as error:
            failed = error
        agree(failed)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository `args.hub_model_id` where there is none, and keep its whole name in `hub_model_id`.

        Args:
            token: A token that may write there; the arguments' one where none is given.
            private: Whether a new repository is private; as the arguments say where nothing is given.

        Raises:
            HubError: It cannot be made.
            MissingPackage: huggingface_hub is not installed.

        Mirrors:
            `transformers.Trainer.init_hf_repo`, 5.23.
        """
        if not self.is_world_process_zero():
            return
        args = self.args
        name = args.hub_model_id if args.hub_model_id is not None else Path(str(args.output_dir)).absolute().name
        token = token if token is not None else args.hub_token
        private = private if private is not None else args.hub_private_repo
        self.hub_model_id = self._hub().client.create_repo(name, token, private)
        self.push_in_progress = None

    def _hub(self) -> Uploads:
        if self._uploads is None:
            self._uploads = Uploads(HubClient("Pushing to the Hub"))
        return self._uploads

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write a model card, `README.md` in the output folder, from what is known of the run.

        Mirrors:
            `transformers.Trainer.create_model_card`, 5.23.

        Differs:
            A card that somebody has written stays, as `_README.before.md`. Without transformers the card is shorter.
        """
        if not self.is_world_process_zero():
            return
        output_dir = str(self.args.output_dir)
        os.makedirs(output_dir, exist_ok=True)
        path = os.path.join(output_dir, "README.md")
        known_tags, library = read_tags(path)
        if tags is not None:
            tags = listed(tags)
            tags += [tag for tag in known_tags if tag not in tags]
        facts: Facts = {
            "language": language,
            "license": license,
            "tags": tags,
            "model_name": model_name,
            "finetuned_from": finetuned_from,
            "tasks": tasks,
            "dataset_tags": dataset_tags,
            "dataset": dataset,
            "dataset_args": dataset_args,
        }
        card = card_of(self.model, self.args, self.state.log_history, (self.train_dataset, self.eval_dataset), facts)
        keep_written_card(path)
        with open(path, "w", encoding="utf-8") as file:
            file.write(card)
        if library == "peft":
            self.accelerator.unwrap_model(self.model).create_or_update_model_card(output_dir)  # type: ignore[operator]  # peft's

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: str | list[str] | None,
    ) -> object:
        """Save the model and push the output folder to `hub_model_id`, without checkpoints.

        Args:
            commit_message: The commit's message.
            blocking: Whether to wait until it has arrived.
            token: A token that may write there; the arguments' one where none is given.
            revision: The branch; the arguments' one where none is given.
            private: Whether a repository that is made for this is private.
            kwargs: What the model card says: see `create_model_card`.

        Returns:
            huggingface_hub's `CommitInfo`, or a `Future` of it without `blocking`; None in other processes than the
            first, and where a push has failed within a training.

        Raises:
            HubError: It has not arrived, and nothing is training. It is also of the class of huggingface_hub's error.

        Mirrors:
            `transformers.Trainer.push_to_hub`, 5.23.

        Differs:
            What fails and may pass is tried again. Within a training a failure is a warning.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token if token is not None else self.args.hub_token
        if self.hub_model_id is None:
            self._init_repo_of_push(token, private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero() or self.hub_model_id is None:
            return None
        if kwargs.get("model_name") is None:
            kwargs["model_name"] = self._card_name()
        self.create_model_card(**self._with_model_tags(kwargs))  # type: ignore[arg-type]  # the card's own types
        self._finish_current_push()
        revision = revision if revision is not None else self.args.hub_revision
        message = commit_message or "Upload folder using huggingface_hub"
        uploads, output_dir = self._hub(), str(self.args.output_dir)
        assert self.hub_model_id is not None  # the only caller looked
        files, stage = self._files_to_push(), None
        if not blocking:
            files, stage = set_aside(files, output_dir, unchanging={})
        commit = Commit(repo_id=self.hub_model_id, message=message, files=files, token=token, revision=revision)
        future = uploads.submit(commit, stage)
        if not blocking:
            return future
        uploads.wait()
        error = future.exception()
        if not isinstance(error, Exception) or self.is_in_train:
            return None if error is not None else future.result()
        self._hub().missing.pop(commit.folder, None)  # the error tells it
        raise hub_error(
            f"The push {commit.message!r} to {commit.repo_id} has failed", error, commit.token, self._push_later()
        ) from error

    def _init_repo_of_push(self, token: str | None, private: bool | None) -> None:
        """Make the repository of a push that the arguments do not ask for; within a training a failure is a warning."""
        try:
            self.init_hf_repo(token=token, private=private)
        except HubError as error:
            if not self.is_in_train:
                raise
            logger.warning("Nothing is pushed; training goes on. %s", error)

    def _card_name(self) -> str | None:
        if not self.args.should_save:
            return None
        if self.args.hub_model_id is None:
            return Path(str(self.args.output_dir)).name
        return self.args.hub_model_id.split("/")[-1]

    def _with_model_tags(self, facts: dict[str, str | list[str] | None]) -> dict[str, str | list[str] | None]:
        """Add the tags that the model has of its own."""
        own = getattr(self.model, "model_tags", None)
        if own is None:
            return facts
        tags = listed(facts.get("tags"))
        return {**facts, "tags": tags + [tag for tag in own if tag not in tags]}

    def _push_later(self) -> str:
        folder, excluded = self.args.output_dir, f"{names.PREFIX_CHECKPOINT_DIR}-*"
        return (
            "everything is on this disk; push it later with `trainer.push_to_hub()`, or "
            f'`hf upload {self.hub_model_id} {folder} . --exclude "{excluded}"`'
        )

    def _files_to_push(self) -> dict[str, str]:
        return files_below(str(self.args.output_dir), lambda paths: self._hub().client.kept(paths, IGNORED))

    def _push_saved_model(self) -> None:
        """Push what `save_model` has just saved, where the arguments ask for pushes; a failure is a warning."""
        try:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        except HubError as error:
            logger.warning("The model is saved, but not pushed. %s", error)

    def _push_checkpoint(self, folder: str) -> None:
        """Push a checkpoint that was just written, where the arguments ask for it; called by every process."""
        if not self.args.push_to_hub:
            return
        try:
            self._push_from_checkpoint(folder)
        except OSError as error:
            commit = Commit(repo_id=str(self.hub_model_id), message=self._progress(folder), files={})
            self._hub().note_failure(commit, error)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the model of a checkpoint, and the checkpoint itself, as `hub_strategy` says; training goes on.

        Args:
            checkpoint_folder: The checkpoint, whole and under its own name.

        Raises:
            OSError: There is no room for what is set aside for the push, or something cannot be read.

        Mirrors:
            `transformers.Trainer._push_from_checkpoint`, 5.23.

        Differs:
            Links and copies are pushed, so that a checkpoint which rotation removes meanwhile arrives whole.
        """
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        in_progress = self.push_in_progress
        if in_progress is not None and in_progress.is_done():
            in_progress = None
        if in_progress is not None and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        output_dir = str(self.args.output_dir)
        written = {name: os.path.join(checkpoint_folder, name) for name in _model_files(checkpoint_folder)}
        for name, file in written.items():
            shutil.copyfile(file, os.path.join(output_dir, name))
        if hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(output_dir)
        jobs = [self._submit(self._files_to_push(), written, self._progress(checkpoint_folder), "")]
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            is_last = self.args.hub_strategy == HubStrategy.CHECKPOINT
            folder = "last-checkpoint" if is_last else Path(checkpoint_folder).name
            files = files_below(checkpoint_folder, lambda paths: self._hub().client.kept(paths, []))
            placed = {f"{folder}/{path}": file for path, file in files.items()}
            jobs.append(self._submit(placed, placed, f"{self._progress(checkpoint_folder)}, checkpoint", folder))
        if in_progress is None:
            self.push_in_progress = PushInProgress(jobs)
        else:
            in_progress.jobs.extend(jobs)

    def _submit(self, files: dict[str, str], unchanging: dict[str, str], message: str, folder: str) -> Future[object]:
        kept, stage = set_aside(files, str(self.args.output_dir), unchanging, _LINK_FROM_BYTES)
        commit = Commit(
            repo_id=str(self.hub_model_id),
            message=message,
            files=kept,
            folder=folder,
            token=self.args.hub_token,
            revision=self.args.hub_revision,
        )
        return self._hub().submit(commit, stage)

    def _progress(self, checkpoint: str) -> str:
        """Return the message of a commit within training; the state may be ahead of a checkpoint by now."""
        if self.args.save_strategy == SaveStrategy.STEPS:
            update = names.checkpoint_step(checkpoint)
            return f"Training in progress, step {self.state.global_step if update is None else update}"
        return f"Training in progress, epoch {int(self._epoch_of(checkpoint) or 0)}"

    def _epoch_of(self, checkpoint: str) -> float | None:
        path = os.path.join(checkpoint, names.TRAINER_STATE_NAME)
        return TrainerState.load_from_json(path).epoch if os.path.isfile(path) else self.state.epoch

    def _push_when_written(self, folder: str) -> None:
        """Note a checkpoint that was written in the background: what is overridden runs in the main thread alone."""
        self._unpushed = folder

    def _push_what_was_written(self) -> None:
        """Push the checkpoint that was written in the background, if there is one."""
        if self._unpushed is not None:
            folder, self._unpushed = self._unpushed, None
            self._push_checkpoint(folder)

    def _finish_current_push(self) -> None:
        """Wait until what is under way has arrived or failed.

        Mirrors:
            `transformers.Trainer._finish_current_push`, 5.23.

        Differs:
            The wait ends after 10 minutes and the time that a slow line takes, and with Ctrl-C.
        """
        if self._uploads is not None:
            self._uploads.wait()

    def _tell_what_has_not_arrived(self) -> None:
        """Say at the end of a training which pushes have failed, and how to push later."""
        if self._uploads is not None:
            self._uploads.tell_what_is_missing(self._push_later())

    def end(self) -> None:
        """Do nothing: every call of `train`, `evaluate` or `predict` has ended its own Lightning trainer."""


def _model_files(checkpoint: str) -> list[str]:
    """Return the names of a checkpoint's files that make up the model: also all shards that an index lists."""
    found = list(_MODEL_FILES)
    for index in (names.WEIGHTS_INDEX_NAME, names.SAFE_WEIGHTS_INDEX_NAME):
        path = os.path.join(checkpoint, index)
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                found += [index, *sorted(set(json.load(file)["weight_map"].values()))]
    return [name for name in found if os.path.isfile(os.path.join(checkpoint, name))]
