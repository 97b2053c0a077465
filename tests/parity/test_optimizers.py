"""Optimizers of other packages train, stop and go on as under transformers, bit for bit, where they are installed."""

import pytest
import torch

from hf_compat.optim.optimizers import OPTIMIZERS
from hf_compat.runtime.text import is_installed
from sweeps.parity.optimizer_runs import STEPS_AS_TORCH, compare

IN_EVERY_RUN = ("adamw_bnb_8bit", "apollo_adamw", "galore_adamw", "grokadamw", "stable_adamw")


def runs_here(name: str) -> bool:
    entry = OPTIMIZERS[name]
    return is_installed(entry.path.partition(".")[0]) and not entry.device


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.matrix)
        for name in STEPS_AS_TORCH
        if runs_here(name)
    ],
)
def test_twenty_updates_and_a_resumed_run_equal_transformers(tmp_path, name):
    torch.set_num_threads(1)
    assert compare(name, tmp_path) == ""
