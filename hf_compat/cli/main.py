"""The command line `hf-compat`.

Each command imports its own modules only, because every process of `hf-compat run` imports this module.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from hf_compat import __version__
from hf_compat.errors import ArgumentError, HfCompatError, MissingPackage
from hf_compat.runtime.text import brief, did_you_mean, is_installed

_CONFIGURED = ("fit", "validate", "test", "predict")
# The commands in `--help`, grouped by purpose.
_GROUPS = {
    "run and train": {
        "run": "run an HF script unchanged; --devices N on several processes",
        "fit": "train as a YAML configuration says",
        "validate": "evaluate saved weights on the evaluation data",
        "test": "evaluate saved weights on the test data",
        "predict": "write the predictions of saved weights to predictions.npz",
    },
    "before and after a move": {
        "doctor": "read scripts: what would differ silently, what would fail, what is fine",
        "check": "find what would go wrong in a script's training, without training",
        "compare": "run a script under transformers and here, and show the first difference",
        "migrate": "rewrite scripts of any release of transformers: a diff, or --write",
        "eject": "write a script's run as a plain Lightning project",
        "explain": "show what training arguments, or those of a script, become",
    },
    "checkpoints": {
        "convert": "convert a checkpoint: HF folder, Lightning .ckpt, ZeRO or DCP shards",
        "seal": "check a checkpoint that was edited, and write its manifest again",
        "upload": "copy a run's output folder to an object store",
    },
    "curves": {"plot": "draw the curves of runs as a picture and as a web page"},
    "shell and editor": {
        "completion": "print a script that completes commands and options in bash or zsh",
        "schema": "print the JSON schema of a YAML configuration",
    },
}
# They read sources, and need neither torch nor what needs it
_ONLY_READING = ("doctor", "migrate")
COMMANDS = [name for names in _GROUPS.values() for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and give its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in ([], ["help"]):
        words = [*words[1:2], "--help"]
    try:
        if words[0] in COMMANDS and words[0] not in _ONLY_READING and not is_installed("torch"):
            raise MissingPackage(
                f"`hf-compat {words[0]}` needs torch. Only {' and '.join(_ONLY_READING)} do without.\n\n"
                "Hint: install this package with its dependencies, `pip install -e .` in a clone.",
                name="torch",
            )
        if words[0] != "run":
            return _run(words)
    except HfCompatError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the command's answer
        return 2
    from hf_compat.cli.run import main as run_script  # Python shows the errors of a script

    return run_script(words[1:])


def _run(words: list[str]) -> int:
    first = words[0]
    if first not in COMMANDS and not first.startswith("-"):
        hint = did_you_mean(first, COMMANDS, "`hf-compat help` lists the commands.")
        raise ArgumentError(f"{brief(first)} is not a command of hf-compat.\n\nHint: {hint}")
    if first.startswith("-"):
        parser = make_parser()
        parser.parse_args(words)  # ends the process after help, the version or an unknown option
        parser.error("name a command")
    run_command: Callable[..., int] = module_of(first).main
    return run_command(*_named(first), words[1:])


def _named(command: str) -> list[str]:
    """The arguments that a module needs which has several commands."""
    return [command] if command in _CONFIGURED else []


def module_of(command: str) -> ModuleType:
    """Import the module of a command. It has `make_parser` and `main`."""
    if command in _CONFIGURED:
        return importlib.import_module("hf_compat.cli.fit")
    room = "cli" if command in ("run", "completion", "schema") else "tools.commands"
    return importlib.import_module(f"hf_compat.{room}.{command}")


def parser_of(command: str) -> argparse.ArgumentParser:
    """Make the parser of a command."""
    parser: argparse.ArgumentParser = module_of(command).make_parser(*_named(command))
    return parser


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the options before a command. Its help names all commands."""
    listed = "\n\n".join(
        "\n".join([f"{group}:", *(f"  {name:<12}{meaning}" for name, meaning in names.items())])
        for group, names in _GROUPS.items()
    )
    parser = argparse.ArgumentParser(
        prog="hf-compat",
        usage="hf-compat COMMAND …",
        description=f"HF training scripts on Lightning's engine.\n\n{listed}",
        epilog="`hf-compat help COMMAND` describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hf-compat {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
