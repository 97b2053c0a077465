"""The two sides of a comparison, and a run of the script on one of them in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_compat.errors import ArgumentError
from hf_compat.hf.arguments_rules import VARIABLE
from hf_compat.interop import user_script
from hf_compat.runtime.launch import environment
from hf_compat.runtime.text import pip_install
from hf_compat.tools.isolation.isolated import Isolation, command, shortage
from hf_compat.tools.until_train import UserScript

# Asks an interpreter for its packages, without importing transformers.
_QUESTION = (
    "import importlib.metadata as m, json\n"
    "def of(n):\n"
    "    try: return m.version(n)\n"
    "    except m.PackageNotFoundError: return ''\n"
    "print(json.dumps([of('transformers'), of('torch')]))"
)
_SECONDS = 60  # for the answer, because a first start on a slow disk takes some
_CHILD = Path(__file__).with_name("child") / "main.py"
_LOOK_EVERY_SECONDS = 0.2
_TIME_TO_END_SECONDS = 5.0
# Both processes walk through sets in the same order, and no tracker gets the comparison.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "WANDB_MODE": "disabled", "COMET_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
Progress = Callable[[str, int, int], None]  # the side's name, the training, and its updates so far
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two sides that run the script."""

    name: str
    python: str
    transformers: str


def sides_of(against: str | None) -> tuple[Side, Side]:
    """The side of transformers and that of this package.

    Args:
        against: `PYTHON` or `RELEASE:PYTHON`, an interpreter with transformers. None is this one.

    Raises:
        ArgumentError: It is not an interpreter, lacks transformers, or has another release than named.
    """
    try:
        installed = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ArgumentError(
            "transformers is not installed in this interpreter, and a comparison needs it.\n\n"
            f"Hint: {pip_install('[transformers]')}"
        ) from None
    python, found = sys.executable, installed
    if against is not None:
        head, colon, rest = against.partition(":")
        is_release = bool(colon) and head.replace(".", "").isdigit()
        release, named = (head, rest) if is_release else ("", against)
        path = shutil.which(named) or shutil.which(os.path.expanduser(named))
        if path is None:
            raise ArgumentError(
                f"`--against {against}`: there is no interpreter {named!r}.\n\n"
                "Hint: the path of a Python that has transformers, `--against 4.57:old/bin/python` say."
            )
        python = os.path.abspath(path)
        try:
            done = subprocess.run(
                [python, "-c", _QUESTION], capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
            )
            found, torch = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise ArgumentError(
                f"`--against {against}`: {python} does not answer as a Python interpreter does.\n\n"
                "Hint: give the path of the interpreter itself, `env/bin/python`."
            ) from error
        if not (found and torch):
            lacking = "transformers" if not found else "torch"
            raise ArgumentError(
                f"`--against {against}`: {python} has no {lacking}.\n\nHint: {python} -m pip install {lacking}"
            )
        if release and not f"{found}.".startswith(f"{release}."):
            raise ArgumentError(
                f"`--against {against}`: {python} has transformers {found}, not {release}.\n\n"
                "Hint: leave the release out to take what is there."
            )
    return (
        Side(name="transformers", python=python, transformers=found),
        Side(name="hf_compat", python=sys.executable, transformers=installed),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a run."""

    max_steps: int = 20  # updates of each training. 0 runs all
    timeout_seconds: float | None = None  # time after which a side is ended. None waits
    devices: int = 1


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
) -> tuple[int, str]:
    """Run the script on one side. Return its status, and `timeout` or `interrupt` if this process ended it."""
    (folder / "record").mkdir(parents=True)
    plan = isolation.begin(str(folder), True, tell)
    settings = {
        "engine": side.name,
        "script": script.path if script.is_module else plan.inside(script.path),
        "arguments": list(script.arguments),
        "is_module": script.is_module,
        "max_steps": limits.max_steps,
        "record_folder": str(folder / "record"),
        "output_folder": str(folder / "output"),
        "user_script": user_script.__file__,
    }
    file = folder / "settings.json"
    file.write_text(json.dumps(settings))
    variables = {**_ENVIRONMENT, **environment}
    if compat is not None and side.name == "hf_compat":
        variables[VARIABLE] = compat
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(limits.devices)]
    words = [side.python, *(launcher if limits.devices > 1 else []), str(_CHILD), str(file)]
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(
            command(plan, words), env=variables,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        ended_by = _watch(process, folder / "record" / "record-0.jsonl", side.name, limits, progress)
    if process.returncode and shortage(str(folder)):
        tell(shortage(str(folder)))
    file.unlink()  # the script's arguments may hold secrets
    return process.returncode, ended_by


def _watch(process: subprocess.Popen[bytes], record: Path, name: str, limits: Limits, progress: Progress | None) -> str:
    """Wait for the end of a side and report its progress. Returns how this process has ended it, if it has."""
    deadline = math.inf if limits.timeout_seconds is None else time.monotonic() + limits.timeout_seconds
    try:
        while True:
            is_over = process.poll() is not None
            if progress is not None:
                *before, last = (record.read_bytes() if record.exists() else b"").split(b'{"kind": "train"')
                progress(name, len(before), last.count(b'{"kind": "update"'))
            if is_over or time.monotonic() > deadline:
                return "" if is_over else "timeout"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_EVERY_SECONDS)
    except KeyboardInterrupt:
        return "interrupt"
    finally:
        # End it with all processes that it has started
        for sent in (signal.SIGTERM, signal.SIGKILL) if process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TIME_TO_END_SECONDS)
                break
