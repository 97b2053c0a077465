"""Ways to damage a file of a checkpoint: its bytes, its place in the folder, the values in it. For `mutations.py`."""

from __future__ import annotations

import collections
import copy
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from hf_compat.checkpoint.zero_reader import OWN_TYPES
from hf_compat.runtime.seeding import LEGACY_GLOBALS

NUMBERS = ["x", None, -5, 1e30, float("nan"), float("inf"), 10**400, [], {}, True]
REMOVED = object()


@dataclass(frozen=True)
class Damage:
    """Something done to one file of a folder.

    Args:
        file: The file's name in the folder.
        what: What is done, for the table and for messages.
        apply: Does it, to the file's path.
        is_value: Whether the file stays one of its kind, with another value in it.
        is_plausible: Whether what is in it then might as well have been written: nobody can know, but for a manifest.
        is_hidden: Whether the file is there and cannot be opened.
    """

    file: str
    what: str
    apply: Callable[[Path], None]
    is_value: bool = False
    is_plausible: bool = False
    is_hidden: bool = False


# ---- bytes ----


def of_bytes(folder: Path, file: str, pick: random.Random) -> Iterator[Damage]:
    """Yield what happens to bytes on a disk, or is done to them."""
    size = (folder / file).stat().st_size
    is_bare = file.endswith((".safetensors", ".json", ".distcp"))  # numbers or text without a checksum
    for share in (0.0, 0.1, 0.5, 0.9):
        yield Damage(file, f"cut to {share:.0%}", cut(int(size * share)))
    yield Damage(file, "last byte cut off", cut(size - 1))
    for _ in range(3):
        place = pick.randrange(size)
        yield Damage(file, f"bit flipped at {place}", overwrite(place, None), is_plausible=is_bare)
    for place in (0, size // 3, max(size - 64, 0)):
        yield Damage(
            file, f"64 bytes overwritten at {place}", overwrite(place, pick.randbytes(64)), is_plausible=is_bare
        )
    yield Damage(file, "zeros", overwrite(0, bytes(size)))
    yield Damage(file, "random bytes", overwrite(0, pick.randbytes(size)))
    yield Damage(file, "bytes added", lambda path: path.write_bytes(path.read_bytes() + b"more"))


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, max(size, 0))


def overwrite(place: int, new: bytes | None) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        content = bytearray(path.read_bytes())
        if new is None:
            content[place] ^= 16
        else:
            content[place : place + len(new)] = new
        path.write_bytes(content)

    return apply


# ---- places ----


def of_places(file: str, others: list[str]) -> Iterator[Damage]:
    """Yield what may stand in a file's place."""
    yield Damage(file, "removed", lambda path: path.unlink())
    yield Damage(file, "unreadable", lambda path: path.chmod(0), is_hidden=True)
    yield Damage(file, "a folder", in_its_place(os.mkdir))
    yield Damage(file, "a FIFO", in_its_place(os.mkfifo))
    yield Damage(file, "a circle of links", in_its_place(lambda path: path.symlink_to(path.name)))
    yield Damage(file, "a link to nothing", in_its_place(lambda path: path.symlink_to("nothing")))
    yield Damage(file, "a link to /dev/zero", in_its_place(lambda path: path.symlink_to("/dev/zero")))
    yield Damage(file, "a link to /dev/full", in_its_place(lambda path: path.symlink_to("/dev/full")))
    for other in others:
        yield Damage(file, f"{other} in its place", copied_from(other), is_plausible=True)


def copied_from(other: str) -> Callable[[Path], None]:
    return lambda path: shutil.copy(path.parent / other, path)


def in_its_place(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.unlink()
        make(path)

    return apply


# ---- values ----


def places_in(value: object, before: tuple = ()) -> Iterator[tuple]:
    """Yield the way to every value in nested containers."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))[:3]  # 600 numbers of a random state are all alike
    else:
        return
    for key, inner in items:
        yield (*before, key)
        yield from places_in(inner, (*before, key))


def at(value: object, place: tuple) -> object:
    for key in place:
        value = value[key]
    return value


def changed(value: object, place: tuple, new: object) -> object:
    """Return a copy of nested containers with another value at a place, or without one."""
    if not place:
        return new
    kind = list if isinstance(value, (list, tuple)) else type(value)
    result = kind(value) if kind is list else copy.copy(value)
    if len(place) == 1 and new is REMOVED:
        del result[place[0]]
    else:
        result[place[0]] = changed(value[place[0]], place[1:], new)
    return tuple(result) if isinstance(value, tuple) and new is not REMOVED else result


def deep() -> list:
    found: list = []
    for _ in range(900):
        found = [found]
    return found


def others_than(value: object) -> list[object]:
    """Return values of other types, shapes and ranges."""
    if isinstance(value, torch.Tensor):
        larger = torch.cat([value.flatten(), value.flatten()[:1], torch.zeros(1, dtype=value.dtype)])
        filled = [torch.full_like(value, float("nan"))] if value.is_floating_point() else []
        return [
            larger,
            value[:0] if value.dim() else value.reshape(1, 1),
            value.to(torch.int32),
            *filled,
            None,
            "x",
            [1],
        ]
    if isinstance(value, (bool, int, float)):
        return [new for new in NUMBERS if type(new) is not type(value) or new != value]
    if isinstance(value, str):
        return [None, 5, "", "x" * 5000, "a\0b", ["x"]]
    if isinstance(value, dict):
        return [None, [], "x", {}, {"x": 1}]
    if isinstance(value, (list, tuple)):
        return [None, {}, "x", 5, [], [None]]
    return ["x", 5, [], {}]


def of_values(file: str, content: object, write: Callable[[object, Path], None], most: int, pick: random.Random):
    """Yield changed values at the places of a nested content, `most` of them: each place is met in turn."""
    found = collections.defaultdict(list)
    for place in places_in(content):
        for new in [REMOVED, *others_than(at(content, place))]:
            found[place].append(new)
    for news in found.values():
        pick.shuffle(news)
    others = (None, [], "x", 5, {})
    yield from (Damage(file, f"is {short(new)}", value_of(content, (), new, write), is_value=True) for new in others)
    places = sorted(found, key=lambda place: (len(place), pick.random()))
    rounds = [(place, news[number]) for number in range(12) for place in places if number < len(news := found[place])]
    for place, new in rounds[: max(most - len(others), 0)]:
        named = ".".join(map(str, place))
        change = value_of(content, place, new, write)
        is_open = is_alike(at(content, place), new) or (named.endswith(".rng") and new is None)
        yield Damage(file, f"{named} is {short(new)}", change, is_value=True, is_plausible=is_open)


def is_alike(old: object, new: object) -> bool:
    """Return whether a value is of another's form: what another run might have written."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return old.shape == new.shape and old.dtype == new.dtype
    return type(old) is type(new) or (old is None and not isinstance(new, str))


def value_of(content: object, place: tuple, new: object, write: Callable[[object, Path], None]):
    return lambda path: write(changed(content, place, new), path)


def short(new: object) -> str:
    if new is REMOVED:
        return "gone"
    if isinstance(new, torch.Tensor):
        filled = " of NaN" if bool(new.isnan().any()) else ""
        return f"a tensor of {tuple(new.shape)}, {new.dtype}{filled}"
    return repr(new)[:40]


def write_json(content: object, path: Path) -> None:
    path.write_text(json.dumps(content))


def of_json(folder: Path, file: str, most: int, pick: random.Random) -> Iterator[Damage]:
    content = json.loads((folder / file).read_text())
    for text, what in (("[" * 100_000, "deep"), ("9" * 10_000, "digits"), ('{"a": 1' + ", " * 99, "no JSON")):
        yield Damage(file, what, lambda path, text=text: path.write_text(text), is_value=True)
    yield from of_values(file, content, write_json, most, pick)
    if isinstance(content, dict):
        for key in content:
            yield Damage(file, f"{key} is deep", value_of(content, (key,), deep(), write_json), is_value=True)


def read_torch(path: Path) -> object:
    unread = type("Unread", (), {"__init__": lambda self, *_: None})
    allowed = [*LEGACY_GLOBALS, *((unread, name) for name in OWN_TYPES)]
    with torch.serialization.safe_globals(allowed):
        return torch.load(path, map_location="cpu", weights_only=True)


def without_unread(value: object) -> object:
    """Return nested containers with None for objects that only their owner can write."""
    if isinstance(value, dict):
        return {key: without_unread(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([without_unread(inner) for inner in value]) if type(value) in (list, tuple) else value
    return None if type(value).__name__ == "Unread" else value


def write_torch(content: object, path: Path) -> None:
    torch.save(content, path)


def of_torch(folder: Path, file: str, most: int, pick: random.Random) -> Iterator[Damage]:
    content = without_unread(read_torch(folder / file))
    yield from of_values(file, content, write_torch, most, pick)


def of_safetensors(folder: Path, file: str, most: int, pick: random.Random) -> Iterator[Damage]:
    """Yield tensors of another shape or type, missing and added ones, and headers that lie."""
    weights = safetensors.torch.load_file(folder / file)

    def write(content: object, path: Path) -> None:
        safetensors.torch.save_file(content, path)

    tries = [(name, new) for name, value in weights.items() for new in (REMOVED, *others_than(value)[:3])]
    pick.shuffle(tries)
    for name, new in tries[:most]:
        yield Damage(file, f"{name} is {short(new)}", value_of(weights, (name,), new, write), is_value=True)
    yield Damage(file, "no tensors", value_of(weights, (), {}, write), is_value=True)
    for header in HEADERS:
        yield Damage(file, f"its header is {header[:40]!r}", lying(header.encode()), is_value=True)


HEADERS = (
    "{}", "[]", "null", "5", "{", "[" * 50_000, '{"a":' * 20_000, '{"__metadata__": {"a": 1}}',
    '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 99999999]}}',
    '{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
    '{"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}',
    '{"a": {"dtype": "F32", "shape": [99999999999, 99999999999], "data_offsets": [0, 8]}}',
    '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', '{"a": {"dtype": "F32"}}', '{"a": null}',
)  # fmt: skip


def lying(header: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def of_shard_index(folder: Path, file: str) -> Iterator[Damage]:
    """Yield indices of torch.distributed.checkpoint that say what is not so."""
    for what, change in INDEX_CHANGES.items():
        yield Damage(file, what, lambda path, change=change: change_index(path, change), is_value=True)


def change_index(path: Path, change: Callable[[object], object]) -> None:
    index = pickle.loads(path.read_bytes())
    new = change(index)
    path.write_bytes(pickle.dumps(index if new is None else new))


def first_tensor(index) -> str:
    return next(key for key, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata))


def set_info(**values: object) -> Callable[[object], None]:
    def change(index) -> None:
        place = next(place for place in index.storage_data if place.fqn == first_tensor(index))
        info = index.storage_data[place]
        index.storage_data[place] = type(info)(
            **{"relative_path": info.relative_path, "offset": info.offset, "length": info.length, **values}
        )

    return change


def set_entry(**values: object) -> Callable[[object], None]:
    def change(index) -> None:
        entry = index.state_dict_metadata[first_tensor(index)]
        for name, value in values.items():
            setattr(entry, name, value)

    return change


def set_dtype(index) -> None:
    index.state_dict_metadata[first_tensor(index)].properties.dtype = torch.int64


def as_bytes(index) -> None:
    index.state_dict_metadata[first_tensor(index)] = BytesStorageMetadata()


def drop(part: str) -> Callable[[object], None]:
    def change(index) -> None:
        kept = getattr(index, part)
        del kept[next(iter(kept))]

    return change


INDEX_CHANGES: dict[str, Callable[[object], object]] = {
    "an offset beyond the file": set_info(offset=10**9),
    "a negative offset": set_info(offset=-1),
    "an offset of text": set_info(offset="x"),
    "a length beyond the file": set_info(length=10**9),
    "a length of 0": set_info(length=0),
    "another file": set_info(relative_path="../../checkpoint-2/x"),
    "no file's name": set_info(relative_path=5),
    "an unknown file": set_info(relative_path="__9_9.distcp"),
    "another size": set_entry(size=torch.Size([999, 999])),
    "a size that is none": set_entry(size="x"),
    "a huge size": set_entry(size=torch.Size([10**9, 10**9])),
    "no chunks": set_entry(chunks=[]),
    "chunks that are none": set_entry(chunks=[None]),
    "no properties": set_entry(properties=None),
    "another dtype": set_dtype,
    "a tensor that is bytes": lambda index: index.state_dict_metadata.__setitem__(
        first_tensor(index), BytesStorageMetadata()
    ),
    "an entry gone": drop("state_dict_metadata"),
    "a place gone": drop("storage_data"),
    "no entries": lambda index: setattr(index, "state_dict_metadata", {}),
    "entries that are none": lambda index: setattr(index, "state_dict_metadata", None),
    "no places": lambda index: setattr(index, "storage_data", {}),
    "places that are none": lambda index: setattr(index, "storage_data", [1]),
    "a list": lambda index: [1],
    "nothing": lambda index: {},
    "an array": lambda index: np.zeros(3),
}


def of_file(folder: Path, file: str, most: int, pick: random.Random) -> Iterator[Damage]:
    """Yield changed values of a file, by its kind."""
    if file.endswith(".json"):
        return of_json(folder, file, most, pick)
    if file.endswith(".safetensors"):
        return of_safetensors(folder, file, most, pick)
    if file.endswith(".metadata"):
        return of_shard_index(folder, file)
    if file.endswith((".pt", ".pth", ".bin", ".ckpt")) and file != "training_args.bin":
        return of_torch(folder, file, most, pick)
    return iter(())
