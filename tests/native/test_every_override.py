"""Every method that Lightning, or HF's Trainer, calls by itself: overridden in a subclass it is called, or refused."""

from __future__ import annotations

import inspect
import re

import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from helpers.toy import Classifier, rows, weights
from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.errors import OverrideError
from hf_compat.native.overrides import HONOURED, REFUSED

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning under this torch
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You have overridden `.*_batch_transfer"),
    pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device"),
]
# Lightning's automatic optimization alone calls these; where HF makes the updates the fit is refused
# (`test_subclasses.py`), and a `training_step` beside them leaves the updates to Lightning.
OF_AUTOMATIC = {
    "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients", "lr_scheduler_step",
}  # fmt: skip
# Users call these themselves, or Lightning's own method of that name is overridden.
NOT_BY_ITSELF = {"add_callback", "is_local_process_zero", "is_world_process_zero", "push_to_hub", "create_model_card"}


def methods_of(kind, *ends):
    """List the public methods of a class of Lightning's, without those of the classes that it stands on."""
    found = {}
    for base in kind.__mro__:
        if base not in (*ends, object):
            found |= {n: f for n, f in vars(base).items() if inspect.isfunction(f) and not n.startswith("_")}
    return found


def noting(kind, names, called):
    """Return a subclass that notes which of its methods are called, and does what they did."""

    def override(name):
        def run(self, *args, **kwargs):
            called.add(name)
            return getattr(super(made, self), name)(*args, **kwargs)

        run.__signature__ = inspect.signature(getattr(kind, name))
        return run

    made = type(f"Noting{kind.__name__}", (kind,), {name: override(name) for name in names})
    return made


class Plain(pl.LightningModule):
    """A LightningModule as its documentation has it."""

    def __init__(self):
        super().__init__()
        self.model = Classifier()

    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]

    def validation_step(self, batch, batch_idx):
        self.log("eval_loss", self.model(**batch)["loss"])

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.model(**batch)["logits"]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


class PlainData(pl.LightningDataModule):
    """A LightningDataModule as its documentation has it."""

    def train_dataloader(self):
        return DataLoader(rows(16), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def run_all(lightning, folder, module, data):
    """Train, resume, validate, test and predict."""
    trainer = lightning(max_epochs=2)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "one.ckpt")
    lightning(max_epochs=3).fit(module, data, ckpt_path=folder / "one.ckpt")
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)


@pytest.fixture
def make(tmp_path):
    """A native module and its data, of subclasses that may be given."""
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, learning_rate=0.01, use_cpu=True)

    def build(module=HFModule, data=HFDataModule):
        torch.manual_seed(0)
        return module(Classifier(), args), data(None, rows(16), rows(8), rows(8))

    return build


def test_every_method_that_lightning_calls_of_a_module(make, lightning, tmp_path):
    names = set(methods_of(pl.LightningModule, *nn.Module.__mro__)) - {"configure_sharded_model"}  # deprecated
    of_plain, of_ours, of_hfs_updates = set(), set(), set()
    run_all(lightning, tmp_path, noting(Plain, names, of_plain)(), PlainData())
    assert len(of_plain) > 50 and of_plain >= OF_AUTOMATIC
    module, data = make(noting(HFModule, names, of_ours))
    run_all(lightning, tmp_path, module, data)
    assert of_ours >= of_plain | {"forward"}
    module, data = make(noting(HFModule, names - OF_AUTOMATIC, of_hfs_updates))
    run_all(lightning, tmp_path, module, data)
    assert of_plain - of_hfs_updates == OF_AUTOMATIC and "forward" in of_hfs_updates


def test_every_method_that_lightning_calls_of_a_data_module(make, lightning, tmp_path):
    names = set(methods_of(pl.LightningDataModule))
    of_plain, of_ours = set(), set()
    run_all(lightning, tmp_path, Plain(), noting(PlainData, names, of_plain)())
    module, data = make(data=noting(HFDataModule, names - {"val_dataloader"}, of_ours))
    run_all(lightning, tmp_path, module, data)
    assert len(of_plain) > 10 and of_plain - of_ours == {"val_dataloader"}


def test_a_validation_loader_of_ones_own_is_called(make, lightning):
    class Own(HFDataModule):
        def val_dataloader(self):
            called.append("own")
            return DataLoader(rows(8), batch_size=4)

    called = []
    module, data = make(data=Own)
    trainer = lightning()
    trainer.fit(module, data)
    assert called and "eval_loss" in trainer.callback_metrics


# HF's methods --------------------------------------------------------------------------------------------------------
def called_by_upstream():
    """List the methods that HF's Trainer calls of itself."""
    source = inspect.getsource(transformers.Trainer)
    return {
        name for name in re.findall(r"self\.([A-Za-z_]\w*)\(", source) if callable(vars(transformers.Trainer).get(name))
    }


def test_every_method_that_upstream_calls_is_known():
    names = {name for name in called_by_upstream() if not hasattr(pl.LightningModule, name)}
    assert len(names) > 50
    assert names - NOT_BY_ITSELF == names & {*HONOURED, *REFUSED}


@pytest.mark.parametrize("kind", [HFModule, HFDataModule])
def test_methods_of_hfs_that_nothing_would_call_are_refused_with_the_class(kind):
    for name in REFUSED if kind is HFModule else {*REFUSED, *HONOURED}:
        with pytest.raises(OverrideError, match=rf"`{name}` of Mine(.|\n)*Hint: \w+"):
            type("Mine", (kind,), {name: lambda self, *args, **kwargs: None})
        mixin = type("Mixin", (), {name: lambda self, *args, **kwargs: None})
        with pytest.raises(OverrideError, match=f"`{name}` of Mixed"):
            type("Mixed", (mixin, kind), {})


def test_methods_of_hfs_that_are_called_change_no_number(make, lightning, tmp_path):
    called, found = set(), []
    for kind in (HFModule, noting(HFModule, HONOURED, called)):
        module, data = make(kind)
        run_all(lightning, tmp_path, module, data)
        found.append(weights(module))
    assert called == set(HONOURED) and torch.equal(*found)


def test_an_instance_may_have_methods_of_hfs(make, lightning):
    module, data = make()
    before = weights(module)
    module.get_decay_parameter_names = lambda model: called.append(model) or []
    called = []
    lightning().fit(module, data)
    assert called == [module.model] and not torch.equal(before, weights(module))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("compute_loss", lambda self, batch: None),
        ("compute_loss", lambda self, logits, labels: None),
        ("prediction_step", lambda self, batch, batch_idx: None),
        ("get_decay_parameter_names", lambda self: []),
        ("training_step", lambda self, model, inputs, num_items_in_batch=None: None),
        ("log", lambda self, logs, start_time=None: None),
    ],
)
def test_a_signature_that_fits_nobodys_call_is_refused_with_the_class(name, method):
    with pytest.raises(OverrideError, match=rf"`{name}\(.*\)` of Mine"):
        type("Mine", (HFModule,), {name: method})


def test_a_loss_as_older_releases_of_hf_have_it_is_called(make, lightning):
    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    found = []
    for kind in (HFModule, type("Old", (HFModule,), {"compute_loss": compute_loss})):
        module, data = make(kind)
        lightning().fit(module, data)
        found.append(weights(module))
    assert torch.equal(*found)


def sets(self):
    self.optimizer = torch.optim.SGD(self.parameters(), self.args.learning_rate)


def sets_and_returns(self, model=None):
    if self.optimizer is None:
        self.optimizer = torch.optim.SGD(self.parameters(), self.args.learning_rate)
    return self.optimizer


def both(self, num_training_steps):
    self.create_optimizer()
    self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)


@pytest.mark.parametrize(
    "members",
    [
        {"create_optimizer": sets},
        {"create_optimizer": sets_and_returns},
        {"create_optimizer": lambda self: torch.optim.SGD(self.parameters(), 0.01)},
        {"get_optimizer_cls_and_kwargs": staticmethod(lambda args, model=None: (torch.optim.SGD, {"lr": 0.01}))},
    ],
)
def test_an_optimizer_made_as_in_hfs_trainer_trains(make, lightning, members):
    class ByLightning(HFModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.01)
            lr = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / 4)
            return [optimizer], [{"scheduler": lr, "interval": "step"}]

    found = []
    for kind in (ByLightning, type("Own", (HFModule,), members)):
        module, data = make(kind)
        for _ in range(2):  # a second fit has an optimizer of its own
            trainer = lightning()
            trainer.fit(module, data)
            found.append((weights(module), trainer.optimizers[0]))
    assert torch.equal(found[0][0], found[2][0]) and torch.equal(found[1][0], found[3][0])
    assert found[2][1] is not found[3][1] and type(found[2][1]) is torch.optim.SGD


@pytest.mark.parametrize(
    "members",
    [
        {"create_optimizer_and_scheduler": both},
        {"create_scheduler": lambda self, num_training_steps, optimizer=None: setattr(
            self, "lr_scheduler", torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 2))},
    ],
)  # fmt: skip
def test_a_schedule_made_as_in_hfs_trainer_is_stepped(make, lightning, members):
    rates = []

    class Own(type("Made", (HFModule,), members)):
        def on_before_optimizer_step(self, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    module, data = make(Own)
    lightning().fit(module, data)
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])


def test_what_overrides_read_of_hfs_trainer_is_there(make):
    module, _ = make()
    assert module.args is module.steps.args and module.optimizer is None and module.label_names == ["labels"]
    assert module.model_accepts_loss_kwargs is False
    with pytest.raises(AttributeError, match="no_such"):
        module.no_such  # noqa: B018 - reading it is the test
