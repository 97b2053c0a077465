"""A rank that goes, hangs or cannot write: the others end in bounded time, and say which rank it was and why.

`python tests/distributed/test_absent_ranks.py STRATEGY HOW WHERE RANK` does one of them with torch's launcher.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import pytest

from helpers import toy
from helpers.forking import run_ranks, start_ranks, wait_for_ranks
from hf_compat import Trainer, TrainerCallback, TrainingArguments, set_seed
from hf_compat.runtime import collectives

TIMEOUT = 6  # ddp_timeout in seconds
# How rank 1 leaves the others alone, and what is said of it.
LEAVES = {
    "sys.exit": (lambda: sys.exit(0), r"rank 1: SystemExit: 0"),
    "os._exit(0)": (lambda: os._exit(0), r"rank 1: has gone"),
    "os._exit(3)": (lambda: os._exit(3), r"rank 1: has gone"),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"rank 1: has gone"),
    "stopped": (lambda: os.kill(os.getpid(), signal.SIGSTOP), r"rank 1: does not answer.*ddp_timeout"),
    "raises": (lambda: json.loads("{"), r"rank 1: JSONDecodeError: Expecting"),
}
ZERO_2 = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
}  # fmt: skip
STRATEGIES = {"DDP": {}, "FSDP2": {"fsdp": True}, "ZeRO2": {"deepspeed": ZERO_2}}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Wait 2 seconds, not 5, for the word of a rank that has left none."""
    monkeypatch.setattr(collectives, "PATIENCE_SECONDS", 2.0)


class Leaving(Trainer):
    """Leaves once, in the third update's forward or in an evaluation, on one rank."""

    leave = staticmethod(lambda: None)
    where, absent = "update", 1

    def compute_loss(self, *args, **kwargs):
        if self.where == "forward" and self.is_in_train:
            self.reached()
        return super().compute_loss(*args, **kwargs)

    def prediction_step(self, *args, **kwargs):
        if self.where == "evaluation":
            self.reached()
        return super().prediction_step(*args, **kwargs)

    def reached(self):
        if self.args.process_index == self.absent and (self.state.global_step == 2 or not self.is_in_train):
            self.leave()


class AtUpdate(TrainerCallback):
    def on_step_end(self, args, state, control, trainer=None, **kwargs):
        if trainer.where == "update":
            trainer.reached()


def train(folder: Path, how: str, where: str = "update", strategy: str = "DDP", absent: int = 1, **values) -> None:
    set_seed(3)
    args = TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True,
        ddp_timeout=TIMEOUT, report_to="none",
        **{"save_strategy": "no", "max_steps": 6, **STRATEGIES[strategy], **values},
    )  # fmt: skip
    model, rows = (toy.Classifier(), toy.rows(40)) if strategy == "DDP" else (toy.tiny_gpt2(), toy.blocks(40))
    trainer = Leaving(model, args, train_dataset=rows, eval_dataset=rows, callbacks=[AtUpdate])
    trainer.leave, trainer.where, trainer.absent = LEAVES[how][0], where, absent
    if where == "evaluation":
        trainer.evaluate()
    else:
        trainer.train()


WHERE = ("update", "forward", "evaluation")
# Each way of leaving at one place, in turn; the others with `-m matrix`
PLACES = [
    pytest.param(
        how,
        where,
        # a stopped rank takes the whole timeout, and another test has one
        marks=[] if WHERE.index(where) == number % len(WHERE) and how != "stopped" else pytest.mark.matrix,
    )
    for number, how in enumerate(LEAVES)
    for where in WHERE
]


@pytest.mark.parametrize(("how", "where"), PLACES)
def test_the_other_rank_ends_and_names_it(tmp_path, how, where):
    pids = start_ranks(tmp_path / "logs", lambda rank: train(tmp_path, how, where))
    try:
        other = wait_for_ranks(tmp_path / "logs", pids[:1], seconds=TIMEOUT + 40)[0]
    finally:
        os.kill(pids[1], signal.SIGKILL)
        os.waitpid(pids[1], 0)
    assert other.status == 1
    assert_said(LEAVES[how][1], other.said)


def assert_said(pattern: str, said: str) -> None:
    assert "ProcessError: Another process of this run has failed." in said, said[-3000:]
    assert re.search(pattern, said), said[-3000:]


def test_an_error_of_one_ranks_constructor_is_told(tmp_path):
    """Rank 0, in its training, waits for rank 1 in vain."""

    def body(rank):
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, ddp_timeout=TIMEOUT, report_to="none", save_strategy="no", max_steps=2
        )
        Trainer(None if rank == 1 else toy.Classifier(), args, train_dataset=toy.rows(40)).train()

    ranks = wait_for_ranks(tmp_path / "logs", start_ranks(tmp_path / "logs", body), seconds=TIMEOUT + 60)
    assert "model_init" in ranks[1].said
    assert_said(r"rank 1: \w+: .*model_init", ranks[0].said)


@pytest.mark.parametrize("strategy", ["FSDP2", pytest.param("ZeRO2", marks=pytest.mark.matrix)])
def test_a_stopped_rank_is_named_under_every_strategy(tmp_path, strategy):
    pids = start_ranks(tmp_path / "logs", lambda rank: train(tmp_path, "stopped", "forward", strategy))
    try:
        other = wait_for_ranks(tmp_path / "logs", pids[:1], seconds=TIMEOUT + 100)[0]
    finally:
        os.kill(pids[1], signal.SIGKILL)
        os.waitpid(pids[1], 0)
    assert other.status == 1
    assert_said(LEAVES["stopped"][1], other.said)


def test_the_rank_that_holds_the_store_is_named_too(tmp_path):
    pids = start_ranks(tmp_path / "logs", lambda rank: train(tmp_path, "stopped", absent=0))
    until = time.monotonic() + TIMEOUT + 60
    try:
        while os.waitpid(pids[1], os.WNOHANG)[0] == 0:
            assert time.monotonic() < until, "rank 1 waits for a stopped rank"
            time.sleep(0.05)
    finally:
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids[0], 0)
    assert_said(r"rank 0: does not answer", (tmp_path / "logs" / "rank1.log").read_text())


def test_an_exit_of_all_ranks_is_no_failure(tmp_path):
    class Leave(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            sys.exit(0)

    def body(rank):
        args = TrainingArguments(str(tmp_path / "out"), use_cpu=True, ddp_timeout=TIMEOUT, disable_tqdm=True)
        Trainer(toy.Classifier(), args, train_dataset=toy.rows(40), callbacks=[Leave]).train()

    assert [rank.status for rank in run_ranks(tmp_path / "logs", body)] == [0, 0]


NEW_MOUNTS, NEW_USER, PRIVATE = 0x00020000, 0x10000000, 0x4000 | 0x40000  # of Linux's unshare and mount


def see_a_full_disk(place: Path) -> None:
    """Let this process alone see a disk of one page at a place."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = [
        libc.unshare(NEW_MOUNTS | (NEW_USER if os.geteuid() else 0)),
        libc.mount(None, b"/", None, PRIVATE, None),
        libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", 0, b"size=4k"),
    ]
    assert done == [0, 0, 0], os.strerror(ctypes.get_errno())


def test_a_full_disk_on_one_rank(tmp_path):
    """Each rank sees a disk of its own where the checkpoints go, as on two machines; rank 1's is full."""
    place = tmp_path / "out"
    place.mkdir()

    def body(rank):
        if rank == 1:
            see_a_full_disk(place)
        train(tmp_path, "raises", where="nowhere", save_strategy="steps", save_steps=2)

    ended = run_ranks(tmp_path / "logs", body, seconds=60)
    assert [rank.status for rank in ended] == [1, 1], ended
    assert "CheckpointWriteError" in ended[1].said and "no space left" in ended[1].said.lower()
    assert_said(r"rank 1: CheckpointWriteError: .*checkpoint-2", ended[0].said)


def main() -> None:
    """Start a job of two ranks with `hf-compat run`, let one leave, and print what became of it."""
    if "RANK" in os.environ:
        folder, strategy, how, where, absent = sys.argv[1:]
        train(Path(folder), how, where, strategy, int(absent), max_steps=20)
        return
    strategy, how, where, absent = [*sys.argv[1:], *["DDP", "stopped", "update", "1"][len(sys.argv) - 1 :]]
    command = [sys.executable, "-m", "hf_compat", "run", "--devices", "2", __file__]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        done = subprocess.run([*command, folder, strategy, how, where, absent], capture_output=True, text=True)
        seconds = time.monotonic() - began
    said = [line for line in done.stderr.splitlines() if line.startswith(("rank ", "Rank "))]
    print(json.dumps({"how": how, "rank": absent, "status": done.returncode, "s": round(seconds, 1), "said": said}))


if __name__ == "__main__":
    main()
