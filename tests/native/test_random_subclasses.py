"""A hundred subclasses of `HFModule`, drawn at random, and each as a LightningModule written by hand.

Weights, rates and logs are the same, whoever makes the updates and whoever steps the schedule.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.engine.windows import Window

EPOCHS, BATCHES = 3, 8

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning under this torch
    pytest.mark.filterwarnings("ignore:.*and nothing has stepped"),  # the updates of an author who leaves it alone
    pytest.mark.filterwarnings("ignore:The lr scheduler dict contains the key"),  # in manual optimization
    pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch"),
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Lightning's own call of jsonargparse
    pytest.mark.filterwarnings("ignore:.*configure_optimizers` will be overridden by"),  # by LightningCLI
    pytest.mark.filterwarnings("ignore:These arguments have no effect"),
]


@dataclass(frozen=True)
class Draw:
    """What a subclass overrides, and how it is trained."""

    head: bool
    through: str  # where the loss is computed
    says: bool | None  # of `automatic_optimization`
    optimizer: str  # HF's, one of its own, or LightningCLI's
    schedule: str  # HF's, none, or one of its own
    interval: str  # of its own schedule, or of HF's
    frequency: int
    steps_it: str  # when an author who makes the updates steps a schedule
    averages: bool  # whether StochasticWeightAveraging replaces the schedule
    frozen: bool
    data: str
    accumulation: int
    decay: float
    norm: float
    returns: str
    precision: str | None
    hook: str  # where its own hook is

    @classmethod
    def of(cls, seed: int) -> Draw:
        draw = random.Random(seed)
        through = draw.choice(["forward", "compute_loss", "training_step", "training_step", "training_step", "super"])
        says = {"training_step": draw.choice([None, None, True, False, False]), "super": draw.choice([None, False])}
        says = says.get(through)
        # HF computes a loss beside the forward in full precision
        is_mixed = through in ("forward", "training_step") and says is not False
        precision = draw.choice([None, None, "bf16-mixed"]) if is_mixed else None
        optimizer = draw.choice(["HF's", "HF's", "own", "own", "CLI"])
        schedule = "HF's" if optimizer == "HF's" else draw.choice(["none", "step", "step", "plateau", "plateau"])
        data = draw.choice(["windows", "plain"])
        # Lightning does not clip beside a fused optimizer, and the author of the updates has to do it
        may_clip = not precision and (says is not False or through == "super")
        return cls(
            head=draw.random() < 0.6,
            through=through,
            says=says,
            optimizer=optimizer,
            schedule=schedule,
            interval=draw.choice(["step", "epoch"]) if optimizer != "CLI" else "epoch",
            frequency=draw.choice([1, 2, 3]) if optimizer == "own" else 1,
            steps_it=draw.choice(["each update", "each epoch", "never"]),
            averages=draw.random() < 0.2,
            frozen=draw.random() < 0.3,
            data=data,
            # HFModule refuses an update of one plain batch that the author makes
            accumulation=1 if says is False and data == "plain" and through != "super" else draw.choice([1, 2, 4]),
            decay=draw.choice([0.0, 0.1]),
            norm=draw.choice([0.0, 0.05]) if may_clip else 0.0,
            returns=draw.choice(["tensor", "mapping"]),
            precision=precision,
            hook=draw.choice(["class", "mixin", "module"]),
        )

    @property
    def monitor(self) -> str:
        """The metric that a plateau follows: a log of the step's own, or HFModule's."""
        if self.through in ("training_step", "super"):
            return "tl_step" if self.interval == "step" else "tl_epoch"
        return "loss" if self.interval == "step" else "loss_epoch"

    @property
    def is_manual(self) -> bool:
        return self.says is False

    def batches_between(self) -> int:
        """The frequency in plain batches. Where HFModule makes the updates, a window is one batch."""
        counts_windows = self.data == "windows" and self.says is None and self.interval == "step"
        return self.frequency * (self.accumulation if counts_windows else 1)


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
    if draw.says is not None:
        module.automatic_optimization = draw.says
    module.micro_batches = 0


def own_optimizer(self, draw, frequency):
    optimizer = torch.optim.SGD((p for p in self.parameters() if p.requires_grad), 0.1, momentum=0.9)
    if draw.schedule == "none":
        return optimizer
    chosen = {"interval": draw.interval, "frequency": frequency}
    if draw.schedule == "step":
        return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), **chosen}]
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.002)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": draw.monitor, **chosen}}


CONFIGURED = []


def configured() -> pl.LightningModule:
    """Stand for a class that LightningCLI makes."""
    return CONFIGURED.pop()


def through_cli(module, draw):
    """Let LightningCLI give a module its optimizer and schedule."""
    words = ["--optimizer=torch.optim.SGD", "--optimizer.lr=0.1", "--optimizer.momentum=0.9"]
    if draw.schedule == "step":
        words += [
            "--lr_scheduler=torch.optim.lr_scheduler.StepLR",
            "--lr_scheduler.step_size=2",
            "--lr_scheduler.gamma=0.5",
        ]
    elif draw.schedule == "plateau":
        values = {"monitor": draw.monitor, "factor": 0.5, "patience": 0, "threshold": 0.002}
        words += ["--lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau"]
        words += [f"--lr_scheduler.{name}={value}" for name, value in values.items()]
    CONFIGURED.append(module)
    options = {"run": False, "args": words, "save_config_callback": None, "seed_everything_default": False}
    return LightningCLI(configured, **options).model


def log_own(module, loss):
    if module.draw.through in ("training_step", "super"):
        module.log("tl", loss, on_step=True, on_epoch=True, batch_size=4)
    if isinstance(module, ByHand):  # as HFModule logs
        module.log("loss", loss, batch_size=4)
        module.log("loss_epoch", loss, on_step=False, on_epoch=True, batch_size=4)


def step_schedule(module, moment):
    """Step the schedule as an author does who makes the updates, and by hand as HF's update does."""
    draw, schedule = module.draw, module.lr_schedulers()
    if not draw.is_manual or schedule is None:
        return
    when = draw.steps_it
    if draw.through == "super" and draw.schedule == "HF's" and not isinstance(schedule, SWALR):
        when = "each update" if isinstance(module, ByHand) else "never"
    if moment == when:
        schedule.step(*([float(module.micro_batches)] if isinstance(schedule, ReduceLROnPlateau) else []))


def update_by_hand(self, batch, batch_idx):
    """An author's step in manual optimization. A window's micro-batches, or several batches, make an update."""
    for inputs in batch if isinstance(batch, Window) else [batch]:
        loss = loss_of(self, inputs, True)[0]
        log_own(self, loss.detach())
        self.manual_backward(loss / self.draw.accumulation)
        self.micro_batches += 1
    if self.micro_batches % self.draw.accumulation:
        return
    if self.draw.norm:
        self.clip_gradients(self.optimizers(), self.draw.norm, "norm")
    self.optimizers().step()
    self.optimizers().zero_grad()
    step_schedule(self, "each update")


def on_train_epoch_end(self):
    step_schedule(self, "each epoch")


def made(draw: Draw, args):
    """Return the subclass that a draw stands for."""

    def initialize(self, *parts):
        HFModule.__init__(self, *parts)
        self.draw = draw
        prepare(self, draw)

    def forward(self, x, labels=None):
        loss, logits = loss_of(self, {"x": x, "labels": labels}, True)
        return {"loss": loss, "logits": logits}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, logits = loss_of(self, inputs, draw.through != "super" or draw.is_manual)
        if draw.is_manual:
            log_own(self, loss.detach())
            self.micro_batches += 1
        return (loss, {"logits": logits}) if return_outputs else loss

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch, True)[0]
        log_own(self, loss.detach())
        return {"loss": loss, "other": batch_idx} if draw.returns == "mapping" else loss

    def calls(self, batch, batch_idx):
        loss = HFModule.training_step(self, batch, batch_idx) + 0.1 * self.model.outer.weight.square().sum()
        log_own(self, loss.detach())
        return {"loss": loss} if draw.returns == "mapping" else loss

    def calls_for_update(self, batch, batch_idx):
        updates = self.trainer.global_step
        loss = HFModule.training_step(self, batch, batch_idx)
        if self.trainer.global_step > updates:
            step_schedule(self, "each update")
        return loss

    members = {
        "forward": {"forward": forward},
        "compute_loss": {"compute_loss": compute_loss},
        "training_step": {"training_step": update_by_hand if draw.is_manual else training_step},
        "super": {"training_step": calls_for_update if draw.is_manual else calls, "compute_loss": compute_loss},
    }[draw.through]

    def configure_optimizers(self):
        if draw.optimizer == "own":
            return own_optimizer(self, draw, draw.frequency)
        chosen = HFModule.configure_optimizers(self)
        chosen["lr_scheduler"]["interval"] = draw.interval
        return chosen

    if draw.optimizer == "own" or (draw.interval == "epoch" and not draw.is_manual):
        members["configure_optimizers"] = configure_optimizers
    hook = {"on_train_epoch_end": on_train_epoch_end}
    bases = (type("Mixin", (), hook), HFModule) if draw.hook == "mixin" else (HFModule,)
    members |= hook if draw.hook == "class" else {}
    torch.manual_seed(0)
    module = type("Drawn", bases, {"__init__": initialize, **members})(Classifier(dropout=0.0), args)
    if draw.hook == "module":
        module.on_train_epoch_end = functools.partial(on_train_epoch_end, module)
    return module


class ByHand(pl.LightningModule):
    def __init__(self, draw: Draw, updates: int):
        super().__init__()
        torch.manual_seed(0)
        self.draw, self.updates, self.model = draw, updates, Classifier(dropout=0.0)
        prepare(self, draw)

    def training_step(self, batch, batch_idx):
        if self.draw.is_manual:
            return update_by_hand(self, batch, batch_idx)
        loss = loss_of(self, batch, True)[0]
        log_own(self, loss.detach())
        return loss

    on_train_epoch_end = on_train_epoch_end

    def configure_optimizers(self):
        if self.draw.optimizer == "own":
            return own_optimizer(self, self.draw, self.draw.batches_between())
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        plain = {name for name, _ in named if name.endswith("bias") or "norm" in name}
        groups = [
            {"params": [p for name, p in named if name not in plain], "weight_decay": self.draw.decay},
            {"params": [p for name, p in named if name in plain], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
        schedule = get_linear_schedule_with_warmup(optimizer, 0, self.updates)
        return [optimizer], [{"scheduler": schedule, "interval": self.draw.interval}]


class Notes(pl.Callback):
    """Notes the rate of each update, that of the next epoch, and the logs of each epoch."""

    def __init__(self):
        self.rates, self.told, self.epochs, self.logs = [], [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, *args):
        if len(self.told) < len(self.rates) and "learning_rate" in trainer.callback_metrics:
            self.told.append(float(trainer.callback_metrics["learning_rate"]))

    def on_train_epoch_start(self, trainer, pl_module):
        self.epochs.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer, pl_module):
        metrics = trainer.callback_metrics
        self.logs.append({name: float(metrics[name]) for name in ("tl_epoch", "loss_epoch") if name in metrics})


@pytest.mark.parametrize(
    "seed", [*range(25), *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(25, 100))]
)
def test_a_subclass_trains_as_the_same_module_by_hand(lightning, tmp_path, seed):
    draw = Draw.of(seed)
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, use_cpu=True, learning_rate=0.01, weight_decay=draw.decay,
        gradient_accumulation_steps=draw.accumulation, max_grad_norm=draw.norm, train_sampling_strategy="sequential",
        bf16=draw.precision is not None,
    )  # fmt: skip
    updates = EPOCHS * BATCHES // draw.accumulation
    modules = made(draw, args), ByHand(draw, updates)
    ours, by_hand = (through_cli(module, draw) if draw.optimizer == "CLI" else module for module in modules)
    plain = DataLoader(rows(4 * BATCHES), batch_size=4)
    data = HFDataModule(None, rows(4 * BATCHES)) if draw.data == "windows" else plain
    accumulation = {} if draw.is_manual else {"accumulate_grad_batches": draw.accumulation}
    clipping = {"gradient_clip_val": draw.norm} if draw.norm and not draw.is_manual else {}
    found = []
    for module, loader, options in ((ours, data, {}), (by_hand, plain, accumulation | clipping)):
        notes = Notes()
        averaging = StochasticWeightAveraging(0.05, 1, 2, "linear")
        options |= {"callbacks": [notes, averaging] if draw.averages else [notes], "max_epochs": EPOCHS}
        trainer = lightning(**options, **({"precision": draw.precision} if draw.precision else {}))
        trainer.fit(module, loader)
        assert trainer.global_step == len(notes.rates) == updates, draw
        found.append(notes)
    mine, theirs = found
    assert mine.rates == theirs.rates and mine.epochs == theirs.epochs, draw
    assert mine.told == pytest.approx(theirs.rates if mine.told else []), draw
    for our_logs, their_logs in zip(mine.logs, theirs.logs, strict=True):
        assert our_logs == pytest.approx({name: their_logs[name] for name in our_logs}, abs=1e-5), draw
    assert not mine.logs[0] or draw.through in ("forward", "compute_loss") or "tl_epoch" in mine.logs[0], draw
    mine, theirs = ours.state_dict(), by_hand.state_dict()
    # Lightning adds up the norm in the order of the optimizer's groups, HF in that of the parameters
    tolerance = 1e-6 if draw.norm else 0.0
    for name in theirs:
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n} {draw} {m}"
        )
