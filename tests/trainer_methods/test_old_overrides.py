"""Overrides written for older releases, or with other parameter names, train as they did there."""

from __future__ import annotations

import datasets
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from helpers import toy
from hf_compat import Trainer


class Counting(nn.Module):
    """Divides its loss by `num_items_in_batch` if given, like models of transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 3)

    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        logits = self.linear(x)
        if labels is None:
            return {"logits": logits}
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {"loss": total / (len(labels) if num_items_in_batch is None else num_items_in_batch), "logits": logits}


def of_4_45(self, model, inputs, return_outputs=False):
    outputs = model(**inputs)
    return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def of_4_45_by_super(self, model, inputs, return_outputs=False):
    return Trainer.compute_loss(self, model, inputs, return_outputs=return_outputs)


def own_name_for_items(self, model, inputs, return_outputs=False, num_items=None):
    return Trainer.compute_loss(self, model, inputs, return_outputs, num_items)


def training_step_of_4_45(self, model, inputs):
    return Trainer.training_step(self, model, inputs)


def training_step_with_own_name(self, model, inputs, num_items=None):
    return Trainer.training_step(self, model, inputs, num_items)


def training_step_by_place(self, *args, **kwargs):
    assert len(args) == 3 and not kwargs
    return Trainer.training_step(self, *args, **kwargs)


def mean_loss(outputs, labels, num_items_in_batch=None):
    total = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


OVERRIDES = {
    "compute_loss of 4.45": {"compute_loss": of_4_45},
    "compute_loss of 4.45 by super": {"compute_loss": of_4_45_by_super},
    "compute_loss with a name of its own": {"compute_loss": own_name_for_items},
    "training_step of 4.45": {"training_step": training_step_of_4_45},
    "training_step with a name of its own": {"training_step": training_step_with_own_name},
    "training_step by place": {"training_step": training_step_by_place},
}


@pytest.fixture
def run(make_args):
    def train(overrides, loss_function=None, **values):
        kind = type("Own", (Trainer,), overrides)
        args = make_args(gradient_accumulation_steps=4, max_steps=3, logging_steps=1, **values)
        trainer = kind(Counting(), args, train_dataset=toy.rows(48), compute_loss_func=loss_function)
        trainer.train()
        return trainer, [log for log in trainer.state.log_history if "loss" in log]

    return train


@pytest.mark.parametrize("name", OVERRIDES)
@pytest.mark.parametrize("loss_function", [None, mean_loss], ids=["model's loss", "compute_loss_func"])
def test_the_gradient_is_that_of_the_window(run, name, loss_function):
    expected, expected_logs = run({}, loss_function)
    trainer, logs = run(OVERRIDES[name], loss_function)
    for entry, other in zip(logs, expected_logs, strict=True):
        # a mean of means and a sum over all labels round differently
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert entry["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    for ours, theirs in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_model_of_transformers_too(make_args):
    given = []

    class Recording(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            loss = of_4_45(self, model, inputs, return_outputs)
            given.append(loss.item())
            return loss

    config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    rows = [{"input_ids": torch.randint(0, 30, (6,)), "labels": torch.tensor(i % 2)} for i in range(32)]
    args = make_args(gradient_accumulation_steps=4, max_steps=2, logging_steps=1)
    trainer = Recording(BertForSequenceClassification(config), args, train_dataset=rows)
    trainer.train()
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert logged == pytest.approx([sum(given[:4]) / 4, sum(given[4:]) / 4], rel=1e-5)


def test_what_upstream_passes_by_place_stands_at_its_place(make_args):
    seen = []

    class ByPlace(Trainer):
        def _maybe_log_save_evaluate(self, *args, **kwargs):
            seen.append((args[2] is self.model, len(args), list(kwargs)))
            return super()._maybe_log_save_evaluate(*args, **kwargs)

        def _save_checkpoint(self, *args):
            seen.append(len(args))
            return super()._save_checkpoint(*args)

        def log(self, entries, begun=None):
            seen.append(begun is not None or "eval_loss" in entries or "train_loss" in entries)
            return super().log(entries, begun)

    args = make_args(max_steps=1, logging_steps=1, save_strategy="steps", save_steps=1)
    ByPlace(toy.Classifier(), args, train_dataset=toy.rows(8)).train()
    after_update, *logged_and_saved, at_the_end_of_the_epoch, summary = seen
    assert after_update == (True, 7, ["learning_rate"]) and logged_and_saved == [True, 2] and summary is True
    assert at_the_end_of_the_epoch[:2] == (True, 7)


def test_keywords_handed_on_to_the_base_class_are_accepted(make_args):
    class HandsOn(Trainer):
        def _save_checkpoint(self, model, trial, **kwargs):
            assert kwargs == {}  # as upstream
            super()._save_checkpoint(model, trial, **kwargs)

    args = make_args(max_steps=1, save_strategy="steps", save_steps=1)
    trainer = HandsOn(toy.Classifier(), args, train_dataset=toy.rows(8))
    assert trainer.train().global_step == 1


def test_an_override_that_returns_no_data_set_keeps_it(make_args):
    """Until 4.2, `_remove_unused_columns` changed the data set in place."""

    class KeepsAll(Trainer):
        def _remove_unused_columns(self, dataset, description=None):
            pass

    class HidesInPlace(Trainer):
        def _remove_unused_columns(self, dataset, description=None):
            dataset.set_format(type=dataset.format["type"], columns=["x", "labels"])

    def by_column(rows):
        seen.append(sorted(rows[0]))
        return {name: torch.as_tensor([row[name] for row in rows]) for name in ("x", "labels")}

    rows = datasets.Dataset.from_list([{"x": [float(n)] * 8, "labels": n % 3, "text": "a"} for n in range(8)])
    seen: list[list[str]] = []
    for kind, columns in ((KeepsAll, ["labels", "text", "x"]), (HidesInPlace, ["labels", "x"])):
        seen.clear()
        kind(Counting(), make_args(max_steps=1), train_dataset=rows, data_collator=by_column).train()
        assert seen[0] == columns
