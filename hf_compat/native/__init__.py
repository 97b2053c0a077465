"""`HFModule` and `HFDataModule`: HF's steps and loaders in any `lightning.Trainer` or `LightningCLI`."""

from lightning.pytorch.cli import LightningArgumentParser

import hf_compat.engine  # noqa: F401 - loads Lightning
from hf_compat.interop import object_parser

# LightningCLI makes this parser itself. It reads parts of objects and old names as `hf-compat fit` does.
for _method in (
    object_parser.parse_args,
    object_parser.instantiate_classes,
    object_parser.add_class_arguments,
    object_parser.error,
):
    setattr(LightningArgumentParser, _method.__name__, _method)
