"""Random states as plain values: they survive a file that executes no pickle, and go to transformers and back."""

import random

import numpy as np
import pytest
import torch

from hf_compat.runtime.seeding import pack_legacy_rng, read_legacy_rng, read_rng, unpack_rng, write_rng


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_the_same_numbers_come_after_a_file(tmp_path):
    torch.save(read_rng(), tmp_path / "states.pt")
    expected = draw()
    write_rng(torch.load(tmp_path / "states.pt", weights_only=True))
    assert draw() == expected


def test_transformers_form_and_back():
    np.random.seed(3)
    states = read_rng()
    legacy = unpack_rng(states)
    random.setstate(legacy["python"])
    np.random.set_state(legacy["numpy"])
    again = pack_legacy_rng(legacy)
    assert again["python"] == states["python"] and torch.equal(again["numpy"][1], states["numpy"][1])


@pytest.mark.parametrize(("device", "expected"), [(1, [7]), (5, None)])
def test_states_of_all_gpus_give_the_one_of_this_process(monkeypatch, device, expected):
    """transformers writes a list of states where several processes train."""
    taken, own = [], read_legacy_rng()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(torch.cuda.random, "set_rng_state", lambda state: taken.append(state.tolist()))
    of_gpus = [torch.tensor([number], dtype=torch.uint8) for number in (3, 7)]
    write_rng(pack_legacy_rng({**own, "cuda": of_gpus}))
    assert taken == ([] if expected is None else [expected])
