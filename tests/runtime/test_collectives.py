"""What two processes tell each other, against Accelerate's functions, in one start of two processes."""

import contextlib
import datetime
import os
import resource
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.multiprocessing
from torch import distributed

from helpers.forking import run_ranks
from hf_compat.errors import ProcessError
from hf_compat.runtime import collectives
from hf_compat.runtime import collectives as process_exit


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def talk(rank: int, store: str) -> None:
    process_exit.leave_at_exit()
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    data = {"pair": Pair(torch.tensor([rank, rank]), torch.tensor(rank)), "name": "x"}
    gathered = collectives.gather(data)
    assert type(gathered["pair"]) is Pair and gathered["name"] == "x"
    assert gathered["pair"].left.tolist() == [0, 0, 1, 1] and gathered["pair"].right.tolist() == [0, 1]
    padded = collectives.pad_across(Pair(torch.ones(1, 2 + rank), torch.ones(1)), dim=1, pad_index=-100)
    assert padded.left.tolist() == [[1, 1, -100]] if rank == 0 else padded.left.tolist() == [[1, 1, 1]]
    assert collectives.reduce(Pair(torch.tensor(1.0), torch.tensor(rank)), "mean").right == 0.5
    assert collectives.gather_objects(rank) == [0, 1] and collectives.broadcast_object(rank) == 0
    assert collectives.highest_each([rank, -rank]) == collectives.highest_on_host([rank, -rank], 60.0) == [1, 0]
    assert collectives._cpu_group.cache_info().currsize == 0, "the group that exists knows the CPU's tensors"
    assert collectives.broadcast_text(f"ä/{rank}") == "ä/0"
    assert collectives.gather_numbers([0.1, rank]) == [[0.1, 0.0], [0.1, 1.0]]
    assert collectives.gather_rows([rank, 2**56]).tolist() == [[0, 2**56], [1, 2**56]]
    assert collectives.are_equal("same") and not collectives.are_equal(f"rank {rank}")
    numbers = [rank, 5]
    with collectives.failing_together(numbers=numbers):
        pass
    assert numbers == [1, 5]
    numbers, rows = [rank, 5], collectives.Rows([rank, 7])
    with collectives.failing_together(numbers=numbers, rows=rows):
        rows.own[1] += rank
    assert numbers == [1, 5] and rows.of_all.tolist() == [[0, 7], [1, 8]]
    with pytest.raises(OSError if rank == 1 else ProcessError, match="full"), collectives.failing_together(rows=rows):
        if rank == 1:
            raise OSError("full")
    with pytest.raises(KeyError, match="first"):
        collectives.raise_first(KeyError("first") if rank == 0 else None)
    collectives.raise_first(KeyError("of the second, which does not count") if rank == 1 else None)
    lazy = collectives._cpu_group(distributed.group.WORLD, 60.0)  # as where the group exchanges tensors of GPUs alone
    assert collectives._highest([rank], lazy) == [1]
    with pytest.raises(OSError if rank == 1 else ProcessError, match="disk full"), collectives.failing_together():
        if rank == 1:
            raise OSError("disk full")
    distributed.barrier()  # nobody leaves while another still reads
    distributed.destroy_process_group()


@pytest.mark.timeout(300)
def test_two_processes_agree(tmp_path):
    torch.multiprocessing.spawn(talk, args=(str(tmp_path / "store"),), nprocs=2)


def test_one_process_gets_its_own_back():
    data = Pair(torch.ones(2), torch.tensor(1))
    assert collectives.gather(data) is data and collectives.pad_across(data) is data
    assert collectives.reduce(data, scale=2.0).left.tolist() == [2, 2]
    with pytest.raises(KeyError), collectives.failing_together():
        raise KeyError("mine")


class Counted:
    """A store whose requests are counted."""

    def __init__(self, store):
        self.store, self.requests = store, []

    def __getattr__(self, name):
        def ask(*args):
            self.requests.append(name)
            return getattr(self.store, name)(*args)

        return ask


def test_the_first_process_answers_all_ranks_at_once_however_late_they_come():
    world, timeout = 64, datetime.timedelta(seconds=30)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    others = distributed.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timeout)
    for rank in range(1, world, 2):
        others.set(f"asks_{rank}", f"of an earlier start {rank}")

    def come():
        time.sleep(0.3)
        for rank in range(1, world):
            others.set(f"asks_{rank}", f"id {rank}")
        for rank in range(1, world):
            name = others.get(f"id {rank}").decode()
            others.set(f"{name}/{rank}", "")

    thread = threading.Thread(target=come)
    thread.start()
    counted = Counted(store)
    collectives._answer_all(counted, world, "this start", "asks_{}", timeout)
    thread.join()
    assert len(counted.requests) < 20, counted.requests


def test_too_few_descriptors_are_an_error_before_any_socket_is_opened():
    """Gloo would end the process: "accept: Too many open files"."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    args = SimpleNamespace(
        process_index=1, world_size=4096, ddp_backend=None, ddp_timeout=1, device=torch.device("cpu")
    )  # fmt: skip
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        with pytest.raises(ProcessError, match=r"may have 1024 files .*To be one of 4096 processes it needs 4[12]\d\d"):
            collectives.start_processes(args)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def sockets() -> int:
    names = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the scan's own
            names.append(os.readlink(entry.path))
    return sum(name.startswith("socket:") for name in names)


@pytest.mark.parametrize("world", [3, 10])
def test_flags_of_updates_open_a_few_sockets_however_many_ranks_there_are(tmp_path, world):
    def body(rank):
        distributed.init_process_group("gloo")
        distributed.barrier()
        before = sockets()
        assert collectives.highest_on_host([rank], 60.0) == [world - 1]
        none = sockets() - before
        # what takes the place of a group that knows GPUs alone
        assert collectives._highest([rank], collectives._cpu_group(distributed.group.WORLD, 60.0)) == [world - 1]
        (tmp_path / f"{rank}").write_text(f"{none} {sockets() - before}")
        distributed.barrier()

    for ended in run_ranks(tmp_path / "logs", body, world):
        assert ended.status == 0, ended.said
    found = [(tmp_path / f"{rank}").read_text().split() for rank in range(world)]
    assert {none for none, _ in found} == {"0"}
    assert max(int(few) for _, few in found) <= collectives.FEW_SOCKETS


SCRIPT = """
import datetime, os, socket, sys, threading, types
from hf_compat.runtime import collectives
holder = socket.socket()
holder.bind(("127.0.0.1", 0))
holder.listen()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(holder.getsockname()[1]), RANK="0", WORLD_SIZE="1")
collectives.PORT_WAIT_SECONDS = float(sys.argv[1])
threading.Timer(1.5, holder.close).start()
args = types.SimpleNamespace(process_index=0, world_size=1)
print("met", collectives._rendezvous_store(args, datetime.timedelta(seconds=30)) is not None)
"""


@pytest.mark.parametrize(("waits", "meets"), [(30, True), (0, False)])
def test_a_port_that_the_last_job_still_holds_is_waited_for(waits, meets):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(waits)], capture_output=True, text=True, timeout=120)
    assert ("met True" in done.stdout) == meets, done.stderr[-1500:]
    assert meets or "EADDRINUSE" in done.stderr


class _Caused(Exception):
    def __init__(self, cause):
        super().__init__("an own error")
        self.__cause__ = cause


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (distributed.DistError("anything"), True),
        (RuntimeError("[gloo/transport] Connection closed by peer"), True),
        (RuntimeError("NCCL: Timed out"), True),
        (RuntimeError("Connection closed by peer"), False),  # a script's own connection
        (RuntimeError("gloo is not built"), False),
        (ValueError("[gloo/transport] Connection closed by peer"), False),
        (_Caused(RuntimeError("Socket Timeout")), True),
        (_Caused(_Caused(RuntimeError("Socket Timeout"))), True),
        (_Caused(RuntimeError("out of memory")), False),
    ],
)
def test_errors_of_an_exchange_are_told_from_others(error, expected):
    assert collectives.is_failed_exchange(error) is expected


@pytest.mark.parametrize(
    ("most", "more", "is_refused"), [(100, 90, False), (100, 91, True), (resource.RLIM_INFINITY, 10**6, False)]
)
def test_sockets_fit_into_the_bound_of_the_process(monkeypatch, most, more, is_refused):
    limits = SimpleNamespace(**{**vars(resource), "getrlimit": lambda kind: (most, most)})
    monkeypatch.setattr(collectives, "resource", limits)
    monkeypatch.setattr(collectives.os, "listdir", lambda path: range(10))
    with pytest.raises(ProcessError, match="needs 101: 10 are open") if is_refused else contextlib.nullcontext():
        assert collectives.check_descriptors(more, 4) is None
    monkeypatch.setattr(collectives, "resource", None)
    assert collectives.check_descriptors(more, 4) is None


@pytest.mark.parametrize(
    ("looks", "slept"),
    [
        (["S", "S", "S"], 3),
        (["R", "S", "S", "S"], 4),
        (["S", "S", "R", "S", "S", "S"], 6),
        (["S", "", "S"], 3),
        (["S R"] + ["S S"] * 3, 4),
        (["R"] * 9, 8),
    ],
)
def test_the_end_waits_until_the_threads_of_gloo_sleep(tmp_path, monkeypatch, looks, slept):
    def sleep(seconds):
        for task in tasks.iterdir():
            (task / "stat").unlink(missing_ok=True)
        for number, state in enumerate(("R other", *(f"{one} pt_gloo_runloop" for one in looks[len(sleeps)].split()))):
            (tasks / str(number)).mkdir(exist_ok=True)
            letter, name = state.split()
            (tasks / str(number) / "stat").write_text(f"{number} ({name}) {letter} 1")
        sleeps.append(seconds)

    sleeps, tasks = [], tmp_path / "task"
    tasks.mkdir()
    clock = SimpleNamespace(monotonic=lambda: 100.0 + len(sleeps), sleep=sleep)
    monkeypatch.setattr(collectives, "time", clock)
    monkeypatch.setattr(collectives, "GIVE_UP_SECONDS", 8.0)
    monkeypatch.setattr(collectives, "Path", lambda path: tasks)
    collectives.wait_for_gloo()
    assert len(sleeps) == slept
