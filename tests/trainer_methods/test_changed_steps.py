"""Optimizers that change the step, under transformers and under hf_compat: equal to the last bit.

20 updates with accumulation where it is allowed, evaluations, checkpoints and the best model at the end; then once more
from the checkpoint in the middle.
"""

from __future__ import annotations

from unittest import mock

import lomo_optim
import pytest
import torch
import transformers
from resume_runs import Run, assert_as_transformers

import hf_compat

WHOLE = {
    "max_steps": 20,
    "lr_scheduler_type": "linear",
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_strategy": "steps",
    "save_steps": 5,
    "load_best_model_at_end": True,
}
KINDS = {
    "schedule_free_radam": {},
    "schedule_free_adamw": {"warmup_steps": 3, "optim_args": "r=0.5,weight_lr_power=1.0", "weight_decay": 0.01},
    "schedule_free_sgd": {"weight_decay": 0.01},
    "lomo": {},
    "adalomo": {},
    "galore_adamw_layerwise": {"optim_target_modules": ["inner", "outer"], "optim_args": "rank=2,update_proj_gap=4"},
    "apollo_adamw_layerwise": {"optim_target_modules": "all-linear", "optim_args": "rank=1,proj=svd"},
}
ONE_MICRO_BATCH = {"gradient_accumulation_steps": 1}


def run(api, folder, name, **changed):
    accumulation = ONE_MICRO_BATCH if "layerwise" in name else {}
    return Run(api, folder / api.__name__, optim=name, **{**WHOLE, **accumulation, **KINDS[name], **changed})


class AdaLomoOnCPU(lomo_optim.AdaLomo):
    """The package's AdaLomo, whose averages stay where the model is."""

    def __init__(self, *args, **kwargs):
        with mock.patch.object(torch.Tensor, "cuda", torch.Tensor.cpu):
            super().__init__(*args, **kwargs)


@pytest.fixture(autouse=True)
def adalomo_on_the_cpu(monkeypatch):
    monkeypatch.setattr(lomo_optim, "AdaLomo", AdaLomoOnCPU)


# what ours says of upstream's silence (tests below look at it), and the packages of themselves
@pytest.mark.filterwarnings(
    "ignore:.*as in transformers:hf_compat.errors.HfCompatWarning", "ignore:This implementation of AdamW:FutureWarning"
)
@pytest.mark.parametrize("name", KINDS)
def test_a_run_and_its_resumption_equal_transformers(tmp_path, name):
    found = {}
    for api in (transformers, hf_compat):
        first = run(api, tmp_path, name)
        whole, evaluated = first.train(), first.trainer.evaluate()
        again = run(api, tmp_path, name)
        found[api.__name__] = whole, evaluated["eval_loss"], again.train(again.checkpoint(10))
    (theirs, their_loss, their_rest), (ours, our_loss, our_rest) = found["transformers"], found["hf_compat"]
    assert_as_transformers(theirs, ours, sums_begin_again=False)
    assert their_loss == our_loss
    assert_as_transformers(their_rest, our_rest)
