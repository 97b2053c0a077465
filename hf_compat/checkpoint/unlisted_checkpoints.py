"""Judge folders by their files where no manifest's hash vouches for them, and read them if the user names them.

These are folders of `transformers`, and those that were edited. Their files have to be whole by headers and checksums.
Whether a run can use their contents shows when it loads them. An edited folder that the user names is read as it is
now, with one warning that names the differences. Files that no manifest lists count in these folders only, and only
while they are read.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Self

from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.dcp_reader import METADATA_NAME
from hf_compat.checkpoint.files import (
    STATE_FILE_BYTES,
    Refused,
    is_whole_zip,
    open_regular,
    read_json,
    reading,
    refusal_behind,
)
from hf_compat.checkpoint.hints import ITS_LOSS, PathFacts, explained, has_state_of_training, no_checkpoint
from hf_compat.checkpoint.reading import MANIFEST_NAME, Contents, Listed, read_manifest, reading_as_it_is, weight_files
from hf_compat.checkpoint.shares import ALONE, Share
from hf_compat.checkpoint.validation import read_trainer_state, weight_names
from hf_compat.checkpoint.zero_reader import LATEST_NAME
from hf_compat.errors import ArgumentError, CheckpointError, CheckpointWriteError
from hf_compat.runtime.collectives import failing_together, gather_objects
from hf_compat.runtime.paths import local_path

logger = logging.getLogger(__name__)


def check_unlisted(root: Path, may_lack_optimizer: bool = False) -> None:
    """Check a folder of `transformers`, which writes `trainer_state.json` last.

    One of the optimizer's two files may have been deleted on purpose, where the user names the folder.
    """
    has_optimizer = os.path.lexists(root / layout.OPTIMIZER_NAME)
    if not may_lack_optimizer and has_optimizer != os.path.lexists(root / layout.SCHEDULER_NAME):
        raise CheckpointError(f"{layout.SCHEDULER_NAME if has_optimizer else layout.OPTIMIZER_NAME} is missing.")
    paths = (path for path in root.rglob("*") if path.name == layout.TRAINER_STATE_NAME or path.suffix != ".json")
    check_files(root, (path.relative_to(root).as_posix() for path in paths if not path.is_dir()))


def check_files(root: Path, names: Iterable[str]) -> None:
    """Refuse files that are cut off, or whose checksums are wrong, and a folder that lacks what every run needs.

    If it is not a checkpoint, its other files, or those behind a link, may be without end, so it is refused first.
    """
    if not (root / layout.TRAINER_STATE_NAME).is_file():
        raise CheckpointError(f"{layout.TRAINER_STATE_NAME} is missing.")
    if not has_weights(root):
        raise CheckpointError(f"{layout.SAFE_WEIGHTS_NAME} is missing.")
    contents = Contents(root)
    for name in weight_files(contents):
        contents.need(name)
    for name in filter(layout.is_part_of_checkpoint, names):
        if name == layout.TRAINER_STATE_NAME:
            read_trainer_state(root / name)
        elif not _is_whole(root / name):
            raise CheckpointError(f"{name} is cut off or damaged.")


def _is_whole(path: Path) -> bool:
    """Whether a file fills its header's size, or has its checksums.

    Raises:
        CheckpointError: It is not valid JSON, or the system does not deliver it.
    """
    if path.suffix == ".json":
        read_json(path, STATE_FILE_BYTES)
    elif path.suffix in (".pt", ".pth", ".bin"):
        with open_regular(path) as file, reading(path):
            return is_whole_zip(file)
    elif path.suffix == ".safetensors":
        try:
            weight_names(str(path))
        except CheckpointError as error:
            if refusal_behind(error) is not None:
                raise
            return False
    return True


def has_weights(root: Path) -> bool:
    """Whether a folder holds weights, whole or in shards, or an adapter's, in a file of a known name."""
    known = (*layout.WHOLE_WEIGHTS, *layout.ADAPTER_WEIGHTS, LATEST_NAME)
    try:
        with os.scandir(root) as places:
            folders = {place.name: place.is_dir() for place in places}
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed: {error.strerror}.") from error
    if any(folders.get(name) is False for name in known):
        return True
    inside = (*layout.ADAPTER_WEIGHTS, METADATA_NAME)  # adapters with a name, and shards
    found = [os.path.join(root, name, one) for name, is_folder in folders.items() if is_folder for one in inside]
    return any(os.path.lexists(path) and not os.path.isdir(path) for path in found)


def holds_model_alone(root: Path) -> bool:
    """Whether a folder is a saved model: not the checkpoint of a training, nor what is left of one.

    Scripts of `transformers` before 4.31 give the folder of a pretrained model to `train`.
    """
    if not os.path.isdir(root) or layout.checkpoint_step(root) is not None or read_manifest(root).exists:
        return False
    try:
        names = os.listdir(root)
    except OSError:  # reading it as a checkpoint says why
        return False
    if has_state_of_training(names):
        return False
    return any((root / name).is_file() for name in (*layout.WHOLE_WEIGHTS, *layout.ADAPTER_WEIGHTS))


@dataclass(kw_only=True, slots=True)
class Edits:
    """What differs between a folder and its manifest."""

    kept: list[str] = field(default_factory=list)  # files that are as the manifest says
    changed: list[str] = field(default_factory=list)  # files of another content
    missing: list[str] = field(default_factory=list)  # files that are not there
    added: list[str] = field(default_factory=list)  # files that the manifest does not list
    not_read: list[str] = field(default_factory=list)  # links that lead out of the folder, and pipes
    refused: list[str] = field(default_factory=list)  # files that no run needs, and the system does not deliver

    def __bool__(self) -> bool:
        """Whether a file that may be read differs."""
        return bool(self.changed or self.missing or self.added or self.refused)

    def __iadd__(self, other: Edits) -> Self:
        """Add what another process has found in its share of the folder."""
        for one in fields(self):
            getattr(self, one.name).extend(getattr(other, one.name))
        return self

    def described(self) -> list[str]:
        """Describe the difference of each file, and the effect of its loss."""
        return [
            *(f"{name} is changed" for name in self.changed),
            *(f"{name} is missing" + (f" ({ITS_LOSS[name]})" if name in ITS_LOSS else "") for name in self.missing),
            *(f"{name} is added" for name in self.added),
            *(f"{name} is no file of this folder and is not read" for name in self.not_read),
            *(f"{name} cannot be read and is left out" for name in self.refused),
        ]


def find_edits(root: Path, listed: Listed, share: Share = ALONE) -> Edits:
    """Compare a share of a folder with the files that its manifest lists. The first process finds what is added."""
    edits = Edits()
    for name in sorted(share.of(listed)):
        wrong = manifest.compare(root, name, listed[name], share)
        if wrong is None:
            edits.kept.append(name)
        elif isinstance(wrong, Refused) and not layout.is_part_of_checkpoint(name):
            edits.refused.append(name)
        else:
            (edits.changed if os.path.lexists(root / name) else edits.missing).append(name)
    for name, is_own in manifest.entries(root).items() if share.rank == 0 else ():
        if name not in listed:
            (edits.added if is_own else edits.not_read).append(name)
    return edits


def tell_of_model_alone(folder: str) -> None:
    """Warn that a training begins with the weights of a saved model, and name the checkpoints beside them."""
    inside = layout.list_checkpoints(folder)
    more = f" To go on with its training, name one of its checkpoints, such as {inside[-1]}." if inside else ""
    logger.warning("%s holds a model and no state of a training: training begins with its weights.%s", folder, more)


@contextlib.contextmanager
def reading_named_folder(
    folder: str, warns: bool = True, output_dir: str | None = None, share: Share = ALONE
) -> Iterator[None]:
    """Let readers read a folder that the user named as it is now. One process of a run warns of the edits.

    A change is not a fault if each file is whole by itself, and the folder has what every run needs. The error has a
    hint for the run that saves into `output_dir`. Processes that share the folder look at a part of its files each.
    """
    try:
        edits, unhashed = _judged(Path(folder), share)
    except NotADirectoryError:
        raise no_checkpoint(folder, output_dir=output_dir) from None
    except (CheckpointError, OSError) as error:
        raise no_checkpoint(folder, error, output_dir) from error
    if edits and warns:
        _tell_of(edits, folder)
    if share.unread is not None:
        share.unread.tell = functools.partial(_judge_late, folder, output_dir)
    with reading_edited(folder, edits, unhashed):
        yield


def _tell_of(edits: Edits, folder: str) -> None:
    text = "%s differs from its %s and is read as it is: %s. `hf-compat seal %s` makes it whole again."
    logger.warning(text, folder, MANIFEST_NAME, "; ".join(edits.described()), folder)


def _judge_late(folder: str, output_dir: str | None, path: str) -> None:
    """Judge a file that shows to be another than the manifest's when it is loaded, in one process."""
    name = os.path.basename(path)
    try:
        if not _is_whole(Path(path)):
            raise CheckpointError(f"{name} is cut off or damaged.")
    except CheckpointError as error:
        raise no_checkpoint(folder, error, output_dir) from error
    _tell_of(Edits(changed=[name]), folder)


def _judged(root: Path, share: Share) -> tuple[Edits, Listed]:
    """Find the edits of a folder, and the files that their reader hashes. Refuse one that cannot be read as it is."""
    found, edits, differ, is_shared = read_manifest(root), Edits(), [0], share.world_size > 1
    with failing_together(is_wanted=is_shared, numbers=differ):
        if not root.is_dir():
            raise NotADirectoryError(root)
        if found.exists and found.files is None:
            raise CheckpointError(f"{found.why_unreadable}.") from found.error
        if found.files is not None:
            edits = find_edits(root, found.files, share)
        elif share.rank == 0:
            check_unlisted(root, may_lack_optimizer=True)
        differ[0] = int(bool(edits))
    if differ[0]:
        if is_shared:
            by_rank = gather_objects(edits)
            edits = functools.reduce(operator.iadd, by_rank, Edits())
        with failing_together(is_wanted=is_shared):
            if share.rank == 0:
                with reading_edited(str(root), edits):
                    check_files(root, edits.changed + edits.added)
    elif is_shared:
        edits.kept = list(found.files or ())
    return edits, {name: facts for name, facts in (found.files or {}).items() if share.leaves_to_readers(name)}


def reading_edited(
    folder: str, edits: Edits, unhashed: Mapping[str, object] = MappingProxyType({})
) -> contextlib.AbstractContextManager[None]:
    """Let readers read the files that an edited folder has now. One without edits is read by its manifest."""
    files = {name: unhashed.get(name, {}) for name in edits.kept + edits.changed + edits.added}
    return reading_as_it_is(folder, files) if files else contextlib.nullcontext()


def seal_edited(folder: str) -> str:
    """Check each file of a checkpoint by itself, write its manifest anew, and say what was found.

    Args:
        folder: A `checkpoint-<updates>` folder, of this package or of `transformers`.

    Raises:
        ArgumentError: There is no such folder.
        CheckpointError: It is damaged, cannot be read, or is an output folder. Its manifest stays as it is.
        CheckpointWriteError: The manifest cannot be written.
    """
    root, start = Path(local_path("FOLDER", folder)), f"{folder} is not sealed"
    facts = PathFacts(folder)
    if not os.path.isdir(root) and facts.refusal is None:
        raise ArgumentError(f"{folder} is not a folder.\n\nHint: name a checkpoint-<updates> folder.")
    if facts.refusal is not None or facts.inside:
        raise explained(start, facts)
    before = read_manifest(folder)
    if refusal_behind(before.error) is not None:  # what it says of the run would be lost
        raise explained(start, PathFacts(folder, before.error))
    edits = find_edits(root, before.files or {})
    is_as_listed = before.files is not None and not edits
    if is_as_listed:
        return f"{folder}: each of its {len(edits.kept)} files is as {MANIFEST_NAME} says; nothing is written."
    try:
        with reading_edited(folder, edits):
            check_files(root, edits.changed + edits.added)
    except CheckpointError as error:
        raise explained(start, PathFacts(folder, error)) from error
    try:
        manifest.seal(folder, before.writer)
    except OSError as error:
        raise CheckpointWriteError(
            f"{start}: {error.filename or folder}: {error.strerror}.\n\n"
            "Hint: run it as a user that may read each file and write to the folder, on a disk with room."
        ) from error
    lines = [f"{folder}: each file is whole by itself."]
    if before.files is not None:
        lines += [f"  {line}" for line in edits.described()]
    else:
        lines[0] += (
            f" It had no readable {MANIFEST_NAME}; with one it counts as a checkpoint of this package, which "
            "`save_total_limit` may remove."
        )
    return "\n".join([*lines, f"{MANIFEST_NAME} lists {len(read_manifest(root).files or ())} files now."])
