"""What a Trainer says that it was given beside its arguments."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torchmetrics

from helpers.toy import Classifier, Stream, rows, tiny_gpt2
from hf_compat import ProgressCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback
from hf_compat.trainer_methods.run_parts import run_parts

MODEL = Classifier()
MEAN, SETS = torchmetrics.MeanMetric(), {"a": Stream(rows(4)), "b": None}
SGD = torch.optim.SGD(MODEL.parameters(), 0.1)
PLAIN = {
    "optimizer": None, "has_schedule": False, "unread": True, "loss": None, "metrics": "none",
    "generates": False, "trains_on_stream": False, "has_length": True, "has_other_sets": False, "has_config": False,
    "has_trackers": False, "prints_logs": True, "reads": False,
}  # fmt: skip


class Mentions(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.seen = args.warmup_steps


class OwnOptimizer(Trainer):
    def create_optimizer(self, model=None):
        return SGD


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)["loss"]


class CallsOurs(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class Smooths(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.label_smoother(model(**inputs), inputs["labels"])


class OwnPrediction(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return None, None, None


def loss_of_mine(outputs, labels, num_items_in_batch=None):
    return outputs["loss"]


@pytest.mark.parametrize(
    ("kind", "options", "changes"),
    [
        (Trainer, {}, {}),
        (Trainer, {"optimizers": (SGD, None)}, {"optimizer": "optimizers", "unread": False}),
        (Trainer, {"optimizers": (None, torch.optim.lr_scheduler.ConstantLR(SGD))}, {"has_schedule": True}),
        (
            Trainer,
            {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1})},
            {"optimizer": "optimizer_cls_and_kwargs", "unread": False},
        ),
        (OwnOptimizer, {}, {"unread": False}),
        (OwnLoss, {}, {"loss": "compute_loss"}),
        (CallsOurs, {}, {}),
        (Smooths, {}, {}),
        (Trainer, {"compute_loss_func": loss_of_mine}, {"loss": "compute_loss_func"}),
        (Trainer, {"compute_metrics": lambda found: {}}, {"metrics": "function"}),
        (Trainer, {"compute_metrics": MEAN}, {"metrics": "torchmetrics"}),
        (Trainer, {"compute_metrics": {"a": MEAN, "b": None}, "eval_dataset": SETS}, {"metrics": "torchmetrics"}),
        (Trainer, {"compute_metrics": {"a": MEAN, "b": loss_of_mine}, "eval_dataset": SETS}, {"metrics": "function"}),
        (Trainer, {"compute_metrics": {"a": None, "b": None}, "eval_dataset": SETS}, {}),
        (OwnPrediction, {}, {"generates": True}),
        (Seq2SeqTrainer, {}, {"generates": True}),
        (Trainer, {"train_dataset": Stream(rows(4))}, {"trains_on_stream": True, "has_length": False}),
        (Trainer, {"eval_dataset": rows(4)}, {"has_other_sets": True}),
        (Trainer, {"eval_dataset": Stream(rows(4))}, {}),
        (Trainer, {"eval_dataset": {"a": Stream(rows(4)), "b": rows(4)}}, {"has_other_sets": True}),
        (Trainer, {"model": tiny_gpt2()}, {"has_config": True}),
        (Trainer, {"callbacks": [Mentions()]}, {"reads": True}),
        (Trainer, {"without": ProgressCallback}, {"prints_logs": False}),
    ],
)
def test_the_parts_of_a_run(tmp_path, kind, options, changes):
    args = Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, optim="sgd", adam_beta1=0.5, report_to="none", disable_tqdm=False, max_steps=2
    )
    options = {"model": MODEL, "train_dataset": rows(4), **options}
    without = options.pop("without", None)
    trainer = kind(args=args, **options)
    if without is not None:
        trainer.remove_callback(without)
    parts = run_parts(trainer)
    found = {field.name: getattr(parts, field.name) for field in dataclasses.fields(parts)}
    found |= {"unread": "adam_beta1" in found["unread"](), "reads": found["reads"]("warmup_steps")}
    assert found == {**PLAIN, **changes}


def test_an_optimizer_that_the_trainer_has_made_is_not_given(tmp_path, make_args):
    trainer = Trainer(MODEL, make_args(max_steps=1, report_to="tensorboard"), train_dataset=rows(4))
    trainer.train()
    parts = run_parts(trainer)
    assert (parts.optimizer, parts.has_schedule, parts.has_trackers) == (None, False, True)
