"""Lightning's own LightningCLI reads objects and arguments as `hf-compat fit` does: its parser gets its methods."""

from __future__ import annotations

from lightning.pytorch.cli import LightningArgumentParser

from hf_compat.interop import object_parser


def serve_lightning_cli() -> None:
    """Let LightningCLI's parser, which users do not make themselves, read parts of objects and old names."""
    for method in (
        object_parser.parse_args,
        object_parser.parse_object,
        object_parser.add_class_arguments,
        object_parser.error,
    ):
        setattr(LightningArgumentParser, method.__name__, method)
