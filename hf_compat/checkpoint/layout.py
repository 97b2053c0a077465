"""Names of files and folders, and the hidden folders in which checkpoints are written.

A hidden folder is ours if its name ends in the id of an owner and that owner's record lies in it. Only such folders
are deleted as left over, by `remove_ended`, in a run that has the lock. Reading an output folder deletes nothing. A
user's `_save` sees the final name of its checkpoint, and files that it writes beside it reach the output folder with
it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from hf_compat.checkpoint.files import write_new
from hf_compat.checkpoint.run_lock import LOCK_NAME, Owner
from hf_compat.errors import CheckpointError

PREFIX_CHECKPOINT_DIR = "checkpoint"
TRAINING_ARGS_NAME = "training_args.bin"
TRAINER_STATE_NAME = "trainer_state.json"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "rng_state.pth"


def of_rank(name: str, rank: int, world_size: int) -> str:
    """Return a file's name in a run of several processes, each of which has its own: `rng_state_1.pth`."""
    if world_size == 1:
        return name
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}_{rank}{dot}{suffix}"


WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
WHOLE_WEIGHTS = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
ADAPTER_SAFE_WEIGHTS_NAME = "adapter_model.safetensors"
ADAPTER_WEIGHTS_NAME = "adapter_model.bin"
ADAPTER_WEIGHTS = (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)
ADAPTER_CONFIG_NAME = "adapter_config.json"

# What a checkpoint of ours, of `transformers`, Accelerate, PEFT, DeepSpeed or FSDP is made of: files, and folders with
# all that is in them.
_PARTS_OF_CHECKPOINTS = re.compile(
    r"""(
    (adapter_|pytorch_)?model(-\d+-of-\d+)?(\.\w+)?\.(safetensors|bin)(\.index(\.\w+)?\.json)?
    | (tf_model\.h5|flax_model\.msgpack)(\.index\.json)?
    | pytorch_model(_fsdp_\d+|_\d+)? | optimizer(_\d+)? | distributed_checkpoint | dist_ckpt   # folders
    | .*\.distcp | \.metadata
    | global_step[^/]* | latest(_universal)? | zero_to_fp32\.py | .*_(model|optim)_states\.pt
    | (optimizer|scheduler|scaler|rng_state|run_state|random_states|custom_checkpoint|sampler|dl_state_dict)
      (_\d+)*\.(pt|pth|bin|pkl)
    | tokenizer(_config)?\.json | (special_tokens_map|added_tokens|(pre)?processor_config|vocab)\.json | vocab\.txt
    | merges\.txt | (spiece|tokenizer|sentencepiece\.bpe)\.model | chat_template\.(jinja|json)
    | trainer_state\.json | training_args\.(bin|json) | manifest\.json
    | (adapter_|generation_)?config\.json
    )""",
    re.VERBOSE,
)
_NUMBERED = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


def is_part_of_checkpoint(name: str) -> bool:
    """Return whether a file, named from its folder with `/`, is of a kind that a program's checkpoints have."""
    return any(_PARTS_OF_CHECKPOINTS.fullmatch(part) for part in name.split("/"))


def checkpoint_path(folder: str, updates: int) -> str:
    """Return the folder of the checkpoint that is written after so many updates."""
    return os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{updates}")


def checkpoint_step(path: str | os.PathLike[str]) -> int | None:
    """Return the update count in a `checkpoint-<n>` folder's name, or None for any other name."""
    match = _NUMBERED.match(os.path.basename(os.path.normpath(path)))
    return int(match.group(1)) if match else None


def list_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """List the checkpoint folders of an output folder, oldest step first.

    Raises:
        CheckpointError: The output folder cannot be listed.
    """
    if not os.path.isdir(folder):
        return []
    try:
        inside = [entry.path for entry in os.scandir(folder) if _NUMBERED.match(entry.name)]
    except OSError as error:
        raise CheckpointError(f"{os.fspath(folder)} cannot be listed: {error.strerror}.") from error
    return sorted(filter(os.path.isdir, inside), key=lambda path: checkpoint_step(path) or 0)


SAVING = ".saving-"  # a save, a removal, a manifest
CONVERTING = ".converting-"  # needs no lock: only its own process knows whether it goes on
# What begins so in a hidden folder is the run's; the rest is what overrides have written beside their checkpoint.
OWN_PREFIX = ".hf_compat"
_RECORD = OWN_PREFIX
# A checkpoint that makes room for a new one of its name; a killed save may have left no other.
REPLACED = f"{OWN_PREFIX}.replaced"
DELETED = f"{OWN_PREFIX}.deleted"


def make_hidden(folder: str, prefix: str, owner: Owner) -> str:
    """Make an owner's hidden folder, its record first.

    Raises:
        OSError: It exists, or cannot be made.
    """
    path = os.path.join(folder, prefix + owner.id)
    os.mkdir(path)
    write_new(os.path.join(path, _RECORD), owner.id.encode())
    return path


def hidden_folders(folder: str, prefix: str) -> list[tuple[str, Owner]]:
    """List the hidden folders that runs have made, each with its owner. A link is never one of them."""
    if not os.path.isdir(folder):
        return []
    with os.scandir(folder) as inside:
        entries = [entry for entry in inside if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False)]
    found = ((entry.path, Owner.of_id(entry.name.removeprefix(prefix))) for entry in entries)
    return sorted((path, owner) for path, owner in found if owner is not None and _has_record(path))


def _has_record(path: str) -> bool:
    """Whether a run made this folder. A power cut may leave the record empty, so its content does not count."""
    try:
        return stat.S_ISREG(os.lstat(os.path.join(path, _RECORD)).st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def hidden_folder(folder: str, prefix: str) -> Iterator[str]:
    """Give a hidden folder for a short piece of work, and remove it afterwards."""
    owner = Owner.of_this_process()
    with owner.shown_alive():
        path = make_hidden(folder, prefix, owner)
        try:
            yield path
        finally:
            remove_hidden(path)


def remove_hidden(path: str) -> None:
    """Remove a hidden folder as far as possible, the record last: what is left stays known as ours."""
    if not os.path.isdir(path):
        return
    with contextlib.suppress(OSError):  # something cannot be deleted: the next run tries again
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name == _RECORD):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        os.rmdir(path)


def remove_ended(folder: str, prefix: str, is_locked: bool = False) -> None:
    """Remove the hidden folders of owners that have ended.

    Args:
        folder: The output folder.
        prefix: Which of them.
        is_locked: Whether the caller has the folder's lock: who cannot be asked, on another host, has ended then.
    """
    for path, owner in hidden_folders(folder, prefix):
        if has_ended(owner, is_locked):
            remove_hidden(path)


def has_ended(owner: Owner, is_alone: bool) -> bool:
    """Whether an owner's work is over; that of one who cannot be asked is, where no other run saves into the folder."""
    alive = owner.is_alive()
    return is_alone if alive is None else not alive


_Inode = tuple[int, int]


class SavingPlace:
    """The hidden folder of one run; it holds one save at a time.

    Where code of the user's writes beside the checkpoint, the files of the output folder stand in it a second time, as
    hard links: appending to one of them, replacing or deleting it there does so in the output folder. Folders do not.

    Args:
        run_dir: The output folder, which exists.
        owner: The run.
        mirrors: Whether to make these links. They cost each save as much as there are files.
    """

    def __init__(self, run_dir: str, owner: Owner, mirrors: bool = True) -> None:
        self.run_dir, self._mirrors = run_dir, mirrors
        self._owner = owner
        self.path = os.path.join(run_dir, SAVING + owner.id)
        self._mirrored: dict[str, _Inode] = {}
        self._deleted: list[str] = []
        self._began = 0

    def inside(self, final: str) -> str:
        """Return where a checkpoint is written that will stand at `final`."""
        return os.path.join(self.path, os.path.basename(final))

    def prepare(self) -> None:
        """Make it anew; a save that failed may have left one.

        Raises:
            OSError: It cannot be made.
        """
        remove_hidden(self.path)
        os.makedirs(self.run_dir, exist_ok=True)
        make_hidden(self.run_dir, SAVING, self._owner)
        self._began = os.stat(self.path).st_ctime_ns  # by the clock of the disk
        self._mirrored = dict(_mirror(self.run_dir, self.path)) if self._mirrors else {}
        self._deleted = []

    def discard(self) -> None:
        """Remove it, with all that was written there."""
        remove_hidden(self.path)

    def note_deletions(self) -> None:
        """Look which files of the output folder were deleted or renamed here; no process has landed anything yet."""
        self._deleted = [name for name in self._mirrored if not os.path.lexists(os.path.join(self.path, name))]

    def adopt(self, final: str) -> None:
        """Take over what was written at the final place while this save went on: it belongs to this checkpoint.

        A link there leads to a folder outside, which is not changed.
        """
        if os.path.islink(final):
            return
        for path in _files_below(Path(final)):
            target = Path(self.inside(final)) / path.relative_to(final)
            is_older = path.lstat().st_ctime_ns < self._began
            if is_older or (os.path.lexists(target) and target.lstat().st_mtime_ns >= path.lstat().st_mtime_ns):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)

    def land(self, final: str) -> None:
        """Move what lies beside the checkpoint to the output folder.

        Raises:
            OSError: Something cannot be moved.
        """
        for name in self._deleted:
            with contextlib.suppress(FileNotFoundError):
                if _inode(os.path.join(self.run_dir, name)) == self._mirrored[name]:
                    os.unlink(os.path.join(self.run_dir, name))
        for entry in _beside(self.path, final):
            is_mirror = entry.name in self._mirrored and _inode(entry.path) == self._mirrored[entry.name]
            if not is_mirror:
                _move(entry.path, os.path.join(self.run_dir, entry.name), self.path, self.run_dir)


def land_left_over(place: str, final: str) -> None:
    """Move what a killed save has left beside its checkpoint; a file of that name that is newer stays."""
    run_dir = os.path.dirname(place)
    for entry in _beside(place, final):
        target = os.path.join(run_dir, entry.name)
        are_files = entry.is_file(follow_symlinks=False) and os.path.isfile(target)
        if are_files and entry.stat().st_mtime_ns <= os.stat(target).st_mtime_ns:
            continue  # one file under both names, or an older one
        _move(entry.path, target, place, run_dir)


def _mirror(run_dir: str, place: str) -> Iterator[tuple[str, _Inode]]:
    for entry in sorted(os.scandir(run_dir), key=lambda entry: entry.name):
        is_taken = (
            entry.name.startswith(LOCK_NAME) or checkpoint_step(entry.name) is not None
        )  # by a checkpoint's folder
        if is_taken or not entry.is_file(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):  # not every file system has links, and callbacks replace their files
            os.link(entry.path, os.path.join(place, entry.name))
            yield entry.name, _inode(os.path.join(place, entry.name))


def _inode(path: str) -> _Inode:
    facts = os.lstat(path)
    return facts.st_dev, facts.st_ino


def _beside(place: str, final: str) -> list[os.DirEntry[str]]:
    entries = [entry for entry in os.scandir(place) if not entry.name.startswith(OWN_PREFIX)]
    return sorted((entry for entry in entries if entry.name != os.path.basename(final)), key=lambda entry: entry.name)


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def _move(source: str, target: str, place: str, run_dir: str) -> None:
    """Move a file, a link or a folder; into a folder that is there each file for itself."""
    if os.path.islink(source):
        text = _led_out(os.readlink(source), os.path.dirname(source), place, run_dir)
        os.unlink(source)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        os.symlink(text, target)
    elif os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
        for name in sorted(os.listdir(source)):
            _move(os.path.join(source, name), os.path.join(target, name), place, run_dir)
        os.rmdir(source)
    else:
        os.replace(source, target)


def _led_out(text: str, folder: str, place: str, run_dir: str) -> str:
    """Return the text of a link that leads to the same place when it is moved into the output folder."""
    leads_to = os.path.abspath(os.path.join(folder, text))
    inside, outside = os.path.abspath(place), os.path.abspath(run_dir)
    moved = outside + leads_to.removeprefix(inside) if (leads_to + os.sep).startswith(inside + os.sep) else leads_to
    if os.path.isabs(text):
        return moved
    return os.path.relpath(moved, os.path.abspath(folder).replace(inside, outside, 1))
