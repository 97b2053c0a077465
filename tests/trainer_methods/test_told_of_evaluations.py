"""What an evaluation says of a result that lacks rows, metrics or a loss, or is in another order."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, SubsetRandomSampler

from helpers import toy
from helpers.line import Line, points
from hf_compat import Trainer
from hf_compat.errors import warn_once


class Named(Line):
    def forward(self, x, target=None):
        return super().forward(x, target)


class Calls:
    """A metric function that counts its calls."""

    count = 0

    def __call__(self, prediction, compute_result=True):
        self.count += 1
        return {"rows": len(prediction.predictions)}


def renamed(rows, old, new):
    return [{new if name == old else name: value for name, value in row.items()} for row in rows]


# A model, its data and arguments, what is told, and data and arguments as the hint says.
NOT_CALLED = [
    (Named, points(4, "target"), {}, r"did not call .* and computed no loss.*label_names=\['target'\]"),
    (Line, renamed(points(4), "labels", "y"), {}, "name 'labels'.*removes `y`"),
    (
        Line,
        [{"x": one["x"]} for one in points(4)],
        {},
        "have `x`, and `label_names` expects `labels`.*a column 'labels'",
    ),
    (Line, points(4), {"label_names": ["other"]}, r"`label_names` expects `other`.*label_names=\['labels'\]"),
    (Line, points(4), {"label_names": ["labels", "other"]}, r"expects `other`.*label_names=\['labels'\]"),
    (Line, points(4), {"prediction_loss_only": True}, "did not call `compute_metrics`, as `prediction_loss_only"),
    (Named, points(4, "target"), {"batch_eval_metrics": True}, r"did not call .*label_names=\['target'\]"),
    (Line, [], {}, "gave nothing, as the evaluation data set has no samples"),
]


@pytest.mark.parametrize(("model", "data", "values", "words"), NOT_CALLED)
def test_metrics_that_were_not_called_and_a_missing_loss_are_told(make_args, told, model, data, values, words):
    metrics = Calls()
    trainer = Trainer(model(), make_args(**values), eval_dataset=data, compute_metrics=metrics)
    trainer.evaluate()
    trainer.evaluate()
    assert metrics.count == 0 and re.search(words, told(), re.DOTALL), told()
    assert len(re.findall("This evaluation", told())) == 1
    # the hint, followed
    mended = {**values, "prediction_loss_only": False}
    if found := re.search(r"label_names=\['(\w+)'\]", told()):
        mended["label_names"] = [found[1]]
    if found := re.search("name 'labels'.*removes `(\\w+)`", told(), re.DOTALL):
        data = renamed(data, found[1], "labels")
    elif "a column 'labels'" in told() or not data:
        data = points(4)
    result = Trainer(model(), make_args(**mended), eval_dataset=data, compute_metrics=metrics).evaluate()
    assert metrics.count and "eval_loss" in result


def test_labels_that_are_none_are_told(make_args, told):
    def collator(features):
        return {"x": torch.stack([one["x"] for one in features]), "labels": None}

    Trainer(Line(), make_args(), eval_dataset=points(4), data_collator=collator, compute_metrics=Calls()).evaluate()
    assert "as the batches have `x`, and `label_names` expects `labels`" in told()


def test_no_evaluation_sets_at_all_are_told(make_args, told):
    Trainer(Line(), make_args(), eval_dataset={}).evaluate()
    assert "gave nothing, as the evaluation data set has no samples" in told()


def test_a_loss_alone_is_missed_and_label_names_bring_it(make_args, told):
    trainer = Trainer(Named(), make_args(), eval_dataset=points(4, "target"))
    assert "eval_loss" not in trainer.evaluate() and "computed no loss" in told()
    trainer = Trainer(Named(), make_args(label_names=["target"]), eval_dataset=points(4, "target"))
    assert "eval_loss" in trainer.evaluate()


def test_torchmetrics_without_labels_are_told(make_args, told):
    from torchmetrics import MeanSquaredError

    Trainer(Line(), make_args(), eval_dataset=points(4, "y"), compute_metrics=MeanSquaredError()).evaluate()
    assert "did not call `compute_metrics`" in told()


def test_whole_evaluations_are_quiet(make_args, told):
    class Own(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            return None, *super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)[1:]

    for kind in (Trainer, Own):
        trainer = kind(Line(), make_args(), eval_dataset=points(10), compute_metrics=Calls())
        trainer.evaluate()
        trainer.predict(points(10))
        trainer.predict([{"x": one["x"]} for one in points(3)])  # a set to predict may have no labels
    trainer.evaluate(toy.SizedStream(points(6)))
    assert not told()


class Short(Line):
    """Gives rows for some samples alone."""

    def forward(self, x, labels=None):
        out = super().forward(x, labels)
        return {**out, "logits": out["logits"][x > 2]}


class OneRow(Line):
    """Gives a number for a batch, as for a sum."""

    def forward(self, x, labels=None):
        out = super().forward(x, labels)
        return {**out, "logits": out["logits"].sum()[None]}


class Beside(Line):
    """Gives something that is no row beside the rows."""

    def forward(self, x, labels=None):
        return {**super().forward(x, labels), "mean": self.w[None]}


def filtering(features):
    kept = [one for one in features if one["x"] != 3]
    return {name: torch.stack([one[name] for one in kept]) for name in kept[0]}


def packing(features):
    """Join all samples of a batch to one row."""
    return {name: torch.stack([one[name] for one in features])[None] for name in features[0]}


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("model", "collator", "words"),
    [
        (Line, filtering, "has 9 rows of 10 samples, as the collator leaves out 1"),
        (Short, None, "has 7 rows of predictions for 10 samples"),
        (OneRow, None, None),
        (Beside, None, None),
        (Line, packing, None),
    ],
)
def test_rows_that_a_collator_or_a_model_loses_are_told(make_args, told, method, model, collator, words):
    args = make_args(per_device_eval_batch_size=4)
    trainer = Trainer(model(), args, eval_dataset=points(10), data_collator=collator, compute_metrics=Calls())
    trainer.evaluate() if method == "evaluate" else trainer.predict(points(10))
    assert (words in told() and told().count("Hint") == 1) if words else not told()


def test_rows_that_the_end_of_a_sampler_loses_are_told(make_args, told):
    class Some(Trainer):
        def _get_eval_sampler(self, eval_dataset):
            return SubsetRandomSampler(range(3)) if len(eval_dataset) == 10 else None

    trainer = Some(Line(), make_args(), compute_metrics=Calls())
    assert trainer.evaluate(points(10))["eval_rows"] == 2, "10 % 8, as in Accelerate"
    assert "left out 1 of 3 rows" in told() and "pass a `torch.utils.data.Subset`" in told()
    assert trainer.evaluate(Subset(points(10), range(3)))["eval_rows"] == 3
    assert told().count("left out") == 1


def test_a_last_batch_that_is_the_only_one_or_that_an_own_loader_drops_is_told(make_args, told):
    class Own(Trainer):
        def get_test_dataloader(self, test_dataset):
            return DataLoader(test_dataset, batch_size=4, drop_last=True)

    Trainer(Line(), make_args(dataloader_drop_last=True), eval_dataset=points(5)).evaluate()
    assert "left out the last 5 samples, as `dataloader_drop_last=True`" in told() and "has no samples" not in told()
    Own(Line(), make_args()).predict(points(10))
    assert "left out the last 2 samples, as its loader drops a short last batch" in told()
    assert "make the loader with `drop_last=False`" in told()


class Longer(IterableDataset):
    """A stream that gives less than its length says."""

    def __len__(self):
        return 40

    def __iter__(self):
        yield from points(8)


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_rows_that_are_left_out_are_told(make_args, told):
    class Some(Trainer):
        def _get_eval_sampler(self, eval_dataset):
            return SubsetRandomSampler(range(3))

    args = make_args(dataloader_drop_last=True, per_device_eval_batch_size=4)
    assert len(Trainer(Line(), args).predict(points(10)).predictions) == 8
    assert "left out the last 2 samples, as `dataloader_drop_last=True`" in told()
    args.dataloader_drop_last = False
    assert len(Trainer(Line(), args).predict(points(10)).predictions) == 10
    Trainer(Line(), args).predict(Longer())
    assert "got 2 batches, and the length of its loader says 10" in told()
    found = Some(Line(), args).predict(points(10)).predictions
    # of the last batch 10 % 4 rows stay, as in Accelerate
    assert found.tolist() == [0, 1] and "left out 8 samples, as its sampler does not give all" in told()


class Backwards:
    """Batches of an order of their own."""

    def __iter__(self):
        yield from ([3, 2], [1, 0])

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    "how",
    [
        {"batch_sampler": Backwards()},
        {"sampler": RandomSampler(range(4), replacement=True, generator=torch.Generator().manual_seed(0))},
    ],
)
def test_rows_of_a_loader_in_an_unknown_order_are_told(make_args, told, how):
    class Own(Trainer):
        def get_test_dataloader(self, test_dataset):
            return DataLoader(test_dataset, **how)

    Own(Line(), make_args()).predict(points(4))
    assert "gave its rows in the order of its sampler" in told()
    for how in ({"sampler": SequentialSampler(range(4))}, {"shuffle": True}):  # as the hint says
        warn_once.cache_clear()
        for batch_size in (1, 3):
            how["batch_size"] = batch_size
            assert Own(Line(), make_args()).predict(points(4)).predictions.tolist() == [0, 1, 2, 3]
    assert told().count("This evaluation") == 1


def test_rows_of_batches_are_told_and_those_that_drop_last_leaves_are_in_order(make_args, told):
    data, by_length = toy.sequences(10), {"train_sampling_strategy": "group_by_length", "per_device_eval_batch_size": 4}
    args = make_args(**by_length, eval_do_concat_batches=False)
    Trainer(toy.Tagger(), args, data_collator=toy.pad).predict(data)
    assert "`eval_do_concat_batches=True`, so that rows can be put in order" in told()
    args = make_args(**by_length, dataloader_drop_last=True)
    found = Trainer(toy.Tagger(), args, data_collator=toy.pad).predict(data).label_ids
    lengths, left = [len(row["labels"]) for row in data], iter(len(row["labels"]) for row in data)
    kept = [int((row != -100).sum()) for row in found]
    assert len(kept) == 8 < len(lengths) and all(length in left for length in kept), "in the data set's order"
    assert "left out the last 2 samples" in told() and told().count("This evaluation") == 2


class Shuffled(Trainer):
    """Evaluates in an order of its own."""

    def _get_eval_sampler(self, eval_dataset):
        return RandomSampler(eval_dataset, generator=torch.Generator().manual_seed(3))


def test_rows_are_in_order_after_an_evaluation_that_failed(make_args):
    loader = DataLoader(points(6), shuffle=True, batch_size=2)

    class Own(Trainer):
        fails = True

        def get_test_dataloader(self, test_dataset):
            return loader

        def prediction_step(self, *given, **more):
            if self.fails:
                raise RuntimeError
            asked = copy.deepcopy(loader.batch_sampler.sampler)  # which notes the order meanwhile
            assert (asked.num_samples, len(asked)) == (6, 6)
            return super().prediction_step(*given, **more)

    trainer, sampler = Own(Line(), make_args()), loader.batch_sampler.sampler
    with pytest.raises(RuntimeError):
        trainer.predict(points(6))
    trainer.fails = False
    for _ in range(2):
        assert trainer.predict(points(6)).predictions.tolist() == [0, 1, 2, 3, 4, 5]
        assert loader.batch_sampler.sampler is sampler


@pytest.mark.parametrize("by_length", [True, False])
def test_rows_of_predictions_are_in_the_order_of_the_data_set(make_args, told, by_length):
    data, model = toy.sequences(13), toy.Tagger()
    parts = {"data_collator": toy.pad, "compute_metrics": lambda p: {"first": int((p.label_ids[0] != -100).sum())}}
    strategy = "group_by_length" if by_length else "random"
    args = make_args(train_sampling_strategy=strategy, per_device_eval_batch_size=3)
    trainer = (Trainer if by_length else Shuffled)(model, args, **parts)
    found = trainer.predict(data)
    lengths = [len(row["labels"]) for row in data]
    assert [int((row != -100).sum()) for row in found.label_ids] == lengths
    plain = Trainer(model, make_args(per_device_eval_batch_size=1), **parts).predict(data)
    for row, right, length in zip(found.predictions, plain.predictions, lengths, strict=True):
        np.testing.assert_allclose(row[:length], right[:length], rtol=1e-5)
    assert found.metrics["test_first"] != lengths[0], "metrics get the rows in the sampler's order"
    assert found.metrics["test_loss"] == trainer.predict(data).metrics["test_loss"] and not told()


def test_eval_loss_by_token_does_not_depend_on_the_batch_size(make_args):
    data, model = toy.sequences(11), toy.Tagger()

    def losses(**values):
        trainers = (
            Trainer(model, make_args(per_device_eval_batch_size=size, **values), data_collator=toy.pad)
            for size in (1, 2, 11)
        )
        return [one.evaluate(data)["eval_loss"] for one in trainers]

    whole = toy.pad(data)
    right = model.eval()(**whole)["loss"].item()
    assert losses(eval_loss_by_token=True) == pytest.approx([right] * 3, rel=1e-6)
    assert losses()[0] != pytest.approx(right, rel=1e-4), "a mean over batches, as in transformers"


@pytest.mark.parametrize(
    ("data", "values", "is_told"),
    [
        (toy.sequences(6), {}, True),
        (toy.sequences(6), {"eval_loss_by_token": True}, False),
        (toy.sequences(6), {"per_device_eval_batch_size": 6}, False),  # one batch
        (toy.sequences(1) * 6, {}, False),  # of one length
    ],
)
def test_a_loss_that_depends_on_the_batch_size_is_told(make_args, told, data, values, is_told):
    args = make_args(**{"per_device_eval_batch_size": 2, **values})
    trainer = Trainer(toy.Tagger(), args, data_collator=toy.pad)
    trainer.evaluate(data)
    trainer.predict(data)
    trainer.evaluate(data)
    assert told().count("set `eval_loss_by_token=True`") == is_told


def test_eval_loss_by_token_weighs_what_has_no_tokens_by_samples(make_args):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x, labels):
            return {"loss": x.mean() + self.weight.sum(), "logits": x}

    rows = [{"x": torch.tensor([float(i)]), "labels": 0.5} for i in range(7)]
    args = make_args(per_device_eval_batch_size=4, eval_loss_by_token=True)
    assert Trainer(Mean(), args).evaluate(rows)["eval_loss"] == 3.0, "not 3.25, the mean of two batches"
