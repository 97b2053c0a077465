"""A script run up to its first `train()`: what is captured and overridden, and the account where it never trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The seconds that torch and transformers take to load are spent once: every script below runs in this process.
DRIVER = """
import json, sys
from hf_compat.errors import ScriptError
from hf_compat.tools.until_train import UserScript, run_until_train

def use(captured):
    args = captured.trainer.args
    if args.seed == 13:
        raise LookupError("of the user of the capture")
    kind = type(captured.trainer).__name__
    return [kind, args.output_dir, args.max_steps, args.save_steps, list(captured.positional), dict(captured.keywords)]

for name in sys.argv[1:]:
    script = UserScript(path=name + ".py", arguments=("--word",))
    try:
        found = run_until_train(script, use, {"output_dir": "scratch", "max_steps": 7})
    except ScriptError as error:
        found = [error.status, str(error)]
    except LookupError as error:
        found = repr(error)
    print("found", json.dumps([name, found]))
print("whole", json.dumps([hasattr(sys.stdin, "name") and sys.stdin.name, sys.argv[0]]))
"""
HEAD = """
import sys
import torch
from transformers import Trainer, TrainingArguments

class Own(Trainer):
    def train(self, *args, **kwargs):
        print("own train")
        return super().train(*args, **kwargs)

def make(kind=Trainer, **kwargs):
    return kind(torch.nn.Linear(1, 1), TrainingArguments("elsewhere", save_steps=3, report_to=[], **kwargs))
"""
SCRIPTS = {
    "plain": "make().train()\nprint('never printed')",
    "own": "make(Own).train(True, trial=None)",
    "caught": "try:\n    make(max_steps=2).train('one')\nexcept BaseException:\n    make(Own).train('two')",
    "of_use": "make(seed=13).train()",
    "failing": "def inner():\n    raise KeyError('of the script')\ninner()",
    "asking": "input()",
    "leaving": "sys.exit(3)",
    "told": "sys.exit('no such file: ' + sys.argv[1])",
    "never": "make()",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for name, body in SCRIPTS.items():
        (folder / f"{name}.py").write_text(HEAD + body + "\n")
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DRIVER, *SCRIPTS]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    left = sorted(path.name for path in folder.iterdir() if path.suffix != ".py")
    return {**dict(json.loads(line[6:]) for line in answers), "printed": done.stdout, "left": left}


def test_the_first_call_is_captured_with_its_arguments_and_the_overridden_settings(found):
    assert found["plain"] == ["Trainer", "scratch", 7, 3, [], {}]
    assert found["own"] == ["Own", "scratch", 7, 3, [True], {"trial": None}]
    assert found["caught"] == ["Trainer", "scratch", 7, 3, ["one"], {}]
    assert "own train" in found["printed"] and "never printed" not in found["printed"]


def test_what_the_captures_user_raises_is_raised(found):
    assert found["of_use"] == "LookupError('of the user of the capture')"


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("failing", 1, "failing.py failed before it called `train()`"),
        ("asking", 1, "asking.py asked for input before it called `train()`"),
        ("leaving", 3, "leaving.py left by `sys.exit` with status 3 before"),
        ("told", 1, "with status 1 before it called `train()`: no such file: --word"),
        ("never", 0, "never.py has ended, and never called `train()`"),
    ],
)
def test_a_script_that_does_not_train_gets_an_account(found, name, status, words):
    given, message = found[name]
    assert given == status and words in message and "Hint: " in message


def test_the_account_of_an_error_begins_in_the_script(found):
    message = found["failing"][1]
    assert "KeyError: 'of the script'" in message and "in inner" in message and "until_train.py" not in message


def test_nothing_is_left_in_the_folder(found):
    assert [name for name in found["left"] if name != "__pycache__"] in ([], ["scratch"])
