"""What Lightning users write into a subclass of `HFModule`: it trains, or is refused by name."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from toy import Classifier, Stream, rows, weights

from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.errors import ArgumentError, OverrideError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning under this torch
]


@pytest.fixture
def make(tmp_path):
    """Arguments for short runs."""
    return lambda **values: TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, use_cpu=True, **{"learning_rate": 0.01, **values}
    )


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


# Parameters beside the model -----------------------------------------------------------------------------------------
class Head(HFModule):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.head = nn.Linear(3, 3)


def add_head(module):
    module.head = nn.Linear(3, 3)


@pytest.mark.parametrize("where", ["__init__", "setup", "configure_model", "on_fit_start"])
def test_parameters_beside_the_model_are_refused_wherever_they_are_added(make, lightning, where):
    hook = {"setup": lambda self, stage: add_head(self)}.get(where, add_head)
    kind = Head if where == "__init__" else type("Late", (HFModule,), {where: hook})
    refused(lightning(), kind(Classifier(), make()), HFDataModule(None, rows(16)), "`head.weight`", kind.__name__)


def test_parameters_beside_the_model_are_refused_where_a_step_calls_the_bases(make, lightning):
    class Own(Head):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    refused(lightning(), Own(Classifier(), make()), HFDataModule(None, rows(16)), "`head.weight`")


def test_parameters_of_the_model_that_come_after_the_optimizer_are_refused(make, lightning):
    class Late(HFModule):
        def on_fit_start(self):
            add_head(self.model)

    refused(lightning(), Late(Classifier(), make()), HFDataModule(None, rows(16)), "`model.head.weight`", "after")


class Weighted(Metric):
    """A metric with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def update(self):
        """Count nothing."""

    def compute(self):
        return self.weight


def test_frozen_parts_and_metrics_beside_the_model_change_nothing(make, lightning):
    class Own(HFModule):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.teacher = nn.Linear(3, 3).requires_grad_(False)
            self.accuracy, self.weighted = MulticlassAccuracy(3), Weighted()

    found = []
    for kind in (HFModule, Own):
        torch.manual_seed(0)
        module = kind(Classifier(), make())
        torch.manual_seed(0)
        lightning().fit(module, HFDataModule(None, rows(16)))
        found.append(weights(module))
    assert torch.equal(*found)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_step_of_ones_own_trains_a_head_beside_the_model_as_lightning_does(make, lightning, decay):
    class Own(Head):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.automatic_optimization = True

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.head(self.model(batch["x"])["logits"]), batch["labels"])

    class ByHand(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.head = Classifier(dropout=0.0), nn.Linear(3, 3)

        training_step = Own.training_step

        def configure_optimizers(self):
            norms = {"model.norm.weight", "model.norm.bias"}
            named = list(self.named_parameters())
            decaying = [p for name, p in named if name not in norms and not name.endswith("bias")]
            others = [p for name, p in named if name in norms or name.endswith("bias")]
            groups = [{"params": decaying, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, lr=0.01, fused=True)

    args = make(weight_decay=decay, lr_scheduler_type="constant")
    ours, by_hand = Own(Classifier(dropout=0.0), args), ByHand()
    by_hand.load_state_dict(ours.state_dict())
    for module in (ours, by_hand):
        lightning(max_epochs=2).fit(module, DataLoader(rows(16), batch_size=4))
    mine, theirs = ours.state_dict(), by_hand.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


# Forward, loss, model ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_forward_that_nothing_calls_is_refused(make, lightning, command):
    class Own(HFModule):
        def forward(self, **inputs):
            raise AssertionError("nothing calls it")

    module, data = Own(Classifier(), make()), HFDataModule(None, rows(16), rows(8), rows(8))
    with pytest.raises(OverrideError, match=r"`forward` of Own would never be called(.|\n)*Hint: "):
        getattr(lightning(), command)(module, data)


@pytest.mark.parametrize("name", ["training_step", "validation_step"])
def test_a_forward_is_refused_where_one_step_does_not_call_it(make, lightning, name):
    class Own(HFModule):
        def forward(self, **inputs):
            return self.model(**inputs)

        def training_step(self, batch, batch_idx):
            if name == "training_step":
                return super().training_step(batch, batch_idx)
            return self(**batch)["loss"]

    data = HFDataModule(None, rows(16), rows(8) if name == "validation_step" else None)
    refused(lightning(), Own(Classifier(), make()), data, "`forward` of Own", name)


def test_a_forward_that_steps_of_ones_own_call_is_called(make, lightning):
    called = []

    class Own(WithModel):
        def forward(self, **inputs):
            called.append(self.trainer.state.stage.value)
            return self.model(**inputs)

        def training_step(self, batch, batch_idx):
            return self(**batch)["loss"]

        def validation_step(self, batch, batch_idx):
            self.log("own", self(**batch)["loss"])

    lightning().fit(Own(Classifier(), make()), HFDataModule(None, rows(16), rows(8)))
    assert set(called) == {"train", "validate", "sanity_check"}


def test_an_overridden_loss_trains_and_evaluates(make, lightning):
    class Own(HFModule):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            loss = loss + self.model.outer.weight.square().sum()
            return (loss, outputs) if return_outputs else loss

    class Penalized(Classifier):
        def forward(self, x, labels=None):
            out = super().forward(x, labels)
            return {**out, "loss": out["loss"] + self.outer.weight.square().sum()}

    found = []
    for kind, model in ((Own, Classifier), (HFModule, Penalized), (HFModule, Classifier)):
        torch.manual_seed(0)
        module = kind(model(), make(gradient_accumulation_steps=2))
        trainer = lightning(max_epochs=2)
        trainer.fit(module, HFDataModule(None, rows(32), rows(8)))
        found.append((weights(module), float(trainer.callback_metrics["eval_loss"])))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert not torch.equal(found[0][0], found[2][0])


def test_a_model_that_is_set_after_the_constructor_is_the_one_that_trains(make, lightning):
    class Own(HFModule):
        def __init__(self, args):
            super().__init__(nn.Identity(), args)
            torch.manual_seed(0)
            self.model = Classifier(dropout=0.0)

    class AtSetup(HFModule):
        def setup(self, stage):
            if isinstance(self.model, nn.Identity):
                torch.manual_seed(0)
                self.model = Classifier(dropout=0.0)

    args = make(train_sampling_strategy="sequential")
    torch.manual_seed(0)
    made = [HFModule(Classifier(dropout=0.0), args), Own(args), AtSetup(nn.Identity(), args)]
    found = []
    for module in made:
        trainer, data = lightning(max_epochs=2), HFDataModule(None, rows(16), rows(8), rows(8))
        trainer.fit(module, data)
        loss = float(trainer.callback_metrics["eval_loss"])
        found.append((weights(module), loss, torch.cat(trainer.predict(module, data))))
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0]) and other[1] == found[0][1] and torch.equal(other[2], found[0][2])


@pytest.mark.parametrize("hook", ["configure_model", "on_fit_start", "on_train_start"])
def test_a_model_that_is_set_too_late_is_refused(make, lightning, hook):
    def late(self):
        self.model = Classifier()

    module = type("Late", (HFModule,), {hook: late})(Classifier(), make())
    refused(lightning(), module, HFDataModule(None, rows(16)), "`model` of Late", "setup")
    module.model = Classifier()  # the run has ended


# Steps ---------------------------------------------------------------------------------------------------------------
class NoAutomatic(HFModule):
    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]


@pytest.mark.parametrize("returned", ["loss", "mapping"])
def test_a_loss_that_nothing_trains_by_is_refused(make, lightning, returned):
    class Own(NoAutomatic):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss} if returned == "mapping" else loss

    refused(
        lightning(), Own(Classifier(), make()), HFDataModule(None, rows(16)), "Own", "automatic_optimization = True"
    )


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_manual_steps_of_ones_own_may_return_their_loss(make, lightning, keeps_graph):
    class Own(HFModule):
        def training_step(self, batch, batch_idx):
            loss = self.model(**batch)["loss"]
            loss.backward()
            self.optimizers(use_pl_optimizer=keeps_graph).step()
            self.optimizers().zero_grad()
            return loss

    module = Own(Classifier(), make())
    before = weights(module)
    lightning().fit(module, HFDataModule(None, rows(16)))
    assert not torch.equal(before, weights(module)) and "training_step" not in vars(module)


@pytest.mark.parametrize("change", ["penalty", "number", "mapping"])
def test_a_change_of_the_loss_that_the_base_has_trained_is_refused(make, lightning, change):
    class Own(HFModule):
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


@pytest.mark.parametrize("own_step", [True, False])
def test_two_ways_to_make_an_update_are_refused(make, lightning, own_step):
    class Own(HFModule):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.automatic_optimization = True

    class Both(Own):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)

    module = (Both if own_step else Own)(Classifier(), make())
    refused(lightning(), module, HFDataModule(None, rows(16)), "automatic_optimization = True")


# Accumulation --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [WithModel, NoAutomatic])
def test_a_window_does_not_pose_as_a_batch_in_a_step_of_ones_own(make, lightning, kind):
    module = kind(Classifier(), make(gradient_accumulation_steps=4))
    refused(lightning(), module, HFDataModule(None, rows(32)), "window of 4 micro-batches", "for inputs in batch:")


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
    class Own(HFModule):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.model(**batch)["loss"])
            self.optimizers().step()
            self.optimizers().zero_grad()

    module = Own(Classifier(), make(gradient_accumulation_steps=4))
    with pytest.raises(OverrideError, match=r"update of one batch(.|\n)*gradient_accumulation_steps=4"):
        lightning().fit(module, DataLoader(rows(64), batch_size=4))
