"""Requests to a store: which are made again, what they leave out, and folders where a storage has such."""

from __future__ import annotations

import logging
import os

import pytest

from hf_compat.errors import ArgumentError, MissingPackage, StoreError
from hf_compat.runtime import stores
from hf_compat.runtime.stores import Storage


class Failing:
    """The files of a storage whose requests fail at first."""

    def __init__(self, files, *errors):
        self.files, self.errors, self.asked = files, list(errors), 0

    def __getattr__(self, name):
        def ask(*args, **kwargs):
            if name == "invalidate_cache":
                return None
            self.asked += 1
            if self.errors:
                raise self.errors.pop(0)
            return getattr(self.files, name)(*args, **kwargs)

        return ask


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "PAUSES", (0.001, 0.002))
    return Storage(f"file://{tmp_path}/store/")


def test_files_come_and_go_with_their_folders(storage, tmp_path):
    (tmp_path / "sent").write_bytes(b"12345")
    told = []
    storage.write("a/b/small", b"123")
    storage.send(str(tmp_path / "sent"), "a/sent", told.append)
    (tmp_path / "store" / "a" / "c" / "d").mkdir(parents=True)
    assert storage.sizes() == {"a/b/small": 3, "a/sent": 5} and storage.sizes("a/b") == {"a/b/small": 3}
    assert storage.sizes("none") == {} and storage.read("a/b/small") == b"123"
    storage.fetch("a/sent", str(tmp_path / "fetched"), 5)
    assert (tmp_path / "fetched").read_bytes() == b"12345"
    storage.remove("a/b/small", "a/none", "a/sent")
    storage.remove_empty("a")
    assert storage.sizes() == {} and not (tmp_path / "store" / "a").exists()
    for call in (lambda: storage.read("none"), lambda: storage.fetch("none", str(tmp_path / "x"), 1),
                 lambda: storage.send(str(tmp_path / "none"), "a", told.append)):  # fmt: skip
        with pytest.raises(FileNotFoundError):
            call()


def test_a_folder_with_files_is_kept(storage, tmp_path):
    for name in ("a/b/file", "a/file"):
        storage.write(name, b"1")
    (tmp_path / "store" / "a" / "empty").mkdir()
    storage.remove_empty("a")
    assert storage.sizes().keys() == {"a/b/file", "a/file"} and (tmp_path / "store" / "a").is_dir()


@pytest.mark.parametrize(
    ("errors", "raised", "asked"),
    [
        ([], None, 1),
        ([OSError("busy")], None, 2),
        ([OSError("busy"), ValueError("odd")], None, 3),
        ([OSError("busy")] * 3, StoreError, 3),
        ([PermissionError("closed")], StoreError, 1),
        ([OSError("busy"), NotImplementedError("no")], StoreError, 2),
        ([FileNotFoundError("gone")], FileNotFoundError, 1),
        ([OSError("busy")] * 2 + [FileNotFoundError("gone")], FileNotFoundError, 3),
    ],
)
def test_a_request_is_made_again_but_not_where_it_is_refused(storage, caplog, errors, raised, asked):
    storage.write("a", b"1")
    storage._files = Failing(storage._files, *errors)
    with caplog.at_level(logging.INFO):
        if raised is None:
            assert storage.read("a") == b"1"
        else:
            with pytest.raises(raised) as found:
                storage.read("a")
            assert raised is FileNotFoundError or "could not be read" in str(found.value)
    assert storage._files.asked == asked
    retried = sum(type(error) in (OSError, ValueError) for error in errors[:2])
    assert [record.message.endswith("It is tried again.") for record in caplog.records] == [True] * retried


def test_a_file_that_came_cut_is_fetched_again(storage, tmp_path):
    storage.write("a", b"123")
    real, calls = storage._files, []

    class Cut:
        def get_file(self, name, path):
            calls.append(name)
            real.get_file(name, path)
            if len(calls) == 1:
                os.truncate(path, 2)

    storage._files = Cut()
    storage.fetch("a", str(tmp_path / "here"), 3)
    assert (tmp_path / "here").read_bytes() == b"123" and len(calls) == 2
    with pytest.raises(StoreError, match="3 of 4 bytes of a came"):
        storage.fetch("a", str(tmp_path / "here"), 4)
    assert len(calls) == 5


def test_bytes_are_told_as_they_are_sent(storage, tmp_path):
    class Sends:
        def put_file(self, path, name, callback):
            callback.relative_update(3)
            callback.relative_update()

    (tmp_path / "sent").write_bytes(b"1234")
    storage._files, storage._has_folders, told = Sends(), False, []
    storage.send(str(tmp_path / "sent"), "a", told.append)
    assert told == [3, 1]


def test_a_missing_bucket_is_told_as_the_stores(storage):
    storage._files = Failing(storage._files, FileNotFoundError("bucket"), FileNotFoundError("bucket"))
    storage._has_folders = False
    with pytest.raises(StoreError, match="could not be written"):
        storage.write("a", b"1")


@pytest.mark.parametrize(
    ("address", "error", "kind", "said"),
    [
        ("memory://a", ValueError("odd"), ArgumentError, "cannot be read: odd"),
        ("known://a", TypeError("odd"), ArgumentError, "cannot be read: odd"),
        ("ours://a", ValueError("odd"), MissingPackage, "`pip install ours-fs`"),
        ("ours://a", ImportError("no ours"), MissingPackage, "no ours.\n\nHint: `pip install ours-fs`"),
        ("other://a", ImportError("no other"), MissingPackage, "no other.\n\nHint: install it"),
        ("ours://a", RuntimeError("no route"), StoreError, "no route"),
    ],
)
def test_an_address_that_cannot_be_read(monkeypatch, address, error, kind, said):
    def connect(address):
        raise error

    monkeypatch.setattr(stores, "url_to_fs", connect)
    monkeypatch.setattr(stores, "PACKAGES", {"ours": "ours-fs", "known": "known-fs"})
    monkeypatch.setattr(stores, "known_implementations", {"known": {}})
    with pytest.raises(kind) as raised:
        Storage(address)
    assert said in str(raised.value)


@pytest.mark.parametrize(("address", "has_folders"), [("file://a/b/", True), ("s3://a/b", False), ("gs://a/b/", False)])
def test_names_begin_below_the_address(monkeypatch, address, has_folders):
    found = []

    class Files:
        def makedirs(self, name, exist_ok):
            found.append(name)

        def pipe_file(self, name, content):
            found.append(name)

    monkeypatch.setattr(stores, "url_to_fs", lambda address: (Files(), address.partition("://")[2]))
    Storage(address).write("c/d", b"1")
    assert found == ["a/b/c"] * has_folders + ["a/b/c/d"]


def test_stores_of_folders_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_STORES", {})
    folder = str(tmp_path / "out")
    assert stores.store_of(folder) is None and stores.store_of("s3://a/b") == "s3://a/b"
    stores.note_store(folder, "s3://a/b")
    assert stores.store_of(os.path.join(folder, "..", "out")) == "s3://a/b"
    assert stores.store_of("a\0b") is None and stores.store_of(str(tmp_path)) is None
    monkeypatch.setenv("HF_COMPAT_ISOLATED_IN", "1")
    stores.note_store(folder, "s3://a/c")
    assert stores.store_of(folder) is None and not stores.are_reachable()


def test_the_local_folder_of_a_store(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert stores.folder_for("s3://bucket//a/./b/../c?d/") == "/cache/hf_compat/stores/s3/bucket/a/b/%2E%2E/c%3Fd"
