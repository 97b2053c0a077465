"""Shared set-up: one thread (parity is bit for bit), and no state left behind."""

from __future__ import annotations

import os
import signal

import pytest
import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # this was started in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    yield
    torch.use_deterministic_algorithms(False)
    assert signal.getsignal(signal.SIGINT) is handler
    ours = {"CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"}
    assert {name for name in ours if os.environ.get(name) != environment.get(name)} == set()


@pytest.fixture
def make_args(tmp_path):
    """Training arguments for a short run on the CPU."""
    from hf_compat import TrainingArguments

    def make(**values):
        base = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 4,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "logging_steps": 2,
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": "none",
        }
        return TrainingArguments(**{**base, **values})

    return make
