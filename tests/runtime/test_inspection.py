"""Methods of any HF era are called by their own signature."""

import functools

import pytest
import transformers
from transformers import trainer_utils
from transformers.utils import can_return_loss as upstream_can_return_loss
from transformers.utils import find_labels as upstream_find_labels

from hf_compat.runtime.inspection import (
    UntilSet,
    accepted_parameters,
    calling_like_upstream,
    can_return_loss,
    dropping_unknown_keywords,
    find_labels,
    has_length,
    kept_per_class,
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
    for one in (method, functools.partial(method)):
        assert dropping_unknown_keywords(one, "items", "start")(1, items=2, start=3) == expected


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
    names = ("model", "items", "start")
    for one in (method, functools.partial(method)):
        assert calling_like_upstream(one, names, last_by_keyword=1)(1, 2, start=3) == expected
    assert calling_like_upstream(max, names)(1, 2, 3) == 3  # a builtin has no signature to go by


def test_a_method_that_takes_upstreams_form_is_returned_itself():
    era = Era()
    assert (
        calling_like_upstream(era.named, ("model", "items"))
        == era.named
        == dropping_unknown_keywords(era.named, "items")
    )
    assert calling_like_upstream(era.by_keyword, ("model", "items"), last_by_keyword=1) == era.by_keyword
    assert dropping_unknown_keywords(era.by_keyword, "items") == era.by_keyword


def test_positional_arguments_are_cut_to_what_fits():
    assert (
        calling_like_upstream(Era().old, ("a", "b"))(1, 2) == (1,) == calling_like_upstream(Era().by_place, ("a",))(1)
    )
    assert calling_like_upstream(lambda: 0, ("a",))(1) == 0
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


def test_what_was_found_about_a_class_is_kept_until_a_member_changes(monkeypatch):
    class Kind:
        one = 1

    asked = []

    @kept_per_class
    def names(kind):
        asked.append(kind)
        return [name for name in vars(kind) if not name.startswith("__")]

    assert names(Kind) == names(Kind) == ["one"] and asked == [Kind]
    Kind.two = 2  # added
    assert names(Kind) == ["one", "two"]
    monkeypatch.setattr(Kind, "one", 3)  # replaced
    assert names(Kind) == ["one", "two"] and len(asked) == 3
    del Kind.two
    assert names(Kind) == ["one"] and len(asked) == 4


def test_a_property_is_read_until_a_value_takes_its_place():
    class Holder:
        name = UntilSet(property(lambda self: "read"))

    held = Holder()
    assert held.name == "read" and isinstance(Holder.name, UntilSet)
    held.name = "set"
    assert held.name == "set"
