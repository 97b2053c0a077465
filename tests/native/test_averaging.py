"""StochasticWeightAveraging with batch norms: its last epoch collects their statistics, and trains nothing."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from helpers.toy import rows
from hf_compat import HFDataModule, HFModule

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning under this torch
    pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch"),
]


STATISTICS = [f"layers.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Own:
    """A step and an optimizer that any LightningModule may have."""

    def training_step(self, batch, batch_idx):
        self.steps_in = (*getattr(self, "steps_in", ()), self.trainer.current_epoch)
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), 0.1)


class ByHand(Own, pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Normed()


class OwnStep(Own, HFModule):
    """HFModule makes the updates."""


def averaged(lightning, module, *data, **options):
    """Train three epochs, and return the average of the last two's weights, and all that the model holds."""
    torch.manual_seed(0)
    for part in module.model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    torch.manual_seed(0)
    averaging = StochasticWeightAveraging(0.05, 1, 2, "linear")
    trainer = lightning(max_epochs=3, callbacks=[averaging], **options)
    trainer.fit(module, *data)
    return averaging._average_model.model.state_dict(), module.model.state_dict()


@pytest.mark.parametrize("batches", [1, 2])
def test_it_leaves_what_it_leaves_of_any_module(make, lightning, batches):
    def data():
        return DataLoader(rows(32), 4)

    ours = OwnStep(Normed(), make(gradient_accumulation_steps=batches, max_grad_norm=0.0))
    average, found = averaged(lightning, ours, data())
    theirs = ByHand()
    expected, by_hand = averaged(lightning, theirs, data(), accumulate_grad_batches=batches)
    assert ours.steps_in == theirs.steps_in and max(ours.steps_in) == 3
    for name, value in found.items():
        # Lightning steps once more at the end, with the gradients of the last update
        assert torch.equal(value, (by_hand if name in STATISTICS else expected)[name])
        assert torch.equal(average[name], expected[name])


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}])
def test_windows_are_not_trained_in_its_last_epoch(make, lightning, settings):
    trained = []

    class Counts(HFModule):
        def on_before_optimizer_step(self, optimizer):
            trained.append(self.trainer.current_epoch)

    module = Counts(Normed(), make(**settings))
    _, state = averaged(lightning, module, HFDataModule(None, rows(32)))
    assert trained == sorted([0, 1, 2] * (8 // settings.get("gradient_accumulation_steps", 1)))
    assert int(state["layers.1.num_batches_tracked"]) == 8  # of the last epoch alone
