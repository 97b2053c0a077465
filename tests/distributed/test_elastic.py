"""Agents on this machine stand for nodes of an elastic job: one is killed, and another takes its place later."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from helpers.forking import free_port, run_ranks
from hf_compat import TrainingArguments
from hf_compat.runtime.collectives import gather_objects, start_processes

TORCHRUN = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3",
            "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:PORT", "--rdzv_id", "job"]  # fmt: skip
OURS = ["-m", "hf_compat", "run", "--nodes", "1:2", "--devices", "1", "--restarts", "3", "--main-address",
        "localhost:PORT", "--log-dir", "LOGS"]  # fmt: skip
# The defaults take a minute for a lost node. Less than eight seconds of silence may be a busy machine.
SHORT = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=8"
STEPS = 12
SCRIPT = """
import json, os, sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from helpers import toy
from hf_compat import Trainer, TrainerCallback, TrainingArguments, get_last_checkpoint, set_seed

class Watch(TrainerCallback):
    def note(self, event, args, state):
        if args.process_index == 0:
            with open("notes", "a") as notes:
                notes.write(json.dumps([event, args.world_size, state.global_step]) + chr(10))

    def on_train_begin(self, args, state, control, **kwargs):
        self.note("begin", args, state)

    def on_step_end(self, args, state, control, **kwargs):
        self.note("step", args, state)
        # each third of the run waits until there are as many nodes as it is to be trained on
        wanted = int(sys.argv[1:][3 * (state.global_step - 1) // args.max_steps])
        while args.world_size != wanted:
            if args.world_size > 1:
                torch.distributed.barrier()  # an error where the other rank is gone
            time.sleep(0.1)

set_seed(3)
args = TrainingArguments(
    "out", per_device_train_batch_size=2, gradient_accumulation_steps=2 // int(os.environ["WORLD_SIZE"]),
    max_steps={steps}, save_steps=1, logging_steps=1, learning_rate=1e-2, use_cpu=True, disable_tqdm=True,
    report_to="none", save_total_limit=3,
)
trainer = Trainer(toy.Classifier(dropout=0.0), args, train_dataset=toy.rows(40), callbacks=[Watch()])
print("a word of rank", args.process_index, flush=True)
trainer.train(resume_from_checkpoint=os.path.isdir("out") and get_last_checkpoint("out") is not None)
if args.process_index == 0:
    with open("result.json", "w") as result:
        json.dump(trainer.state.log_history, result)
"""


class Fleet:
    """Agents of one elastic job, each in place of a node's."""

    def __init__(self, folder: Path, launcher: list[str], *thirds: int) -> None:
        folder.mkdir()
        self.folder, self.port = folder, free_port()
        (folder / "script.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), steps=STEPS))
        words = [word.replace("PORT", str(self.port)).replace("LOGS", str(folder / "logs")) for word in launcher]
        self.command = [sys.executable, *words, "script.py", *map(str, thirds)]
        self.agents: list[subprocess.Popen] = []

    def start_node(self, address: str) -> subprocess.Popen:
        """Start an agent. torch numbers the nodes by their addresses."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PET_RDZV_CONF": SHORT, "PET_LOCAL_ADDR": address}
        if "hf_compat" not in self.command:  # docs/operations.md says why; `hf-compat run` sets it itself
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (self.folder / f"node{len(self.agents)}.log").open("w") as log:
            agent = subprocess.Popen(self.command, cwd=self.folder, stdout=log, stderr=log, env=environment)
        self.agents.append(agent)
        return agent

    def wait_for_meeting_point(self) -> None:
        """Wait until the first node serves the rendezvous: the one that binds the port serves it."""
        until = time.monotonic() + 60
        while True:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < until, self.said()
            time.sleep(0.05)

    def notes(self) -> list[list]:
        path = self.folder / "notes"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, world: int, step: int) -> None:
        until = time.monotonic() + 120
        while ["step", world, step] not in self.notes():
            assert time.monotonic() < until, self.said()
            assert self.agents[0].poll() is None, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        logs = [path.read_text()[-4000:] for path in sorted(self.folder.glob("node*.log"))]
        return "\n\n".join([str(self.notes()), *logs])

    def losses(self) -> list[float]:
        return [log["loss"] for log in json.loads((self.folder / "result.json").read_text()) if "loss" in log]

    def end(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                lose(agent)


def lose(agent: subprocess.Popen) -> None:
    """Kill an agent and its ranks at once, as a machine goes. torchrun's ranks outlive their agent."""
    agent.send_signal(signal.SIGSTOP)  # it starts no other rank meanwhile
    ranks = [rank for task in Path(f"/proc/{agent.pid}/task").glob("*/children") for rank in task.read_text().split()]
    for pid in (*map(int, ranks), agent.pid):
        os.kill(pid, signal.SIGKILL)
    agent.wait()


@pytest.fixture
def fleets(tmp_path):
    made = []

    def make(*words) -> Fleet:
        made.append(Fleet(tmp_path / str(len(made)), *words))
        return made[-1]

    yield make
    for fleet in made:
        fleet.end()


@pytest.mark.matrix
@pytest.mark.real_python
@pytest.mark.parametrize("launcher", [OURS, TORCHRUN], ids=["hf-compat run", "torchrun"])
def test_a_job_goes_on_without_a_node_that_is_killed_and_with_one_that_comes(fleets, launcher):
    fleet = fleets(launcher, 2, 1, 2)
    first = fleet.start_node("127.0.0.3")
    fleet.wait_for_meeting_point()
    second = fleet.start_node("127.0.0.2")  # it has rank 0
    fleet.wait_for(world=2, step=STEPS // 3 + 1)
    lose(second)
    fleet.wait_for(world=1, step=2 * STEPS // 3 + 1)
    third = fleet.start_node("127.0.0.1")  # it has rank 0, and the first node served the rendezvous before
    assert [first.wait(120), third.wait(120)] == [0, 0], fleet.said()
    lives = [note for note in fleet.notes() if note[0] == "begin"]  # the first may have begun alone
    assert lives[-3:] == [["begin", 2, 0], ["begin", 1, STEPS // 3], ["begin", 2, 2 * STEPS // 3]], fleet.said()

    whole = fleets([*OURS[:3], "--devices", "2"], 2, 2, 2)
    assert whole.start_node("127.0.0.1").wait(120) == 0, whole.said()
    assert len(whole.losses()) == STEPS
    assert fleet.losses() == pytest.approx(whole.losses(), rel=1e-5)
    assert fleet.losses()[: STEPS // 3] == whole.losses()[: STEPS // 3]


def test_ranks_whose_launchers_count_restarts_differently_meet_in_a_store_that_was_used_before(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # an agent's, which outlives the ranks

    def body(rank: int) -> None:
        os.environ.update(
            MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=str(rank)
        )
        start_processes(TrainingArguments(str(tmp_path), use_cpu=True, ddp_timeout=20))
        assert gather_objects(rank) == [0, 1]

    for start in range(2):
        ended = run_ranks(tmp_path / str(start), body)
        assert [one.status for one in ended] == [0, 0], ended
