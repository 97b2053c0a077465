"""Resolve `--ckpt_path`, whose weights `validate`, `test` and `predict` score. `fit` resumes from it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.choice import get_last_checkpoint
from hf_compat.checkpoint.reading import Contents, listed_as_it_is, read_manifest
from hf_compat.checkpoint.unlisted_checkpoints import reading_named_folder
from hf_compat.checkpoint.validation import read_trainer_state
from hf_compat.errors import ArgumentError, CheckpointError
from hf_compat.hf.value_types import plain
from hf_compat.interop.object_parser import Spec
from hf_compat.runtime.addresses import store_address
from hf_compat.runtime.collectives import broadcast_text, failing_together
from hf_compat.runtime.text import brief
from hf_compat.training_run.resumer import read_state

if TYPE_CHECKING:
    from hf_compat.trainer import Trainer


BEST, LAST, INITIAL = "best", "last", "initial"
MEANING = (
    "checkpoint: a checkpoint-N folder, a .ckpt, `best` or `last` of the output folder; "
    "fit resumes from it, the others score it (`initial`: the weights that `model` makes)"
)
_ELSEWHERE = {
    "hpc": "`--resume_from_checkpoint true`, which a requeued SLURM job does not need",
    "registry": "a path: checkpoints are HF folders",
}
_SWITCHES = {"true": LAST, "false": None, "none": None, "null": None, "": None}  # as in `resume_from_checkpoint`


def wanted_checkpoint(command: str, config: Namespace, line: Sequence[str]) -> str | None:
    """Find the checkpoint that a command uses, before anything is made. None takes the weights that `model` makes.

    Raises:
        ArgumentError: The path does not exist, two arguments contradict each other, or untrained weights would be
            scored.
    """
    wanted = _as_word(config.ckpt_path)
    if wanted in _ELSEWHERE and not os.path.lexists(wanted):
        raise ArgumentError(f"`--ckpt_path {wanted}` is a value of Lightning's.\n\nHint: use {_ELSEWHERE[wanted]}.")
    if wanted not in (None, BEST, LAST, INITIAL) and not os.path.exists(wanted) and store_address(wanted) is None:
        beside = layout.list_checkpoints(os.path.dirname(wanted) or ".")
        known = beside or layout.list_checkpoints(str(config.args.output_dir))
        names = ", ".join(map(os.path.normpath, known[-5:]))
        hint = f"there are {names}" if names else "name a checkpoint-N folder or a .ckpt file"
        raise ArgumentError(f"`--ckpt_path {wanted}` does not exist.\n\nHint: {hint}; `last` is the newest of a run.")
    resume = _as_word(config.args.resume_from_checkpoint)
    if command == "fit":  # either may name the checkpoint to resume from
        wanted = None if wanted == INITIAL else wanted
        if resume in (BEST, INITIAL):  # it can only be a path
            resume = os.path.join(".", resume)
        if wanted is not None and resume is not None and wanted != resume:
            raise ArgumentError(
                f"`ckpt_path={brief(wanted)}` and `resume_from_checkpoint={brief(resume)}` name two checkpoints to "
                "resume from.\n\nHint: keep one of them."
            )
        return wanted if resume is None else resume
    if resume is not None:
        # the configuration of a fit may hold it, if `ckpt_path` names the checkpoint
        on_line = any(word.partition("=")[0] == "--args.resume_from_checkpoint" for word in line)
        if wanted is None or on_line:
            raise ArgumentError(
                f"`resume_from_checkpoint={brief(str(config.args.resume_from_checkpoint))}` is for `fit`, and "
                f"`{command}` does not train.\n\n"
                f"Hint: `hf-compat {command} --ckpt_path {resume}` scores that checkpoint."
            )
    if wanted is None and pretrained_source(config.model) is None:
        raise ArgumentError(
            f"`hf-compat {command}` has no `--ckpt_path`: it would score the untrained weights that `model` makes.\n\n"
            "Hint: `--ckpt_path best` or `last` takes a checkpoint of the output folder. It may also name a "
            f"checkpoint-N folder or a .ckpt. `--ckpt_path {INITIAL}` scores the weights that `model` makes."
        )
    return None if wanted == INITIAL else wanted


def _as_word(value: object) -> str | None:
    text = "" if value is None else str(plain(value))
    return _SWITCHES.get(text.lower(), text)


def pretrained_source(spec: Spec) -> str | None:
    """The source of trained weights in a model's class path. None if the model begins with random weights."""
    if isinstance(spec, Namespace):
        spec = spec.as_dict()
    given = spec if isinstance(spec, dict) else {"class_path": spec}
    path, arguments = str(given.get("class_path")), given.get("init_args") or {}
    if not path.endswith(".from_pretrained"):
        return None
    source = arguments.get("pretrained_model_name_or_path")
    return path if source is None else f"{path} of {source}"


def find_checkpoint(trainer: Trainer, wanted: str) -> str:
    """Resolve `best`, `last` or a path to a path."""
    if wanted not in (BEST, LAST):
        return wanted
    folder, found = str(trainer.args.output_dir), None
    with failing_together():
        if trainer.is_world_process_zero():  # the other processes get the result
            newest = get_last_checkpoint(folder) if os.path.isdir(folder) else None
            if newest is None:
                raise CheckpointError(
                    f"`--ckpt_path {wanted}`: {folder} has no complete checkpoint.\n\n"
                    "Hint: name the run's folder as `--output_dir`, or a checkpoint's path."
                )
            best = read_state(newest).best_model_checkpoint if wanted == BEST else None
            if best is not None and (uploads := trainer._saver.mirror.uploads) is not None:
                uploads.look()
                uploads.bring_best(newest, best)
            found = newest if wanted == LAST else trainer._resumer.best_of_state(best, newest)
            if found is None:
                raise CheckpointError(
                    f"`--ckpt_path best`: {newest} records no best checkpoint that still exists.\n\n"
                    "Hint: a run that evaluates and has `metric_for_best_model` records one. `last` is the newest."
                )
    return broadcast_text(str(found))


def load_weights(trainer: Trainer, path: str, is_named: bool = True) -> None:
    """Load a checkpoint's weights into a trainer's model, and the progress of its run."""
    if os.path.isdir(path):
        is_listed = read_manifest(path).exists
        with reading_named_folder(path) if is_named and is_listed else contextlib.nullcontext():
            # a folder without a manifest needs weights only, as `save_model` writes them
            names = (*layout.WHOLE_WEIGHTS, *layout.ADAPTER_WEIGHTS)
            has_weights = any(os.path.lexists(os.path.join(path, name)) for name in names)
            is_named_edited = listed_as_it_is(path) is not None
            wrong = [] if is_named_edited or (has_weights and not is_listed) else manifest.problems(path)
            if wrong:
                raise CheckpointError(
                    f"The weights in {path} cannot be scored: {'; '.join(wrong)}.\n\n"
                    "Hint: name a checkpoint-N folder of this model, or a .ckpt. `last` is the newest complete one."
                )
            _load_folder(trainer, path, path)
        return
    with trainer._resumer.choosing_checkpoint(path) as folder:
        assert folder is not None  # it holds the content of the file
        _load_folder(trainer, folder, path)


def _load_folder(trainer: Trainer, folder: str, name: str) -> None:
    trainer._weights_not_loaded = []
    trainer._load_from_checkpoint(folder)
    missing = trainer._weights_not_loaded
    if missing:
        raise CheckpointError(
            f"{name} lacks {len(missing)} weights of the model: {', '.join(missing[:3])}{' …' if missing[3:] else ''}."
            "\n\nHint: name a checkpoint of this model. Otherwise random weights would be scored."
        )
    state = Contents(folder).find(layout.TRAINER_STATE_NAME)
    if state is not None:
        read = read_trainer_state(state)
        trainer.state.global_step, trainer.state.epoch = read.global_step, read.epoch
