"""`hf-compat convert` converts a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-compat convert",
        description="Convert a checkpoint: an HF folder, Lightning's .ckpt, ZeRO or DCP shards. Exit status: "
        "0 written, 2 refused, and nothing was written.",
    )
    parser.add_argument("source", help="a .ckpt file, an HF checkpoint folder, or a folder of shards")
    parser.add_argument("target", help="a new .ckpt file or folder; nothing is overwritten")
    parser.add_argument("--keep-names", action="store_true", help="leave the weights' names as shards have them")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    chosen = make_parser().parse_args(list(words))
    from hf_compat.checkpoint.convert import convert

    print(convert(chosen.source, chosen.target, keep_names=chosen.keep_names))  # noqa: T201 - the command's answer
    return 0
