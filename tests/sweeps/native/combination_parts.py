"""Models, metrics, callbacks and modules of `native_combinations.py`; a YAML names them by class path."""

from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
import torchmetrics
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from helpers import toy
from hf_compat import HFModule, TrainerCallback

CLASSES = 3


def classifier():
    return toy.Classifier()


def lora():
    """A small GPT-2 with an adapter; its own weights are frozen."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM")
    return peft.get_peft_model(toy.tiny_gpt2(), config)


def accuracy(prediction):
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float(np.mean(logits.argmax(-1) == prediction.label_ids)), "entries": float(logits.size)}


def metric():
    return torchmetrics.MetricCollection({
        "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES),
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="macro"),
    })  # fmt: skip


# Data: by name, training samples, evaluation samples ------------------------------------------------------------------
def train_rows(count: int = 50):
    return toy.rows(count)


def noisy(count: int = 50):
    return toy.Noisy(toy.rows(count))


def stream(count: int = 48):
    return toy.Stream(toy.rows(count))


def sized_stream(count: int = 50):
    return toy.SizedStream(toy.rows(count))


def shuffled_stream(count: int = 48):
    return toy.ShuffledStream(toy.rows(count))


def tagged(count: int = 40):
    return toy.sequences(count)


def blocks(count: int = 40):
    return toy.blocks(count)


def eval_rows():
    return toy.rows(11, seed=1)


def eval_tagged():
    return toy.sequences(9, seed=5)


def eval_blocks():
    return toy.blocks(9, seed=5)


# Who watches ----------------------------------------------------------------------------------------------------------
def hooks_of(kinds) -> list[str]:
    """Name the hooks that classes of Lightning have."""
    return sorted({name for kind in kinds for name in vars(kind) if name.startswith("on_")})


class Spy(pl.Callback):
    """Notes every hook of a callback with the counts at that moment."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def setup(self, trainer, pl_module, stage):
        self.seen.append((f"setup {stage}", trainer.global_step, trainer.current_epoch))

    def teardown(self, trainer, pl_module, stage):
        self.seen.append((f"teardown {stage}", trainer.global_step, trainer.current_epoch))


def _noting(name: str):
    def hook(self, trainer, pl_module, *rest, **named):
        if name in ("on_load_checkpoint", "on_save_checkpoint") or not trainer.sanity_checking:
            self.seen.append((name, trainer.global_step, trainer.current_epoch))

    return hook


for _name in hooks_of([pl.Callback]):
    setattr(Spy, _name, _noting(_name))


class HFSpy(TrainerCallback):
    """Notes every HF event with the update it comes at."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []


def _noting_event(name: str):
    def event(self, args, state, control, **kwargs):
        self.seen.append((name, state.global_step))

    return event


for _name in toy.EVENTS:
    setattr(HFSpy, _name, _noting_event(_name))


# A user's own module --------------------------------------------------------------------------------------------------
def _noting_hook(name: str):
    def hook(self, *args, **kwargs):
        self.__dict__.setdefault("hooks_seen", []).append(name)
        return args[0] if name.endswith("batch_transfer") else None

    return hook


class _Own:
    """What a user writes: every hook of a LightningModule, without `super()`."""

    def configure_callbacks(self):
        return [LambdaCallback()]

    def setup(self, stage):
        self.stages = [*getattr(self, "stages", ()), stage]

    def teardown(self, stage):
        self.torn_down = stage


_HOOKS = {name: _noting_hook(name) for name in hooks_of([ModelHooks, DataHooks, CheckpointHooks])}
Hooks = type("Hooks", (HFModule,), {**_HOOKS, **{k: v for k, v in vars(_Own).items() if not k.startswith("__")}})


class Steps(HFModule):
    """Adds to each step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss is not None:
            self.log("twice", 2 * loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = super().validation_step(batch, batch_idx, dataloader_idx)
        if loss is not None:
            self.log("own_loss", loss)
        return loss

    def backward(self, loss, *args, **kwargs):
        self.backwards = getattr(self, "backwards", 0) + 1
        super().backward(loss, *args, **kwargs)


class Optimizers(HFModule):
    """Makes optimizer and schedule itself, the same ones as the arguments'."""

    def configure_optimizers(self):
        made = super().configure_optimizers()
        self.made = made
        return made


MODULES = {"none": HFModule, "hooks": Hooks, "steps": Steps, "optimizers": Optimizers}
