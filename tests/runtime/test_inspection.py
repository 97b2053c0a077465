"""Methods of any HF era are called by their own signature."""

import functools

import pytest
import transformers
from transformers import trainer_utils
from transformers.utils import can_return_loss as upstream_can_return_loss
from transformers.utils import find_labels as upstream_find_labels

from hf_compat.runtime.inspection import (
    accepted_parameters,
    call_by_place,
    call_with_optional,
    can_return_loss,
    find_labels,
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

    def by_both(self, *places, **rest):
        return (*places, rest)

    def own_name(self, model, count=None):
        return (model, count)

    def keyword_only(self, model, *, start=None):
        return (model, start)

    def without_the_middle(self, model, start):
        return (model, start)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("old", (1,)),
        ("named", (1, 2)),
        ("by_place", (1,)),
        ("by_keyword", (1, {"items": 2, "start": 3})),
        ("own_name", (1, None)),
        ("keyword_only", (1, 3)),
    ],
)
def test_later_keywords_are_given_where_they_are_accepted(name, expected):
    method = getattr(Era(), name)
    assert call_with_optional(method, 1, optional={"items": 2, "start": 3}) == expected
    assert call_with_optional(functools.partial(method), 1, optional={"items": 2, "start": 3}) == expected


@pytest.mark.parametrize(
    "name, expected",
    [
        ("old", (1,)),
        ("named", (1, 2)),
        ("by_place", (1, 2, 3)),
        ("by_keyword", (1, {"items": 2, "start": 3})),
        ("by_both", (1, 2, {"start": 3})),
        ("own_name", (1, 2)),
        ("keyword_only", (1, 3)),
        ("without_the_middle", (1, 3)),
    ],
)
def test_what_upstream_passes_by_place_finds_its_place(name, expected):
    method = getattr(Era(), name)
    names, values = ("model", "items", "start"), (1, 2, 3)
    assert call_by_place(method, names, values, last_by_keyword=1) == expected
    assert call_by_place(functools.partial(method), names, values, last_by_keyword=1) == expected
    assert call_by_place(max, names, values) == 3  # a builtin has no signature to go by


def test_positional_arguments_are_cut_to_what_fits():
    assert call_by_place(Era().old, ("a", "b"), (1, 2)) == (1,) == call_by_place(Era().by_place, ("a",), (1,))
    assert call_by_place(lambda: 0, ("a",), (1,)) == 0
    accepted = accepted_parameters(Era().named)
    assert accepted.places == ("model", "items") and accepted.required == {"model"} and not accepted.takes_any_keyword


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
