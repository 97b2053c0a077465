"""`hf-compat`: the command line. Text in, text out."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_compat.cli.fit import COMMANDS
from hf_compat.cli.fit import main as run_configuration
from hf_compat.cli.run import main as run_script
from hf_compat.errors import HfCompatError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hf-compat", description="HF training scripts on Lightning's engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="say what training arguments become, without starting anything")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.add_argument("--world-size", type=int, help="as if so many processes were launched; no GPU is needed")
    explain.add_argument("--per-node", type=int, default=8, help="processes of a machine (default: 8)")
    explain.add_argument("--parameters", type=float, help="of the model, 7e9 say: adds memory, traffic, checkpoints")
    explain.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="name=value", help="e.g. bf16=true max_steps=10"
    )
    document = commands.add_parser("document", help="write the page on arguments from the code's tables")
    document.add_argument("path", help="where the page goes")
    convert = commands.add_parser(
        "convert", help="convert a checkpoint: HF folder, Lightning .ckpt, ZeRO or DCP shards"
    )
    convert.add_argument("source", help="a .ckpt file, an HF checkpoint folder, or a folder of shards")
    convert.add_argument("target", help="a new .ckpt file or folder; nothing is overwritten")
    convert.add_argument("--keep-names", action="store_true", help="leave the weights' names as shards have them")
    plot = commands.add_parser("plot", help="draw the curves of runs, finished or under way, as PNG and HTML page")
    plot.add_argument("runs", nargs="+", metavar="RUN", help="output folder (or name=folder)")
    plot.add_argument("-o", "--output", default="curves", help="path of the files, without suffix (default: curves)")
    plot.add_argument("--kind", choices=("png", "html", "both"), default="both", help="what is written")
    plot.add_argument("--by", choices=("step", "epoch"), default="step", help="what the curves run along")
    plot.add_argument("--watch", type=float, metavar="SECONDS", help="draw again every so often until the runs end")
    for name, meaning in COMMANDS.items():
        commands.add_parser(name, help=f"{meaning}, as a configuration says", add_help=False)
    commands.add_parser("run", help="run an HF script, unchanged; --devices N on several processes", add_help=False)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in COMMANDS:
            return run_configuration(words[0], words[1:])
        if words and words[0] == "run":
            return run_script(words[1:])
        chosen = parser.parse_args(words)
        if chosen.command == "explain":
            return _explain(chosen)
        if chosen.command == "plot":
            return _plot(chosen)
        if chosen.command == "convert":
            return _convert(chosen.source, chosen.target, chosen.keep_names)
        return _document(chosen.path)
    except HfCompatError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the command's answer
        return 2


def _explain(chosen: argparse.Namespace) -> int:
    from hf_compat.hf.arguments import TrainingArguments
    from hf_compat.plan.explain import explain
    from hf_compat.runtime.launch import Launch, assuming

    values: dict[str, Any] = {}
    for pair in chosen.arguments:
        name, equals, text = pair.lstrip("-").partition("=")
        if not equals:
            print(f"{pair!r} is no name=value.\n\nHint: write e.g. learning_rate=1e-4.", file=sys.stderr)  # noqa: T201
            return 2
        values[name] = _value(text)
    world = chosen.world_size
    launch = Launch(world_size=world or 1, local_world_size=min(chosen.per_node, world or 1))
    with assuming(launch, "cuda:0") if world else contextlib.nullcontext():
        explanation = explain(TrainingArguments(**values), parameters=chosen.parameters)
    print(explanation.to_json() if chosen.json else explanation)  # noqa: T201 - the command's answer
    return 0 if explanation.plan is not None else 1


def _convert(source: str, target: str, keep_names: bool) -> int:
    from hf_compat.checkpoint.convert import convert

    print(convert(source, target, keep_names=keep_names))  # noqa: T201 - the command's answer
    return 0


def _plot(chosen: argparse.Namespace) -> int:
    from hf_compat.cli.plot import plot

    for file in plot(chosen.runs, chosen.output, chosen.kind, chosen.by, chosen.watch):
        print(f"written: {file}")  # noqa: T201 - the command's answer
    return 0


def _value(text: str) -> Any:
    """Read a value as JSON where it is, else as a string."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return text


def _document(path: str) -> int:
    from hf_compat.cli.document import arguments_page

    Path(path).write_text(arguments_page(), encoding="utf-8")
    print(f"written: {path}")  # noqa: T201 - the command's answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
