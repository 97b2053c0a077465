"""`HFModule` made from `checkpoint-N` folders and `.ckpt` files, which may describe the model, and fits that resume."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import IO, Any, Self

import lightning.pytorch as pl
import torch
from jsonargparse import Namespace
from lightning.pytorch.core.saving import load_hparams_from_tags_csv, load_hparams_from_yaml
from torch import nn

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.adapters import holds_adapters, load_adapters
from hf_compat.checkpoint.convert import (
    FOLDER_KEY,
    OWN_KEY,
    PREFIX,
    HFCheckpointIO,
    LightningCheckpoint,
    to_hf,
    warn_of_left_out,
)
from hf_compat.checkpoint.files import Named, naming, read_json, read_small, walked_torch_file
from hf_compat.checkpoint.hints import no_checkpoint, no_file
from hf_compat.checkpoint.reading import (
    COMPILED,
    Contents,
    LoadResult,
    knowing_types,
    names_of,
    plain_names,
    read_manifest,
    read_torch_file,
    read_weights,
)
from hf_compat.checkpoint.run_state import ARRAY_GLOBALS, DataPosition, plain_checkpoint, readable_state
from hf_compat.checkpoint.unlisted_checkpoints import reading_named_folder, tell_of_model_alone
from hf_compat.checkpoint.validation import check_optimizer, check_schedule, check_weights, settle_states
from hf_compat.data.types import DataSource
from hf_compat.engine.internals import (
    attached_trainer,
    count_on,
    dump_checkpoint,
    keep_loaded_data,
    load_state,
    load_waiting_data_states,
    restricted_classmethod,
    run_validation,
    start_from,
)
from hf_compat.engine.module import WindowModule
from hf_compat.engine.windows import Windows
from hf_compat.errors import ArgumentError, CheckpointError, CheckpointMismatch, warn_user
from hf_compat.hf import enums
from hf_compat.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
from hf_compat.hf.rows import ROWS
from hf_compat.interop.object_parser import Made, Spec, build, build_data
from hf_compat.interop.transformers_models import as_held, is_peft_model, read_pretrained
from hf_compat.runtime.text import brief, is_secret

ModelSpec = dict[str, Spec]
# Data, or its description. With another type than `dict` the parser would turn a text like '2024' into a number.
DataSpec = dict | DataSource  # type: ignore[type-arg]  # the parser looks into dict[str, …]


def made(value: Made, where: str) -> Made:
    """Make the object that a class path and its arguments describe. In a mapping of descriptions each is made.

    Other values are returned unchanged. `where` is the argument's name.

    Raises:
        ArgumentError: The class does not exist, or does not take an argument.
    """
    if type(value).__name__ == "NestedArg":  # jsonargparse's value for a part of an object of unknown type
        whole = f'{{"class_path": …, "init_args": {{"{value.key}": {value.val}}}}}'
        raise ArgumentError(
            f"`{where}.init_args.{value.key}={value.val}`: this parser cannot change a part of `{where}`.\n\n"
            f"Hint: `--….{where} '{whole}'` replaces all of it. LightningCLI and `hf-compat fit` can change a part."
        )
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, str):
        return build_data(value, where)
    if type(value) is not dict:  # a DatasetDict is the user's
        return value
    if "class_path" in value:
        return build(value, where)
    return {name: made(part, f"{where}.{name}") for name, part in value.items()}


logger = logging.getLogger(__name__)

MapLocation = Any  # as in torch.load
Given = dict[str, Any]  # keywords of a module's constructor

_SHOWN = 8  # names in a message
# A mapping with these keys holds the arguments of a run, of any release.
_OF_ARGUMENTS = {"output_dir", "per_device_train_batch_size"}


class LoadableModule(WindowModule):
    """A module that a checkpoint describes or continues: with weights, the model, the arguments, and the progress."""

    _resume: Mapping[str, Any] | None = None  # the progress that this fit continues
    _lightning_resumes = False
    # of the checkpoint that this fit continues
    _loaded_optimizers: Sequence[object] = ()
    _loaded_schedules: Sequence[object] = ()

    def on_load_checkpoint(self, checkpoint: LightningCheckpoint) -> None:
        """Load adapters, keep the progress stored in an HF folder, and rename weights to match the model."""
        folder = checkpoint.pop(FOLDER_KEY, None)
        holds_adapter = folder is not None and holds_adapters(folder)
        if holds_adapter:  # PEFT reads them itself
            _load_adapter(self.model, folder)
        self.stepping.to_evaluation()  # the loaded weights must not be averaged with those of an earlier fit
        trainer = attached_trainer(self)
        if trainer is not None:  # else `load_from_checkpoint` makes a module, which begins anew
            self._resume = checkpoint.get(OWN_KEY)
            self._lightning_resumes = "loops" in checkpoint
            count_on(checkpoint.get("loops", {}), self)
            self._loaded_optimizers = checkpoint.get("optimizer_states", ())
            self._loaded_schedules = checkpoint.get("lr_schedulers", ())
        weights = plain_names(checkpoint["state_dict"])
        if all(name.startswith(PREFIX) for name in weights):  # an HF folder may use other names than the model
            held = as_held(self.model, {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()})
            weights = {PREFIX + name: tensor for name, tensor in held.items()}
        if folder is not None:  # it holds no states of metrics, and adapters are loaded
            own = plain_names(self.state_dict())
            elsewhere = ("compute_metrics.", PREFIX) if holds_adapter else ("compute_metrics.",)
            weights |= {name: tensor for name, tensor in own.items() if name.startswith(elsewhere)}
        if trainer is None or not trainer.strategy.restore_checkpoint_after_setup:  # else a rank may hold parts
            check_weights(self._source, weights or plain_names(self.state_dict()), self)
        checkpoint["state_dict"] = names_of(self, weights)
        if trainer is not None and trainer.state.fn == "fit" and trainer.is_global_zero:
            where = self._source
            if not self._lightning_resumes and self._resume is None:
                tell_of_model_alone(where)
            elif not checkpoint.get("optimizer_states", True):
                logger.warning("%s has no optimizer and schedule, so both start anew.", where)

    @property
    def _source(self) -> str:
        """The path of the checkpoint that is being loaded, for messages."""
        trainer = attached_trainer(self)
        return str((trainer.ckpt_path if trainer is not None else None) or "The checkpoint")

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> LoadResult:
        """Load weights as torch does, and a tied one from any of its names.

        Raises:
            CheckpointMismatch: Some are missing or unknown, and `strict` is set.
        """
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        held = {name: one for name, one in self.state_dict().items() if isinstance(one, torch.Tensor)}
        loaded = {held[name].data_ptr() for name in state_dict if name in held} - {0}
        missing = [one for one in found.missing_keys if one not in held or held[one].data_ptr() not in loaded]
        missing = self._needed(missing, "_keys_to_ignore_on_load_missing")
        unknown = self._needed(found.unexpected_keys, "_keys_to_ignore_on_load_unexpected")
        told = ""  # in torch's words, for which scripts look
        for what, names in (("Missing", missing), ("Unexpected", unknown)):
            if names:
                shown = ", ".join(f'"{name}"' for name in names[:_SHOWN]) + (", …" if names[_SHOWN:] else "")
                told += f" {what} key(s) in state_dict: {shown}."
        if told and strict:
            raise CheckpointMismatch(
                f"{self._source} does not fit {type(self).__name__}.{told}\n\n"
                "Hint: make the module as it was when this was saved, or name a checkpoint of this one. An HF folder "
                "holds `model` alone. `strict=False`, or `strict_loading = False` in the module, loads what is in both."
            )
        if told and attached_trainer(self) is not None:
            logger.warning("%s does not fit %s.%s", self._source, type(self).__name__, told)
        return found._replace(missing_keys=missing, unexpected_keys=unknown)

    def _needed(self, names: Iterable[str], ignored: str) -> list[str]:
        """The names without those that a model of transformers leaves out of its files, or ignores in them."""
        unsaved = {*(getattr(self.model, "_keys_to_ignore_on_save", None) or ())}
        patterns = getattr(self.model, ignored, None) or ()
        plain = {name: name.replace(COMPILED, "").removeprefix(PREFIX) for name in names}
        return [
            name
            for name, own in plain.items()
            if own not in unsaved and not any(re.search(pattern, own) for pattern in patterns)
        ]

    def save_hf_checkpoint(self, folder: str | Path) -> None:
        """Save the trainer's run as an HF folder. `ckpt_path`, `from_pretrained` and Trainers of HF read it.

        `trainer.save_checkpoint(path)` writes Lightning's file. Call this on every rank.

        Args:
            folder: A new folder of this machine, such as `out/checkpoint-8`.

        Raises:
            ArgumentError: The folder exists, or is not a path of this machine.
            CallbackError: The state of a callback cannot be read back from a folder.

        Warns:
            HfCompatWarning: The folder has no place for weights outside `model`. The message names them.
        """
        checkpoint: LightningCheckpoint = dump_checkpoint(self.trainer)
        path = os.fspath(folder)
        for name, state in checkpoint.get("callbacks", {}).items():
            readable_state(state, f"The state of the callback {name}")
        if self.trainer.is_global_zero:
            warn_of_left_out(path, checkpoint)
            to_hf(checkpoint, path)
        self.trainer.strategy.barrier("save_hf_checkpoint")

    def on_fit_start(self) -> None:
        """Check that optimizers and schedules can continue as the checkpoint's, which Lightning then gives them."""
        optimizers, self._loaded_optimizers = self._loaded_optimizers, ()
        schedules, self._loaded_schedules = self._loaded_schedules, ()
        path = str(self.trainer.ckpt_path)
        for optimizer, state in zip(self.trainer.optimizers, optimizers, strict=False):
            # with several ranks each may hold a part of each parameter
            check_optimizer(path, state, optimizer if self.trainer.world_size == 1 else None)
        for config, state in zip(self.trainer.lr_scheduler_configs, schedules, strict=False):
            check_schedule(path, state, config.scheduler)
        super().on_fit_start()

    def on_train_start(self) -> None:
        """Continue where a Lightning checkpoint or an HF folder ended."""
        load_waiting_data_states(self.trainer)
        if self.trainer.ckpt_path is not None:
            self.stepping.tell_of_resuming()
            for optimizer in self.trainer.optimizers:
                settle_states(str(self.trainer.ckpt_path), optimizer)
        resume, self._resume = self._resume, None
        windows = self.trainer.train_dataloader
        if resume is None:
            return
        if not isinstance(windows, Windows):
            if self._lightning_resumes:
                return
            # A plain loader cannot be moved to a position, so only the counts are set. Lightning warns within an epoch
            position, batches = DataPosition.read(resume["windows"]), self.trainer.num_training_batches
            size = self.steps.args.gradient_accumulation_steps
            in_epoch = position.micro_batches_done or position.updates_done * size
            is_over = position.is_over or in_epoch >= batches
            epoch, done = (position.epoch + 1, 0) if is_over else (position.epoch, in_epoch)
            all_done = int(epoch * batches) + done if epoch else done
            start_from(self.trainer, epoch, int(resume["updates"]), done, all_done)
            return
        windows.load_state_dict(resume["windows"])
        keep_loaded_data(self.trainer)
        if not self._lightning_resumes:
            start_from(self.trainer, windows.next_epoch, int(resume["updates"]), windows.updates_to_skip)
        elif self.trainer.current_epoch > windows.next_epoch:
            windows.finish_epoch()  # after an epoch's last update Lightning continues with the next epoch
        if self._lightning_resumes and resume.get("validates_next"):
            with windows.resumed_rng():  # the interrupted run was about to validate
                run_validation(self.trainer)

    @restricted_classmethod
    def load_from_checkpoint(
        cls,  # noqa: N805 - of a class method
        checkpoint_path: str | Path | IO[bytes],
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: object,
    ) -> Self:
        """Make a module from a checkpoint.

        Args:
            checkpoint_path: A `checkpoint-N` folder, a folder that `save_model` wrote, or a `.ckpt`, open or not.
            map_location: As in `torch.load`. For a folder it is a device.
            hparams_file: A YAML or CSV file with hyperparameters, in place of the checkpoint's.
            strict: Whether missing or unknown weights are an error (the default) or a warning.
            weights_only: False unpickles a `.ckpt`, which runs the code in it.
            kwargs: Arguments of the constructor. They precede the hyperparameters. `model=` is needed unless the
                checkpoint describes the model: by a `config.json` of transformers in a folder, or by hyperparameters
                of LightningCLI, or of `save_hyperparameters` in a subclass, in a `.ckpt`.

        Raises:
            CheckpointError: The checkpoint is missing or damaged, does not fit, or does not describe the model.

        Mirrors:
            `lightning.LightningModule.load_from_checkpoint`, 2.6.

        Differs:
            Reads HF folders. A folder's arguments are used unless `args` is passed, without those that a Lightning
            trainer sets. Missing weights are an error.
        """
        folder = os.fspath(checkpoint_path) if isinstance(checkpoint_path, (str, Path)) else ""
        with (
            reading_named_folder(folder)
            if (os.path.isdir(folder) and read_manifest(folder).exists)
            else contextlib.nullcontext()
        ):
            path, checkpoint = read_described(cls, checkpoint_path, map_location, hparams_file, weights_only)
            held = checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY]
            if "model" in kwargs and held.pop("_instantiator", None) is not None:  # LightningCLI's, with its objects
                args = held.get("args")
                held = {name: value for name, value in held.items() if not isinstance(value, (dict, list))}
                if isinstance(args, dict):
                    held["args"] = args.get("init_args", args)
                checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = held
            given = _completed(cls, path, held, kwargs)
            with naming(path):
                module = load_state(cls, checkpoint, strict, given)
        assert isinstance(module, cls)
        weights = checkpoint["state_dict"]
        if not weights:
            warn_user(f"The state dict in {brief(path)} contains no parameters.")
        device = next((tensor.device for tensor in weights.values()), torch.device("cpu"))
        return module.to(map_location if os.path.isdir(path) and map_location is not None else device)


def read_described(
    cls: type[pl.LightningModule | pl.LightningDataModule],
    checkpoint_path: str | Path | IO[bytes],
    map_location: MapLocation,
    hparams_file: str | Path | None,
    weights_only: bool | None,
) -> tuple[str, LightningCheckpoint]:
    """Read a checkpoint and the hyperparameters of a module or data module. Return its path, for messages, and it.

    Raises:
        CheckpointError: It is missing or cannot be read, or the file of hyperparameters is of no kind that is read. A
            missing one is Lightning's warning.
    """
    source = os.fspath(checkpoint_path) if isinstance(checkpoint_path, (str, Path)) else checkpoint_path
    path = source if isinstance(source, str) else f"the open {type(source).__name__}"
    if source is path and "://" not in path and not os.path.exists(path):
        raise no_file(path)
    try:
        checkpoint = _read(source, map_location, weights_only)
    except CheckpointError as error:
        raise (no_checkpoint(path, error) if os.path.isdir(path) else error) from error
    if hparams_file is not None:
        file = os.fspath(hparams_file)
        kind = os.path.splitext(file)[1].lower()
        if kind not in (".csv", ".yaml", ".yml"):
            text = f"`hparams_file={brief(file)}` is not a .yaml, .yml or .csv file.\n\nHint: check the path."
            raise CheckpointError(text)
        read = load_hparams_from_tags_csv if kind == ".csv" else load_hparams_from_yaml
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = dict(read(file))
    checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    return path, checkpoint


def arguments_among(path: str, held: Given) -> Given:
    """The hyperparameters that were arguments of HF, as arguments."""
    if "_instantiator" in held:  # LightningCLI's, which makes them
        return {}
    return {
        name: _as_arguments(path, value)
        for name, value in held.items()
        if isinstance(value, Mapping) and (name == "args" or {*value} >= _OF_ARGUMENTS)
    }


def _completed(cls: type[LoadableModule], path: str, held: Given, keywords: Given) -> Given:
    """The constructor's keywords, with the checkpoint's model and arguments.

    A folder's model is loaded if its `config.json` names a class of transformers. No other code is run.

    Raises:
        CheckpointError: Nothing describes the model.
    """
    parameters = inspect.signature(cls.__init__).parameters
    completed = dict(keywords)
    if "model" in parameters and not {"model", "_instantiator"} & {*completed, *held}:
        config = Contents(path).find("config.json") if os.path.isdir(path) else None
        described = None if config is None else read_json(config)
        kinds = described.get("architectures") if isinstance(described, dict) else None
        model = read_pretrained(path, str(kinds[0])) if isinstance(kinds, list) and kinds else None
        if model is None:
            what = "config.json of transformers" if os.path.isdir(path) else "hyperparameters that describe it"
            raise CheckpointError(
                f"{path} holds the weights of a model, and no {what}.\n\n"
                f"Hint: {cls.__name__}.load_from_checkpoint({brief(path)}, model=…) with a model of the same class."
            )
        completed["model"] = model
    if "args" in parameters and not {"args", "_instantiator"} & {*completed, *held}:
        found = _arguments_of(path)
        completed |= {} if found is None else {"args": found}
    return {**arguments_among(path, held), **completed}


def _read(source: str | IO[bytes], map_location: MapLocation, weights_only: bool | None) -> LightningCheckpoint:
    """Read a `.ckpt`, or the weights of a folder."""
    if isinstance(source, str) and os.path.isdir(source):
        weights = {} if holds_adapters(source) else read_weights(source)
        return {"state_dict": {PREFIX + name: tensor for name, tensor in weights.items()}, FOLDER_KEY: source}
    here = map_location if map_location is not None or torch.cuda.is_available() else "cpu"
    if isinstance(source, str):
        return HFCheckpointIO().load_checkpoint(source, here, weights_only)
    if weights_only is False:
        return dict(torch.load(source, here, weights_only=False))
    with knowing_types(source, ARRAY_GLOBALS, objects=True):
        return plain_checkpoint("The open file", torch.load(source, here, weights_only=True))


def _arguments_of(path: str) -> TrainingArguments | None:
    """Read a folder's arguments. None if it has none, or if reading them would run code."""
    found = Contents(path).find(layout.TRAINING_ARGS_NAME) if os.path.isdir(path) else None
    if found is None:
        return None
    held: object = None
    try:
        held = read_torch_file(found)
    except CheckpointError:  # transformers' file holds an object of its own class
        with contextlib.suppress(CheckpointError):  # a damaged file counts as none
            held = read_pickled_arguments(found)
    if isinstance(held, Mapping):
        return _as_arguments(path, held)
    warn_user(
        f"The arguments in {found} cannot be read without running code, so the module has the defaults.\n\n"
        "Hint: give `args=…`.",
    )
    return None


def _as_arguments(path: str, held: Mapping[str, object]) -> TrainingArguments:
    """Make arguments of a checkpoint's, without secrets and those that a Lightning trainer sets.

    Raises:
        CheckpointError: A value is not valid.
    """
    plain, seq2seq = (kind.__dataclass_fields__.keys() for kind in (TrainingArguments, Seq2SeqTrainingArguments))
    kind = Seq2SeqTrainingArguments if held.keys() & (seq2seq - plain) else TrainingArguments
    of_trainer = {name for name, row in ROWS.items() if row.native is not None}
    names_kept = {name for name in kind.__dataclass_fields__.keys() - of_trainer if not is_secret(name)}
    known: Given = {name: value for name, value in held.items() if value is not None and name in names_kept}
    try:
        return kind(**known)
    except (TypeError, ValueError, NotImplementedError) as error:
        text = f"The arguments in {path} cannot be used here: {error}\n\nHint: give `args=…`."
        raise CheckpointError(text) from error


def _load_adapter(model: nn.Module, folder: str) -> None:
    """Load PEFT's adapter into a model.

    Raises:
        CheckpointError: The model has no adapter, or the folder lacks some of its weights.
    """
    if not is_peft_model(model):
        raise CheckpointError(
            f"{folder} holds an adapter, and the model has none.\n\nHint: pass `model=get_peft_model(…)`."
        )
    load_adapters(model, folder, strict=True)


# Enums whose members are texts, of today and of earlier releases.
_ENUMS = frozenset({*vars(enums), "EvaluationStrategy", "FSDPOption"})


def read_pickled_arguments(path: str) -> dict[str, object] | None:
    """Read the arguments that transformers has pickled, as fields of today's.

    Args:
        path: A `training_args.bin`.

    Returns:
        Today's fields by name, with old names translated. None if the file holds something else.

    Warns:
        HfCompatWarning: A field holds an object of a kind that is not known here.
    """
    held = walked_torch_file(path, io.BytesIO(read_small(path)))
    state = held.state if isinstance(held, Named) else None
    if not isinstance(state, Mapping) or not state.keys() >= _OF_ARGUMENTS:
        return None
    # Today's fields of a release's attributes. One that needs code to be known has its default
    known = {name: _plain(held) for name, held in state.items()}
    args = TrainingArguments.__new__(TrainingArguments)
    args.__setstate__({name: value for name, value in known.items() if not isinstance(value, Named)})
    today = {field.name: vars(args).get(field.name, field.default) for field in fields(args)}
    unknown = [name for name in today if isinstance(known.get(name), Named)]
    if unknown:
        warn_user(
            f"{path} holds objects for {', '.join(unknown)}, which cannot be read without running code; they have "
            "their defaults.\n\nHint: give `args=…`.",
        )
    return today


def _plain(value: object) -> object:
    """Replace `Named` objects by values: an enum's member by its text, options by a dict."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if not isinstance(value, Named):
        return value
    if value.name == "AcceleratorConfig" and isinstance(value.state, Mapping):
        return _plain(value.state)
    # An enum's member: Python writes the class with the text, or `getattr` with class and name
    match tuple(value.given):
        case (str() as text,) if value.name in _ENUMS:
            return text
        case (type() as kind, str() as name) if issubclass(kind, Named) and kind.name in _ENUMS:
            found = getattr(getattr(enums, kind.name, None), name, name.lower())
            return found.value if isinstance(found, Enum) else found
    return value
