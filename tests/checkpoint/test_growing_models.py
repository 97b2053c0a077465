"""Models that take other shapes than they have: a resume asks them, and compares only what torch loads."""

from __future__ import annotations

import shutil

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from hf_compat.errors import CheckpointError


class Memory(nn.Module):
    """A buffer that has a row more after each training step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 2))

    def remember(self):
        self.seen = torch.cat([self.seen, torch.randn(1, 2)])


class TakesAny(Memory):
    def _load_from_state_dict(self, state, prefix, *rest):
        self.seen = torch.empty_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *rest)


class Growing(Classifier):
    def __init__(self, memory=TakesAny, **options):
        super().__init__(**options)
        self.memory = memory()

    def forward(self, x, labels=None):
        if self.training:
            self.memory.remember()
        return super().forward(x, labels)


class AsksItself(Growing):
    def __init__(self):
        super().__init__(Memory)

    def load_state_dict(self, state_dict, *args, **kwargs):
        self.memory.seen = torch.empty_like(state_dict["memory.seen"])
        return super().load_state_dict(state_dict, *args, **kwargs)


class Hooked(Growing):
    def __init__(self):
        super().__init__(Memory)
        self.memory.register_load_state_dict_pre_hook(self.make_room)

    def make_room(self, module, state, prefix, *rest):
        module.seen = torch.empty_like(state[f"{prefix}seen"])


@pytest.mark.parametrize("kind", [Growing, AsksItself, Hooked])
@pytest.mark.parametrize("named", [True, False])
def test_a_model_that_takes_other_shapes_is_resumed(make_args, tmp_path, kind, named):
    def train(wanted=None):
        torch.manual_seed(0)
        args = make_args(max_steps=6, save_steps=2, save_strategy="steps")
        trainer = Trainer(kind(), args, train_dataset=rows(32))
        trainer.train(resume_from_checkpoint=wanted)
        return trainer.model

    whole = train()
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    resumed = train(str(tmp_path / "out" / "checkpoint-4") if named else True)
    assert resumed.memory.seen.shape == (6, 2) and torch.equal(resumed.memory.seen, whole.memory.seen)
    assert torch.equal(resumed.outer.weight, whole.outer.weight)


def test_what_torch_loads_is_still_compared(make_args):
    Trainer(
        Growing(classes=3), make_args(max_steps=2, save_steps=2, save_strategy="steps"), train_dataset=rows(32)
    ).train()
    other = Trainer(Growing(classes=4), make_args(max_steps=4), train_dataset=rows(32))
    with pytest.raises(CheckpointError, match="holds another model"):
        other.train(resume_from_checkpoint=True)
    plain = Trainer(Growing(Memory), make_args(max_steps=4), train_dataset=rows(32))
    with pytest.raises(CheckpointError, match=r"memory\.seen.* has the shape"):
        plain.train(resume_from_checkpoint=True)


def test_a_native_module_takes_its_own_checkpoint(make_args, tmp_path):
    def fit(steps, path=None):
        torch.manual_seed(0)
        trainer = pl.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        module = HFModule(Growing(), TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True))
        trainer.fit(module, HFDataModule(None, rows(32)), ckpt_path=path)
        return trainer, module

    trainer, _ = fit(2)
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    _, resumed = fit(6, tmp_path / "it.ckpt")
    _, whole = fit(6)
    assert torch.equal(resumed.model.memory.seen, whole.model.memory.seen)
