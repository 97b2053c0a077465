"""`hf-compat eject script.py ARGS… DIR` writes the script's run as a plain Lightning project, without this package."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_compat.errors import ArgumentError, HfCompatError, ScriptError
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.text import brief
from hf_compat.tools.commands.isolated import add_options, add_script, call_again
from hf_compat.tools.terminal import say

if TYPE_CHECKING:
    from hf_compat.plan.translate import RunCounts
    from hf_compat.tools.ejection.proof import Proof

WHOLE, LEFT_TO_DO, NOT_WRITTEN = 0, 1, 2


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-compat eject",
        usage="hf-compat eject [-h] [-m] script [ARGS …] DIR",
        description="Write the run of an HF script down as a plain Lightning project, without hf_compat. The first "
        "updates of both are compared. Exit status: 0 the whole run, with equal numbers, 1 something is left to do, or "
        "differs, 2 nothing was written.",
    )
    parser.add_argument(
        "--updates", type=_count, default=None, metavar="N",
        help="updates that are compared; 0: none (default: 5, or where an epoch is short, one more than it has)",
    )  # fmt: skip
    parser.add_argument(
        "--watch", default=None, help=argparse.SUPPRESS
    )  # a file, for the script's side of the comparison
    add_options(parser)
    add_script(parser, "its arguments, then a new or empty folder", "ARGS… DIR")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    chosen = make_parser().parse_args(list(words))
    missing: list[Path] = []
    try:
        if chosen.watch is not None:
            return _watched(chosen)
        if not chosen.arguments:
            raise ArgumentError("No folder was named.\n\nHint: `hf-compat eject SCRIPT [arguments] DIR`.")
        *arguments, target = chosen.arguments
        if target.startswith("-"):
            raise ArgumentError(f"The last word is {target!r}, not a folder.\n\nHint: `hf-compat eject SCRIPT … DIR`.")
        # Make the project's folder, so that it stays real in the isolation. An empty one is removed again
        folder = Path(local_path("DIR", target)).absolute()
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        if missing:
            folder.mkdir(parents=True)
        is_ready = folder.is_dir() and not any(folder.iterdir())
        status = call_again("eject", words, chosen, chosen.script, (str(folder),)) if is_ready else None
        return _ejected(chosen, arguments, folder) if status is None else status
    except HfCompatError as error:
        say(str(error))
        return (error.status if isinstance(error, ScriptError) else 0) or NOT_WRITTEN
    finally:
        for one in missing:
            with contextlib.suppress(OSError):  # the project is in it
                one.rmdir()


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{brief(text)} is not a number of updates")
    return int(text)


def _watched(chosen: argparse.Namespace) -> int:
    """Run the script for some updates, for a comparison with its project."""
    from hf_compat.tools.ejection.proof import train_and_watch
    from hf_compat.tools.until_train import UserScript, run_until_train

    result = Path(chosen.watch)
    script = UserScript(path=chosen.script, arguments=tuple(chosen.arguments), is_module=chosen.module)
    overrides = {"output_dir": str(result.parent / "output"), "push_to_hub": False, "report_to": []}
    run_until_train(script, lambda captured: train_and_watch(captured, chosen.updates, result), overrides)
    return WHOLE


def _ejected(chosen: argparse.Namespace, arguments: Sequence[str], folder: Path) -> int:
    from hf_compat.interop.user_script import require_script
    from hf_compat.runtime.launch import environment
    from hf_compat.tools.ejection.project import check_folder, eject
    from hf_compat.tools.ejection.proof import prove, updates_to_watch
    from hf_compat.tools.ejection.recording import Recorder
    from hf_compat.tools.until_train import UserScript, run_until_train

    target = chosen.arguments[-1]
    if not chosen.module:
        require_script(chosen.script, "hf-compat eject SCRIPT [arguments] DIR")
    check_folder(folder)
    say(f"hf-compat eject: {chosen.script} runs up to its first `train()`")
    variables = dict(environment)  # before the script's own changes
    words = [*(["-m"] if chosen.module else []), chosen.script, *arguments]

    def proved(project: Path, counts: RunCounts, inexact: Sequence[str]) -> Proof:
        wanted = updates_to_watch(counts) if chosen.updates is None else chosen.updates
        updates = min(wanted, counts.max_updates)
        say(f"hf-compat eject: the script and the project make {updates} updates each")
        return prove(project, words, variables, updates, inexact)

    recorder = Recorder(Path(chosen.script).resolve().parent if not chosen.module else Path.cwd())
    script = UserScript(path=chosen.script, arguments=tuple(arguments), is_module=chosen.module)
    # The script's output does not belong to the answer, and its own output folder is not made
    with tempfile.TemporaryDirectory() as scratch, recorder.listening(), contextlib.redirect_stdout(sys.stderr):
        ejected = run_until_train(
            script,
            lambda captured: eject(captured, recorder, chosen.script, folder, None if chosen.updates == 0 else proved),
            {"output_dir": f"{scratch}/output", "push_to_hub": False},
        )
    lines = [f"written: {target}", f"proof: {ejected.proof.told}", *(f"  {file}" for file in ejected.files)]
    lines += [f"note: {note}" for note in ejected.notes]
    lines.append(f"run it: cd {target} && python main.py fit --config config.yaml")
    lines += [f"left to do: {len(ejected.todos)}", *(f"  {todo}" for todo in ejected.todos)] if ejected.todos else []
    print(*lines, sep="\n")  # noqa: T201 - the command's answer
    return WHOLE if ejected.proof.holds and not ejected.todos else LEFT_TO_DO
