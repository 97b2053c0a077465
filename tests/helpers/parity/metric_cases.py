"""Evaluations with each kind of metric, on data in each form that divides between the ranks or does not.

One case evaluates all of them, as processes are costly. `cases.py` says what a case is.
"""

from __future__ import annotations

import itertools

import torch
from torchmetrics import Metric

from helpers import toy
from helpers.parity.cases import case

SIZE = 4  # samples of a rank's batch
# A round of two ranks has 8 samples. The last one: full, short for one rank, for one rank alone, for both, the only one
LENGTHS = (16, 10, 12, 13, 3)


class Right(Metric):
    """The share of right guesses, and how many were counted, in whole numbers."""

    def __init__(self):
        super().__init__()
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits, labels):
        assert len(labels), "a rank without samples has nothing to update"
        self.right += (logits.argmax(-1) == labels).sum()
        self.count += labels.numel()

    def compute(self):
        return torch.stack([self.right.double() / self.count, self.count.double()])


def right(prediction):
    guesses = prediction.predictions.argmax(-1)
    return {"Right": [int((guesses == prediction.label_ids).sum()) / len(guesses), float(len(guesses))]}


def right_by_batch():
    seen = []

    def metric(prediction, compute_result):
        found = prediction.predictions.argmax(-1) == prediction.label_ids
        seen.append((found.sum().item(), len(found)))
        good, count = map(sum, zip(*seen, strict=True))
        return {"Right": [good / count, *seen]} if compute_result else {}

    return metric


def metrics_of(kind, knows_torchmetrics):
    """Return `compute_metrics` of a kind. transformers has no torchmetrics, so a function gives their values there."""
    if kind == "torchmetrics":
        return Right() if knows_torchmetrics else right
    return {"function": right, "by batch": right_by_batch(), "none": None}[kind]


KINDS = ("none", "function", "by batch", "torchmetrics")
# The form of the data → how it is made, and the options of Accelerate
FORMS = {
    "map-style": (toy.Table, {}),
    "map-style, dispatched": (toy.Table, {"dispatch_batches": True}),
    "stream": (toy.Stream, {"dispatch_batches": False}),
    "stream, dispatched": (toy.Stream, {}),
    "sized stream": (toy.SizedStream, {"dispatch_batches": False}),
    "sized stream, dispatched": (toy.SizedStream, {}),
}


def evaluate_all(trainer):
    """Return what evaluations and predictions give, by the kind of metric, the form of the data and its length."""
    found = {}
    is_ours = type(trainer).__module__.startswith("hf_compat")
    for (form, (data, options)), kind in itertools.product(FORMS.items(), KINDS):
        # docs/differences.md: each sample counts once
        counts_once = form == "sized stream" or (form == "stream" and trainer.args.world_size == 1)
        if counts_once and not is_ours:
            data, options = FORMS["map-style"]
        args = type(trainer.args)(
            trainer.args.output_dir, use_cpu=True, report_to="none", disable_tqdm=True, per_device_eval_batch_size=SIZE,
            batch_eval_metrics=kind == "by batch", accelerator_config=options,
        )  # fmt: skip
        one = type(trainer)(trainer.model, args, compute_metrics=metrics_of(kind, is_ours))
        for length in LENGTHS:
            rows = data(toy.rows(length, seed=5))
            if kind == "by batch":
                one.compute_metrics = right_by_batch()
            if kind != "none":
                found[form, kind, length] = one.evaluate(rows)
            if kind in ("none", "torchmetrics"):
                found[form, kind, length, "predict"] = [*one.predict(rows)]
    return found


case("each_metric_over_each_data", {"max_steps": 1}, after=evaluate_all)
