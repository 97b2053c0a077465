"""Commands that run a user's script call themselves once more, in isolation from the user's files."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from hf_compat.errors import ScriptError
from hf_compat.tools.isolation.isolated import COPY_LIMIT_GIB, command, offered, shortage
from hf_compat.tools.isolation.plan import VARIABLE, Plan
from hf_compat.tools.isolation.written import files_below, in_words, is_of_the_command

_OF_LAUNCHERS = ("RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which files a script may change after all."""
    parser.add_argument(
        "--allow-writes", metavar="FOLDER", action="append", default=[], help="stays real to the script"
    )
    parser.add_argument(
        "--copy-limit", metavar="GIB", type=float, default=COPY_LIMIT_GIB,
        help=f"copied at most, where the system offers no overlay ({COPY_LIMIT_GIB:g})",
    )  # fmt: skip


def call_again(
    name: str, words: Sequence[str], chosen: argparse.Namespace, script: str, open_to: tuple[str, ...] = ()
) -> int | None:
    """Run a command in isolation, and return its exit status; None where this process is isolated, or need not be.

    Args:
        name: The command.
        words: Its words.
        chosen: What they say.
        script: The script, or a module's name.
        open_to: Folders that stay real, beside those that the user names.
    """
    variables = os.environ  # noqa: TID251 - runtime/launch.py imports torch, and this process leaves that to the other one
    is_run = chosen.module or (os.path.exists(script) and not script.endswith(".ipynb"))  # else the command says why
    if VARIABLE in variables or not is_run:
        return None
    if any(one in variables for one in _OF_LAUNCHERS):
        _say("isolation: none: a launcher has started this process; `--devices N` starts isolated ones")
        return None
    try:
        folder = os.path.realpath(tempfile.mkdtemp(prefix=f"hf_compat_{name}_"))
    except OSError as error:
        raise ScriptError(f"There is no room for what a script writes: {error}\n\nHint: set TMPDIR.") from error
    try:
        isolation = offered(folder, (*chosen.allow_writes, *open_to), chosen.copy_limit)
        _say(isolation.told)
        plan = isolation.begin(folder, False, _say)
        inner = [plan.inside(one) if one == script else one for one in words]
        status = _status_of(command(plan, [sys.executable, "-m", "hf_compat", name, *inner]))
        own = (os.path.realpath(os.getcwd()), os.path.dirname(os.path.realpath(script)))
        written = [path for path in files_below(plan.in_folder("files")) if is_of_the_command(path, own)]
        if written:
            _say(f"not kept, with the isolation: {in_words(written)} (`--allow-writes FOLDER` keeps a folder's)")
        if status and shortage(folder):
            _say(shortage(folder))
        return status
    finally:
        Plan(folder=folder, working_folder="").remove()


def _status_of(words: list[str]) -> int:
    """Run a command, hand on what it answers, and return its exit status, as a shell tells it."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout or ():
                print(line, end="")  # noqa: T201 - the command's answer
            status = process.wait()
        except KeyboardInterrupt:  # a terminal has told the command, too
            process.terminate()
            process.wait()
            raise
    return status if status >= 0 else 128 - status


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the command's answer
