"""Choose the hint about a checkpoint that cannot be used, by facts of its path and of the error.

`RULES` has a row for each cause. The first one that applies says what was found, and the way out. No hint asks to
remove anything: what this process cannot read may be whole, and a damaged file may have a copy.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.files import OUTSIDE, Refused, first_line, refusal_behind
from hf_compat.checkpoint.reading import MANIFEST_NAME, read_manifest
from hf_compat.checkpoint.zero_reader import LATEST_NAME
from hf_compat.errors import CheckpointError, MissingCheckpoint, UnreadableCheckpoint, UnreadObjects
from hf_compat.runtime.text import brief

ITS_LOSS = {
    layout.OPTIMIZER_NAME: "optimizer and schedule start anew",
    layout.SCHEDULER_NAME: "optimizer and schedule start anew",
    layout.RNG_STATE_NAME: "random numbers are not those of the run",
    "run_state.pt": "the position in the data is worked out from the updates",
}
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # of the Hub
_MOST_SHOWN = 8


def has_state_of_training(names: Collection[str]) -> bool:
    """Whether a checkpoint's file other than weights is among those of a folder."""
    of_training = (layout.TRAINER_STATE_NAME, layout.OPTIMIZER_NAME, layout.SCHEDULER_NAME, LATEST_NAME)
    return any(name in of_training or name.startswith(("rng_state", "run_state")) for name in names)


@dataclass(frozen=True)
class PathFacts:
    """What is known of a path that is taken for a checkpoint.

    Attributes:
        path: As it was given.
        error: Why it cannot be used. None if that shows at the path.
        output_dir: The output folder of the run, where `resume_from_checkpoint=True` chooses. None elsewhere.
    """

    path: str
    error: Exception | None = None
    output_dir: str | None = None

    @cached_property
    def refusal(self) -> OSError | None:
        """The system's error where it does not let this process read, or cannot."""
        try:
            os.stat(self.path)
            if os.path.isdir(self.path):
                os.listdir(self.path)
        except OSError as error:
            return refusal_behind(error)
        except ValueError:  # no possible name
            return None
        return None if self.error is None else refusal_behind(self.error)

    @cached_property
    def inside(self) -> list[str]:
        """The checkpoints in the folder."""
        return layout.list_checkpoints(self.path)

    @cached_property
    def beside(self) -> list[str]:
        """The other checkpoints in the parent folder. Empty if it cannot be listed."""
        own = os.path.abspath(self.path)
        try:
            return [path for path in layout.list_checkpoints(os.path.dirname(own)) if path != own]
        except CheckpointError:
            return []

    @property
    def around(self) -> str | None:
        """The checkpoint that the path is a part of."""
        if layout.checkpoint_step(self.path) is not None:
            return None
        above = Path(os.path.abspath(self.path)).parents
        return next((str(folder) for folder in above if layout.checkpoint_step(folder) is not None), None)

    @property
    def exists(self) -> bool:
        return os.path.exists(self.path)

    @property
    def is_folder(self) -> bool:
        return os.path.isdir(self.path)

    @property
    def is_damaged_manifest(self) -> bool:
        found = read_manifest(self.path)
        return found.exists and found.files is None and found.saving is None

    @property
    def holds_nothing_of_a_checkpoint(self) -> bool:
        return not any(map(layout.is_part_of_checkpoint, os.listdir(self.path)))

    @property
    def is_model_alone(self) -> bool:
        """Whether it holds weights, and is not what is left of a checkpoint."""
        names = os.listdir(self.path)
        weights = (*layout.WHOLE_WEIGHTS, *layout.ADAPTER_WEIGHTS)
        is_of_training = layout.checkpoint_step(self.path) is not None or has_state_of_training(names)
        return not is_of_training and any(name in names for name in weights)

    @property
    def cause(self) -> str:
        """The first line of the error."""
        return "" if self.error is None else first_line(self.error).removesuffix(".")


def _shown(paths: Sequence[str]) -> str:
    names = [os.path.basename(path) for path in paths]
    return f"{len(names) - _MOST_SHOWN} more, " * (len(names) > _MOST_SHOWN) + ", ".join(names[-_MOST_SHOWN:])


def _named(facts: PathFacts, paths: Sequence[str]) -> str:
    """How to take one of several checkpoints."""
    home = os.path.dirname(paths[-1])
    is_own = facts.output_dir is not None and os.path.realpath(facts.output_dir) == os.path.realpath(home)
    newest = "`resume_from_checkpoint=True` takes" if is_own else f"`get_last_checkpoint({brief(home)})` finds"
    return f"name one of them, such as {paths[-1]}. {newest} the newest one that is whole"


def _others(facts: PathFacts) -> str:
    """The way to another checkpoint, if there is one."""
    return f". Others are beside it ({_shown(facts.beside)}): {_named(facts, facts.beside)}" if facts.beside else ""


def _whose(refusal: OSError, path: str) -> str:
    """Whose file or folder it is that this process may not read, as far as the system tells."""
    place = Path(os.path.abspath(refusal.filename if isinstance(refusal.filename, str) else path))
    for candidate in (place, *place.parents):
        try:
            found = os.stat(candidate)
        except OSError:
            continue
        user = getattr(os, "geteuid", lambda: "another")()
        rights = stat.filemode(found.st_mode)
        return f" {candidate} is user {found.st_uid}'s ({rights}), and this process is user {user}'s."
    return ""


def _what_the_system_says(facts: PathFacts) -> str:
    refusal = facts.refusal
    assert refusal is not None  # the rule asks
    place = refusal.filename if isinstance(refusal.filename, str) else None
    text = f"{place or facts.path} cannot be read: {refusal.strerror}"
    return text if place is not None or not facts.cause else facts.cause


def _lost_file(facts: PathFacts) -> str:
    """What happens without the damaged file, if a run can go on without it."""
    for name, loss in ITS_LOSS.items():
        if facts.cause.partition(" ")[0].endswith(name):
            return f". Without it, once it is moved elsewhere, {loss}"
    return ""


class Rule(NamedTuple):
    """A cause: when it applies, what was found, and the way out."""

    applies: Callable[[PathFacts], object]
    found: Callable[[PathFacts], str]
    hint: Callable[[PathFacts], str]


RULES: Sequence[Rule] = (
    Rule(
        lambda facts: isinstance(facts.refusal, PermissionError),
        lambda facts: f"{_what_the_system_says(facts)}.{_whose(facts.refusal or OSError(), facts.path)}",
        lambda facts: "let this user read it, or run as its owner. It may be whole, so keep it" + _others(facts),
    ),
    Rule(
        lambda facts: facts.refusal is not None,
        lambda facts: f"{_what_the_system_says(facts)}.",
        lambda facts: (
            "the disk, or the way to it, has failed. What lies there may be whole, so keep it, look at the disk, and "
            "try again" + _others(facts)
        ),
    ),
    Rule(
        lambda facts: os.path.islink(facts.path) and not facts.exists,
        lambda facts: f"it is a link to {os.readlink(facts.path)}, where nothing is.",
        lambda facts: "name the place of the checkpoint" + _others(facts),
    ),
    Rule(
        lambda facts: not facts.exists and os.path.exists(os.path.expanduser(facts.path)),
        lambda facts: "there is no such folder. A shell expands `~`, and Python does not.",
        lambda facts: f"name {os.path.expanduser(facts.path)}",
    ),
    Rule(
        lambda facts: not facts.exists and facts.beside,
        lambda facts: f"there is no such {_form(facts)}. Beside it: {_shown(facts.beside)}.",
        lambda facts: _named(facts, facts.beside),
    ),
    Rule(
        lambda facts: (
            not facts.exists and _REPOSITORY.fullmatch(facts.path) and not os.path.exists(os.path.dirname(facts.path))
        ),
        lambda facts: f"there is no such {_form(facts)}.",
        lambda facts: (
            "name a folder. If it is a repository of the Hub, "
            f"`huggingface_hub.snapshot_download({brief(facts.path)})` downloads it and returns its folder"
        ),
    ),
    Rule(
        lambda facts: not facts.exists,
        lambda facts: f"there is no such {_form(facts)}.",
        lambda facts: "name a checkpoint-<updates> folder or a .ckpt",
    ),
    Rule(
        lambda facts: facts.inside,
        lambda facts: f"it is an output folder, which holds checkpoints: {_shown(facts.inside)}.",
        lambda facts: _named(facts, facts.inside),
    ),
    Rule(
        lambda facts: facts.around is not None,
        lambda facts: f"it is a part of the checkpoint {facts.around}.",
        lambda facts: f"name the folder, {facts.around}",
    ),
    Rule(
        lambda facts: isinstance(facts.error, UnreadObjects),
        lambda facts: f"{facts.cause}.",
        lambda facts: "give `weights_only=False`, if you trust the file",
    ),
    Rule(
        lambda facts: not facts.is_folder,
        lambda facts: f"{facts.cause}." if facts.cause else "it is a file.",
        lambda facts: "name a checkpoint-<updates> folder, or a .ckpt of an HFModule",
    ),
    Rule(
        lambda facts: not os.listdir(facts.path),
        lambda facts: "the folder is empty.",
        lambda facts: "name a checkpoint-<updates> folder" + _others(facts),
    ),
    Rule(
        lambda facts: facts.holds_nothing_of_a_checkpoint,
        lambda facts: "the folder holds no file of a checkpoint.",
        lambda facts: "name a checkpoint-<updates> folder" + _others(facts),
    ),
    Rule(
        lambda facts: facts.is_model_alone,
        lambda facts: "it holds a model, and no state of a training.",
        lambda facts: (
            "name a checkpoint-<updates> folder. These weights are loaded by the model's `from_pretrained`, or by "
            f"`HFModule.load_from_checkpoint({brief(facts.path)}, model=…)`"
        ),
    ),
    Rule(
        lambda facts: facts.is_damaged_manifest,
        lambda facts: f"{facts.cause}.",
        lambda facts: (
            f"`hf-compat seal {facts.path}` checks each file by itself, and writes {MANIFEST_NAME} anew"
            + _others(facts)
        ),
    ),
    Rule(
        lambda facts: os.path.islink(os.path.join(facts.path, facts.cause.removesuffix(f" {OUTSIDE}"))),
        lambda facts: f"{facts.cause}.",
        lambda facts: "put the file itself into the folder, in the place of the link" + _others(facts),
    ),
    Rule(
        lambda facts: True,
        lambda facts: f"{facts.cause}.",
        lambda facts: (
            "mend the file, or bring it back from a copy of the checkpoint, and keep the folder until then"
            + _lost_file(facts)
            + _others(facts)
        ),
    ),
)


def _form(facts: PathFacts) -> str:
    return "file" if facts.path.endswith(".ckpt") else "folder"


def explained(start: str, facts: PathFacts) -> CheckpointError:
    """Make the error about a path: `start`, what was found, and the way out."""
    rule = next(rule for rule in RULES if rule.applies(facts))
    is_there = facts.exists or facts.refusal is not None
    is_damaged = is_there and facts.error is not None and facts.refusal is None and not facts.is_folder
    kind = UnreadableCheckpoint if is_damaged else CheckpointError if is_there else MissingCheckpoint
    return kind(f"{start}: {rule.found(facts)}\n\nHint: {rule.hint(facts)}.")


def no_checkpoint(path: str, error: Exception | None = None, output_dir: str | None = None) -> CheckpointError:
    """Make the error for a path that is not a checkpoint, or one that cannot be read."""
    return explained(f"Can't find a valid checkpoint at {path}", PathFacts(path, error, output_dir))


def no_file(path: str) -> CheckpointError:
    """Make the error for a `ckpt_path` where nothing is, in words that scripts know from Lightning."""
    return explained(f"Checkpoint file not found: {path}", PathFacts(path))


def nothing_to_resume(output_dir: str, skipped: Mapping[str, str]) -> CheckpointError:
    """Make the error for an output folder without a checkpoint that can be used. `skipped` has the reasons by path."""
    why = "".join(f"\n  {os.path.basename(path)}: {reason}" for path, reason in skipped.items())
    way_out = "train without `resume_from_checkpoint`, or name a folder"
    if skipped:  # a training from the start would replace them
        way_out = f"bring the files back from a copy, or if they were edited, `hf-compat seal {next(iter(skipped))}`"
        if any(isinstance(reason, Refused) for reason in skipped.values()):
            way_out = "let this user read them, or look at the disk. They may be whole, so keep them"
        way_out += ". To train from the start, give another `output_dir`: checkpoints of the same name are replaced"
    return CheckpointError(f"No valid checkpoint found in output directory ({output_dir}).{why}\n\nHint: {way_out}.")
