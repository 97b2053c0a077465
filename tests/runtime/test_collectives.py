"""What two processes tell each other, against Accelerate's functions, in one start of two processes."""

import contextlib
import datetime
import functools
import itertools
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


class Ranks:
    """Stands for torch.distributed. Each rank is a thread, and an exchange waits for all of them."""

    def __init__(self, world):
        self.own, self.box, self.meet = threading.local(), [None] * world, threading.Barrier(world, timeout=20)

    def __getattr__(self, name):
        return self.gather if name == collectives.GATHER else getattr(distributed, name)

    def exchanged(self, value):
        self.box[self.own.rank] = value
        self.meet.wait()
        found = list(self.box)
        self.meet.wait()
        return found

    def is_initialized(self):
        return True

    def get_world_size(self):
        return len(self.box)

    def get_rank(self):
        return self.own.rank

    def gather(self, joined, tensor):
        joined.copy_(torch.cat(self.exchanged(tensor.clone())))

    def all_reduce(self, total, op=distributed.ReduceOp.SUM, group=None):
        rows = torch.stack(self.exchanged(total.clone()))
        total.copy_(rows.amax(0) if op == distributed.ReduceOp.MAX else rows.sum(0))

    def all_gather_object(self, parts, data):
        parts[:] = self.exchanged(data)

    def broadcast_object_list(self, box, src):
        box[:] = self.exchanged(list(box))[src]

    def scatter_object_list(self, box, objects, src):
        box[0] = self.exchanged(objects)[src][self.own.rank]


def in_threads(monkeypatch, world, body):
    """List what a function gives, or raises, on each rank."""
    found, ranks = [None] * world, Ranks(world)
    monkeypatch.setattr(collectives, "distributed", ranks)
    monkeypatch.setattr(collectives, "_device_of", lambda group: torch.device("cpu"))

    def run(rank):
        ranks.own.rank = rank
        try:
            found[rank] = body(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def exchange(rank):
    tensor = torch.arange(3.0)[: rank + 1] + 10 * rank
    numbers, rows = [rank, -rank], collectives.Rows([rank])
    with collectives.failing_together(numbers=numbers, rows=rows):
        pass
    told = [rank]
    return {
        "gather": collectives.gather({"a": torch.tensor([[rank, 5]]), "b": torch.tensor(rank + 1)}),
        "objects": collectives.gather_objects(f"r{rank}"),
        "numbers": collectives.gather_numbers([rank, 0.1]),
        "rows": collectives.gather_rows([rank, 7]).tolist(),
        "highest": collectives.highest_each([rank, -rank]),
        "text": collectives.broadcast_text(f"ä{rank}"),
        "equal": [collectives.are_equal("a"), collectives.are_equal(f"{rank}"), collectives.are_equal("a", told), told],
        "object": collectives.broadcast_object({"rank": rank}),
        "scattered": collectives.scatter_object(["x", "y", "z"] if rank == 0 else None),
        "sum": collectives.reduce(torch.tensor([rank, 1.0])).tolist(),
        "mean": collectives.reduce(torch.tensor([rank, 1.0]), "mean", 2.0).tolist(),
        "padded": collectives.pad_across(tensor, 0, -1).tolist(),
        "first": collectives.pad_across(tensor[None], 1, -1, pad_first=True).tolist(),
        "other axis": collectives.pad_across(tensor, 1).shape == tensor.shape,
        "negative axis": collectives.pad_across(tensor, -1, -1).tolist(),
        "too negative": collectives.pad_across(tensor, -2).shape == tensor.shape,
        "together": (numbers, rows.of_all.tolist()),
    }


def test_three_ranks_exchange(monkeypatch):
    for rank, found in enumerate(in_threads(monkeypatch, 3, exchange)):
        if isinstance(found, Exception):
            raise found
        gathered = found.pop("gather")
        assert gathered["a"].tolist() == [[0, 5], [1, 5], [2, 5]] and gathered["b"].tolist() == [1, 2, 3]
        own = [10.0 * rank + place for place in range(rank + 1)]
        assert found == {
            "objects": ["r0", "r1", "r2"],
            "numbers": [[0.0, 0.1], [1.0, 0.1], [2.0, 0.1]],
            "rows": [[0, 7], [1, 7], [2, 7]],
            "highest": [2, 0],
            "text": "ä0",
            "equal": [True, False, True, [2]],
            "object": {"rank": 0},
            "scattered": "xyz"[rank],
            "sum": [3.0, 3.0],
            "mean": [2.0, 2.0],
            "padded": own + [-1.0] * (2 - rank),
            "first": [[-1.0] * (2 - rank) + own],
            "other axis": True,
            "negative axis": own + [-1.0] * (2 - rank),
            "too negative": True,
            "together": ([2, 0], [[0], [1], [2]]),
        }


@pytest.mark.parametrize(
    ("failing", "kind", "wanted", "told"),
    [
        ({}, Exception, True, [None, None]),
        ({0: ValueError("odd\nmore")}, Exception, True, ["odd\nmore", "rank 0: ValueError: odd\nmore"]),
        ({0: ValueError("odd\nmore")}, ValueError, True, ["odd\nmore", "rank 0: odd"]),
        ({0: KeyError("odd")}, ValueError, False, ["'odd'", None]),
        ({1: ValueError("odd")}, ValueError, False, [None, "odd"]),
        ({0: ValueError("a"), 1: ValueError("b")}, ValueError, True, ["a", "b"]),
    ],
)
@pytest.mark.parametrize("has_rows", [False, True])
def test_an_error_of_a_rank_is_one_of_all(monkeypatch, failing, kind, wanted, told, has_rows):
    def body(rank):
        rows = collectives.Rows([rank]) if has_rows else None
        with collectives.failing_together(kind, wanted, rows=rows):
            if rank in failing:
                raise failing[rank]

    for rank, (found, expected) in enumerate(zip(in_threads(monkeypatch, 2, body), told, strict=True)):
        assert (found is None) is (expected is None) and (expected or "") in str(found or "")
        if found is not None and rank not in failing:
            assert type(found) is (ProcessError if kind is Exception else kind)


@pytest.mark.parametrize(("first", "second"), [(None, None), (KeyError("a"), None), (None, KeyError("b"))])
def test_the_first_ranks_error_is_raised_everywhere(monkeypatch, first, second):
    found = in_threads(monkeypatch, 2, lambda rank: collectives.raise_first((first, second)[rank]))
    assert [str(error) for error in found] == [str(first)] * 2
    monkeypatch.undo()
    with contextlib.nullcontext() if first is None else pytest.raises(KeyError, match="a"):
        collectives.raise_first(first)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_one_process_scales_what_it_reduces(scale):
    own = {"a": torch.tensor([2.0])}
    found = collectives.reduce(own, scale=scale)
    assert found["a"].item() == 2.0 * scale and (found is own) is (scale == 1.0)
    assert collectives.scatter_object(["a", "b"]) == "a" and collectives.gather_rows([1, 2]).tolist() == [[1, 2]]


class Words:
    """A store with the words that ranks have left."""

    def __init__(self, words):
        self.words = words

    def check(self, keys):
        return all(key in self.words for key in keys)

    def get(self, key):
        return self.words[key].encode()

    def set(self, key, word):
        self.words[key] = word


GONE, SILENT = "[gloo] Connection closed by peer", "[gloo] Timed out"
PAIR = "[gloo] Application timeout caused pair closure"


@pytest.mark.parametrize(
    ("words", "error", "told", "looks"),
    [
        ({"7/0": "KeyError: a", "7/2": "-"}, GONE, ["rank 0: KeyError: a"], 1),
        ({"7/0": "KeyError: a", "7/2": "OSError: b"}, GONE, ["rank 0: KeyError: a", "rank 2: OSError: b"], 1),
        ({"7/0": "-", "7/2": "-"}, GONE, [], 1),
        ({"7/0": "-", "constructor/2": "OSError: b"}, GONE, ["rank 2: OSError: b"], 5),
        ({"7/0": "-", "6/2": "OSError: b"}, GONE, ["rank 2: has gone without an error"], 5),
        ({"7/0": "-"}, SILENT, ["rank 2: does not answer"], 5),
        ({"7/0": "-"}, PAIR, ["rank 2: does not answer"], 5),
    ],
)
def test_why_other_ranks_are_absent(monkeypatch, words, error, told, looks):
    slept = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + len(slept), sleep=slept.append)
    monkeypatch.setattr(collectives, "time", clock)
    monkeypatch.setattr(collectives, "PATIENCE_SECONDS", 5.0)
    monkeypatch.setattr(collectives.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(collectives.distributed, "get_world_size", lambda: 3)
    store = Words({f"hf_compat/ended/{place}": word for place, word in words.items()})
    monkeypatch.setattr(collectives, "_in_time", lambda ask: ask(store))
    found = collectives._reasons(7, RuntimeError(error))
    assert len(found) == len(told) and all(map(str.startswith, found, told)) and len(slept) == looks


@pytest.mark.parametrize("has_several", [False, True])
@pytest.mark.parametrize("error", [None, KeyError("a"), RuntimeError(GONE)])
@pytest.mark.parametrize("reasons", [[], ["rank 0: KeyError: b"]])
def test_a_failure_is_left_for_the_others(monkeypatch, has_several, error, reasons):
    store = Words({})
    monkeypatch.setattr(collectives, "is_distributed", lambda: has_several)
    monkeypatch.setattr(collectives.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(collectives, "_get_default_store", lambda: store)
    monkeypatch.setattr(collectives, "_calls", itertools.count(7))
    monkeypatch.setattr(collectives, "_reasons", lambda call, raised: reasons if (call, raised) == (7, error) else 0)
    is_exchange = has_several and error is not None and "gloo" in str(error)
    found = None
    try:
        with collectives.naming_absent_ranks():
            if error is not None:
                raise error
    except Exception as raised:
        found = raised
    if is_exchange and reasons:
        assert (
            type(found) is ProcessError and str(found).endswith("\n\nrank 0: KeyError: b") and found.__cause__ is error
        )
    else:
        assert found is error
    word = None if error is None or not has_several else "-" if is_exchange else "KeyError: 'a'"
    assert store.words == ({} if word is None else {"hf_compat/ended/7/1": word})

    store.words.clear()
    with contextlib.nullcontext() if error is None else pytest.raises(type(error)), collectives.telling_of_failure():
        if error is not None:
            raise error
    told = error is not None and has_several
    assert store.words == ({"hf_compat/ended/constructor/1": f"{type(error).__name__}: {error}"} if told else {})


def test_a_store_that_is_gone_gives_no_answer(monkeypatch):
    def ask(store):
        raise RuntimeError("closed")

    monkeypatch.setattr(collectives, "_get_default_store", lambda: None)
    collectives._in_time(ask)


@pytest.mark.parametrize("before", [None, "0"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_group_of_the_cpu_opens_few_sockets(monkeypatch, before, fails):
    asked = []

    def new_group(backend, timeout):
        asked.append((backend, timeout.total_seconds(), collectives.environment[collectives.LAZY_GLOO]))
        if fails:
            raise RuntimeError("odd")
        return "group"

    monkeypatch.setattr(collectives.distributed, "new_group", new_group)
    monkeypatch.setattr(collectives.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(collectives, "check_descriptors", lambda *words: asked.append(words))
    monkeypatch.setattr(collectives, "environment", {} if before is None else {collectives.LAZY_GLOO: before})
    make = functools.partial(collectives._cpu_group.__wrapped__, "world", 60.0)
    if fails:
        with pytest.raises(RuntimeError, match="odd"):
            make()
    else:
        assert make() == "group"
    assert asked == [(collectives.FEW_SOCKETS, 3), ("gloo", 60.0, "1")]
    assert collectives.environment == ({} if before is None else {collectives.LAZY_GLOO: before})


@pytest.mark.parametrize(
    ("kinds", "device", "own_group"),
    [
        (["cpu"], "cpu", None),
        (["cuda", "cpu"], "cpu", None),
        (["cuda:0"], "cuda", "made"),
        (["meta", "cuda"], "meta", "made"),
    ],
)
def test_flags_of_updates_pass_between_cpus(monkeypatch, kinds, device, own_group):
    world = SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds])
    assert collectives._device_of.__wrapped__(world) == torch.device(device)
    monkeypatch.setattr(collectives, "_device_of", collectives._device_of.__wrapped__)
    monkeypatch.setattr(collectives, "_cpu_group", lambda group, seconds: "made" if seconds == 60.0 else None)
    monkeypatch.setattr(collectives, "_highest", lambda numbers, group: (numbers, group))
    for has_several in (False, True):
        monkeypatch.setattr(collectives, "is_distributed", lambda has=has_several: has)
        monkeypatch.setattr(collectives.distributed, "group", SimpleNamespace(WORLD=world))
        assert collectives.highest_on_host((3, 4), 60.0) == (((3, 4), own_group) if has_several else [3, 4])


@pytest.mark.parametrize(
    ("facts", "backend", "sockets"),
    [
        ({}, "gloo", 7 * 2),
        ({"index": 1}, "gloo", 7),
        ({"agent": "True"}, "gloo", 7),
        ({"agent": "False"}, "gloo", 7 * 2),
        ({"backend": "mpi"}, "mpi", 7),
        ({"device": "cuda:1"}, "nccl", 7),
        ({"device": "cuda:1", "index": 1}, "nccl", 0),
        ({"device": "cuda:1", "backend": "gloo"}, "gloo", 7 * 2),
        ({"world": 2}, "gloo", 2),
        ({"world": 1}, None, None),
        ({"is_there": True}, None, None),
    ],
)
def test_a_group_is_made_once_for_several_processes(monkeypatch, facts, backend, sockets):
    told, device = [], torch.device(facts.get("device", "cpu"))
    args = SimpleNamespace(
        world_size=facts.get("world", 8), process_index=facts.get("index", 0), device=device, ddp_timeout=9,
        ddp_backend=facts.get("backend"),
    )  # fmt: skip
    note = lambda name: lambda *words, **named: told.append((name, *words, *named.items()))  # noqa: E731
    for name in ("leave_at_exit", "destroy_at_exit", "check_descriptors"):
        monkeypatch.setattr(collectives, name, note(name))
    monkeypatch.setattr(collectives, "environment", {"TORCHELASTIC_USE_AGENT_STORE": facts.get("agent", "")})
    monkeypatch.setattr(collectives, "main_address", lambda: ("host", 12))
    monkeypatch.setattr(collectives, "_rendezvous_store", lambda args, timeout: timeout.total_seconds())
    monkeypatch.setattr(collectives.distributed, "is_initialized", lambda: "is_there" in facts)
    monkeypatch.setattr(collectives.distributed, "init_process_group", note("made"))
    monkeypatch.setattr(collectives.torch.cuda, "set_device", note("device"))
    awaited = lambda text, address: told.append((text, address)) or contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(collectives, "saying_what_is_awaited", awaited)
    collectives.start_processes(args)
    index, timeout = args.process_index, datetime.timedelta(seconds=9)
    assert told == ([] if args.world_size == 1 else [("leave_at_exit",)]) + ([] if backend is None else [
        *([("device", device)] if device.type == "cuda" else []),
        ("check_descriptors", sockets + collectives.FEW_SOCKETS, args.world_size),
        (f"rank {index} waits for the others of {args.world_size} processes at host:12", "host"),
        ("made", backend, ("store", 9.0), ("rank", index), ("world_size", args.world_size), ("timeout", timeout)),
        ("destroy_at_exit",),
    ])  # fmt: skip


@pytest.mark.parametrize("confirms", [False, True])
def test_ranks_that_do_not_come_are_named(monkeypatch, confirms):
    waits, answers, now = [], [], [100.0]

    class Slow:
        def wait(self, keys, patience):
            waits.append((tuple(keys), patience.total_seconds()))
            now[0] += patience.total_seconds()
            if not confirms or keys == ["own/1", "own/2"]:
                raise distributed.DistStoreError("timed out")

        def multi_get(self, keys):
            return [f"id {key}".encode() for key in keys]

        def multi_set(self, keys, values):
            answers.append((keys, values))

        def check(self, keys):
            return keys == ["own/1"]

    monkeypatch.setattr(collectives, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(TimeoutError, match=r"Ranks \[2\] did not come within 3 s"):
        collectives._answer_all(Slow(), 3, "own", "asks_{}", datetime.timedelta(seconds=3))
    asked, came = ("asks_1", "asks_2"), ("own/1", "own/2")
    answer = (["id asks_1", "id asks_2"], ["own", "own"])
    assert answers == ([answer] * len(answers) if confirms else []) and bool(answers) is confirms
    patience = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert waits[:2] == ([(asked, 0.1), (came, 0.1)] if confirms else [(asked, 0.1), (asked, 0.2)])
    assert [seconds for keys, seconds in waits if keys == asked] == patience[: 5 if confirms else 6]
    collectives._answer_all(Slow(), 1, "own", "asks_{}", datetime.timedelta(seconds=3))
