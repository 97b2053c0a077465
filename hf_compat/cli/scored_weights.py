"""Resolve `--ckpt_path`, and write the result files of a command.

`validate`, `test` and `predict` score the weights of that checkpoint. `fit` resumes from it.
Existing files are kept. A new file of the same name gets a number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.edits import as_named
from hf_compat.checkpoint.files import STATE_FILE_BYTES, first_line, read_json
from hf_compat.checkpoint.forms import read_trainer_state
from hf_compat.checkpoint.reading import Contents, has_manifest, is_read_as_it_is
from hf_compat.errors import ArgumentError, CheckpointError, OutputFolderError
from hf_compat.hf.value_types import plain
from hf_compat.interop.object_parser import Spec
from hf_compat.runtime.collectives import agree, broadcast_object
from hf_compat.runtime.text import brief
from hf_compat.training_run.resumer import read_state

if TYPE_CHECKING:
    from hf_compat.trainer import Trainer


BEST, LAST, INITIAL = "best", "last", "initial"
MEANING = (
    "checkpoint: a checkpoint-N folder, a .ckpt, `best` or `last` of the output folder; "
    "fit goes on from it, the others score it (`initial`: the weights that `model` makes)"
)
_ELSEWHERE = {
    "hpc": "`--resume_from_checkpoint true`, which a requeued SLURM job does not even need",
    "registry": "a path: checkpoints are HF folders",
}
_SWITCHES = {"true": LAST, "false": None, "none": None, "null": None, "": None}  # as `resume_from_checkpoint` has them
_WEIGHTS = (
    names.SAFE_WEIGHTS_NAME, names.WEIGHTS_NAME, names.SAFE_WEIGHTS_INDEX_NAME, names.WEIGHTS_INDEX_NAME,
    names.ADAPTER_SAFE_WEIGHTS_NAME, names.ADAPTER_WEIGHTS_NAME,
)  # fmt: skip


def wanted_checkpoint(command: str, config: Namespace, line: Sequence[str]) -> str | None:
    """Return which checkpoint a command is to use, before anything is made.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        config: The whole configuration.
        line: The words of the command line.

    Returns:
        A path, `best` or `last`; None for the weights that the configuration makes.

    Raises:
        ArgumentError: The path does not exist, two arguments contradict each other, or fresh weights would be scored.
    """
    wanted = _as_word(config.ckpt_path)
    if wanted in _ELSEWHERE and not os.path.lexists(wanted):
        raise ArgumentError(f"`--ckpt_path {wanted}` is a word of Lightning's.\n\nHint: use {_ELSEWHERE[wanted]}.")
    if wanted not in (None, BEST, LAST, INITIAL) and not os.path.exists(wanted):
        output_dir = str(config.args.output_dir)
        there = [os.path.basename(found) for found in names.list_checkpoints(os.path.dirname(wanted) or ".")]
        of_run = [os.path.join(output_dir, os.path.basename(found)) for found in names.list_checkpoints(output_dir)]
        known = [os.path.join(os.path.dirname(wanted), name) for name in there] or of_run
        hint = f"there are {', '.join(known[-5:])}" if known else "name a checkpoint-N folder or a .ckpt file"
        raise ArgumentError(f"`--ckpt_path {wanted}` does not exist.\n\nHint: {hint}; `last` is the newest of a run.")
    if command == "fit":
        return _of_fit(wanted, _as_word(config.args.resume_from_checkpoint))
    if _as_word(config.args.resume_from_checkpoint) is not None:
        # Refuse what `fit` alone takes; beside a `ckpt_path` a fit's configuration may hold it
        resume = str(config.args.resume_from_checkpoint)
        on_line = any(word.partition("=")[0] == "--args.resume_from_checkpoint" for word in line)
        if not (wanted is not None and not on_line):
            raise ArgumentError(
                f"`resume_from_checkpoint={resume!r}` is where `fit` goes on; `{command}` trains nothing.\n\n"
                f"Hint: `hf-compat {command} --ckpt_path {_as_word(resume)}` scores that checkpoint."
            )
    if wanted is None:
        _refuse_fresh_weights(command, config)
    return None if wanted == INITIAL else wanted


def _as_word(value: object) -> str | None:
    text = "" if value is None else str(plain(value))
    return _SWITCHES.get(text.lower(), text)


def _of_fit(wanted: str | None, resume: str | None) -> str | None:
    """Return the checkpoint to resume from, given as `ckpt_path` or as `resume_from_checkpoint`."""
    wanted = None if wanted == INITIAL else wanted
    if resume in (BEST, INITIAL):  # of this name there can only be a path
        resume = os.path.join(".", resume)
    if wanted is not None and resume is not None and wanted != resume:
        raise ArgumentError(
            f"`ckpt_path={wanted!r}` and `resume_from_checkpoint={resume!r}` name two checkpoints to go on from.\n\n"
            "Hint: keep one of them."
        )
    return wanted if resume is None else resume


def _refuse_fresh_weights(command: str, config: Namespace) -> None:
    if pretrained_source(config.model) is not None:
        return
    raise ArgumentError(
        f"`hf-compat {command}` has no `--ckpt_path`: it would score the untrained weights that `model` makes.\n\n"
        "Hint: `--ckpt_path best` or `last` takes a checkpoint of the output folder; a checkpoint-N folder or a .ckpt "
        f"may be named. `--ckpt_path {INITIAL}` scores the weights that `model` makes, as a model that loads its own "
        "wants it."
    )


def pretrained_source(spec: Spec) -> str | None:
    """Return where a model's own class path reads trained weights from; None where the model begins at random."""
    if isinstance(spec, Namespace):
        spec = spec.as_dict()
    given = spec if isinstance(spec, dict) else {"class_path": spec}
    path, arguments = str(given.get("class_path")), given.get("init_args") or {}
    if not path.endswith(".from_pretrained"):
        return None
    source = arguments.get("pretrained_model_name_or_path")
    return path if source is None else f"{path} of {source}"


def find_checkpoint(trainer: Trainer, wanted: str) -> str:
    """Resolve `best`, `last` or a path to a path.

    Raises:
        CheckpointError: The output folder has no such checkpoint, or it is not whole.
    """
    if wanted not in (BEST, LAST):
        return wanted
    folder = str(trainer.args.output_dir)
    newest = _of_first_process(trainer, lambda: _newest(folder, wanted))
    return newest if wanted == LAST else _of_first_process(trainer, lambda: _best(trainer, newest))


def _of_first_process(trainer: Trainer, look: Callable[[], str]) -> str:
    """Search on the first process, and broadcast the result to the others."""
    found: list[str] = []
    error: Exception | None = None
    if trainer.is_world_process_zero():
        try:
            found.append(look())
        except CheckpointError as problem:
            error = problem
    agree(error)
    return broadcast_object(found)[0]


def _newest(folder: str, wanted: str) -> str:
    newest = manifest.get_last_checkpoint(folder) if os.path.isdir(folder) else None
    if newest is None:
        raise CheckpointError(
            f"`--ckpt_path {wanted}`: {folder} has no whole checkpoint.\n\n"
            "Hint: name the run's folder as `--output_dir`, or a checkpoint's path."
        )
    return newest


def _best(trainer: Trainer, newest: str) -> str:
    """Return the best checkpoint that the newest checkpoint of a run records."""
    best = trainer._resumer.best_of_state(read_state(newest).best_model_checkpoint, newest)
    if best is None:
        raise CheckpointError(
            f"`--ckpt_path best`: {newest} knows no best checkpoint that is still there.\n\n"
            "Hint: a run that evaluates and has `metric_for_best_model` knows one; `last` is the newest."
        )
    return best


def load_weights(trainer: Trainer, path: str, is_named: bool = True) -> None:
    """Load a checkpoint's weights into a trainer's model, and take over how far its run had come.

    Args:
        trainer: The trainer.
        path: A folder or a `.ckpt`.
        is_named: Whether the user named this folder. If its files were edited, it is read with a warning.

    Raises:
        CheckpointError: It is damaged, or does not hold all weights of the model.
    """
    if os.path.isdir(path):
        is_listed = has_manifest(Path(path))
        with as_named(path) if is_named and is_listed else contextlib.nullcontext():
            # Refuse a folder that is not whole; one without a manifest needs weights alone, as `save_model` writes
            # them
            has_weights = any(os.path.lexists(os.path.join(path, name)) for name in _WEIGHTS)
            wrong = [] if is_read_as_it_is(path) or (has_weights and not is_listed) else manifest.problems(path)
            wrong = wrong or list(trainer._resumer.misfits(path))
            if wrong:
                raise CheckpointError(
                    f"The weights in {path} cannot be scored: {'; '.join(wrong)}.\n\n"
                    "Hint: name a checkpoint-N folder of this model, or a .ckpt; `last` is the newest that is whole."
                )
            _load_folder(trainer, path, path)
        return
    with trainer._resumer.chosen(path) as folder:
        assert folder is not None  # it is made of the file
        _load_folder(trainer, folder, path)


def _load_folder(trainer: Trainer, folder: str, name: str) -> None:
    trainer._weights_not_loaded = []
    trainer._load_from_checkpoint(folder)
    missing = trainer._weights_not_loaded
    if missing:
        raise CheckpointError(
            f"{name} lacks {len(missing)} weights of the model: {', '.join(missing[:3])}{' …' if missing[3:] else ''}."
            "\n\nHint: name a checkpoint of this model; weights that are left as they are made would be scored."
        )
    state = Contents(folder).find(names.TRAINER_STATE_NAME)
    if state is not None:
        read = read_trainer_state(state)
        trainer.state.global_step, trainer.state.epoch = read.global_step, read.epoch


logger = logging.getLogger(__name__)

_TIMED = ("_runtime", "_per_second", "_preparation_time")  # differ each time
_ALL = "all_results.json"

IsSame = Callable[[bytes], bool]  # whether the bytes of a file say what is to be written


def keep(folder: str, name: str, content: bytes, is_same: IsSame | None = None) -> str:
    """Write a file unless one there says the same; a file that says something else stays, and the name gets a number.

    Args:
        folder: Made where it is missing.
        name: `config.yaml`, say; then `config-2.yaml` …
        content: What to write.
        is_same: Compares; bytes for bytes where it is not given.

    Returns:
        The path of the file that holds it.

    Raises:
        OutputFolderError: It cannot be written.
    """
    stem, suffix = os.path.splitext(name)
    number, path = 1, os.path.join(folder, name)
    try:
        os.makedirs(folder, exist_ok=True)
        while os.path.lexists(path):
            if _says(path, is_same or content.__eq__):
                return path
            number += 1
            path = os.path.join(folder, f"{stem}-{number}{suffix}")
        with open(path, "xb") as file:
            file.write(content)
    except OSError as error:
        raise OutputFolderError(
            f"{path} cannot be written: {error.strerror}.\n\nHint: choose another `--output_dir`."
        ) from error
    return path


def _says(path: str, is_same: IsSame) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return is_same(file.read())


def keep_metrics(folder: str, split: str, metrics: Mapping[str, object]) -> str:
    """Write metrics to `{split}_results.json`; the first ones of a split go to `all_results.json`, too.

    What a run has written there stays: other metrics go to `{split}_results-2.json`. Times do not count.

    Args:
        folder: The output folder.
        split: `eval`, `test` or `predict`.
        metrics: Names and numbers.

    Returns:
        The path of the file.
    """
    text, name = _as_text(metrics), f"{split}_results.json"
    is_first = not os.path.lexists(os.path.join(folder, name))
    path = keep(folder, name, text, lambda other: _untimed(other) == _untimed(text))
    if is_first:
        _add_to_all(os.path.join(folder, _ALL), metrics)
    return path


def _as_text(metrics: Mapping[str, object]) -> bytes:
    return json.dumps(dict(metrics), indent=4, sort_keys=True).encode()


def _untimed(text: bytes) -> str | None:
    """Return metrics in one form, without times, or None if the value does not hold metrics."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict):
        return None
    return json.dumps({name: value for name, value in read.items() if not name.endswith(_TIMED)}, sort_keys=True)


def _add_to_all(path: str, metrics: Mapping[str, object]) -> None:
    """Add metrics to those of a run. Existing values are kept."""
    before: object = {}
    try:
        before = read_json(path, STATE_FILE_BYTES) if os.path.lexists(path) else {}
    except CheckpointError as error:
        before = first_line(error)
    if not isinstance(before, dict):
        logger.warning("%s is left as it is: it holds no metrics (%s).", path, brief(before, 60))
        return
    partial = f"{path}.{os.getpid()}.partial"
    with open(partial, "wb") as file:
        file.write(_as_text({**metrics, **before}))
    os.replace(partial, path)
