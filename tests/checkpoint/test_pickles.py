"""Pickles that would keep a loader busy for ever, fill the memory or end the process are refused before."""

from __future__ import annotations

import json
import pickle
import struct
import time
import zipfile

import pytest
import torch

from hf_compat.checkpoint.dcp_reader import open_dcp
from hf_compat.checkpoint.files import is_whole_zip
from hf_compat.checkpoint.reading import Contents, read_torch_file
from hf_compat.checkpoint.run_state import ARRAY_GLOBALS
from hf_compat.checkpoint.validation import read_trainer_state
from hf_compat.errors import CheckpointError
from hf_compat.native.loading import read_pickled_arguments

BEGIN, GIGABYTES = b"\x80\x02", b"\x8a\x08" + struct.pack("<q", 10**10)


def named(module, name):
    return f"c{module}\n{name}\n".encode()


def doubled(times=60):
    """A tuple of 2**times parts, each pair the one before twice: a hash walks through all of them."""
    steps = (b"r" + struct.pack("<I", i) + b"j" + struct.pack("<I", i) + b"\x86" for i in range(times))
    return b"K\x01" + b"".join(steps)


DEEP = b"K\x01" + b"\x85" * 100_000  # the hash of a tuple in a tuple in a tuple … ends the process
STORAGE = b"(X\7\0\0\0storage" + named("torch", "FloatStorage") + b"X\1\0\0\0000X\3\0\0\0cpu" + GIGABYTES + b"NtQ"
KEYS = {
    "a key of doubled tuples": b"}" + doubled() + b"K\x01s.",
    "such a key in what is thrown away": b"}}" + doubled() + b"K\x01sN\x86.",
    "a key of nested tuples": b"}" + DEEP + b"K\x01s.",
    "one long key again and again": b"}((" + b"K\x01" * 10**5 + b"tr\0\0\0\0K\x01" + b"h\0K\x01" * 10**4 + b"u.",
    "in a set": named("__builtin__", "set") + b"]" + doubled() + b"a\x85R.",
    "in pairs": named("collections", "OrderedDict") + b"]" + doubled() + b"K\x01\x86a\x85R.",
}
ROOM = {
    "bytes": named("builtins", "bytearray") + GIGABYTES + b"\x85R.",
    "a tensor": named("torch", "FloatTensor") + GIGABYTES + b"\x85R.",
    "a storage": named("torch.storage", "UntypedStorage") + GIGABYTES + b"\x85R.",
    "an array": named("numpy", "ndarray") + GIGABYTES + b"\x85\x85\x81.",
    "an array's beginning": named("numpy._core.multiarray", "_reconstruct") + b"(" + named("numpy", "ndarray")
    + GIGABYTES + b"\x85U\1btR.",
}  # fmt: skip
MEMO = b"Nr\xff\xff\xff\x3f."  # Python's own loader makes a table of 16 GB


@pytest.fixture(autouse=True)
def at_once():
    began = time.process_time()
    yield
    assert time.process_time() - began < 5


def in_zip(path, content, kind=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("archive/data.pkl", BEGIN + content)
        archive.writestr("archive/version", "3\n")
    return str(path)


def as_before_1_6(path, content):
    how = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    before = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, how)]
    path.write_bytes(b"".join(before) + BEGIN + content + pickle.dumps([], 2))
    return str(path)


@pytest.mark.parametrize("write", [in_zip, as_before_1_6])
@pytest.mark.parametrize("content", [*KEYS.values(), *ROOM.values()], ids=[*KEYS, *ROOM])
def test_a_loader_never_follows_it(tmp_path, content, write):
    path = write(tmp_path / "optimizer.pt", content)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt cannot be read: (its|it calls)"):
        read_torch_file(path, allowed=ARRAY_GLOBALS)


def test_an_old_file_has_no_more_numbers_than_bytes(tmp_path):
    tensor = b"(" + STORAGE + b"K\0K\1\x85K\1\x85\x89" + named("collections", "OrderedDict") + b")RtR."
    path = as_before_1_6(tmp_path / "optimizer.pt", named("torch._utils", "_rebuild_tensor_v2") + tensor)
    with pytest.raises(CheckpointError, match="more numbers than it has bytes"):
        read_torch_file(path)
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert read_torch_file(str(tmp_path / "old.pt"))["a"].sum() == 3


@pytest.mark.parametrize("content", [*KEYS.values(), MEMO], ids=[*KEYS, "memo"])
def test_neither_an_index_of_shards_nor_arguments_are_followed(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(BEGIN + content)
    with pytest.raises(CheckpointError, match="metadata cannot be read: it"):
        open_dcp(Contents(tmp_path))
    with pytest.raises(CheckpointError, match=r"training_args\.bin cannot be read: it"):
        read_pickled_arguments(in_zip(tmp_path / "training_args.bin", content))


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_what_is_compressed_is_not_unpacked(tmp_path, kind, monkeypatch):
    path = tmp_path / "notes.pt"
    in_zip(path, b"N" * 10**7 + b".", kind)
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *_: pytest.fail("unpacked"))
    with open(path, "rb") as file:
        assert not is_whole_zip(file)
    with pytest.raises(CheckpointError, match="it is compressed"):
        read_torch_file(str(path))


def test_brackets_stand_for_no_gigabytes(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text('{"global_step": 1, "log_history": [' + ",".join(["{}"] * 10**6) + "]}")
    with pytest.raises(CheckpointError, match="are 1000002 lists and objects"):
        read_trainer_state(path)
    log = {"loss": 1.0, "step": 1}
    path.write_text(json.dumps({"global_step": 1, "log_history": [log] * 10**5}, separators=(",", ":")))
    assert read_trainer_state(path).log_history == [log] * 10**5


def test_a_text_in_place_of_a_checkpoint_is_refused_as_such(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("x: 1\n")
    with pytest.raises(CheckpointError, match=r"notes\.txt cannot be read: it is not a file of `torch\.save`"):
        read_torch_file(str(path))
