"""Symptoms that users reported in public, under both engines, against values by hand.

Each is a function of a package and a folder, which returns what it got and what is right. Here it is right, or the
run has said so. Where `transformers` is right, it is right here.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset

import hf_compat
from helpers import toy
from hf_compat.errors import HfCompatError, warn_once

pytestmark = pytest.mark.filterwarnings("default")


class Report(NamedTuple):
    """A symptom, and what a run says where it is as in transformers."""

    run: Callable[[Any, Any], tuple[object, object]]
    says: str | None


REPORTS: dict[str, Report] = {}


def report(says=None):
    def register(run):
        REPORTS[run.__name__] = Report(run, says)
        return run

    return register


class Line(nn.Module):
    """y = w * x, squared error. It notes what it is trained on."""

    def __init__(self, w=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))
        self.trained_on = []

    def forward(self, x, labels=None):
        if self.training:
            self.trained_on.append(x.tolist())
        y = self.w * x
        return {"logits": y} if labels is None else {"loss": ((y - labels) ** 2).mean(), "logits": y}


def points(count, slope=2.0, name="labels"):
    return [{"x": torch.tensor(float(i)), name: torch.tensor(slope * i)} for i in range(count)]


def made(package, folder, model=None, *, kind=None, train=8, evaluated=None, parts=None, **values):
    base = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    base |= {"save_strategy": "no", "logging_steps": 1, "per_device_train_batch_size": 2}
    args = package.TrainingArguments(**{**base, "per_device_eval_batch_size": 2, **values})
    data = {"train_dataset": points(train) if isinstance(train, int) else train, "eval_dataset": evaluated}
    return (kind or package.Trainer)(Line() if model is None else model, args, **data, **(parts or {}))


def logged(trainer, key):
    return [one[key] for one in trainer.state.log_history if key in one]


def scores(values, name="score"):
    left = list(values)
    return lambda prediction: {name: left.pop(0) if left else 0.0}


def saved(folder):
    from safetensors.torch import load_file

    return load_file(str(folder / "model.safetensors"))["w"].item()


EACH = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}


# The loss ------------------------------------------------------------------------------------------------------------


@report("num_items_in_batch")
def a_forward_that_drops_its_keywords(package, folder):  # transformers#47688
    class Dropping(Line):
        def forward(self, x, labels=None, **kwargs):
            return super().forward(x, labels)

    values = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 1}
    trainer = made(package, folder, Dropping(), train=4, **values)
    trainer.train()
    return logged(trainer, "loss")[0], 3.5


@report()
def an_old_compute_loss(package, folder):  # transformers#36331
    class Old(package.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            out = model(**inputs)
            return (out["loss"], out) if return_outputs else out["loss"]

    values = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 1}
    trainer = made(package, folder, kind=Old, train=4, **values)
    trainer.train()
    return logged(trainer, "loss")[0], 3.5


@report()
def a_nan_that_leaves_no_trace(package, folder):  # trl#6702
    class Sometimes(Line):
        def forward(self, x, labels=None):
            out = super().forward(x, labels)
            return {**out, "loss": out["loss"] * (float("nan") if len(self.trained_on) == 3 else 1.0)}

    trainer = made(package, folder, Sometimes(), max_steps=4)
    trainer.train()
    return any("nonfinite" in key for one in trainer.state.log_history for key in one), True


@report()
def a_second_training(package, folder):  # transformers#24758
    trainer = made(package, folder, max_steps=3, learning_rate=0.3)
    trainer.train()
    trainer.train()
    return [round(rate, 6) for rate in logged(trainer, "learning_rate")], [0.3, 0.2, 0.1]


@report("warm-up")
def a_warm_up_before_a_constant_rate(package, folder):  # kohya_ss#2292
    trainer = made(package, folder, max_steps=2, learning_rate=0.1, lr_scheduler_type="constant", warmup_steps=4)
    trainer.train()
    return logged(trainer, "learning_rate")[0] < 0.1, True


# Evaluations ---------------------------------------------------------------------------------------------------------


@report("label_names")
def labels_of_another_name(package, folder):  # transformers#28530, #46457, #21553
    class Named(Line):
        def forward(self, x, actions=None):
            return super().forward(x, actions)

    metrics = scores([1.0])
    trainer = made(package, folder, Named(), evaluated=points(4, name="actions"), parts={"compute_metrics": metrics})
    found = trainer.evaluate()
    return ["eval_score" in found, "eval_loss" in found], [True, True]


@report("drop_last")
def rows_that_drop_last_takes(package, folder):  # transformers#18021
    trainer = made(package, folder, dataloader_drop_last=True, per_device_eval_batch_size=4)
    return len(trainer.predict(points(10)).predictions), 10


@report()
def rows_in_the_samplers_order(package, folder):  # transformers#33514
    data = toy.sequences(7)
    parts = {"data_collator": toy.pad}
    trainer = made(package, folder, toy.Tagger(), parts=parts, train_sampling_strategy="group_by_length")
    labels = trainer.predict(data).label_ids
    return [int((row != -100).sum()) for row in labels], [len(row["labels"]) for row in data]


@report()
def a_short_last_batch(package, folder):  # transformers#16716, #41898
    found = made(package, folder, evaluated=points(9), per_device_eval_batch_size=4).evaluate()
    return round(found["eval_loss"], 4), round(sum(i * i for i in range(9)) / 9, 4)


@report()
def losses_for_the_metrics(package, folder):  # transformers#32307
    seen = []
    parts = {"compute_metrics": lambda p: seen.extend(p.losses.tolist()) or {}}
    made(package, folder, evaluated=points(5), parts=parts, include_for_metrics=["loss"]).evaluate()
    return seen, [0.5, 0.5, 6.5, 6.5, 16.0]


@report()
def predictions_as_lists(package, folder):  # transformers#37593
    seen = []
    parts = {"compute_metrics": lambda p: seen.append([len(one) for one in p.predictions]) or {}}
    made(package, folder, evaluated=points(5), parts=parts, eval_do_concat_batches=False).evaluate()
    return seen, [[2, 2, 1]]


@report()
def the_result_of_metrics_by_batch(package, folder):  # transformers#28769, accelerate#952
    flags = []

    def metrics(prediction, compute_result=False):
        flags.append(compute_result)
        return {"n": 1} if compute_result else {}

    parts = {"compute_metrics": metrics}
    trainer = made(package, folder, evaluated=points(5), parts=parts, batch_eval_metrics=True, max_steps=1)
    trainer.train()
    trainer.evaluate()
    return flags, [False, False, True]


@report("eval_steps")
def evaluations_without_a_strategy(package, folder):  # an error of many scripts
    trainer = made(package, folder, evaluated=points(2), eval_steps=2, max_steps=4)
    trainer.train()
    return len(logged(trainer, "eval_loss")), 2


# The best checkpoint -------------------------------------------------------------------------------------------------


@report("greater_is_better")
def an_error_rate_as_a_score(package, folder):  # transformers#31142, #18274
    values = {**EACH, "max_steps": 3, "metric_for_best_model": "wer", "load_best_model_at_end": True}
    parts = {"compute_metrics": scores([0.5, 0.1, 0.3], "wer")}
    trainer = made(package, folder, evaluated=points(2), parts=parts, **values)
    trainer.train()
    return trainer.model.w.item(), saved(folder / "checkpoint-2")


@report("best evaluation")
def a_best_evaluation_between_two_saves(package, folder):  # transformers#35885
    values = {**EACH, "max_steps": 4, "save_steps": 2, "metric_for_best_model": "score", "greater_is_better": True}
    parts = {"compute_metrics": scores([0.9, 0.5, 0.6, 0.3])}
    trainer = made(package, folder, evaluated=points(2), parts=parts, load_best_model_at_end=True, **values)
    trainer.train()
    return trainer.model.w.item(), saved(folder / "checkpoint-2")


@report()
def a_first_score_that_is_nan(package, folder):  # transformers#10706
    values = {**EACH, "max_steps": 3, "metric_for_best_model": "score", "greater_is_better": True}
    parts = {"compute_metrics": scores([float("nan"), 0.9, 0.6])}
    trainer = made(package, folder, evaluated=points(2), parts=parts, **values)
    trainer.train()
    return trainer.state.best_metric, 0.9


@report()
def a_best_folder_that_is_named(package, folder):  # transformers#35609
    values = {**EACH, "max_steps": 4, "save_steps": 4, "metric_for_best_model": "score", "greater_is_better": True}
    parts = {"compute_metrics": scores([0.1, 0.9, 0.2, 0.3])}
    trainer = made(package, folder, evaluated=points(2), parts=parts, **values)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    return best is None or os.path.isdir(best), True


@report()
def the_metric_of_one_set_of_several(package, folder):  # transformers#22530
    values = {**EACH, "max_steps": 2, "metric_for_best_model": "eval_a_loss", "greater_is_better": False}
    sets = {"a": points(4), "b": points(4, slope=1.0)}
    trainer = made(package, folder, evaluated=sets, **values)
    trainer.train()
    return os.path.basename(str(trainer.state.best_model_checkpoint)), "checkpoint-2"


@report()
def intervals_as_shares(package, folder):  # transformers#38217
    values = {"eval_strategy": "steps", "eval_steps": 0.02, "save_strategy": "steps", "save_steps": 0.1}
    made(package, folder, evaluated=points(2), load_best_model_at_end=True, max_steps=50, **values)
    return "accepted", "accepted"


# Data ----------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(4, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from (points(4)[i] for i in order)


@report()
def the_epoch_of_a_stream(package, folder):  # transformers#26541
    trainer = made(package, folder, train=Stream(), max_steps=4)
    trainer.train()
    orders = [torch.randperm(4, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in range(2)]
    return [x for batch in trainer.model.trained_on for x in batch], [float(i) for order in orders for i in order]


@report()
def epochs_of_accumulated_updates(package, folder):  # transformers#33455, #37777
    trainer = made(package, folder, train=9, num_train_epochs=2, gradient_accumulation_steps=2)
    trainer.train()
    seen = sorted(x for batch in trainer.model.trained_on for x in batch)
    return [trainer.state.global_step, seen], [6, sorted([float(i) for i in range(9)] * 2)]


@report()
def tokens_without_padding(package, folder):  # transformers#29889
    data = toy.sequences(4)
    values = {"num_train_epochs": 1, "include_num_input_tokens_seen": "non_padding"}
    trainer = made(package, folder, toy.Tagger(), train=data, parts={"data_collator": toy.pad}, **values)
    trainer.train()
    return int(trainer.state.num_input_tokens_seen), sum(len(row["input_ids"]) for row in data)


# A resume ------------------------------------------------------------------------------------------------------------


@report("EarlyStoppingCallback")
def patience_after_a_resume(package, folder):  # transformers#28544
    values = {**EACH, "max_steps": 9, "metric_for_best_model": "score", "greater_is_better": True}

    def stopped(where, left, resume=None):
        parts = {"compute_metrics": scores(left), "callbacks": [package.EarlyStoppingCallback(3)]}
        values["load_best_model_at_end"] = True
        trainer = made(package, where, train=32, evaluated=points(2), parts=parts, **values)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.global_step

    left = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    whole = stopped(folder / "a", left)
    shutil.copytree(folder / "a/checkpoint-2", folder / "b/checkpoint-2")
    return [whole, stopped(folder / "b", left[2:], str(folder / "b/checkpoint-2"))], [4, 4]


@report()
def the_order_of_a_second_epoch(package, folder):  # transformers#40690
    values = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}
    whole = made(package, folder / "a", train=8, **values)
    whole.train()
    rest = made(package, folder / "b", train=8, **values)
    rest.train(resume_from_checkpoint=str(folder / "a/checkpoint-6"))
    return rest.model.trained_on, whole.model.trained_on[6:]


@report()
def the_losses_of_a_resumed_run(package, folder):  # transformers#12942, #33336
    values = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3, "learning_rate": 1e-2}
    whole = made(package, folder / "a", train=16, **values)
    of_whole = whole.train().training_loss
    rest = made(package, folder / "b", train=16, **values)
    of_rest = rest.train(resume_from_checkpoint=str(folder / "a/checkpoint-2")).training_loss
    return [logged(rest, "loss"), round(of_rest, 4)], [logged(whole, "loss"), round(of_whole, 4)]


@report()
def checkpoints_of_an_earlier_run(package, folder):  # transformers#37260, #26961
    values = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    made(package, folder, max_steps=6, **values).train()
    for name in os.listdir(folder):
        os.utime(folder / name, (1e9, 1e9))
    made(package, folder, max_steps=2, **values).train()
    return os.path.isdir(folder / "checkpoint-2"), True


@report()
def another_batch_size_after_a_resume(package, folder):  # transformers#43708, #21271
    values = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 2}
    whole = made(
        package, folder / "a", train=16, per_device_train_batch_size=1, gradient_accumulation_steps=4, **values
    )
    whole.train()
    rest = made(package, folder / "b", train=16, per_device_train_batch_size=4, gradient_accumulation_steps=1, **values)
    rest.train(resume_from_checkpoint=str(folder / "a/checkpoint-2"))
    flat = [[x for batch in one.model.trained_on for x in batch] for one in (rest, whole)]
    return [rest.state.max_steps, flat[0]], [4, flat[1][8:]]


# Options -------------------------------------------------------------------------------------------------------------


@report()
def options_of_sgd(package, folder):  # transformers#44075
    trainer = made(package, folder, optim="sgd", optim_args="momentum=0.9,nesterov=True")
    group = trainer.create_optimizer().param_groups[0]
    return [group["momentum"], group["nesterov"]], [0.9, True]


@report("optim_args")
def options_of_adam(package, folder):  # transformers#21317
    trainer = made(package, folder, optim="adamw_torch", optim_args="amsgrad=True")
    return bool(trainer.create_optimizer().param_groups[0]["amsgrad"]), True


def outcome(run, package, folder):
    """What a run got, what is right, and what was said, its error included."""
    folder.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            got, right = run(package, folder)
        except (HfCompatError, TypeError, KeyError) as error:
            return None, "an answer", str(error)
    return got, right, "\n".join(str(one.message) for one in caught)


def is_same(got, right):
    return got == pytest.approx(right, rel=1e-5) if isinstance(right, float) else got == right


@pytest.mark.parametrize("name", REPORTS)
def test_a_reported_symptom_is_right_or_told(tmp_path, name):
    warn_once.cache_clear()
    run, says = REPORTS[name]
    got, right, said = outcome(run, hf_compat, tmp_path / "ours")
    theirs, theirs_right, _ = outcome(run, transformers, tmp_path / "theirs")
    assert is_same(got, right) or not is_same(theirs, theirs_right), "worse than transformers"
    if says is None:
        assert is_same(got, right), said
    else:
        # the run says what is wrong, and the symptom is not gone from transformers
        assert re.search(says, said) and not is_same(theirs, theirs_right)
