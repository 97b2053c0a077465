"""What Lightning users override in an `HFModule`: the module does its own part in any case."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, ModelCheckpoint

from helpers.toy import Classifier, rows, weights
from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.checkpoint.convert import HFCheckpointIO
from hf_compat.errors import OverrideError
from hf_compat.native.overrides import KEPT

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


@pytest.fixture
def args(tmp_path):
    return TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=0.01, use_cpu=True
    )


@pytest.fixture
def lightning(lightning):
    """Train two epochs where no other limit is given."""
    return lambda **options: lightning(**{"max_epochs": 2, **options})


class Overrides(HFModule):
    """Hooks as Lightning users write them, without `super()`."""

    def __init__(self, *parts, **named):
        super().__init__(*parts, **named)
        self.called = []

    def configure_callbacks(self):
        self.called.append("configure_callbacks")
        return [EarlyStopping("eval_loss", patience=99)]

    def setup(self, stage):
        self.called.append("setup")

    def teardown(self, stage):
        self.called.append("teardown")

    def on_fit_start(self):
        self.called.append("on_fit_start")

    def on_train_start(self):
        self.called.append("on_train_start")

    def on_train_epoch_start(self):
        self.called.append("on_train_epoch_start")

    def on_train_epoch_end(self):
        self.called.append("on_train_epoch_end")

    def on_validation_epoch_end(self):
        self.called.append("on_validation_epoch_end")

    def on_save_checkpoint(self, checkpoint):
        self.called.append("on_save_checkpoint")
        checkpoint["of_user"] = 7

    def on_load_checkpoint(self, checkpoint):
        self.called.append("on_load_checkpoint")
        assert checkpoint["of_user"] == 7


class Calls(Overrides):
    """A subclass of it that calls some of them."""

    def setup(self, stage):
        super().setup(stage)

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.called.append("again")


@pytest.mark.parametrize("kind", [Overrides, Calls])
def test_overrides_without_super_change_no_number_and_resume(args, lightning, tmp_path, kind):
    def train(kind, ckpt_path=None, saver=None):
        torch.manual_seed(0)
        module = kind(Classifier(), args)
        trainer = lightning(precision="bf16-mixed", enable_checkpointing=True, callbacks=[saver] if saver else [])
        trainer.fit(module, HFDataModule(None, rows(40), rows(8)), ckpt_path=ckpt_path)
        return module, trainer

    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    (plain, trainer), (module, its) = train(HFModule), train(kind, saver=saver)
    assert torch.equal(weights(module), weights(plain))
    assert its.callback_metrics["eval_loss"] == trainer.callback_metrics["eval_loss"]
    assert set(module.called) >= {"configure_callbacks", "setup", "on_fit_start", "on_train_epoch_end", "teardown"}
    assert any(isinstance(callback, EarlyStopping) for callback in its.callbacks)
    again, _ = train(kind, ckpt_path=str(tmp_path / "step=3.ckpt"), saver=saver)
    assert torch.equal(weights(again), weights(plain)) and "on_load_checkpoint" in again.called


WAYS = {
    "mixin": lambda hooks: type("Mixed", (type("Mixin", (), hooks), HFModule), {}),
    "decorated": lambda hooks: type("Mine", (HFModule,), {n: functools.partialmethod(h) for n, h in hooks.items()}),
    "patched": lambda hooks: type("Patched", (HFModule,), {}),
    "put in": lambda hooks: type("Mine", (HFModule,), {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_hooks_without_super_change_nothing_wherever_they_are(args, lightning, tmp_path, way):
    called = []
    hooks = {name: lambda self, *given, name=name, **named: called.append(name) for name in KEPT}
    kind = WAYS[way](hooks)
    for name, hook in hooks.items() if way == "patched" else ():
        setattr(kind, name, hook)

    def train(kind, ckpt_path=None, **options):
        torch.manual_seed(0)
        module = kind(Classifier(), args)
        for name, hook in hooks.items() if way == "put in" and kind is not HFModule else ():
            setattr(module, name, functools.partial(hook, module))
        trainer = lightning(precision="bf16-mixed", enable_checkpointing=True, **options)
        trainer.fit(module, HFDataModule(None, rows(40), rows(8)), ckpt_path=ckpt_path)
        return module, trainer

    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    (plain, trainer), (module, its) = train(HFModule), train(kind, callbacks=[saver])
    of_fit = {name for name in KEPT if "test" not in name and "predict" not in name}
    assert of_fit - {*called} == {"on_load_checkpoint"}
    assert torch.equal(weights(module), weights(plain))
    assert its.callback_metrics == trainer.callback_metrics and "eval_loss" in its.callback_metrics
    assert not isinstance(its.strategy.checkpoint_io, HFCheckpointIO), "`teardown` restores the trainer"
    if way == "put in":
        assert module.setup.func is hooks["setup"]
    again, _ = train(kind, str(tmp_path / "step=3.ckpt"), callbacks=[saver])
    assert torch.equal(weights(again), weights(plain)) and "on_load_checkpoint" in called


def test_a_mixin_that_calls_super_is_called_once(args, lightning):
    called = []

    class Mixin:
        def on_train_epoch_end(self):
            super().on_train_epoch_end()
            called.append("mixin")

    class Below(Mixin, HFModule):
        pass

    class Again(Below):
        def on_train_epoch_end(self):
            super().on_train_epoch_end()
            called.append("again")

    lightning().fit(Again(Classifier(), args), HFDataModule(None, rows(16)))
    assert called == ["mixin", "again"] * 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("optimizer_step", "on_before_optimizer_step"),
        ("optimizer_zero_grad", "on_before_zero_grad"),
        ("configure_gradient_clipping", "max_grad_norm"),
        ("clip_gradients", "max_grad_norm"),
        ("lr_scheduler_step", "configure_optimizers"),
    ],
)
def test_hooks_that_would_never_be_called_are_refused_before_training(args, lightning, name, hint):
    called = []

    def hook(self, *given, **named):
        called.append(name)
        return getattr(pl.LightningModule, name)(self, *given, **named)

    module = type("Mine", (HFModule,), {name: hook})(Classifier(), args)
    before = weights(module)
    with pytest.raises(OverrideError, match=rf"`{name}` of Mine(.|\n)*{hint}"):
        lightning().fit(module, HFDataModule(None, rows(16)))
    assert torch.equal(weights(module), before) and not called
    lightning().validate(module, HFDataModule(None, None, rows(8)), verbose=False)  # no update is made there


def test_two_optimizers_of_a_training_step_of_ones_own(args, lightning):
    class Gan(HFModule):
        def configure_optimizers(self):
            return [
                torch.optim.SGD(self.model.inner.parameters(), 0.1),
                torch.optim.SGD(self.model.outer.parameters(), 0.1),
            ]

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                for inputs in batch:
                    self.manual_backward(self.model(**inputs)["loss"] / len(batch))
                optimizer.step()
                self.zero_grad()

    module = Gan(Classifier(), args)
    inner, outer = module.model.inner.weight.clone(), module.model.outer.weight.clone()
    lightning().fit(module, HFDataModule(None, rows(32), rows(8)))
    assert not torch.equal(inner, module.model.inner.weight) and not torch.equal(outer, module.model.outer.weight)


def test_steps_of_ones_own(args, lightning):
    class Own(HFModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("twice_epoch", 2 * loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("own_loss", self.model(**batch.inputs)["loss"])

    trainer = lightning()
    trainer.fit(Own(Classifier(), args), HFDataModule(None, rows(32), rows(8)))
    metrics = trainer.callback_metrics
    assert float(metrics["twice_epoch"]) == pytest.approx(2 * float(metrics["loss_epoch"]))
    assert "own_loss" in metrics


def test_a_backbone_that_a_callback_thaws(args, lightning):
    class Thaw(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.model.inner)

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.model.inner, optimizer)

    seen = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append(module.model.inner.weight.clone())

    module = HFModule(Classifier(), args)
    before = module.model.inner.weight.clone()
    lightning(callbacks=[Thaw(), Look()]).fit(module, HFDataModule(None, rows(32)))
    assert torch.equal(seen[0], before) and not torch.equal(seen[1], before)


def test_what_a_module_reads_of_its_trainer(args, lightning, tmp_path):
    read = {}

    class Own(HFModule):
        def on_train_end(self):
            read.update(step=self.trainer.global_step, total=self.trainer.estimated_stepping_batches,
                        batches=self.trainer.num_training_batches, device=self.device)  # fmt: skip

    trainer = lightning(enable_checkpointing=True)
    module, data = Own(Classifier(), args), HFDataModule(None, rows(32), rows(8), rows(8))
    trainer.fit(module, data)
    assert read == {"step": 8, "total": 8, "batches": 4, "device": torch.device("cpu")}
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    expected = trainer.test(module, data, verbose=False)
    assert trainer.test(module, data, ckpt_path="best", verbose=False) == expected
    other = HFModule(Classifier(), args)
    assert lightning().test(other, data, ckpt_path=str(tmp_path / "own.ckpt"), verbose=False) == expected


def test_a_compiled_module_trains_to_the_same_weights(args, lightning):
    found, traced = [], []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    for compiled in (False, True):
        torch.manual_seed(0)
        module = HFModule(Classifier(dropout=0.0), args)
        trainer = lightning(max_epochs=1)
        trainer.fit(torch.compile(module, backend=backend) if compiled else module, HFDataModule(None, rows(16)))
        found.append(weights(module))
    assert trainer.global_step == 2 and torch.equal(*found) and traced


def test_the_device_is_the_trainers(args, lightning):
    module = HFModule(Classifier(), args)
    module.steps.args.__dict__["device"] = torch.device("meta")  # as on a machine with a GPU
    trainer = lightning()
    trainer.fit(module, HFDataModule(None, rows(16), rows(8)))
    assert module.steps.args.device == torch.device("cpu") and trainer.global_step == 4
