"""Precision around the forward only, and float16's gradient scaler, which also runs on the CPU."""

from __future__ import annotations

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch

from helpers import toy
from hf_compat import HFDataModule, HFModule
from hf_compat.engine.strategies import AutocastForward, ForwardPrecision, wrap_forward

pytestmark = pytest.mark.filterwarnings("ignore:These arguments have no effect")  # args shared with a Trainer


def test_the_forward_is_wrapped_once_and_gives_float32():
    model = toy.Classifier()
    wrap_forward(model, "bf16-mixed", "cpu")
    wrap_forward(model, "bf16-mixed", "cpu")
    assert isinstance(model.forward, AutocastForward) and not isinstance(model.forward.forward, AutocastForward)
    out = model(torch.randn(2, 8), torch.tensor([0, 1]))
    assert {value.dtype for value in out.values()} == {torch.float32}
    exact = toy.Classifier.forward(model.eval(), torch.ones(1, 8))["logits"]
    assert not torch.equal(model(torch.ones(1, 8))["logits"], exact)  # it was computed in bfloat16
    wrap_forward(other := toy.Classifier(), "32-true", "cpu")
    assert "forward" not in other.__dict__


def test_a_wrapped_model_still_copies_and_pickles():
    model = toy.Classifier()
    wrap_forward(model, "bf16-mixed", "cpu")
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again(torch.ones(1, 8))["logits"].shape == (1, 3)


# As under Accelerate: a fused optimizer is called, leaves its weights alone and counts as having stepped.
@pytest.mark.parametrize(("optim", "rates"), [("adamw_torch", [1, 1, 1]), ("adamw_torch_fused", [1, 2, 3])])
def test_a_step_is_skipped_when_scaled_gradients_overflow(make_args, optim, rates):
    class Overflow(pl.Callback):
        def __init__(self):
            self.weights, self.scales, self.rates = [], [], []

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            module.model.outer.bias.register_hook(lambda g: g * float("inf")) if batch_idx == 1 else None

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.weights.append(module.model.inner.weight.clone())
            self.scales.append(trainer.precision_plugin.scaler.get_scale())
            self.rates.append(module.steps.lr_scheduler.last_epoch)

    args = make_args(num_train_epochs=1, lr_scheduler_type="constant", optim=optim)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    watcher = Overflow()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[ForwardPrecision("16-mixed", scaler)], callbacks=[watcher],
        limit_train_batches=3, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(HFModule(toy.Classifier(), args), HFDataModule(args, toy.rows(), toy.rows(4)))
    first, second, third = watcher.weights
    assert torch.equal(first, second) and torch.equal(second, third)  # the hook stays: later steps overflow as well
    assert watcher.scales == [8.0, 4.0, 2.0]
    assert watcher.rates == rates
    assert trainer.global_step == 3
