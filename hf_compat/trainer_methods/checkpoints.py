"""Save checkpoints in HF's layout.

Subclasses may override every method under its name and signature in `transformers.Trainer`. `training_run/saver.py`
calls them. Only tensors and plain containers are unpickled (`weights_only=True`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import OrderedDict

import torch
from torch import nn

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.lightning_io import write_weights
from hf_compat.checkpoint.reading import COMPILED, Weights, plain_names
from hf_compat.hf.search import Trial
from hf_compat.interop.transformers_models import is_pretrained_model
from hf_compat.interop.upstream_log import log_line
from hf_compat.optim.stepping import stepping_of
from hf_compat.runtime.collectives import agree
from hf_compat.runtime.inspection import is_replaced, reads_parameter
from hf_compat.runtime.rng import read_rng, unpack_rng
from hf_compat.search.backends import name_of_trial
from hf_compat.trainer_methods.checkpoint_loading import CheckpointLoadingMethods


class CheckpointMethods(CheckpointLoadingMethods):
    """The public and overridable methods that save."""

    def _get_output_dir(self, trial: Trial) -> str:
        """Return the folder for checkpoints. A search's trial has its own within the output folder.

        Mirrors:
            `transformers.Trainer._get_output_dir`, 5.23.
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
            `transformers.Trainer._save_checkpoint`, 5.23.
        """
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        agree(self._saver.background.settle())
        self._pushes.push_what_was_written()
        self._saver.save(self._get_output_dir(trial=trial))

    def _overrides_saving(self, name: str) -> bool:
        return is_replaced(self, name, CheckpointMethods)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write `optimizer.pt` and `scheduler.pt`."""
        self._model_state.write_optimizer(output_dir, self.optimizer, self.args.should_save)
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, names.SCHEDULER_NAME))

    def _save_scaler(self, output_dir: str) -> None:
        """Write the gradient scaler's state, if there is one."""
        scaler = self.accelerator.scaler
        if scaler is not None and self.args.should_save:
            torch.save(scaler.state_dict(), os.path.join(output_dir, names.SCALER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the states of all random generators."""
        states = unpack_rng(read_rng())
        torch.save(states, os.path.join(output_dir, self._rank_file(names.RNG_STATE_NAME)))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, its configuration and its processor, so that `from_pretrained` reads them.

        Args:
            output_dir: The folder. By default the output folder.
            _internal_call: Whether the caller handles the Hub. Otherwise `push_to_hub=True` pushes the model.
        """
        folder = output_dir if output_dir is not None else self.args.output_dir
        if not _internal_call:
            log_line(f"Saving model checkpoint to {folder}")
            stepping_of(self.optimizer).tell_of_saving()
        # `_save` overrides in subclasses, or on this instance
        holders = (self, *type(self).__mro__[: type(self).__mro__.index(CheckpointMethods)])
        replaced = [vars(holder)["_save"] for holder in holders if "_save" in vars(holder)]
        asks_the_model = any(not reads_parameter(method, "state_dict") for method in replaced)
        with self._model_state.giving_whole() if asks_the_model else contextlib.nullcontext():
            self._model_state.write_weights(str(folder), self._save, for_checkpoint=_internal_call)
        if self.args.push_to_hub and not _internal_call:
            self._pushes.push_saved_model()

    def _save(self, output_dir: str | None = None, state_dict: Weights | None = None) -> None:
        """Write weights, configuration, processor and arguments to a folder."""
        if not self.args.should_save:
            return
        folder = str(output_dir if output_dir is not None else self.args.output_dir)
        os.makedirs(folder, exist_ok=True)
        model = self.accelerator.unwrap_model(self.model)
        if state_dict is not None and not state_dict:  # shards hold the weights
            if hasattr(getattr(model, "config", None), "save_pretrained"):
                model.config.save_pretrained(folder)  # type: ignore[union-attr,operator]  # transformers'
        elif is_pretrained_model(model):
            weights = state_dict or model.state_dict()
            if any(COMPILED in name for name in weights):
                state_dict = plain_names(weights)
            model.save_pretrained(folder, state_dict=state_dict)  # type: ignore[operator]  # transformers' or peft's
        else:
            log_line("Trainer.model is not a `PreTrainedModel`, only saving its state dict.")
            write_weights(state_dict or model.state_dict(), os.path.join(folder, names.SAFE_WEIGHTS_NAME))
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None and hasattr(processor, "save_pretrained"):
            if self.processing_class is None:
                log_line("Saving Trainer.data_collator.tokenizer by default as Trainer.processing_class is `None`")
            processor.save_pretrained(folder)
        # Plain values with masked secrets, which can also be read as attributes (`saved.learning_rate`). OrderedDict is
        # the only type with attributes that `torch.load` accepts with `weights_only=True`, on any machine.
        values = json.loads(self.args.to_json_string())
        saved = OrderedDict(values)
        saved.__dict__.update({name: value for name, value in values.items() if not hasattr(saved, name)})
        torch.save(saved, os.path.join(folder, names.TRAINING_ARGS_NAME))

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Remove checkpoints beyond `save_total_limit`. An override is called instead, after each save.

        Args:
            use_mtime: Unused, as manifests hold the order.
            output_dir: The run's folder. By default the arguments' output folder.

        Mirrors:
            `transformers.Trainer._rotate_checkpoints`, 4.57. In 5.23 it is a function without an override.
        """
        ordered = self._sorted_checkpoints(output_dir, use_mtime=use_mtime)
        own = [path for path in ordered if manifest.is_ours(path)]
        self._saver.remove_surplus(own, [self.state.best_model_checkpoint, *own[-1:]])

    def _sorted_checkpoints(
        self,
        output_dir: str | None = None,
        checkpoint_prefix: str = names.PREFIX_CHECKPOINT_DIR,
        use_mtime: bool = False,
    ) -> list[str]:
        """Return a folder's checkpoints, oldest first, with the best one just before the newest.

        Args:
            output_dir: The run's folder. By default the arguments' output folder.
            checkpoint_prefix: Prefix of the checkpoints' names.
            use_mtime: Unused, as manifests hold the order.

        Mirrors:
            `transformers.Trainer._sorted_checkpoints`, 4.57. Rotation uses an override's order.
        """
        run_dir = str(output_dir or self.args.output_dir)
        ordered = self._saver.oldest_first(run_dir, self.state.global_step)
        ordered = [path for path in ordered if os.path.basename(path).startswith(f"{checkpoint_prefix}-")]
        best = self.state.best_model_checkpoint
        if best in ordered[:-1]:
            ordered.remove(best)
            ordered.insert(-1, best)
        return ordered
