"""Save and load in HF's layout, for `training_run/saver.py` and `training_run/resumer.py`, and push what is saved.

Only tensors, NumPy arrays and plain containers are unpickled (`weights_only=True`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.adapters import holds_whole_model, load_adapters
from hf_compat.checkpoint.convert import write_weights
from hf_compat.checkpoint.hints import PathFacts, explained
from hf_compat.checkpoint.model_state import MODEL_INDEX, ModelState, make_model_state
from hf_compat.checkpoint.reading import (
    COMPILED,
    Contents,
    LoadResult,
    Weights,
    listed_as_it_is,
    naming_misfit,
    plain_names,
    read_manifest,
    read_torch_file,
)
from hf_compat.checkpoint.run_state import read_random_states
from hf_compat.checkpoint.unlisted_checkpoints import has_weights
from hf_compat.checkpoint.validation import check_schedule
from hf_compat.errors import CheckpointError, CheckpointMismatch, HubError, warn_user
from hf_compat.hf.enums import HubStrategy
from hf_compat.hf.search import Trial
from hf_compat.hf.state import TrainerControl, export_states
from hf_compat.hub.client import PushInProgress
from hf_compat.hub.model_card import Facts, card_of, check_facts, keep_written_card, listed, read_tags
from hf_compat.interop.deepspeed import is_partitioned, whole_for_a_while
from hf_compat.interop.transformers_models import is_peft_model, is_pretrained_model
from hf_compat.optim.optimizers import tell_of_kept_options
from hf_compat.optim.prepared import unwrap_optimizer
from hf_compat.optim.stepping import behaviour_of
from hf_compat.runtime.console import SharedLogger, log_line
from hf_compat.runtime.inspection import call_if_there, home_of, reads_parameter
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.seeding import write_rng
from hf_compat.runtime.text import brief
from hf_compat.search.trials import name_of_trial
from hf_compat.trainer_methods.trainer_base import TrainerBase
from hf_compat.training_run.rotation import remove_surplus

logger = logging.getLogger(__name__)
shared_logger = SharedLogger(__name__, "transformers.trainer")


class CheckpointMethods(TrainerBase):
    """The public and overridable methods that save, rotate, load and push."""

    # the model's weights that the last loaded checkpoint lacked
    _weights_not_loaded: Sequence[str] = ()
    hub_model_id: str | None = None
    push_in_progress: PushInProgress | None = None

    @property
    def _model_state(self) -> ModelState:
        """Reader and writer of the model's state, with or without the last fit's wrapper."""
        state = self._fit_model_state
        return state if state is not None and state.model is self.model else make_model_state(self.model)

    def _get_output_dir(self, trial: Trial) -> str:
        """Name the folder for checkpoints. A search's trial has its own within the output folder.

        Mirrors:
            `transformers.Trainer._get_output_dir`.
        """
        folder = str(self.args.output_dir)
        if self.hp_search_backend is None or trial is None:
            return folder
        return os.path.join(folder, name_of_trial(self.hp_search_backend, trial, self.hp_name))

    def _save_checkpoint(self, model: nn.Module, trial: Trial, metrics: object = None) -> None:
        """Write `checkpoint-<updates>`. It is written in a hidden folder and renamed when complete. Then rotate.

        Args:
            model: The wrapped model.
            trial: The hyperparameter search's trial.
            metrics: Unused. Overrides from before 4.47 pass it on.

        Mirrors:
            `transformers.Trainer._save_checkpoint`.
        """
        stores_flos = self.hp_search_backend is None and trial is None
        if stores_flos and home_of(self.store_flos).partition(".")[0] != "hf_compat":
            self.store_flos()
            stores_flos = False
        self._saver.save(self._get_output_dir(trial=trial), stores_flos)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write `optimizer.pt` and `scheduler.pt`."""
        self._model_state.write_optimizer(output_dir, unwrap_optimizer(self.optimizer), self.args.should_save)
        self._saver.write_state(layout.SCHEDULER_NAME, output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        """Write the gradient scaler's state, if there is one."""
        self._saver.write_state(layout.SCALER_NAME, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the states of all random generators."""
        self._saver.write_state(layout.RNG_STATE_NAME, output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, its configuration and its processor, so that `from_pretrained` reads them.

        Args:
            output_dir: The folder. By default the output folder.
            _internal_call: Whether the caller handles the Hub. Otherwise `push_to_hub=True` pushes the model.
        """
        folder = self.args.output_dir if output_dir is None else local_path("output_dir", output_dir)
        if not _internal_call:
            self._saver.check_folder(folder)
            log_line(f"Saving model checkpoint to {folder}")
            behaviour_of(self.optimizer).tell_of_saving()
        # `_save` overrides in subclasses, or on this instance
        asks_the_model = False
        for holder in (self, *type(self).__mro__[: type(self).__mro__.index(CheckpointMethods)]):
            method = vars(holder).get("_save")
            asks_the_model = asks_the_model or (method is not None and not reads_parameter(method, "state_dict"))
        with self._model_state.giving_whole() if asks_the_model else contextlib.nullcontext():
            self._model_state.write_weights(str(folder), self._save, for_checkpoint=_internal_call)
        if not _internal_call:
            self._saver.mirror.store_files()
        if self.args.push_to_hub and not _internal_call:
            try:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            except HubError as error:
                logger.warning("The model is saved, but not pushed. %s", error)

    def _save(self, output_dir: str | None = None, state_dict: Weights | None = None) -> None:
        """Write weights, configuration, processor and arguments to a folder."""
        if not self.args.should_save:
            return
        folder = str(output_dir if output_dir is not None else self.args.output_dir)
        os.makedirs(folder, exist_ok=True)
        model = self.accelerator.unwrap_model(self.model)
        if state_dict is not None and not state_dict:  # shards hold the weights
            call_if_there(getattr(model, "config", None), "save_pretrained", folder)  # transformers'
        elif is_pretrained_model(model):
            weights = state_dict or model.state_dict()
            if any(COMPILED in name for name in weights):
                state_dict = plain_names(weights)
            model.save_pretrained(folder, state_dict=state_dict)  # type: ignore[operator]  # transformers' or peft's
        else:
            log_line("Trainer.model is not a `PreTrainedModel`, only saving its state dict.")
            write_weights(state_dict or model.state_dict(), os.path.join(folder, layout.SAFE_WEIGHTS_NAME))
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None and hasattr(processor, "save_pretrained"):
            if self.processing_class is None:
                log_line("Saving Trainer.data_collator.tokenizer by default as Trainer.processing_class is `None`")
            processor.save_pretrained(folder)
        # Plain values with masked secrets, which can also be read as attributes (`saved.learning_rate`). OrderedDict is
        # the only type with attributes that `torch.load` accepts with `weights_only=True`, on any machine.
        values = json.loads(self.args.to_json_string())
        saved = OrderedDict(values)
        for name, value in values.items():
            if not hasattr(saved, name):
                saved.__dict__[name] = value
        torch.save(saved, os.path.join(folder, layout.TRAINING_ARGS_NAME))

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Remove checkpoints beyond `save_total_limit`. A run calls only an override of it; else `Saver` rotates.

        Args:
            use_mtime: Unused, as manifests hold the order.
            output_dir: The run's folder. By default the arguments' output folder.

        Mirrors:
            `transformers.Trainer._rotate_checkpoints`, 4.57. In 5.23 it is a function without an override.
        """
        ordered = self._sorted_checkpoints(output_dir, use_mtime=use_mtime)
        own = [path for path in ordered if manifest.is_ours(path)]
        keep = [self.state.best_model_checkpoint, *own[-1:]]
        remove_surplus(own, self.args.save_total_limit, keep, self._saver.remove)

    def _sorted_checkpoints(
        self,
        output_dir: str | None = None,
        checkpoint_prefix: str = layout.PREFIX_CHECKPOINT_DIR,
        use_mtime: bool = False,
    ) -> list[str]:
        """List a folder's checkpoints, oldest first, with the best one just before the newest.

        Args:
            output_dir: The run's folder. By default the arguments' output folder.
            checkpoint_prefix: Prefix of the checkpoints' names.
            use_mtime: Unused, as manifests hold the order.

        Mirrors:
            `transformers.Trainer._sorted_checkpoints`, 4.57. Rotation uses an override's order.
        """
        run_dir = str(output_dir or self.args.output_dir)
        ordered = self._saver.in_rotation_order(run_dir, self.state.global_step)
        ordered = [path for path in ordered if os.path.basename(path).startswith(f"{checkpoint_prefix}-")]
        best = self.state.best_model_checkpoint
        if best in ordered[:-1]:
            ordered.remove(best)
            ordered.insert(-1, best)
        return ordered

    def _can_load_shards_later(self, folder: str) -> bool:
        """Whether this process may read its own parts of a checkpoint's weights alone, once the model is sharded.

        Not if user code loads the weights, or may look at them before.
        """
        model = self._model_state.model
        if self._plan.of(self.args, self.model).strategy != "fsdp2" or isinstance(model, FSDPModule):
            return False
        is_ours = getattr(self._load_from_checkpoint, "__module__", None) == __name__
        is_plain = is_ours and not is_peft_model(model)
        return is_plain and not self._callbacks.lightning and Contents(folder).find(MODEL_INDEX) is not None

    def _loading_whole_weights(self) -> AbstractContextManager[None]:
        """Let an override load whole weights into a model whose parameters are sharded."""
        for method in (self._load_from_checkpoint, self._load_best_model):
            if getattr(method, "__module__", None) != __name__:
                return self._model_state.taking_whole()
        return contextlib.nullcontext()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model.

        Raises:
            CheckpointError: The folder has no weights.
        """
        given = self.model if model is None else model
        target = self.accelerator.unwrap_model(given)
        folder = str(resume_from_checkpoint)
        if is_peft_model(target) and not holds_whole_model(folder, target):
            trained = [parameter for parameter in target.parameters() if parameter.requires_grad]
            with whole_for_a_while(trained) if is_partitioned(target) else contextlib.nullcontext():
                self._weights_not_loaded = load_adapters(target, folder)
            return
        is_own = given is self.model or given is self.model_wrapped
        state = self._model_state if is_own else make_model_state(target)
        self._issue_warnings_after_load(state.load_weights(folder))

    _load_known_weights = _load_from_checkpoint  # no override replaces it

    def _issue_warnings_after_load(self, load_result: LoadResult) -> None:
        """Warn of weights that the checkpoint lacks, and of those that the model lacks."""
        missing = set(load_result.missing_keys)
        if missing:
            target = self.accelerator.unwrap_model(self.model)
            tied = dict(target.named_parameters(remove_duplicate=False)).keys() - dict(target.named_parameters()).keys()
            missing -= tied | set(getattr(target, "_keys_to_ignore_on_save", None) or [])
        self._weights_not_loaded = sorted(missing)
        if missing:
            shared_logger.warning(f"There were missing keys in the checkpoint model loaded: {sorted(missing)}.")
        if load_result.unexpected_keys:
            shared_logger.warning(
                f"There were unexpected keys in the checkpoint model loaded: {load_result.unexpected_keys}."
            )

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        best = self.state.best_model_checkpoint
        assert best is not None  # the only caller checks it
        self._saver.background.wait()
        log_line(f"Loading best model from {best} (score: {self.state.best_metric}).", otherwise=logger)
        if not os.path.isdir(best):
            shared_logger.warning(f"Could not locate the best model at {best}, so the last one is kept.")
            return
        behaviour_of(self.optimizer).to_evaluation()  # the next evaluation must not average the loaded weights
        # like upstream, read the files directly, and call an override only for files of its own
        try:
            load = self._load_known_weights if has_weights(Path(best)) else self._load_from_checkpoint
            load(best)
        except CheckpointMismatch:
            raise
        except CheckpointError as error:
            start = f"`load_best_model_at_end` cannot load the best checkpoint {best}"
            raise explained(start, PathFacts(best, error, str(self.args.output_dir))) from error

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the states of optimizer and schedule if a checkpoint has them."""
        if checkpoint is None:
            return
        schedule = Contents(checkpoint).find(layout.SCHEDULER_NAME)
        is_loaded = False
        if schedule is not None:
            behaviour_of(self.optimizer).tell_of_resuming()
            made = [dict(group) for group in self.optimizer.param_groups]
            with naming_misfit(f"The optimizer's state in {checkpoint}"):
                is_loaded = self._model_state.load_optimizer(checkpoint, unwrap_optimizer(self.optimizer))
        if schedule is None or not is_loaded:
            # an earlier warning covers files that a folder has lost
            lost = {layout.OPTIMIZER_NAME, layout.SCHEDULER_NAME}.intersection(read_manifest(checkpoint).files or ())
            level = logging.INFO if lost and listed_as_it_is(checkpoint) is not None else logging.WARNING
            logger.log(level, "%s has no optimizer and schedule, so both start anew.", checkpoint)
            return
        with naming_misfit(schedule):
            content = read_torch_file(schedule)
            if self.is_world_process_zero():
                tell_of_kept_options(made, self.optimizer.param_groups, content.get("base_lrs") or ())
            # another program may have written it: plain functions have no state, and a file may lack the list of them
            own = getattr(self.lr_scheduler, "lr_lambdas", None)
            functions = {} if own is None else {"lr_lambdas": [None] * len(own)}
            content = {**functions, **content}
            groups = self.optimizer.param_groups
            groups = groups[: len(getattr(self.lr_scheduler, "base_lrs", groups))]  # without those of a callback
            is_other = len(content.get("base_lrs") or groups) != len(groups) and not any(content.get("lr_lambdas", ()))
            is_uniform = len(set(content.get("base_lrs") or ())) == 1
            if is_other and (self.is_deepspeed_enabled or is_uniform or not all(group["params"] for group in groups)):
                # the optimizer fits: DeepSpeed drops a group without parameters, and one of two meshes becomes two
                content |= functions
                content["base_lrs"] = [group["initial_lr"] for group in groups]
                content["_last_lr"] = [group["lr"] for group in groups]
            check_schedule(schedule, content, self.lr_scheduler)
            self.lr_scheduler.load_state_dict(content)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the gradient scaler's state, if there is one."""
        scaler = self.accelerator.scaler
        path = Contents(checkpoint).find(layout.SCALER_NAME) if scaler is not None and checkpoint is not None else None
        if scaler is not None and path is not None:
            with naming_misfit(path):
                scaler.load_state_dict(read_torch_file(path))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set all random generators to a checkpoint's states, if it has them."""
        run = self._run
        states = run.start.rng if checkpoint == run.checkpoint else None  # of this very process, and read already
        if states is None and checkpoint is not None:
            states = read_random_states(checkpoint, self.args.process_index, self.args.world_size)
            if states is None:
                shared_logger.info(f"Didn't find an RNG file in {checkpoint}, reproducibility is not guaranteed.")
        if states is not None:
            write_rng(states)

    def _load_callback_state(self) -> None:
        """Restore the states of callbacks and control if the arguments ask for it."""
        if not self.args.restore_callback_states_from_checkpoint:
            self._tell_of_callback_states()
            return
        absent, callbacks = [], self.callback_handler.callbacks
        for name, saved in self.state.stateful_callbacks.items():
            found = [c for c in [*callbacks, self.control] if type(c).__name__ == name]
            if not found:
                absent.append(name)
            for callback, state in zip(found, saved if isinstance(saved, list) else [saved], strict=False):
                with naming_misfit(f"The state of {name} in `stateful_callbacks` of {layout.TRAINER_STATE_NAME}"):
                    restored = type(callback).from_state(state)
                if isinstance(callback, TrainerControl):
                    self.control = restored
                else:
                    callbacks.remove(callback)
                    callbacks.append(restored)
        if absent:
            shared_logger.warning(f"The checkpoint has states of missing callbacks: {', '.join(absent)}.")

    def _tell_of_callback_states(self) -> None:
        """Warn of states of callbacks in the checkpoint that begin anew, and differ from what they were."""
        begun = []
        now = export_states(self.callback_handler.callbacks)
        for name, saved in self.state.stateful_callbacks.items():
            of_saved, of_now = (one if isinstance(one, list) else [one] for one in (saved, now.get(name, [])))
            for was, is_now in zip(of_saved, of_now, strict=False):
                values = was.get("attributes", {})
                others = is_now.get("attributes", {})
                begun += [
                    f"{name}.{key} is {brief(others.get(key))} (it was {brief(value)})"
                    for key, value in values.items()
                    if key not in others or others[key] != value
                ]
        if begun and self.is_world_process_zero():
            warn_user(
                f"The resumed run does not restore the states of callbacks: {', '.join(begun)}.\n\n"
                "Hint: set `restore_callback_states_from_checkpoint=True` to go on with them."
            )

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository `args.hub_model_id` if it is missing, and set `hub_model_id` to its full name.

        Args:
            token: A token with write access. By default the arguments' token.
            private: Whether a new repository is private. By default the arguments' value.

        Raises:
            HubError: It cannot be created.
            MissingPackage: huggingface_hub is not installed.

        Mirrors:
            `transformers.Trainer.init_hf_repo`.
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
            `transformers.Trainer.create_model_card`.

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
            `transformers.Trainer.push_to_hub`.

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
            `transformers.Trainer._push_from_checkpoint`.

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
            `transformers.Trainer._finish_current_push`.

        Differs:
            The wait ends with Ctrl-C, or after 10 minutes plus the time that a slow connection needs.
        """
        if self.push_in_progress is not None:
            self._pushes.client.wait()

    def end(self) -> None:
        """Do nothing, as each `train`, `evaluate` or `predict` has ended its own Lightning trainer."""
