"""A fork of the warm process runs and ends as a Python that was started: else tests would prove something else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from warm_python.session import REAL

SEEN = """
import sys, os, random, warnings
print(sys.argv, __name__, sys.path[0], os.getcwd(), sys.stdout.line_buffering)
print(sorted(name for name in globals() if name.startswith("__")), sys.modules["__main__"].__dict__ is globals())
print([name for name in ("transformers", "accelerate", "peft", "deepspeed") if name in sys.modules])
import importlib.util, torch
print(importlib.util.find_spec("transformers").name, "transformers" in sys.modules, torch.get_num_threads())
print(os.environ.get("OF_THE_TEST"), os.getppid() == int(sys.argv[1]), sys.stdin.read())
"""
ENDS = {
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit('the last words')": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "{}['missing']": 1,
    "import warnings; warnings.warn('x')": 0,
    "import atexit; atexit.register(print, 'at the end')": 0,
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('of a thread'))).start()": 0,
}


def run(python, *words, **options):
    return subprocess.run([python, *words], capture_output=True, text=True, check=False, **options)


def test_the_stand_in_is_in_place():
    assert sys.executable != REAL and run(sys.executable, "-c", "import sys; print(sys.executable)").stdout.strip() == (
        sys.executable
    )


@pytest.mark.parametrize(
    "how", ["script", "safe path", *(pytest.param(how, marks=pytest.mark.matrix) for how in ("module", "code"))]
)
def test_a_command_sees_what_a_real_one_sees(tmp_path, how):
    (tmp_path / "seen.py").write_text(SEEN)
    words = {"script": ["seen.py"], "safe path": ["-P", "seen.py"], "module": ["-m", "seen"], "code": ["-c", SEEN]}[how]
    options = {"cwd": tmp_path, "input": "said", "env": {**os.environ, "OF_THE_TEST": "yes", "OMP_NUM_THREADS": "1"}}
    forked, real = (run(python, *words, str(os.getpid()), **options) for python in (sys.executable, REAL))
    assert (forked.stdout, forked.stderr, forked.returncode) == (real.stdout, real.stderr, 0)
    assert "yes True said" in forked.stdout


@pytest.mark.parametrize("code", ENDS)
def test_a_command_ends_as_a_real_one(code):
    forked, real = (run(python, "-W", "always", "-c", code) for python in (sys.executable, REAL))
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)
    assert forked.returncode == ENDS[code]


def test_random_numbers_differ_from_fork_to_fork():
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    assert len({run(sys.executable, "-c", code).stdout for _ in range(3)}) == 3


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_fork(sent):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        process.send_signal(sent)
        assert process.wait(10) == -sent
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_guest_is_there_once_it_is_imported():
    code = "import transformers, sys; from transformers import Trainer; "
    code += "print(transformers.__spec__.name, Trainer.__module__)"
    code += "; print('accelerate' in sys.modules, 'peft' in sys.modules)"
    done = run(sys.executable, "-c", code)
    assert done.stdout.split() == ["transformers", "transformers.trainer", "True", "False"], done.stderr


@pytest.mark.parametrize("hidden", ["sitecustomize.py", "torch.py", "json.py"])
def test_what_a_fork_would_not_see_runs_in_a_real_interpreter(tmp_path, hidden):
    (tmp_path / hidden).write_text("import sys\nsys.seen = True\n")
    code = f"import sys, {hidden.removesuffix('.py')}; print(hasattr(sys, 'seen'))"
    done = run(sys.executable, "-c", code, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout.strip() == "True", done.stderr
