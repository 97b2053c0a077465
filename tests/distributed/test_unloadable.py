"""Several ranks: what turns out not to load is passed over by all of them together."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from helpers.launching import result

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from helpers import damage
from sweeps.faults import payloads

STRATEGIES = {"ddp": (), "fsdp 2": ("fsdp=full_shard", "fsdp_config={'version': 2}", "model=plain")}


@pytest.mark.parametrize(
    ("strategy", "file", "place"),
    [
        pytest.param("ddp", "scheduler.pt", ("_last_lr",), marks=pytest.mark.matrix),
        ("fsdp 2", "optimizer.pt", ("state", 0, "exp_avg")),
    ],
)
def test_all_ranks_go_on_from_the_older_checkpoint(tmp_path, strategy, file, place):
    words = (*STRATEGIES[strategy], "samples=24", "num_train_epochs=1")
    whole = result(tmp_path / "whole", *words)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    last = max((tmp_path / "resumed").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    content = torch.load(last / file, weights_only=True)
    new = [] if file == "scheduler.pt" else damage.REMOVED
    torch.save(damage.changed(content, place, new), last / file)
    payloads.sealed(last)
    assert result(tmp_path / "resumed", *words, "resume=True") == whole
