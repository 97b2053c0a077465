"""A `training_step` of the user's own in a subclass of `HFModule`: what it returns is trained, or it is refused."""

from __future__ import annotations

import types
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers.toy import Classifier, Stream, rows, weights
from hf_compat import HFDataModule, HFModule
from hf_compat.errors import ArgumentError, HfCompatWarning, LossError, OverrideError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning under this torch
]


def refused(trainer, module, data, *parts):
    """Check that a fit is refused before a weight has changed, in words that hold these parts."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(OverrideError) as raised:
        trainer.fit(module, data)
    assert all(part in str(raised.value) for part in parts), str(raised.value)
    assert all(torch.equal(before.get(name, tensor), tensor) for name, tensor in module.state_dict().items())


class WithModel(HFModule):
    """Lightning trains by the loss that the step returns."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]


class NoAutomatic(HFModule):
    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]


class Mapping(HFModule):
    def training_step(self, batch):
        return {"loss": self.model(**batch)["loss"], "number": 3}


class Calls(HFModule):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class OtherNames(HFModule):
    """Lightning passes the number of a batch by position to a step with a second parameter."""

    def training_step(self, inputs, number):
        return super().training_step(inputs, number)


class ItsLoss(HFModule):
    def training_step(self, batch, batch_idx):
        return 1.0 * super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", [NoAutomatic, Mapping, Calls, OtherNames, ItsLoss])
def test_a_loss_that_a_step_returns_is_what_hfs_updates_are_made_of(make, lightning, kind, accumulation):
    found = []
    for each in (HFModule, kind):
        torch.manual_seed(0)
        module = each(Classifier(), make(gradient_accumulation_steps=accumulation, lr_scheduler_type="linear"))
        trainer = lightning(max_epochs=2)
        trainer.fit(module, HFDataModule(None, rows(28), rows(8)))  # with a short last window
        numbers = [float(trainer.callback_metrics[name]) for name in ("loss_epoch", "grad_norm", "eval_loss")]
        found.append((weights(module), trainer.global_step, *numbers))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1:] == found[1][1:]
    assert "training_step" not in vars(module) and "training_step" not in vars(module.steps)


@pytest.mark.parametrize("data", ["windows", "plain"])
def test_a_step_and_a_forward_that_are_put_into_a_module_are_called(make, lightning, data):
    def forward(self, x, labels=None):
        outputs = self.model(x, labels)
        return {**outputs, "loss": 3 * outputs["loss"]}

    def training_step(self, batch, batch_idx):
        return 3 * self.model(**batch)["loss"]

    found = []
    for name, own in (("training_step", training_step), ("forward", forward)):
        for kind in (type("Own", (HFModule,), {name: own}), HFModule):
            torch.manual_seed(0)
            module = kind(Classifier(dropout=0.0), make(optim="sgd", max_grad_norm=0.0))
            if kind is HFModule:
                setattr(module, name, types.MethodType(own, module))
            trainer = lightning()
            trainer.fit(module, HFDataModule(None, rows(16)) if data == "windows" else DataLoader(rows(16), 4))
            assert trainer.global_step == 4 and (name in vars(module)) == (kind is HFModule)
            found.append(weights(module))
        assert torch.equal(*found[-2:]), name


def test_what_a_step_adds_to_hfs_loss_is_trained(make, lightning):
    class Penalty(HFModule):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.model.outer.weight.square().sum()

    class InTheModel(Classifier):
        def forward(self, x, labels=None):
            out = super().forward(x, labels)
            return {**out, "loss": out["loss"] + self.outer.weight.square().sum()}

    found = []
    for kind, model in ((Penalty, Classifier), (HFModule, InTheModel), (HFModule, Classifier)):
        torch.manual_seed(0)
        module = kind(model(), make(gradient_accumulation_steps=2))
        lightning(max_epochs=2).fit(module, HFDataModule(None, rows(32)))
        found.append(weights(module))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


class Counting(Classifier):
    """Divides its loss by the items of the whole window, as models of transformers do."""

    def forward(self, x, labels=None, num_items_in_batch=None, **_):
        logits = super().forward(x)["logits"]
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {"loss": total / (len(x) if num_items_in_batch is None else num_items_in_batch), "logits": logits}


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_loss_of_hfs_that_counts_items_keeps_its_weight(make, lightning, penalty):
    class Own(HFModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + penalty * self.model.outer.weight.square().sum() if penalty else loss

    class ByLoss(HFModule):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            if self.training:
                loss = loss + penalty * self.model.outer.weight.square().sum() / 4
            return (loss, outputs) if return_outputs else loss

    found = []
    for kind in (Own, ByLoss):
        torch.manual_seed(0)
        module = kind(Counting(), make(gradient_accumulation_steps=4, remove_unused_columns=False))
        lightning(max_epochs=2).fit(module, HFDataModule(None, rows(32)))
        found.append(weights(module))
    # with a penalty the loss is multiplied and divided by 4 once
    assert torch.equal(*found) if not penalty else torch.allclose(*found, rtol=0, atol=1e-6)


def test_a_step_of_ones_own_and_a_plain_loader_make_the_updates_that_the_schedule_is_planned_for(make, lightning):
    rates, numbers = [], []

    class Own(HFModule):
        def training_step(self, batch, batch_idx):
            numbers.append(batch_idx)
            return self.model(**batch)["loss"]

        def on_before_optimizer_step(self, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    args = make(gradient_accumulation_steps=4, lr_scheduler_type="linear")
    lightning().fit(Own(Classifier(), args), DataLoader(rows(64), batch_size=4))
    assert rates == pytest.approx([0.01 * (1 - update / 4) for update in range(4)])
    assert numbers == list(range(16))


def test_values_that_a_step_logs_are_means_over_its_micro_batches(make, lightning):
    class Own(HFModule):
        def training_step(self, batch, batch_idx):
            loss = self.model(**batch)["loss"]
            self.log("loss", 7.0)  # its own, in the place of ours
            self.log("number", float(batch_idx), on_step=False, on_epoch=True)
            return loss

    trainer = lightning()
    trainer.fit(Own(Classifier(), make(gradient_accumulation_steps=4)), HFDataModule(None, rows(32)))
    assert float(trainer.callback_metrics["number"]) == 3.5 and float(trainer.callback_metrics["loss"]) == 7.0
    assert "learning_rate" in trainer.callback_metrics


def test_a_loss_without_a_gradient_is_refused(make, lightning):
    class Own(HFModule):
        def training_step(self, batch, batch_idx):
            return self.model(**batch)["loss"].detach()

    with pytest.raises(LossError, match="does not require grad"):
        lightning().fit(Own(Classifier(), make()), HFDataModule(None, rows(16)))


def manual(self, batch, batch_idx):
    self.manual_backward(self.model(**batch)["loss"])
    self.optimizers().step()


def stepping(self, batch, batch_idx):
    loss = self.model(**batch)["loss"]
    loss.backward()
    self.optimizers().step()
    return loss


@pytest.mark.parametrize("step", [manual, stepping])
def test_a_step_that_makes_updates_has_to_say_so(make, lightning, step):
    module = type("Own", (HFModule,), {"training_step": step})(Classifier(), make())
    with pytest.raises(OverrideError, match=r"`training_step` of Own(.|\n)*automatic_optimization = False"):
        lightning().fit(module, HFDataModule(None, rows(16)))


def test_a_step_that_reads_batches_itself_is_refused(make, lightning):
    step = {"training_step": lambda self, dataloader_iter: None}
    module = type("Own", (HFModule,), step)(Classifier(), make())
    refused(lightning(), module, HFDataModule(None, rows(16)), "`training_step` of Own takes `dataloader_iter`")


@pytest.mark.parametrize("where", ["init", "body", "mixin"])
def test_what_an_author_says_of_the_optimization_holds_wherever_it_is_said(make, where):
    class InInit(HFModule):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.automatic_optimization = True

    class InBody(HFModule):
        automatic_optimization = True

    class Mixin:
        automatic_optimization = True

    class Mixed(Mixin, HFModule):
        pass

    module = {"init": InInit, "body": InBody, "mixin": Mixed}[where](Classifier(), make())
    assert module.automatic_optimization
    module.automatic_optimization = False
    assert not module.automatic_optimization


@pytest.mark.parametrize("automatic", [True, False])
def test_a_property_may_say_who_makes_the_updates(make, lightning, automatic):
    class Own(HFModule):
        is_automatic = automatic

        @property
        def automatic_optimization(self):
            return self.is_automatic

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch)["loss"]
            if automatic:
                return loss
            self.manual_backward(loss)
            self.optimizers().step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = type("Heir", (Own,), {})(Classifier(), make())
    before, trainer = weights(module), lightning()
    trainer.fit(module, DataLoader(rows(16), 4))
    assert module.automatic_optimization is automatic and trainer.global_step == 4
    assert not torch.equal(before, weights(module))
    module.is_automatic = not automatic
    assert module.automatic_optimization is not automatic


def test_a_hook_that_automatic_optimization_alone_calls_leaves_the_updates_to_lightning(make, lightning):
    called = []

    class Own(HFModule):
        def training_step(self, batch, batch_idx):
            return self.model(**batch)["loss"]

        def optimizer_step(self, *args, **kwargs):
            called.append(self.trainer.global_step)
            super().optimizer_step(*args, **kwargs)

    lightning().fit(Own(Classifier(), make()), HFDataModule(None, rows(16)))
    assert called == [0, 1, 2, 3]


class Declared(HFModule):
    """Makes its updates itself, and says so."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.automatic_optimization = False


def test_a_loss_that_nothing_trains_by_is_refused(make, lightning):
    class Own(Declared):
        def training_step(self, batch, batch_idx):
            return self.model(**batch)["loss"]

    refused(lightning(), Own(Classifier(), make()), HFDataModule(None, rows(16)), "Own", "automatic_optimization")


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_manual_steps_of_ones_own_may_return_their_loss(make, lightning, keeps_graph):
    class Own(Declared):
        def training_step(self, batch, batch_idx):
            loss = self.model(**batch)["loss"]
            loss.backward()
            self.optimizers(use_pl_optimizer=keeps_graph).step()
            self.optimizers().zero_grad()
            self.lr_schedulers().step()
            return loss

    module = Own(Classifier(), make())
    before = weights(module)
    lightning().fit(module, HFDataModule(None, rows(16)))
    assert not torch.equal(before, weights(module)) and "training_step" not in vars(module)


@pytest.mark.parametrize("schedule", ["linear", "constant"])
@pytest.mark.parametrize("steps_it", ["never", "in the step", "in a hook"])
def test_a_schedule_that_manual_steps_leave_alone_is_named(make, lightning, steps_it, schedule):
    class Own(Declared):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.model(**batch)["loss"])
            self.optimizers().step()
            self.optimizers().zero_grad()
            if steps_it == "in the step":
                self.lr_schedulers().step()

        def on_train_batch_end(self, *args):
            if steps_it == "in a hook":
                self.lr_schedulers().step()

    module = Own(Classifier(), make(warmup_steps=0 if schedule == "constant" else 2, lr_scheduler_type=schedule))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lightning().fit(module, HFDataModule(None, rows(16)))
    told = [str(warning.message) for warning in caught if issubclass(warning.category, HfCompatWarning)]
    if steps_it == "never" and schedule == "linear":
        (message,) = told
        assert "`training_step` of Own" in message and "the learning rate stays 0" in message
        assert "lr_schedulers().step()" in message and "`max_grad_norm=1.0`" in message
    else:
        assert told == []


@pytest.mark.parametrize("change", ["penalty", "number", "mapping"])
def test_a_change_of_the_loss_that_the_base_has_trained_is_refused(make, lightning, change):
    class Own(Declared):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if change == "number":
                return 0.5 * loss
            penalized = loss + self.model.outer.weight.square().sum()
            return {"loss": penalized} if change == "mapping" else penalized

    with pytest.raises(OverrideError, match=r"changes the loss(.|\n)*compute_loss"):
        lightning().fit(Own(Classifier(), make()), HFDataModule(None, rows(16)))


def test_what_a_step_returns_beside_the_loss_that_the_base_has_trained_reaches_callbacks(make, lightning):
    seen = []

    class Own(HFModule):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx).clone(), "number": batch_idx}

    class Keeps(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(outputs["number"])

    lightning(callbacks=[Keeps()]).fit(Own(Classifier(), make()), HFDataModule(None, rows(16)))
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("norm", [0.0, 0.1])
def test_lightnings_updates_may_be_made_of_hfs_loss(make, lightning, accumulation, norm):
    """Both make the same updates where an epoch has no short window."""

    class Automatic(HFModule):
        automatic_optimization = True

    found = []
    for kind in (HFModule, Automatic):
        torch.manual_seed(0)
        module = kind(Classifier(), make(gradient_accumulation_steps=accumulation, max_grad_norm=norm))
        lightning(max_epochs=2).fit(module, HFDataModule(None, rows(32)))
        found.append(weights(module))
    # Lightning adds up the norm in the order of the optimizer's groups, HF in that of the parameters
    assert torch.allclose(*found, rtol=0, atol=1e-6 if norm else 0.0)


# Accumulation --------------------------------------------------------------------------------------------------------
def test_a_window_does_not_pose_as_a_batch_in_updates_of_ones_own(make, lightning):
    class Own(Declared):
        def training_step(self, batch, batch_idx):
            return self.model(**batch)["loss"]

    module = Own(Classifier(), make(gradient_accumulation_steps=4))
    refused(lightning(), module, HFDataModule(None, rows(32)), "window of 4 micro-batches", "for inputs in batch:")


@pytest.mark.parametrize("kind", [WithModel, NoAutomatic])
def test_a_step_of_ones_own_trains_each_micro_batch(make, lightning, kind):
    class Own(kind):
        def training_step(self, batch, batch_idx):
            seen.append(len(batch["x"]))
            assert type(batch) is dict
            return super().training_step(batch, batch_idx)

    seen = []
    trainer = lightning()
    trainer.fit(Own(Classifier(), make(gradient_accumulation_steps=4)), HFDataModule(None, rows(32)))
    assert seen == [4] * 8 and trainer.global_step == 2


class Plain(pl.LightningModule):
    """A LightningModule that knows nothing of windows."""

    def __init__(self, automatic=True):
        super().__init__()
        self.network, self.seen, self.kinds = Classifier(dropout=0.0), 0, set()
        self.automatic_optimization = automatic

    def training_step(self, batch, batch_idx):
        self.seen += len(batch["x"])
        self.kinds.add(type(batch))
        return self.network(**batch)["loss"]

    def validation_step(self, batch, batch_idx):
        self.log("own", self.network(**batch)["loss"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_plain_module_gets_plain_batches(make, lightning, accumulation, with_length):
    torch.manual_seed(0)
    module, other = Plain(), Plain()
    other.load_state_dict(module.state_dict())
    args = make(gradient_accumulation_steps=accumulation, train_sampling_strategy="sequential")
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulation}
    data = HFDataModule(args, rows(32) if with_length else Stream(rows(32)), rows(8))
    trainer, by_hand = lightning(**options), lightning(**options)
    trainer.fit(module, data)
    by_hand.fit(other, DataLoader(rows(32), batch_size=4), DataLoader(rows(8), batch_size=8))
    assert module.seen == 64 and module.kinds == {dict} and trainer.global_step == by_hand.global_step
    ours, theirs = module.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("automatic", "hint"), [(True, r"accumulate_grad_batches=4` to"), (False, "leave the argument")]
)
def test_a_plain_module_is_not_given_accumulation_that_its_trainer_does_not_know(make, lightning, automatic, hint):
    module = Plain(automatic)
    with pytest.raises(ArgumentError, match=rf"`gradient_accumulation_steps=4`(.|\n)*Plain(.|\n)*{hint}"):
        lightning().fit(module, HFDataModule(make(gradient_accumulation_steps=4), rows(32)))
    assert module.seen == 0


@pytest.mark.parametrize("said_by", ["arguments", "trainer"])
def test_an_automatic_step_accumulates_plain_batches_and_its_schedule_ends_with_the_run(make, lightning, said_by):
    rates = []

    class Own(WithModel):
        def on_before_optimizer_step(self, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    args = make(gradient_accumulation_steps=4 if said_by == "arguments" else 1, lr_scheduler_type="linear")
    trainer = lightning(max_epochs=2, accumulate_grad_batches=4 if said_by == "trainer" else 1)
    trainer.fit(Own(Classifier(), args), DataLoader(rows(64), batch_size=4))
    assert rates == pytest.approx([0.01 * (1 - update / 8) for update in range(8)])
    assert trainer.accumulate_grad_batches == (4 if said_by == "trainer" else 1)


def test_accumulation_that_both_sides_say_is_refused(make, lightning):
    module = WithModel(Classifier(), make(gradient_accumulation_steps=4))
    with pytest.raises(ArgumentError, match=r"gradient_accumulation_steps=4(.|\n)*accumulate_grad_batches=2"):
        lightning(accumulate_grad_batches=2).fit(module, DataLoader(rows(64), batch_size=4))


def test_a_manual_step_that_leaves_accumulation_out_is_refused(make, lightning):
    class Own(Declared):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.model(**batch)["loss"])
            self.optimizers().step()
            self.optimizers().zero_grad()

    module = Own(Classifier(), make(gradient_accumulation_steps=4))
    with pytest.raises(OverrideError, match=r"update of one batch(.|\n)*gradient_accumulation_steps=4"):
        lightning().fit(module, DataLoader(rows(64), batch_size=4))
