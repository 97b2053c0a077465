"""A run that is resumed after its last update trains nothing, and leaves what the uninterrupted one leaves."""

from __future__ import annotations

import os

import pytest
import torch

from helpers.toy import Classifier, rows
from hf_compat import Trainer, set_seed


@pytest.mark.parametrize("max_steps", [4, 7], ids=["within_an_epoch", "at_its_end"])
@pytest.mark.parametrize("has_run_state", [True, False])
def test_random_states_go_on_from_the_end_of_the_run(make_args, max_steps, has_run_state):
    args = make_args(save_strategy="steps", save_steps=max_steps, max_steps=max_steps, gradient_accumulation_steps=2)

    def train(resume: bool) -> torch.Tensor:
        set_seed(1)
        model = Classifier()
        Trainer(model, args, train_dataset=rows()).train(resume_from_checkpoint=resume)
        return torch.rand(3)

    drawn = train(False)
    if not has_run_state:
        folder = f"{args.output_dir}/checkpoint-{max_steps}"
        os.unlink(f"{folder}/run_state.pt")
        os.unlink(f"{folder}/manifest.json")
    assert torch.equal(train(True), drawn)
