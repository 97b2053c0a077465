"""The command line `hf-compat`.

Each command imports its own modules only, because every process of `hf-compat run` imports this module.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence

from hf_compat import __version__
from hf_compat.errors import ArgumentError, HfCompatError
from hf_compat.runtime.text import brief, did_you_mean

# Commands of modules in `hf_compat.tools.commands`, which read their own words.
_TOOLS = ("doctor", "check", "explain", "eject", "compare", "migrate", "plot")
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
    },
    "curves": {"plot": "draw the curves of runs as a picture and as a web page"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and give its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in ([], ["help"]):
        words = [*words[1:2], "--help"]
    if words[:1] == ["run"]:  # Python shows the errors of a script
        from hf_compat.cli.run import main as run_script

        return run_script(words[1:])
    try:
        return _run(words)
    except HfCompatError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the command's answer
        return 2


def _run(words: list[str]) -> int:
    first = words[0]
    known = [name for names in _GROUPS.values() for name in names]
    if first not in known and not first.startswith("-"):
        hint = did_you_mean(first, known, "`hf-compat help` lists the commands.")
        raise ArgumentError(f"{brief(first)} is not a command of hf-compat.\n\nHint: {hint}")
    if first in _TOOLS:  # in isolation they start once more, and only then import torch
        run_command: Callable[[list[str]], int] = importlib.import_module(f"hf_compat.tools.commands.{first}").main
        return run_command(words[1:])
    if first in _CONFIGURED:
        from hf_compat.cli.fit import main as run_configuration

        return run_configuration(first, words[1:])
    chosen = make_parser().parse_args(words)
    if chosen.command == "convert":
        from hf_compat.checkpoint.convert import convert

        answers: Iterable[str] = [convert(chosen.source, chosen.target, keep_names=chosen.keep_names)]
    else:
        from hf_compat.checkpoint.judging import seal_edited

        answers = map(seal_edited, chosen.folders)
    for answer in answers:
        print(answer)  # noqa: T201 - the command's answer
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of `convert` and `seal`, whose help names all commands."""
    listed = "\n\n".join(
        "\n".join([f"{group}:", *(f"  {name:<10}{meaning}" for name, meaning in names.items())])
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
    commands = parser.add_subparsers(
        prog="hf-compat", dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS
    )
    meanings = _GROUPS["checkpoints"]
    convert = commands.add_parser("convert", description=meanings["convert"])
    convert.add_argument("source", help="a .ckpt file, an HF checkpoint folder, or a folder of shards")
    convert.add_argument("target", help="a new .ckpt file or folder; nothing is overwritten")
    convert.add_argument("--keep-names", action="store_true", help="leave the weights' names as shards have them")
    seal = commands.add_parser("seal", description=meanings["seal"])
    seal.add_argument("folders", nargs="+", metavar="FOLDER", help="a checkpoint-N folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
