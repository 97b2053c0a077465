"""Random states as plain values: they survive a file that executes no pickle, and go to transformers and back."""

import random
import re
import zipfile

import numpy as np
import pytest
import torch

from hf_compat.checkpoint.reading import read_torch_file
from hf_compat.runtime.seeding import LEGACY_GLOBALS, pack_legacy_rng, read_legacy_rng, read_rng, unpack_rng, write_rng


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_the_same_numbers_come_after_a_file(tmp_path):
    torch.save(read_rng(), tmp_path / "states.pt")
    expected = draw()
    write_rng(torch.load(tmp_path / "states.pt", weights_only=True))
    assert draw() == expected


def test_numbers_that_are_as_before_are_in_a_file_once(tmp_path):
    before = read_rng()
    torch.rand(1), np.random.rand()
    after = read_rng(before)
    assert after["python"][1] is before["python"][1]
    assert after["numpy"][2:] != before["numpy"][2:], "the place among the numbers is another one"
    random.seed(5)
    assert read_rng(after)["python"][1] is not before["python"][1]
    listed = {**before, "python": [3, before["python"][1].tolist(), None]}  # as earlier versions wrote it
    assert read_rng(listed)["numpy"] is not None


def test_transformers_form_and_back():
    np.random.seed(3)
    states = read_rng()
    legacy = unpack_rng(states)
    random.setstate(legacy["python"])
    np.random.set_state(legacy["numpy"])
    again = pack_legacy_rng(legacy)
    assert all(torch.equal(again[name][1], states[name][1]) for name in ("python", "numpy"))
    listed = {**states, "python": [3, states["python"][1].tolist(), None]}  # as earlier versions wrote it
    assert unpack_rng(listed)["python"] == legacy["python"]


@pytest.mark.parametrize("home", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_states_that_either_numpy_has_written_are_read(tmp_path, home):
    torch.save(read_legacy_rng(), tmp_path / "written.pth")
    with zipfile.ZipFile(tmp_path / "written.pth") as written, zipfile.ZipFile(tmp_path / "states.pth", "w") as states:
        for name in written.namelist():
            states.writestr(name, re.sub(rb"numpy\._?core\.multiarray", home.encode(), written.read(name)))
    expected = draw()
    write_rng(read_torch_file(str(tmp_path / "states.pth"), allowed=LEGACY_GLOBALS))
    assert draw() == expected


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
