"""The manifests of docs/operations.md: parsed, and run on this machine as far as that goes without a cluster."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from hf_compat.cli.run import make_parser

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DOOR = [sys.executable, "-m", "hf_compat"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture
def folder(tmp_path):
    shutil.copy(EXAMPLES / "preemptible.py", tmp_path)
    return tmp_path


def start(folder, *words, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [*DOOR, *words], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.matrix
def test_a_preempted_job_saves_and_is_started_again_by_the_same_command(folder):
    # No checkpoint is due before the end: the one that is there is the signal's.
    script = (folder / "preemptible.py").read_text()
    assert "save_steps=20," in script
    (folder / "preemptible.py").write_text(script.replace("save_steps=20,", "save_steps=1_000_000,"))
    command = ("run", "--devices", "2", "preemptible.py", "--output_dir", "run", "--max_steps", "3000000")
    job = start(folder, *command)
    told = ""
    while "'loss'" not in told:
        line = job.stdout.readline()
        assert line, told
        told += line
    job.send_signal(signal.SIGTERM)
    told += job.communicate(timeout=120)[0]
    assert job.returncode == 128 + signal.SIGTERM and "SIGTERM has ended all processes" in told, told
    (step,) = (int(path.name.partition("-")[2]) for path in folder.glob("run/checkpoint-*"))
    assert "Traceback" not in told and step >= 20
    again = start(folder, *command[:-1], str(step + 5))
    told = again.communicate(timeout=120)[0]
    assert again.returncode == 0 and f"from update {step} on" in told, told
    assert f"updates: {step + 5}, last loss" in told


def container() -> dict:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    (found,) = pod["containers"]
    seconds = {entry["name"]: int(entry["value"]) for entry in found["env"]}
    assert seconds["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] < pod["terminationGracePeriodSeconds"]
    return {**found, "nodes": spec["completions"]}


def test_the_pods_of_the_manifest_start_what_they_say():
    found = container()
    assert found["command"][:2] == ["hf-compat", "run"]
    chosen = make_parser().parse_args(found["command"][2:])
    assert chosen.nodes == (found["nodes"],) * 2 and chosen.script == "preemptible.py"
    assert chosen.main_address == "train-0.train:29500", "the first pod's name: job, index and service"


@pytest.mark.matrix
def test_two_pods_of_the_manifest_train_together(folder):
    words = container()["command"][1:]
    words = [
        word.replace("train-0.train:29500", f"localhost:{free_port()}").replace("/checkpoints", ".") for word in words
    ]
    words = ["--devices=1" if word == "--devices=2" else word for word in words]
    pods = [start(folder, *words, JOB_COMPLETION_INDEX=str(index)) for index in range(2)]
    told = [pod.communicate(timeout=240)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], told
    assert "[rank 0]: updates: 60, last loss" in told[0]


def task_of_skypilot(folder) -> tuple[dict, dict[str, str]]:
    """Return SkyPilot's task, and a folder of commands in which `hf-compat` is this package's."""
    tools = folder / "bin"
    tools.mkdir()
    (tools / "hf-compat").write_text(f'#!/bin/bash\nexec {sys.executable} -m hf_compat "$@"\n')
    (tools / "hf-compat").chmod(0o755)
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    path = f"{tools}:{os.environ['PATH']}"
    return task, {**os.environ, **task["envs"], "PATH": path, "OMP_NUM_THREADS": "1", "SKYPILOT_NUM_NODES": "2"}


def test_skypilots_task_gives_its_machines(folder):
    task, variables = task_of_skypilot(folder)
    (folder / "bin" / "hf-compat").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    variables |= {
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
    }
    done = subprocess.run(["bash", "-c", task["run"]], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "run"
    chosen = make_parser().parse_args(done.stdout.splitlines()[1:])
    assert (chosen.nodes, chosen.node_rank, chosen.devices) == ((task["num_nodes"],) * 2, 1, "2")
    assert chosen.main_address == "10.0.0.4:29500" and chosen.script == "preemptible.py"
    mounted = task["file_mounts"].keys() & {str(Path(word).parent) for word in chosen.arguments}
    assert mounted == {"/checkpoints"}, "the checkpoints outlive the machines"


@pytest.mark.matrix
def test_skypilots_task_trains_on_two_machines(folder):
    task, variables = task_of_skypilot(folder)
    words = task["run"].replace("29500", str(free_port())).replace("/checkpoints", ".")
    variables |= {"SKYPILOT_NODE_IPS": "localhost\nlocalhost", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    nodes = [
        subprocess.Popen(
            ["bash", "-c", words], cwd=folder, env={**variables, "SKYPILOT_NODE_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    assert "\nupdates: 60, last loss" in told[0]


def test_the_commands_for_sagemaker_and_the_hub_are_ones_that_both_sides_take():
    text = (ROOT / "docs" / "operations.md").read_text().replace("\\\n", " ")
    (sagemaker,) = re.findall(r"`(hf-compat run preemptible\.py [^`]+)`", text)
    (hub,) = re.findall(r"^```\n(hf jobs .*)\n```", text, re.MULTILINE)
    words = shlex.split(hub)
    place = words.index("hf-compat")
    for chosen in map(make_parser().parse_args, (shlex.split(sagemaker)[2:], words[place + 2 :])):
        assert chosen.script == "preemptible.py" and chosen.arguments[0] == "--output_dir"
    command = [sys.executable, "-m", "huggingface_hub.cli.hf", "jobs", "run", "--dry-run", *words[3:]]
    shown = subprocess.run(command, env={**os.environ, "HF_TOKEN": "hf_no"}, capture_output=True, text=True)
    assert shown.returncode == 0 and "hf-compat run preemptible.py" in shown.stdout, shown.stdout + shown.stderr


def test_the_image_has_what_its_command_and_the_manifest_start():
    lines = [line for line in (EXAMPLES / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    steps = [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]
    assert [word for word, _ in steps] == ["FROM", "WORKDIR", "COPY", "COPY", "RUN", "WORKDIR", "COPY", "CMD"]
    copied = [name for word, rest in steps if word == "COPY" for name in rest.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    (start,) = (json.loads(rest) for word, rest in steps if word == "CMD")
    chosen = make_parser().parse_args(start[2:])
    assert start[:2] == container()["command"][:2] and f"examples/{chosen.script}" in copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (install,) = (rest for word, rest in steps if word == "RUN")
    (extra,) = re.findall(r"'\.\[(\w+)\]'", install)
    assert extra in project["optional-dependencies"] and project["readme"] in copied
    assert f"FROM python:{project['requires-python'].removeprefix('>=')}-slim" in lines


SRUN = """#!/bin/bash
# Starts the command as two tasks, one on each of two "machines"
while [[ $1 == -* ]]; do shift; done
for rank in 0 1; do
  SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_NNODES=2 \\
    SLURM_TASKS_PER_NODE='1(x2)' SLURM_STEP_NODELIST=localhost SLURM_JOB_NAME=train "$@" &
done
wait -n && wait -n
"""


def test_the_batch_script_is_one_that_sbatch_reads():
    text = (EXAMPLES / "train.sbatch").read_text()
    assert subprocess.run(["bash", "-n", str(EXAMPLES / "train.sbatch")], check=False).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)", text, re.MULTILINE))
    assert options["ntasks-per-node"] == "1" and options["requeue"] == ""
    name, _, seconds = options["signal"].partition("@")
    assert hasattr(signal, f"SIG{name}")
    assert int(re.search(r"SHUTDOWN_TIMEOUT=(\d+)", text)[1]) < int(seconds)


@pytest.mark.matrix
def test_the_batch_script_trains_on_two_machines(folder):
    tools = folder / "bin"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "hf-compat").write_text(f'#!/bin/bash\nexec {sys.executable} -m hf_compat "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    script = (EXAMPLES / "train.sbatch").read_text().replace("--devices 2", "--devices 1")
    (folder / "train.sbatch").write_text(script)
    variables = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "train.sbatch", "run"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and "updates: 60, last loss" in done.stdout, done.stdout + done.stderr


def test_the_script_for_ray_names_what_ray_and_this_package_have():
    """Ray itself is in no environment of the tests: tests/sweeps/ray/run.py trains with it."""
    import hf_compat

    tree = ast.parse((EXAMPLES / "ray_train.py").read_text())
    taken = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "hf_compat"
        for alias in node.names
    }  # fmt: skip
    assert taken and all(hasattr(hf_compat, name) for name in taken)
