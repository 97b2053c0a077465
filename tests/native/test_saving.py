"""`trainer.save_checkpoint` writes Lightning's file under any name, and a call of its own writes an HF folder."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from helpers.toy import Classifier, rows, weights
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from hf_compat.errors import ArgumentError, CallbackError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


class Beside(HFModule):
    """All of its parameters are beside `model`."""

    def __init__(self, *parts):
        super().__init__(nn.Identity(), *parts)
        self.net = Classifier()

    def training_step(self, batch, batch_idx):
        return self.net(**batch)["loss"]


@pytest.mark.parametrize("kind", [HFModule, Beside])
def test_a_path_of_any_name_is_lightnings_file(kind, make, lightning, tmp_path):
    class Other(ModelCheckpoint):
        FILE_EXTENSION = ".pt"

    module = HFModule(Classifier(), make()) if kind is HFModule else Beside(make(remove_unused_columns=False))
    saving = Other(tmp_path / "kept", every_n_train_steps=1, save_top_k=1)
    trainer = lightning(callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, HFDataModule(None, rows(8)))
    trainer.save_checkpoint(tmp_path / "checkpoint-2")
    for path in (saving.best_model_path, tmp_path / "checkpoint-2"):
        assert torch.load(path, weights_only=True)["global_step"] == 2
        lightning(max_epochs=2).fit(module, HFDataModule(None, rows(8)), ckpt_path=path)
    assert len(list((tmp_path / "kept").iterdir())) == 1, "an old one is removed"


def test_a_trainer_keeps_nothing_of_ours(make, lightning, tmp_path):
    class Notes(TorchCheckpointIO):
        written: dict[str, object] = {}

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            self.written[path] = storage_options

    plugin = Notes()
    trainer = lightning(plugins=[plugin], num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(HFModule(Classifier(), make()), HFDataModule(None, rows(8)))
    assert trainer.strategy.checkpoint_io is plugin
    trainer.fit_loop.max_epochs = 2
    trainer.fit(BoringModel())
    trainer.save_checkpoint("of lightning", storage_options={"a": 1})
    assert plugin.written == {"of lightning": {"a": 1}}


def test_a_plugin_gets_the_options_of_storage(make, lightning):
    class Notes(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, *, storage_options=None):
            raise RuntimeError(f"options: {storage_options}")

    class Saves(HFModule):
        def on_train_end(self):
            self.trainer.save_checkpoint("any", storage_options={"a": 1})

    with pytest.raises(RuntimeError, match=r"options: \{'a': 1\}"):
        lightning(plugins=[Notes()]).fit(Saves(Classifier(), make()), HFDataModule(None, rows(8)))


def test_a_folder_of_hf_is_a_call_of_its_own(make, lightning, tmp_path):
    class Saves(HFModule):
        def on_train_epoch_end(self):
            if self.current_epoch == 0:
                self.save_hf_checkpoint(tmp_path / "within")

    module, data = Saves(Classifier(dropout=0.0), make()), HFDataModule(None, rows(8))
    trainer = lightning(max_epochs=2)
    trainer.fit(module, data)
    module.save_hf_checkpoint(str(tmp_path / "checkpoint-4"))
    resumed = HFModule(Classifier(dropout=0.0), make())
    lightning(max_epochs=2).fit(resumed, data, ckpt_path=tmp_path / "within")
    assert torch.equal(weights(resumed), weights(module))
    values = {"learning_rate": module.args.learning_rate, "per_device_train_batch_size": 4}
    args = TrainingArguments(str(tmp_path), num_train_epochs=2, use_cpu=True, **values)
    hf = Trainer(Classifier(dropout=0.0), args, train_dataset=rows(8))
    hf.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(hf.model.inner.weight, module.model.inner.weight)
    with pytest.raises(ArgumentError, match="exists and is not overwritten"):
        module.save_hf_checkpoint(tmp_path / "checkpoint-4")


@pytest.mark.filterwarnings("ignore:The state of the callback")
def test_a_folder_refuses_the_state_of_a_callback_that_it_cannot_give_back(make, lightning, tmp_path):
    class Keeps(ModelCheckpoint):
        def state_dict(self):
            return {"odd": object}

    module = HFModule(Classifier(), make())
    lightning(callbacks=[Keeps(tmp_path)], enable_checkpointing=True, fast_dev_run=2).fit(
        module, HFDataModule(None, rows(8))
    )
    with pytest.raises(CallbackError, match="cannot be read back"):
        module.save_hf_checkpoint(tmp_path / "checkpoint-2")
