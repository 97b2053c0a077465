"""Modules and data modules apart from a trainer: pickled, copied, sent to processes, asked for their batches."""

from __future__ import annotations

import copy
import io
import pickle

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from helpers.toy import Classifier, rows, weights
from hf_compat import HFDataModule, HFModule, TrainingArguments

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning under this torch
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]


def arguments(**values):
    return TrainingArguments(
        "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True, learning_rate=0.01, **values
    )


def make(**values):
    torch.manual_seed(0)
    return HFModule(Classifier(), arguments(**values), compute_metrics=MulticlassAccuracy(num_classes=3))


def saved_and_loaded(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"pickle": lambda thing: pickle.loads(pickle.dumps(thing)), "torch": saved_and_loaded, "copy": copy.deepcopy}


class OwnStep(HFModule):
    def __init__(self, *parts, **named):
        super().__init__(*parts, **named)
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]


class ReturnsLoss(HFModule):
    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]


class Taken(pl.Callback):
    """Takes the module and its data apart in the middle of a fit."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.found = [(way(pl_module), way(trainer.datamodule), weights(pl_module)) for way in WAYS.values()]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("trained", [False, True])
def test_a_module_and_its_data_are_pickled_and_train_on(lightning, way, trained):
    module, data = make(), HFDataModule(None, rows(32), rows(8, 1), rows(8, 2))
    if trained:
        lightning().fit(module, data)
    # the generators' states are no part of either
    torch.manual_seed(3)
    other, other_data = way(module), way(data)
    assert torch.equal(weights(other), weights(module)) and other is not module
    lightning().fit(other, other_data)
    torch.manual_seed(3)
    lightning().fit(module, data)
    assert torch.equal(weights(other), weights(module)) and not torch.equal(weights(make()), weights(module))
    assert other.steps.model is other.model and len(pickle.dumps(module)) < 30_000  # without the optimizer's state
    scored = [lightning().validate(one, that, verbose=False) for one, that in ((module, data), (other, other_data))]
    assert scored[0] == scored[1] and len(scored[0][0]) > 1


@pytest.mark.parametrize(
    ("kind", "values", "options"),
    [
        (HFModule, {}, {}),
        (HFModule, {"debug": "underflow_overflow"}, {"precision": "bf16-mixed"}),
        (OwnStep, {}, {}),
        (ReturnsLoss, {}, {}),
        (OwnStep, {"optim": "schedule_free_adamw"}, {}),
    ],
)
def test_a_module_is_taken_apart_while_it_trains(lightning, kind, values, options):
    taken = Taken()
    lightning(callbacks=[taken], **options).fit(kind(Classifier(), arguments(**values)), HFDataModule(None, rows(32)))
    assert len(taken.found) == len(WAYS)
    for other, data, then in taken.found:
        assert torch.equal(weights(other), then)
        lightning(**options).fit(other, data)
        assert not torch.equal(weights(other), then)


@pytest.mark.matrix
@pytest.mark.real_python
def test_processes_that_lightning_spawns_train_the_same(lightning):
    module, data = make(), HFDataModule(None, rows(32), rows(8, 1))
    torch.manual_seed(42)
    lightning().fit(module, data)
    spawned = make()
    lightning(strategy="ddp_spawn", devices=1).fit(spawned, HFDataModule(None, rows(32), rows(8, 1)))
    assert torch.equal(weights(spawned), weights(module))


# Batches without a trainer -------------------------------------------------------------------------------------------
def test_a_data_module_gives_batches_without_a_trainer():
    data = HFDataModule(arguments(), rows(32), {"a": rows(8, 1)}, rows(8, 2))
    data.setup("fit")
    loaders = [data.train_dataloader(), data.val_dataloader()["a"], data.test_dataloader(), data.predict_dataloader()]
    for loader in loaders:
        batch = next(iter(loader))
        assert type(batch) is dict and batch["x"].shape[1] == 8
    assert len(loaders[0]) == 8 and "size=32" in str(HFDataModule(arguments(), rows(32)))


class Plain(pl.LightningModule):
    """Reads a batch as what a loader gives."""

    def __init__(self):
        super().__init__()
        self.model, self.seen, self.order = Classifier(), 0, []

    def training_step(self, batch, batch_idx):
        assert type(batch) is dict
        self.seen += len(batch["x"])
        self.order.append(batch["x"].sum().item())
        return self.model(**batch)["loss"]

    def validation_step(self, batch, batch_idx):
        assert type(batch) is dict
        self.log("found", self.model(**batch)["loss"])

    def predict_step(self, batch, batch_idx):
        assert type(batch) is dict
        return batch["x"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_any_module_trains_on_its_loaders(lightning):
    data = HFDataModule(arguments(), rows(32), rows(8, 1))
    lightning().fit(make(), data)  # what a trainer left behind changes nothing
    plain, trainer = Plain(), lightning(max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(plain, data.train_dataloader(), data.val_dataloader())
    assert plain.seen == 64 and trainer.global_step == 8 and "found" in trainer.callback_metrics
    assert plain.order[:8] != plain.order[8:] and sorted(plain.order[:8]) != plain.order[:8]
    trainer.validate(plain, data, verbose=False)
    assert len(trainer.predict(plain, HFDataModule(arguments(), predict_dataset=rows(8)))) == 1


def test_an_hfmodule_trains_the_same_on_loaders_and_on_the_data_module(lightning):
    whole, parts = make(), make()
    torch.manual_seed(1)
    lightning(max_epochs=2).fit(whole, HFDataModule(None, rows(36), rows(8, 1)))
    torch.manual_seed(1)
    data, trainer = HFDataModule(arguments(), rows(36), rows(8, 1)), lightning(max_epochs=2)
    trainer.fit(parts, data.train_dataloader(), data.val_dataloader())
    assert torch.equal(weights(whole), weights(parts)) and "eval_loss" in trainer.callback_metrics


def test_a_look_at_a_batch_leaves_the_columns_to_the_fit(lightning):
    named = [{**row, "name": float(i)} for i, row in enumerate(rows(16))]
    data = HFDataModule(arguments(), named)
    assert "name" in next(iter(data.train_dataloader()))
    lightning().fit(make(), data)  # the model takes no `name`
    assert data.steps.args.remove_unused_columns
