"""`HFModule` and `HFDataModule`: HF's steps and loaders in anybody's `lightning.Trainer` or `LightningCLI`."""

import hf_compat.engine  # noqa: F401 - loads Lightning
from hf_compat.native.lightning_cli import serve_lightning_cli

serve_lightning_cli()
