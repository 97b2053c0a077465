"""A fork of the warm process becomes a Python that has just started, and runs a command."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import importlib
import importlib.machinery
import inspect
import os
import random
import runpy
import signal
import sys
import threading
import traceback
import warnings
from types import ModuleType

from warm_python.imports import Guests, Loaded

# Variables that a package has read while it was imported, and a fork sets by itself or does not depend on.
SET_HERE = {"OMP_NUM_THREADS", "RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "JSM_NAMESPACE_RANK"}
OF_NO_EFFECT = {
    "PATH", "TERM", "COLUMNS", "LINES", "PWD", "OLDPWD", "SHLVL", "_", "PYTEST_CURRENT_TEST", "WANDB_MODE",
    "PYTHONHASHSEED",  # forks walk through sets in the same order, whatever it says
}  # fmt: skip
# Variables of Python itself that a fork obeys.
OBEYED = {"PYTHONPATH", "PYTHONWARNINGS", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
READ_BY_PYTHON = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "KMP_", "MKL_", "OPENBLAS_", "GOMP_", "TZ")
DEFAULT_FILTERS = 5  # of Python's own; `-W` comes before these, and packages put theirs before both


class Command:
    """What follows `python` in a command line.

    Attributes:
        kind: `-c`, `-m`, or empty for a script; None for a command that a fork does not understand.
        target: Code, module or script.
        arguments: What is left.
    """

    def __init__(self, words: list[str]) -> None:
        self.kind: str | None = None
        self.target, self.arguments = "", []
        self.warnings: list[str] = []
        self.unbuffered = self.is_safe = False
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word in ("-c", "-m") and rest:
                self.kind, self.target, self.arguments = word, rest[0], rest[1:]
                return
            if word == "-u":
                self.unbuffered = True
            elif word == "-P":
                self.is_safe = True
            elif word == "-W" and rest:
                self.warnings.append(rest.pop(0))
            elif not word.startswith("-"):
                self.kind, self.target, self.arguments = "", word, rest
                return
            else:
                return

    @property
    def folders(self) -> list[str]:
        """Where it looks for modules first."""
        if self.is_safe:
            return []
        if self.kind == "":
            return [os.path.dirname(os.path.realpath(self.target))]
        return [os.getcwd() if self.kind == "-m" else ""]


def why_real(facts: dict, loaded: Loaded) -> str:
    """Why a command needs the real interpreter; empty where a fork does the same."""
    try:
        with open(f"/proc/{facts['process']}/status") as file:
            is_restricted = "NoNewPrivs:\t1" in file.read()
        if is_restricted or _space(facts["process"], "user") != _space("self", "user"):
            return "another's rights to change files"
    except OSError:
        return "the client is gone"
    command, asked = Command(facts["words"]), facts["environment"]
    if command.kind is None:
        return "an option that a fork does not understand"
    if command.kind == "" and not os.path.isfile(os.path.join(facts["folder"], command.target)):
        return "not a file"
    own = {name for name in {*asked, *os.environ} if name.startswith(READ_BY_PYTHON)} - OBEYED
    for name in sorted((own | loaded.read) - SET_HERE - OF_NO_EFFECT):
        if asked.get(name) not in (loaded.before.get(name), loaded.after.get(name, loaded.before.get(name))):
            return f"another {name} than at the start"
    places = [one for one in asked.get("PYTHONPATH", "").split(os.pathsep) if one]
    for place in [*places, *command.folders]:
        if hiding := _hides(os.path.join(facts["folder"], place), loaded):
            return f"{hiding} in {place}"
    return ""


def _hides(folder: str, loaded: Loaded) -> str:
    """Name a module in a folder that Python would take in place of an imported one."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.partition(".")[0]
            module = sys.modules.get(name) or loaded.hidden.get(name)
            is_module = entry.name in (name, f"{name}.py") and (entry.is_dir() or entry.name.endswith(".py"))
            if is_module and name in ("sitecustomize", "usercustomize"):
                return name
            if not is_module or module is None or name == "__main__":
                continue
            if entry.is_dir() and not os.path.exists(os.path.join(entry.path, "__init__.py")):
                continue
            origin = getattr(module, "__file__", None)
            if origin is None or not os.path.realpath(origin).startswith(os.path.realpath(entry.path)):
                return name
    return ""


def become(facts: dict, streams: list[int], loaded: Loaded) -> None:
    """Run a client's command in this fork, and end."""
    status = 1
    try:
        command = Command(facts["words"])
        _take_place(facts, streams, loaded)
        _take_options(command)
        _forget_the_start(facts)
        sys.meta_path.insert(0, Guests(loaded.hidden))
        places = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
        sys.path[:] = [*command.folders, *map(os.path.abspath, places), *loaded.path]
        importlib.invalidate_caches()
        status = _status_of(command)
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status & 0xFF)


def _space(process: int | str, kind: str) -> str:
    return os.readlink(f"/proc/{process}/ns/{kind}")


def _enter_mounts_of(process: int) -> None:
    """See the file system that the client sees: it may be in an isolation."""
    if _space(process, "mnt") == _space("self", "mnt"):
        return
    root = os.open(f"/proc/{process}/root", os.O_PATH | os.O_DIRECTORY)
    mounts = os.open(f"/proc/{process}/ns/mnt", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(mounts, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.fchdir(root)
    os.chroot(".")
    os.close(root)
    os.close(mounts)


def _take_place(facts: dict, streams: list[int], loaded: Loaded) -> None:
    os.setsid()
    _enter_mounts_of(facts["process"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(facts["folder"])
    os.umask(facts["mask"])
    os.environ.clear()
    os.environ.update({**loaded.after, **facts["environment"]})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in facts["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.executable = facts["executable"]
    os.getppid = lambda: facts["parent"]  # who started the client is the parent that a command knows of


def _take_options(command: Command) -> None:
    unbuffered = command.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)
    sys.stderr.reconfigure(line_buffering=True, write_through=unbuffered)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    asked = [one for one in os.environ.get("PYTHONWARNINGS", "").split(",") if one] + command.warnings
    if asked:
        sys.warnoptions[:] = asked
        kept = warnings.filters[:]
        warnings.filters[:] = []
        warnings._processoptions(asked)
        warnings.filters[:] = [*kept[:-DEFAULT_FILTERS], *warnings.filters, *kept[-DEFAULT_FILTERS:]]
        warnings._filters_mutated()


def _forget_the_start(facts: dict) -> None:
    """Do what packages do at their import with what differs from process to process."""
    import numpy
    import torch
    from lightning.fabric.utilities import rank_zero

    for no_file in ("<string>", "<frozen runpy>"):  # for each such frame `inspect.stack` would search all modules
        inspect.modulesbyfile[os.path.abspath(no_file)] = no_file
    random.seed()
    numpy.random.seed()
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0


def _status_of(command: Command) -> int:
    main = sys.modules["__main__"]  # the same object: packages have kept it
    vars(main).clear()
    vars(main).update(vars(ModuleType("__main__")), __builtins__=builtins, __annotations__={})
    try:
        _run(command, main)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run(command: Command, main: ModuleType) -> None:
    if command.kind == "-m":
        sys.argv = ["-m", *command.arguments]
        sys.modules.pop(command.target, None)
        runpy._run_module_as_main(command.target)
    elif command.kind == "-c":
        sys.argv = ["-c", *command.arguments]
        exec(compile(command.target, "<string>", "exec", dont_inherit=True), vars(main))
    else:
        sys.argv = [command.target, *command.arguments]
        path = os.path.abspath(command.target)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        vars(main).update(__file__=path, __loader__=loader, __cached__=None)
        with open(path, "rb") as file:
            exec(compile(file.read(), path, "exec", dont_inherit=True), vars(main))
