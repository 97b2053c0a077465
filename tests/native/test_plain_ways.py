"""What a LightningModule may do without HF's batches, optimizers and schedules, an `HFModule` may do, too."""

from __future__ import annotations

import io
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule
from hf_compat.errors import ArgumentError, CallbackError, OverrideError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:These arguments have no effect, because the batches are those"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.linear(x) - 1).square().mean(), "logits": self.linear(x)}


class Own(HFModule):
    """Its forward takes a tensor."""

    def forward(self, x):
        return self.model.linear(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sentences(Own):
    """Its batches are texts, of which the step makes tensors."""

    def training_step(self, batch, batch_idx):
        return self(torch.tensor([[float(len(text))] for text in batch])).square().mean()


class Graphs(list):
    """A batch of a class of its own, as of a library for graphs."""

    def to(self, *args, **kwargs):
        return self


# Batches -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", [list, Graphs, iter, lambda texts: (texts, object())])
def test_batches_without_a_size_are_trained_on(make, lightning, kind, accumulation):
    class Reads(Own):
        def training_step(self, batch, batch_idx):
            texts = batch[0] if isinstance(batch, tuple) else batch
            return self(torch.tensor([[float(len(text))] for text in texts])).square().mean()

    trainer = lightning()
    loader = DataLoader(["a", "bc", "def", "g"], 1, collate_fn=kind)
    trainer.fit(Reads(Net(), make(gradient_accumulation_steps=accumulation)), loader)
    assert trainer.global_step == 4 // accumulation and "loss_epoch" in trainer.callback_metrics


def test_the_epochs_mean_weighs_updates_by_all_of_their_samples(make, lightning):
    means = []
    for data in (HFDataModule(None, rows(10)), DataLoader(rows(10), 4)):
        trainer = lightning()
        args = make(gradient_accumulation_steps=2, learning_rate=0.0, train_sampling_strategy="sequential")
        torch.manual_seed(0)  # the same weights, whichever tests ran before
        trainer.fit(HFModule(Classifier(dropout=0.0), args), data)
        means.append(float(trainer.callback_metrics["loss_epoch"]))
    assert means[0] == means[1]


def test_an_own_forward_predicts_batches_as_they_are(make, lightning):
    class Pairs(Own):
        def forward(self, batch):
            return self.model.linear(batch[0])

    class Whole(Own):
        def forward(self, batch):
            return self.model.linear(batch["x"])

    values = torch.arange(8.0)[:, None]
    pairs, named = torch.utils.data.TensorDataset(values, values), [{"x": value} for value in values]
    for kind, data in ((Own, values), (Pairs, pairs), (Whole, named)):
        module = kind(Net(), make())
        predicted = lightning().predict(module, DataLoader(data, 4))
        with torch.no_grad():
            assert torch.equal(torch.cat(predicted), module.model.linear(values)) and len(predicted) == 2


# Optimizers and callbacks --------------------------------------------------------------------------------------------
def test_an_optimizer_that_needs_a_closure_is_refused_or_lightnings(make, lightning):
    class Closes(Sentences):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    texts = DataLoader(["a", "bc"], 1)
    with pytest.raises(ArgumentError, match=r"(?s)LBFGS.*closure.*automatic_optimization = True"):
        lightning().fit(Closes(Net(), make()), texts)
    module = Closes(Net(), make(max_grad_norm=0.0))
    module.automatic_optimization = True
    trainer = lightning()
    trainer.fit(module, texts)
    assert trainer.global_step == 2


def test_an_optimizer_that_calls_its_closure_before_the_step_is_trained(make, lightning):
    class Closing(torch.optim.SGD):
        def step(self, closure):
            closure()
            super().step()

    class Closes(Sentences):
        def configure_optimizers(self):
            return Closing(self.parameters(), lr=0.1)

    module = Closes(Net(), make())
    before = module.model.linear.weight.detach().clone()
    lightning().fit(module, DataLoader(["a", "bc"], 1))
    assert not torch.equal(before, module.model.linear.weight)


@pytest.mark.parametrize("said", [None, True])
def test_a_backbone_beside_the_model_is_unfrozen_clipped_and_zeroed(make, lightning, said):
    class Head(Sentences):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.backbone = nn.Linear(1, 1)
            if said is not None:
                self.automatic_optimization = said

        def forward(self, x):
            return self.model.linear(self.backbone(x))

        def configure_optimizers(self):
            return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            gradients = [p.grad for p in self.parameters()]
            left.append(any(one is not None and one.any() for one in gradients))

        def on_before_optimizer_step(self, optimizer):
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))

    left, norms = [], []
    module = Head(Net(), make(max_grad_norm=0.01))
    before = module.backbone.weight.detach().clone()
    lightning(max_epochs=3, callbacks=[BackboneFinetuning(1)]).fit(module, DataLoader(["a", "bc"], 1))
    assert not torch.equal(before, module.backbone.weight)
    if said is None:  # clipped before the hook, zeroed after the step
        assert max(norms) <= 0.0101 and not any(left)


def test_a_module_without_a_backbone_is_refused_by_name(make, lightning):
    with pytest.raises(CallbackError, match="unfreezes the model's `backbone`, and Net has none"):
        lightning(callbacks=[BackboneFinetuning(1)]).fit(Sentences(Net(), make()), DataLoader(["a"], 1))


def test_a_trainer_is_pickled_after_a_fit_and_its_callbacks_are_as_they_were(make, lightning, tmp_path):
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    trainer = lightning(callbacks=[saving], enable_checkpointing=True)
    trainer.fit(HFModule(Classifier(), make()), HFDataModule(None, rows(8)))
    file = io.BytesIO()
    torch.save(trainer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).global_step == 2
    assert "on_train_batch_end" not in vars(saving)


class Pickles(HFModule):
    def on_train_epoch_end(self):
        torch.save(self.trainer.checkpoint_callback, io.BytesIO())


def test_a_checkpoint_callback_is_pickled_within_a_fit(make, lightning, tmp_path):
    trainer = lightning(callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True)
    trainer.fit(Pickles(Classifier(), make()), HFDataModule(None, rows(8)))
    assert trainer.global_step == 2


def test_callbacks_may_be_mocks(make, lightning):
    mocks = [Mock(spec=kind, state_key=kind.__name__) for kind in (pl.Callback, ModelCheckpoint)]
    for one in mocks:
        one.state_dict.return_value = {}
    lightning(callbacks=mocks, enable_checkpointing=True).fit(
        HFModule(Classifier(), make()), HFDataModule(None, rows(8))
    )
    assert all(one.on_train_batch_end.call_count == 2 for one in mocks)


@pytest.mark.filterwarnings("ignore:`LightningModule.to_torchscript` has been deprecated")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_takes_a_forward_of_the_subclass(make):
    scripted = Own(Net(), make()).to_torchscript()
    assert torch.equal(scripted(torch.ones(2, 1)), scripted.model.linear(torch.ones(2, 1)))


# What a script finds in its trainer and module -----------------------------------------------------------------------
@pytest.mark.parametrize("said", [None, True])
def test_hooks_that_are_put_into_a_module_are_called_in_each_fit(make, lightning, said):
    module, called = Sentences(Net(), make(max_grad_norm=0.0)), []
    if said is not None:
        module.automatic_optimization = said
    hooks = ("on_fit_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
    for name in hooks:
        setattr(module, name, lambda *args, name=name: called.append(name))
    for fits in (1, 2):
        lightning().fit(module, DataLoader(["a", "bc"], 1))
        assert called == [hooks[0], *hooks[1:3], *hooks[1:3], hooks[3]] * fits


def test_a_checkpoint_is_saved_of_a_module_that_was_trained_in_other_processes(make, lightning, tmp_path):
    trainer, module = lightning(), HFModule(Classifier(), make())
    trainer.strategy.connect(module)  # all that Lightning does here, where it spawns processes
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    loaded = HFModule.load_from_checkpoint(tmp_path / "it.ckpt", model=Classifier())
    assert torch.equal(loaded.model.inner.weight, module.model.inner.weight)


def test_a_hook_finds_the_trainers_plugins(make, lightning, tmp_path):
    found = []

    class Asks(HFModule):
        def on_train_start(self):
            found.append((self.trainer.strategy.checkpoint_io.checkpoint_io, self.trainer.precision_plugin.device))

    writing = AsyncCheckpointIO(TorchCheckpointIO())
    lightning(plugins=[writing], precision="bf16-mixed").fit(Asks(Classifier(), make()), HFDataModule(None, rows(8)))
    assert found == [(writing.checkpoint_io, "cpu")]


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_lightning_is_asked_to_clip_by_names(make, lightning, limit):
    asked = []

    class Clips(Sentences):
        automatic_optimization = True

        def clip_gradients(self, optimizer, **settings):
            asked.append(settings)
            super().clip_gradients(optimizer, **settings)

    algorithm = "norm" if limit else "value"  # it has no limit of its own
    trainer = lightning(gradient_clip_algorithm=algorithm)
    trainer.fit(Clips(Net(), make(max_grad_norm=limit)), DataLoader(["a", "bc"], 2))
    assert asked == [{"gradient_clip_val": limit or None, "gradient_clip_algorithm": algorithm}]


# A step that makes its own updates -----------------------------------------------------------------------------------
class Manual(Own):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self(batch["x"][:, :1]).square().mean()
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class Reads(Manual):
    """It takes its batches itself."""

    def training_step(self, dataloader_iter):
        batch, *_ = next(dataloader_iter)
        super().training_step(batch, 0)


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_a_step_that_makes_its_own_updates_may_read_a_loader_itself(make, lightning):
    trainer, module = lightning(), Reads(Net(), make())
    trainer.fit(module, DataLoader(rows(8), 4))
    assert trainer.global_step == 2
    with pytest.raises(OverrideError, match="`training_step` of Reads takes `dataloader_iter`"):
        lightning().fit(module, HFDataModule(None, rows(8)))


@pytest.mark.parametrize("options", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}])
def test_lightning_judges_its_settings_for_an_authors_updates(make, lightning, options):
    with pytest.raises(MisconfigurationException, match="not supported for manual optimization"):
        lightning(**options).fit(Manual(Net(), make()), HFDataModule(None, rows(8)))


def test_lightning_warns_an_author_of_what_a_checkpoint_holds(make, lightning, tmp_path):
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    with pytest.warns(UserWarning, match="no pre-optimization state was saved"):
        lightning(callbacks=[saving], enable_checkpointing=True).fit(Manual(Net(), make()), HFDataModule(None, rows(8)))


def test_lightning_warns_of_an_own_validation_step_without_data(make, lightning):
    class Validates(Manual):
        def validation_step(self, batch, batch_idx):
            pass

    with pytest.warns(UserWarning, match="have no `val_dataloader`"):
        lightning().fit(Validates(Net(), make()), DataLoader(rows(8), 4))


STEPS = {"training_step": "fit", "validation_step": "validate", "predict_step": "predict"}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("in_class", [True, False])
def test_lightning_says_which_step_a_module_lacks(make, lightning, name, in_class):
    module = type("Lacks", (Manual,), {name: None} if in_class else {})(Net(), make())
    if not in_class:
        setattr(module, name, None)
    with pytest.raises(MisconfigurationException, match=name):
        getattr(lightning(), STEPS[name])(module, DataLoader(rows(8), 4))


@pytest.mark.parametrize(
    "given", [rows(8), [(torch.ones(3), 1), (torch.ones(3), 0)], ({"text": "a"},)], ids=["dicts", "pairs", "texts"]
)
def test_samples_in_place_of_a_loader_are_refused_with_the_way_out(lightning, make, given):
    with pytest.raises(ArgumentError, match=r"(?s)a list of samples.*HFDataModule\(args, train_dataset=…\)"):
        lightning().fit(HFModule(Classifier(), make()), given)


def test_a_list_of_loaders_is_lightnings_to_judge(lightning, make):
    loaders = [DataLoader(rows(8), batch_size=4), DataLoader(rows(8), batch_size=4)]
    with pytest.raises(Exception) as caught:
        lightning().fit(HFModule(Classifier(), make()), loaders)
    assert "a list of samples" not in str(caught.value)
