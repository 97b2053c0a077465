"""`hf-compat run`: a script that imports transformers' Trainer trains on Lightning, with the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
RUN = ["-m", "hf_compat", "run"]
SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(TESTS)!r})
import torch
torch.set_num_threads(1)
import transformers
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, set_seed
from helpers.toy import blocks, tiny_gpt2

class Count(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.seen = state.global_step

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(args.seed)
count = Count()
trainer = Trainer(tiny_gpt2(), args, train_dataset=blocks(16), callbacks=[count])
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
is_theirs = isinstance(args, transformers.TrainingArguments)
if trainer.is_world_process_zero():
    print("FOUND" + json.dumps([type(trainer).__module__, losses, count.seen, is_theirs]), flush=True)
"""
WORDS = ["--output_dir", "out", "--use_cpu", "--logging_steps", "1", "--max_steps", "3", "--disable_tqdm", "true"]


def python(folder, *command, **variables):
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )


def run(folder, *command):
    (folder / "script.py").write_text(SCRIPT)
    done = python(folder, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    return json.loads(line[5:])


def test_the_script_is_not_changed_and_gives_the_same_losses(tmp_path):
    theirs = run(tmp_path, "script.py", *WORDS)
    ours = run(tmp_path, *RUN, "script.py", *WORDS)
    assert theirs[0] == "transformers.trainer" and ours[0] == "hf_compat.trainer"
    assert ours[1:] == theirs[1:] and ours[2] == 3 and ours[3] is True


def test_a_module_on_two_processes(tmp_path):
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(SCRIPT)
    two = [*RUN, "--devices", "2", "-m", "project.train", *WORDS, "--per_device_train_batch_size", "2"]
    kind, losses, updates, _ = run(tmp_path, *two)
    assert kind == "hf_compat.trainer" and len(losses) == updates == 3


VERBOSE = f"""
import logging, sys
sys.path.insert(0, {str(TESTS)!r})
import torch
torch.set_num_threads(1)
from helpers.toy import blocks, tiny_gpt2
from transformers import Trainer, TrainingArguments
from transformers.utils import logging as verbosity

class Record(logging.Handler):
    def emit(self, record):
        if record.levelno == logging.INFO:
            print("LINE", repr(record.getMessage()))

def trainer(folder, **changes):
    values = dict(use_cpu=True, report_to=[], disable_tqdm=True, max_steps=6, save_steps=2, eval_steps=2)
    values.update(eval_strategy="steps", save_total_limit=1, load_best_model_at_end=True, learning_rate=0.1)
    torch.manual_seed(0)
    args = TrainingArguments(folder, **{{**values, **changes}})
    return Trainer(tiny_gpt2(), args, train_dataset=blocks(16), eval_dataset=blocks(8))

logging.getLogger("transformers.trainer").addHandler(Record())
print("BY DEFAULT")
trainer("quiet", max_steps=1, save_strategy="no", load_best_model_at_end=False).train()
print("AT INFO")
verbosity.set_verbosity_info()
first = trainer("out", gradient_accumulation_steps=2, max_steps=3, save_steps=1, eval_steps=1, save_total_limit=3)
first.train()
first.evaluate()
first.predict(blocks(8))
first.save_model("final")
again = trainer("out", gradient_accumulation_steps=2, eval_steps=1, save_steps=1)
again.train(resume_from_checkpoint="out/checkpoint-3")
print("BY log_level")
trainer("third", log_level="error", max_steps=1, save_strategy="no", load_best_model_at_end=False)
print(verbosity.get_verbosity())
"""


def test_the_lines_of_transformers_follow_its_verbosity(tmp_path):
    (tmp_path / "script.py").write_text(VERBOSE)
    printed = [python(tmp_path, *command, "script.py").stdout.splitlines() for command in ([], RUN)]
    theirs, ours = ([s for s in lines if s.startswith(("LINE", "BY", "AT")) or s.isdigit()] for lines in printed)
    assert theirs == ours and theirs[1] != theirs[0] == "BY DEFAULT"
    shown = "\n".join(ours)
    assert "***** Running training *****" in shown and "Running Prediction" in shown and "Fast-forwarding" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "There is no script nowhere.py in /"),
        (["--devices", "many", "script.py"], "not a number of processes"),
        (["config.json", "script.py"], "config.json is not a Python script.\n\nHint: "),
    ],
)
def test_mistakes(tmp_path, words, message):
    (tmp_path / "script.py").write_text("")
    (tmp_path / "config.json").write_text("{}")
    done = python(tmp_path, *RUN, *words)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


# What a script can see of how it was started, and each way in which it may end.
SELF = """'''What it does.'''
import multiprocessing, os, pickle, signal, sys
import helper
if sys.argv[1:] == ["broken"]:
    compile("x = (", "broken.py", "exec")

class Here:
    pass

def fail():
    {}["the script's own mistake"]

def same(value: object):
    return value

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Here())).__class__ is Here
    main = sys.modules["__main__"]
    assert main.Here is Here and main.__dict__ is globals()
    print(sys.argv, __file__, __name__, __package__, __doc__, __spec__ and __spec__.name, sys.path[0], helper.__file__)
    print(sorted(name for name in globals() if name.startswith("__")), same.__annotations__)
    print(open("data.txt").read(), flush=True)
    how = sys.argv[-1]
    if how == "spawn":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(type(pool.apply(same, (Here(),))) is Here)
    elif how == "error":
        try:
            fail()
        except KeyError as error:
            raise RuntimeError("because of it") from error
    elif how == "hook":
        sys.excepthook = lambda kind, error, trace: print(kind.__name__, trace.tb_frame.f_code.co_name, trace.tb_lineno)
        fail()
    elif how.isdigit():
        sys.exit(int(how))
    elif how == "words":
        sys.exit("the last words")
    elif how in ("SIGTERM", "SIGKILL"):
        os.kill(os.getpid(), signal.Signals[how])
    elif how == "interrupt":
        raise KeyboardInterrupt
"""
ENDS = ["spawn", "error", "hook", "0", "3", "words", "SIGTERM", "interrupt", "broken"]
# The part of the command that runs a script, without the seconds that torch and transformers take to load.
ALONE = "import sys; from hf_compat.interop.user_script import run_{0}; run_{0}(sys.argv[1], sys.argv[2:])"


def project(folder):
    inner = folder / "project"
    inner.mkdir()
    (inner / "helper.py").write_text("")
    (inner / "script.py").write_text(SELF)
    (folder / "helper.py").write_text("raise ImportError('of the working folder')")
    for place in (folder, inner):
        (place / "data.txt").write_text("found")
    return inner


@pytest.mark.parametrize("end", ENDS)
def test_a_script_sees_and_ends_as_under_python(tmp_path, end):
    project(tmp_path)
    command = ["project/script.py", end]
    theirs, ours = python(tmp_path, *command), python(tmp_path, "-c", ALONE.format("script"), *command)
    assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
    assert ("found" in ours.stdout) == (end != "broken") and (ours.returncode == 0) == (end in ("spawn", "0"))


@pytest.mark.parametrize("end", ["spawn", "error", "3"])
def test_a_module_sees_and_ends_as_under_python(tmp_path, end):
    inner = project(tmp_path)
    theirs = python(inner, "-m", "script", end)
    ours = python(inner, "-c", ALONE.format("module"), "script", end)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout) and "found" in ours.stdout
    of_script = [line for line in theirs.stderr.splitlines() if "<frozen runpy>" not in line]
    assert ours.stderr.splitlines() == of_script


def test_the_command_shows_the_lines_of_the_script_and_ends_with_its_status(tmp_path):
    script = "from transformers import TrainingArguments\nTrainingArguments('out', save_steps=-1)\n"
    (tmp_path / "script.py").write_text(script)
    done = python(tmp_path, *RUN, "script.py")
    # bitsandbytes says this when transformers imports it, where it is installed
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Failed to load CPU gemm")]
    first, second = lines[:2]
    assert done.returncode == 1 and first == "Traceback (most recent call last):"
    assert second == f'  File "{tmp_path}/script.py", line 2, in <module>' and "ArgumentError: " in done.stderr


def test_a_folder_and_what_holds_nothing_to_run(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import sys\nprint(sys.argv, __name__, sys.path[0])")
    theirs, ours = python(tmp_path, "app", "word"), python(tmp_path, "-c", ALONE.format("script"), "app", "word")
    assert ours.returncode == 0 and ours.stdout == theirs.stdout and "['app', 'word'] __main__" in ours.stdout
    (tmp_path / "empty").mkdir()
    for kind, name, message in (
        ("script", "empty", "empty has no `__main__.py`."),
        ("module", "nowhere.at_all", "No module named 'nowhere'"),
        ("module", "json", "'json' is a package and cannot be directly executed"),
    ):
        done = python(tmp_path, "-c", ALONE.format(kind), name)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
