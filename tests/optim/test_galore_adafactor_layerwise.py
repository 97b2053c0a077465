"""`galore_adafactor_layerwise`: transformers 5.23 cannot construct it; here it trains."""

from __future__ import annotations

import pytest
import transformers

import hf_compat
from helpers import toy
from helpers.parity.compare import same

VALUES = {
    "optim_target_modules": ["inner", "outer"],
    "optim_args": "rank=2,update_proj_gap=2,scale=0.1",
    "max_grad_norm": 0.0,  # a step in the backward pass has no norm of all gradients
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-2,
    "max_steps": 20,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "per_device_train_batch_size": 4,
    "save_strategy": "no",
}


def trained(api, folder, name):
    api.set_seed(4)
    args = api.TrainingArguments(output_dir=str(folder), optim=name, **VALUES)
    trainer = api.Trainer(toy.Classifier(), args, train_dataset=toy.rows(40))
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer.model.state_dict()


def test_it_trains_twenty_updates(tmp_path):
    losses, weights = trained(hf_compat, tmp_path, "galore_adafactor_layerwise")
    assert len(losses) == 20 and len(set(losses)) > 15
    assert not same(weights, toy.Classifier().state_dict())


def test_transformers_cannot_construct_it(tmp_path):
    with pytest.raises(ValueError, match="relative_step"):
        trained(transformers, tmp_path, "galore_adafactor_layerwise")


def test_eight_bits_need_a_gpu(tmp_path):
    with pytest.raises(hf_compat.errors.UnsupportedArgument, match=r"galore_adamw_8bit_layerwise.*needs a GPU"):
        trained(hf_compat, tmp_path, "galore_adamw_8bit_layerwise")
