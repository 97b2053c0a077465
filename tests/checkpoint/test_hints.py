"""What cannot be used as a checkpoint is called what it is. Its hint is followed to the letter, and loses nothing."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import pytest

from helpers import toy
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments, get_last_checkpoint
from hf_compat.checkpoint import hints
from hf_compat.checkpoint.convert import convert
from hf_compat.cli.main import main
from hf_compat.errors import ArgumentError, CheckpointError, CheckpointWriteError
from hf_compat.tools.curves import read_run

UPDATES = 6  # of a run that goes on from a checkpoint of update 2 or 4


def made(folder, **values):
    args = {
        "per_device_train_batch_size": 4, "save_steps": 2, "max_steps": UPDATES, "use_cpu": True, "disable_tqdm": True,
        "report_to": "none", **values,
    }  # fmt: skip
    rows = {"train_dataset": toy.rows(24), "eval_dataset": toy.rows(8)}
    return Trainer(toy.Classifier(), TrainingArguments(str(folder), **args), **rows)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "out"
    made(folder, max_steps=4).train()
    return folder


@pytest.fixture
def out(original, tmp_path):
    shutil.copytree(original, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def public(original):
    """A run's folder that each user of the machine may enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        shutil.copytree(original, f"{place}/out")
        for path in Path(place).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield Path(place) / "out"


@contextlib.contextmanager
def another_user():
    """Be a user who owns nothing. Whoever is not root already may not read a file without any right."""
    user = os.geteuid()
    for encoding in ("latin1", "cp437"):  # of a pickle and a zip; Python itself may lie in a folder of root's
        codecs.lookup(encoding)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def native_trainer(**options):
    return pl.Trainer(max_steps=UPDATES, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, **options)  # fmt: skip


def fit(path):
    trainer = native_trainer()
    data = HFDataModule(TrainingArguments(per_device_train_batch_size=4), toy.rows(24))
    trainer.fit(HFModule(toy.Classifier(), TrainingArguments(per_device_train_batch_size=4)), data, ckpt_path=str(path))
    return trainer.global_step


def resume(path):
    with tempfile.TemporaryDirectory() as elsewhere:
        return made(elsewhere, save_strategy="no").train(resume_from_checkpoint=str(path)).global_step


def to_ckpt(path):
    with tempfile.TemporaryDirectory() as place:
        convert(str(path), f"{place}/it.ckpt")


def hint_of(caught):
    """The hint of an error. None says that something may be removed."""
    said, _, hint = str(caught.value).partition("Hint: ")
    assert hint and not re.search(r"remove|delete", hint), said
    return hint


# ---- folders that hold no checkpoint themselves ----


@pytest.mark.parametrize("door", [resume, fit, to_ckpt])
@pytest.mark.parametrize("end", ["", "/"])
def test_an_output_folder_names_its_checkpoints(out, door, end):
    message = r"it is an output folder, which holds checkpoints: checkpoint-2, checkpoint-4"
    with pytest.raises(CheckpointError, match=message) as caught:
        door(f"{out}{end}")
    named = re.search(r"such as (\S+)\.", hint_of(caught))[1]
    assert named == str(out / "checkpoint-4") and "seal" not in str(caught.value)
    assert door(named) in (UPDATES, None)
    newest = re.search(r"`get_last_checkpoint\('(.+)'\)`", hint_of(caught))[1]
    assert get_last_checkpoint(newest) == named


def test_the_output_folder_of_the_run_itself_names_true(out):
    with pytest.raises(CheckpointError, match="output folder") as caught:
        made(out).train(resume_from_checkpoint=str(out))
    assert "`resume_from_checkpoint=True` takes the newest one" in hint_of(caught)
    assert made(out).train(resume_from_checkpoint=True).global_step == UPDATES


def test_an_output_folder_with_a_model_is_no_fresh_start_for_its_own_run(out, caplog):
    """The checkpoints in it would be replaced one by one. Another run begins with the weights, and is told."""
    trainer = made(out)
    trainer.save_model()
    before = (out / "checkpoint-2" / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"output folder, which holds checkpoints: checkpoint-2, checkpoint-4"):
        trainer.train(resume_from_checkpoint=str(out))
    assert (out / "checkpoint-2" / "manifest.json").read_bytes() == before
    told = f"training begins with its weights. To go on with its training, name one of its checkpoints, such as {out}"
    assert resume(out) == UPDATES and told in caplog.text
    caplog.clear()
    assert fit(out) == UPDATES and told in caplog.text


def test_an_output_folder_is_not_sealed(out, capsys):
    made(out).save_model()
    made(out).save_state()
    assert main(["seal", str(out)]) == 2
    assert "is an output folder" in capsys.readouterr().err and not (out / "manifest.json").exists()


def nothing(out):
    (out / "empty").mkdir()
    return out / "empty"


def notes(out):
    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("mine")
    return out / "notes"


def link(out):
    (out / "link").symlink_to(out / "checkpoint-7")
    return out / "link"


PLACES = {
    "a missing one": (lambda out: out / "checkpoint-7", "no such folder. Beside it: checkpoint-2, checkpoint-4"),
    "a missing one, with a slash": (
        lambda out: f"{out}/checkpoint-7/",
        "no such folder. Beside it: checkpoint-2, chec",
    ),
    "an empty folder": (nothing, "the folder is empty"),
    "a folder of other things": (notes, "the folder holds no file of a checkpoint"),
    "a link to nothing": (link, "it is a link to .*checkpoint-7, where nothing is"),
    "weights": (lambda out: out / "checkpoint-4" / "model.safetensors", "it is a part of the checkpoint"),
    "an optimizer": (lambda out: out / "checkpoint-4" / "optimizer.pt", "it is a part of the checkpoint"),
}


@pytest.mark.parametrize("door", [resume, fit])
@pytest.mark.parametrize("name", PLACES)
def test_another_place_is_called_what_it_is(out, name, door):
    make, message = PLACES[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        door(make(out))
    named = re.search(rf"{out}/checkpoint-4", hint_of(caught))[0]
    assert "seal" not in hint_of(caught) and door(named) == UPDATES


def test_a_home_folder_is_written_out(out, monkeypatch):
    monkeypatch.setenv("HOME", str(out))
    with pytest.raises(CheckpointError, match="A shell expands `~`") as caught:
        resume("~/checkpoint-4")
    assert resume(re.search(r"name (\S+)\.", hint_of(caught))[1]) == UPDATES


@pytest.mark.parametrize("door", [resume, fit])
def test_a_repository_of_the_hub_is_downloaded_first(door):
    with pytest.raises(CheckpointError, match="no such folder") as caught:
        door("someone/a-model")
    assert "`huggingface_hub.snapshot_download('someone/a-model')`" in hint_of(caught)


def test_another_file_than_a_lightning_checkpoint_is_called_so(tmp_path):
    path = tmp_path / "notes.ckpt"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.ckpt cannot be read") as caught:
        resume(path)
    assert "a .ckpt of an HFModule" in hint_of(caught)


def test_a_saved_model_is_not_converted_as_a_checkpoint(out):
    made(out).save_model(str(out / "saved"))
    with pytest.raises(CheckpointError, match="it holds a model, and no state of a training") as caught:
        to_ckpt(out / "saved")
    assert f"`HFModule.load_from_checkpoint('{out / 'saved'}', model=…)`" in hint_of(caught)
    HFModule.load_from_checkpoint(str(out / "saved"), model=toy.Classifier())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_an_adapter_needs_a_model_with_one(out):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(toy.tiny_gpt2(), LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True))
    adapted.save_pretrained(str(out / "adapter"))
    with pytest.raises(CheckpointError, match="holds an adapter, and the model has none") as caught:
        resume(out / "adapter")
    assert "get_peft_model" in hint_of(caught)


def test_modules_are_not_loaded_from_an_output_folder(out):
    with pytest.raises(CheckpointError, match="is an output folder") as caught:
        HFModule.load_from_checkpoint(str(out), model=toy.Classifier())
    HFModule.load_from_checkpoint(re.search(r"such as (\S+)\.", hint_of(caught))[1], model=toy.Classifier())


# ---- what this process may not read, or the disk does not deliver ----


def closed(*names):
    def close(folder):
        for name in names:
            (folder / name).chmod(0o600 if os.geteuid() == 0 else 0)

    return close


def closed_folder(folder):
    folder.chmod(0o700 if os.geteuid() == 0 else 0)


def opened(folder):
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


CLOSED = {
    "weights": (closed("model.safetensors"), r"model\.safetensors cannot be read: Permission denied"),
    "optimizer": (closed("optimizer.pt"), r"optimizer\.pt cannot be read: Permission denied"),
    "state": (closed("trainer_state.json"), r"trainer_state\.json cannot be read: Permission denied"),
    "manifest": (closed("manifest.json"), r"manifest\.json cannot be read: Permission denied"),
    "folder": (
        closed_folder,
        r"checkpoint-4 cannot be read: Permission denied|manifest\.json cannot be read: Permission",
    ),
}


@pytest.mark.parametrize(
    ("name", "has_manifest"),
    [*((name, True) for name in CLOSED), ("weights", False), ("state", False), ("folder", False)],
)
def test_a_checkpoint_of_another_user_is_not_called_damaged(public, name, has_manifest, capsys):
    close, message = CLOSED[name]
    folder = public / "checkpoint-4"
    if not has_manifest:
        (folder / "manifest.json").unlink()
        (folder / "run_state.pt").unlink()
    close(folder)
    for door in (resume, fit, to_ckpt):
        with another_user(), pytest.raises(CheckpointError, match=message) as caught:
            door(folder)
        assert "let this user read it" in hint_of(caught) and "damaged" not in str(caught.value)
        assert f"user {folder.stat().st_uid}'s" in str(caught.value)
    if has_manifest:
        before = (folder / "manifest.json").read_bytes()
        with another_user():
            assert main(["seal", str(folder)]) == 2
        assert re.search(message, said := capsys.readouterr().err) and "damaged" not in said
        assert (folder / "manifest.json").read_bytes() == before
    opened(folder)  # as the hint says
    with another_user():
        assert resume(folder) == UPDATES


def test_a_folder_in_a_closed_one_is_not_called_missing(public):
    closed_folder(public)
    with (
        another_user(),
        pytest.raises(CheckpointError, match=f"{public}.* cannot be read: Permission denied") as caught,
    ):
        resume(public / "checkpoint-4")
    assert "let this user read it" in hint_of(caught) and "no such" not in str(caught.value)
    public.chmod(0o755)


def test_the_newest_checkpoint_skips_what_it_may_not_read_and_says_so(public, caplog):
    closed("model.safetensors")(public / "checkpoint-4")
    with another_user():
        assert get_last_checkpoint(public) == str(public / "checkpoint-2")
    said = f"{public / 'checkpoint-4'} cannot be read and is skipped: model.safetensors cannot be read: Permission d"
    assert said in caplog.text and "It may be whole" in caplog.text
    assert "seal" not in caplog.text and "is not whole" not in caplog.text


def test_no_checkpoint_that_may_be_read_is_no_reason_to_train_anew(public):
    """A training from the start, as the hint was, would replace the checkpoints that this user may not read."""
    for folder in public.glob("checkpoint-*"):
        closed("manifest.json")(folder)
    public.chmod(0o777)
    with another_user(), pytest.raises(CheckpointError, match="No valid checkpoint") as caught:
        made(public).train(resume_from_checkpoint=True)
    assert "let this user read them" in hint_of(caught) and "give another `output_dir`" in hint_of(caught)
    assert "train without" not in hint_of(caught)


def test_no_whole_checkpoint_is_no_reason_to_train_anew(out):
    copies = shutil.copytree(out, out.parent / "copies")
    for folder in out.glob("checkpoint-*"):
        (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="No valid checkpoint") as caught:
        made(out).train(resume_from_checkpoint=True)
    assert "train without" not in hint_of(caught) and "bring the files back from a copy" in hint_of(caught)
    shutil.copytree(copies, out, dirs_exist_ok=True)
    assert made(out).train(resume_from_checkpoint=True).global_step == UPDATES


def test_a_lightning_checkpoint_of_another_user_is_not_called_damaged(public):
    path = public / "it.ckpt"
    convert(str(public / "checkpoint-4"), str(path))
    closed("it.ckpt")(public)
    for door in (resume, fit):
        with another_user(), pytest.raises(CheckpointError, match=r"it\.ckpt cannot be read: Permission") as caught:
            door(path)
        assert "let this user read it" in hint_of(caught)
    opened(public / "checkpoint-4")
    path.chmod(0o644)
    with another_user():
        assert resume(path) == UPDATES


def test_the_best_model_that_may_not_be_read_is_called_so(public):
    trainer = made(public.parent / "best", load_best_model_at_end=True, eval_strategy="steps", eval_steps=2)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    best.parent.chmod(0o755)
    opened(best)
    closed("model.safetensors")(best)
    message = r"cannot load the best checkpoint .*Permission"
    with another_user(), pytest.raises(CheckpointError, match=message) as caught:
        trainer._load_best_model()
    assert "let this user read it" in hint_of(caught)


def test_curves_and_the_newest_checkpoint_of_another_user_are_not_called_missing(public):
    for folder in public.glob("checkpoint-*"):
        closed_folder(folder)
    with another_user(), pytest.raises(ArgumentError, match=r"trainer_state\.json cannot be read: Permission denied"):
        read_run(str(public))
    closed_folder(public)
    with another_user(), pytest.raises(CheckpointError, match=r"out cannot be listed: Permission denied"):
        get_last_checkpoint(public)
    public.chmod(0o755)
    closed_folder(public.parent)
    with another_user(), pytest.raises(CheckpointError, match=r"out cannot be listed: Permission denied"):
        get_last_checkpoint(public)
    public.parent.chmod(0o755)


def test_a_manifest_on_a_failing_disk_is_not_written_anew(out, capsys, caplog):
    """Its first byte cannot be read: the system's own input/output error. A new manifest would lose the run's turn."""
    manifest = out / "checkpoint-4" / "manifest.json"
    manifest.unlink()
    manifest.symlink_to("/proc/self/mem")
    for door in (resume, fit, to_ckpt):
        with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: Input/output error") as caught:
            door(out / "checkpoint-4")
        assert "the disk, or the way to it, has failed" in hint_of(caught) and "seal" not in hint_of(caught)
    assert main(["seal", str(out / "checkpoint-4")]) == 2
    assert "Input/output error" in capsys.readouterr().err and manifest.is_symlink()
    assert get_last_checkpoint(out) == str(out / "checkpoint-2")
    assert "cannot be read and is skipped: manifest.json cannot be read: Input/output error" in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_weights_that_a_disk_does_not_deliver_are_not_called_damaged(out, number, monkeypatch, caplog):
    def refuse(file, *_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("hf_compat.checkpoint.manifest.sha256_of", refuse)
    assert get_last_checkpoint(out) is None
    assert f"cannot be read: {os.strerror(number)}" in caplog.text and "is not whole" not in caplog.text


def test_a_users_own_file_that_may_not_be_read_is_left_out(public, caplog):
    folder = public / "checkpoint-4"
    (folder / "notes.txt").write_text("mine")
    (folder / "manifest.json").unlink()
    assert main(["seal", str(folder)]) == 0
    closed("notes.txt")(folder)
    with another_user():
        assert resume(folder) == UPDATES
        assert "notes.txt cannot be read and is left out" in caplog.text and "is changed" not in caplog.text
        assert main(["seal", str(folder)]) == 2


def test_a_manifest_that_cannot_be_written_is_one_error(public):
    from hf_compat.checkpoint.unlisted_checkpoints import seal_edited

    folder = public / "checkpoint-4"
    (folder / "rng_state.pth").unlink()
    with another_user(), pytest.raises(CheckpointWriteError, match=r"is not sealed: .*Permission denied"):
        if os.geteuid() == folder.stat().st_uid:
            folder.chmod(0o555)
        seal_edited(str(folder))
    folder.chmod(0o755)


# ---- damage ----


def test_a_damaged_file_comes_back_from_a_copy(out, tmp_path):
    folder, kept = out / "checkpoint-4", tmp_path / "kept"
    shutil.copytree(folder, kept)
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        (folder / name).write_bytes(b"cut")
        with pytest.raises(CheckpointError, match=name) as caught:
            resume(folder)
        assert "bring it back from a copy" in hint_of(caught)
        shutil.copy2(kept / name, folder / name)
        assert resume(folder) == UPDATES


def test_a_link_gives_way_to_its_file(out, tmp_path):
    folder = out / "checkpoint-4"
    shutil.move(folder / "model.safetensors", tmp_path / "weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is outside the folder") as caught:
        resume(folder)
    assert "put the file itself into the folder, in the place of the link" in hint_of(caught)
    (folder / "model.safetensors").unlink()
    shutil.copy2(tmp_path / "weights", folder / "model.safetensors")
    assert resume(folder) == UPDATES


def test_a_damaged_file_that_a_run_can_do_without_may_be_moved(out, tmp_path):
    folder = out / "checkpoint-4"
    (folder / "optimizer.pt").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is cut off or damaged") as caught:
        resume(folder)
    assert "once it is moved elsewhere, optimizer and schedule start anew" in hint_of(caught)
    shutil.move(folder / "optimizer.pt", tmp_path / "optimizer.pt")
    assert resume(folder) == UPDATES


def test_a_save_that_did_not_end_is_not_to_be_sealed(out):
    folder = out / "checkpoint-4"
    (folder / "manifest.json").write_text(
        '{"kind": "hf_compat checkpoint", "saving": "somebody", "name": "checkpoint-4"}'
    )
    (folder / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match="the save into it did not end") as caught:
        resume(folder)
    assert "seal" not in hint_of(caught) and resume(re.search(rf"{out}/checkpoint-2", hint_of(caught))[0]) == UPDATES


@pytest.mark.parametrize("content", ["{", ""])
def test_a_manifest_that_is_cut_off_is_written_anew(out, content):
    folder = out / "checkpoint-4"
    (folder / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json is not readable") as caught:
        resume(folder)
    assert main(re.search(r"`hf-compat (seal \S+)`", hint_of(caught))[1].split()) == 0 and resume(folder) == UPDATES


@pytest.mark.parametrize("count", [0, 1, hints._MOST_SHOWN, hints._MOST_SHOWN + 1, hints._MOST_SHOWN + 3])
def test_the_newest_names_are_shown_and_the_others_counted(count):
    paths = [f"out/checkpoint-{number}" for number in range(count)]
    more = max(count - hints._MOST_SHOWN, 0)
    shown = ", ".join(f"checkpoint-{number}" for number in range(more, count))
    assert hints._shown(paths) == (f"{more} more, {shown}" if more else shown)
