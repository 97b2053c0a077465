"""What is remembered of a model's answer, and which losses can be trained with."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hf_compat.engine import losses

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
