"""`hf-compat seal` accepts a checkpoint that was edited."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-compat seal",
        description="Check checkpoints that were edited, and write their manifests again. Exit status: 0 sealed, "
        "2 a folder is refused, and those after it are left as they are.",
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a checkpoint-N folder")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    chosen = make_parser().parse_args(list(words))
    from hf_compat.checkpoint.unlisted_checkpoints import seal_edited

    for folder in chosen.folders:
        print(seal_edited(folder))  # noqa: T201 - the command's answer
    return 0
