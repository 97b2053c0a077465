"""torchmetrics as `compute_metrics` gives the same numbers as over all predictions, and keeps none."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from helpers.toy import Classifier, TupleRegressor, pad, regression_rows, rows, sequences, tagger_with_config
from hf_compat import HFDataModule, HFModule, Trainer
from hf_compat.engine import evaluation as evaluation_module
from hf_compat.errors import ArgumentError

ACCURACY = functools.partial(MulticlassAccuracy, num_classes=3, average="micro")

pytestmark = pytest.mark.filterwarnings("ignore:These arguments have no effect")  # args shared with a Trainer


def trainer_of(make_args, compute_metrics, **values):
    torch.manual_seed(0)
    options = {"eval_dataset": rows(30, seed=1), "model": Classifier()} | values.pop("given", {})
    return Trainer(args=make_args(**values), train_dataset=rows(8), compute_metrics=compute_metrics, **options)


@pytest.mark.parametrize(
    ("source", "key"),
    [
        (lambda: ACCURACY(), "eval_MulticlassAccuracy"),
        (lambda: ACCURACY, "eval_MulticlassAccuracy"),
        (lambda: MetricCollection({"acc": ACCURACY()}), "eval_acc"),
        (lambda: lambda: MetricCollection({"acc": ACCURACY()}), "eval_acc"),
    ],
    ids=["metric", "partial", "collection", "factory"],
)
def test_metrics_equal_those_over_all_predictions(make_args, source, key):
    metrics = trainer_of(make_args, source()).evaluate()
    whole = trainer_of(make_args, lambda p: {"acc": (p.predictions.argmax(-1) == p.label_ids).mean()}).evaluate()
    assert metrics[key] == pytest.approx(whole["eval_acc"], rel=1e-6) and metrics["eval_loss"] == whole["eval_loss"]


def test_metrics_of_classes_and_names_are_kept(make_args):
    collection = MetricCollection({"f1": MulticlassF1Score(3), "each": MulticlassAccuracy(3, average=None)})
    metrics = trainer_of(make_args, collection).evaluate()
    assert len(metrics["eval_each"]) == 3 and isinstance(metrics["eval_f1"], float)
    again = trainer_of(make_args, collection).evaluate()
    assert again["eval_each"] == metrics["eval_each"], "the states are reset"


def test_nothing_is_kept_but_losses(make_args, monkeypatch):
    kept = []
    add = evaluation_module.KeptBatches.add
    monkeypatch.setattr(
        evaluation_module.KeptBatches, "add", lambda self, batch: (kept.append(batch.shape), add(self, batch))
    )
    trainer_of(make_args, ACCURACY()).evaluate()
    assert set(kept) <= {(8,), (6,)} and kept  # losses only
    trainer_of(make_args, lambda p: {}).evaluate()
    assert (8, 3) in kept  # with a function, logits are kept


def test_predict_gives_predictions_and_metrics(make_args):
    output = trainer_of(make_args, ACCURACY()).predict(rows(10, seed=2))
    assert output.predictions.shape == (10, 3) and "test_MulticlassAccuracy" in output.metrics


def test_within_training_it_chooses_the_best_model(make_args):
    trainer = trainer_of(
        make_args,
        MetricCollection({"acc": ACCURACY()}),
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="acc",
    )
    trainer.train()
    assert trainer.state.best_metric == max(log["eval_acc"] for log in trainer.state.log_history if "eval_acc" in log)


def test_each_data_set_may_have_metrics_of_its_own(make_args):
    sets = {"a": rows(10, seed=1), "b": rows(10, seed=2)}
    given = {"eval_dataset": sets}
    metrics = trainer_of(make_args, {"a": ACCURACY(), "b": lambda p: {"ones": 1.0}}, given=given).evaluate()
    assert "eval_a_MulticlassAccuracy" in metrics and metrics["eval_b_ones"] == 1.0
    assert "eval_a_ones" not in metrics
    with pytest.raises(ArgumentError, match=r"\['c'\]"):
        trainer_of(make_args, {"c": ACCURACY()}, given=given)


def test_sequences_of_any_length_need_no_padding(make_args):
    metric = MulticlassAccuracy(4, average="micro", ignore_index=-100)
    given = {"model": tagger_with_config(), "eval_dataset": sequences(20), "data_collator": pad}
    trainer = trainer_of(make_args, metric, given=given)
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    found = trainer.evaluate()
    guesses, labels = zip(*(guess_and_labels(trainer.model, row) for row in sequences(20)), strict=True)
    right = (torch.cat(guesses) == torch.cat(labels)).float().mean().item()
    assert found["eval_MulticlassAccuracy"] == pytest.approx(right, rel=1e-6)


def guess_and_labels(model, row):
    with torch.no_grad():
        logits = model(torch.tensor([row["input_ids"]]))["logits"]
    return logits.argmax(-1).flatten(), torch.tensor(row["labels"])


def test_several_outputs_are_told_apart_by_the_user(make_args):
    given = {"model": TupleRegressor(), "eval_dataset": regression_rows(8)}
    trainer = trainer_of(make_args, MeanSquaredError, given=given)
    with pytest.raises(ArgumentError, match="preprocess_logits_for_metrics"):
        trainer.evaluate()
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits[0]
    metrics = trainer.evaluate()
    assert metrics["eval_MeanSquaredError"] == pytest.approx(metrics["eval_loss"], rel=1e-5)


def test_what_is_no_metric_is_refused(make_args):
    with pytest.raises(ArgumentError, match="cannot be called"):
        trainer_of(make_args, 3)
    with pytest.raises(ArgumentError, match="takes no argument and gave"):
        trainer_of(make_args, lambda: {"f1": 1.0}).evaluate()


def test_a_training_metric_is_computed_at_each_log(make_args):
    class Own(Trainer):
        metric = ACCURACY()
        right: list = []

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            self.metric.update(outputs["logits"], inputs["labels"])
            self.right.append((outputs["logits"].argmax(-1) == inputs["labels"]).float().mean().item())
            self.log_metric("accuracy", self.metric)
            return (loss, outputs) if return_outputs else loss

    trainer = Own(Classifier(), make_args(logging_steps=2, max_steps=4), train_dataset=rows(16))
    trainer.train()
    logged = [log["accuracy"] for log in trainer.state.log_history if "accuracy" in log]
    right = trainer.right
    assert logged == pytest.approx([sum(right[:2]) / 2, sum(right[2:]) / 2], rel=1e-6)


def test_a_native_module_computes_them_too(make_args, tmp_path):
    args = make_args(num_train_epochs=1)
    module = HFModule(Classifier(), args, compute_metrics=MetricCollection({"acc": ACCURACY()}))
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, num_sanity_val_steps=0, log_every_n_steps=1,
    )  # fmt: skip
    data = HFDataModule(args, train_dataset=rows(8), eval_dataset=rows(10, seed=1), test_dataset=rows(6, seed=2))
    trainer.fit(module, data)
    assert float(trainer.callback_metrics["eval_acc"]) == pytest.approx(accuracy_of(module.model, rows(10, seed=1)))
    assert trainer.test(module, data, verbose=False)[0]["test_acc"] == pytest.approx(
        accuracy_of(module.model, rows(6, seed=2))
    )


def accuracy_of(model, samples):
    with torch.no_grad():
        guesses = model.eval()(torch.stack([row["x"] for row in samples]))["logits"].argmax(-1)
    return (guesses == torch.tensor([row["labels"] for row in samples])).float().mean().item()


@pytest.mark.parametrize("kind", ["anything", "an optional one"])
def test_a_function_that_can_take_the_predictions_gets_them(make_args, kind):
    def of_anything(*args, **kwargs):
        return {"rows": len(args[0].predictions)}

    def of_an_optional_one(prediction=None, *, digits=3):
        return {"rows": len(prediction.predictions)}

    function = of_anything if kind == "anything" else of_an_optional_one
    trainer = Trainer(Classifier(), make_args(), eval_dataset=rows(9), compute_metrics=function)
    assert trainer.evaluate()["eval_rows"] == 9


@pytest.mark.parametrize(
    "maker",
    [
        functools.partial(MulticlassF1Score, 3),
        functools.partial(MetricCollection, {"MulticlassF1Score": MulticlassF1Score(3)}),
        lambda *, classes=3, **options: MulticlassF1Score(classes, **options),
    ],
)
def test_what_cannot_take_the_predictions_or_is_of_a_class_makes_metrics(make_args, maker):
    trainer = Trainer(Classifier(), make_args(), eval_dataset=rows(9), compute_metrics=maker)
    assert 0 <= trainer.evaluate()["eval_MulticlassF1Score"] <= 1
