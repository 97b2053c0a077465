"""Copies from a device: what a save and an evaluation wait for, and that what is written is what was there."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
import transformers

import hf_compat
from helpers import toy
from helpers.pretended import RaceError, pretended_device
from hf_compat import Trainer, TrainingArguments, set_seed
from hf_compat.data.loader import PreparedDataLoader
from hf_compat.runtime import nested
from hf_compat.runtime.device_copies import CopiesAhead, CopyMemory, DeviceCopies, LaterCopies, frozen_copy
from hf_compat.runtime.nested import nested_numpify, to_host


@pytest.fixture
def gpu():
    with pretended_device() as machine:
        yield machine


def test_many_tensors_come_with_one_wait(gpu):
    there = [torch.full((3,), float(number), device="cuda") for number in range(20)]
    gpu.count.clear()
    assert [one.tolist() for one in to_host([*there, torch.ones(1)])] == [*[[float(n)] * 3 for n in range(20)], [1.0]]
    assert gpu.waits() == {"stream": 1}
    nested = nested_numpify({"a": there[:2], "b": (there[2].bfloat16(), None)})
    assert nested["b"][0].dtype == "float32" and nested["a"][1].tolist() == [1.0] * 3
    assert gpu.waits() == {"stream": 2}


def test_large_tensors_take_no_locked_memory(gpu, monkeypatch):
    monkeypatch.setattr(nested, "_STAGED", 40)
    copied = to_host([torch.ones(5, device="cuda"), torch.ones(8, device="cuda"), torch.ones(5, device="cuda")])
    assert [one.is_pinned() for one in copied] == [True, False, True]


def test_copies_beside_the_computation_hold_what_was_there(gpu):
    weight, copies, memory = torch.ones(4, device="cuda"), DeviceCopies(), CopyMemory()
    frozen = frozen_copy({"weight": weight, "tied": weight}, memory, copies)
    with pytest.raises(RaceError):  # the device would go on before the copy is made
        weight.add_(1)
    copies.before_change()
    weight.add_(1)
    assert gpu.waits() == {}
    copies.wait()
    assert (
        frozen["weight"].tolist() == [1.0] * 4 and frozen["tied"] is frozen["weight"] and weight.tolist() == [2.0] * 4
    )


def test_later_copies_of_a_device_come_before_the_next_step(gpu):
    state, later = torch.ones(4, device="cuda"), LaterCopies()
    frozen = frozen_copy([state], CopyMemory(), later)
    later.finish()
    state.mul_(3)
    later.result()
    assert frozen[0].tolist() == [1.0] * 4 and gpu.waits() == {"event": 1}


@pytest.mark.parametrize(("non_blocking", "begun", "waits"), [(True, 2, 0), (False, 1, 3)])
def test_a_batch_is_copied_while_the_one_before_is_trained_on(gpu, non_blocking, begun, waits):
    rows = torch.arange(24.0).reshape(6, 4)
    loader = PreparedDataLoader(rows, device=torch.device("cuda:0"), non_blocking=non_blocking, pin_memory=True,
                                batch_size=2)  # fmt: skip
    batches = iter(loader)
    first = next(batches)
    assert gpu.count["h2d"] == begun and loader.lookahead.device.type == "cpu"
    sums = [first.sum(), *(batch.sum() for batch in batches)]
    assert gpu.waits().get("h2d", 0) == waits
    assert [float(one) for one in sums] == rows.reshape(3, -1).sum(1).tolist()


@pytest.mark.parametrize(("non_blocking", "accumulation"), [(True, 1), (True, 3), (False, 1), (False, 3)])
def test_batches_are_on_their_way_no_later_than_under_transformers(tmp_path, non_blocking, accumulation):
    found = []
    for api in (transformers, hf_compat):
        begun, waited = [], []

        class Watched(toy.Classifier):
            def forward(self, x, labels=None):
                begun.append(gpu.count["h2d"])
                waited.append(gpu.count["wait:h2d"])
                return super().forward(x, labels)

        with pretended_device() as gpu:
            args = api.TrainingArguments(
                str(tmp_path), num_train_epochs=1, gradient_accumulation_steps=accumulation, report_to="none",
                per_device_train_batch_size=4, disable_tqdm=True, accelerator_config={"non_blocking": non_blocking},
            )  # fmt: skip
            trainer = api.Trainer(Watched(), args, train_dataset=toy.rows())
            gpu.count.clear()
            trainer.train()
        found.append(([number - begun[-1] for number in begun], waited[-1] - waited[0]))  # the last has all batches
    (theirs, their_waits), (ours, our_waits) = found
    assert len(theirs) == len(ours) and all(mine >= their for mine, their in zip(ours, theirs, strict=True))
    assert our_waits <= their_waits and (our_waits == 0) is non_blocking


def test_a_batch_that_is_used_before_its_copy_is_a_race(gpu):
    ahead = CopiesAhead(torch.device("cuda:0"))
    coming = ahead.start([torch.ones(3).pin_memory(), "text"])
    with pytest.raises(RaceError):
        coming[0].sum()
    assert ahead.take(coming)[0].sum().item() == 3.0


def train(folder, **options):
    set_seed(3)
    usual = {"max_steps": 6, "save_steps": 2, "logging_steps": 100, "report_to": "none", "disable_tqdm": True}
    args = TrainingArguments(folder, per_device_train_batch_size=4, **{**usual, **options})
    Trainer(toy.Classifier(), args, train_dataset=toy.rows()).train()
    return {
        path.parent.name + "/" + path.name: torch.load(path, map_location="cpu", weights_only=True)
        if path.suffix == ".pt"
        else path.read_bytes()
        for path in sorted(folder.glob("checkpoint-*/*"))
        if path.name in ("optimizer.pt", "model.safetensors")
    }


def test_an_async_save_waits_for_nothing_where_training_goes_on(tmp_path, gpu):
    waited, wait = [], gpu.wait

    def noted(kind):
        waited.extend([kind] if threading.current_thread() is threading.main_thread() else [])
        wait(kind)

    gpu.wait = noted
    train(tmp_path / "none", save_strategy="no")
    before = Counter(waited)
    waited.clear()
    saved = train(tmp_path / "async", async_save=True)
    # each save reads the loss since the last log; then the run's end has less to read
    assert Counter(waited) - before == {"tolist": 3}
    gpu.wait = wait
    plain = train(tmp_path / "plain")
    assert saved.keys() == plain.keys() and len(saved) == 6
    for name, content in saved.items():
        if isinstance(content, bytes):
            assert content == plain[name]
        else:
            theirs = plain[name]["state"]
            assert all(
                torch.equal(value, theirs[k][n]) for k, of in content["state"].items() for n, value in of.items()
            )
