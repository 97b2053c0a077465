"""What is remembered of a model's answer, and which losses can be trained with."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hf_compat.engine import losses
from hf_compat.errors import LossError

WITH_GRAD = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "context", "is_noted"),
    [
        (WITH_GRAD * 2, contextlib.nullcontext, False),
        (torch.ones(()), contextlib.nullcontext, True),
        (torch.ones(()), torch.no_grad, False),
        (torch.ones(2), torch.no_grad, True),
        (WITH_GRAD * torch.ones(2), contextlib.nullcontext, True),
    ],
)
def test_an_answer_is_noted_where_its_loss_has_no_backward_pass(loss, context, is_noted):
    with context():
        losses.note_answer({"loss": loss}, loss)
    assert (loss in losses._ANSWERS) is is_noted


def test_what_is_no_tensor_has_no_answer_to_note():
    before = len(losses._ANSWERS)
    losses.note_answer({"loss": 1.0}, 1.0)
    assert len(losses._ANSWERS) == before


@pytest.mark.parametrize(
    ("loss", "is_trainable"),
    [
        (WITH_GRAD * 2, True),
        (torch.ones(()), False),
        (WITH_GRAD * torch.ones(1), False),
        (torch.ones((), device="meta", requires_grad=True) * 2, False),
        (2.0, False),
    ],
)
def test_a_loss_is_one_number_with_a_backward_pass(loss, is_trainable):
    assert losses.is_trainable(loss) is is_trainable


def test_an_answer_says_which_parts_look_like_a_loss():
    loss = WITH_GRAD * 2
    outputs = {"loss": loss, "other": WITH_GRAD * 3, "count": torch.tensor(3), "logits": torch.ones(2), "text": "it"}
    answer = losses.answer_of(outputs, loss)
    assert (answer.names, answer.place) == (tuple(outputs), "['loss']")
    assert answer.others == (
        ("['other']", True, True), ("['count']", False, False), ("['logits']", False, False),
    )  # fmt: skip
    with torch.no_grad():
        answer = losses.answer_of((torch.ones(()), torch.ones(1)), None)
    assert answer.others == (("[0]", True, False), ("[1]", False, False)) and answer.names == ()


class Takes(torch.nn.Module):
    """A model that takes labels, or does not."""

    def __init__(self, trains=True):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1).requires_grad_(trains)

    def forward(self, x, labels=None):
        """Compute nothing."""


class TakesNone(Takes):
    def forward(self, x):
        """Compute nothing."""


X, LABELS = torch.zeros(2, 3), torch.tensor([[1, -100, 2], [0, 1, 2]])


def facts(loss, maker=losses.Maker.FORWARD, model=None, answer=None, owner=None, **values):
    usual = {"label_names": ["labels"], "inputs": {"x": X, "labels": LABELS}}
    model = model or Takes()
    return losses.LossFacts(loss=loss, maker=maker, owner=owner or model, model=model, answer=answer, **usual | values)


def answer(place="", others=(), kind="tuple", names=()):
    return losses.Answer(kind, names, place, tuple(others))


LIKE = losses.Part("[1]", True, True)
LOST = losses.Part("[1]", False, True)
PLAIN = losses.Part("[1]", False, False)
GRAD = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (facts(torch.ones((), device="meta", requires_grad=True)), "load the model's weights"),
        (facts(GRAD * 1, with_outputs=True), "evaluations ask for the outputs with `return_outputs=True`, so end it"),
        (facts((GRAD, X), with_outputs=True), "evaluations ask for the outputs"),
        (facts(torch.ones(()), answer=answer("[0]", [LIKE])), "`[1]` of what it returned is a scalar with a gradient"),
        (facts(torch.ones(()), answer=answer("['loss']", [PLAIN])), "compute it from parameters"),
        (facts(torch.ones(()), answer=answer("['loss']", [LOST])), "the other outputs have a gradient, so it was lost"),
        (facts(torch.ones(()), answer=answer("[0]", [PLAIN])), "compute it from parameters with"),
        (facts(None, answer=answer(kind="NoneType")), "end it with `return loss, logits`"),
        (facts(None, model=TakesNone()), "`forward` takes `x` and no labels. Add the parameter `labels`"),
        (facts(None, inputs={"x": X}), "the inputs are `x`, and `forward` computes its loss from `labels`"),
        (facts(None, inputs=None), "the labels are among the inputs, so compute the loss"),
        (facts(None), "the labels are among the inputs, so compute the loss from the predictions and `labels`"),
        (facts(None, losses.Maker.COMPUTE_LOSS), "end it with `return (loss, outputs) if return_outputs else loss`"),
        (facts(3.0, losses.Maker.STEP), "a number has no gradient"),
        (facts({"loss": GRAD}, losses.Maker.COMPUTE_LOSS), "Take their loss, `loss = outputs['loss']`"),
        (facts((1, 2), losses.Maker.COMPUTE_LOSS), "the outputs belong to it where `return_outputs=True` asks"),
        (facts((1, 2), losses.Maker.STEP), "return the loss alone: end it with `return loss`"),
        (facts(GRAD * torch.ones(5), answer=answer("['loss']")), "take its mean, `loss.mean()`"),
        (facts(GRAD * torch.ones(2, 3), losses.Maker.STEP), "take its mean, `loss.sum() / labels.ne(-100).sum()`"),
        (facts(GRAD * torch.ones(6), losses.Maker.STEP), "take its mean, `loss.sum() / labels.ne(-100).sum()`"),
        (
            facts(GRAD * torch.ones(2, 3), answer=answer("[0]", [PLAIN])),
            "it has a number for each label. Take its mean",
        ),
        (facts(GRAD * torch.ones(2, 3)), "it has a number for each label. If these are losses"),
        (facts(GRAD * torch.ones(1)), "make it a scalar, `loss.squeeze()`"),
        (facts(GRAD * torch.ones(2, 5)), "it may be the predictions. The labels have the shape (2, 3)"),
        (facts(GRAD * torch.ones(4), inputs={"x": X, "labels": LABELS[0]}), "it may be the predictions. The labels"),
        (facts(torch.ones(()), model=Takes(trains=False)), "call `requires_grad_(True)` on the parameters to train"),
        (facts(torch.tensor(3), losses.Maker.STEP), "whole numbers have no gradient"),
        (facts(torch.ones(()), losses.Maker.STEP), "compute it from parameters"),
    ],
)
def test_each_cause_has_its_hint(given, hint):
    assert hint in losses.hint_of(given)
    with pytest.raises(LossError):
        losses.refuse(given)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (facts(GRAD * 1, with_outputs=True), "of Takes returned a Tensor instead of the loss and the outputs"),
        (facts(3.0, with_outputs=True), "returned a float (3.0) instead of a loss"),
        (facts(None), "`forward` of Takes returned None instead of a loss, so there is nothing to train on"),
        (
            facts(None, answer=answer(names=("logits",), kind="dict")),
            "keys: logits. For reference, the inputs it received are x,labels",
        ),
        (facts(None, answer=answer(kind="NoneType")), "returned None instead of a loss"),
        (facts(None, answer=answer(kind="list")), "returned a list instead of a loss"),
        (facts(GRAD * torch.ones(2)), "has the shape (2,), and is not a scalar"),
        (facts(torch.ones((), device="meta")), "is on the meta device, which holds no numbers"),
        (facts(torch.ones(())), "does not require grad, so there is no gradient"),
        (facts(torch.ones(()), model=Takes(trains=False)), "and no parameter of the model does, as all are frozen"),
        (facts(torch.ones(()), answer=answer("[0]", kind="tuple")), "returned it as `[0]` of its tuple"),
    ],
)
def test_what_is_wrong_is_said(given, wrong):
    assert wrong in losses._what_is_wrong(given)


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        (facts(torch.ones(2, 3)), False),
        (facts(torch.ones(1)), False),
        (facts(torch.ones(5)), True),
        (facts(torch.ones(5), answer=answer("['loss']")), False),
        (facts(torch.ones(2, 3), answer=answer("[0]", [LIKE])), True),
        (facts(torch.ones(2), inputs={"x": X}), False),
        (facts(torch.ones(3), inputs={"x": X}), True),
    ],
)
def test_the_mean_of_something_else_is_told(given, warns, monkeypatch):
    told = []
    monkeypatch.setattr(losses, "warn_once", told.append)
    losses.warn_of_mean(given)
    assert len(told) == warns


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (facts(GRAD * 1), True),
        (facts(GRAD * torch.ones(1, 1)), True),
        (facts(GRAD * torch.ones(2)), False),
        (facts(torch.ones(())), False),
        (facts(torch.ones((), device="meta", requires_grad=True)), False),
        (facts(3.0), False),
        (facts(GRAD * 1, answer=answer("[0]", [LIKE])), False),
        (facts(GRAD * 1, answer=answer(".loss", [LIKE])), True),
    ],
)
def test_an_override_of_the_step_may_take_one_number(given, expected):
    assert given.is_one_number is expected


class Switch:
    def compute_loss(self, model, inputs, return_outputs=False):
        """Return both."""


class NoSwitch:
    def compute_loss(self, model, inputs):
        """Return one."""


@pytest.mark.parametrize(
    ("owner", "maker", "adds"),
    [
        (Switch(), losses.Maker.COMPUTE_LOSS, False),
        (NoSwitch(), losses.Maker.COMPUTE_LOSS, True),
        (NoSwitch(), losses.Maker.STEP, False),
        (object(), losses.Maker.COMPUTE_LOSS, False),
    ],
)
def test_a_method_without_the_switch_gets_it(owner, maker, adds):
    way = facts(None, maker, owner=owner).way_to_return
    assert way.startswith("add the parameter `return_outputs=False` and end it" if adds else "end it")


def test_a_loss_that_a_model_has_returned_is_its_own_whoever_hands_it_on():
    loss = GRAD * torch.ones(2)
    losses.note_answer({"loss": loss, "logits": X}, loss)
    found = facts(loss, losses.Maker.COMPUTE_LOSS, owner=Switch())
    assert found.maker is losses.Maker.FORWARD and found.owner is found.model and found.is_called_loss
    other = facts(GRAD * torch.ones(2), losses.Maker.COMPUTE_LOSS, owner=Switch())
    assert other.maker is losses.Maker.COMPUTE_LOSS and other.answer is None
