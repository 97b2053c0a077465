"""What `_save` and its like write ends where it does under transformers; no checkpoint is seen before it is whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

import hf_compat
from helpers import toy
from hf_compat import set_seed
from hf_compat.checkpoint import choice, manifest
from hf_compat.checkpoint.manifest import SavingPlace
from hf_compat.checkpoint.reading import is_ours_alone, read_weights
from hf_compat.checkpoint.run_lock import Owner
from hf_compat.errors import CheckpointError, CheckpointWriteError
from hf_compat.hf.state import TrainerState


def number(self, folder):
    (Path(folder) / "number.txt").write_text(re.search(r"checkpoint-(\d+)$", folder)[1])


def last_word(self, folder):
    (Path(folder) / "number.txt").write_text(str(int(os.path.basename(folder).split("-")[-1])))


def file_beside(self, folder):
    Path(f"{folder}.bin").write_text("beside")


def folder_beside(self, folder):
    shutil.copytree(folder, f"{folder}-merged")


def latest(self, folder):
    copy = os.path.join(os.path.dirname(folder), "latest")
    if os.path.isdir(copy):
        shutil.rmtree(copy)
    shutil.copytree(folder, copy)


def latest_over_the_last(self, folder):
    shutil.copytree(folder, Path(folder).parent / "latest", dirs_exist_ok=True)


def line_in_a_list(self, folder):
    with open(os.path.join(os.path.dirname(folder), "saved.txt"), "a") as file:
        file.write(os.path.basename(folder) + "\n")


def list_read_and_written(self, folder):
    path = Path(folder).parent / "saved.txt"
    before = path.read_text() if path.exists() else ""
    (path.parent / "new.txt").write_text(before + os.path.basename(folder) + "\n")
    os.replace(path.parent / "new.txt", path)


def only_the_last_beside(self, folder):
    for old in Path(folder).parent.glob("checkpoint-*.bin"):
        old.unlink()
    file_beside(self, folder)


def renamed_beside(self, folder):
    last = Path(folder).parent / "last.bin"
    if last.exists():
        last.rename(last.with_name("before.bin"))
    last.write_text(os.path.basename(folder))


def link_to_the_last(self, folder):
    for name, target in (("last", folder), ("by_name", os.path.basename(folder))):
        link = os.path.join(os.path.dirname(folder), name)
        if os.path.islink(link):
            os.unlink(link)
        os.symlink(target, link)


def at_the_final_place(self, folder):
    final = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
    final.mkdir(parents=True, exist_ok=True)
    (final / "adapter_config.json").write_text("{}")
    (final / "notes.txt").write_text("mine")


def makes_the_folder(self, folder):
    (Path(folder) / "deep" / "er").mkdir(parents=True)
    (Path(folder) / "deep" / "er" / "a.txt").write_text("deep")


IDIOMS = [
    number,
    last_word,
    file_beside,
    folder_beside,
    latest,
    latest_over_the_last,
    line_in_a_list,
    list_read_and_written,
    only_the_last_beside,
    renamed_beside,
    link_to_the_last,
    at_the_final_place,
    makes_the_folder,
]


def saving(library, folder, **values):
    base = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "report_to": "none", "use_cpu": True}
    return library.TrainingArguments(str(folder), disable_tqdm=True, **(base | values))


def trained(library, folder, idiom, method="_save", **values):
    """Train with a subclass whose `_save` or `save_model` also does something of its own."""

    class Own(library.Trainer):
        pass

    def override(self, output_dir=None, *args, **kwargs):
        getattr(super(Own, self), method)(output_dir, *args, **kwargs)
        idiom(self, str(output_dir))

    setattr(Own, method, override)
    set_seed(3)
    trainer = Own(toy.Classifier(), saving(library, folder, **values), train_dataset=toy.rows())
    trainer.train()
    return trainer


def tree(folder):
    """What is in a folder: the text of what the idioms write, the names of all the rest."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if is_ours_alone(path.name) or path.name in ("generation_config.json", "training_args.bin"):
            continue
        if path.is_symlink():
            found[name] = os.path.relpath(path.resolve(), Path(folder).resolve())
        else:
            found[name] = path.read_text() if path.suffix == ".txt" or path.name.endswith("bin") else path.is_dir()
    return found


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_what_is_written_ends_where_it_ends_under_transformers(tmp_path, idiom):
    for name, library in (("theirs", transformers), ("ours", hf_compat)):
        trained(library, tmp_path / name, idiom)
    assert tree(tmp_path / "ours") == tree(tmp_path / "theirs")
    for step in (2, 4):
        assert manifest.problems(str(tmp_path / "ours" / f"checkpoint-{step}")) == []


@pytest.mark.filterwarnings("ignore:`async_save=True`. Own overrides")
@pytest.mark.parametrize("method", ["save_model", "_save_rng_state"])
@pytest.mark.parametrize("values", [{}, {"save_total_limit": 1}, {"async_save": True}], ids=["", "limit", "async"])
def test_other_methods_and_ways_of_saving(tmp_path, method, values):
    trainer = trained(hf_compat, tmp_path, file_beside, method, **values)
    kept = {"checkpoint-2", "checkpoint-4"} if "save_total_limit" not in values else {"checkpoint-4"}
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "checkpoint-2.bin", "checkpoint-4.bin"}
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


def visible(folder):
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("values", [{}, {"async_save": True}], ids=["", "async"])
def test_the_folder_is_not_seen_until_it_is_whole(tmp_path, monkeypatch, values):
    seen, save = [], TrainerState.save_to_json

    def look(self, path):
        seen.append((visible(tmp_path), transformers.trainer_utils.get_last_checkpoint(str(tmp_path))))
        save(self, path)

    monkeypatch.setattr(TrainerState, "save_to_json", look)
    hf_compat.Trainer(toy.Classifier(), saving(hf_compat, tmp_path, **values), train_dataset=toy.rows()).train()
    lock, first = "hf_compat.lock", tmp_path / "checkpoint-2"
    assert seen == [({lock}, None), ({lock, first.name}, str(first))]


def test_the_folder_that_an_override_writes_is_not_taken_until_it_is_whole(tmp_path):
    """It is visible, as under transformers, since the override may look for what lies beside it."""
    seen = []

    def look(self, folder):
        seen.append((visible(tmp_path), choice.get_last_checkpoint(tmp_path), manifest.problems(folder)))

    trained(hf_compat, tmp_path, look)
    lock, unended = "hf_compat.lock", ["the save into it did not end"]
    first, last = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"
    assert seen == [({lock, first.name}, None, unended), ({lock, first.name, last.name}, str(first), unended)]
    assert choice.get_last_checkpoint(tmp_path) == str(last)


def test_an_override_costs_no_call_for_each_file_beside_it(tmp_path, monkeypatch):
    """Only calls that list a folder may see files beside it; nothing links, moves or asks about each of them."""
    counts = {}
    for beside in (0, 300):
        folder, calls = tmp_path / str(beside), []
        folder.mkdir()
        for number in range(beside):
            (folder / f"file-{number}.txt").write_text("")
        with monkeypatch.context() as patched:
            for name in ("link", "unlink", "lstat", "stat", "replace", "rename", "open", "readlink"):
                call = getattr(os, name)
                patched.setattr(os, name, lambda *a, _call=call, **k: (calls.append(_call), _call(*a, **k))[1])
            trained(hf_compat, folder, lambda self, folder: None)
        counts[beside] = len(calls)
    assert counts[300] <= counts[0] + 20, counts


def failing(self, folder):
    Path(folder, "half.txt").write_text("half")
    file_beside(self, folder)
    raise OSError(28, "No space left on device")


def failing_in_a_folder_made_anew(self, folder):
    shutil.rmtree(folder)
    os.makedirs(folder)
    failing(self, folder)


def failing_without_the_folder(self, folder):
    shutil.rmtree(folder)
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("before", ["nothing", "a checkpoint", "files of the user's", "a link"])
@pytest.mark.parametrize("fail", [failing, failing_in_a_folder_made_anew, failing_without_the_folder])
def test_a_save_that_fails_leaves_the_checkpoint_of_its_name_as_it_was(tmp_path, fail, before):
    out = tmp_path / "out"
    make_before(out / "checkpoint-2", before, tmp_path / "elsewhere")
    found = tree(out)
    with pytest.raises(CheckpointWriteError, match="checkpoint-2 could not be written"):
        trained(hf_compat, out, fail)
    beside = {} if fail is failing_without_the_folder else {"checkpoint-2.bin": "beside"}
    assert tree(out) == {**found, **beside}


def make_before(folder, before, elsewhere):
    """Put something where a checkpoint will be written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if before == "a link":
        elsewhere.mkdir()
        (elsewhere / "key.txt").write_text("mine")
        folder.symlink_to(elsewhere)
    elif before != "nothing":
        (folder / "deep").mkdir(parents=True)
        (folder / "a.txt").write_text("old")
        if before == "a checkpoint":
            manifest.seal(str(folder))
        (folder / "deep" / "notes.txt").write_text("mine")


@pytest.mark.parametrize("before", ["nothing", "a checkpoint", "files of the user's", "a link"])
def test_a_checkpoint_that_an_override_writes_replaces_what_had_its_name(tmp_path, before):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    make_before(out / "checkpoint-2", before, elsewhere)
    trained(hf_compat, out, number)
    assert manifest.problems(str(out / "checkpoint-2")) == []
    found = {path.relative_to(out).as_posix() for path in (out / "checkpoint-2").rglob("*.txt")}
    own = {"files of the user's": {"a.txt", "deep/notes.txt"}, "a checkpoint": {"deep/notes.txt"}}.get(before, set())
    assert found == {f"checkpoint-2/{name}" for name in (*own, "number.txt")}
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    assert not elsewhere.exists() or (elsewhere / "key.txt").read_text() == "mine"
    if before != "nothing":  # what the user changes later is the user's
        for name in own:
            (out / "checkpoint-2" / name).write_text("changed")
    assert manifest.problems(str(out / "checkpoint-2")) == []


@pytest.mark.parametrize("name", ["latest", "checkpoint-7", "elsewhere/checkpoint-2"])
def test_a_copy_that_an_override_makes_is_the_users(tmp_path, name):
    """It has the marker of the folder that was being written. It is readable, and no run removes it."""
    copy = tmp_path / name

    def copies(self, folder):
        if folder.endswith("checkpoint-2"):
            shutil.copytree(folder, copy)

    trained(hf_compat, tmp_path, copies)
    manifest.recover(str(tmp_path), has_lock=True)
    manifest.recover(str(copy.parent), has_lock=True)
    assert (copy / "model.safetensors").exists()
    if copy.name != "checkpoint-2":
        assert read_weights(str(copy)) and manifest.problems(str(copy)) == ["trainer_state.json is missing"]


@pytest.mark.parametrize("values", [{}, {"async_save": True}, {"save_total_limit": 1}], ids=["", "async", "limit"])
def test_a_run_leaves_folders_and_links_of_the_users_as_they_are(tmp_path, values):
    """Links named like checkpoints lead to a private folder; others are named like what a run leaves."""
    private, out = tmp_path / "private", tmp_path / "out"
    for folder in (private, out / "checkpoint-2.deleted-by-mistake", out / "checkpoint-9.partial-notes"):
        folder.mkdir(parents=True)
        (folder / "key.pem").write_text("mine")
    (out / "checkpoint-2").symlink_to(private)
    (out / "checkpoint-9").symlink_to(private)
    hf_compat.Trainer(toy.Classifier(), saving(hf_compat, out, **values), train_dataset=toy.rows()).train()
    written = ["checkpoint-4"] if "save_total_limit" in values else ["checkpoint-2", "checkpoint-4"]
    users = ["checkpoint-2.deleted-by-mistake", "checkpoint-9", "checkpoint-9.partial-notes"]
    assert sorted(path.name for path in out.iterdir()) == sorted([*written, *users])
    assert all((out / name / "key.pem").read_text() == "mine" for name in users)
    assert [path.name for path in private.iterdir()] == ["key.pem"]
    assert not any((out / name / "key.pem").exists() or (out / name).is_symlink() for name in written)


def left_by(owner, run_dir, is_whole):
    """Write what a run that was killed before the last rename has left."""
    place = SavingPlace(str(run_dir / "checkpoint-4"), owner)
    place.prepare()
    folder = Path(place.folder)
    folder.mkdir()
    (folder / "a.txt").write_text("new")
    if is_whole:
        manifest.seal(str(folder))
    return Path(place.hidden)


ENDED = Owner(pid=2**22 + 7)  # no process has such a number


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_a_killed_save_has_left_is_finished_or_removed(tmp_path, is_whole):
    place = left_by(ENDED, tmp_path, is_whole)
    newest = choice.get_last_checkpoint(tmp_path)
    manifest.recover(str(tmp_path), has_lock=True)
    assert not place.exists() and newest == (str(tmp_path / "checkpoint-4") if is_whole else None)


def test_what_a_live_run_is_saving_is_left_alone(tmp_path):
    place = left_by(Owner(pid=os.getppid()), tmp_path, True)
    (tmp_path / ".saving-notes").mkdir()
    assert choice.get_last_checkpoint(tmp_path) is None
    manifest.recover(str(tmp_path), has_lock=True)
    assert place.exists() and (tmp_path / ".saving-notes").exists()


@pytest.mark.parametrize("before", ["nothing", "a checkpoint", "files of the user's", "a link"])
@pytest.mark.parametrize("look", [choice.get_last_checkpoint, partial(manifest.recover, has_lock=True)])
def test_a_save_in_place_that_was_killed_gives_back_what_had_its_name(tmp_path, look, before):
    out, final = tmp_path / "out", tmp_path / "out" / "checkpoint-4"
    make_before(final, before, tmp_path / "elsewhere")
    found = tree(out)
    place = SavingPlace(str(final), ENDED, in_place=True)
    place.prepare()
    (final / "a.txt").write_text("half")
    assert manifest.problems(str(final)) == ["the save into it did not end"]
    look(str(out))
    shown = {name: held for name, held in tree(out).items() if not name.startswith(".")}
    assert shown == found
    manifest.recover(str(out), has_lock=True)
    assert tree(out) == found


def test_a_save_in_place_of_a_live_run_is_left_alone(tmp_path):
    final = tmp_path / "checkpoint-4"
    make_before(final, "a checkpoint", tmp_path / "elsewhere")
    SavingPlace(str(final), Owner(pid=os.getppid()), in_place=True).prepare()
    before = tree(tmp_path)
    assert choice.get_last_checkpoint(tmp_path) is None
    manifest.recover(str(tmp_path), has_lock=True)
    assert tree(tmp_path) == before


def test_a_save_in_place_whose_hidden_folder_is_gone_is_no_checkpoint_and_stays(tmp_path):
    final = tmp_path / "checkpoint-4"
    place = SavingPlace(str(final), ENDED, in_place=True)
    place.prepare()
    shutil.rmtree(place.hidden)
    manifest.recover(str(tmp_path), has_lock=True)
    assert final.exists() and choice.get_last_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="the save into it did not end"):
        read_weights(str(final))
    trained(hf_compat, tmp_path, number)
    assert manifest.problems(str(final)) == []


TWO_RANKS = """
import sys
from pathlib import Path
from helpers import toy
from hf_compat import Trainer, TrainingArguments

class Own(Trainer):
    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        Path(f"{output_dir}_rank{self.args.process_index}.bin").write_text(Path(output_dir).name)

args = TrainingArguments(
    sys.argv[1], save_strategy="steps", save_steps=2, max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True
)
Own(toy.Classifier(), args, train_dataset=toy.rows()).train()
"""


def test_two_ranks_write_beside_the_same_folder(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, "-m", "hf_compat.cli.main", "run", "--devices", "2", str(script), str(tmp_path / "out")]
    places = os.pathsep.join([str(Path(toy.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"checkpoint-2", "checkpoint-2_rank0.bin", "checkpoint-2_rank1.bin"}
    assert manifest.problems(str(tmp_path / "out" / "checkpoint-2")) == []


@pytest.mark.parametrize(
    ("part", "in_place"),
    [(None, False), ("model", True), ("config", True), ("processing_class", True), ("tokenizer", True)],
)
def test_a_save_pretrained_of_the_users_writes_at_the_final_place(make_args, tmp_path, part, in_place):
    class Own:
        def save_pretrained(self, *args, **kwargs): ...

    model, options = toy.tiny_gpt2(), {"processing_class": toy.tiny_tokenizer()}
    if part in ("model", "config"):
        changed = model if part == "model" else model.config
        changed.__class__ = type("Mine", (Own, type(changed)), {"__module__": __name__})
    elif part is not None:
        options = {"processing_class": Own()} if part == "processing_class" else {"data_collator": toy.pad}
    trainer = hf_compat.Trainer(model, make_args(), train_dataset=toy.blocks(4), **options)
    if part == "tokenizer":
        trainer.data_collator = SimpleNamespace(tokenizer=Own())
    assert trainer._saver._where_and_when(str(tmp_path / "out" / "checkpoint-1"))[0] is in_place
