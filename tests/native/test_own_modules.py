"""What Lightning users write into a subclass of `HFModule`: it trains, or is refused by name."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from helpers.toy import Classifier, rows, weights
from hf_compat import HFDataModule, HFModule
from hf_compat.errors import HfCompatWarning, OverrideError

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


# Parameters beside the model -----------------------------------------------------------------------------------------
class Head(HFModule):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.head = nn.Linear(3, 3)


def add_head(module):
    module.head = nn.Linear(3, 3)


class HeadLoss(Head):
    """A head that the loss reaches."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = self.head(model(**inputs)["logits"])
        loss = nn.functional.cross_entropy(logits, inputs["labels"])
        return (loss, {"logits": logits}) if return_outputs else loss


@pytest.mark.parametrize("where", ["__init__", "setup", "configure_model"])
def test_parameters_beside_the_model_are_trained_wherever_they_are_added(make, lightning, where):
    hook = {"setup": lambda self, stage: add_head(self)}.get(where, add_head)
    kind = HeadLoss
    if where != "__init__":
        kind = type("Late", (HFModule,), {where: hook, "compute_loss": HeadLoss.compute_loss})
    found = []
    for rate in (0.01, 0.0):
        torch.manual_seed(0)
        module = kind(Classifier(dropout=0.0), make(learning_rate=rate, lr_scheduler_type="constant"))
        torch.manual_seed(1)
        lightning().fit(module, HFDataModule(None, rows(16), rows(8)))
        found.append(module.head.weight)
    assert not torch.equal(*found)


def test_parameters_beside_the_model_that_come_after_the_optimizer_are_refused(make, lightning):
    module = type("Late", (HFModule,), {"on_fit_start": add_head})(Classifier(), make())
    refused(lightning(), module, HFDataModule(None, rows(16)), "`head.weight`", "after")


def test_a_head_goes_into_a_checkpoint_and_a_folder_says_that_it_leaves_it_out(make, lightning, tmp_path):
    module, data = HeadLoss(Classifier(dropout=0.0), make()), HFDataModule(None, rows(16))
    trainer = lightning(max_epochs=2)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.warns(HfCompatWarning, match=r"no place for: head.weight, head.bias(.|\n)*\.ckpt"):
        module.save_hf_checkpoint(tmp_path / "checkpoint-8")
    again = HeadLoss(Classifier(dropout=0.0), make())
    lightning(max_epochs=2).fit(again, data, ckpt_path=tmp_path / "one.ckpt")
    assert torch.equal(module.head.weight, again.head.weight)


def test_a_head_that_nothing_calls_is_told_of(make, lightning):
    with pytest.warns(HfCompatWarning, match=r"`head.weight`(.|\n)*stay as they are"):
        lightning().fit(Head(Classifier(), make()), HFDataModule(None, rows(16)))


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


@pytest.mark.parametrize("says", [True, None])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_step_of_ones_own_trains_a_head_beside_the_model_as_lightning_does(make, lightning, decay, says):
    class Own(Head):
        def __init__(self, *parts):
            super().__init__(*parts)
            if says is not None:
                self.automatic_optimization = says

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

    args = make(weight_decay=decay, lr_scheduler_type="constant", max_grad_norm=0.1)
    ours, by_hand = Own(Classifier(dropout=0.0), args), ByHand()
    by_hand.load_state_dict(ours.state_dict())
    for module in (ours, by_hand):
        clips = {} if module is ours else {"gradient_clip_val": 0.1}
        lightning(max_epochs=2, **clips).fit(module, DataLoader(rows(16), batch_size=4))
    mine, theirs = ours.state_dict(), by_hand.state_dict()
    # Lightning adds up the norm in the order of the optimizer's groups, HF in that of the parameters
    tolerance = 0.0 if says else 1e-6
    assert all(torch.allclose(mine[name], theirs[name], rtol=0, atol=tolerance) for name in theirs)


# Forward, loss, model ------------------------------------------------------------------------------------------------
def doubled(out):
    return {**out, "loss": 2 * out["loss"], "logits": out["logits"] + 1} if "loss" in out else out


class Doubled(Classifier):
    def forward(self, x, labels=None):
        return doubled(super().forward(x, labels))


class DoubledAround(HFModule):
    """The same around the model."""

    def forward(self, x, labels=None):
        return doubled(self.model(x, labels))


class DoubledAroundAll(HFModule):
    def forward(self, **inputs):
        return doubled(super().forward(**inputs))


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}])
@pytest.mark.parametrize("around", [DoubledAround, DoubledAroundAll])
def test_a_forward_of_ones_own_is_called_by_every_step(make, lightning, around, options):
    found = []
    for kind, model in ((HFModule, Doubled), (around, Classifier), (HFModule, Classifier)):
        torch.manual_seed(0)
        module = kind(model(), make(gradient_accumulation_steps=2, bf16=bool(options)))
        trainer, data = lightning(max_epochs=2, **options), HFDataModule(None, rows(16), rows(8), rows(8), None)
        trainer.fit(module, data)
        [validated], [tested] = trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)
        logits = torch.cat(trainer.predict(module, data))
        found.append([weights(module), validated["eval_loss"], tested["test_loss"], logits])
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*found[:2], strict=True))
    assert not any(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*found[1:], strict=True))


def test_the_columns_of_a_forward_of_ones_own_stay(make, lightning):
    class Own(HFModule):
        def forward(self, x, weight, labels=None):
            seen.append(weight)
            return self.model(x, labels)

    seen, data = [], [{**row, "weight": 1.0, "other": "text"} for row in rows(16)]
    lightning().fit(Own(Classifier(), make()), HFDataModule(None, data))
    assert len(seen) == 4


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


class InModule(HFModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": 2 * batch["x"]}


class InData(HFDataModule):
    on_after_batch_transfer = InModule.on_after_batch_transfer


class Doubles(Classifier):
    def forward(self, x, labels=None):
        return super().forward(2 * x, labels)


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
@pytest.mark.parametrize(("kind", "data_kind"), [(InModule, HFDataModule), (HFModule, InData)])
def test_hooks_that_transfer_batches_change_each_micro_batch(make, lightning, kind, data_kind):
    found = []
    for module_kind, of_data, model in ((kind, data_kind, Classifier), (HFModule, HFDataModule, Doubles)):
        torch.manual_seed(0)
        module = module_kind(model(), make(gradient_accumulation_steps=4, per_device_eval_batch_size=3))
        trainer, data = lightning(max_epochs=2), of_data(None, rows(28), rows(8), rows(8))
        trainer.fit(module, data)
        loss = float(trainer.callback_metrics["eval_loss"])
        found.append((weights(module), loss, torch.cat(trainer.predict(module, data))))
    (ours, loss, logits), (theirs, expected, others) = found
    assert torch.equal(ours, theirs) and loss == expected and torch.equal(logits, others)
