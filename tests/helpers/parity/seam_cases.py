"""The seams of a run of two ranks: each pair of values of its data, metric, updates, evaluations and calls meets once.

A library chooses the rows. Those of `PAIRS` are in every run, and in those of `TRIPLES` every three values meet.
"""

from __future__ import annotations

import functools
import importlib

import torch
from covertable import make
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from helpers import toy
from helpers.parity.cases import BASE, accuracy

EPOCHS = 2
MICRO_BATCHES = 4  # of an epoch, on each of two ranks, which have batches of four
FACTORS = {
    "samples": ("even", "uneven"),  # whether ranks and batches divide both sets
    "metric": ("function", "batches", "torchmetrics", "none"),
    "data": ("map", "stream", "dispatched"),
    "update": ("one_batch", "accumulated", "short_window"),
    "evaluated": ("within", "outside"),
    "run": ("whole", "resumed"),
}
COUNTS = {"even": (32, 24), "uneven": (27, 21)}
WINDOWS = {"one_batch": 1, "accumulated": 2, "short_window": 3}


def rows(strength: int, factors: dict[str, tuple[str, ...]] = FACTORS) -> dict[str, dict[str, str]]:
    """Return rows by their names, in which each combination of so many values is."""
    made = make({name: list(values) for name, values in factors.items()}, strength=strength)
    ordered = [{name: row[name] for name in factors} for row in made]
    return {"_".join(row.values()): row for row in ordered}


PAIRS = rows(2)
TRIPLES = {name: row for name, row in rows(3).items() if name not in PAIRS}


def of_batches(state: dict):
    """Make the function of `batch_eval_metrics`, which counts over the batches of an evaluation."""

    def metric(prediction, compute_result):
        state["right"] = state.get("right", 0) + int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
        state["seen"] = state.get("seen", 0) + len(prediction.label_ids)
        if not compute_result:
            return {}
        return {"accuracy": state.pop("right") / state["seen"], "count": state.pop("seen")}

    return metric


def torchmetrics_of(package: str):
    """Make torchmetrics, which transformers only takes within a function over all predictions."""
    metrics = MetricCollection({"accuracy": MulticlassAccuracy(3, average="micro"), "each": MulticlassAccuracy(3)})
    if package == "hf_compat":
        return metrics

    def metric(prediction):
        metrics.reset()
        metrics.update(torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids))
        return {name: float(value) for name, value in metrics.compute().items()}

    return metric


def parts_of(row: dict[str, str], package: str) -> dict:
    """Return what a Trainer of the row gets, besides its arguments."""
    trained, evaluated = (toy.rows(count, seed=seed) for seed, count in enumerate(COUNTS[row["samples"]]))
    if row["data"] == "stream":
        trained, evaluated = toy.Stream(trained), toy.Stream(evaluated)
    metrics = {"function": lambda: accuracy, "batches": lambda: of_batches({}), "none": lambda: None}
    metrics["torchmetrics"] = functools.partial(torchmetrics_of, package)
    return {"train_dataset": trained, "eval_dataset": evaluated, "compute_metrics": metrics[row["metric"]]()}


def updates_of(row: dict[str, str]) -> int:
    """Return how many updates an epoch has."""
    return -(-MICRO_BATCHES // WINDOWS[row["update"]])


def arguments_of(row: dict[str, str]) -> dict:
    updates = updates_of(row)
    values = {
        "gradient_accumulation_steps": WINDOWS[row["update"]],
        "logging_steps": 1,
        "per_device_eval_batch_size": 4,
    }
    if row["data"] == "stream":
        values["max_steps"] = EPOCHS * updates
    if row["data"] == "dispatched":
        values["accelerator_config"] = {"dispatch_batches": True}
    if row["evaluated"] == "within":
        values |= {"eval_strategy": "steps", "eval_steps": 1}
    if row["metric"] == "batches":
        values["batch_eval_metrics"] = True
    if row["run"] == "resumed":
        values |= {"save_strategy": "steps", "save_steps": resumed_at(row)}
    return values


def resumed_at(row: dict[str, str]) -> int:
    """Return the update of the checkpoint: within the first pass of a stream, else within the second epoch."""
    return 1 if row["data"] == "stream" else updates_of(row) + 1


def finish(row: dict[str, str], trainer) -> dict:
    """Evaluate outside of the training, and resume as another process would, if the row says so."""
    found = {"whole": outside(row, trainer)}
    if row["run"] == "resumed":
        package = type(trainer).__module__.partition(".")[0]
        importlib.import_module(package).set_seed(1)
        again = type(trainer)(model=toy.Classifier(), args=trainer.args, **parts_of(row, package))
        again.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{resumed_at(row)}")
        found["resumed"] = outside(row, again)
    return found


def outside(row: dict[str, str], trainer) -> dict:
    """Return what a training has given, and what is found after it."""
    found = {"weights": {name: value.clone() for name, value in trainer.model.state_dict().items()}}
    if row["evaluated"] == "outside":
        found["evaluated"] = trainer.evaluate()
        found["predicted"] = trainer.predict(parts_of(row, "hf_compat")["eval_dataset"])
    return {**found, "log": trainer.state.log_history, "random": torch.random.get_rng_state()}


def case_of(row: dict[str, str]) -> dict:
    def extra(api) -> dict:
        return {"compute_metrics": parts_of(row, api.__name__)["compute_metrics"]}

    return {
        **BASE,
        "train": lambda: parts_of(row, "hf_compat")["train_dataset"],
        "eval": lambda: parts_of(row, "hf_compat")["eval_dataset"],
        "extra": extra,
        "args": {**BASE["args"], "num_train_epochs": EPOCHS, **arguments_of(row)},
        "after": functools.partial(finish, row),
    }


SEAMS = {name: case_of(row) for name, row in {**PAIRS, **TRIPLES}.items()}
