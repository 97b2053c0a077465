"""`hf-compat upload` copies an output folder to an object store."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-compat upload",
        description="Copy an output folder to an object store: whole checkpoints, then all other files. Exit status: "
        "0 all is stored, 2 something is not, or the address cannot be used.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the output folder of a run")
    parser.add_argument("address", metavar="ADDRESS", help="the store, as an address of fsspec: s3://bucket/run")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    chosen = make_parser().parse_args(list(words))
    from hf_compat.runtime.console import show_logs
    from hf_compat.training_run.uploads import upload_folder

    show_logs(None)
    stored = upload_folder(chosen.folder, chosen.address)
    print(f"{chosen.folder} is stored in {chosen.address}: {len(stored)} checkpoints.")  # noqa: T201 - the answer
    return 0
