"""Lightning's Tuner and finders with native modules: what they find trains as if it had been set from the start."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from helpers.toy import Classifier, rows, weights
from hf_compat import HFDataModule, HFModule
from hf_compat.errors import CallbackError, OverrideError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning under this torch
]


class OwnStep(HFModule):
    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]


class Automatic(OwnStep):
    automatic_optimization = True


@pytest.mark.parametrize("method", ["fit", "validate"])
def test_a_refused_tuner_changes_nothing(make, lightning, tmp_path, method):
    module, trainer = HFModule(Classifier(), make()), lightning()
    data = HFDataModule(None, rows(32), rows(8, 1))
    before, callbacks = weights(module), list(trainer.callbacks)
    with pytest.raises(CallbackError, match=r"(?s)HFDataModule.*`auto_find_batch_size=True`"):
        Tuner(trainer).scale_batch_size(module, datamodule=data, method=method)
    assert trainer.callbacks == callbacks and torch.equal(weights(module), before) and not list(tmp_path.iterdir())
    trainer.fit(module, data)  # the Tuner's callback is gone
    assert trainer.global_step == 8


@pytest.mark.parametrize(
    ("kind", "callback", "with_what"),
    [(HFModule, BatchSizeFinder, "HFDataModule"), (Automatic, BatchSizeFinder, "HFDataModule"),
     (HFModule, lambda: GradientAccumulationScheduler({0: 2}), "HFModule")],
)  # fmt: skip
def test_a_callback_of_the_users_own_stays_refused(make, lightning, kind, callback, with_what):
    trainer = lightning(callbacks=[callback()])
    for _ in range(2):
        with pytest.raises(CallbackError, match=f"cannot work with an {with_what}"):
            trainer.fit(kind(Classifier(), make()), HFDataModule(None, rows(32)))


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2, "warmup_steps": 3}])
@pytest.mark.parametrize("kind", [HFModule, OwnStep, Automatic])
def test_a_rate_that_is_found_trains_as_one_that_is_set(make, lightning, tmp_path, kind, settings):
    def trained(callbacks=(), found=None, tunes=False):
        torch.manual_seed(0)
        args = make(**settings)
        module, data, trainer = kind(Classifier(), args), HFDataModule(args, rows(160)), lightning(callbacks=callbacks)
        if found is not None:
            module.learning_rate = found
        if tunes:
            before = weights(module)
            found = Tuner(trainer).lr_find(module, data, num_training=15)
            assert found.results["lr"][0] == pytest.approx(1e-8) and module.learning_rate == found.suggestion()
            assert torch.equal(weights(module), before) and args.learning_rate == 0.01
        trainer.fit(module, data)
        assert trainer.optimizers[0].param_groups[0]["initial_lr"] == module.learning_rate
        return module.learning_rate, weights(module)

    rate, by_tuner = trained(tunes=True)
    by_callback = trained([LearningRateFinder(num_training_steps=15)])
    assert by_callback[0] == rate and torch.equal(by_callback[1], by_tuner)
    assert torch.equal(by_tuner, trained(found=rate)[1]) and not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*the batches are those of your own DataLoader")
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}])
def test_a_batch_size_that_is_found_trains_as_one_that_is_set(make, lightning, settings):
    class Sized(OwnStep):
        batch_size, sizes = 2, ()

        def train_dataloader(self):
            return DataLoader(rows(64), self.batch_size)

        def training_step(self, batch, batch_idx):
            self.sizes = (*self.sizes, len(batch["labels"]))
            return super().training_step(batch, batch_idx)

    def trained(size, *callbacks):
        torch.manual_seed(0)
        module = Sized(Classifier(dropout=0.0), make(**settings))
        module.batch_size = size
        trainer = lightning(callbacks=list(callbacks))
        trainer.fit(module)
        assert trainer.global_step == 64 // 8 // settings.get("gradient_accumulation_steps", 1)
        return weights(module), set(module.sizes), module.batch_size

    set_by_hand, found = trained(8), trained(2, BatchSizeFinder(max_trials=3, steps_per_trial=1))
    assert torch.equal(found[0], set_by_hand[0]) and found[1:] == ({2, 4, 8}, 8)


def test_a_rate_that_is_set_in_a_fit_is_told(make, lightning):
    class Sets(HFModule):
        def on_train_epoch_start(self):
            self.learning_rate = 1.0

    def trained(kind):
        torch.manual_seed(0)
        module = kind(Classifier(), make())
        lightning().fit(module, HFDataModule(None, rows(32)))
        return weights(module), module.learning_rate

    with pytest.warns(UserWarning, match="continues from the rate that it began with"):
        found = trained(Sets)
    assert torch.equal(found[0], trained(HFModule)[0]) and found[1] == 1.0


@pytest.mark.parametrize("shared", [True, False])
def test_a_rate_that_is_set_trains_as_one_of_the_arguments(make, lightning, shared):
    def trained(rate, said):
        torch.manual_seed(0)
        args = make(learning_rate=rate)
        module = HFModule(Classifier(), args)
        if said is not None:
            module.learning_rate = said
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.filterwarnings("ignore", ".*does not have many workers")
            lightning().fit(module, HFDataModule(args if shared else None, rows(32)))
        return weights(module)

    assert torch.equal(trained(1e-3, 1e-2), trained(1e-2, None))
    assert not torch.equal(trained(1e-3, None), trained(1e-2, None))


def test_a_rate_before_the_constructor_is_refused(make):
    class Early(HFModule):
        def __init__(self):
            self.learning_rate = 1e-3
            super().__init__(Classifier(), make())

    with pytest.raises(OverrideError, match="before `super"):
        Early()
