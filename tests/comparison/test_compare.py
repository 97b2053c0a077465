"""`hf-compat compare` as a user calls it: equal scripts, changed ones, scripts that fail, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import user_scripts

CHANGED = Path(__file__).with_name("changed.py")


def compared(folder, *words, status, cleans=True):
    """Run the command in a folder; returns its report and what it has printed."""
    folder.mkdir(exist_ok=True)
    report = folder.parent / f"{folder.name}.json"
    options = ["--clean"] if cleans else []
    command = [sys.executable, "-m", "hf_compat", "compare", *options, "--json", str(report), *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return (json.loads(report.read_text()) if report.exists() else None), done.stdout + done.stderr


def assert_equal(report, text):
    assert report["equal"] and report["first_difference"] is None and not report["complaints"]
    assert text.count("equal bit for bit") >= 8 and "Equal, bit for bit." in text
    assert all(one["equal"] for one in report["quantities"])


def assert_first(report, update, quantity):
    first = report["first_difference"]
    assert (first["update"], first["quantity"]) == (update, quantity), first
    assert first["theirs"] != first["ours"]


def test_a_script_is_equal_and_the_users_files_stay(tmp_path):
    (tmp_path / "here").mkdir()
    mine = tmp_path / "here" / "changed"  # the folder that the script saves into, with a file of the same name
    mine.mkdir()
    (mine / "model.safetensors").write_text("mine")
    cache = tmp_path / "here" / "cache"  # workers write into it
    cache.mkdir()
    (cache / "3.txt").write_text("mine")
    (tmp_path / "here" / "base.db").write_bytes(b"")
    output = tmp_path / "compared"
    token = "hf_" + "s3cr3t" * 6
    words = ("--output", output, CHANGED, "--workers", "2", "--hub-token", token)
    report, text = compared(tmp_path / "here", *words, status=0, cleans=False)
    assert_equal(report, text)
    assert text.index("isolation: ") < text.index("both runs write into") and "isolation" in report
    for side in ("transformers", "hf_compat"):
        kept = Path(f"{output}/{side}/files{tmp_path}/here")
        assert (kept / "cache" / "3.txt").read_text() == "3" and len(list((kept / "cache").iterdir())) == 64
        assert (kept / "base.db").stat().st_size > 0
    assert [path for path in output.rglob("*") if path.is_file() and token.encode() in path.read_bytes()] == []
    assert [side["updates"] for side in report["sides"]] == [8, 8]
    losses = next(one for one in report["quantities"] if one["quantity"] == "micro-batch losses")
    assert losses["compared"] == 16  # of an overridden `training_step`, too
    files = next(one for one in report["quantities"] if one["quantity"] == "files")
    assert files["compared"] > 8 and any("manifest.json" in reason for reason in files["explained"])
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["base.db", "cache", "changed"]
    assert [path.read_text() for path in cache.iterdir()] == ["mine"]
    assert (tmp_path / "here" / "base.db").read_bytes() == b""
    assert [path.name for path in mine.iterdir()] == ["model.safetensors"]
    assert (mine / "model.safetensors").read_text() == "mine"


@pytest.mark.matrix
def test_a_changed_collator_is_named_with_its_update(tmp_path):
    report, text = compared(tmp_path / "here", CHANGED, "--changed", "collator", status=1)
    assert_first(report, 5, "micro-batch losses")
    assert report["first_difference"]["name"] == "micro-batch 0" and 0 < report["first_difference"]["size"] < 1e-2
    assert "first difference: update 5, micro-batch losses, micro-batch 0" in text and "Different." in text


@pytest.mark.matrix  # three processes
def test_a_script_that_does_not_repeat_itself_says_nothing_of_the_engines(tmp_path):
    report, text = compared(tmp_path / "here", "--max-steps", "2", CHANGED, "--changed", "unseeded", status=2)
    assert report["repeatable"] is False and report["equal"] is False
    assert "run under transformers a second time" in text and "set_seed(…)" in text and "Different." not in text
    assert "Not compared: a script that does not repeat itself cannot be." in text


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("changed", "update", "quantity"), [("seed", 1, "micro-batch losses"), ("rate", 5, "learning rates")]
)
def test_a_change_is_found_where_it_begins(changed, update, quantity, tmp_path):
    report, _ = compared(tmp_path / "here", CHANGED, "--changed", changed, status=1)
    assert_first(report, update, quantity)


@pytest.mark.matrix
@pytest.mark.parametrize("name", user_scripts.SCRIPTS)
def test_scripts_are_equal_bit_for_bit(name, tmp_path):
    devices = str(user_scripts.PROCESSES.get(name, 1))
    words = ("--devices", devices, user_scripts.path_of(name), *user_scripts.SCRIPTS[name])
    report, text = compared(tmp_path / "here", *words, status=0)
    assert_equal(report, text)
    assert [side["trainings"] for side in report["sides"]] == [user_scripts.TRAININGS.get(name, 1)] * 2


NEVER = "import transformers\nprint('nothing')"
FAILING = {
    "fails": ("raise KeyError('x')", 2, "On both sides, the script failed, before it called `train()`"),
    "never": (NEVER, 2, "never called `train()`"),
    "leaves": ("import sys; sys.exit(3)", 2, "left by `sys.exit` with status 3 before it called `train()`"),
    "asks": ("input('name? ')", 2, "asked for input"),
    "dropped": (
        "import transformers\ntransformers.TrainingArguments('out', evaluation_strategy='no')",
        1,
        "has dropped `evaluation_strategy`, compare with the release",
    ),
    "lacks": ("import not_there.at_all", 2, "pip install not_there"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAILING)
def test_a_script_that_does_not_train_gets_an_account(name, tmp_path):
    script, status, said = FAILING[name]
    (tmp_path / f"{name}.py").write_text(script)
    report, text = compared(tmp_path / "here", tmp_path / f"{name}.py", status=status)
    assert said in text and report["complaints"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.py"], "There is no script absent.py"),
        (["--against", "absent/python", CHANGED], "there is no interpreter"),
        (["--against", "/bin/true", CHANGED], "does not answer as a Python"),
        (["--max-steps", "-1", CHANGED], "--max-steps -1"),
        (["--output", ".", CHANGED], "is not empty"),
    ],
)
def test_what_cannot_be_begun_says_why(words, said, tmp_path, monkeypatch, capsys):
    from hf_compat.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["compare", *map(str, words)]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
