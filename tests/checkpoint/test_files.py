"""Files are opened only where they are regular, small enough and readable; all others are named in an error."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import pickle
import random
import tempfile
from pathlib import Path

import pytest

from hf_compat.checkpoint import disks, files
from hf_compat.checkpoint.verifying import RunningHash
from hf_compat.errors import CheckpointError

HARD = {
    "a FIFO": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a circle of links": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: None,
    "deep": lambda path: path.write_text("[" * 200_000),
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "half": lambda path: path.write_text('{"a": '),
}


@pytest.mark.parametrize("what", HARD)
def test_what_cannot_be_read_is_named(tmp_path, what):
    path = tmp_path / "state.json"
    HARD[what](path)
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        files.read_json(path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "\ud800"])
def test_impossible_names(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.read_small(tmp_path / name)


def test_a_file_that_is_too_large(tmp_path):
    path = tmp_path / "manifest.json"
    with open(path, "wb") as file:
        file.truncate(files.SMALL_FILE_BYTES + 1)  # no block of it is on disk
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: it has more than"):
        files.read_small(path)


def test_a_file_without_permission():
    user = os.geteuid()
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        path = Path(place) / "state.json"
        path.write_text("{}")
        path.chmod(0)
        if user == 0:  # root may read everything
            os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError, match=r"state\.json cannot be read: Permission denied"):
                files.read_json(path)
        finally:
            os.seteuid(user)


@pytest.mark.parametrize(
    ("name", "is_plain"),
    [
        *((name, True) for name in ("a.txt", "part/b.txt", "..a", ".metadata")),
        *((name, False) for name in ("../a", "/a", "", ".", "a/../b", "a//b", "a\\b", "a\0", "\ud800", 3, None)),
    ],
)
def test_plain_names(name, is_plain):
    assert files.is_plain_name(name) == is_plain


def test_a_link_out_of_the_folder_is_not_inside(tmp_path):
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "up").symlink_to(tmp_path)
    (folder / "circle").symlink_to("circle")
    assert files.is_inside(folder, "a.txt")
    assert not files.is_inside(folder, "up/a.txt") and not files.is_inside(folder, "circle/a.txt")


@pytest.mark.parametrize("system", ["Linux", "Windows"])
def test_a_file_that_is_read_once_reads_as_any_other(tmp_path, monkeypatch, system):
    if system == "Windows":  # it has no such call
        monkeypatch.delattr(os, "preadv")
    draw = random.Random(0)
    for size in (0, 10, 2**16, 2**16 + 1, 300_000, 3_000_000):
        content = draw.randbytes(size)
        (tmp_path / "file").write_bytes(content)
        with open(tmp_path / "file", "rb", buffering=0) as file:
            theirs, ours = io.BytesIO(content), files.ReadOnce(file, RunningHash())
            for _ in range(200):
                place, whence = draw.randrange(size + 10), draw.choice((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END))
                place -= size if whence == os.SEEK_END else 0
                assert ours.seek(place, whence) == theirs.seek(place, whence) == ours.tell()
                count = draw.choice((0, 1, 30, 5000, 10**6))
                assert ours.read(count) == theirs.read(count)
            ours.seek(0)
            assert ours.read() == content
            with pytest.raises(OSError, match="Invalid argument"):
                ours.seek(-1)
            assert ours.hexdigest() == hashlib.sha256(content).hexdigest(), "in whatever order its parts were read"


@pytest.mark.parametrize("link", [None, "folder", "file", "inner"])
def test_what_is_inside_a_folder(tmp_path, link):
    root = tmp_path / "root"
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "file").write_text("")
    (root / "inner").mkdir(parents=True)
    (root / "own").write_text("")
    if link == "folder":
        (tmp_path / "named").symlink_to(root)
        root = tmp_path / "named"
    elif link is not None:
        (root / "inner" / "file").symlink_to(tmp_path / "away" / "file" if link == "file" else root / "own")
        (root / "lead").symlink_to(tmp_path / "away" if link == "file" else root / "inner")
    for name in ("own", "inner/file", "lead/file", "absent/file", "own/below"):
        assert files.is_inside(root, name) is (root / name).resolve().is_relative_to(root.resolve()), name
    assert not files.is_inside(root, "../away/file") and not files.is_inside(root, str(tmp_path / "away" / "file"))


@pytest.mark.parametrize(
    ("size", "asked", "calls"),
    [
        (10, [(0, 3), (3, 20)], [(0, 10)]),
        (10, [(10, 3), (11, 3)], []),
        (10, [(5, 3), (0, 3)], [(0, 10)]),  # the end first, which is all
        (200_000, [(0, 100), (100, 16_284), (16_384, 1)], [(0, 16_384), (16_384, 16_384)]),
        (200_000, [(134_464, 5), (199_999, 5), (134_463, 5)], [(134_464, 65_536), (134_463, 1)]),
        (200_000, [(134_463, 5), (199_000, 5)], [(134_463, 16_384), (134_464, 65_536)]),
        (200_000, [(0, 16_384), (16_384, 16_384), (40_000, 16_383)], [(0, 32_768), (40_000, 16_384)]),
        (200_000, [(0, 150_000), (150_000, 20_000)], [(0, 166_384), (166_384, 16_384)]),
        (200_000, [(199_000, 5), (120_000, 20_000)], [(134_464, 65_536), (120_000, 14_464)]),
        (200_000, [(199_000, 5), (100_000, 20_000), (120_000, 5)], [(134_464, 65_536), (100_000, 34_464)]),
        (
            200_000,
            [(199_000, 5), (40_000, 5), (100_000, 34_464), (40_010, 5)],
            [(134_464, 65_536), (40_000, 16_384), (100_000, 34_464)],
        ),
        (200_000, [(0, 200_000), (0, 5)], [(0, 200_000), (0, 16_384)]),
    ],
)
def test_a_file_is_asked_for_its_end_and_for_what_follows(tmp_path, monkeypatch, size, asked, calls):
    def read(self, views, place, theirs=files.ReadOnce._read):
        seen.append((place, sum(map(len, views))))
        return theirs(self, views, place)

    seen, content = [], bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    monkeypatch.setattr(files.ReadOnce, "_read", read)
    (tmp_path / "file").write_bytes(content)
    with open(tmp_path / "file", "rb", buffering=0) as file:
        ours = files.ReadOnce(file)
        for place, count in asked:
            ours.seek(place)
            assert ours.read(count) == content[place : place + count]
    assert seen == calls


@pytest.mark.parametrize(
    ("claims", "is_refused"),
    [
        ([("storage", None, "0", "cpu", 10)], False),
        ([("storage", None, "0", "cpu", 11)], True),
        ([("storage", None, "0", "cpu", 6), ("storage", None, "1", "cpu", 5)], True),
        ([("storage", None, "0", "cpu", 6), ("storage", None, "0", "cpu", 6)], False),
        (
            [("storage", None, "0", "cpu", 6), ("storage", None, "0", "cpu", 4), ("storage", None, "0", "cpu", 10)],
            False,
        ),
        ([("storage", None, "0", "cpu", 6), ("storage", None, "0", "cpu", 11)], True),
        ([("storage", None, [], "cpu", 6), ("storage", None, {}, "cpu", 5)], False),
        ([("storage", None, "0", "cpu", 10**9, "view")], True),
        ([("storage", None, "0", 10**9), ("storage", None, "0", "cpu", "many"), 10**9], False),
    ],
)
def test_storages_hold_no_more_numbers_than_a_file_has_bytes(claims, is_refused):
    walker = files._Walker(io.BytesIO(), 10)
    with pytest.raises(pickle.UnpicklingError, match="more numbers") if is_refused else contextlib.nullcontext():
        assert [walker.persistent_load(claim).given[0] for claim in claims] == claims


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_hashed", [False, True])
def test_a_file_that_is_read_in_any_order_has_its_hash(tmp_path, monkeypatch, seed, is_hashed):
    draw = random.Random(seed)
    content = draw.randbytes(draw.choice([0, 1, 64, 301]))
    (tmp_path / "file").write_bytes(content)
    monkeypatch.setattr(files, "CHUNK", 32)
    monkeypatch.setattr(files.ReadOnce, "_END", 48)
    monkeypatch.setattr(files.ReadOnce, "_AFTER", 16)
    with open(tmp_path / "file", "rb", buffering=0) as file:
        ours = files.ReadOnce(file, RunningHash() if is_hashed else None)
        for _ in range(draw.randrange(8)):
            place, count = draw.randrange(len(content) + 2), draw.randrange(80)
            ours.seek(place)
            assert ours.read(count) == content[place : place + count]
            assert ours.tell() == place + len(content[place : place + count])
            assert ours.read_at(place, 8).getvalue() == content[place : place + 8].ljust(8, b"\0")
        assert ours.hexdigest() == hashlib.sha256(content).hexdigest()
        assert ours.seek(-len(content), os.SEEK_END) == 0 and ours.seek(3) == 3 and ours.seek(-2, os.SEEK_CUR) == 1
        with pytest.raises(OSError, match="Invalid argument"):
            ours.seek(-1)


@pytest.mark.parametrize(("number", "is_offered"), [(errno.EINVAL, False), (errno.EXDEV, False), (errno.ENOSPC, True)])
def test_a_disk_without_flushes_is_told_once_and_one_without_room_is_an_error(
    tmp_path, monkeypatch, caplog, number, is_offered
):
    def refuse(descriptor):
        raise OSError(number, "odd")

    monkeypatch.setattr(disks, "_TOLD", set())
    monkeypatch.setattr(disks.os, "fsync", refuse)
    (tmp_path / "mount" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "mount" / "sub")
    monkeypatch.setattr(disks.os.path, "ismount", lambda path: path == str(tmp_path / "mount"))
    for _ in range(2):
        with pytest.raises(OSError, match="odd, when it was forced") if is_offered else contextlib.nullcontext():
            disks.flush(tmp_path / "link")
    said = f"The disk at {tmp_path / 'mount'} does not offer a flush (fsync): odd."
    assert len(caplog.messages) == (not is_offered) and all(one.startswith(said) for one in caplog.messages)
    disks.tell(tmp_path / "link", ("a rename", "It copies."), OSError(number, "odd"))
    assert caplog.messages[-1] == f"The disk at {tmp_path / 'mount'} does not offer a rename: odd. It copies."


@pytest.mark.parametrize("error", [None, PermissionError("odd"), IsADirectoryError("odd"), FileNotFoundError("odd")])
def test_a_folder_that_cannot_be_opened_is_not_flushed(tmp_path, monkeypatch, error):
    forced, closed, close = [], [], os.close
    opened = os.open

    def open_(path, flags):
        if error is not None:
            raise error
        return opened(path, flags)

    monkeypatch.setattr(disks.os, "open", open_)
    monkeypatch.setattr(disks.os, "close", lambda descriptor: closed.append(descriptor) or close(descriptor))
    monkeypatch.setattr(disks.os, "fsync", forced.append)
    with pytest.raises(FileNotFoundError) if isinstance(error, FileNotFoundError) else contextlib.nullcontext():
        disks.flush(tmp_path)
    assert len(forced) == (error is None) and forced == closed
