"""One side of a comparison is run: a process of its own, watched, stopped with this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_compat.hf.arguments_rules import VARIABLE
from hf_compat.interop import user_script
from hf_compat.runtime.launch import environment_with
from hf_compat.tools.comparison.sides import Side
from hf_compat.tools.isolation.isolated import Isolation, command, shortage
from hf_compat.tools.isolation.plan import Plan
from hf_compat.tools.until_train import UserScript

_CHILD = Path(__file__).with_name("child") / "main.py"
_LOOK_EVERY_SECONDS = 0.2
_TIME_TO_END_SECONDS = 5.0
# No set is walked through in another order in the other process, and no tracker is told of a comparison.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "WANDB_MODE": "disabled", "COMET_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
Progress = Callable[[str, int, int], None]  # side's name, training, updates done in it
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far a side is run.

    Args:
        max_steps: Updates of each training; 0 is as the script says.
        timeout_seconds: Until a side is ended; None waits.
        devices: Processes.
    """

    max_steps: int = 20
    timeout_seconds: float | None = None
    devices: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRun:
    """What a side has left.

    Args:
        side: Which.
        folder: Its folder: `record/`, `output/`, `files/`, `log.txt`.
        status: Exit status of its process; negative for a signal.
        ended_by: `""`, `timeout` or `interrupt`, where this process ended it.
    """

    side: Side
    folder: Path
    status: int
    ended_by: str = ""

    @property
    def log(self) -> Path:
        """What it has printed."""
        return self.folder / "log.txt"


def run_side(
    side: Side,
    script: UserScript,
    folder: Path,
    limits: Limits,
    isolation: Isolation,
    *,
    compat: str | None = None,
    progress: Progress | None = None,
    tell: Tell = print,
) -> SideRun:
    """Run the script on one side, to its end.

    Args:
        side: Which.
        script: What is run.
        folder: The side's folder; made here.
        limits: How far.
        isolation: Of the user's files from the script.
        compat: Generation of transformers whose defaults count here.
        progress: Told whenever updates were done.
        tell: Told of files that are copied.

    Returns:
        What it left, also where it failed or was ended.
    """
    (folder / "record").mkdir(parents=True)
    plan = isolation.begin(str(folder), True, tell)
    settings = folder / "settings.json"
    settings.write_text(json.dumps(_settings(side, script, folder, limits, plan)))
    environment = environment_with(_ENVIRONMENT)
    if compat is not None and side.name == "hf_compat":
        environment[VARIABLE] = compat
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(
            command(plan, _command(side, settings, limits.devices)), env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        ended_by = _watch(process, folder / "record" / "record-0.jsonl", side.name, limits, progress)
    if process.returncode and shortage(str(folder)):
        tell(shortage(str(folder)))
    settings.unlink()  # the script's words may hold secrets
    return SideRun(side=side, folder=folder, status=process.returncode, ended_by=ended_by)


def script_folder_of(script: UserScript) -> str:
    """Return the folder that a script lies in; a module's is where the command was given."""
    return os.getcwd() if script.is_module else os.path.dirname(os.path.abspath(script.path))


def _settings(side: Side, script: UserScript, folder: Path, limits: Limits, plan: Plan) -> dict[str, object]:
    return {
        "engine": side.name,
        "script": script.path if script.is_module else plan.inside(script.path),
        "arguments": list(script.arguments),
        "is_module": script.is_module,
        "max_steps": limits.max_steps,
        "record_folder": str(folder / "record"),
        "output_folder": str(folder / "output"),
        "user_script": user_script.__file__,
    }


def _command(side: Side, settings: Path, devices: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(devices)]
    return [side.python, *(launcher if devices > 1 else []), str(_CHILD), str(settings)]


def _watch(process: subprocess.Popen[bytes], record: Path, name: str, limits: Limits, progress: Progress | None) -> str:
    """Wait for a side's end, telling its progress; returns by what this process has ended it, if it has."""
    deadline = None if limits.timeout_seconds is None else time.monotonic() + limits.timeout_seconds
    ended_by = ""
    try:
        for training, updates in _counts(process, record):
            if progress is not None:
                progress(name, training, updates)
            if deadline is not None and time.monotonic() > deadline:
                ended_by = "timeout"
                break
    except KeyboardInterrupt:
        ended_by = "interrupt"
    finally:
        if process.poll() is None:
            _end(process)
    return ended_by


def _counts(process: subprocess.Popen[bytes], record: Path) -> Iterator[tuple[int, int]]:
    """Yield the training and its updates, again and again until the process ends."""
    read, training, updates = 0, 0, 0
    while True:
        is_over = process.poll() is not None
        if record.exists():
            with open(record, "rb") as file:
                file.seek(read)
                new = file.read()
            whole = new.rfind(b"\n") + 1
            read += whole
            for line in new[:whole].splitlines():
                if line.startswith(b'{"kind": "train"'):
                    training, updates = training + 1, 0
                updates += line.startswith(b'{"kind": "update"')
        yield training, updates
        if is_over:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_EVERY_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a side with all processes that it has started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TIME_TO_END_SECONDS)
            return
