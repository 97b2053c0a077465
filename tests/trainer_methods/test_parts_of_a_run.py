"""What a run is given beside its arguments, by small objects in the place of a Trainer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torchmetrics import MeanMetric

from helpers.toy import Stream, rows
from hf_compat import Trainer
from hf_compat.hf.callbacks import PrinterCallback
from hf_compat.trainer_methods import run_parts as parts
from hf_compat.trainer_methods.generation import GenerationSteps
from hf_compat.trainer_methods.steps import StepMethods


def steps(kind=StepMethods, members=(), **values):
    usual = {
        "optimizer": None, "_own_optimizer": None, "optimizer_cls_and_kwargs": None, "eval_dataset": None,
        "model": None, "lr_scheduler": None, "_created_lr_scheduler": False, "args": "args", "compute_loss_func": None,
        "compute_metrics": None, "train_dataset": None, "data_collator": None, "preprocess_logits_for_metrics": None,
    }  # fmt: skip
    made = type("Own", (kind,), dict(members)).__new__(type("Own", (kind,), dict(members)))
    vars(made).update(usual | values)
    return made


def function(*_):
    return 1


@pytest.mark.parametrize(
    ("values", "members", "name", "found"),
    [
        ({}, {}, "optimizer", None),
        ({"optimizer": "given"}, {}, "optimizer", "optimizers"),
        ({"optimizer": "made", "_own_optimizer": "made"}, {}, "optimizer", None),
        ({"optimizer_cls_and_kwargs": (1, {})}, {}, "optimizer", "optimizer_cls_and_kwargs"),
        ({"optimizer": "given", "optimizer_cls_and_kwargs": (1, {})}, {}, "optimizer", "optimizers"),
        ({}, {}, "has_schedule", False),
        ({"lr_scheduler": "given"}, {}, "has_schedule", True),
        ({"lr_scheduler": "made", "_created_lr_scheduler": True}, {}, "has_schedule", False),
        ({}, {}, "loss", None),
        ({"compute_loss_func": function}, {}, "loss", "compute_loss_func"),
        ({}, {"compute_loss": function}, "loss", "compute_loss"),
        ({}, {"compute_loss": lambda self, *_: self.label_smoother}, "loss", None),
        ({}, {"compute_loss": lambda self, *_: super(Trainer, self).compute_loss()}, "loss", None),
        ({}, {"compute_loss": torch.nn.Linear(1, 1)}, "loss", None),
        ({}, {}, "metrics", "none"),
        ({"compute_metrics": function}, {}, "metrics", "function"),
        ({"compute_metrics": MeanMetric()}, {}, "metrics", "torchmetrics"),
        ({"compute_metrics": {"a": None}}, {}, "metrics", "none"),
        ({"compute_metrics": {"a": None, "b": MeanMetric()}}, {}, "metrics", "torchmetrics"),
        ({"compute_metrics": {"a": function, "b": MeanMetric()}}, {}, "metrics", "function"),
        ({}, {}, "generates", False),
        ({}, {"prediction_step": function}, "generates", True),
        ({"kind": GenerationSteps}, {}, "generates", True),
        ({"train_dataset": Stream(2)}, {}, "trains_on_stream", True),
        ({"train_dataset": rows(2)}, {}, "trains_on_stream", False),
        ({}, {}, "has_length", True),
        ({"train_dataset": Stream(2)}, {}, "has_length", False),
        ({"train_dataset": rows(2)}, {}, "has_length", True),
        ({}, {}, "has_other_sets", False),
        ({"eval_dataset": rows(2)}, {}, "has_other_sets", True),
        ({"eval_dataset": Stream(2)}, {}, "has_other_sets", False),
        ({"eval_dataset": {"a": Stream(2), "b": None}}, {}, "has_other_sets", False),
        ({"eval_dataset": {"a": Stream(2), "b": rows(2)}}, {}, "has_other_sets", True),
        ({}, {}, "has_config", True),
        ({"model": SimpleNamespace()}, {}, "has_config", False),
        ({"model": SimpleNamespace(config=None)}, {}, "has_config", False),
        ({"model": SimpleNamespace(config=1)}, {}, "has_config", True),
    ],
)
def test_what_a_run_is_given(values, members, name, found):
    values = dict(values)
    kind = values.pop("kind", StepMethods)
    assert getattr(parts.run_parts(steps(kind, members, **values)), name) == found


class Tracking:
    """Like a callback that reports to a tracker."""


@pytest.mark.parametrize(
    ("callbacks", "has_trackers", "prints"),
    [
        (None, False, True),
        ([], False, True),
        (["hf_compat.callbacks.trackers"], True, False),
        (["transformers.integrations"], True, False),
        (["transformers.integrations.integration_utils"], True, False),
        (["transformers.integrations_of_mine"], False, False),
        (["__main__"], False, False),
        ([PrinterCallback()], False, True),
        (["__main__", PrinterCallback()], False, True),
    ],
)
def test_the_callbacks_of_a_run(callbacks, has_trackers, prints):
    values = {}
    if callbacks is not None:
        held = [type("Own", (), {"__module__": one})() if isinstance(one, str) else one for one in callbacks]
        values["callback_handler"] = SimpleNamespace(callbacks=held)
    found = parts.run_parts(steps(**values))
    assert (found.has_trackers, found.prints_logs) == (has_trackers, prints)


@pytest.mark.parametrize(
    ("values", "members", "asked"),
    [
        ({}, {}, True),
        ({"optimizer": "given"}, {}, False),
        ({"optimizer_cls_and_kwargs": (1, {})}, {}, False),
        ({}, {"create_optimizer": function}, False),
        ({}, {"create_optimizer_and_scheduler": function}, False),
        ({}, {"get_optimizer_cls_and_kwargs": function}, False),
        ({}, {"create_scheduler": function}, True),
    ],
)
def test_arguments_of_the_optimizer_are_asked_for_once(values, members, asked, monkeypatch):
    told = []
    monkeypatch.setattr(parts, "unread_arguments", lambda args, model: told.append((args, model)) or {"a": "b"})
    found = parts.run_parts(steps(members=members, **values))
    assert [found.unread(), found.unread()] == ([{"a": "b"}] * 2 if asked else [{}, {}])
    assert told == [("args", None)] * asked


class Mentions:
    def method(self):
        return self.secret_name

    value = "no code"


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, False),
        ({"compute_metrics": lambda p: p.secret_name}, True),
        ({"compute_loss_func": lambda p: "secret_name"}, True),
        ({"preprocess_logits_for_metrics": lambda p: getattr(p, "other_name")}, False),  # noqa: B009
        ({"data_collator": Mentions()}, True),
        ({"callback_handler": SimpleNamespace(callbacks=[Mentions()])}, True),
        ({"callback_handler": SimpleNamespace(callbacks=[PrinterCallback()])}, False),
    ],
)
def test_who_mentions_a_name(values, found):
    assert parts.run_parts(steps(**values)).reads("secret_name") is found
