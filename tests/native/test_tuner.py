"""Lightning's Tuner with native modules: it works where Lightning trains by the loss; its refusal changes nothing."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner

from helpers.toy import Classifier, rows, weights
from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.errors import CallbackError, OverrideError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning under this torch
]


class OwnStep(HFModule):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]


def arguments(folder):
    return TrainingArguments(str(folder), per_device_train_batch_size=4, use_cpu=True)


@pytest.mark.parametrize(
    ("tune", "way_out"),
    [
        (lambda tuner, *fit: tuner.lr_find(*fit), "`hyperparameter_search`"),
        (lambda tuner, *fit: tuner.scale_batch_size(*fit), "`auto_find_batch_size=True`"),
        (lambda tuner, module, data: tuner.scale_batch_size(module, datamodule=data, method="validate"),
         "`auto_find_batch_size=True`"),
    ],
)  # fmt: skip
def test_a_refused_tuner_changes_nothing(lightning, tmp_path, tune, way_out):
    module, data, trainer = (
        HFModule(Classifier(), arguments(tmp_path)),
        HFDataModule(None, rows(32), rows(8, 1)),
        lightning(),
    )
    before, callbacks = weights(module), list(trainer.callbacks)
    with pytest.raises(CallbackError, match=way_out):
        tune(Tuner(trainer), module, data)
    assert trainer.callbacks == callbacks and torch.equal(weights(module), before) and not list(tmp_path.iterdir())
    trainer.fit(module, data)  # the Tuner's callback is gone
    assert trainer.global_step == 8


@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder])
def test_a_callback_of_the_users_own_stays_refused(lightning, tmp_path, finder):
    trainer = lightning(callbacks=[finder()])
    for _ in range(2):
        with pytest.raises(CallbackError, match="cannot work with an HFModule"):
            trainer.fit(HFModule(Classifier(), arguments(tmp_path)), HFDataModule(None, rows(32)))


def test_a_rate_is_found_for_a_step_of_the_users_own(lightning, tmp_path):
    args = arguments(tmp_path)
    module, data, trainer = OwnStep(Classifier(), args), HFDataModule(args, rows(160)), lightning()
    before = weights(module)
    found = Tuner(trainer).lr_find(module, data, num_training=30)
    assert found.results["lr"][0] == pytest.approx(1e-8) and module.learning_rate == found.suggestion()
    assert torch.equal(weights(module), before) and not list(tmp_path.iterdir())
    trainer.fit(module, data)
    assert trainer.global_step == 40 and args.learning_rate == 5e-5
    assert trainer.optimizers[0].param_groups[0]["initial_lr"] == found.suggestion()


@pytest.mark.parametrize("shared", [True, False])
def test_a_rate_that_is_set_trains_as_one_of_the_arguments(lightning, tmp_path, shared):
    def trained(rate, said):
        torch.manual_seed(0)
        args = arguments(tmp_path)
        args.learning_rate = rate
        module = HFModule(Classifier(), args)
        if said is not None:
            module.learning_rate = said
        lightning().fit(module, HFDataModule(args if shared else None, rows(32)))
        return weights(module)

    assert torch.equal(trained(1e-3, 1e-2), trained(1e-2, None))
    assert not torch.equal(trained(1e-3, None), trained(1e-2, None))


def test_a_rate_before_the_constructor_is_refused(tmp_path):
    class Early(HFModule):
        def __init__(self):
            self.learning_rate = 1e-3
            super().__init__(Classifier(), arguments(tmp_path))

    with pytest.raises(OverrideError, match="before `super"):
        Early()
