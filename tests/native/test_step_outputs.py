"""What a `training_step` of one's own returns is judged as Lightning judges it where it makes the updates."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from helpers.toy import Classifier, rows, weights
from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.errors import HfCompatWarning, LossError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning under this torch
]


class Plain(pl.LightningModule):
    """Stands for an HFModule in the same subclasses."""

    def __init__(self, model, args):
        super().__init__()
        self.model = model


def subclass(base, training_step):
    body = {
        "training_step": training_step,
        "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=0.1),
    }
    return type("Own", (base,), body)


def arguments(tmp_path, **values):
    return TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, use_cpu=True, **{"max_grad_norm": 0.0, **values}
    )


@pytest.mark.parametrize("returned", [{"los": torch.ones(())}, {"loss": None}, 3.0, [1.0]])
def test_what_lightning_refuses_is_refused_with_its_error(lightning, tmp_path, returned):
    words = "'loss' key needs to be present" if isinstance(returned, dict) else "must return a Tensor, a dict, or None"
    for base in (Plain, HFModule):
        module = subclass(base, lambda self, batch, batch_idx: returned)(Classifier(), arguments(tmp_path))
        with pytest.raises(MisconfigurationException, match=words) as raised:
            lightning().fit(module, DataLoader(rows(16), 4))
    assert isinstance(raised.value, LossError)
    told = str(raised.value)
    assert f"`training_step` of Own returned a {type(returned).__name__}" in told and "Hint: " in told


def test_a_mapping_whose_loss_is_no_tensor_is_refused(lightning, tmp_path):
    module = subclass(HFModule, lambda self, batch, batch_idx: {"loss": 3.0})(Classifier(), arguments(tmp_path))
    with pytest.raises(LossError, match=r"returned a dict with \['loss'\](.|\n)* with a Tensor"):
        lightning().fit(module, HFDataModule(None, rows(16)))


class Keeps(pl.Callback):
    """Keeps the names of what each batch gave to callbacks."""

    def __init__(self):
        self.names = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.names.append(sorted(outputs))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("given", ["never", "in every other update"])
def test_a_batch_without_a_loss_trains_and_logs_nothing_and_is_told(lightning, tmp_path, given, accumulation):
    def training_step(self, batch, batch_idx):
        loss = self.model(**batch)["loss"]
        return loss if given != "never" and batch_idx // accumulation % 2 else None

    found = []
    for base in (Plain, HFModule):
        torch.manual_seed(0)
        args = arguments(tmp_path, gradient_accumulation_steps=accumulation)
        module = subclass(base, training_step)(Classifier(dropout=0.0), args)
        keeps, logger = Keeps(), CSVLogger(tmp_path, base.__name__)
        by_hand = {"accumulate_grad_batches": accumulation} if base is Plain else {}
        trainer = lightning(logger=logger, callbacks=[keeps], **by_hand)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(rows(32), 4))
        found.append((trainer.global_step, weights(module)))
    # Lightning tells it once a process
    assert [one.category for one in caught if "`training_step` returned `None`" in str(one.message)] == [
        HfCompatWarning
    ]
    assert found[0][0] == found[1][0] == 8 // accumulation and torch.equal(found[0][1], found[1][1])
    table = Path(logger.log_dir, "metrics.csv")
    logged = list(csv.DictReader(table.read_text().splitlines())) if table.exists() else []
    with_loss = [int(row["step"]) for row in logged if row["loss"]]
    trained = [] if given == "never" else list(range(1, 8 // accumulation, 2))
    assert with_loss == trained and all(float(row["loss"]) > 0 for row in logged if row["loss"])
    ends = [accumulation * update + accumulation - 1 for update in trained]
    assert keeps.names == [["loss"] if batch in ends else [] for batch in range(8)]


def test_own_logs_of_a_batch_without_a_loss_stay(lightning, tmp_path):
    def training_step(self, batch, batch_idx):
        self.log("now", float(batch_idx), on_step=True, on_epoch=False)
        self.log("both", float(batch_idx), on_step=True, on_epoch=True)
        return self.model(**batch)["loss"] if batch_idx % 2 == 0 else None

    tables = []
    for base in (Plain, HFModule):
        logger = CSVLogger(tmp_path, base.__name__)
        with pytest.warns(match="returned `None`") if base is HFModule else warnings.catch_warnings(action="ignore"):
            module = subclass(base, training_step)(Classifier(), arguments(tmp_path))
            lightning(logger=logger).fit(module, DataLoader(rows(16), 4))
        lines = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
        names = ("now", "both_step", "both_epoch")
        tables.append({name: [line[name] for line in lines if line.get(name)] for name in names})
    assert tables[0] == tables[1]
    assert tables[1] == {"now": ["0.0", "1.0", "2.0", "3.0"], "both_step": ["0.0", "1.0", "2.0", "3.0"],
                         "both_epoch": ["1.5"]}  # fmt: skip
