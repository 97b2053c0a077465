"""Sixty subclasses of `HFModule`, drawn at random, and each as a LightningModule written by hand: the same weights."""

from __future__ import annotations

import random
from dataclasses import dataclass

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule, TrainingArguments

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning under this torch
]


@dataclass(frozen=True)
class Draw:
    """What a subclass overrides, and how it is trained."""

    head: bool
    through: str  # where the loss is computed
    says: bool | None  # of `automatic_optimization`
    own_optimizer: bool
    frozen: bool
    data: str
    accumulation: int
    decay: float
    norm: float
    returns: str
    precision: str | None

    @classmethod
    def of(cls, seed: int) -> Draw:
        draw = random.Random(seed)
        through = draw.choice(["forward", "compute_loss", "training_step", "training_step", "super"])
        # HF computes a loss beside the forward in full precision
        precision = draw.choice([None, None, "bf16-mixed"]) if through in ("forward", "training_step") else None
        return cls(
            head=draw.random() < 0.6,
            through=through,
            says=draw.choice([None, None, True]) if through == "training_step" else None,
            own_optimizer=draw.random() < 0.3,
            frozen=draw.random() < 0.3,
            data=draw.choice(["windows", "plain"]),
            accumulation=draw.choice([1, 2, 4]),
            decay=draw.choice([0.0, 0.1]),
            norm=0.0 if precision else draw.choice([0.0, 0.05]),  # Lightning does not clip beside a fused optimizer
            returns=draw.choice(["tensor", "mapping"]),
            precision=precision,
        )


def loss_of(module, batch, penalty):
    """What all of them compute."""
    logits = module.model(batch["x"])["logits"]
    if hasattr(module, "head"):
        logits = module.head(logits)
    loss = nn.functional.cross_entropy(logits, batch["labels"])
    return (loss + 0.1 * module.model.outer.weight.square().sum() if penalty else loss), logits


def prepare(module, draw):
    if draw.head:
        torch.manual_seed(1)
        module.head = nn.Linear(3, 3)
    if draw.frozen:
        module.model.inner.requires_grad_(False)


def own_optimizer(self):
    optimizer = torch.optim.SGD((p for p in self.parameters() if p.requires_grad), 0.1, momentum=0.9)
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


def made(draw: Draw, args):
    """Return the subclass that a draw stands for."""

    def initialize(self, *parts):
        HFModule.__init__(self, *parts)
        prepare(self, draw)
        if draw.says is not None:
            self.automatic_optimization = draw.says

    def forward(self, x, labels=None):
        loss, logits = loss_of(self, {"x": x, "labels": labels}, True)
        return {"loss": loss, "logits": logits}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, logits = loss_of(self, inputs, draw.through != "super")
        return (loss, {"logits": logits}) if return_outputs else loss

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch, True)[0]
        return {"loss": loss, "other": batch_idx} if draw.returns == "mapping" else loss

    def calls(self, batch, batch_idx):
        loss = HFModule.training_step(self, batch, batch_idx) + 0.1 * self.model.outer.weight.square().sum()
        return {"loss": loss} if draw.returns == "mapping" else loss

    members = {
        "forward": {"forward": forward},
        "compute_loss": {"compute_loss": compute_loss},
        "training_step": {"training_step": training_step},
        "super": {"training_step": calls, "compute_loss": compute_loss},
    }[draw.through]
    if draw.own_optimizer:
        members["configure_optimizers"] = own_optimizer
    torch.manual_seed(0)
    return type("Drawn", (HFModule,), {"__init__": initialize, **members})(Classifier(dropout=0.0), args)


class ByHand(pl.LightningModule):
    def __init__(self, draw: Draw, updates: int):
        super().__init__()
        torch.manual_seed(0)
        self.draw, self.updates, self.model = draw, updates, Classifier(dropout=0.0)
        prepare(self, draw)

    def training_step(self, batch, batch_idx):
        return loss_of(self, batch, True)[0]

    def configure_optimizers(self):
        if self.draw.own_optimizer:
            return own_optimizer(self)
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        plain = {name for name, _ in named if name.endswith("bias") or "norm" in name}
        groups = [
            {"params": [p for name, p in named if name not in plain], "weight_decay": self.draw.decay},
            {"params": [p for name, p in named if name in plain], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
        schedule = get_linear_schedule_with_warmup(optimizer, 0, self.updates)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("seed", range(60))
def test_a_subclass_trains_as_the_same_module_by_hand(lightning, tmp_path, seed):
    draw = Draw.of(seed)
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, use_cpu=True, learning_rate=0.01, weight_decay=draw.decay,
        gradient_accumulation_steps=draw.accumulation, max_grad_norm=draw.norm, train_sampling_strategy="sequential",
        bf16=draw.precision is not None,
    )  # fmt: skip
    ours, by_hand = made(draw, args), ByHand(draw, updates=2 * 8 // draw.accumulation)
    data = HFDataModule(None, rows(32)) if draw.data == "windows" else DataLoader(rows(32), batch_size=4)
    precision = {"precision": draw.precision} if draw.precision else {}
    trainer = lightning(max_epochs=2, **precision)
    trainer.fit(ours, data)
    options = precision | ({"gradient_clip_val": draw.norm} if draw.norm else {})
    other = lightning(max_epochs=2, accumulate_grad_batches=draw.accumulation, **options)
    other.fit(by_hand, DataLoader(rows(32), batch_size=4))
    assert trainer.global_step == other.global_step == 16 // draw.accumulation
    mine, theirs = ours.state_dict(), by_hand.state_dict()
    # Lightning adds up the norm in the order of the optimizer's groups, HF in that of the parameters
    tolerance = 1e-6 if draw.norm else 0.0
    for name in theirs:
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n} {draw} {m}"
        )
