"""`Pushes` decides what a Trainer sends to the Hub and when. `client.py` sends it."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.layout import SAVING
from hf_compat.checkpoint.run_lock import LOCK_NAME
from hf_compat.hf.enums import HubStrategy, SaveStrategy
from hf_compat.hf.state import TrainerState
from hf_compat.hub.client import Commit, HubClient, hub_error, set_aside
from hf_compat.runtime.inspection import call_if_there
from hf_compat.runtime.text import brief
from hf_compat.training_run.interface import TrainerApi

logger = logging.getLogger(__name__)

# A push of the output folder leaves out upstream's two patterns, and the files of a running training.
IGNORED = [
    "_*",
    f"{layout.PREFIX_CHECKPOINT_DIR}-*",
    f".{layout.PREFIX_CHECKPOINT_DIR}-*",
    f"{LOCK_NAME}*",
    f"{SAVING}*",
]
_MODEL_FILES = [
    "config.json",
    "generation_config.json",
    layout.WEIGHTS_NAME,
    layout.SAFE_WEIGHTS_NAME,
    layout.ADAPTER_CONFIG_NAME,
    layout.ADAPTER_WEIGHTS_NAME,
    layout.ADAPTER_SAFE_WEIGHTS_NAME,
    layout.TRAINING_ARGS_NAME,
]
_LINK_FROM_BYTES = 10_000_000


class Pushes:
    """Push a Trainer's model and checkpoints. `check_folder` refuses a folder that another run has taken."""

    def __init__(self, host: TrainerApi, check_folder: Callable[[str], None]) -> None:
        self._host, self._check_folder = host, check_folder
        # a checkpoint written in the background. The next update pushes it, as overrides run in the main thread
        self.unpushed: str | None = None

    @cached_property
    def client(self) -> HubClient:
        """The Hub, and the commits on their way there."""
        return HubClient("Pushing to the Hub")

    def push_folder(self, message: str, *, blocking: bool, token: str | None, revision: str | None) -> object:
        """Push the output folder.

        Returns:
            huggingface_hub's `CommitInfo`, or a `Future` of it without `blocking`. None after a failed push within
            a training.
        """
        output_dir = str(self._host.args.output_dir)
        commit = Commit(
            repo_id=str(self._host.hub_model_id),
            message=message,
            source=output_dir,
            ignored=tuple(IGNORED),
            token=token,
            revision=revision,
        )
        if not blocking:
            stage = set_aside(self.client.files_of(output_dir, IGNORED), output_dir, unchanging={})
            return self.client.submit(replace(commit, source=stage, is_stage=True))
        future = self.client.submit(commit)
        self.client.wait()
        error = future.exception() if future.done() else TimeoutError("the Hub has not taken it")
        if not isinstance(error, Exception) or self._host.is_in_train:
            return None if error is not None else future.result()
        self.client.missing.pop(commit.folder, None)  # the error says it
        raise hub_error(
            f"The push {brief(commit.message)} to {commit.repo_id} has failed", error, commit.token, self._push_later()
        ) from error

    def push_checkpoint(self, folder: str) -> None:
        """Push a checkpoint that was just written. Every rank calls it."""
        self.unpushed = None
        self._check_folder(folder)
        try:
            self._host._push_from_checkpoint(folder)
        except OSError as error:
            commit = Commit(repo_id=str(self._host.hub_model_id), message=self._progress(folder))
            self.client.note_failure(commit, error)

    def submit_checkpoint(self, checkpoint: str) -> list[Future[object]]:
        """Send a checkpoint's model, and the checkpoint itself if `hub_strategy` asks for it, beside the training."""
        host, output_dir = self._host, str(self._host.args.output_dir)
        found = list(_MODEL_FILES)
        for index in (layout.WEIGHTS_INDEX_NAME, layout.SAFE_WEIGHTS_INDEX_NAME):
            path = os.path.join(checkpoint, index)
            if os.path.isfile(path):
                with open(path, encoding="utf-8") as file:
                    found += [index, *sorted(set(json.load(file)["weight_map"].values()))]
        places = {name: os.path.join(checkpoint, name) for name in found}
        written = {name: place for name, place in places.items() if os.path.isfile(place)}
        for name, place in written.items():
            shutil.copyfile(place, os.path.join(output_dir, name))
        call_if_there(host.processing_class, "save_pretrained", output_dir)
        message = self._progress(checkpoint)
        jobs = [self._submit(self.client.files_of(output_dir, IGNORED), written, message, "")]
        if host.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            is_last = host.args.hub_strategy == HubStrategy.CHECKPOINT
            folder = "last-checkpoint" if is_last else Path(checkpoint).name
            files = self.client.files_of(checkpoint)
            jobs.append(self._submit(files, files, f"{message}, checkpoint", folder))
        return jobs

    def warn_of_missing(self) -> None:
        """Warn once, at the end of a training, of failed pushes, and say how to push later."""
        missing, self.client.missing = self.client.missing, {}
        if missing:
            messages = ", ".join(map(repr, missing.values()))
            logger.warning("These pushes have not arrived on the Hub: %s.\n\nHint: %s.", messages, self._push_later())

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
        """Make the message of a commit within training. The state may be ahead of the checkpoint by now."""
        state = self._host.state
        if self._host.args.save_strategy == SaveStrategy.STEPS:
            update = layout.checkpoint_step(checkpoint)
            return f"Training in progress, step {state.global_step if update is None else update}"
        path = os.path.join(checkpoint, layout.TRAINER_STATE_NAME)
        epoch = TrainerState.load_from_json(path).epoch if os.path.isfile(path) else state.epoch
        return f"Training in progress, epoch {int(epoch or 0)}"

    def _push_later(self) -> str:
        folder, excluded = self._host.args.output_dir, f"{layout.PREFIX_CHECKPOINT_DIR}-*"
        return (
            "everything is on this disk. Push it later with `trainer.push_to_hub()`, or "
            f'`hf upload {self._host.hub_model_id} {folder} . --exclude "{excluded}"`'
        )
