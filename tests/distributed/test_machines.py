"""Two "machines" on this one: a launcher starts one process on each, and `hf-compat run` those that train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.forking import free_port
from helpers.launching import JOB, OURS, TORCHRUN, result, start

WORDS = ["model=plain", "max_steps=4", "save_strategy='no'"]
SRUN = {"SLURM_JOB_ID": "71", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2",
        "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": "RANK", "SLURM_NODEID": "RANK"}  # fmt: skip
MATRIX = pytest.mark.matrix


def start_machines(folder, launcher, variables, words=WORDS):
    """Run the job on both machines, and return what became of it; `RANK` and `PORT` stand for numbers."""
    port = str(free_port())

    def start(rank):
        def told(text):
            return text.replace("RANK", str(rank)).replace("PORT", port)

        command = [sys.executable, *map(told, launcher), str(JOB), str(folder), *words]
        own = {name: told(value) for name, value in variables.items()}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
        return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--nodes", "2", "--node-rank", "RANK", "--main-address", "localhost:PORT"], SRUN),
        pytest.param(["--devices", "1", "--main-port", "PORT"], SRUN, marks=MATRIX),
        pytest.param(["--devices", "1", "--main-port", "PORT"],
                     {"RANK": "RANK", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, marks=MATRIX),
        pytest.param(["--main-port", "PORT"], {"PET_NNODES": "2", "PET_NODE_RANK": "RANK",
                                               "PET_MASTER_ADDR": "localhost"}, marks=MATRIX),
        pytest.param(["--main-port", "PORT"], {"SM_HOSTS": '["hA0", "hA1"]', "SM_CURRENT_HOST": "hARANK",
                                               "MASTER_ADDR": "localhost"}, marks=MATRIX),
        pytest.param(["--nodes", "2", "--main-address", "localhost:PORT"], {"JOB_COMPLETION_INDEX": "RANK"},
                     marks=MATRIX),
    ],
    ids=["srun with all options", "srun", "PyTorchJob", "TrainJob", "SageMaker", "indexed Job"],
)  # fmt: skip
def test_machines_of_one_process_each_train_as_two_processes_of_one(tmp_path, words, variables):
    done = start_machines(tmp_path / "ours", ["-m", "hf_compat", "run", *words], variables)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr[-3000:] + done[1].stderr[-3000:]
    ours = json.loads((tmp_path / "ours" / "result.json").read_text())
    assert ours == result(tmp_path / "torchrun", *WORDS, launcher=TORCHRUN)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "variables",
    [
        {**SRUN, "SLURM_TASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_LOCALID": "RANK", "SLURM_NODEID": "0"},
        pytest.param({"RANK": "RANK", "WORLD_SIZE": "2"}, marks=MATRIX),
    ],
    ids=["srun", "PyTorchJob"],
)
def test_deepspeed_trains_below_launchers_that_do_not_set_its_local_rank(tmp_path, variables):
    words = [*WORDS, "deepspeed={'zero_optimization': {'stage': 3}}"]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "PORT"}
    done = start_machines(tmp_path / "ours", [], {**variables, **place}, words)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr[-3000:] + done[1].stderr[-3000:]
    ours = json.loads((tmp_path / "ours" / "result.json").read_text())
    assert ours == result(tmp_path / "torchrun", *words, launcher=TORCHRUN)


def test_what_each_rank_prints_is_in_a_file_and_shown_with_its_rank(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('hello')\nprint('bye', file=sys.stderr)")
    done = start(tmp_path, launcher=[*OURS, "--log-dir", str(tmp_path / "logs")], script=script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n")) == ["", "[rank 0]: hello", "[rank 1]: hello"]
    assert {"[rank 0]: bye", "[rank 1]: bye"} <= set(done.stderr.split("\n"))
    files = sorted((tmp_path / "logs").glob("*/attempt_0/*/stdout.log"))
    assert [(file.parent.name, file.read_text()) for file in files] == [("0", "hello\n"), ("1", "hello\n")]


def test_a_warning_about_an_argument_comes_once_and_from_the_first_process(tmp_path):
    # the plan warns of the first, `TrainingArguments` of the others
    done = start(tmp_path, *WORDS, "fsdp_config={'min_num_params': 5}", "past_index=1", "optim=adamw_hf")
    assert done.returncode == 0, done.stderr[-3000:]
    told = ("`fsdp_config={'min_num_params': 5}` has", "`past_index=1` has no effect", "`optim='adamw_hf'` is gone")
    assert [done.stderr.count(text) for text in told] == [1, 1, 1]
