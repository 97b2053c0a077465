"""Random states are in a checkpoint once: `run_state.pt` holds those that `rng_state.pth` has not."""

from __future__ import annotations

import logging
import os
import random

import pytest
import torch

from helpers.toy import Classifier, rows
from hf_compat import Trainer, set_seed
from hf_compat.checkpoint.run_state import RunState, read_random_states


class Own(Trainer):
    def _save_rng_state(self, output_dir):
        """Write none."""


def drawing(batch):
    random.random()
    return torch.utils.data.default_collate(batch)


def train(args, resume=None, trainer_class=Trainer):
    set_seed(1)
    trainer = trainer_class(Classifier(), args, train_dataset=rows(), data_collator=drawing)
    trainer.train(resume_from_checkpoint=resume)
    return random.random(), torch.rand(3).tolist(), trainer.model.state_dict()["outer.weight"].tolist()


@pytest.fixture
def args(make_args):
    return make_args(save_strategy="steps", save_steps=2, max_steps=4)


@pytest.fixture
def checkpoint(args):
    return f"{args.output_dir}/checkpoint-2"


def test_what_the_file_of_transformers_holds_is_not_held_twice(args, checkpoint):
    expected = train(args)
    stored = torch.load(f"{checkpoint}/run_state.pt", weights_only=True)["data"]
    assert stored["rng"] == {} and stored["epoch_rng"].keys() == {"python", "cpu"}, "the collator drew Python's"
    assert train(args, checkpoint) == expected


def test_a_state_that_holds_all_of_them_needs_no_other_file(args, checkpoint):
    """As earlier versions wrote it."""
    expected = train(args)
    state = RunState.load(checkpoint, random_states=read_random_states(checkpoint))
    torch.save(state.to_plain(), f"{checkpoint}/run_state.pt")
    for name in ("rng_state.pth", "manifest.json"):
        os.unlink(f"{checkpoint}/{name}")
    assert train(args, checkpoint) == expected


def test_an_override_that_writes_none_leaves_all_in_the_state(args, checkpoint):
    expected = train(args, trainer_class=Own)
    assert not os.path.exists(f"{checkpoint}/rng_state.pth")
    assert train(args, checkpoint, Own) == expected


def test_without_the_file_a_run_goes_on_and_says_so(args, checkpoint, caplog):
    train(args)
    os.unlink(f"{checkpoint}/rng_state.pth")
    with caplog.at_level(logging.INFO, "hf_compat"):
        train(args, checkpoint)
    assert "Didn't find an RNG file" in caplog.text
