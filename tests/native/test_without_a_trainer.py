"""An `HFModule` in Fabric, or in a loop by hand: its steps are those of any LightningModule."""

from __future__ import annotations

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers.toy import Classifier, rows, weights
from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.engine.windows import Window
from hf_compat.errors import ArgumentError

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers")]


def module_and_arguments(tmp_path, kind=HFModule, **values):
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, use_cpu=True, learning_rate=0.01, max_grad_norm=0.0, **values
    )
    torch.manual_seed(0)
    return kind(Classifier(dropout=0.0), args)


def by_hand(batches, updates):
    """Train the model alone, as HF's optimizer and schedule do."""
    torch.manual_seed(0)
    model = Classifier(dropout=0.0)
    named = list(model.named_parameters())
    plain = [p for name, p in named if name.endswith("bias") or "norm" in name]
    decaying = [p for name, p in named if not (name.endswith("bias") or "norm" in name)]
    optimizer = torch.optim.AdamW([{"params": decaying}, {"params": plain}], lr=0.01, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / updates)
    for batch in batches:
        model(**batch)["loss"].backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return torch.cat([tensor.detach().flatten() for tensor in model.parameters()])


@pytest.mark.parametrize("in_fabric", [True, False])
def test_steps_train_as_those_of_any_module(tmp_path, in_fabric):
    module = module_and_arguments(tmp_path, max_steps=4)
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    loader, step, backward = DataLoader(rows(16), batch_size=4), module, torch.Tensor.backward
    if in_fabric:
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        step, optimizer = fabric.setup(module, optimizer)
        loader, backward = fabric.setup_dataloaders(loader), fabric.backward
    for number, batch in enumerate(loader):
        backward(step.training_step(batch, number))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert torch.equal(weights(module), by_hand(DataLoader(rows(16), batch_size=4), 4))
    module.eval()
    batch = next(iter(loader))
    assert torch.equal(step.validation_step(batch, 0), module.model(**batch)["loss"])
    assert torch.equal(step.predict_step(batch, 0), module.model(**batch)["logits"])


def test_fabric_calls_hooks_that_need_no_trainer(tmp_path):
    called = []

    class Own(HFModule):
        def on_train_start(self):
            called.append("start")

        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            called.append("epoch")

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    fabric.setup(module_and_arguments(tmp_path, Own))
    for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end"):
        fabric.call(hook)
    assert called == ["start", "epoch"]


def test_a_window_gives_the_loss_of_its_update(tmp_path):
    module = module_and_arguments(tmp_path, gradient_accumulation_steps=4)
    window = Window(list(HFDataModule(module.steps.args, rows(16)).train_dataloader()), None, True, 1.0)
    losses = [module.model(**batch)["loss"] for batch in window]
    found = module.training_step(window, 0)
    assert torch.allclose(found, sum(losses) / 4, rtol=0, atol=1e-6)  # added up in another order


def test_a_loss_of_ones_own_is_asked_for(tmp_path):
    class Own(HFModule):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = 3 * model(**inputs)["loss"]
            return (loss, {}) if return_outputs else loss

    module = module_and_arguments(tmp_path, Own)
    batch = next(iter(DataLoader(rows(4), batch_size=4)))
    expected = 3 * module.model(**batch)["loss"]
    assert torch.equal(module.training_step(batch, 0), expected)
    assert torch.equal(module.validation_step(batch, 0), expected)


def test_a_schedule_needs_to_know_its_updates(tmp_path):
    module = module_and_arguments(tmp_path)
    with pytest.raises(ArgumentError, match=r"number of updates(.|\n)*`max_steps`"):
        module.configure_optimizers()
    module.num_training_updates = 3
    assert isinstance(module.configure_optimizers()["optimizer"], torch.optim.AdamW)


def test_a_module_that_was_trained_gives_losses_again(tmp_path, lightning):
    module = module_and_arguments(tmp_path)
    lightning().fit(module, HFDataModule(None, rows(16)))
    batch = next(iter(DataLoader(rows(4), batch_size=4)))
    assert module.training_step(batch, 0).requires_grad


def test_a_function_of_outputs_and_labels_is_the_loss(tmp_path, lightning):
    def loss_of(outputs, labels, num_items_in_batch=None):
        items.append(num_items_in_batch)
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    class ByMethod(HFModule):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs["x"])
            loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    items, found = [], []
    for kind, options in ((HFModule, {"compute_loss_func": loss_of}), (ByMethod, {})):
        args = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, use_cpu=True, learning_rate=0.01,
            gradient_accumulation_steps=2, train_sampling_strategy="sequential",
        )  # fmt: skip
        torch.manual_seed(0)
        module = kind(Classifier(dropout=0.0), args, **options)
        lightning(max_epochs=2).fit(module, HFDataModule(None, rows(32), rows(8)))
        found.append(weights(module))
    assert {int(count) for count in items if count is not None} == {8}
    assert torch.allclose(*found, rtol=0, atol=1e-6)  # a sum divided by 8, and the mean of two means
