"""Copies for a save that is written in the background take the memory of the copies before."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch

from helpers import toy
from hf_compat import Trainer, TrainerCallback, set_seed
from hf_compat.runtime import device_copies
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


class Module:
    """Stands for torch.cuda, and notes what is asked of it."""

    def __init__(self):
        self.log = []

    def Stream(self, device):
        self.log.append(("made", str(device)))
        return SimpleNamespace(
            wait_stream=lambda other: self.log.append(("waits", other)),
            record_event=lambda: self.event(),
        )

    def event(self):
        number = sum(entry[0] == "event" for entry in self.log)
        self.log.append(("event", number))
        return SimpleNamespace(synchronize=lambda: self.log.append(("synchronized", number)), number=number)

    def current_stream(self, device):
        return SimpleNamespace(
            name=f"of {device}",
            wait_event=lambda event: self.log.append(("after", str(device), event.number)),
            wait_stream=lambda stream: self.log.append("after the copies"),
        )

    def stream(self, stream):
        return contextlib.nullcontext(self.log.append("within"))


class Tensor:
    def __init__(self, device, is_pinned=True):
        self.device, self.pinned, self.copied, self.recorded = torch.device(device), is_pinned, [], []

    def is_pinned(self):
        return self.pinned

    def copy_(self, other, non_blocking=False):
        self.copied.append((other, non_blocking))


def test_each_device_copies_on_a_stream_of_its_own(monkeypatch):
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(device_copies, "copies_beside", lambda device: device.type == "cuda")
    copies = device_copies.DeviceCopies()
    sources = [Tensor(device) for device in ("cpu", "cuda:0", "cuda:1", "cuda:0", "mps", "cuda:0")]
    pairs = [(Tensor("cpu", is_pinned=place < 5), source) for place, source in enumerate(sources)]
    assert copies.start(pairs) == [pairs[0]] and pairs[0][0].copied == []
    assert [place.copied for place, _ in pairs[1:4]] == [[(source, True)] for source in sources[1:4]]
    assert [place.copied for place, _ in pairs[4:]] == [[(source, False)] for source in sources[4:]]
    waits = [entry[1].name for entry in module.log if entry[0] == "waits"]
    assert waits == ["of cuda:0", "of cuda:1"] and module.log.count("within") == 2
    module.log.clear()
    copies.before_change()
    assert module.log == [("after", "cuda:0", 0), ("after", "cuda:1", 1)]
    copies.start([(Tensor("cpu"), Tensor("cuda:0"))])
    assert ("made", "cuda:0") not in module.log, "it has its stream"
    module.log.clear()
    copies.wait()
    copies.wait()
    assert [entry[0] for entry in module.log] == ["synchronized"] * 3


def test_a_batch_is_computed_with_after_its_copy(monkeypatch):
    module, recorded = Module(), []
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream.name)))
    monkeypatch.setattr(module, "stream", lambda stream: contextlib.nullcontext(module.log.append("within")))
    ahead = device_copies.CopiesAhead(torch.device("meta"))
    moved = ahead.start({"a": torch.ones(2), "b": "text"})
    assert moved["a"].device.type == "meta" and moved["b"] == "text" and "within" in module.log
    batch = {**moved, "c": torch.ones(1)}
    assert ahead.take(batch) is batch and module.log[-1] == "after the copies"
    assert [(id(tensor), name) for tensor, name in recorded] == [(id(moved["a"]), "of meta")]
