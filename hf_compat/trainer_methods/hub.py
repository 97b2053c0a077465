"""The methods for pushing to the Hub and for model cards. `hub/pushes.py` does the work."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hf_compat.errors import HubError
from hf_compat.hf.enums import HubStrategy
from hf_compat.hub.client import PushInProgress
from hf_compat.hub.model_card import Facts, card_of, check_facts, keep_written_card, listed, read_tags
from hf_compat.trainer_methods.trainer_base import TrainerBase

logger = logging.getLogger(__name__)


class HubMethods(TrainerBase):
    """The public and overridable methods for the Hub."""

    hub_model_id: str | None = None
    push_in_progress: PushInProgress | None = None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository `args.hub_model_id` if it is missing, and set `hub_model_id` to its full name.

        Args:
            token: A token with write access. By default the arguments' token.
            private: Whether a new repository is private. By default the arguments' value.

        Raises:
            HubError: It cannot be created.
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
        self.hub_model_id = self._pushes.client.create_repo(name, token, private)
        self.push_in_progress = None

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
        """Write a model card, `README.md` in the output folder, from the run's facts.

        Raises:
            ArgumentError: A fact is neither a text nor texts.

        Mirrors:
            `transformers.Trainer.create_model_card`, 5.23.

        Differs:
            A user's own card is kept as `_README.before.md`. Without transformers the card has its front matter
            only.
        """
        if not self.is_world_process_zero():
            return
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
        check_facts(facts)
        output_dir = str(self.args.output_dir)
        self._saver.check_folder(output_dir)
        os.makedirs(output_dir, exist_ok=True)
        path = os.path.join(output_dir, "README.md")
        known_tags, library = read_tags(path)
        if tags is not None:
            facts["tags"] = [*listed(tags), *(tag for tag in known_tags if tag not in listed(tags))]
        card = card_of(self.model, self.args, self.state.log_history, (self.train_dataset, self.eval_dataset), facts)
        keep_written_card(path)
        with open(path, "w", encoding="utf-8") as file:
            file.write(card)
        if library == "peft":
            self.accelerator.unwrap_model(self.model).create_or_update_model_card(output_dir)  # type: ignore[operator]  # peft's
        self._saver.mirror.store_files()

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
            blocking: Whether to wait until the push has arrived.
            token: A token with write access. By default the arguments' token.
            revision: The branch. By default the arguments' branch.
            private: Whether a repository created by this call is private.
            kwargs: Fields of the model card, see `create_model_card`.

        Returns:
            huggingface_hub's `CommitInfo`, or its `Future` without `blocking`. None on ranks other than the first,
            and after a failed push within a training.

        Raises:
            HubError: The push failed outside of a training. It also inherits from the class of huggingface_hub's error.

        Mirrors:
            `transformers.Trainer.push_to_hub`, 5.23.

        Differs:
            Within a training a failure is a warning.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token if token is not None else self.args.hub_token
        if self.hub_model_id is None:
            try:
                self.init_hf_repo(token=token, private=private)
            except HubError as error:
                if not self.is_in_train:
                    raise
                logger.warning("Nothing is pushed, and training continues. %s", error)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero() or self.hub_model_id is None:
            return None
        name, own = self.args.hub_model_id, getattr(self.model, "model_tags", None)
        if kwargs.get("model_name") is None and self.args.should_save:
            kwargs["model_name"] = Path(str(self.args.output_dir)).name if name is None else name.split("/")[-1]
        if own is not None:
            tags = listed(kwargs.get("tags"))
            kwargs["tags"] = tags + [tag for tag in own if tag not in tags]
        self.create_model_card(**kwargs)  # type: ignore[arg-type]  # the card's own types
        self._finish_current_push()
        return self._pushes.push_folder(
            commit_message or "Upload folder using huggingface_hub",
            blocking=blocking,
            token=token,
            revision=revision if revision is not None else self.args.hub_revision,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint and its model according to `hub_strategy`, while training continues.

        Raises:
            OSError: The disk has no space for the files of the push, or a file cannot be read.

        Mirrors:
            `transformers.Trainer._push_from_checkpoint`, 5.23.

        Differs:
            It pushes links and copies, so that rotation may remove the checkpoint meanwhile.
        """
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        in_progress = self.push_in_progress
        if in_progress is not None and in_progress.is_done():
            in_progress = None
        if in_progress is not None and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        jobs = self._pushes.submit_checkpoint(checkpoint_folder)
        if in_progress is None:
            self.push_in_progress = PushInProgress(jobs)
        else:
            in_progress.jobs.extend(jobs)

    def _finish_current_push(self) -> None:
        """Wait until the running pushes have arrived or failed.

        Mirrors:
            `transformers.Trainer._finish_current_push`, 5.23.

        Differs:
            The wait ends with Ctrl-C, or after 10 minutes plus the time that a slow connection needs.
        """
        if self.push_in_progress is not None:
            self._pushes.client.wait()

    def end(self) -> None:
        """Do nothing, as each `train`, `evaluate` or `predict` has ended its own Lightning trainer."""
