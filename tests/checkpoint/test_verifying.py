"""A resume reads each file once: small ones are kept from their check, large ones are hashed while they are loaded."""

from __future__ import annotations

import hashlib
import logging
import mmap
import shutil
import sys

import pytest
import safetensors.torch
import torch

from helpers import toy
from hf_compat import Trainer, get_last_checkpoint
from hf_compat.checkpoint import manifest, reading, verifying
from hf_compat.checkpoint.verifying import CHUNK, sha256_of_mapped
from hf_compat.errors import CheckpointError

VALUES = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
LARGE = ("model.safetensors", "optimizer.pt", "trainer_state.json", "run_state.pt")


def train(args, resume=None, kind=Trainer):
    torch.manual_seed(5)
    trainer = kind(toy.Classifier(), args, train_dataset=toy.rows(16))
    trainer.train(resume_from_checkpoint=resume)
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    """As what the toy's files are read."""
    if request.param == "large":
        for module in (verifying, reading):
            monkeypatch.setattr(module, "READ_AT_ONCE", 0)
    return request.param


@pytest.fixture
def out(make_args, tmp_path):
    train(make_args(**VALUES))
    return tmp_path / "out"


def flip(path):
    """Change a number in a file, by which no reader notices that it is not as it was written."""
    content = bytearray(path.read_bytes())
    if path.suffix == ".json":
        content = content.replace(b'"max_steps": 4', b'"max_steps": 7')
    elif path.suffix == ".safetensors":
        content[-3] ^= 1
    else:
        content[content.index(b"PK\3\4", 8) + 256] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", LARGE)
def test_a_damaged_file_is_found_before_the_first_update(make_args, out, caplog, size, file):
    flip(out / "checkpoint-4" / file)
    args = make_args(**{**VALUES, "max_steps": 5})
    with caplog.at_level(logging.WARNING, "hf_compat"):
        found = train(args, True)
    assert "checkpoint-4 is not whole and is skipped" in caplog.text
    assert f"{file} is damaged (its hash differs)" in caplog.text
    shutil.rmtree(out / "checkpoint-4")
    assert same(found, train(args, str(out / "checkpoint-2")))


def test_damage_in_all_checkpoints_is_told_with_the_way_out(make_args, out, size):
    for update in (2, 4):
        flip(out / f"checkpoint-{update}" / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"(?s)No valid checkpoint.*checkpoint-4.*hash differs.*hf-compat seal"):
        train(make_args(**{**VALUES, "max_steps": 5}), True)


def test_edited_weights_of_a_named_checkpoint_are_read_with_one_warning(make_args, out, caplog, size):
    folder = out / "checkpoint-4"
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    safetensors.torch.save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, "hf_compat"):
        found = train(make_args(**VALUES), str(folder))
    assert not any(tensor.any() for tensor in found.values())
    told = (
        f"{folder} differs from its manifest.json and is read as it is: model.safetensors is changed. `hf-compat seal"
    )
    assert caplog.text.count(told) == caplog.text.count("is read as it is") == 1


def test_a_named_checkpoint_with_a_damaged_archive_is_refused(make_args, out, size):
    flip(out / "checkpoint-4" / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"(?s)checkpoint-4: optimizer.pt is cut off or damaged.*mend the file"):
        train(make_args(**{**VALUES, "max_steps": 5}), str(out / "checkpoint-4"))


def test_what_nothing_loads_is_hashed_as_well(make_args, out, caplog, size):
    for update in (2, 4):
        torch.save({"x": torch.ones(9)}, out / f"checkpoint-{update}" / "pytorch_model.bin")
        (out / f"checkpoint-{update}" / "manifest.json").unlink()
        manifest.seal(str(out / f"checkpoint-{update}"))
    flip(out / "checkpoint-4" / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING, "hf_compat"):
        train(make_args(**{**VALUES, "max_steps": 5}), True)
    assert "pytorch_model.bin is damaged (its hash differs)" in caplog.text


def test_an_override_is_given_verified_files_alone(make_args, out, size):
    given = []

    class Own(Trainer):
        def _load_optimizer_and_scheduler(self, checkpoint):
            given.append(checkpoint)
            super()._load_optimizer_and_scheduler(checkpoint)

    flip(out / "checkpoint-4" / "optimizer.pt")
    train(make_args(**{**VALUES, "max_steps": 5}), True, Own)
    assert given == [str(out / "checkpoint-2")]


def test_what_is_small_and_not_mapped_is_opened_once(make_args, out, size):
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    train(make_args(**{**VALUES, "max_steps": 4}), str(out / "checkpoint-4"))
    names = [path.removeprefix(f"{out}/checkpoint-4/") for path in opened if path.startswith(f"{out}/checkpoint-4/")]
    assert {"model.safetensors", "optimizer.pt", "run_state.pt", "scheduler.pt"} <= set(names)
    names = [name for name in names if name != "manifest.json"]  # one that was written just now is read again
    again = {name for name in names if names.count(name) > 1}
    assert again <= ({"model.safetensors"} if size == "small" else set(names)), "for its hash or size, and to be read"
    assert max(map(names.count, names)) == 2
    assert get_last_checkpoint(out) == str(out / "checkpoint-4")


@pytest.mark.parametrize("fault", [None, OSError(14, "Bad address"), OSError(22, "Invalid argument"), AttributeError()])
def test_a_mapped_file_has_the_same_hash_whatever_the_system_can(tmp_path, monkeypatch, fault):
    """If the disk refuses a part, reading says so. The mapping alone would end the process."""

    class Mapping(mmap.mmap):
        def madvise(self, option, start, length):
            if fault is not None and start:
                raise fault
            super().madvise(option, start, length)

    monkeypatch.setattr(mmap, "mmap", Mapping)
    for content in (b"", b"x", b"abc" * CHUNK, bytes(2 * CHUNK)):
        (tmp_path / "file").write_bytes(content)
        with open(tmp_path / "file", "rb", buffering=0) as file:
            assert sha256_of_mapped(file) == hashlib.sha256(content).hexdigest()
