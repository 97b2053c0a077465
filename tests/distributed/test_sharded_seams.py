"""Two ranks that share a model out, every pair of strategy, data, update, evaluation and call: as transformers."""

from __future__ import annotations

import pytest
import torch

from helpers.parity.compare import first_difference, same
from helpers.parity.sharded_seams import ROWS
from helpers.two_sides import run_both

# FSDP 2 exchanges the gradients of a stream's left-over micro-batches before the next ones: sums in another order
ROUNDED = {"data": "stream", "update": "short_window"}
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]  # the first test waits for every row


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [f"sharded_{name}" for name in ROWS if name in asked]
    return run_both(tmp_path_factory.mktemp("sharded"), {"transformers": names, "hf_compat": names})


@pytest.mark.parametrize("name", ROWS)
def test_both_ranks_equal_transformers_bit_for_bit(results, name):
    for rank in (0, 1):
        theirs, ours = (results(package, f"sharded_{name}", rank) for package in ("transformers", "hf_compat"))
        expected = {**theirs, "resumed": theirs["whole"]} if "resumed" in ours else theirs
        if name.startswith("fsdp") and ROUNDED.items() <= ROWS[name].items():
            torch.testing.assert_close(ours["whole"]["weights"], expected["whole"]["weights"], rtol=0, atol=1e-6)
            continue
        assert same(expected, ours), f"rank {rank}: {first_difference(expected, ours)}"
