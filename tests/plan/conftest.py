"""Arguments as they are among several processes, without starting any."""

from __future__ import annotations

import pytest


@pytest.fixture
def args_of():
    """Training arguments of one of `world` processes on GPUs, eight on a machine."""
    from hf_compat import TrainingArguments
    from hf_compat.runtime.launch import Launch, assuming

    def make(world=8, **values):
        with assuming(Launch(world_size=world, local_world_size=min(world, 8)), "cuda:0"):
            return TrainingArguments("out", **values)

    return make
