"""Which checkpoint a command takes, by its name, its `--ckpt_path` and `resume_from_checkpoint`."""

from __future__ import annotations

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
    brought, uploads = [], SimpleNamespace(look=lambda: None, bring_best=lambda *paths: brought.append(paths))
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
        [("c-4", "c-2")] if (wanted, "has_uploads" in facts, "best" in facts) == ("best", True, True) else []
    )
