"""`hf-compat`: the command line, a function for each command. Text in, text out.

A command imports what it needs: each process of `hf-compat run` passes through here, its launcher too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_compat.errors import ArgumentError, HfCompatError

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments
    from hf_compat.plan.explain import Explanation

    # what `add_subparsers` returns; argparse has no public name for it
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


# Commands in files of their names, which read their own words.
_OF_THEIR_OWN = {
    "check": "find what would go wrong in a script's training, without training",
    "compare": "run a script under transformers and here, and say where they differ, if they do",
    "migrate": "rewrite scripts of any release of transformers: a diff, or --write",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["run"]:  # errors of a script are its own, and shown as Python shows them
        from hf_compat.cli.run import main as run_script

        return run_script(words[1:])
    try:
        return _run(words)
    except HfCompatError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the command's answer
        return 2


def _run(words: list[str]) -> int:
    from hf_compat.cli.sections import COMMANDS

    first = words[0] if words else None
    if first in COMMANDS:
        from hf_compat.cli.fit import main as run_configuration

        return run_configuration(first, words[1:])
    if first in _OF_THEIR_OWN:
        run_command: Callable[[list[str]], int] = importlib.import_module(f"hf_compat.cli.{first}").main
        return run_command(words[1:])
    chosen = make_parser().parse_args(words)
    execute: Callable[[argparse.Namespace], int] = chosen.execute
    return execute(chosen)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; `fit` and its like, `run` and `compare` read their own words."""
    from hf_compat.cli.sections import COMMANDS

    parser = argparse.ArgumentParser(prog="hf-compat", description="HF training scripts on Lightning's engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_explain, _add_document, _add_convert, _add_seal, _add_plot):
        add(commands)
    for name, meaning in COMMANDS.items():
        commands.add_parser(name, help=f"{meaning}, as a configuration says", add_help=False)
    commands.add_parser("run", help="run an HF script, unchanged; --devices N on several processes", add_help=False)
    for name, meaning in _OF_THEIR_OWN.items():
        commands.add_parser(name, help=meaning, add_help=False)
    return parser


def _add_explain(commands: Commands) -> None:
    parser = commands.add_parser("explain", help="say what training arguments become, without starting anything")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--world-size", type=int, help="as if so many processes were launched; no GPU is needed")
    parser.add_argument("--per-node", type=int, default=8, help="processes of a machine (default: 8)")
    parser.add_argument("--compat", choices=("4", "5"), help="generation of transformers whose defaults count")
    parser.add_argument("--parameters", type=float, help="of the model, 7e9 say: adds memory, traffic, checkpoints")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="name=value", help="e.g. bf16=true max_steps=10")
    parser.set_defaults(execute=_explain)


def _add_document(commands: Commands) -> None:
    parser = commands.add_parser("document", help="write the page on arguments from the code's tables")
    parser.add_argument("path", help="where the page goes")
    parser.set_defaults(execute=_document)


def _add_convert(commands: Commands) -> None:
    parser = commands.add_parser("convert", help="convert a checkpoint: HF folder, Lightning .ckpt, ZeRO or DCP shards")
    parser.add_argument("source", help="a .ckpt file, an HF checkpoint folder, or a folder of shards")
    parser.add_argument("target", help="a new .ckpt file or folder; nothing is overwritten")
    parser.add_argument("--keep-names", action="store_true", help="leave the weights' names as shards have them")
    parser.set_defaults(execute=_convert)


def _add_seal(commands: Commands) -> None:
    parser = commands.add_parser("seal", help="check a checkpoint that was edited, and write its manifest anew")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a checkpoint-N folder")
    parser.set_defaults(execute=_seal)


def _add_plot(commands: Commands) -> None:
    parser = commands.add_parser("plot", help="draw the curves of runs, finished or under way, as PNG and HTML page")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output folder (or name=folder)")
    parser.add_argument("-o", "--output", default="curves", help="path of the files, without suffix (default: curves)")
    parser.add_argument("--kind", choices=("png", "html", "both"), default="both", help="what is written")
    parser.add_argument("--by", choices=("step", "epoch"), default="step", help="what the curves run along")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="draw again every so often until the runs end")
    parser.set_defaults(execute=_plot)


def _explain(chosen: argparse.Namespace) -> int:
    explanation = _explanation(chosen)
    print(explanation.to_json() if chosen.json else explanation)  # noqa: T201 - the command's answer
    return 0 if explanation.plan is not None else 1


def _explanation(chosen: argparse.Namespace) -> Explanation:
    from hf_compat.plan.explain import explain
    from hf_compat.runtime.launch import Launch, assuming

    world = chosen.world_size
    launch = Launch(world_size=world or 1, local_world_size=min(chosen.per_node, world or 1))
    for name, count in (("--world-size", world), ("--per-node", chosen.per_node)):
        if count is not None and count < 1:
            raise ArgumentError(f"`{name} {count}` is no number of processes.\n\nHint: write 1 or more.")
    pairs = [*chosen.arguments, *([] if chosen.compat is None else [f"compat={chosen.compat}"])]
    with assuming(launch, "cuda:0") if world else contextlib.nullcontext():
        explanation = explain(_training_arguments(pairs), parameters=chosen.parameters)
    given = _names_today(chosen.arguments)
    listed = tuple(argument for argument in explanation.arguments if argument.name in given)
    return dataclasses.replace(explanation, arguments=listed)


def _names_today(pairs: Sequence[str]) -> set[str]:
    """Return the names of the arguments that somebody set, as they are today; others follow from them."""
    from hf_compat.cli.sections import todays_values
    from hf_compat.hf.legacy import OLD_NAMES

    names: set[str] = set()
    for pair in pairs:
        name, _, text = pair.lstrip("-").partition("=")
        names |= set(todays_values(name, _value(text))) if name in OLD_NAMES else {name}
    return names


def _training_arguments(pairs: Sequence[str]) -> TrainingArguments:
    """Make training arguments from the words `name=value` of a command line."""
    from hf_compat.hf.arguments import TrainingArguments
    from hf_compat.hf.arguments_seq2seq import Seq2SeqTrainingArguments
    from hf_compat.plan.argument_support import SEQ2SEQ_ROWS

    values: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.lstrip("-").partition("=")
        if not equals:
            raise ArgumentError(f"{pair!r} is no name=value.\n\nHint: write e.g. learning_rate=1e-4.")
        values[name] = _value(text)
    kind = Seq2SeqTrainingArguments if SEQ2SEQ_ROWS.keys() & values.keys() else TrainingArguments
    return kind(**values)  # type: ignore[arg-type]  # it checks the values itself


def _value(text: str) -> object:
    """Read a value as JSON where it is, else as a string."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (json.JSONDecodeError, RecursionError):
        return text


def _document(chosen: argparse.Namespace) -> int:
    from hf_compat.cli.document import arguments_page

    Path(chosen.path).write_text(arguments_page(), encoding="utf-8")
    print(f"written: {chosen.path}")  # noqa: T201 - the command's answer
    return 0


def _convert(chosen: argparse.Namespace) -> int:
    from hf_compat.checkpoint.convert import convert

    print(convert(chosen.source, chosen.target, keep_names=chosen.keep_names))  # noqa: T201 - the command's answer
    return 0


def _seal(chosen: argparse.Namespace) -> int:
    from hf_compat.checkpoint.edits import seal_edited

    for folder in chosen.folders:
        print(seal_edited(folder))  # noqa: T201 - the command's answer
    return 0


def _plot(chosen: argparse.Namespace) -> int:
    from hf_compat.cli.plot import plot

    for file in plot(chosen.runs, chosen.output, chosen.kind, chosen.by, chosen.watch):
        print(f"written: {file}")  # noqa: T201 - the command's answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
