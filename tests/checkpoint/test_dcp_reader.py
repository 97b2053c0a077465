"""Shards of torch.distributed.checkpoint: a value is plain, a tensor is a tensor, and the index is read once."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from helpers import toy
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint import model_state as shards
from hf_compat.checkpoint.convert import convert
from hf_compat.checkpoint.dcp_reader import _problem
from hf_compat.checkpoint.model_state import PlainState
from hf_compat.errors import CheckpointError

SHARDED = Path(__file__).with_name("sharded")
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


class Harmful:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(SHARDED, tmp_path / "checkpoint-2")
    return tmp_path / "checkpoint-2"


def edit_index(folder, change):
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def store_as_bytes(folder, key_has, content):
    """Append bytes to a shard, and let the index say that an entry is stored there as a value."""

    def change(index):
        key = next(key for key in index.state_dict_metadata if key_has in key)
        place = next(place for place in index.storage_data if place.fqn == key)
        info = index.storage_data.pop(place)
        start = (folder / info.relative_path).stat().st_size
        with open(folder / info.relative_path, "ab") as file:
            length = file.write(content)
        index.state_dict_metadata[key] = BytesStorageMetadata()
        index.storage_data[type(place)(fqn=key)] = type(info)(info.relative_path, start, length)

    edit_index(folder, change)


def load(folder):
    model = toy.Classifier()
    state = PlainState(model)
    state.load_weights(str(folder))
    optimizer = torch.optim.AdamW(model.parameters())
    assert state.load_optimizer(str(folder), optimizer)
    return optimizer


def test_good_shards_are_read(folder):
    optimizer = load(folder)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999) and optimizer.state
    assert manifest.problems(str(folder))[0] == "trainer_state.json is missing"


@pytest.mark.parametrize(("part", "key"), [(OPTIMIZER, "betas"), (OPTIMIZER, "exp_avg"), (MODEL, "inner.weight")])
@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_value_cannot_run_code(folder, tmp_path, part, key, form):
    mark = tmp_path / "mark"
    torch.save(Harmful(mark), tmp_path / "it.pt")
    content = (tmp_path / "it.pt").read_bytes() if form == "torch" else pickle.dumps(Harmful(mark))
    store_as_bytes(folder / part, key, content)
    for is_sealed in (False, True):
        with pytest.raises(CheckpointError, match=rf"{part}.* (cannot be read|holds no plain value|is damaged)"):
            load(folder)
        if not is_sealed:
            manifest.seal(str(folder))
    assert not mark.exists()


def test_a_value_in_the_place_of_a_tensor(folder, tmp_path):
    torch.save(torch.ones(16, 8), tmp_path / "it.pt")
    store_as_bytes(folder / MODEL, "inner.weight", (tmp_path / "it.pt").read_bytes())
    with pytest.raises(CheckpointError, match=r"'model\.inner\.weight' has to be a tensor and is stored as a value"):
        load(folder)


def test_a_tensor_in_the_place_of_a_value(folder):
    def change(index):
        tensor = next(entry for key, entry in index.state_dict_metadata.items() if key.endswith(".step"))
        key = next(key for key in index.state_dict_metadata if "betas" in key)
        index.state_dict_metadata[key] = tensor

    edit_index(folder / OPTIMIZER, change)
    with pytest.raises(CheckpointError, match="betas"):
        load(folder)


def test_an_index_that_is_swapped_after_the_check_is_not_read(folder, tmp_path, monkeypatch):
    mark, read = tmp_path / "mark", shards.read_dcp

    def swap_and_read(dcp, *rest, **more):
        Path(dcp.path, ".metadata").write_bytes(pickle.dumps(Harmful(mark)))
        return read(dcp, *rest, **more)

    monkeypatch.setattr(shards, "read_dcp", swap_and_read)
    load(folder)
    assert not mark.exists()


def without_parts(index):
    for entry in index.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            entry.chunks = []


def no_index(index):
    index.storage_data = None


def place_of_text(index):
    index.storage_data = {"text": next(iter(index.storage_data.values()))}


def size_of_text(index):
    next(iter(index.state_dict_metadata.values())).size = "text"


def negative(index):
    next(iter(index.storage_data.values())).offset = -1


@pytest.mark.parametrize("change", [without_parts, no_index, place_of_text, size_of_text, negative])
def test_an_index_that_torch_would_not_write(folder, tmp_path, change):
    edit_index(folder / MODEL, change)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        convert(str(folder / MODEL), str(tmp_path / "hf"))
    assert not (tmp_path / "hf").exists() and not (tmp_path / "hf.partial").exists()


def test_a_class_of_torch_stays_as_it_is(folder):
    """`BUILD` with a pair sets attributes of whatever it is given: of a class, too."""
    attack = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x05\x00\x00\x00spoilK\x01s\x86b."
    (folder / MODEL / ".metadata").write_bytes(attack)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        load(folder)
    assert not hasattr(Metadata, "spoil")


def test_an_index_of_other_objects_is_refused_by_name(folder):
    path = folder / MODEL / ".metadata"
    path.write_bytes(pickle.dumps(np.zeros(3)))
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))} cannot be read: it names numpy"):
        load(folder)


def tensor_entry(size=(4, 3), chunks=(((0, 0), (4, 3)),), dtype=torch.float32):
    made = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), made)


def index_of(entries, places=None, info=("__0_0.distcp", 0, 48)):
    held = {MetadataIndex(name): _StorageInfo(*info) for name in (entries if places is None else places)}
    return Metadata(state_dict_metadata=entries, storage_data=held)


def changed(index, **values):
    for name, value in values.items():
        setattr(index, name, value)
    return index


HALVES = (((0, 0), (2, 3)), ((2, 0), (2, 3)))


@pytest.mark.parametrize(
    ("index", "wrong"),
    [
        (index_of({"a": tensor_entry(), "b": BytesStorageMetadata()}), None),
        (index_of({"a": tensor_entry(chunks=HALVES)}), None),
        (index_of({"a": tensor_entry(size=(), chunks=[((), ())])}), None),
        (index_of({"a": tensor_entry(size=(0, 3), chunks=[])}), None),
        ({}, "not an index"),
        (changed(index_of({}), storage_data=[]), "not an index"),
        (index_of({"a": tensor_entry()}, info=("__0_0.distcp", "0", 48)), "not an index"),
        (index_of({"a": tensor_entry()}, info=("__0_0.distcp", 0, 48.0)), "not an index"),
        (index_of({"a": tensor_entry()}, info=("__0_0.distcp", -1, 48)), "not an index"),
        (index_of({"a": tensor_entry()}, info=("__0_0.distcp", 0, 0)), "not an index"),
        (index_of({"a": tensor_entry()}, info=("__0_0.distcp", 0, 1)), None),
        (index_of({"a": tensor_entry()}, info=(Path("x"), 0, 48)), "not an index"),
        (changed(index_of({}), storage_data={"a": _StorageInfo("x", 0, 1)}), "not an index"),
        (index_of({"a": tensor_entry()}, places=["a", "b"]), "of each entry where it is"),
        (index_of({"a": tensor_entry(), "b": tensor_entry()}, places=["a"]), "of each entry where it is"),
        (index_of({3: tensor_entry()}), "does not say what 3 is"),
        (index_of({"a": "text"}), "does not say what 'a' is"),
        (index_of({"a": tensor_entry(chunks=HALVES[:1])}), "where all of 'a' is stored"),
        (index_of({"a": tensor_entry(chunks=(*HALVES, HALVES[0]))}), "where all of 'a' is stored"),
        (index_of({"a": tensor_entry(chunks=(((0, 0), (2, 3)), ((3, 0), (2, 3))))}), "where all of 'a' is stored"),
        (index_of({"a": tensor_entry(chunks=(((-1, 0), (4, 3)),))}), "where all of 'a' is stored"),
        (index_of({"a": tensor_entry(dtype="float32")}), "where all of 'a' is stored"),
        (index_of({"a": changed(tensor_entry(), properties=None)}), "where all of 'a' is stored"),
    ],
)
def test_what_an_index_has_to_say(index, wrong):
    found = _problem(index)
    assert found is None if wrong is None else wrong in found
