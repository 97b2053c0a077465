"""What several threads write is a file of `torch.save`: torch reads it, and any reader of zip archives."""

from __future__ import annotations

import zipfile
import zlib

import pytest
import torch
from isal import isal_zlib

from hf_compat.checkpoint import torch_writer
from hf_compat.checkpoint.torch_writer import save_torch


def state():
    torch.manual_seed(0)
    shared = torch.randn(300, 100)
    return {
        "shared": shared,
        "view": shared[1:, ::2],
        "empty": torch.empty(0),
        "scalar": torch.tensor(3.0),
        "half": torch.randn(1000, 300).bfloat16(),
        "large": torch.arange(100_000).reshape(100, 1000).t(),
        "plain": [1, "ü", None, {"lr": 0.1}],
    }


def assert_read_as(expected, found):
    assert found["plain"] == expected["plain"]
    for name, tensor in expected.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(found[name], tensor) and found[name].stride() == tensor.stride(), name
    assert found["view"].untyped_storage().data_ptr() == found["shared"].untyped_storage().data_ptr()


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_what_was_written(tmp_path, mmap):
    path = tmp_path / "optimizer ü.pt"
    save_torch(state(), str(path))
    assert_read_as(state(), torch.load(path, weights_only=True, mmap=mmap))


@pytest.mark.parametrize("checksum", [zlib.crc32, isal_zlib.crc32])
@pytest.mark.parametrize("chunk", [100, 2**20])
def test_the_records_are_those_of_torch_with_their_checksums(tmp_path, monkeypatch, checksum, chunk):
    monkeypatch.setattr(torch_writer, "_CHUNK", chunk)
    monkeypatch.setattr(torch_writer, "crc32", checksum)
    save_torch(state(), str(tmp_path / "state.pt"))
    (tmp_path / "torch").mkdir()
    torch.save(state(), tmp_path / "torch" / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as ours, zipfile.ZipFile(tmp_path / "torch" / "state.pt") as theirs:
        assert ours.testzip() is None
        names = [name for name in theirs.namelist() if not name.endswith("serialization_id")]
        assert ours.namelist() == names
        assert all(ours.read(name) == theirs.read(name) for name in names)


def test_sizes_and_counts_beyond_their_fields_are_written_in_64_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_writer, "_LARGEST_32", 1000)
    monkeypatch.setattr(torch_writer, "_LARGEST_16", 3)
    save_torch(state(), str(tmp_path / "state.pt"))
    assert_read_as(state(), torch.load(tmp_path / "state.pt", weights_only=True))
    assert zipfile.ZipFile(tmp_path / "state.pt").testzip() is None


@pytest.mark.parametrize(("number", "is_long"), [(2**32 - 2, False), (2**32 - 1, True), (2**32, True), (2**40, True)])
def test_a_number_takes_64_bits_from_all_ones_on(number, is_long):
    plain = len(torch_writer._Record(b"name", 1, 0).entry())
    assert len(torch_writer._Record(b"name", number, 0).entry()) - plain == (4 + 16) * is_long
    assert len(torch_writer._Record(b"name", 1, number).entry()) - plain == (4 + 8) * is_long
    assert len(torch_writer._Record(b"name", number, number).entry()) - plain == (4 + 24) * is_long


@pytest.mark.parametrize(("count", "is_long"), [(2**16 - 2, False), (2**16 - 1, True)])
def test_a_count_takes_64_bits_from_all_ones_on(tmp_path, count, is_long):
    with (tmp_path / "archive").open("wb") as file:
        archive = torch_writer._Archive(file, "root", None)
        archive._records = [torch_writer._Record(b"", 0, 0)] * count
        archive.close()
    content = (tmp_path / "archive").read_bytes()
    assert (b"PK\x06\x06" in content) == is_long and content.endswith(b"\0\0")
    assert int.from_bytes(content[-12:-10], "little") == min(count, 2**16 - 1)


def test_memory_that_waits_to_be_written_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_writer, "_UNDER_WAY", 1)
    save_torch(state(), str(tmp_path / "state.pt"))
    assert_read_as(state(), torch.load(tmp_path / "state.pt", weights_only=True))


def test_a_write_that_fails_comes_out(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch_writer.os, "pwrite", fail)
    with pytest.raises(OSError, match="No space left"):
        save_torch(state(), str(tmp_path / "state.pt"))
    monkeypatch.undo()
    monkeypatch.setattr(torch_writer, "_WRITTEN_AT_ONCE", 2**40)
    monkeypatch.setattr(torch_writer.os, "pwrite", fail)
    with pytest.raises(OSError, match="No space left"):
        save_torch(state(), str(tmp_path / "state.pt"))


def test_another_release_of_torch_writes_by_itself(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(torch.serialization, "_save", lambda data, archive: None)
    monkeypatch.setattr(torch, "save", lambda *args: called.append(args))
    save_torch(state(), str(tmp_path / "state.pt"))
    assert len(called) == 1
