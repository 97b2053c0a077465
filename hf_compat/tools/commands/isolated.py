"""Common options of commands that run a script, and their second start in isolation from the user's files."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from hf_compat.errors import ScriptError
from hf_compat.runtime.launch import environment, is_launched
from hf_compat.tools.isolation.isolated import COPY_LIMIT_GIB, command, offered, shortage
from hf_compat.tools.isolation.plan import VARIABLE, Plan, files_below, in_words, is_of_the_command
from hf_compat.tools.terminal import say


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about files that a script may change."""
    parser.add_argument(
        "--allow-writes", metavar="FOLDER", action="append", default=[], help="stays real to the script"
    )
    parser.add_argument(
        "--copy-limit", metavar="GIB", type=float, default=COPY_LIMIT_GIB,
        help=f"copied at most, where the system offers no overlay ({COPY_LIMIT_GIB:g})",
    )  # fmt: skip


def add_script(parser: argparse.ArgumentParser, rest: str = "its arguments", metavar: str | None = None) -> None:
    """Add the script and its arguments."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as in `python -m`")
    parser.add_argument("script", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar=metavar, help=rest)


def call_again(
    name: str, words: Sequence[str], chosen: argparse.Namespace, script: str, open_to: tuple[str, ...] = ()
) -> int | None:
    """Run a command in isolation, and give its exit status. None if this process is isolated or need not be."""
    is_run = chosen.module or (os.path.exists(script) and not script.endswith(".ipynb"))  # else the command says why
    if VARIABLE in environment or not is_run:
        return None
    if is_launched():
        say("isolation: none: a launcher has started this process; `--devices N` starts isolated ones")
        return None
    try:
        folder = os.path.realpath(tempfile.mkdtemp(prefix=f"hf_compat_{name}_"))
    except OSError as error:
        raise ScriptError(f"There is no room for what a script writes: {error}\n\nHint: set TMPDIR.") from error
    try:
        isolation = offered(folder, (*chosen.allow_writes, *open_to), chosen.copy_limit)
        say(isolation.told)
        plan = isolation.begin(folder, False, say)
        inner = [plan.inside(one) if one == script else one for one in words]
        started = command(plan, [sys.executable, "-m", "hf_compat", name, *inner])
        with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as process:
            try:
                for line in process.stdout or ():
                    print(line, end="")  # noqa: T201 - the command's answer
                status = process.wait()
            except KeyboardInterrupt:  # a terminal has interrupted the command, too
                process.terminate()
                process.wait()
                raise
        status = status if status >= 0 else 128 - status  # as a shell gives it
        own = (os.path.realpath(os.getcwd()), os.path.dirname(os.path.realpath(script)))
        written = [path for path in files_below(plan.in_folder("files")) if is_of_the_command(path, own)]
        if written:
            say(f"not kept, with the isolation: {in_words(written)} (`--allow-writes FOLDER` keeps a folder's)")
        if status and shortage(folder):
            say(shortage(folder))
        return status
    finally:
        Plan(folder=folder, working_folder="").remove()
