"""A LightningModule as a Trainer's model is a plain module. A warning names its methods that are not called."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest

from helpers import toy
from hf_compat import HFModule, Trainer
from hf_compat.errors import ArgumentError, HfCompatWarning


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = toy.Classifier()

    def forward(self, x, labels=None):
        return self.inner(x, labels)


class WithSteps(Module):
    def training_step(self, batch, batch_idx):
        raise AssertionError("nothing calls it")

    def configure_optimizers(self):
        raise AssertionError("nothing calls it")


def test_its_own_steps_are_named(make_args):
    with pytest.warns(HfCompatWarning, match="its training_step, configure_optimizers are not called"):
        trainer = Trainer(WithSteps(), make_args(max_steps=2), train_dataset=toy.rows(16))
    assert trainer.train().global_step == 2


def test_a_plain_one_trains_as_it_is(make_args, recwarn):
    args = make_args(max_steps=2)
    assert Trainer(Module(), args, train_dataset=toy.rows(16)).train().global_step == 2
    assert [warning for warning in recwarn if "LightningModule" in str(warning.message)] == []


def test_a_native_module_is_refused(make_args):
    with pytest.raises(ArgumentError, match=r"is an HFModule.\n\nHint: pass its `model`"):
        Trainer(HFModule(toy.Classifier(), make_args()), make_args())
