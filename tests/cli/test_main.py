"""The command line: every way to call it, its messages and its exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import hf_compat
from hf_compat.cli import main as command
from hf_compat.cli.main import _GROUPS, main


def test_the_package_is_the_command():
    def helped(*words):
        command = [sys.executable, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    own = helped("-m", "hf_compat", "--help")
    assert own == helped("-m", "hf_compat.cli.main", "--help") and own.startswith("usage: hf-compat COMMAND")
    assert helped("-m", "hf_compat", "help") == own == helped("-m", "hf_compat")
    for name in (name for names in _GROUPS.values() for name in names):
        assert f"\n  {name} " in own, name


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"hf-compat {hf_compat.__version__}\n"


def test_explain_prints_the_plan(capsys):
    assert main(["explain", "output_dir=out", "use_cpu=true", "max_steps=5", "learning_rate=1e-3"]) == 0
    shown = capsys.readouterr().out
    assert "max_steps=5" in shown and "learning_rate=0.001" in shown and "lightning.Trainer:" in shown


def test_explain_prints_json_for_processes_that_are_not_there(capsys):
    words = ["--world-size", "16", "--parameters", "1e9"]
    assert main(["explain", "--json", *words, "bf16=True"]) == 0
    first = capsys.readouterr().out
    assert main(["explain", "bf16=True", *words, "--json"]) == 0  # in any order
    assert capsys.readouterr().out == first
    assert main(["explain", "--json", *words, "bf16=True"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["plan"]["world_size"] == 16 and explained["plan"]["device"] == "cuda:0"
    assert explained["plan"]["precision"] == "bf16-mixed" and explained["sizes"]
    assert explained["plan"]["devices_per_node"] == 8


def test_explain_of_a_refused_argument_has_the_status_1(capsys):
    assert main(["explain", "use_cpu=true", "torch_compile_backend=none_such"]) == 1
    assert "not a backend of torch.compile" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evl"], "'evl' is not a command of hf-compat.\n\nHint: `hf-compat help` lists the commands.\n"),
        (["help", "docter"], "Hint: did you mean `doctor`?"),
        (["explain", "bf16"], "'bf16' is not name=value.\n\nHint: write e.g. learning_rate=1e-4.\n"),
        (["explain", "lerning_rate=1"], "learning_rate"),
        (["convert", "nowhere", "target"], "nowhere"),
        (["plot", "nowhere"], "There is no run at 'nowhere'.\n\nHint: name the output folder of a run.\n"),
        (["run", "nowhere.py"], "There is no script nowhere.py in "),
        (["fit", "--lerning_rate", "1"], "Hint: did you mean `--learning_rate`?"),
        (["fit", "--zzz", "1"], "Hint: `hf-compat fit --help` lists the options."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_end_with_a_message_and_the_status_2(words, message, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


@pytest.mark.parametrize("command", ["run", "check", "compare", "eject", "explain"])
def test_a_notebook_is_named_with_what_can_be_done(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.ipynb").write_text('{"cells": []}')
    assert main([command, "train.ipynb", *(["folder"] if command == "eject" else [])]) == 2
    said = "".join(capsys.readouterr())
    assert "train.ipynb is a notebook" in said and "jupyter nbconvert --to script train.ipynb" in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.ipynb"]


def test_a_missing_word_shows_the_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["convert", "one"])
    assert ended.value.code == 2 and "usage: hf-compat" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for names in _GROUPS.values() for name in names])
def test_help_before_a_command_is_help_after_it(command, capsys):
    shown = []
    for words in (["help", command], [command, "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        shown.append((ended.value.code, capsys.readouterr().out))
    assert shown[0] == shown[1] and shown[0][0] == 0 and f"hf-compat {command}" in shown[0][1]


@pytest.mark.parametrize(
    "words",
    ("--version", "--help", "convert --help", "plot --help", "migrate --help", "explain --help", "check --help"),
)
@pytest.mark.real_python
def test_help_loads_no_torch(words):
    script = f"import sys; from hf_compat.cli.main import main\ntry: main({words.split()})\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert "hf_compat.cli.main" in loaded and not {"torch", "lightning", "jsonargparse"} & set(loaded)


@pytest.mark.parametrize(
    ("words", "has_torch", "run", "status"),
    [
        ([], True, ["--help"], 0),
        (["help"], True, ["--help"], 0),
        (["help", "fit"], True, ["fit", "--help"], 0),
        (["help", "fit", "more"], True, ["fit", "--help"], 0),
        (["help", "run"], True, ("run", ["--help"]), 0),
        (["fit", "--seed", "3"], True, ["fit", "--seed", "3"], 0),
        (["run", "a.py", "b"], True, ("run", ["a.py", "b"]), 0),
        (["fit"], False, None, 2),
        (["run", "a.py"], False, None, 2),
        (["doctor", "a.py"], False, ["doctor", "a.py"], 0),
        (["migrate", "a.py"], False, ["migrate", "a.py"], 0),
        (["--version"], False, ["--version"], 0),
    ],
)
@pytest.mark.parametrize("of_process", [True, False])
def test_the_words_of_a_command_line_choose_the_command(monkeypatch, capsys, words, has_torch, run, status, of_process):
    done = []
    monkeypatch.setattr(command, "is_installed", lambda name: name != "torch" or has_torch)
    monkeypatch.setattr(command, "_run", lambda words: done.append(words) or 0)
    monkeypatch.setattr("hf_compat.cli.run.main", lambda words: done.append(("run", words)) or 0)
    monkeypatch.setattr(sys, "argv", ["hf-compat", *words])
    assert main(None if of_process else words) == status
    assert done == ([] if run is None else [run])
    assert ("needs torch" in capsys.readouterr().err) is (status == 2)
