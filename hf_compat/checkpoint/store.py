"""The copy of an output folder in a store: which checkpoints are whole there, and how one comes there and back.

A checkpoint is whole in a store if its manifest lists its files and they are there with their sizes. The manifest is
written last. Before that, and while a checkpoint is removed, a manifest is in its place that lists no files and names
the owner. A run that takes the store removes what such a manifest has. A checkpoint that replaces a whole one of its
name is first written elsewhere in the store, so one of the two is whole at every instant.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.choice import candidates, newest_of
from hf_compat.checkpoint.files import is_plain_name
from hf_compat.checkpoint.moving import marker_of, move
from hf_compat.checkpoint.reading import MANIFEST_NAME, Listed, Writer, manifest_of, read_manifest
from hf_compat.checkpoint.run_lock import Owner
from hf_compat.errors import CheckpointError, MissingCheckpoint, OutputFolderError, StoreError
from hf_compat.runtime.addresses import store_address
from hf_compat.runtime.stores import Storage
from hf_compat.runtime.threads import Helpers

logger = logging.getLogger(__name__)

OWNER_NAME = f"{layout.OWN_PREFIX}.owner.json"  # in the store: who saves there
_REPLACING = f"{layout.OWN_PREFIX}.replacing"  # a folder in the store
_MANIFEST = re.compile(rf"(?:{re.escape(_REPLACING)}/)?((?:.*/)?{layout.PREFIX_CHECKPOINT_DIR}-\d+)/{MANIFEST_NAME}")
_AT_ONCE = 8  # requests
ASIDE = ".local-"  # in the name of a folder that another version has replaced

Tell = Callable[[int], None]  # takes bytes that were sent or came


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A whole checkpoint in a store."""

    place: str  # in the store
    files: Listed
    writer: Writer | None
    content: bytes  # of its manifest
    size: int  # in bytes


class Superseded(Exception):
    """A checkpoint is no longer on this machine, so it need not be uploaded."""


class CheckpointStore:
    """The checkpoints in a store. Their names are paths within the output folder, with `/`: `checkpoint-8`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.storage = Storage(address)
        self.whole: dict[str, Stored] = {}
        self.incomplete: dict[str, str] = {}  # by name: what is wrong with it
        self._left: dict[str, str] = {}  # by place: the owner whose upload or removal did not end
        self._sizes: dict[str, int] = {}

    def look(self) -> None:
        """Learn what is in the store.

        Raises:
            StoreError: It cannot be read.
        """
        self._sizes = self.storage.sizes()
        self.whole, self.incomplete, self._left = {}, {}, {}
        places = {path.rpartition("/")[0]: match[1] for path in self._sizes if (match := _MANIFEST.fullmatch(path))}
        with Helpers[bytes](_AT_ONCE, "hf_compat-store") as threads:
            asked = {place: threads.submit(self.storage.read, f"{place}/{MANIFEST_NAME}") for place in places}
            for place, name in sorted(places.items(), reverse=True):  # what replaces another comes later
                with contextlib.suppress(FileNotFoundError):  # removed by now
                    self._take(place, name, asked[place].result())

    def _take(self, place: str, name: str, content: bytes) -> None:
        found = manifest_of(f"{name}/{MANIFEST_NAME}", content)
        if found.saving is not None:
            self._left[place] = found.saving
        wrong = [] if found.files is None else self._wrong(place, found.files)
        if found.files is None or wrong:
            if name not in self.whole:
                self.incomplete[name] = wrong[0] if wrong else found.why_unreadable
            return
        self.incomplete.pop(name, None)
        if name in self.whole and self.whole[name].content == content:
            self._left[place] = ""  # the removal at the end of a replacement has failed
            return
        size = sum(self._sizes[f"{place}/{one}"] for one in found.files)
        self.whole[name] = Stored(place=place, files=found.files, writer=found.writer, content=content, size=size)

    def _wrong(self, place: str, files: Listed) -> list[str]:
        """What the listing says against a checkpoint."""
        found = []
        for name, facts in files.items():
            size = self._sizes.get(f"{place}/{name}")
            if size is None:
                found.append(f"{name} is missing")
            elif not isinstance(facts, dict) or facts.get("bytes") != size:
                found.append(f"{name} has {size} bytes, not what {MANIFEST_NAME} says")
        return found

    def writers(self, output_dir: str, folder: str) -> dict[str, Writer | None]:
        """By path, who wrote the checkpoints that the store has of a folder in, or at, the output folder."""
        place = "" if os.path.realpath(folder) == os.path.realpath(output_dir) else name_within(output_dir, folder)
        known = {name: stored.writer for name, stored in self.whole.items() if name.rpartition("/")[0] == place}
        return {os.path.join(folder, name.rpartition("/")[2]): writer for name, writer in known.items()}

    # Who saves

    def take(self, owner_id: str) -> None:
        """Become the one run that saves here. A run that saved until now finds that out before it writes a manifest."""
        self.storage.write(OWNER_NAME, json.dumps({"owner": owner_id}).encode())

    def check(self, owner_id: str) -> None:
        """Refuse to go on where another run has taken the store.

        Raises:
            OutputFolderError: It has.
        """
        try:
            found = json.loads(self.storage.read(OWNER_NAME))
        except (FileNotFoundError, ValueError):  # removed, or a store that shows half of a file
            return self.take(owner_id)
        other = found.get("owner") if isinstance(found, dict) else None
        if other == owner_id:
            return None
        owner = Owner.of_id(other) if isinstance(other, str) else None
        who = "another run" if owner is None else f"another run (host {owner.host}, process {owner.pid})"
        raise OutputFolderError(
            f"{self.address}: {who} has begun to save there, so this one ends.\n\n"
            "Hint: give each run an `output_dir` of its own. A run that was given up is the one to end."
        )

    def remove_left(self) -> None:
        """Remove what runs have left that were killed while they uploaded or removed something."""
        for place in sorted(self._left):
            self._remove_place(place)
        self._left = {}

    # In and out

    def put(self, source: Path, name: str, owner_id: str, tell: Tell = lambda count: None) -> None:
        """Upload a checkpoint folder whose files do not change. It is whole in the store when this returns.

        Raises:
            StoreError: A request has failed. Nothing that was whole in the store is lost.
            Superseded: A file is gone.
        """
        content, files = self._sealed(source)
        replaced = self.whole.get(name)
        if replaced is not None and replaced.content == content and replaced.place == name:
            return
        elsewhere = f"{_REPLACING}/{name}"
        if replaced is not None and replaced.place == name:
            self._write(source, elsewhere, files, content, owner_id, tell)
        self._write(source, name, files, content, owner_id, tell)
        size = sum((source / one).stat().st_size for one in files)
        writer = read_manifest(source).writer
        self.whole[name] = Stored(place=name, files=files, writer=writer, content=content, size=size)
        self.incomplete.pop(name, None)
        if replaced is not None:
            with contextlib.suppress(StoreError):  # it is found, and removed, by the next run
                self._remove_place(elsewhere)

    @staticmethod
    def _sealed(source: Path) -> tuple[bytes, Listed]:
        if any(isinstance(facts, dict) and "sums" in facts for facts in (read_manifest(source).files or {}).values()):
            manifest.flush_and_hash(str(source))  # a callback has seen it, and it was not hashed since
        try:
            content = (source / MANIFEST_NAME).read_bytes()
        except FileNotFoundError:
            raise Superseded from None
        files = read_manifest(source).files
        if files is None or not all(isinstance(facts, dict) and "sha256" in facts for facts in files.values()):
            raise CheckpointError(f"{source} is not whole, so it is not uploaded.")
        return content, files

    def _write(self, source: Path, place: str, files: Listed, content: bytes, owner_id: str, tell: Tell) -> None:
        marker = marker_of(owner_id, os.path.basename(place))
        stale = self.storage.sizes(place).keys() - {f"{place}/{name}" for name in (*files, MANIFEST_NAME)}
        self.storage.write(f"{place}/{MANIFEST_NAME}", marker)
        for name in files:
            try:
                self.storage.send(str(source / name), f"{place}/{name}", tell)
            except FileNotFoundError:
                raise Superseded from None
        self.storage.remove(*sorted(stale))
        self._sizes = self.storage.sizes(place)
        wrong = self._wrong(place, files)
        if wrong:
            raise StoreError(f"{self.address} could not be written: {place}/{wrong[0]}")
        self.check(owner_id)
        self.storage.write(f"{place}/{MANIFEST_NAME}", content)

    def copy_here(self, stored: Stored, folder: str, tell: Tell = lambda count: None) -> None:
        """Download a checkpoint into a new folder, its manifest last. What the store lacks is left out."""
        os.makedirs(folder)
        sizes = self.storage.sizes(stored.place)

        def copy(name: str) -> None:
            path, size = os.path.join(folder, name), sizes.get(f"{stored.place}/{name}")
            if size is None or not is_plain_name(name):  # a reader says so
                return
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self.storage.fetch(f"{stored.place}/{name}", path, size)
                tell(size)

        with Helpers[None](_AT_ONCE, "hf_compat-store") as threads:
            for one in [threads.submit(copy, name) for name in stored.files]:
                one.result()
        Path(folder, MANIFEST_NAME).write_bytes(stored.content)

    def fetch(self, name: str, folder: str) -> str:
        """Download a checkpoint into its place in an output folder, where nothing has its name. Return its path."""
        stored, final = self.whole[name], os.path.join(folder, *name.split("/"))
        logger.info("Fetching %s (%s) from %s.", name, told_size(stored.size), self.address)
        os.makedirs(os.path.dirname(final), exist_ok=True)
        with layout.hidden_folder(os.path.dirname(final), layout.CONVERTING) as hidden:
            copied = os.path.join(hidden, os.path.basename(final))
            self.copy_here(stored, copied)
            if not os.path.lexists(final):  # else another process of this run has fetched it
                with contextlib.suppress(FileExistsError):
                    move(copied, final)
        return final

    def bring(self, path: str, output_dir: str, anew: bool = False) -> bool:
        """Fetch a checkpoint that is not in the output folder, or is of an earlier training than the store's.

        With `anew`, fetch it in any case. What has its name gets another one. Whether it was fetched.
        """
        name = name_within(output_dir, path)
        stored = None if name is None else self.whole.get(name)
        if name is None or stored is None:
            return False
        if os.path.lexists(path):
            here, there = read_manifest(path).writer, stored.writer
            is_older = here is not None and there is not None and here.turn < there.turn
            if not (anew or is_older) or os.path.islink(path):
                return False
            aside = f"{path}{ASIDE}{time.time_ns()}"
            os.rename(path, aside)
            logger.warning("%s is not the one in %s, which is fetched. It is %s now.", path, self.address, aside)
        self.fetch(name, output_dir)
        return True

    def remove(self, name: str, owner_id: str) -> None:
        """Remove a checkpoint. From the first step on it is not whole."""
        stored = self.whole[name]
        self.check(owner_id)
        self.storage.write(f"{stored.place}/{MANIFEST_NAME}", marker_of(owner_id, os.path.basename(name)))
        del self.whole[name]
        self._left[stored.place] = owner_id
        self._remove_place(stored.place)
        del self._left[stored.place]

    def _remove_place(self, place: str) -> None:
        """Remove the files of a place, its manifest last."""
        last = f"{place}/{MANIFEST_NAME}"
        found = self.storage.sizes(place)
        self.storage.remove(*sorted(found.keys() - {last}), *([last] if last in found else []))
        self.storage.remove_empty(place)


def looking(
    bring: Callable[[str, bool], bool], problems: Callable[[str], list[str]] = manifest.problems
) -> Callable[[str], list[str]]:
    """Make a function that lists the problems of a checkpoint for `newest_of`, and fetches what is in the store alone.

    Once it has found a whole one, it fetches no more.
    """
    has_found = False

    def look(path: str) -> list[str]:
        nonlocal has_found
        if has_found and not os.path.lexists(path):  # of an earlier training, with more updates
            return []
        bring(path, False)
        found = problems(path)
        if found and bring(path, True):
            found = problems(path)
        has_found = has_found or not found
        return found

    return look


def newest_in_store(address: str, folder: str) -> str | None:
    """Find the newest whole checkpoint of an output folder and its store. None if there is none.

    A checkpoint that the folder lacks is fetched. For an address in place of a folder, nothing is.
    """
    store = CheckpointStore(address)
    store.look()
    if store_address(folder) is not None:
        found = candidates("", {name: one.writer for name, one in store.whole.items() if "/" not in name})
        return f"{address}/{found[0]}" if found else None
    manifest.recover(folder)
    look = looking(lambda path, anew: store.bring(path, folder, anew))
    choice = newest_of(candidates(folder, store.writers(folder, folder)), find_problems=look)
    choice.tell()
    return choice.newest


def fetch_checkpoint(address: str, place: str) -> str:
    """Download a checkpoint folder, or a `.ckpt`, of any storage into a folder. Return its path.

    A checkpoint of `transformers` has no manifest, and comes with all that is below the address.

    Raises:
        MissingCheckpoint: There is nothing, or an output folder.
        StoreError: It cannot be read.
    """
    home, _, name = address.rpartition("/")
    storage = Storage(home) if "://" in home else Storage(address)
    sizes, target = storage.sizes(name), os.path.join(place, name)
    within = {path: size for path, size in sizes.items() if path == name or path.startswith(f"{name}/")}
    checkpoints = sorted(match[1] for path in within if (match := _MANIFEST.fullmatch(path)) and match[1] != name)
    if not within or (checkpoints and f"{name}/{MANIFEST_NAME}" not in within):
        known = f"{home}/{checkpoints[-1]}" if checkpoints else ""
        way_out = f"name one of its checkpoints, such as {known}" if known else "look at the address"
        raise MissingCheckpoint(f"Can't find a valid checkpoint at {address}.\n\nHint: {way_out}.")
    logger.info("Fetching %s (%s).", address, told_size(sum(within.values())))
    for path, size in within.items():
        if is_plain_name(path):
            file = os.path.join(place, *path.split("/"))
            os.makedirs(os.path.dirname(file), exist_ok=True)
            storage.fetch(path, file, size)
    return target


@contextlib.contextmanager
def linked(checkpoint: str) -> Iterator[Path]:
    """Give a folder with the files that a checkpoint has now, while rotation removes it or another replaces it.

    Raises:
        Superseded: It is gone.
    """
    source = Path(checkpoint)
    files = read_manifest(source).files
    if files is None:
        raise Superseded
    with layout.hidden_folder(str(source.parent), layout.CONVERTING) as hidden:
        place = Path(hidden, source.name)
        for name in (*files, MANIFEST_NAME):
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                _link(source / name, target)
            except FileNotFoundError:
                raise Superseded from None
        yield place


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(strict=True), target)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without links
        shutil.copyfile(source, target)


def name_within(folder: str, path: str) -> str | None:
    """The name of a path below an output folder. None if it is not below."""
    name = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    return None if name == "." or name.startswith("..") else name.replace(os.sep, "/")


def told_size(count: float) -> str:
    """A number of bytes, in words."""
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
