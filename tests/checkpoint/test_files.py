"""Files are opened only where they are regular, small enough and readable; all others are named in an error."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from hf_compat.checkpoint import files
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
