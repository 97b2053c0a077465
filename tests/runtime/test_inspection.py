"""Methods of any HF era are called by their own signature."""

import functools

import pytest
import transformers
from transformers import trainer_utils
from transformers.utils import can_return_loss as upstream_can_return_loss
from transformers.utils import find_labels as upstream_find_labels

from hf_compat.runtime.inspection import (
    accepted_parameters,
    call_by_signature,
    can_return_loss,
    find_labels,
    fitting_arguments,
    has_length,
    number_of_arguments,
)


class Era:
    def old(self, model):
        return (model,)

    def named(self, model, items=None):
        return (model, items)

    def by_place(self, model, *rest):
        return (model, *rest)

    def by_keyword(self, model, **rest):
        return (model, rest)


@pytest.mark.parametrize(
    "name, expected",
    [("old", (1,)), ("named", (1, 2)), ("by_place", (1, 2, 3)), ("by_keyword", (1, {"items": 2, "start": 3}))],
)
def test_later_arguments_are_given_where_they_are_accepted(name, expected):
    method = getattr(Era(), name)
    assert call_by_signature(method, 1, optional={"items": 2, "start": 3}) == expected
    assert call_by_signature(functools.partial(method), 1, optional={"items": 2, "start": 3})[0] == 1


def test_positional_arguments_are_cut_to_what_fits():
    assert fitting_arguments(Era().old, (1, 2)) == (1,) and fitting_arguments(Era().by_place, (1, 2)) == (1, 2)
    assert fitting_arguments(len, (1, 2)) == (1, 2)
    accepted = accepted_parameters(Era.named)
    assert accepted.positional == 3 and accepted.names == {"self", "model", "items"} and not accepted.takes_any_keyword


@pytest.mark.parametrize("name", ["BertForQuestionAnswering", "BertForTokenClassification", "CLIPModel"])
def test_labels_and_losses_of_models(name):
    model_class = getattr(transformers, name)
    assert find_labels(model_class) == upstream_find_labels(model_class)
    assert can_return_loss(model_class) == upstream_can_return_loss(model_class)


@pytest.mark.parametrize("function", [lambda: 0, lambda trial: 0, functools.partial(lambda a, b: 0, 1)])
def test_arguments_of_model_init(function):
    assert number_of_arguments(function) == trainer_utils.number_of_arguments(function)


def test_lengths():
    assert has_length([]) and not has_length(iter([])) and not has_length(None)
