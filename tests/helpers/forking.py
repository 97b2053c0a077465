"""Ranks without a launcher and without start-up time: forked from the test, each with a log of its own."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import accelerate.state  # noqa: F401 - else each rank would import it
import pytest


@dataclass
class Ended:
    """How a rank has ended: what `subprocess` calls its return code, and what it has written."""

    status: int
    said: str


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start_ranks(folder: Path, body: Callable[[int], None], world: int = 2) -> list[int]:
    """Run a function on several ranks; returns their process ids."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    return [_fork(folder, body, rank, world, port) for rank in range(world)]


def _fork(folder: Path, body: Callable[[int], None], rank: int, world: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in places.items()})
        warnings.simplefilter("default")  # packages that are imported here first have warnings of their own
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        body(rank)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait_for_ranks(folder: Path, pids: list[int], seconds: float) -> list[Ended]:
    """Return how the ranks have ended; all of them have to within that time."""
    until, statuses = time.monotonic() + seconds, {}
    while len(statuses) < len(pids):
        for pid in set(pids) - set(statuses):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            left = set(pids) - set(statuses)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            pytest.fail(f"ranks {[pids.index(pid) for pid in left]} did not end:\n{said_by(folder, len(pids))}")
        time.sleep(0.01)
    return [Ended(statuses[pid], (folder / f"rank{rank}.log").read_text()) for rank, pid in enumerate(pids)]


def said_by(folder: Path, world: int) -> str:
    return "\n".join(f"rank {rank}: {(folder / f'rank{rank}.log').read_text()[-1500:]}" for rank in range(world))


def run_ranks(folder: Path, body: Callable[[int], None], world: int = 2, seconds: float = 60.0) -> list[Ended]:
    """Run a function on several ranks to the end."""
    return wait_for_ranks(folder, start_ranks(folder, body, world), seconds)
