"""Which checkpoint a command takes, by its name, its `--ckpt_path` and `resume_from_checkpoint`."""

from __future__ import annotations

import pytest
from jsonargparse import Namespace

from hf_compat.cli.ckpt_path import pretrained_source, wanted_checkpoint
from hf_compat.errors import ArgumentError

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
