"""Checkpoints that survive kills, full disks, damage and malice."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from helpers import toy
from helpers.parity.compare import same
from hf_compat import Trainer, TrainerCallback, get_last_checkpoint, set_seed
from hf_compat.checkpoint.layout import SAVING, SCALER_NAME, STATES, make_hidden
from hf_compat.checkpoint.reading import is_ours_alone
from hf_compat.checkpoint.run_lock import Owner
from hf_compat.errors import CheckpointError, CheckpointWriteError, OutputFolderError

KILL = Path(__file__).resolve().parents[1] / "sweeps" / "faults" / "kill.py"


def make(make_args, folder, **values):
    set_seed(3)
    base = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "gradient_accumulation_steps": 2}
    return Trainer(toy.Classifier(), make_args(output_dir=str(folder), **{**base, **values}), train_dataset=toy.rows())


@pytest.mark.parametrize(("shape", "kills", "within_saves"), [("plain", 8, 2), ("async_save", 3, 0)])
def test_kills_leave_the_run_as_it_would_have_been(shape, kills, within_saves):
    command = [sys.executable, str(KILL), str(kills), "1", "--shape", shape]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["kills"] == kills and report["runs that ended"] == report["equal bit for bit"] >= 1
    assert report["within saves"] >= within_saves


@pytest.fixture
def whole(make_args, tmp_path):
    trainer = make(make_args, tmp_path / "out")
    trainer.train()
    return tmp_path / "out"


STATE_FILES = tuple(state.name for state in STATES if state.name != SCALER_NAME)  # no run here scales gradients
FILES = ["model.safetensors", "trainer_state.json", "training_args.bin", "manifest.json", *STATE_FILES]


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "flipped":
        path.write_bytes(flipped(content, within(path)))
    elif how == "flipped in the header":
        path.write_bytes(flipped(content, 8))
    else:
        path.unlink()


def within(path: Path) -> int:
    """Return where a flipped bit damages what is stored; a flip in the padding of torch's files changes nothing."""
    if zipfile.is_zipfile(path):
        return zipfile.ZipFile(path).infolist()[0].header_offset + 200
    return path.read_bytes().rindex(b"}") if path.suffix == ".json" else -20  # the last weights of safetensors


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


def test_the_list_of_files_is_the_real_one(whole):
    assert sorted(path.name for path in (whole / "checkpoint-8").iterdir()) == sorted(FILES)


HOW = ("truncated", "emptied", "flipped", "removed")
DAMAGES = [(name, how) for name in FILES for how in HOW if (name, how) != ("manifest.json", "removed")]


# What somebody may have done on purpose, as each file that is there is whole: a folder that is named is read then, too.
DISPENSABLE = ("training_args.bin", *STATE_FILES)
WHOLE_BY_THEMSELVES = {("model.safetensors", "flipped"), *((name, "removed") for name in DISPENSABLE)}


def test_without_its_manifest_a_folder_is_one_of_transformers_and_whole_as_such(whole):
    damage(whole / "checkpoint-8" / "manifest.json", "removed")
    assert get_last_checkpoint(whole) == str(whole / "checkpoint-8")


@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_damage_is_found_and_the_checkpoint_before_is_taken(whole, make_args, name, how, caplog):
    damage(whole / "checkpoint-8" / name, how)
    with caplog.at_level("WARNING", logger="hf_compat"):
        assert get_last_checkpoint(whole) == str(whole / "checkpoint-6")
    assert caplog.text.count("checkpoint-8 is not whole") == 1 and name in caplog.text
    trainer = make(make_args, whole)
    named = str(whole / "checkpoint-8")
    if (name, how) in WHOLE_BY_THEMSELVES:
        assert trainer.train(resume_from_checkpoint=named).global_step == 8
        assert f"{named} differs from its manifest.json" in caplog.text
    else:
        with pytest.raises(CheckpointError, match=f"checkpoint-8.*{name}"):
            trainer.train(resume_from_checkpoint=named)
    assert trainer.train(resume_from_checkpoint=True).global_step == 8


FILES_OF_TRANSFORMERS = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
# What cannot be seen without hashes: the numbers of safetensors have no checksum; a run that saves the model only has
# no random states either.
UNSEEN = {("model.safetensors", "flipped"), ("rng_state.pth", "removed")}


@pytest.mark.parametrize(
    ("name", "how"),
    [("model.safetensors", "flipped in the header"), *((name, how) for name in FILES_OF_TRANSFORMERS for how in HOW)],
)
def test_damage_of_folders_that_transformers_wrote(whole, name, how):
    for step in (2, 4, 6, 8):
        for path in (whole / f"checkpoint-{step}").iterdir():
            if is_ours_alone(path.name):
                path.unlink()
    damage(whole / "checkpoint-8" / name, how)
    expected = "checkpoint-8" if (name, how) in UNSEEN else "checkpoint-6"
    assert Path(get_last_checkpoint(whole)).name == expected


def killed_before_the_last_rename(run):
    place = make_hidden(str(run), SAVING, Owner(pid=2**22 + 7))  # no process has such a number
    os.replace(run / "checkpoint-8", os.path.join(place, "checkpoint-8"))
    return Path(place)


def test_a_save_that_was_killed_between_two_renames_is_finished(whole, make_args):
    place = killed_before_the_last_rename(whole)
    assert make(make_args, whole).train(resume_from_checkpoint=True).global_step == 8
    assert (whole / "checkpoint-8").is_dir() and not place.exists()


def test_the_last_checkpoint_is_found_between_two_renames(whole):
    killed_before_the_last_rename(whole)
    assert get_last_checkpoint(whole) == str(whole / "checkpoint-8")


def test_rotation_deletes_this_runs_checkpoints_and_no_others(make_args, tmp_path):
    folder = tmp_path / "out"
    foreign = folder / "checkpoint-1"
    foreign.mkdir(parents=True)
    (foreign / "model.safetensors").write_bytes(b"somebody else's")

    class Note(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                (folder / "checkpoint-2" / "notes.txt").write_text("mine")

    trainer = make(make_args, folder, save_total_limit=2, num_train_epochs=1)
    trainer.add_callback(Note)
    trainer.train()
    assert {path.name for path in folder.iterdir()} == {"checkpoint-1", "checkpoint-6", "checkpoint-8"}
    assert (foreign / "model.safetensors").read_bytes() == b"somebody else's"
    assert get_last_checkpoint(folder) == str(folder / "checkpoint-8")


class FailingSave(Trainer):
    at = 6

    def _save_rng_state(self, output_dir):
        if self.state.global_step == self.at:
            raise OSError(28, "No space left on device", output_dir)
        super()._save_rng_state(output_dir)


def test_a_save_that_fails_midway_leaves_the_earlier_ones(make_args, tmp_path):
    set_seed(3)
    args = make_args(save_strategy="steps", save_steps=2, max_steps=8, gradient_accumulation_steps=2)
    trainer = FailingSave(toy.Classifier(), args, train_dataset=toy.rows())
    with pytest.raises(OSError, match=r"(?s)checkpoint-6 could not be written.*No space left.*Hint") as caught:
        trainer.train()
    assert isinstance(caught.value, CheckpointWriteError)
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"checkpoint-2", "checkpoint-4"}
    weights = make_and_finish(make_args, out)
    expected = make(make_args, tmp_path / "other")
    expected.train()
    assert same(weights, expected.model.state_dict())


def make_and_finish(make_args, folder):
    trainer = make(make_args, folder)
    trainer.train(resume_from_checkpoint=True)
    return trainer.model.state_dict()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk(whole, make_args, tmp_path):
    # room for two checkpoints and a half, in pages
    pages = sum(-(-path.stat().st_size // 4096) for path in (whole / "checkpoint-8").iterdir())
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={pages * 10}k", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with pytest.raises(CheckpointWriteError, match=r"(?s)small/out/checkpoint-\d+ could not be written"):
            make(make_args, place / "out").train()
        kept = [path.name for path in (place / "out").iterdir()]
        assert kept and not any(name.endswith(".partial") for name in kept)
        last = get_last_checkpoint(place / "out")
        shutil.copytree(place / "out", tmp_path / "kept")
    finally:
        gc.collect()  # the error's frames have open files
        subprocess.run(["umount", str(place)], check=True)
    weights = make_and_finish(make_args, tmp_path / "kept")
    other = make(make_args, tmp_path / "other")
    other.train()
    assert last is not None and same(weights, other.model.state_dict())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_folder_that_becomes_read_only(make_args, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        make(make_args, place / "out", max_steps=4).train()
        before = {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
        if subprocess.run(["mount", "-o", "remount,ro", str(place)], capture_output=True).returncode != 0:
            pytest.skip("nothing can be made read-only here")
        with pytest.raises(OutputFolderError, match=r"(?s)output_dir=.*cannot be saved to.*Read-only"):
            make(make_args, place / "out").train(resume_from_checkpoint=True)
        assert before == {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
    finally:
        gc.collect()  # the error's frames have open files
        subprocess.run(["umount", str(place)], check=True)


def test_a_place_that_cannot_be_written_to(make_args, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match=r"(?s)output_dir=.*file/out.*cannot be saved to.*Not a directory"):
        make(make_args, tmp_path / "file" / "out")


class Payload:
    """Unpickling this would run a command that leaves a mark."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "run_state.pt", "training_args.bin"])
def test_no_file_of_a_checkpoint_can_run_code(whole, make_args, tmp_path, name, protocol):
    target, mark = whole / "checkpoint-8" / name, tmp_path / "mark"
    (whole / "checkpoint-8" / "manifest.json").unlink()  # an attacker would forge it
    if name == "rng_state.pth":
        (whole / "checkpoint-8" / "run_state.pt").unlink()  # holds the random states too, and is read in its place
    if protocol == "torch":
        torch.save({"python": Payload(mark), "version": 1}, target)
    else:
        target.write_bytes(pickle.dumps(Payload(mark)))
    trainer = make(make_args, whole)
    try:
        trainer.train(resume_from_checkpoint=str(whole / "checkpoint-8"))
    except CheckpointError as error:
        assert name in str(error)
    else:
        assert name == "training_args.bin"  # never read
    assert not mark.exists()


def test_old_weights_and_indices_cannot_run_code_or_leave_the_folder(whole, make_args, tmp_path):
    folder, mark = whole / "checkpoint-8", tmp_path / "mark"
    for name in ("manifest.json", "model.safetensors"):
        (folder / name).unlink()
    torch.save({"inner.weight": Payload(mark)}, folder / "pytorch_model.bin")
    trainer = make(make_args, whole)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        trainer.train(resume_from_checkpoint=str(folder))
    (folder / "pytorch_model.bin").unlink()
    torch.save({"inner.weight": Payload(mark)}, tmp_path / "outside.bin")
    index = {"weight_map": {"inner.weight": "../../outside.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        trainer.train(resume_from_checkpoint=str(folder))
    assert not mark.exists()


def test_secrets_never_reach_the_disk(make_args, tmp_path):
    trainer = make(make_args, tmp_path / "out", hub_token="hf_secret_of_mine")
    trainer.train()
    trainer.save_model()
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"training_args.bin", "trainer_state.json", "run_state.pt"} <= {path.name for path in written}
    assert [path for path in written if b"hf_secret_of_mine" in path.read_bytes()] == []


def test_background_saves_are_the_same_checkpoints(make_args, tmp_path):
    plain = make(make_args, tmp_path / "a")
    plain.train()
    make(make_args, tmp_path / "b", async_save=True).train()
    for step in (2, 4, 6, 8):
        ours, theirs = (tmp_path / side / f"checkpoint-{step}" for side in "ab")
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()} == set(FILES)
        for name in ("model.safetensors",):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        for name in ("optimizer.pt", "scheduler.pt", "run_state.pt"):
            left, right = (torch.load(side / name, weights_only=True) for side in (ours, theirs))
            assert same(left, right), name
    again = make(make_args, tmp_path / "c", save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-4"))
    assert same(again.model.state_dict(), plain.model.state_dict())


def test_an_error_of_a_background_save_comes_out(make_args, tmp_path):
    trainer = make(make_args, tmp_path / "out", async_save=True)
    (tmp_path / "out" / "checkpoint-2").write_text("not a folder")
    with pytest.raises(CheckpointWriteError, match=r"(?s)checkpoint-2 could not be written.*Not a directory"):
        trainer.train()


def test_a_background_save_copies_before_training_goes_on(make_args, tmp_path, monkeypatch):
    import threading

    from hf_compat.checkpoint import manifest

    held, seal = threading.Event(), manifest.seal

    def wait_and_seal(*args):
        assert held.wait(30)
        seal(*args)

    monkeypatch.setattr(manifest, "seal", wait_and_seal)
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:  # the save of update 2 is under way
                seen.append((tmp_path / "out" / "checkpoint-2").exists())
                held.set()

    trainer = make(make_args, tmp_path / "out", async_save=True)
    trainer.add_callback(Look)
    trainer.train()
    assert seen == [False] and get_last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-8")


def test_saving_of_a_subclass_is_not_put_off(make_args, tmp_path):
    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            (Path(output_dir) / "own.txt").write_text("own")

    set_seed(3)
    args = make_args(save_strategy="steps", save_steps=2, max_steps=2, async_save=True)
    trainer = Own(toy.Classifier(), args, train_dataset=toy.rows())
    with pytest.warns(UserWarning, match="Own overrides _save"):
        trainer.train()
    assert (tmp_path / "out" / "checkpoint-2" / "own.txt").is_file()
