"""Checkpoints in HF's layout: what is written, how it is read back. HF's method names.

Every method is an override point of `transformers.Trainer` under its own name and signature. Nothing is ever unpickled
but tensors and plain containers (`weights_only=True`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from hf_compat.callbacks.lightning_states import ask_callbacks
from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.adapters import load_adapters
from hf_compat.checkpoint.contents import Contents, is_read_as_it_is
from hf_compat.checkpoint.forms import check_schedule
from hf_compat.checkpoint.lightning_io import write_weights
from hf_compat.checkpoint.model_state import ModelState, make_model_state
from hf_compat.checkpoint.reading import (
    COMPILED,
    LoadResult,
    Weights,
    fitting,
    plain_names,
    read_torch_file,
)
from hf_compat.checkpoint.run_state import RUN_STATE_NAME, RunState
from hf_compat.checkpoint.saving_place import SavingPlace
from hf_compat.checkpoint.taken_over import check_schedule_took_over
from hf_compat.checkpoint.trainer_state import read_trainer_state
from hf_compat.engine.windows import as_plain
from hf_compat.errors import CheckpointWriteError, HfCompatError, warn_once
from hf_compat.hf.state import TrainerControl, TrainerState, export_states, is_exportable
from hf_compat.interop.transformers_models import is_peft_model, is_pretrained_model
from hf_compat.interop.upstream_log import log_line
from hf_compat.runtime.background import frozen_copy
from hf_compat.runtime.collectives import agree
from hf_compat.runtime.rng import legacy_globals, pack_legacy_rng, read_rng, unpack_rng, write_rng
from hf_compat.trainer_methods.output_folder import OutputFolderMethods
from hf_compat.training_run.best_metric import note_best_checkpoint
from hf_compat.training_run.rotation import (
    checkpoints_to_delete,
    checkpoints_to_delete_at_end,
    in_order_of_rotation,
)

logger = logging.getLogger(__name__)

# Methods that write; what a subclass writes in their place cannot be copied for later.
_WRITERS = (
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)


class CheckpointMethods(OutputFolderMethods):
    """The public methods and override points of saving and resuming."""

    _other_weights: dict[str, Any] | None = None
    _extras: dict[str, Any] = {}
    # of the model, that the last checkpoint whose weights were loaded lacked
    _weights_not_loaded: Sequence[str] = ()
    # of the last fit; it outlives the fit, as DeepSpeed's engine goes on holding the weights
    _fit_model_state: ModelState | None = None

    @property
    def _model_state(self) -> ModelState:
        """What reads and writes the state of the model, as the last fit or nobody has wrapped it."""
        state = self._fit_model_state
        return state if state is not None and state.model is self.model else make_model_state(self.model)

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder that checkpoints go to."""
        return str(self.args.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any, metrics: object = None) -> None:
        """Write `checkpoint-<updates>`: in a hidden folder first, renamed once it is whole; then rotate.

        Args:
            model: The wrapped model.
            trial: The hyperparameter search's trial.
            metrics: Of releases before 4.47, whose overrides hand it on; nothing reads it.

        Mirrors:
            `transformers.Trainer._save_checkpoint`, 5.23.
        """
        self.store_flos()
        self._background.wait()
        self._push_what_was_written()
        self._ask_lightning_callbacks()
        run_dir = self._get_output_dir(trial=trial)
        with self._saving_into(run_dir) as owner:
            self._save_as(names.checkpoint_path(run_dir, self.state.global_step), SavingPlace(run_dir, owner))

    def _save_as(self, final: str, place: SavingPlace) -> None:
        """Write a checkpoint, at once or in the background."""
        run_dir = os.path.dirname(final)
        agree(self._attempt(lambda: self._tidy(place), place, final))
        best_before = self.state.best_model_checkpoint
        path_of = functools.partial(names.checkpoint_path, run_dir)
        note_best_checkpoint(self.state, path_of, final, self._has_written)
        best = self.state.best_model_checkpoint
        log_line(f"Saving model checkpoint to {final}")
        if self._may_save_in_background():
            write = self._frozen_write()
            self._background.submit(lambda: self._write_and_seal(write, place, final, best, self._push_when_written))
            return
        try:
            self._write_and_seal(self._write_checkpoint, place, final, best, self._push_checkpoint)
        except BaseException:
            self.state.best_model_checkpoint = best_before
            raise

    def _tidy(self, place: SavingPlace) -> None:
        if self.args.should_save:
            self._keep(place.run_dir)
            manifest.tidy(place.run_dir)
            place.prepare()

    def _has_written(self, path: str) -> bool:
        return os.path.isdir(path) and self._is_of_this_run(path)

    def _write_and_seal(
        self,
        write: Callable[[str], None],
        place: SavingPlace,
        final: str,
        best: str | None,
        push: Callable[[str], None],
    ) -> None:
        """Write a folder in a hidden place, seal it, put it into its own; then push it, and make room.

        With several processes, each writes its part; all have to succeed before the first one seals the folder.
        """
        # no name here for what went wrong: it would keep the frames of the writers, and their open files, alive
        agree(self._attempt(lambda: self._write_into(place, write, final), place, final))
        agree(self._attempt(lambda: self._seal(place, final), place, final))
        push(final)
        if self.args.should_save:
            self._rotate_checkpoints(final, best)

    def _write_into(self, place: SavingPlace, write: Callable[[str], None], final: str) -> None:
        os.makedirs(place.path, exist_ok=True)  # this process may have a disk of its own
        write(place.inside(final))
        place.note_deletions()

    def _seal(self, place: SavingPlace, final: str) -> None:
        if self.args.should_save:
            place.adopt(final)
            manifest.seal(place.inside(final), self._writer(place.run_dir))
            self._keep(place.run_dir)
            place.land(final)
            manifest.put_in_place(place.inside(final), final)
            place.discard()

    def _attempt(self, write: Callable[[], None], place: SavingPlace, final: str) -> Exception | None:
        """Write, and return what went wrong: the other processes have to know before it is raised."""
        try:
            write()
            return None
        except BaseException as error:
            if self.args.should_save:
                place.discard()
            is_named = isinstance(error, HfCompatError)
            if isinstance(error, (OSError, RuntimeError, safetensors.SafetensorError)) and not is_named:
                return _not_written(final, error)
            if isinstance(error, Exception):  # of a method or a callback of the user's
                return error
            raise

    def _may_save_in_background(self) -> bool:
        """Return whether all that a checkpoint holds can be copied first: what a subclass writes cannot."""
        if not self.args.async_save:
            return False
        if self.args.world_size > 1:
            warn_once("`async_save=True`: with several processes checkpoints are written at once.")
            return False
        if not self._model_state.can_be_copied:
            warn_once("`async_save=True`: the model is sharded; checkpoints are written at once.")
            return False
        own = [name for name in _WRITERS if getattr(type(self), name) is not getattr(CheckpointMethods, name)]
        if own:
            warn_once(
                f"`async_save=True`: {type(self).__name__} overrides {', '.join(own)}; checkpoints are not async."
            )
        is_adapter = is_peft_model(self.accelerator.unwrap_model(self.model))
        if is_adapter:
            warn_once("`async_save=True`: adapters of PEFT are small; they are written at once.")
        return not own and not is_adapter

    def _frozen_write(self) -> Callable[[str], None]:
        """Copy everything that a checkpoint holds, and return what writes the copy."""
        weights = frozen_copy(self._other_weights or self._model_state.whole_weights())
        files = {} if self.args.save_only_model else self._frozen_files()
        self.state.stateful_callbacks = export_states(self._stateful())
        state = copy.deepcopy(self.state)

        def write(folder: str) -> None:
            self._save(folder, state_dict=weights)
            for name, content in files.items():
                torch.save(content, os.path.join(folder, name))
            state.save_to_json(os.path.join(folder, names.TRAINER_STATE_NAME))

        return write

    def _frozen_files(self) -> dict[str, object]:
        """Copy what it takes to resume, under the names of its files."""
        files: dict[str, object] = {names.OPTIMIZER_NAME: frozen_copy(self.optimizer.state_dict())}
        files |= frozen_copy(self._schedule_file())
        if self.accelerator.scaler is not None:
            files[names.SCALER_NAME] = self.accelerator.scaler.state_dict()
        files[names.RNG_STATE_NAME] = unpack_rng(read_rng())
        run_state = self._run_state_now()
        if run_state is not None:
            files[RUN_STATE_NAME] = frozen_copy(run_state.to_plain())
        return files

    def _write_checkpoint(self, folder: str) -> None:
        with _holding(self.accelerator.unwrap_model(self.model), self._other_weights):
            self.save_model(folder, _internal_call=True)
        os.makedirs(folder, exist_ok=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
            self._save_run_state(folder)
        if self.args.should_save:
            self.state.stateful_callbacks = export_states(self._stateful())
            self.state.save_to_json(os.path.join(folder, names.TRAINER_STATE_NAME))

    def _rotate_checkpoints(self, written: str, best: str | None) -> None:
        """Remove what the limit has no room for: other runs' checkpoints first, never the one just written or the best.

        Args:
            written: The checkpoint that was just written.
            best: The best one.
        """
        if not self.args.save_total_limit:
            return
        checkpoints = _own_checkpoints(os.path.dirname(written))
        ordered = in_order_of_rotation(checkpoints, names.checkpoint_step(written) or 0, self._is_of_this_run)
        for path in checkpoints_to_delete(ordered, self.args.save_total_limit, keep=[best, written]):
            _remove_or_warn(path)

    def _rotate_checkpoints_at_end(self, run_dir: str, best: str | None) -> None:
        """With a limit of one, keep the best checkpoint alone."""
        for path in checkpoints_to_delete_at_end(list(_own_checkpoints(run_dir)), self.args.save_total_limit, best):
            log_line(f"Deleting older checkpoint [{path}] due to args.save_total_limit")
            _remove_or_warn(path)

    def _save_run_state(self, output_dir: str) -> None:
        """Write `run_state.pt`: what it takes to go on as if the run had not stopped."""
        state = self._run_state_now()
        if state is not None and (self.args.should_save or self.args.world_size > 1):
            state.save(output_dir, self.args.process_index, self.args.world_size)

    def _own(self, name: str) -> str:
        """Return the name of a file that every process has its own of."""
        return names.of_rank(name, self.args.process_index, self.args.world_size)

    def _run_state_now(self) -> RunState | None:
        together = self._train_batch_size * self.args.world_size
        return self._run.state(
            self.control.should_epoch_stop, self.args.world_size, together, self._lightning_callbacks, self._extras
        )

    def _ask_lightning_callbacks(self) -> None:
        """Let Lightning callbacks add to the checkpoint; what is no plain value or tensor could not be read back."""
        self._other_weights, self._extras = None, {}
        run = self._run
        if run.module is None or run.lightning_trainer is None:
            return
        self._other_weights, extras = ask_callbacks(self._lightning_callbacks, run.lightning_trainer, run.module)
        for name, value in extras.items():
            plain = as_plain(value)
            if plain is None and value is not None:
                warn_once(f"A callback puts {name!r} into the checkpoint: no plain value, so it is left out.")
            else:
                self._extras[name] = plain

    def _stateful(self) -> list[Any]:
        return [c for c in [*self.callback_handler.callbacks, self.control] if is_exportable(c)]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write `optimizer.pt` and `scheduler.pt`."""
        self._model_state.write_optimizer(output_dir, self.optimizer, self.args.should_save)
        if self.args.should_save:
            for name, content in self._schedule_file().items():
                torch.save(content, os.path.join(output_dir, name))

    def _schedule_file(self) -> dict[str, object]:
        """Return the schedule's state under its file's name; nothing where there is no schedule."""
        return {} if self.lr_scheduler is None else {names.SCHEDULER_NAME: self.lr_scheduler.state_dict()}

    def _save_scaler(self, output_dir: str) -> None:
        """Write the gradient scaler's state, where there is one."""
        scaler = self.accelerator.scaler
        if scaler is not None and self.args.should_save:
            torch.save(scaler.state_dict(), os.path.join(output_dir, names.SCALER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the states of all random generators."""
        states = unpack_rng(read_rng())
        torch.save(states, os.path.join(output_dir, self._own(names.RNG_STATE_NAME)))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, its configuration and its processor, so that `from_pretrained` reads them.

        Args:
            output_dir: The folder; the output folder where none is given.
            _internal_call: Whether the caller sees to the Hub; with `push_to_hub=True` the model is pushed otherwise.
        """
        folder = output_dir if output_dir is not None else self.args.output_dir
        if not _internal_call:
            log_line(f"Saving model checkpoint to {folder}")
        self._model_state.write_weights(str(folder), self._save, for_checkpoint=_internal_call)
        if self.args.push_to_hub and not _internal_call:
            self._push_saved_model()

    def _save(self, output_dir: str | None = None, state_dict: Weights | None = None) -> None:
        """Write weights, configuration, processor and arguments to a folder."""
        if not self.args.should_save:
            return
        folder = str(output_dir if output_dir is not None else self.args.output_dir)
        os.makedirs(folder, exist_ok=True)
        self._save_weights_and_config(folder, state_dict)
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None and hasattr(processor, "save_pretrained"):
            processor.save_pretrained(folder)
        torch.save(
            _with_attributes(json.loads(self.args.to_json_string())), os.path.join(folder, names.TRAINING_ARGS_NAME)
        )

    def _save_weights_and_config(self, folder: str, state_dict: Weights | None) -> None:
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
            write_weights(state_dict or model.state_dict(), os.path.join(folder, names.SAFE_WEIGHTS_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model.

        Args:
            resume_from_checkpoint: The folder.
            model: The model; the trainer's where none is given.

        Raises:
            CheckpointError: The folder holds no weights.
        """
        given = self.model if model is None else model
        target = self.accelerator.unwrap_model(given)
        folder = str(resume_from_checkpoint)
        if is_peft_model(target):
            self._weights_not_loaded = load_adapters(target, folder)
            return
        is_own = given is self.model or given is self.model_wrapped
        state = self._model_state if is_own else make_model_state(target)
        self._issue_warnings_after_load(state.load_weights(folder))

    def _issue_warnings_after_load(self, load_result: LoadResult) -> None:
        """Warn of weights that a checkpoint lacked, and of those that the model does not know."""
        target = self.accelerator.unwrap_model(self.model)
        missing = set(load_result.missing_keys) - _aliases(target) - set(_ignored_on_save(target))
        self._weights_not_loaded = sorted(missing)
        if missing:
            logger.warning("There were missing keys in the checkpoint model loaded: %s.", sorted(missing))
        if load_result.unexpected_keys:
            logger.warning(
                "There were unexpected keys in the checkpoint model loaded: %s.", load_result.unexpected_keys
            )

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        best = self.state.best_model_checkpoint
        assert best is not None  # the only caller looked
        self._background.wait()
        log_line(f"Loading best model from {best} (score: {self.state.best_metric}).", otherwise=logger)
        if not os.path.isdir(best):
            logger.warning("Could not locate the best model at %s; the last one stays.", best)
            return
        self._load_from_checkpoint(best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the states of optimizer and schedule, where a checkpoint has them."""
        if checkpoint is None:
            return
        schedule = Contents(checkpoint).find(names.SCHEDULER_NAME)
        if schedule is None or not self._load_optimizer(checkpoint):
            level = logging.INFO if is_read_as_it_is(checkpoint) else logging.WARNING  # a warning has said so
            logger.log(level, "%s has no optimizer and schedule: both start anew.", checkpoint)
            return
        content = read_torch_file(schedule)
        check_schedule(schedule, content)
        # plain functions keep no state: a file without the list that says so means the same
        own = getattr(self.lr_scheduler, "lr_lambdas", None)
        functions = {} if own is None else {"lr_lambdas": [None] * len(own)}
        with fitting(schedule):
            self.lr_scheduler.load_state_dict({**functions, **content})
        check_schedule_took_over(schedule, self.lr_scheduler)

    def _load_optimizer(self, checkpoint: str) -> bool:
        with fitting(f"The optimizer's state in {checkpoint}"):
            return self._model_state.load_optimizer(checkpoint, self.optimizer)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the gradient scaler's state, where there is one."""
        scaler = self.accelerator.scaler
        path = Contents(checkpoint).find(names.SCALER_NAME) if scaler is not None and checkpoint is not None else None
        if scaler is not None and path is not None:
            with fitting(path):
                scaler.load_state_dict(read_torch_file(path))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set all random generators to a checkpoint's states, where it has them."""
        if self._exact_rng is not None:
            write_rng(self._exact_rng)
            return
        own, first = self._own(names.RNG_STATE_NAME), names.of_rank(names.RNG_STATE_NAME, 0, 2)
        places = [own, first, names.RNG_STATE_NAME]  # of another number of processes: the first one's
        if checkpoint is None:
            return
        path = next(filter(None, map(Contents(checkpoint).find, places)), None)
        if path is None:
            logger.info("Didn't find an RNG file in %s, reproducibility is not guaranteed.", checkpoint)
            return
        with fitting(path):
            write_rng(pack_legacy_rng(read_torch_file(path, allowed=legacy_globals())))

    def _load_callback_state(self) -> None:
        """Give callbacks and control the states that a checkpoint saved, where the arguments ask for it."""
        if not self.args.restore_callback_states_from_checkpoint:
            return
        absent = []
        for name, saved in self.state.stateful_callbacks.items():
            found = [c for c in [*self.callback_handler.callbacks, self.control] if type(c).__name__ == name]
            if not found:
                absent.append(name)
            for callback, state in zip(found, saved if isinstance(saved, list) else [saved], strict=False):
                self._restore(callback, state)
        if absent:
            logger.warning("The checkpoint has states of callbacks that are not there: %s.", ", ".join(absent))

    def _restore(self, callback: Any, state: dict[str, Any]) -> None:
        with fitting(f"The state of {type(callback).__name__} in `stateful_callbacks` of {names.TRAINER_STATE_NAME}"):
            restored = type(callback).from_state(state)
        if isinstance(callback, TrainerControl):
            self.control = restored
            return
        callbacks = self.callback_handler.callbacks
        callbacks.remove(callback)
        callbacks.append(restored)


def _with_attributes(values: dict[str, object]) -> OrderedDict[str, object]:
    """Return plain values that are read as `saved.learning_rate`, too; secrets are masked.

    An OrderedDict is the one type with attributes that `torch.load` makes with `weights_only=True`, on any machine.
    """
    saved = OrderedDict(values)
    saved.__dict__.update({name: value for name, value in values.items() if not hasattr(saved, name)})
    return saved


def _own_checkpoints(run_dir: str) -> dict[str, int]:
    """List the checkpoints of a folder that this package wrote, each with its update, oldest update first."""
    paths = names.list_checkpoints(run_dir)
    return {path: names.checkpoint_step(path) or 0 for path in paths if manifest.is_ours(path)}


def _remove_or_warn(checkpoint: str) -> None:
    """Remove a checkpoint; where that fails the newer ones are good all the same, and the run goes on."""
    try:
        manifest.remove(checkpoint)
    except OSError as error:
        logger.warning("The old checkpoint %s could not be removed: %s. Training goes on.", checkpoint, error)


def read_state(checkpoint: str) -> TrainerState:
    """Read a checkpoint's state.

    Raises:
        CheckpointError: There is none, or it is no state.
    """
    return read_trainer_state(Contents(checkpoint).need(names.TRAINER_STATE_NAME))


def _if_full(folder: str) -> str:
    """Return that a disk is full, where it is: torch's writer only says which position it could not reach."""
    full = os.path.isdir(folder) and shutil.disk_usage(folder).free == 0
    return "; no space left on the disk" if full else ""


def _not_written(final: str, cause: Exception) -> CheckpointWriteError:
    error = CheckpointWriteError(
        f"The checkpoint {final} could not be written: {cause}{_if_full(os.path.dirname(final))}.\n\n"
        "Hint: make room or give write permission there, then resume; earlier checkpoints are as they were."
    )
    error.__cause__ = cause
    return error


@contextlib.contextmanager
def _holding(model: nn.Module, weights: dict[str, Any] | None) -> Iterator[None]:
    """Let a model hold other weights for a while: those that are to be written."""
    if weights is None:
        yield
        return
    own = {name: value.clone() for name, value in model.state_dict().items()}
    if own.keys() != weights.keys():  # pruned weights, which the model holds as weights and masks
        model.__dict__["state_dict"] = lambda *args, **kwargs: dict(weights)
        try:
            yield
        finally:
            del model.__dict__["state_dict"]
        return
    model.load_state_dict(weights)
    try:
        yield
    finally:
        model.load_state_dict(own)


def _aliases(model: nn.Module) -> set[str]:
    """Names under which a parameter stands a second time: tied weights."""
    first_names = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first_names


def _ignored_on_save(model: nn.Module) -> list[str]:
    return list(getattr(model, "_keys_to_ignore_on_save", None) or [])
