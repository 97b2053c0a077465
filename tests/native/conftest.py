"""What the tests of native modules share."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest

from hf_compat import TrainingArguments


@pytest.fixture
def lightning(tmp_path):
    """Make Lightning trainers that show nothing, and train one epoch where no other limit is given."""

    def build(**options):
        quiet = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
                 "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1,
                 "default_root_dir": tmp_path}  # fmt: skip
        return pl.Trainer(**{**quiet, **options})

    return build


@pytest.fixture
def make(tmp_path):
    """Arguments for short runs."""
    return lambda **values: TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, use_cpu=True, **{"learning_rate": 0.01, **values}
    )
