"""Hydra's way to a run: modules, data and trainer of a configuration, and OmegaConf among the hyperparameters."""

from __future__ import annotations

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule, TrainingArguments

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    # An object among the hyperparameters, which only `weights_only=False` reads
    pytest.mark.filterwarnings("ignore:The hyperparameter"),
    pytest.mark.filterwarnings("ignore:The entry .hyper_parameters. of the checkpoint"),
    pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance of `nn.Module`"),
]

CONFIGURATION = """
args: {_target_: hf_compat.TrainingArguments, learning_rate: 0.1, per_device_train_batch_size: 4, use_cpu: true}
module: {_target_: hf_compat.HFModule, model: {_target_: helpers.toy.Classifier, dropout: 0.0}, args: "${args}"}
data: {_target_: hf_compat.HFDataModule, args: "${args}", train_dataset: {_target_: helpers.toy.rows, count: 8}}
trainer: {_target_: lightning.pytorch.Trainer, max_epochs: 2, accelerator: cpu, logger: false}
optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.5}
scheduler: {_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 1, gamma: 0.5}
"""
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


class OfConfiguration(HFModule):
    """It keeps its configuration whole."""

    def __init__(self, conf) -> None:
        super().__init__(Classifier(dropout=conf.model.dropout), TrainingArguments(**conf.args))
        self.save_hyperparameters(conf)


class DataOfConfiguration(HFDataModule):
    """It keeps its configuration by a name."""

    def __init__(self, conf) -> None:
        super().__init__(None, rows(conf.samples))
        self.save_hyperparameters()


class OfParts(HFModule):
    """It takes what a configuration has made, and keeps all of it, as Hydra's templates do."""

    def __init__(self, net, optimizer, scheduler, args) -> None:
        super().__init__(net, args)
        self.save_hyperparameters(logger=False)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.hparams.scheduler(optimizer)}}


def weights(module):
    return torch.nn.utils.parameters_to_vector(module.parameters())


def test_an_instantiated_run_trains_as_the_one_by_hand(lightning, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    conf = OmegaConf.create(CONFIGURATION)
    torch.manual_seed(0)
    module, data, trainer = instantiate(conf.module), instantiate(conf.data), instantiate(conf.trainer, **QUIET)
    trainer.fit(module, data)
    torch.manual_seed(0)
    args = TrainingArguments(learning_rate=0.1, per_device_train_batch_size=4, use_cpu=True)
    by_hand = HFModule(Classifier(dropout=0.0), args)
    lightning(max_epochs=2).fit(by_hand, HFDataModule(None, rows(8)))
    assert trainer.global_step == 4
    assert torch.equal(weights(module), weights(by_hand))


def test_a_configuration_among_the_hyperparameters_is_saved_resumed_and_read(lightning, tmp_path):
    conf = OmegaConf.create({"model": {"dropout": 0.0}, "args": {"learning_rate": 0.25, "use_cpu": True}})
    data, module = DataOfConfiguration(OmegaConf.create({"samples": 16})), OfConfiguration(conf)
    path = tmp_path / "saved.ckpt"
    trainer = lightning()
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    resumed = lightning(max_epochs=2)
    resumed.fit(OfConfiguration(conf), data, ckpt_path=path)
    assert resumed.global_step == 2 * trainer.global_step
    read = OfConfiguration.load_from_checkpoint(path, weights_only=False)
    assert read.hparams == conf and read.steps.args.learning_rate == 0.25
    assert torch.equal(weights(read), weights(module))
    assert len(DataOfConfiguration.load_from_checkpoint(path, weights_only=False).train_dataset) == 16
    assert torch.equal(weights(OfConfiguration.load_from_checkpoint(path, conf=conf)), weights(module))


def test_parts_among_the_hyperparameters_are_saved_resumed_and_read(lightning, tmp_path):
    conf = OmegaConf.create(CONFIGURATION)
    parts = [instantiate(one) for one in (conf.module.model, conf.optimizer, conf.scheduler, conf.args)]
    module, data, path = OfParts(*parts), HFDataModule(None, rows(8)), tmp_path / "saved.ckpt"
    trainer = lightning(max_epochs=2)
    trainer.fit(module, data)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5**2
    trainer.save_checkpoint(path)
    saved = weights(module).detach().clone()
    resumed = lightning(max_epochs=3)
    resumed.fit(OfParts(*parts), data, ckpt_path=path)
    assert resumed.global_step == 6 and resumed.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5**3
    read = OfParts.load_from_checkpoint(path, weights_only=False)
    assert torch.equal(weights(read), saved) and read.configure_optimizers()["optimizer"].defaults["lr"] == 0.5
