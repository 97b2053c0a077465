"""Uses of `self.accelerator` in subclasses give the same losses and weights as under transformers."""

from __future__ import annotations

import pytest
import torch
import transformers

import hf_compat
from helpers import toy
from helpers.accelerator_idioms import CASES

SAMPLE = {
    "backward_twice_through_one_graph", "accumulate_with_steps_of_its_own", "goes_back_to_a_state", "reads_the_states",
    "a_second_model_with_optimizer_and_schedule", "a_reference_model_in_half_precision", "lists_what_is_prepared",
}  # fmt: skip
OPTIONS = {"per_device_train_batch_size": 4, "max_steps": 6, "logging_steps": 1, "save_strategy": "no"}


def outcome(api, name, folder):
    make, arguments = CASES[name]
    args = api.TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=0.01, **OPTIONS, **arguments
    )
    kind = make(api)
    kind.seen = []
    torch.manual_seed(0)
    trainer = kind(toy.Classifier(), args, train_dataset=toy.rows(32), eval_dataset=toy.rows(10))
    trainer.train()
    trainer.evaluate()
    logged = ("loss", "grad_norm", "learning_rate")
    logs = [{key: log[key] for key in logged if key in log} for log in trainer.state.log_history]
    return logs, kind.seen, {key: value.tolist() for key, value in trainer.model.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.matrix) for n in CASES])
def test_it_is_what_it_is_under_transformers(name, tmp_path):
    theirs, ours = (outcome(api, name, tmp_path / api.__name__) for api in (transformers, hf_compat))
    assert ours == theirs and len(theirs[0]) > 5
