"""A process that ends just after a collective ends well, whoever still holds the process group."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.real_python

# Gloo's threads are still freeing tensors when the script ends. Of 40 such processes that did not wait, 22 died.
SCRIPT = """
import sys
import torch
from torch import distributed
from hf_compat.runtime.collectives import destroy_at_exit, leave_at_exit
if "waits" in sys.argv:
    destroy_at_exit() if "ours" in sys.argv else leave_at_exit()
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
held = distributed.group.WORLD
sys.setswitchinterval(60)
for _ in range(200):
    distributed.all_reduce(torch.ones(9), async_op=True)
if "destroyed" in sys.argv:
    distributed.destroy_process_group()
"""
TRIES = 1


def status(*words: str) -> int:
    return subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, check=False).returncode


@pytest.mark.parametrize("owner", ["ours", "the user's, kept", "the user's, destroyed"])
@pytest.mark.timeout(300)
def test_a_process_that_waits_ends_well(owner):
    assert [status("waits", *owner.replace("'s,", " ").split()) for _ in range(TRIES)] == [0] * TRIES
