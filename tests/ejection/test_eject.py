"""`hf-compat eject`: the project runs without hf_compat, and its numbers are the script's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.ejection_outcomes import differences

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = ROOT / "tests" / "scripts"
OUTCOMES = Path(__file__).resolve().parents[1] / "helpers" / "ejection_outcomes.py"
MYPY = ("mypy", ".")  # a minute for a project: it reads torch and Lightning anew
# Each of these is the script's bit for bit on the CPU.
SAME = (
    "accumulation", "classification", "custom_loss", "early_stopping", "language_model", "lora", "plain_module",
    "resumed", "seq2seq", "streaming", "token_classification", "two_processes",
)  # fmt: skip


def run(*words, folder, hf_compat=True):
    environment = {**os.environ, "PYTHONPATH": str(ROOT) if hf_compat else "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


def eject(script, *arguments, folder):
    words = ("-m", "hf_compat", "eject", "--updates", "0", script, *arguments, folder / "project")
    return run(*words, folder=folder)


def outcomes(name, folder):
    """Eject a script, run it and its project, and return how far they are apart."""
    return outcomes_of(SCRIPTS / f"{name}.py", "--output_dir", folder / "out", folder=folder)


def outcomes_of(script, *words, folder):
    ejected = eject(script, *words, folder=folder)
    assert ejected.returncode == 0, ejected.stderr
    assert os.listdir(folder) == ["project"]  # nothing else was written
    trained = run(OUTCOMES, "trained", script, *words, folder=folder)
    assert trained.returncode == 0, trained.stderr
    fitted = run(OUTCOMES, "ejected", folder=folder / "project", hf_compat=False)
    assert fitted.returncode == 0, fitted.stderr
    check_last_checkpoint(folder)
    return differences(folder, folder / "project")


def check_last_checkpoint(folder):
    """The update of the script's last checkpoint has one in the project; where it is the best, under that name."""
    last = max((int(path.name.partition("-")[2]) for path in (folder / "out").glob("checkpoint-*")), default=None)
    made = [path.name for path in (folder / "project").rglob("*.ckpt")]
    assert last is None or any(name == "best.ckpt" or name.endswith(f"step={last}.ckpt") for name in made), (last, made)


def check_style(project, *more):
    for words in (("ruff", "check", "."), ("ruff", "format", "--check", "."), *more):
        checked = run("-m", *words, folder=project)
        assert checked.returncode == 0, checked.stdout
    for file in project.glob("*.py"):
        assert "hf_compat" not in file.read_text().replace("`hf-compat eject`", "")


def test_a_custom_loss_bit_for_bit_and_clean(tmp_path):
    assert set(outcomes("custom_loss", tmp_path).values()) == {0.0}
    check_style(tmp_path / "project")


@pytest.mark.matrix
@pytest.mark.parametrize("name", SAME)
def test_bit_for_bit_and_clean(name, tmp_path):
    assert set(outcomes(name, tmp_path).values()) == {0.0}
    check_style(tmp_path / "project", MYPY)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["sequence", "one_cycle", "lambda", "own", "cosine", "polynomial", "overridden"])
def test_a_schedule_of_the_scripts_own_bit_for_bit(kind, tmp_path):
    assert set(outcomes_of(HERE / "scripts" / "schedules.py", kind, tmp_path / "out", folder=tmp_path).values()) == {
        0.0
    }
    check_style(tmp_path / "project", MYPY)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["json", "mixed", "table"])
def test_a_stream_bit_for_bit(kind, tmp_path):
    found = outcomes_of(HERE / "scripts" / "streams.py", kind, tmp_path / "out", folder=tmp_path)
    assert set(found.values()) == {0.0}
    check_style(tmp_path / "project", MYPY)


@pytest.mark.matrix
def test_a_stream_that_draws_random_numbers_is_left_to_do(tmp_path):
    told = eject(HERE / "scripts" / "streams.py", "own", tmp_path / "out", folder=tmp_path)
    assert told.returncode == 1 and "data.py:" in told.stdout and "reading it draws random numbers" in told.stdout
    fitted = run(OUTCOMES, "ejected", folder=tmp_path / "project", hf_compat=False)
    assert fitted.returncode != 0 and "NotImplementedError" in fitted.stderr


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("raise KeyError('no data')", "KeyError: 'no data'"),
        pytest.param("print('nothing')", "never called `train()`", marks=pytest.mark.matrix),
        pytest.param("import sys; sys.exit(3)", "left by `sys.exit` with status 3", marks=pytest.mark.matrix),
    ],
)
def test_a_script_that_does_not_train(script, says, tmp_path):
    (tmp_path / "script.py").write_text(script)
    told = eject(tmp_path / "script.py", folder=tmp_path)
    assert told.returncode != 0 and says in told.stderr
    assert not (tmp_path / "project").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "mine.txt").write_text("mine")
    told = eject(SCRIPTS / "custom_loss.py", folder=tmp_path)
    assert told.returncode == 2 and "is not an empty folder" in told.stderr
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["mine.txt"]


def test_what_would_run_otherwise_is_refused_at_once(tmp_path):
    text = (SCRIPTS / "custom_loss.py").read_text()
    wanted = "args = TrainingArguments(\n    eval_delay=1, neftune_noise_alpha=5.0,"
    (tmp_path / "custom_loss.py").write_text(text.replace("args = TrainingArguments(", wanted))
    told = eject(tmp_path / "custom_loss.py", "--output_dir", tmp_path / "out", folder=tmp_path)
    assert told.returncode == 2
    for problem in ("`eval_delay=1`", "`neftune_noise_alpha=5.0`", "nothing was written"):
        assert problem in told.stderr
    assert not (tmp_path / "project").exists()


def test_weight_decay_of_biases_too(tmp_path):
    text = (
        (SCRIPTS / "custom_loss.py")
        .read_text()
        .replace("TrainingArguments(", "TrainingArguments(weight_decay=0.1, ", 1)
    )
    own = "def decaying(self, model):\n    return [name for name, _ in model.named_parameters()]\n\n\n"
    text = text.replace("parser = ", f"{own}Trainer.get_decay_parameter_names = decaying\nparser = ", 1)
    (tmp_path / "custom_loss.py").write_text(text)
    told = eject(tmp_path / "custom_loss.py", "--output_dir", tmp_path / "out", folder=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "NO_DECAY = []" in (tmp_path / "project" / "module.py").read_text()


@pytest.mark.matrix
def test_what_cannot_be_written_is_left_to_do(tmp_path):
    text = (SCRIPTS / "own_optimizer.py").read_text()
    follows_metric = "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)"
    lines = [follows_metric if line.startswith("scheduler =") else line for line in text.splitlines()]
    (tmp_path / "own_optimizer.py").write_text("\n".join(lines))
    told = eject(tmp_path / "own_optimizer.py", "--output_dir", tmp_path / "out", folder=tmp_path)
    assert told.returncode == 1
    for problem in ("The schedule is a ReduceLROnPlateau", "The callback EvaluateOften", "own_optimizer.py:"):
        assert problem in told.stdout
    check_style(tmp_path / "project", MYPY)
