"""`hf-compat eject script.py ARGS… DIR`: the script's run as a plain Lightning project, without this package."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_compat.errors import ArgumentError, HfCompatError, ScriptError
from hf_compat.tools.commands.isolated import add_options, call_again

WHOLE, LEFT_TO_DO, NOT_WRITTEN = 0, 1, 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-compat eject",
        usage="hf-compat eject [-h] [-m] script [ARGS …] DIR",
        description="Write the run of an HF script down as a plain Lightning project, without hf_compat. Exit status: "
        "0 the whole run, 1 something is left to do, 2 nothing was written.",
    )
    add_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as in `python -m`")
    parser.add_argument("script", help="the script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGS… DIR", help="its arguments, then a new or empty folder"
    )
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    chosen = make_parser().parse_args(list(words))
    with _made(chosen.arguments[-1] if chosen.arguments else "-") as made:
        status = call_again("eject", words, chosen, chosen.script, made) if made else None  # it refuses the folder
    return _ejected(chosen) if status is None else status


def _ejected(chosen: argparse.Namespace) -> int:
    """Run the script and write its project; returns the exit status."""
    try:
        from hf_compat.interop.user_script import require_script
        from hf_compat.tools.ejection.project import check_folder, eject
        from hf_compat.tools.ejection.recording import Recorder
        from hf_compat.tools.until_train import UserScript, run_until_train

        if not chosen.arguments:
            raise ArgumentError("No folder was named.\n\nHint: `hf-compat eject SCRIPT [arguments] DIR`.")
        *arguments, target = chosen.arguments
        if target.startswith("-"):
            raise ArgumentError(f"The last word is {target!r}, and no folder.\n\nHint: `hf-compat eject SCRIPT … DIR`.")
        if not chosen.module:
            require_script(chosen.script, "hf-compat eject SCRIPT [arguments] DIR")
        folder = Path(target).absolute()
        check_folder(folder)
        _say(f"hf-compat eject: {chosen.script} runs up to its first `train()`")
        recorder = Recorder(Path(chosen.script).resolve().parent if not chosen.module else Path.cwd())
        script = UserScript(path=chosen.script, arguments=tuple(arguments), is_module=chosen.module)
        # what the script prints is no part of the answer, and its own output folder is not made
        with tempfile.TemporaryDirectory() as scratch, recorder.listening(), contextlib.redirect_stdout(sys.stderr):
            ejected = run_until_train(
                script,
                lambda captured: eject(captured, recorder, chosen.script, folder),
                {"output_dir": f"{scratch}/output", "push_to_hub": False},
            )
        print(f"written: {target}")  # noqa: T201 - the command's answer
        for file in ejected.files:
            print(f"  {file}")  # noqa: T201 - the command's answer
        for note in ejected.notes:
            print(f"note: {note}")  # noqa: T201 - the command's answer
        print(f"run it: cd {target} && python main.py fit --config config.yaml")  # noqa: T201 - the command's answer
        if ejected.todos:
            print(f"left to do: {len(ejected.todos)}")  # noqa: T201 - the command's answer
        for todo in ejected.todos:
            print(f"  {todo}")  # noqa: T201 - the command's answer
        return LEFT_TO_DO if ejected.todos else WHOLE
    except ScriptError as error:
        _say(str(error))
        return error.status or NOT_WRITTEN
    except HfCompatError as error:
        _say(str(error))
        return NOT_WRITTEN


@contextlib.contextmanager
def _made(target: str) -> Iterator[tuple[str, ...]]:
    """Make the project's folder, so that it stays real where nothing else does; one that is left empty goes again."""
    path = Path(target).absolute()
    is_named = not target.startswith("-")  # where it is not, the command says so
    missing = [one for one in (path, *path.parents) if is_named and not one.exists()]
    if missing:
        path.mkdir(parents=True)
    try:
        yield (str(path),) if is_named and path.is_dir() and not any(path.iterdir()) else ()
    finally:
        for one in missing:
            with contextlib.suppress(OSError):  # the project is in it
                one.rmdir()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the command's answer
