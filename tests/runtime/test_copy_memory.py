"""Copies for a save that is written in the background take the memory of the copies before."""

from __future__ import annotations

import torch
import toy

from hf_compat import Trainer, TrainerCallback, set_seed
from hf_compat.runtime.background import CopyMemory, frozen_copy


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
    memory.release()
    assert not memory._free and not memory._used


def test_what_a_run_keeps_for_its_saves_goes_with_its_end(make_args, tmp_path):
    seen = []

    class Looks(TrainerCallback):
        def on_step_begin(self, args, state, control, trainer=None, **kwargs):
            seen.append(sorted(tensor.data_ptr() for tensor in trainer._copy_memory._used))

    set_seed(3)
    args = make_args(save_strategy="steps", save_steps=2, max_steps=7, async_save=True)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=[Looks()])
    trainer.train()
    assert seen[0] == [] and seen[2] and seen[2] == seen[4] == seen[6], "each save takes the same memory"
    assert not trainer._copy_memory._used
    whole = torch.load(tmp_path / "out" / "checkpoint-6" / "optimizer.pt", weights_only=True)
    assert whole["state"][0]["step"] == 6
