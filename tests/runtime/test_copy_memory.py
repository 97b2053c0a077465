"""Copies for a save that is written in the background take the memory of the copies before."""

from __future__ import annotations

import torch

from helpers import toy
from hf_compat import Trainer, TrainerCallback, set_seed
from hf_compat.runtime.device_copies import CopyMemory, frozen_copy


def places(data):
    return [tensor.data_ptr() for tensor in data.values()]


def test_a_later_copy_takes_the_memory_of_the_one_before():
    memory, data = CopyMemory(), {"a": torch.ones(100), "b": torch.ones(100), "c": torch.ones(3, 4).t()}
    memory.begin()
    first = frozen_copy(data, memory)
    memory.end()
    kept = set(places(first))
    data = {name: tensor + 1 for name, tensor in data.items()}
    memory.begin()
    second = frozen_copy(data, memory)
    memory.end()
    assert set(places(second)) == kept
    assert all(torch.equal(second[name], data[name]) and second[name].stride() == data[name].stride() for name in data)


def test_tensors_of_another_form_get_memory_of_their_own_and_shared_ones_share_it():
    memory, weight = CopyMemory(), torch.ones(10)
    memory.begin()
    tied = frozen_copy({"a": weight, "tied": weight, "expanded": torch.ones(1).expand(5)}, memory)
    memory.end()
    assert tied["a"].data_ptr() == tied["tied"].data_ptr() != weight.data_ptr()
    memory.begin()
    other = frozen_copy({"a": torch.ones(11), "b": torch.ones(10, dtype=torch.float64)}, memory)
    memory.end()
    assert other["a"].shape == (11,) and other["b"].dtype == torch.float64
    memory.begin()
    memory.end()
    assert not memory._free and not memory._used


def test_copies_of_every_form():
    tied = torch.randn(5, 3)
    data = {
        "rows": torch.randn(7, 3),
        "turned": torch.randn(3, 4).t(),
        "part": torch.randn(9)[2:5],
        "number": torch.tensor(3),
        "half": torch.randn(11).bfloat16(),
        "flags": torch.rand(13) > 0.5,
        "none": torch.empty(0),
        "one": tied,
        "two": tied,
        "expanded": torch.ones(1).expand(5),
        "larger": torch.randn(3000),
    }
    memory, expected = CopyMemory(), {name: tensor.clone() for name, tensor in data.items()}
    for _ in range(2):
        memory.begin()
        frozen = frozen_copy(data, memory)
        memory.end()
        for tensor in data.values():
            if tensor.is_contiguous():
                tensor.zero_()  # training goes on
        for name, copied in frozen.items():
            assert torch.equal(copied, expected[name]) and copied.dtype == expected[name].dtype, name
            assert copied.untyped_storage().nbytes() == copied.nbytes, "a file holds storages"
        assert frozen["one"].data_ptr() == frozen["two"].data_ptr() and frozen["turned"].stride() == (1, 4)
        for name, tensor in data.items():
            if tensor.is_contiguous():
                tensor.copy_(expected[name])


def test_what_a_run_keeps_for_its_saves_goes_with_its_end(make_args, tmp_path):
    seen = []

    class Looks(TrainerCallback):
        def on_step_begin(self, args, state, control, trainer=None, **kwargs):
            seen.append(sorted(tensor.data_ptr() for _, tensor in trainer._saver.copy_memory._used))

    set_seed(3)
    args = make_args(save_strategy="steps", save_steps=2, max_steps=7, async_save=True)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=[Looks()])
    trainer.train()
    assert seen[0] == [] and seen[2] and seen[2] == seen[4] == seen[6], "each save takes the same memory"
    assert not trainer._saver.copy_memory._used
    whole = torch.load(tmp_path / "out" / "checkpoint-6" / "optimizer.pt", weights_only=True)
    assert whole["state"][0]["step"] == 6
