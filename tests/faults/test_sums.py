"""Sums of pages vouch for the files of a save that a callback has seen, in place of hashes."""

from __future__ import annotations

import hashlib
import io
import os
import random
import shutil

import pytest

from helpers import toy
from hf_compat import Trainer, TrainerCallback, set_seed
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint import manifest as sealing
from hf_compat.checkpoint.reading import read_manifest
from hf_compat.checkpoint.verifying import CHUNK, sums_of


@pytest.fixture(autouse=True)
def all_files_are_large(monkeypatch):
    monkeypatch.setattr(sealing, "_HASHED_AT_ONCE", -1)


def by_hand(content: bytes) -> str:
    """The sum of the 64-bit words of each page of 4 KiB, and a hash of these sums."""
    pages = (content[start : start + 4096].ljust(4096, b"\0") for start in range(0, len(content), 4096))
    words = ([int.from_bytes(page[at : at + 8], "little") for at in range(0, 4096, 8)] for page in pages)
    sums = b"".join((sum(page) % 2**64).to_bytes(8, "little") for page in words)
    return f"{hashlib.sha256(sums).hexdigest()} {len(content)}"


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4097])
def test_each_page_has_its_sum(size):
    content = random.Random(size).randbytes(size)
    assert sums_of(io.BytesIO(content)) == by_hand(content)
    assert sums_of(io.BytesIO(content[:-1])) != by_hand(content) or not content


def run(make_args, *callbacks):
    set_seed(3)
    args = make_args(save_strategy="steps", save_steps=2, max_steps=4)
    Trainer(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=list(callbacks)).train()


class Copies(TrainerCallback):
    """Copies as `cp -r` does, which keeps no times."""

    def __init__(self, to):
        self.to = to

    def on_save(self, args, state, control, **kwargs):
        name = f"checkpoint-{state.global_step}"
        shutil.copytree(f"{args.output_dir}/{name}", self.to / name, copy_function=shutil.copyfile)


def test_no_disk_and_no_hash_is_waited_for_before_a_callback_hears_of_a_save(make_args, monkeypatch):
    """What a save costs before `on_save` returns: the large files are written, and read once for their sums."""
    done, seen = [], []

    class Hears(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            done.clear()

        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:  # later, the flushing of this one may still go on
                seen.extend(done)

    for name in ("flush", "sha256_of", "sums_of"):
        own = getattr(sealing, name)
        monkeypatch.setattr(sealing, name, lambda one, name=name, own=own: (done.append(name), own(one))[1])
    monkeypatch.setattr(sealing, "entries", lambda folder: dict.fromkeys(("model.safetensors", "optimizer.pt"), True))
    run(make_args, Hears())
    assert seen == ["sums_of", "sums_of"]


def test_sums_find_what_a_power_cut_or_a_copy_has_lost(make_args, tmp_path, monkeypatch):
    run(make_args, Copies(tmp_path / "copies"))
    copy = tmp_path / "copies" / "checkpoint-4"
    monkeypatch.setattr(sealing, "this_boot", lambda: "another start of the system")
    assert manifest.problems(str(copy)) == []
    optimizer = copy / "optimizer.pt"
    content = optimizer.read_bytes()
    for wrong in (content[:4096] + bytes(len(content) - 4096), content[:-1] + b"!", content[:-1], b"!" + content[1:]):
        optimizer.write_bytes(wrong)
        assert "optimizer.pt" in str(manifest.problems(str(copy)))
    optimizer.write_bytes(content[4096:8192] + content[:4096] + content[8192:])
    assert manifest.problems(str(copy)) == ["optimizer.pt is damaged (its sums differ)"]
    optimizer.write_bytes(content)
    sealing.flush_and_hash(str(copy))  # as before it is uploaded to a store
    assert all("sha256" in facts for facts in read_manifest(copy).files.values())
    assert manifest.problems(str(copy)) == []


def test_a_hash_never_vouches_for_what_the_sums_refuse(make_args, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(sealing, "flush_listed", lambda folder: None)  # a kill in between
        run(make_args, Copies(tmp_path / "copies"))
    checkpoint = tmp_path / "out" / "checkpoint-4"
    state = checkpoint / "trainer_state.json"
    times = state.stat().st_atime_ns, state.stat().st_mtime_ns
    state.write_text(state.read_text().replace("4", "5", 1))
    os.utime(state, ns=times)
    sealing.flush_and_hash(str(checkpoint))
    listed = read_manifest(checkpoint).files
    assert [name for name, facts in listed.items() if "sha256" not in facts] == ["trainer_state.json"]
    assert manifest.problems(str(checkpoint)) == ["trainer_state.json is damaged (its sums differ)"]
