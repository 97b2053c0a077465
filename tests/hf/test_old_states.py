"""Pickled arguments of older releases, read where our class stands under transformers' name: `training_args.bin`."""

from __future__ import annotations

import copy
import pickle

import pytest

from hf_compat import TrainingArguments
from hf_compat.hf.legacy import OLD_NAMES


def read(state: dict) -> TrainingArguments:
    args = TrainingArguments.__new__(TrainingArguments)
    args.__setstate__({"output_dir": "out", "_n_gpu": -1, "local_rank": -1, **state})
    return args


# What releases of that age hold, defaults of theirs among it; then what it means today.
STATES = {
    "4.19, evaluation": (
        {"evaluation_strategy": "steps", "eval_steps": 5},
        {"eval_strategy": "steps", "eval_steps": 5},
    ),
    "4.19, no GPU": ({"no_cuda": True}, {"use_cpu": True, "no_cuda": True}),
    "4.57, a ratio": ({"warmup_steps": 0, "warmup_ratio": 0.1}, {"warmup_steps": 0.1, "warmup_ratio": 0.1}),
    "4.57, a count": ({"warmup_steps": 7, "warmup_ratio": 0.1}, {"warmup_steps": 7}),
    "4.57, defaults": ({"no_cuda": False, "use_cpu": True, "adafactor": False}, {"use_cpu": True, "optim": None}),
    "4.57, lengths": ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
    "3.5, sizes": ({"per_gpu_train_batch_size": 3}, {"train_batch_size": 3, "per_gpu_train_batch_size": 3}),
    "no effect": ({"fp16_backend": "amp", "learning_rate": 1e-3}, {"fp16_backend": "amp", "learning_rate": 1e-3}),
}


@pytest.mark.parametrize(("state", "meant"), STATES.values(), ids=STATES)
def test_a_state_of_an_older_release_says_what_it_said(state, meant):
    args = read(state)
    expected = {name: TrainingArguments().optim if value is None else value for name, value in meant.items()}
    assert {name: getattr(args, name) for name in meant} == expected
    # what belongs to the machine that wrote it, and old names, which would hide today's
    assert not vars(args).keys() & {"_n_gpu", *(meant.keys() & OLD_NAMES.keys())}
    assert args.bf16 is False and args.device.type in ("cpu", "cuda")  # fields that the release did not have
    again = pickle.loads(pickle.dumps(copy.deepcopy(args)))
    assert again == args and again.to_dict() == args.to_dict()


def test_a_state_of_ours_is_taken_as_it_is():
    args = TrainingArguments("out", evaluation_strategy="steps", eval_steps=3, use_cpu=True)
    args.mine = [1, 2]
    again = pickle.loads(pickle.dumps(args))
    assert again == args and again.mine == [1, 2] and again.evaluation_strategy == "steps"
