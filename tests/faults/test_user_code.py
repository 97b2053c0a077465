"""A sample of `user_code.py`: the right error, nothing left, and the same Trainer trains as a fresh one."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from helpers.leftovers import Picture, holders_of_shared_tensors, hooks
from hf_compat import Trainer
from sweeps.faults import user_code
from sweeps.faults.user_faults import FAULTS

SAMPLE = [
    ("sample: None", "plain"),
    ("__getitem__: raises StopIteration", "plain"),
    ("__len__: is a float", "plain"),
    ("train_dataset: is a generator", "plain"),
    ("collator: returns a tuple", "plain"),
    ("collator: raises", "workers"),
    ("get_batch_samples: raises", "workers"),
    ("model: raises StopIteration", "plain"),
    ("model: returns a loss without gradients", "plain"),
    ("model: gives NaN", "plain"),
    ("save_model: raises", "plain"),
    ("callback: on_evaluate interrupts", "async_save"),
    ("_load_best_model: raises", "plain"),
]


@pytest.mark.parametrize(("key", "column"), SAMPLE)
def test_a_fault_is_named_and_leaves_nothing(key, column):
    fault = next(one for one in FAULTS if one.key == key)
    user_code.warm_up()
    assert user_code.try_cell(fault, column) == []


def test_there_are_enough_of_them():
    assert len({fault.key for fault in FAULTS}) == len(FAULTS) >= 60
    assert sum(fault.expected.own for fault in FAULTS) >= 20


def test_what_is_left_is_seen():
    before = Picture()
    held, thread = open(os.devnull), threading.Thread(target=threading.Event().wait, args=(5,), name="left")  # noqa: SIM115
    thread.start()
    os.environ["LEFT"] = "1"
    try:
        found = " ".join(Picture().left_since(before))
    finally:
        held.close()
        del os.environ["LEFT"]
    assert "thread 'left'" in found and "LEFT" in found and "descriptor" in found


def test_what_holds_a_shared_tensor_is_said():
    class Holder:
        batch = [torch.ones(2).share_memory_()]

    found = holders_of_shared_tensors()
    assert any("Tensor <- list <- dict(" in chain and "batch" in chain for chain in found), (found, Holder)


def test_a_hook_that_is_left_is_seen(make_args):
    from helpers import toy

    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(8))
    trainer.train()
    assert hooks(trainer.model) == []
    trainer.model.inner.register_forward_hook(lambda *parts: None)
    assert hooks(trainer.model) == ["inner._forward_hooks"]
