"""A checkpoint that is edited and named is read with one warning; damage is refused; `seal` lists its files anew."""

from __future__ import annotations

import contextlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import toy
from helpers.parity.compare import same
from hf_compat import Trainer, get_last_checkpoint, set_seed
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint import unlisted_checkpoints as unlisted
from hf_compat.checkpoint.convert import convert
from hf_compat.checkpoint.files import Refused
from hf_compat.checkpoint.shares import Share
from hf_compat.checkpoint.unlisted_checkpoints import Edits
from hf_compat.cli.main import main
from hf_compat.errors import CheckpointError


def make(make_args, folder, **values):
    set_seed(3)
    args = make_args(output_dir=str(folder), **{"save_strategy": "steps", "save_steps": 2, "max_steps": 4, **values})
    return Trainer(toy.tiny_bert(), args, train_dataset=toy.labelled_blocks())


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    from hf_compat import TrainingArguments

    folder = tmp_path_factory.mktemp("run")
    values = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    make(lambda **more: TrainingArguments(report_to="none", **values, **more), folder).train()
    return folder


@pytest.fixture
def run(original, tmp_path):
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def reshard(folder):
    model = type(toy.tiny_bert()).from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def edit_state(folder):
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_steps": 400}, indent=4))


def scale_weights(folder):
    path = folder / "model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def delete(name):
    def edit(folder):
        (folder / name).unlink()

    return edit


def add_notes(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "merged").mkdir()
    (folder / "merged" / "weights.bin").write_bytes(b"no zip, and nobody's business")


EDITS = {
    "re-saved as shards": (reshard, ["model.safetensors is missing", "model.safetensors.index.json is added"]),
    "trainer_state.json edited": (edit_state, ["trainer_state.json is changed"]),
    "weights of another run": (scale_weights, ["model.safetensors is changed"]),
    "optimizer.pt deleted": (delete("optimizer.pt"), ["optimizer.pt is missing (optimizer and schedule start anew)"]),
    "scheduler.pt deleted": (delete("scheduler.pt"), ["scheduler.pt is missing"]),
    "rng_state.pth deleted": (delete("rng_state.pth"), ["rng_state.pth is missing"]),
    "run_state.pt deleted": (delete("run_state.pt"), ["run_state.pt is missing"]),
    "training_args.bin deleted": (delete("training_args.bin"), ["training_args.bin is missing"]),
    "files added": (add_notes, ["notes.txt is added", "merged/weights.bin is added"]),
}


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_checkpoint_that_is_named_is_loaded_with_one_warning(run, make_args, name, caplog):
    edit, differences = EDITS[name]
    folder = run / "checkpoint-4"
    edit(folder)
    trainer = make(make_args, run, max_steps=6, save_strategy="no")
    assert trainer.train(resume_from_checkpoint=str(folder)).global_step == 6
    found = warnings_in(caplog)
    assert len(found) == 1 and all(text in found[0] for text in (str(folder), *differences, "hf-compat seal"))


@pytest.mark.parametrize("name", EDITS)
def test_true_is_as_strict_as_it_was_until_the_folder_is_sealed(run, name, capsys):
    edit, differences = EDITS[name]
    folder = run / "checkpoint-4"
    edit(folder)
    only_added = name == "files added"
    assert get_last_checkpoint(run) == str(folder if only_added else run / "checkpoint-2")
    writer = manifest.read_manifest(folder).writer
    assert main(["seal", str(folder)]) == 0
    said = capsys.readouterr().out
    assert all(text in said for text in differences) and "manifest.json lists" in said
    assert get_last_checkpoint(run) == str(folder) and manifest.read_manifest(folder).writer == writer is not None
    before = (folder / "manifest.json").read_bytes()
    assert main(["seal", str(folder)]) == 0
    assert "nothing is written" in capsys.readouterr().out and (folder / "manifest.json").read_bytes() == before


def test_weights_of_shards_go_on_as_those_of_one_file(run, make_args):
    reshard(run / "checkpoint-4")
    ends = []
    for folder in (run / "checkpoint-4", run / "whole"):
        if folder.name == "whole":
            folder = run.parent / "again" / "checkpoint-4"
            make(make_args, folder.parent).train()
        trainer = make(make_args, run, max_steps=8, save_strategy="no")
        trainer.train(resume_from_checkpoint=str(folder))
        ends.append(trainer.model.state_dict())
    assert same(*ends)


def cut(name, size=-7):
    def harm(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return harm


def cut_a_shard(folder):
    reshard(folder)
    cut(sorted(folder.glob("model-*"))[0].name)(folder)


def lose_a_shard(folder):
    reshard(folder)
    sorted(folder.glob("model-*"))[0].unlink()


def flip(name):
    def harm(folder):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 255
        (folder / name).write_bytes(bytes(content))

    return harm


def write(name, text):
    def harm(folder):
        (folder / name).write_text(text)

    return harm


def link_out(folder):
    shutil.move(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


DAMAGES = {
    "weights cut": (cut("model.safetensors"), "model.safetensors is cut off or damaged"),
    "optimizer cut": (cut("optimizer.pt"), "optimizer.pt is cut off or damaged"),
    "optimizer flipped": (flip("optimizer.pt"), "optimizer.pt"),
    "state cut": (cut("trainer_state.json"), "trainer_state.json"),
    "state gone": (delete("trainer_state.json"), "trainer_state.json is missing"),
    "weights gone": (delete("model.safetensors"), "model.safetensors is missing"),
    "a shard cut": (cut_a_shard, "model-00001-of"),
    "a shard gone": (lose_a_shard, "model-00001-of"),
    "configuration": (write("config.json", "{"), "config.json"),
    "manifest": (cut("manifest.json"), "manifest.json is not readable"),
    "an empty file": (write("rng_state.pth", ""), "rng_state.pth is cut off or damaged"),
    "a link out of the folder": (link_out, "model.safetensors is outside the folder"),
    "another state": (write("trainer_state.json", '{"global_step": "four"}'), "global_step"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_and_the_hint_names_the_way_out(run, make_args, name, capsys):
    harm, message = DAMAGES[name]
    folder = run / "checkpoint-4"
    harm(folder)
    before = (folder / "manifest.json").read_bytes()
    ways_out = {
        "manifest": f"hf-compat seal {folder}",
        "a link out of the folder": "put the file itself into the folder",
    }
    way_out = ways_out.get(name, "bring it back from a copy of the checkpoint")
    with pytest.raises(CheckpointError, match=rf"(?s){message}.*Hint: .*{way_out}.*beside it \(checkpoint-2\)"):
        make(make_args, run).train(resume_from_checkpoint=str(folder))
    if name != "manifest":
        assert main(["seal", str(folder)]) == 2
        assert message in capsys.readouterr().err and (folder / "manifest.json").read_bytes() == before


def test_a_manifest_that_is_not_readable_is_written_anew(run, capsys):
    folder = run / "checkpoint-4"
    cut("manifest.json")(folder)
    assert get_last_checkpoint(run) == str(run / "checkpoint-2")
    assert main(["seal", str(folder)]) == 0 and "no readable manifest.json" in capsys.readouterr().out
    assert get_last_checkpoint(run) == str(folder)


def test_what_is_no_checkpoint_is_not_sealed(run, tmp_path, capsys):
    for folder in (run, tmp_path / "nowhere"):
        assert main(["seal", str(folder)]) == 2
        assert not (folder / "manifest.json").exists()
    assert "is not a folder" in capsys.readouterr().err


def test_a_folder_of_transformers_may_lack_its_optimizer_when_it_is_named(run, make_args):
    folder = run / "checkpoint-4"
    for name in ("manifest.json", "run_state.pt", "optimizer.pt"):
        (folder / name).unlink()
    assert get_last_checkpoint(run) == str(run / "checkpoint-2")
    trainer = make(make_args, run, max_steps=6, save_strategy="no")
    assert trainer.train(resume_from_checkpoint=str(folder)).global_step == 6


def test_other_readers_of_a_named_folder_read_it_too(run, tmp_path, caplog):
    reshard(run / "checkpoint-4")
    convert(str(run / "checkpoint-4"), str(tmp_path / "it.ckpt"))
    assert sum("differs from its manifest.json" in text for text in warnings_in(caplog)) == 1
    read = torch.load(tmp_path / "it.ckpt", weights_only=True)["state_dict"]
    whole = load_file(run / "checkpoint-2" / "model.safetensors")
    assert {name.removeprefix("model.") for name in read} >= set(whole)
    cut("model.safetensors")(run / "checkpoint-2")
    with pytest.raises(CheckpointError, match=r"(?s)cut off or damaged.*Hint: .*from a copy"):
        convert(str(run / "checkpoint-2"), str(tmp_path / "other.ckpt"))


def test_what_is_added_is_read_only_while_the_folder_is_the_one_that_was_named(run, make_args, caplog):
    """An `optimizer.pt` that nobody lists is not read by `True`, and is when its folder is named."""
    folder = run / "checkpoint-4"
    content = torch.load(folder / "optimizer.pt", weights_only=True)
    delete("optimizer.pt")(folder)
    delete("manifest.json")(folder)
    manifest.seal(str(folder))
    content["param_groups"][0]["lr"] = 0.125
    torch.save(content, folder / "optimizer.pt")
    trainer = make(make_args, run, max_steps=4, save_strategy="no")
    trainer.train(resume_from_checkpoint=True)
    assert "optimizer.pt is not read: manifest.json does not list it" in caplog.text
    caplog.clear()
    trainer.train(resume_from_checkpoint=str(folder))
    assert "optimizer.pt is added" in caplog.text and "is not read" not in caplog.text
    trainer.train(resume_from_checkpoint=True)
    assert "optimizer.pt is not read: manifest.json does not list it" in caplog.text


def test_the_effect_of_a_loss_is_told_where_it_has_one():
    edits = Edits(missing=["training_args.bin", "optimizer.pt"], added=["notes.txt"])
    assert edits.described() == [
        "training_args.bin is missing",
        "optimizer.pt is missing (optimizer and schedule start anew)",
        "notes.txt is added",
    ]


def test_what_two_processes_have_found_is_joined():
    first = Edits(changed=["a"], missing=["b"])
    first += Edits(kept=["k"], changed=["c"], missing=["m"], added=["d"], not_read=["e"], refused=["f"])
    assert first == Edits(
        kept=["k"], changed=["a", "c"], missing=["b", "m"], added=["d"], not_read=["e"], refused=["f"]
    )
    assert not Edits(kept=["k"], not_read=["e"]) and all(map(bool, (Edits(changed=["a"]), Edits(refused=["f"]))))


@pytest.fixture
def small(tmp_path):
    """A folder with what every checkpoint has."""
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2, "epoch": 1.0, "log_history": []}))
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("names", "may_lack", "told"),
    [
        ("", False, None),
        ("optimizer.pt scheduler.pt", False, None),
        ("optimizer.pt", False, "scheduler.pt is missing"),
        ("scheduler.pt", False, "optimizer.pt is missing"),
        ("scheduler.pt", True, None),
        ("notes.json global_step2/notes.json", False, None),
        ("rng_state.pth", False, "rng_state.pth is cut off"),
        ("optimizer.pt", True, "optimizer.pt is cut off"),
    ],
)
def test_a_folder_of_transformers_is_judged_by_its_files(small, names, may_lack, told):
    for name in names.split():
        (small / name).parent.mkdir(exist_ok=True)
        if told is not None and "cut off" in told:
            (small / name).write_bytes(b"PK")
        elif name.endswith(".json"):
            (small / name).write_text("{")
        else:
            torch.save({}, small / name)
    with pytest.raises(CheckpointError, match=told) if told else contextlib.nullcontext():
        assert unlisted.check_unlisted(small, may_lack) is None


@pytest.mark.parametrize(
    ("names", "has_weights", "is_alone"),
    [
        ("model.safetensors", True, True),
        ("pytorch_model.bin.index.json", True, True),
        ("adapter_model.safetensors", True, True),
        ("latest", True, False),
        ("other.safetensors", False, False),
        ("model.safetensors/", False, False),
        ("mine/adapter_model.bin", True, False),
        ("mine/.metadata", True, False),
        ("mine/.metadata/", False, False),
        ("mine/model.safetensors", False, False),
        ("model.safetensors trainer_state.json", True, False),
        ("model.safetensors optimizer.pt", True, False),
        ("model.safetensors manifest.json", True, False),
    ],
)
def test_which_folders_hold_weights_and_which_a_model_alone(tmp_path, names, has_weights, is_alone):
    for root in (tmp_path / "it", tmp_path / "checkpoint-3"):
        root.mkdir()
        for name in names.split():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).mkdir() if name.endswith("/") else (root / name).write_text("{}")
        assert unlisted.has_weights(root) is has_weights
        assert unlisted.holds_model_alone(root) is (is_alone and root.name == "it")
    assert not unlisted.holds_model_alone(tmp_path / "none")
    with pytest.raises(CheckpointError, match="cannot be listed: No such file"):
        unlisted.has_weights(tmp_path / "none")


def test_the_edits_of_a_folder(small, monkeypatch):
    wrong = {
        "a": None,
        "b": "b is damaged",
        "c": "c is missing",
        "notes": Refused("notes: no"),
        "optimizer.pt": Refused("no"),
    }
    (small / "b").touch(), (small / "optimizer.pt").touch()
    monkeypatch.setattr(manifest, "compare", lambda root, name, facts, share: wrong[name])
    monkeypatch.setattr(manifest, "entries", lambda root: {"a": True, "new": True, "pipe": False})
    expected = {"kept": ["a"], "changed": ["b", "optimizer.pt"], "missing": ["c"], "refused": ["notes"]}
    listed = {name: {} for name in wrong}
    assert unlisted.find_edits(small, listed) == Edits(**expected, added=["new"], not_read=["pipe"])
    of_second = unlisted.find_edits(small, {"a": {}}, Share(1, 1))
    assert of_second == Edits(kept=["a"])


FILES = ["model.safetensors", "trainer_state.json"]
CHANGES = {
    "none": lambda root: None,
    "more": lambda root: (root / "notes.txt").touch(),
    "cut off": lambda root: (root / "model.safetensors").write_bytes(b"x" * 9),
    "no manifest": lambda root: (root / "manifest.json").unlink(),
    "neither": lambda root: ((root / "manifest.json").unlink(), (root / "model.safetensors").write_bytes(b"x")),
    "odd manifest": lambda root: (root / "manifest.json").write_text("{"),
    "no folder": shutil.rmtree,
}


@pytest.fixture
def judged(small, monkeypatch):
    """Judge a small folder after a change, as one of several processes: the edits, or the error as a text."""

    def judge(change, rank=0, ranks=1):
        @contextlib.contextmanager
        def together(is_wanted=True, numbers=None):
            assert is_wanted is (ranks > 1)
            yield
            if numbers is not None and ranks > 1:  # the other process has found it
                numbers[0] = max(numbers[0], change in ("more", "cut off"))

        monkeypatch.setattr(unlisted, "failing_together", together)
        monkeypatch.setattr(unlisted, "gather_objects", lambda own: [Edits(missing=["of the other"]), own])
        manifest.seal(str(small), None)
        manifest.flush_and_hash(str(small))
        CHANGES[change](small)
        try:
            return unlisted._judged(small, Share(rank, ranks))
        except (CheckpointError, NotADirectoryError) as error:
            return str(error)

    return judge


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("none", Edits(kept=FILES)),
        ("more", Edits(kept=FILES, added=["notes.txt"])),
        ("no manifest", Edits()),
        ("cut off", "model.safetensors is cut off"),
        ("neither", "model.safetensors is cut off"),
        ("odd manifest", "manifest.json"),
        ("no folder", "checkpoint-2"),
    ],
)
def test_a_named_folder_is_judged(judged, change, found):
    given = judged(change)
    assert found in given if isinstance(found, str) else given == (found, {})


@pytest.mark.parametrize(
    ("change", "rank", "missing"),
    [
        ("none", 0, []),
        ("none", 1, []),
        ("more", 0, ["of the other"]),
        ("more", 1, ["of the other"]),
        ("cut off", 1, ["of the other"]),
        ("cut off", 0, "model.safetensors is cut off"),
        ("neither", 0, "model.safetensors is cut off"),
        ("neither", 1, []),
        ("odd manifest", 1, "manifest.json"),
    ],
)
def test_two_processes_judge_a_folder_together(judged, change, rank, missing):
    given = judged(change, rank, 2)
    assert missing in given if isinstance(missing, str) else given[0].missing == missing
    assert change != "none" or given[0].kept == FILES


def test_files_that_readers_hash_are_named(small):
    manifest.seal(str(small), None)
    manifest.flush_and_hash(str(small))
    share = Share(unread=SimpleNamespace(defers=True, is_right=lambda *_: True))
    (small / "a.distcp").touch()
    _, unhashed = unlisted._judged(small, share)
    assert unhashed == {}
    manifest.seal(str(small), None)
    manifest.flush_and_hash(str(small))
    assert [*unlisted._judged(small, share)[1]] == ["a.distcp"]


@pytest.mark.parametrize("is_whole", [True, False, "refused"])
def test_a_file_that_proves_to_be_another_is_judged_when_it_is_loaded(monkeypatch, caplog, is_whole):
    def judge(path):
        if is_whole == "refused":
            raise CheckpointError("it is not valid JSON")
        return is_whole

    monkeypatch.setattr(unlisted, "_is_whole", judge)
    monkeypatch.setattr(unlisted, "no_checkpoint", lambda *words: CheckpointError(" ".join(map(str, words))))
    if is_whole is True:
        unlisted._judge_late("c", "out", "c/sub/a.pt")
        (told,) = caplog.messages
        assert told.startswith("c differs from its") and "a.pt" in told
    else:
        with pytest.raises(
            CheckpointError, match="c it is not valid JSON out" if is_whole else "c a.pt is cut off or damaged. out"
        ):
            unlisted._judge_late("c", "out", "c/sub/a.pt")
        assert caplog.messages == []
