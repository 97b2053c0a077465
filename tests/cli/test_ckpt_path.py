"""Which checkpoint a command takes, by its name, its `--ckpt_path` and `resume_from_checkpoint`."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace

import pytest
from jsonargparse import Namespace

from hf_compat.cli import ckpt_path
from hf_compat.cli.ckpt_path import pretrained_source, wanted_checkpoint
from hf_compat.errors import ArgumentError, CheckpointError

RANDOM, TRAINED = "toy.Model", "transformers.GPT2LMHeadModel.from_pretrained"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("checkpoint-2", "runs/checkpoint-4"):
        (tmp_path / name).mkdir(parents=True)

    def asked(command, path=None, resume=None, model=RANDOM, line=()):
        args = Namespace(resume_from_checkpoint=resume, output_dir="runs")
        return wanted_checkpoint(command, Namespace(ckpt_path=path, args=args, model=model), line)

    return asked


@pytest.mark.parametrize(
    ("command", "facts", "expected"),
    [
        ("fit", {}, None),
        ("fit", {"path": "checkpoint-2"}, "checkpoint-2"),
        ("fit", {"path": "initial"}, None),
        ("fit", {"path": "last"}, "last"),
        ("fit", {"path": "best"}, "best"),
        ("fit", {"path": True}, "last"),
        ("fit", {"path": "false"}, None),
        ("fit", {"resume": "checkpoint-2"}, "checkpoint-2"),
        ("fit", {"resume": True}, "last"),
        ("fit", {"resume": "best"}, "./best"),  # a folder of that name
        ("fit", {"path": "initial", "resume": "checkpoint-2"}, "checkpoint-2"),
        ("fit", {"path": "checkpoint-2", "resume": "checkpoint-2"}, "checkpoint-2"),
        ("fit", {"path": "s3://bucket/checkpoint-2"}, "s3://bucket/checkpoint-2"),
        ("test", {"path": "checkpoint-2"}, "checkpoint-2"),
        ("test", {"path": "best"}, "best"),
        ("test", {"path": "initial"}, None),
        ("test", {"model": TRAINED}, None),
        ("test", {"path": "checkpoint-2", "resume": "checkpoint-2"}, "checkpoint-2"),  # of the fit's configuration
        ("predict", {"path": "best", "resume": True, "line": ["--args.max_steps=3"]}, "best"),
    ],
)
def test_the_checkpoint_that_a_command_takes(asked, command, facts, expected):
    assert asked(command, **facts) == expected


@pytest.mark.parametrize(
    ("command", "facts", "told"),
    [
        ("fit", {"path": "hpc"}, "a value of Lightning's"),
        ("fit", {"path": "checkpoint-3"}, "there are checkpoint-2; `last`"),
        ("fit", {"path": "elsewhere/checkpoint-3"}, "there are runs/checkpoint-4"),
        ("fit", {"path": "unknown://bucket/run"}, "does not exist"),
        ("fit", {"path": "checkpoint-2", "resume": True}, "name two checkpoints"),
        ("fit", {"path": "last", "resume": "checkpoint-2"}, "name two checkpoints"),
        ("test", {"resume": "checkpoint-2"}, "is for `fit`, and `test` does not train"),
        ("test", {"path": "best", "resume": True, "line": ["--args.resume_from_checkpoint=true"]}, "is for `fit`"),
        ("test", {"path": "best", "resume": True, "line": ["--args.resume_from_checkpoint", "true"]}, "is for `fit`"),
        ("test", {}, "would score the untrained weights"),
        ("validate", {"path": "none"}, "`hf-compat validate` has no `--ckpt_path`"),
    ],
)
def test_what_contradicts_itself_or_is_not_there_is_refused(asked, command, facts, told):
    with pytest.raises(ArgumentError, match=told):
        asked(command, **facts)


def test_a_folder_may_have_the_name_of_a_word_of_lightning(asked, tmp_path):
    (tmp_path / "hpc").mkdir()
    assert asked("fit", path="hpc") == "hpc"


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        (RANDOM, None),
        (TRAINED, TRAINED),
        ({"class_path": TRAINED, "init_args": {"pretrained_model_name_or_path": "gpt2"}}, f"{TRAINED} of gpt2"),
        ({"class_path": TRAINED, "init_args": None}, TRAINED),
        (Namespace(class_path=RANDOM, init_args=Namespace(pretrained_model_name_or_path="gpt2")), None),
        (None, None),
    ],
)
def test_where_trained_weights_come_from(spec, source):
    assert pretrained_source(spec) == source


@pytest.mark.parametrize(
    ("wanted", "newest", "facts", "found"),
    [
        ("any/path", None, {}, "any/path"),
        ("last", "c-4", {}, "c-4"),
        ("last", "c-4", {"best": "c-2", "has_uploads": True}, "c-4"),
        ("best", "c-4", {"best": "c-2"}, "c-2"),
        ("best", "c-4", {"best": "c-2", "has_uploads": True}, "c-2"),
        ("best", "c-4", {"has_uploads": True}, "records no best checkpoint"),
        ("last", None, {}, "has no complete checkpoint"),
        ("best", "no folder", {}, "has no complete checkpoint"),
        ("last", "c-4", {"is_first": False}, "None"),  # the first process tells it
    ],
)
def test_words_for_checkpoints_become_paths(tmp_path, monkeypatch, wanted, newest, facts, found):
    brought, uploads = (
        [],
        SimpleNamespace(look=lambda: brought.append("looks"), bring_best=lambda *paths: brought.append(paths)),
    )
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=tmp_path / "none" if newest == "no folder" else tmp_path),
        is_world_process_zero=lambda: facts.get("is_first", True),
        _saver=SimpleNamespace(mirror=SimpleNamespace(uploads=uploads if facts.get("has_uploads") else None)),
        _resumer=SimpleNamespace(best_of_state=lambda best, newest: best),
    )
    monkeypatch.setattr(ckpt_path, "get_last_checkpoint", lambda folder: newest)
    monkeypatch.setattr(ckpt_path, "read_state", lambda path: SimpleNamespace(best_model_checkpoint=facts.get("best")))
    if " no " in found:
        with pytest.raises(CheckpointError, match=found):
            ckpt_path.find_checkpoint(trainer, wanted)
    else:
        assert ckpt_path.find_checkpoint(trainer, wanted) == found
    assert brought == (
        ["looks", ("c-4", "c-2")] if (wanted, "has_uploads" in facts, "best" in facts) == ("best", True, True) else []
    )


def loading(path, missing=(), state=None):
    """A trainer that notes what it loads."""
    done = []

    def load(folder):
        done.append(folder)
        trainer._weights_not_loaded += missing

    @contextlib.contextmanager
    def choosing(path):
        done.append(("chosen", path))
        yield "content"

    trainer = SimpleNamespace(
        _load_from_checkpoint=load, _weights_not_loaded=["of another load"],
        state=SimpleNamespace(global_step=0, epoch=0),
        _resumer=SimpleNamespace(choosing_checkpoint=choosing),
    )  # fmt: skip
    return trainer, done


@pytest.mark.parametrize(
    ("is_listed", "is_named", "weights", "edited", "problems", "outcome"),
    [
        (True, True, ["model.safetensors"], None, [], "named"),
        (True, False, ["model.safetensors"], None, [], "plain"),
        (True, True, ["model.safetensors"], None, ["damaged", "short"], "damaged; short"),
        (True, True, ["model.safetensors"], "edited", ["damaged"], "named"),
        (False, True, ["model.safetensors"], None, ["no manifest"], "plain"),
        (False, True, ["adapter_model.safetensors"], None, ["no manifest"], "plain"),
        (False, True, ["model.txt"], None, ["no manifest"], "no manifest"),
        (False, True, [], "edited", ["no manifest"], "plain"),
    ],
)
def test_weights_of_a_folder_are_judged_before_they_are_loaded(
    tmp_path, monkeypatch, is_listed, is_named, weights, edited, problems, outcome
):
    path, (trainer, done) = str(tmp_path), loading(tmp_path)
    for name in weights:
        (tmp_path / name).touch()

    @contextlib.contextmanager
    def named(folder):
        done.append(("named", folder))
        yield

    monkeypatch.setattr(ckpt_path, "read_manifest", lambda folder: SimpleNamespace(exists=is_listed))
    monkeypatch.setattr(ckpt_path, "reading_named_folder", named)
    monkeypatch.setattr(ckpt_path, "listed_as_it_is", lambda folder: edited)
    monkeypatch.setattr(ckpt_path.manifest, "problems", lambda folder: problems)
    if outcome not in ("named", "plain"):
        with pytest.raises(CheckpointError, match=f"cannot be scored: {outcome}"):
            ckpt_path.load_weights(trainer, path, is_named)
        assert path not in done
        return
    ckpt_path.load_weights(trainer, path, is_named)
    assert done == [*[("named", path)] * (outcome == "named"), path]


def test_a_folder_is_named_unless_it_is_said_to_be_found(tmp_path, monkeypatch):
    trainer, done = loading(tmp_path)
    monkeypatch.setattr(ckpt_path, "read_manifest", lambda folder: SimpleNamespace(exists=True))
    monkeypatch.setattr(ckpt_path.manifest, "problems", lambda folder: [])
    monkeypatch.setattr(
        ckpt_path, "reading_named_folder", lambda folder: done.append("named") or contextlib.nullcontext()
    )
    ckpt_path.load_weights(trainer, str(tmp_path))
    assert done == ["named", str(tmp_path)]


@pytest.mark.parametrize("state", [None, "state.json"])
@pytest.mark.parametrize("missing", [[], ["a"], ["a", "b", "c"], ["a", "b", "c", "d"]])
def test_a_file_has_to_hold_all_weights_and_may_have_a_state(tmp_path, monkeypatch, state, missing):
    trainer, done = loading(tmp_path, missing)
    read = SimpleNamespace(global_step=7, epoch=0.5)
    monkeypatch.setattr(ckpt_path, "Contents", lambda folder: SimpleNamespace(find=lambda name: state))
    monkeypatch.setattr(ckpt_path, "read_trainer_state", lambda path: read if path == state else None)
    path = str(tmp_path / "one.ckpt")
    if missing:
        listed = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else ".")
        with pytest.raises(
            CheckpointError, match=re.escape(f"{path} lacks {len(missing)} weights of the model: {listed}")
        ):
            ckpt_path.load_weights(trainer, path)
    else:
        ckpt_path.load_weights(trainer, path)
    assert done == [("chosen", path), "content"]
    assert (trainer.state.global_step, trainer.state.epoch) == ((7, 0.5) if state and not missing else (0, 0))
