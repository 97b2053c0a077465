"""Each schedule of a native fit has one owner. `test_random_subclasses.py` compares rates in many more modules."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule
from hf_compat.errors import HfCompatWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning under this torch
]


class Plain(pl.LightningModule):
    """Stands for an HFModule in the same subclasses."""

    def __init__(self, model, args=None):
        super().__init__()
        self.model = model


def subclass(base, automatic=None, schedule=lambda optimizer: StepLR(optimizer, 1), config=(), **body):
    """Make a subclass with a step, an optimizer and a schedule of its own. It notes the rate of each epoch."""

    class Own(base):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.rates = []
            if automatic is not None:
                self.automatic_optimization = automatic

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch)["loss"]
            self.log("own", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [{"scheduler": schedule(optimizer), **dict(config)}]

        def on_train_epoch_start(self):
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    return type("Own", (Own,), body)


def plateau(optimizer):
    """Halve the rate whenever it is stepped, but the first time."""
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, mode="max", threshold=1e9)


def test_a_hook_of_ones_own_that_steps_schedules_is_called_once_an_epoch(make, lightning):
    calls = []

    def lr_scheduler_step(self, scheduler, metric):
        calls.append(self.trainer.current_epoch)
        scheduler.step()

    module = subclass(HFModule, lr_scheduler_step=lr_scheduler_step)(Classifier(), make())
    lightning(max_epochs=3).fit(module, DataLoader(rows(16), 4))
    assert calls == [0, 1, 2] and module.rates == pytest.approx([1.0, 0.1, 0.01])


@pytest.mark.parametrize("strict", [True, False])
def test_a_metric_that_was_not_logged_is_told_as_lightning_tells_it(make, lightning, strict):
    told = []
    for base in (Plain, HFModule):
        module = subclass(base, None, plateau, {"monitor": "absent", "strict": strict})(Classifier(), make())
        if strict:
            with pytest.raises(MisconfigurationException, match="conditioned on metric absent") as raised:
                lightning(max_epochs=1).fit(module, DataLoader(rows(16), 4))
            told.append(str(raised.value).split(" Available")[0])
        else:
            with pytest.warns(RuntimeWarning, match="conditioned on metric absent") as caught:
                lightning(max_epochs=1).fit(module, DataLoader(rows(16), 4))
            told.append([str(one.message) for one in caught if "conditioned" in str(one.message)])
            assert module.trainer.optimizers[0].param_groups[0]["lr"] == 1.0
    assert told[0] == told[1]


@pytest.mark.parametrize("base", [Plain, HFModule])
def test_a_plateau_in_manual_optimization_needs_no_metric_and_is_the_authors(make, lightning, base):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.model(**batch)["loss"])
        self.optimizers().step()
        self.optimizers().zero_grad()

    def on_train_epoch_end(self):
        self.lr_schedulers().step(0.0)

    body = {"training_step": training_step, "on_train_epoch_end": on_train_epoch_end}
    module = subclass(base, False, plateau, **body)(Classifier(), make())
    lightning(max_epochs=4).fit(module, DataLoader(rows(16), 4))
    assert module.rates == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.filterwarnings("ignore:These arguments have no effect")
def test_hfs_schedule_that_follows_a_metric_is_stepped_by_evaluations_where_lightning_makes_the_updates(
    make, lightning
):
    class Own(HFModule):
        automatic_optimization = True

        def training_step(self, batch, batch_idx):
            return self.model(**batch)["loss"]

    args = make(lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="loss", eval_strategy="epoch",
                lr_scheduler_kwargs={"patience": 0, "threshold": 1e9, "factor": 0.5})  # fmt: skip
    module = Own(Classifier(), args)
    trainer = lightning(max_epochs=3)
    trainer.fit(module, DataLoader(rows(16), 4), DataLoader(rows(8, 1), 4))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**3)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("kind", [StepLR, ReduceLROnPlateau])
@pytest.mark.parametrize("automatic", [None, True])
def test_a_resumed_run_goes_on_with_the_rates_of_an_uninterrupted_one(make, lightning, tmp_path, automatic, kind):
    moments = {
        "epoch": {"save_on_train_epoch_end": True},
        "update": {"every_n_train_steps": 3},
        "validation": {"save_on_train_epoch_end": False, "monitor": "own"},
    }
    schedule, config = (lambda optimizer: StepLR(optimizer, 1, 0.5)), {"frequency": 1}
    if kind is ReduceLROnPlateau:
        schedule, config = plateau, {"monitor": "own"}
        del moments["validation"]  # Lightning's checkpoints hold no metrics

    def fit(path=None, **options):
        module = subclass(HFModule, automatic, schedule, config)(Classifier(dropout=0.0), make())
        trainer = lightning(max_epochs=4, num_sanity_val_steps=0, **options)
        trainer.fit(module, DataLoader(rows(16), 4), DataLoader(rows(8, 1), 4), ckpt_path=path)
        return module.rates

    saving = [ModelCheckpoint(tmp_path, name + "-{step}", save_top_k=-1, **when) for name, when in moments.items()]
    whole = fit(callbacks=saving, enable_checkpointing=True)
    assert len(set(whole)) > 2
    for name in moments:
        assert fit(tmp_path / f"{name}-step={3 if name == 'update' else 4}.ckpt") == whole[1:], name


def test_a_trainer_of_a_fit_that_failed_steps_the_schedules_of_another_module(make, lightning):
    def fails(self, *args):
        raise KeyError("on purpose")

    trainer = lightning(max_epochs=3)
    with pytest.raises(KeyError, match="on purpose"):
        trainer.fit(subclass(HFModule, on_train_batch_end=fails)(Classifier(), make()), DataLoader(rows(16), 4))
    module = subclass(Plain)(Classifier())
    trainer.fit(module, DataLoader(rows(16), 4))
    assert module.rates == pytest.approx([1.0, 0.1, 0.01])


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("steps_it", [True, False])
def test_an_authors_schedule_that_nothing_steps_beside_hfs_updates_is_named(make, lightning, interval, steps_it):
    def training_step(self, batch, batch_idx):
        loss = HFModule.training_step(self, batch, batch_idx)
        if steps_it and (interval == "step" or self.trainer.is_last_batch):
            self.lr_schedulers().step()
        return loss

    kind = subclass(HFModule, False, config={"interval": interval}, training_step=training_step)
    module = kind(Classifier(), make())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lightning(max_epochs=2).fit(module, HFDataModule(None, rows(16)))
    told = [str(one.message) for one in caught if issubclass(one.category, HfCompatWarning)]
    if steps_it:
        assert told == [] and module.rates == pytest.approx([1.0, 1e-4 if interval == "step" else 0.1])
    else:
        (message,) = told
        assert "nothing has stepped StepLR: the learning rate stays 1." in message and module.rates == [1.0, 1.0]
        assert "Hint: call `self.lr_schedulers().step()`" in message


class Unlike:
    """A schedule that is none of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, needed):
        raise AssertionError

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("automatic", [None, True])
@pytest.mark.parametrize("base", [Plain, HFModule])
def test_a_schedule_that_lightning_cannot_step_is_refused_before_training(make, lightning, base, automatic):
    module = subclass(base, automatic, schedule=Unlike)(Classifier(), make())
    with pytest.raises(MisconfigurationException, match="`Unlike` doesn't follow PyTorch's LRScheduler"):
        lightning().fit(module, DataLoader(rows(8), 4))
    assert module.global_step == 0


@pytest.mark.parametrize(
    ("optimized", "tried", "rate", "again"),
    [
        ("made", False, 0.1, False),
        ("made", True, 0.1, True),
        ("made", False, 0.2, True),
        (None, True, 0.2, False),
    ],
)
@pytest.mark.parametrize("replaces", [False, True])
def test_schedules_are_made_again_for_another_rate(optimized, tried, rate, again, replaces, monkeypatch):
    told = []
    monkeypatch.setattr("hf_compat.native.module.warn_of_unused", lambda *what: told.append("unused"))
    strategy = SimpleNamespace(setup_optimizers=lambda trainer: told.append("set up"))
    own = SimpleNamespace(
        steps=SimpleNamespace(args=None), _is_tried=tried, _rate_made=0.1, learning_rate=rate, _optimized=optimized,
        _read_schedules=lambda: told.append("read"), configured_schedules=1,
        trainer=SimpleNamespace(strategy=strategy), _connect=lambda: told.append(own._optimized),
    )  # fmt: skip
    if replaces:
        own.configure_optimizers = None
    inspect.unwrap(HFModule.on_fit_start)(own)
    assert told == [*["unused"] * replaces, *["read", "set up"] * again, optimized]
    assert own._optimized is own.configured_schedules is None and own._is_connected
