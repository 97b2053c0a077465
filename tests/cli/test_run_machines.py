"""Where `hf-compat run` starts processes: its options, and what a launcher of one process a machine says."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.run import get_args_parser

from hf_compat.cli import run
from hf_compat.cli.run import Machines
from hf_compat.errors import ArgumentError
from hf_compat.runtime import collectives
from hf_compat.runtime import console as waiting

SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "gpu[03-04]",
        "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}  # fmt: skip
TWO_TASKS = SRUN | {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}
PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"}


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Return what is started for words and variables: the machines and the processes, or None for none."""
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setattr(run, "_launch", lambda chosen, machines, processes: (machines, processes))
    monkeypatch.setattr(run, "run_here", lambda chosen: None)
    monkeypatch.setattr(run.patching, "patch", lambda: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)

    def started(words, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return run.main([*words, str(script)])

    return started


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ([], {}, 0),
        (["--devices", "2"], {}, (Machines(), 2)),
        (["--nodes", "2", "--main-address", "a"], {}, (Machines(2, 2, 0, "a"), 1)),
        (["--nodes", "2", "--node-rank", "1", "--main-address", "a:1234"], {}, (Machines(2, 2, 1, "a", 1234), 1)),
        (["--nodes", "2", "--main-address", "[::1]:65535"], {}, (Machines(2, 2, 0, "::1", 65535), 1)),
        (["--nodes", "2", "--main-address", "a:1"], {}, (Machines(2, 2, 0, "a", 1), 1)),
        (["--nodes", "2", "--main-address", "fe80::1"], {}, (Machines(2, 2, 0, "fe80::1"), 1)),
        (["--nodes", "1:2", "--main-address", "a", "--main-port", "7"], {}, (Machines(1, 2, 0, "a", 7), 1)),
        ([], SRUN, 0),  # a task a machine, and nothing says that it starts others
        (["--devices", "4"], SRUN, (Machines(2, 2, 1, "gpu03"), 4)),
        (["--nodes", "2", "--node-rank", "1"], SRUN, (Machines(2, 2, 1, "gpu03"), 1)),
        (["--nodes", "1:4", "--devices", "4"], SRUN, (Machines(1, 4, 1, "gpu03"), 4)),
        ([], TWO_TASKS, 0),
        (["--devices", "1"], TWO_TASKS, 0),
        (["--devices", "4"], {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0"}, (Machines(2, 2, 1, "pod-0"), 4)),
        ([], PET, (Machines(2, 2, 1, "a"), 1)),
        ([], PET | {"PET_MASTER_PORT": "29123"}, (Machines(2, 2, 1, "a", 29123), 1)),
        (["--main-port", "7"], PET | {"PET_MASTER_PORT": "29123"}, (Machines(2, 2, 1, "a", 7), 1)),
        (["--main-address", "b"], PET | {"PET_MASTER_PORT": "29123"}, (Machines(2, 2, 1, "b"), 1)),
        ([], {"JOB_COMPLETION_INDEX": "0"}, 0),
    ],
)
def test_machines_are_those_of_the_options_or_of_the_launcher(asked, words, variables, expected):
    assert asked(words, variables) == expected


@pytest.mark.parametrize(
    ("words", "gpus", "processes"),
    [([], 2, 2), ([], 1, 0), (["--devices", "1"], 2, 0), (["--devices", "auto"], 3, 3)],
)
def test_all_gpus_of_a_machine_train_and_a_choice_that_nobody_made_is_told(
    asked, monkeypatch, capsys, words, gpus, processes
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert asked(words, {}) == ((Machines(), processes) if processes else 0)
    told = capsys.readouterr().err
    assert told == (
        "hf-compat run: 2 GPUs, one process each (`--devices 1` for one of them)\n" if processes == 2 else ""
    )


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        (["--devices", "2"], TWO_TASKS, "A launcher has started 4 processes already"),
        (["--nodes", "2"], TWO_TASKS, "A launcher has started 4 processes already"),
        (["--nodes", "3"], SRUN, "`--nodes 3`, and Slurm (srun) has started 2 process(es)"),
        (["--nodes", "2"], {}, "`--main-address` is not set"),
        (["--nodes", "2"], {"JOB_COMPLETION_INDEX": "0"}, "`--main-address` is not set"),
        (["--nodes", "2", "--node-rank", "2", "--main-address", "a"], {}, "`--node-rank 2` is not one of 2 machines"),
        (["--nodes", "2", "--main-address", "a:port"], {}, "has the port 'port'"),
        (["--nodes", "2", "--main-address", "a:0"], {}, "has the port '0'"),
        (["--nodes", "2", "--main-address", "a:65536"], {}, "has the port '65536'"),
        (["--nodes", "2", "--main-address", "a:12", "--main-port", "13"], {}, "differ"),
        ([], {"JOB_COMPLETION_INDEX": "3", "SM_HOSTS": "a", "SM_CURRENT_HOST": "a"}, "`SM_HOSTS='a'`"),
    ],
)
def test_machines_that_cannot_be_are_one_error(asked, capsys, words, variables, told):
    assert asked(words, variables) == 2
    assert told in capsys.readouterr().err


ONE = Machines()


def place(is_machine=True, starts=True, world=None, address=None, port=None, rank=0):
    launcher = SimpleNamespace(name="L", starts_machines=starts)
    return SimpleNamespace(
        launcher=launcher, is_machine=is_machine, world_size=world, address=address, port=port, rank=rank
    )


A_RANK = place(is_machine=False, world=4, address="p", port=29, rank=3)
ALONE = place(is_machine=False, world=1, address="p", port=29)
TASK = place(starts=False, world=2, address="p", port=29, rank=1)
POD = place(world=3, address="p", port=29, rank=1)


@pytest.mark.parametrize(
    ("found", "chosen", "expected"),
    [
        (None, {}, ONE),
        (None, {"main_port": 7}, Machines(port=7)),
        (A_RANK, {}, ONE),
        (A_RANK, {"devices": "1", "nodes": (1, 1)}, ONE),
        (A_RANK, {"devices": "2"}, "A launcher has started"),
        (A_RANK, {"nodes": (1, 2)}, "A launcher has started"),
        (ALONE, {"devices": "2"}, ONE),
        (ALONE, {"nodes": (2, 2), "main_address": "a"}, Machines(2, 2, 0, "a")),
        (place(is_machine=False), {"devices": "2"}, ONE),
        (TASK, {}, ONE),
        (TASK, {"devices": "1"}, Machines(2, 2, 1, "p", 29)),
        (TASK, {"nodes": (1, 2)}, Machines(1, 2, 1, "p", 29)),
        (POD, {}, Machines(3, 3, 1, "p", 29)),
        (POD, {"nodes": (1, 3)}, Machines(1, 3, 1, "p", 29)),
        (POD, {"nodes": (3, 4)}, Machines(3, 4, 1, "p", 29)),
        (POD, {"nodes": (4, 4)}, "has started 3 process"),
        (POD, {"nodes": (1, 2)}, "has started 3 process"),
        (place(), {}, ONE),
        (place(address="p"), {"nodes": (2, 2)}, Machines(2, 2, 0, "p")),
        (place(), {"nodes": (1, 2)}, "is not set"),
        (None, {"nodes": (1, 2)}, "is not set"),
        (POD, {"main_port": 7}, Machines(3, 3, 1, "p", 7)),
        (POD, {"main_address": "b"}, Machines(3, 3, 1, "b")),
        (POD, {"main_address": "b:5"}, Machines(3, 3, 1, "b", 5)),
        (POD, {"main_address": "b:7", "main_port": 7}, Machines(3, 3, 1, "b", 7)),
        (POD, {"main_address": "b", "main_port": 7}, Machines(3, 3, 1, "b", 7)),
        (POD, {"main_address": "b:8", "main_port": 7}, "differ"),
        (None, {"main_address": "b:8", "main_port": 7}, "differ"),
        (POD, {"node_rank": 0}, Machines(3, 3, 0, "p", 29)),
        (POD, {"node_rank": 2}, Machines(3, 3, 2, "p", 29)),
        (POD, {"node_rank": 3}, "is not one of 3 machines"),
        (POD, {"node_rank": -1}, "is not one of 3 machines"),
        (None, {"node_rank": 1}, "is not one of 1 machines"),
    ],
)
def test_machines_follow_from_the_place_and_the_options(monkeypatch, found, chosen, expected):
    monkeypatch.setattr(run, "find_place", lambda: found)
    options = SimpleNamespace(
        **{**dict.fromkeys(("devices", "nodes", "node_rank", "main_address", "main_port")), **chosen}
    )
    if isinstance(expected, Machines):
        assert run._machines(options) == expected
    else:
        with pytest.raises(ArgumentError, match=expected):
            run._machines(options)


@pytest.mark.parametrize("nodes", ["0", "2:1", "two", "1:2:3", ""])
def test_what_is_no_number_of_machines_is_refused(asked, capsys, nodes):
    with pytest.raises(SystemExit):
        asked(["--nodes", nodes], {})
    assert "is not a number of machines, such as 2 or 1:4" in capsys.readouterr().err


def test_a_rank_says_for_whom_it_waits(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(collectives, "leave_at_exit", lambda: None)
    args = SimpleNamespace(world_size=2, process_index=1, device=torch.device("cpu"), ddp_timeout=2, ddp_backend=None)
    with pytest.raises(torch.distributed.DistError):
        collectives.start_processes(args)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "hf_compat.runtime.console"]
    assert said.startswith("rank 1 waits for the others of 2 processes at no-such-host.invalid:29500; the host name")


def test_what_comes_in_time_is_not_told(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0.1)
    with waiting.saying_what_is_awaited("waits", until=lambda: True):
        time.sleep(0.3)
    with waiting.saying_what_is_awaited("waits"):
        pass
    time.sleep(0.2)
    assert caplog.records == []


def test_a_lost_rendezvous_is_one_line_with_a_way_out(capsys):
    def launch() -> None:
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    assert run.supervised(launch) == 1
    told = capsys.readouterr().err
    assert "do not find each other: The connection to the C10d store has failed." in told and "--main-address" in told


def failed(rank, status):
    return ChildFailedError("run", {rank: ProcessFailure(rank, 1, status, "no file")})


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (None, 0, ""),
        (failed(1, 3), 3, "Rank 1 has failed with status 3;"),
        (failed(0, 0), 1, "Rank 0 has failed with status 0;"),
        (failed(0, -9), 1, "failed with status -9;"),
        (SignalException("stopped", signal.SIGTERM), 143, "SIGTERM has ended all processes."),
        (torch.distributed.DistError("lost"), 1, "do not find each other: lost"),
        (ValueError("another"), None, ""),
    ],
)
def test_each_end_of_the_launcher_has_a_status(capsys, error, status, told):
    def launch():
        if error is not None:
            raise error

    with pytest.raises(ValueError, match="another") if status is None else contextlib.nullcontext():
        assert run.supervised(launch) == status
    said = capsys.readouterr().err
    assert told in said and bool(said) is bool(told)


ALONE = {"standalone": True}
CHANGING = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:29500", "rdzv_id": "hf_compat"}


@pytest.mark.parametrize(
    ("words", "machines", "meeting", "after", "address"),
    [
        ([], Machines(), ALONE, [], "127.0.0.1:29500"),
        (["--compat", "4"], Machines(), ALONE, ["--compat", "4"], "127.0.0.1:29500"),
        (["-m"], Machines(), ALONE, ["-m"], "127.0.0.1:29500"),
        ([], Machines(port=5), {"master_addr": "127.0.0.1", "master_port": 5}, [], "127.0.0.1:5"),
        ([], Machines(2, 2, 1, "a"), {"node_rank": 1, "master_addr": "a", "master_port": 29500}, [], "a:29500"),
        ([], Machines(1, 2, 1, "a", 5), {**CHANGING, "rdzv_endpoint": "a:5"}, [], "a:5"),
        (["--restarts", "2"], Machines(1, 2), {**CHANGING, "max_restarts": 2}, [], "127.0.0.1:29500"),
        (["--log-dir", "logs"], Machines(), {**ALONE, "log_dir": "logs", "tee": "3"}, [], "127.0.0.1:29500"),
    ],
)
def test_torchs_launcher_gets_the_machines_and_the_script(monkeypatch, words, machines, meeting, after, address):
    launched, told = [], []
    monkeypatch.setattr("torch.distributed.run.run", launched.append)
    for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"):
        monkeypatch.setenv(name, "as before")

    def awaited(text, host, until):
        told.append((text, host, until))
        return contextlib.nullcontext()

    monkeypatch.setattr(run, "saying_what_is_awaited", awaited)
    chosen = run.make_parser().parse_args([*words, "script.py", "--lr", "1"])
    assert run._launch(chosen, machines, 3) == 0
    (found,) = launched
    words = ["hf_compat", "run", "--launcher", str(os.getpid()), *after, "script.py", "--lr", "1"]
    here = {"nproc_per_node": "3", "nnodes": f"{machines.least}:{machines.most}", "module": True}
    plain = get_args_parser().parse_args(["-m", *words])
    assert vars(found) == {**vars(plain), **here, **meeting}
    ((text, host, until),) = told
    assert f"at {address} (" in text and f"this is machine {machines.rank} " in text
    assert host == machines.address and until is run.has_children
    keeps_address = os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "as before"
    assert keeps_address is (machines.least == machines.most)
    prefix = os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"]
    assert prefix == ("[rank ${rank}]: " if "log_dir" in meeting else "as before")


@pytest.mark.parametrize(("launcher", "is_module"), [(None, False), (7, True)])
def test_a_rank_ends_with_its_launcher_and_runs_the_script(monkeypatch, launcher, is_module):
    done = []
    for name in ("end_with_launcher", "let_children_import_from"):
        monkeypatch.setattr(run, name, lambda value, name=name: done.append((name, value)))
    for name in ("run_module", "run_script"):
        monkeypatch.setattr(run, name, lambda script, words, name=name: done.append((name, script, words)))
    run.run_here(SimpleNamespace(launcher=launcher, module=is_module, script="s.py", arguments=["a"]))
    assert done == [
        *[("end_with_launcher", 7)] * (launcher is not None),
        ("let_children_import_from", run.child_site.FOLDER),
        ("run_module" if is_module else "run_script", "s.py", ["a"]),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ("a", None)),
        ("a:1", ("a", 1)),
        ("a:65535", ("a", 65535)),
        ("fe80::1", ("fe80::1", None)),
        ("[::1]", ("::1", None)),
        ("[::1]:5", ("::1", 5)),
        *((text, None) for text in ("a:0", "a:65536", "a:x", "a:", "[::1]:")),
    ],
)
def test_an_address_is_a_host_and_perhaps_a_port(text, expected):
    with pytest.raises(ArgumentError, match="has the port") if expected is None else contextlib.nullcontext():
        assert run.address_of(text) == expected


@pytest.mark.parametrize(
    ("devices", "arguments", "is_on_cpu", "is_launched", "most", "processes"),
    [
        ("2", [], "", True, 1, 2),
        ("auto", ["--use_cpu"], "", False, 1, 3),
        (None, [], "", False, 1, 3),
        (None, ["--use_cpu"], "", False, 1, 1),
        (None, ["--cpu"], "", False, 1, 3),
        (None, [], "true", False, 1, 1),
        (None, [], "", True, 1, 1),
        (None, [], "", True, 2, 3),
        (None, ["--no_cuda=True"], "", False, 2, 1),
        ("0", [], "", False, 1, None),
        ("two", [], "", False, 1, None),
    ],
)
def test_how_many_processes_are_started(monkeypatch, devices, arguments, is_on_cpu, is_launched, most, processes):
    monkeypatch.setattr(run, "is_launched", lambda: is_launched)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("ACCELERATE_USE_CPU", is_on_cpu)
    chosen = SimpleNamespace(devices=devices, arguments=arguments)
    with pytest.raises(ArgumentError, match="not a number") if processes is None else contextlib.nullcontext():
        assert run.processes_of(chosen, Machines(1, most)) == processes


@pytest.mark.parametrize(
    ("generation", "defaults", "rank", "said", "told"),
    [
        ("4.57", {"seed": 3}, 0, "", "seed=3; `--compat 5"),
        ("4.57", {"seed": 3}, 0, "4.57", "seed=3; `--compat 5"),
        (run.NEWEST, {"seed": 3}, 0, "", "(seed=3)."),
        ("4.57", {"seed": 3}, 0, "5", None),
        ("4.57", {"seed": 3}, 1, "", None),
        ("4.57", {}, 0, "", None),
        (None, {}, 0, "", None),
    ],
)
def test_defaults_of_another_release_are_told(monkeypatch, capsys, generation, defaults, rank, said, told):
    found = SimpleNamespace(generation=generation, defaults=defaults, release="4.57.1")
    monkeypatch.setattr(run, "followed", lambda: None if generation is None else found)
    monkeypatch.setattr(run, "read_launch", lambda: SimpleNamespace(process_index=rank))
    monkeypatch.setenv(run.VARIABLE, said)
    run.tell_defaults()
    shown = capsys.readouterr().err.replace(") ", " ").replace("(seed=3); ", "seed=3; ")
    assert (told or "") in shown.replace("(seed=3; ", "seed=3; ") and (told is not None) is bool(shown)


@pytest.mark.parametrize(
    ("is_over", "address", "is_known", "told"),
    [
        (True, "host", False, []),
        (False, "", False, ["waits."]),
        (False, "host", True, ["waits."]),
        (False, "host", False, ["waits; the host name 'host' has no address here (unknown)."]),
    ],
)
def test_a_long_wait_is_told_once(monkeypatch, caplog, is_over, address, is_known, told):
    timers = []

    class Timer:
        daemon = False

        def __init__(self, seconds, function):
            self.calls, self.seconds, self.function = [], seconds, function
            timers.append(self)

        def start(self):
            self.calls.append("started" if self.daemon else "started before it is a daemon")

        def cancel(self):
            self.calls.append("cancelled")

    def look_up(name, port):
        if not is_known:
            raise OSError(-2, "unknown")

    monkeypatch.setattr(waiting.threading, "Timer", Timer)
    monkeypatch.setattr(waiting.socket, "getaddrinfo", look_up)
    with pytest.raises(KeyError), waiting.saying_what_is_awaited("waits", address, lambda: is_over):
        timers[0].function()
        raise KeyError
    assert caplog.messages == told
    assert timers[0].calls == ["started", "cancelled"] and timers[0].seconds == waiting.PATIENCE_SECONDS
