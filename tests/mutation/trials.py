"""Trials: some tests run beside one mistake, in a fork of a process that has imported all packages but ours.

A trial has processes and a view of the repository for itself (`view.py`). Whatever it starts ends with it, whatever it
writes is gone. Tests that start a Python find a warm process with the mistake, which imports the package when it is
first asked.
"""

from __future__ import annotations

import compileall
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mutation import view
from mutation.places import PACKAGE, Change
from mutation.view import ROOT
from warm_python import imports, server, variables

MEMORY_MIB = 6000  # of all processes of a trial, counted where the machine has less than this left
MODULES_OF_PYTEST = ("pytest", "_pytest.assertion.rewrite", "_pytest.python", "_pytest.terminal", "_pytest.junitxml")


@dataclass
class Outcome:
    """How a trial has ended.

    Args:
        killer: The first test that failed, or during which the time or the memory ran out; empty if all passed.
        why: `failed`, `timeout`, `memory`, `crash` or empty.
        ran: The tests that were run, in order.
        seconds: By the clock.
        killer_seconds: Of the test that failed.
        said: The last lines of pytest.
    """

    killer: str
    why: str
    ran: list[str]
    seconds: float
    killer_seconds: float
    said: str


class Trials:
    """The warm process, and the trials that run in forks of it."""

    def __init__(self) -> None:
        variables.take()
        os.environ["PYTEST_VERSION"] = "mutants"
        sys.path.remove(str(ROOT / "tests"))
        import _pytest.config  # noqa: F401

        self.loaded = imports.load(ours=False)
        for name in MODULES_OF_PYTEST:
            importlib.import_module(name)
        loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "hf_compat")
        assert not loaded, f"a trial imports the package itself: {loaded}"
        compileall.compile_dir(PACKAGE, quiet=2)  # else each trial would compile what it then throws away
        self.folder = Path(tempfile.mkdtemp(prefix="hfm-"))
        self.running: dict[int, tuple[Path, float]] = {}
        self.count = 0
        gc.collect()
        gc.freeze()

    def start(self, change: Change | None, tests: list[str], seconds: float) -> int:
        """Start a trial; return the id of its process.

        Args:
            change: The mistake, if any.
            tests: Their ids, in the order in which they run until one fails.
            seconds: After which the trial is stopped.
        """
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                _run_trial(self.loaded, folder, change, tests, seconds)
            except BaseException as error:
                (folder / "broken").write_text(repr(error))
            os._exit(0)
        self.running[pid] = folder, time.monotonic()
        return pid

    def wait(self) -> tuple[int, Outcome]:
        """Wait until a trial has ended."""
        pid, _ = os.wait()
        folder, started = self.running.pop(pid)
        if (folder / "broken").exists():
            raise RuntimeError((folder / "broken").read_text())
        outcome = _read(folder, time.monotonic() - started)
        _keep_compiled(folder / "upper")
        shutil.rmtree(folder, ignore_errors=True)
        return pid, outcome

    def close(self) -> None:
        """Stop what runs, and leave nothing behind."""
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(folder: Path, seconds: float) -> Outcome:
    log, said = ((folder / name) for name in ("log", "said"))
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    ran = [line["began"] for line in lines if "began" in line]
    failed = next((line for line in lines if "failed" in line), None)
    why = (folder / "ended").read_text()
    text = said.read_text(errors="replace")[-3000:] if said.exists() else ""
    if failed is not None:
        return Outcome(failed["failed"], "failed", ran, seconds, failed["seconds"], text)
    if why in ("0", "5"):
        return Outcome("", "", ran, seconds, 0.0, text)
    last = ran[-1] if ran else "the start"
    return Outcome(last, why if why in ("timeout", "memory") else "crash", ran, seconds, seconds, text)


def _keep_compiled(upper: Path) -> None:
    """Take the compiled tests of a trial into the repository: the next one need not rewrite their asserts again."""
    for path in (upper / "tests").rglob("__pycache__/*.pyc"):
        kept = ROOT / path.relative_to(upper)
        if path.is_file():
            kept.parent.mkdir(exist_ok=True)
            new = kept.with_suffix(f".{os.getpid()}")
            shutil.copy(path, new)
            new.replace(kept)


def _run_trial(loaded: imports.Loaded, folder: Path, change: Change | None, tests: list[str], seconds: float) -> None:
    view.enter(folder)
    if change is not None:
        path = ROOT / change.file
        path.write_text(change.planted(path.read_text()))
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    first = os.fork()
    if first == 0:
        _be_first(loaded, folder, tests)
    until = time.monotonic() + seconds
    why = ""
    while not why:
        ended, status = os.waitpid(first, os.WNOHANG)
        if ended:
            why = str(os.waitstatus_to_exitcode(status))
        elif time.monotonic() > until:
            why = "timeout"
        elif _memory_left() < MEMORY_MIB and _memory_of(first) > MEMORY_MIB:
            why = "memory"
        else:
            time.sleep(0.05)
    (folder / "ended").write_text(why)
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(first, 0)


def _be_first(loaded: imports.Loaded, folder: Path, tests: list[str]) -> None:
    """Be the first process of the trial's own, which ends with its parent, and with which all others end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    view.see_processes()
    warm = folder / f"hf_compat-warm-{folder.parent.name}-{folder.name}"
    warm.mkdir()
    listener = server.listening(warm)
    if os.fork() == 0:
        _end_with(lambda: _serve(loaded, warm, listener), folder / "warm.log")
    pytest_process = os.fork()
    if pytest_process == 0:
        listener.close()
        _end_with(lambda: _run_tests(loaded, folder, warm, tests), folder / "said")
    while True:
        ended, status = os.wait()
        if ended == pytest_process:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _end_with(work: Callable[[], int], said: Path) -> None:
    """Do a process's work, and end with its status; what it says, its errors too, goes to a file."""
    _take_streams(said)
    status = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def _serve(loaded: imports.Loaded, warm: Path, listener: object) -> int:
    select.select([listener], [], [])
    sys.modules.update(loaded.hidden)
    found = imports.load()
    found.read |= loaded.read
    found.before = loaded.before
    found.after = {**loaded.after, **found.after}
    gc.collect()
    gc.freeze()
    server.Server(warm, os.getppid(), found, listener).run()
    return 0


def _run_tests(loaded: imports.Loaded, folder: Path, warm: Path, tests: list[str]) -> int:
    os.chdir(ROOT)
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    (folder / "tmp").mkdir()
    os.environ |= {"WARM_PYTHON": str(warm), "TMPDIR": str(folder / "tmp")}
    tempfile.tempdir = None
    sys.argv = ["pytest"]
    sys.path.insert(0, str(ROOT))
    sys.meta_path.insert(0, imports.Guests(loaded.hidden))
    main = vars(sys.modules["__main__"])
    spec = importlib.util.find_spec("pytest.__main__")
    main.clear()
    main |= {"__name__": "__main__", "__spec__": spec, "__file__": spec.origin, "__builtins__": __builtins__}
    import pytest

    words = ["-x", "-q", "-n", "0", "-m", "not matrix", "--tb=short", "-p", "no:cacheprovider", "-o", "timeout=0"]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning", *files]  # of plugins that are imported already
    return int(pytest.main(words, plugins=[_Chosen(folder / "log", tests)]))


def _take_streams(path: Path) -> None:
    said = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, stream in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(number, stream)
    sys.stdout.reconfigure(line_buffering=True)


class _Chosen:
    """Runs the chosen tests in their order, and notes what happens (a plugin of pytest)."""

    def __init__(self, log: Path, tests: list[str]) -> None:
        self.log = log
        self.places = {test: place for place, test in enumerate(tests)}

    def note(self, **facts: object) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def pytest_collection_finish(self, session: object) -> None:
        places = {item: self._place(item.nodeid) for item in session.items}
        session.items[:] = sorted((item for item in places if places[item] is not None), key=places.get)

    def _place(self, test: str) -> int | None:
        """Where a test stands among the chosen ones, by itself or with its whole function."""
        found = [self.places[one] for one in (test, test.partition("[")[0]) if one in self.places]
        return min(found, default=None)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(began=nodeid)
        self.started = time.monotonic()

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.failed:
            self.note(failed=report.nodeid, seconds=round(time.monotonic() - self.started, 2))

    def pytest_collectreport(self, report: object) -> None:
        if report.failed:
            self.note(failed=f"the import of {report.nodeid}", seconds=0.0)


def _memory_left() -> float:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) / 1024


def _memory_of(first: int) -> float:
    """MiB of the processes in the namespace of a process, shared pages divided among those who share them."""
    try:
        space, total = os.readlink(f"/proc/{first}/ns/pid"), 0
    except OSError:
        return 0.0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, StopIteration):
            if os.readlink(f"/proc/{name}/ns/pid") == space:
                with open(f"/proc/{name}/smaps_rollup") as file:
                    total += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return total / 1024
