"""`HFModule` made from `checkpoint-N` folders and `.ckpt` files, which may describe the model, and fits that resume."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import IO, Any, Self

import torch
from jsonargparse import Namespace
from lightning.pytorch.core.saving import load_hparams_from_tags_csv, load_hparams_from_yaml
from torch import nn

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.adapters import holds_adapters, load_adapters
from hf_compat.checkpoint.convert import ADAPTERS_KEY, OWN_KEY, PREFIX, HFCheckpointIO, LightningCheckpoint
from hf_compat.checkpoint.files import Named, read_json, read_small, walked_torch_file
from hf_compat.checkpoint.forms import (
    check_optimizer,
    check_schedule,
    check_weights,
    settle_states,
)
from hf_compat.checkpoint.hints import no_checkpoint
from hf_compat.checkpoint.judging import as_named, tell_of_model_alone
from hf_compat.checkpoint.reading import (
    COMPILED,
    Contents,
    names_of,
    plain_names,
    read_manifest,
    read_torch_file,
    read_weights,
)
from hf_compat.checkpoint.run_state import DataPosition
from hf_compat.data.types import DataSource
from hf_compat.engine.internals import (
    attached_trainer,
    keep_loaded_data,
    load_state,
    load_waiting_data_states,
    restricted_classmethod,
    run_validation,
    start_from,
)
from hf_compat.engine.module import WindowModule
from hf_compat.engine.windows import Windows
from hf_compat.errors import ArgumentError, CheckpointError, warn_user
from hf_compat.hf import enums
from hf_compat.hf.argument_values import ROWS
from hf_compat.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
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

_SHOWN = 3  # names in a message
# Among hyperparameters, a mapping with these keys was the arguments of a run.
_OF_ARGUMENTS = {"learning_rate", "num_train_epochs", "output_dir", "per_device_train_batch_size"}


class LoadableModule(WindowModule):
    """A module that a checkpoint describes or continues: with weights, the model, the arguments, and the progress."""

    _resume: Mapping[str, Any] | None = None  # the progress that this fit continues
    _lightning_resumes = False
    # of the checkpoint that this fit continues
    _loaded_optimizers: Sequence[object] = ()
    _loaded_schedules: Sequence[object] = ()

    def on_load_checkpoint(self, checkpoint: LightningCheckpoint) -> None:
        """Load adapters, keep the progress stored in an HF folder, and rename weights to match the model."""
        folder = checkpoint.pop(ADAPTERS_KEY, None)
        if folder is not None:  # PEFT reads them itself
            _load_adapter(self.model, folder)
        self.stepping.to_evaluation()  # the loaded weights must not be averaged with those of an earlier fit
        self._resume = checkpoint.get(OWN_KEY)
        self._lightning_resumes = "loops" in checkpoint
        self._loaded_optimizers = checkpoint.get("optimizer_states", ())
        self._loaded_schedules = checkpoint.get("lr_schedulers", ())
        weights = plain_names(checkpoint["state_dict"])
        if all(name.startswith(PREFIX) for name in weights):  # an HF folder may use other names than the model
            held = as_held(self.model, {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()})
            weights = {PREFIX + name: tensor for name, tensor in held.items()}
        trainer = attached_trainer(self)
        where = str((trainer.ckpt_path if trainer is not None else None) or "The checkpoint")
        if trainer is None or trainer.world_size == 1:  # otherwise each rank may hold a part of each weight
            own = {name.replace(COMPILED, ""): tensor for name, tensor in self.state_dict().items()}
            check_weights(where, weights or own, self)  # PEFT reads adapters itself
        checkpoint["state_dict"] = names_of(self, weights)
        if trainer is None:
            return
        has_progress = self._lightning_resumes or self._resume is not None
        lacks_none = trainer.world_size > 1 or not weights or (has_progress and not self._lightning_resumes)
        missing = [] if lacks_none else sorted(_missing_names(self, weights))
        if missing:
            logger.warning("%s has missing keys, which keep the values that the model has: %s.", where, missing)
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            if not has_progress:
                tell_of_model_alone(where)
            elif not checkpoint.get("optimizer_states", True):
                logger.warning("%s has no optimizer and schedule, so both start anew.", where)

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
        checkpoint_path: str | Path | IO[Any],
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
        source = os.fspath(checkpoint_path) if isinstance(checkpoint_path, (str, Path)) else checkpoint_path
        path = source if isinstance(source, str) else f"the open {type(source).__name__}"
        if source is path and "://" not in path and not os.path.exists(path):
            raise no_checkpoint(path)
        with as_named(path) if (os.path.isdir(path) and read_manifest(path).exists) else contextlib.nullcontext():
            try:
                checkpoint = _read(source, map_location, weights_only)
            except CheckpointError as error:
                raise (no_checkpoint(path, error) if os.path.isdir(path) else error) from error
            if hparams_file is not None:
                file = os.fspath(hparams_file)
                kind = os.path.splitext(file)[1].lower()
                if not os.path.isfile(file) or kind not in (".csv", ".yaml", ".yml"):
                    text = f"`hparams_file={brief(file)}` is not a .yaml, .yml or .csv file.\n\nHint: check the path."
                    raise CheckpointError(text)
                read = load_hparams_from_tags_csv if kind == ".csv" else load_hparams_from_yaml
                checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = dict(read(file))
            held = checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
            if "model" in kwargs and held.pop("_instantiator", None) is not None:  # LightningCLI's, with its objects
                args = held.get("args")
                held = {name: value for name, value in held.items() if not isinstance(value, (dict, list))}
                if isinstance(args, dict):
                    held["args"] = args.get("init_args", args)
                checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = held
            given = _completed(cls, path, held, kwargs)
            made = _make(cls, path, checkpoint, given, strict is not False, map_location)
        assert isinstance(made, cls)
        return made


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
    for name, value in held.items() if "_instantiator" not in held else ():
        if isinstance(value, Mapping) and (name == "args" or value.keys() >= _OF_ARGUMENTS):
            completed.setdefault(name, _as_arguments(path, value))
    return completed


def _read(source: str | IO[Any], map_location: MapLocation, weights_only: bool | None) -> LightningCheckpoint:
    """Read weights and hyperparameters, without the position of the run."""
    if isinstance(source, str) and os.path.isdir(source):
        weights = {} if holds_adapters(source) else read_weights(source)
        return {"state_dict": {PREFIX + name: tensor for name, tensor in weights.items()}}
    here = map_location if map_location is not None or torch.cuda.is_available() else "cpu"
    if isinstance(source, str):
        checkpoint = HFCheckpointIO().load_checkpoint(source, here, weights_only)
    else:
        checkpoint = torch.load(source, here, weights_only=weights_only is not False)
    return {name: value for name, value in checkpoint.items() if name not in (OWN_KEY, "loops")}


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


def _make(
    cls: type[LoadableModule],
    path: str,
    checkpoint: LightningCheckpoint,
    given: Given,
    strict: bool,
    map_location: MapLocation,
) -> LoadableModule:
    """Make the module with the checkpoint's weights, and compare their names.

    Raises:
        CheckpointError: Some are missing or unknown, and `strict` is set.
    """
    stored = {name.replace(COMPILED, "") for name in checkpoint["state_dict"]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found keys that are")  # the comparison below knows tied weights
        module = load_state(cls, checkpoint, given)
    assert isinstance(module, LoadableModule)
    if stored or not os.path.isdir(path):
        held = {name.replace(COMPILED, "") for name in module.state_dict()}
        missing = _missing_names(module, stored)
        problems = []
        for what, found in (("lacks", missing), ("has, beyond those of the module,", sorted(stored - held))):
            if found:
                shown = ", ".join(found[:_SHOWN]) + (" …" if found[_SHOWN:] else "")
                problems.append(f"{path} {what} {len(found)} weights: {shown}.")
        if problems and strict:
            raise CheckpointError("\n".join(problems) + "\n\nHint: `strict=False` loads those that are in both.")
        for problem in problems:
            warn_user(problem)
        device = next((t.device for t in checkpoint["state_dict"].values()), torch.device("cpu"))
    else:
        _load_adapter(module.model, path)
        device = torch.device("cpu")
    return module.to(map_location if os.path.isdir(path) and map_location is not None else device)


def _missing_names(module: LoadableModule, stored: Iterable[str]) -> list[str]:
    """The names of a module's weights that are not stored. A tied one may have any of its names."""
    held = {name.replace(COMPILED, ""): value for name, value in module.state_dict().items()}
    places = {held[name].data_ptr() for name in stored if name in held and held[name].numel()}
    known = {*stored, *(PREFIX + name for name in getattr(module.model, "_keys_to_ignore_on_save", None) or ())}
    return [name for name, value in held.items() if name not in known and value.data_ptr() not in places]


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


# Fields of every release's arguments.
_ALWAYS = frozenset({"output_dir", "learning_rate", "seed", "weight_decay"})
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
    if not isinstance(state, Mapping) or not state.keys() >= _ALWAYS:
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
