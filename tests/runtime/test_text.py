"""Truth values, near names and missing packages, in one vocabulary."""

import shlex
import tomllib
from pathlib import Path

import pytest
from accelerate.utils import str_to_bool
from transformers.utils.generic import strtobool

from hf_compat.errors import ArgumentError, MissingPackage
from hf_compat.runtime import text
from hf_compat.runtime.text import (
    bool_or_none,
    brief,
    did_you_mean,
    is_installed,
    need,
    parse_switch,
    pip_install,
    without_secrets,
)

WORDS = ("y", "YES", "t", "True", "on", "1", "n", "No", "f", "FALSE", "off", "0")


@pytest.mark.parametrize("word", WORDS)
def test_the_words_are_those_of_transformers_and_accelerate(word):
    assert parse_switch({"BF16": word}, "BF16") is bool(strtobool(word)) is bool(str_to_bool(word))


@pytest.mark.parametrize("word", ["2", "none", "truthy"])
def test_what_upstream_refuses_is_refused_by_name(word):
    with pytest.raises(ValueError):
        strtobool(word)
    assert bool_or_none(word) is None
    with pytest.raises(ArgumentError, match=rf"`BF16='{word}'` is not a truth value"):
        parse_switch({"BF16": word}, "BF16")


def test_a_bool_is_itself():
    assert bool_or_none(True) is True and bool_or_none(False) is False and bool_or_none("") is None


def test_a_switch_is_off_where_it_is_unset_or_empty():
    assert not parse_switch({}, "ACCELERATE_USE_CPU") and not parse_switch(
        {"ACCELERATE_USE_CPU": ""}, "ACCELERATE_USE_CPU"
    )
    assert parse_switch({"ACCELERATE_USE_CPU": "True"}, "ACCELERATE_USE_CPU")
    with pytest.raises(ArgumentError, match="ACCELERATE_USE_CPU='cpu'"):
        parse_switch({"ACCELERATE_USE_CPU": "cpu"}, "ACCELERATE_USE_CPU")


def test_a_hint_is_the_nearest_name_or_the_other_sentence():
    assert did_you_mean("learning_rte", ["learning_rate", "lr"], "see the docs.") == "did you mean `learning_rate`?"
    assert did_you_mean("colour", ["learning_rate"], "see the docs.") == "see the docs."


def test_a_missing_package_is_named_with_the_way_to_get_it():
    assert not is_installed("no_such_package") and not is_installed("no_such_package.part") and is_installed("torch")
    with pytest.raises(MissingPackage) as caught:
        need("no_such_package.part", "no-such-package", "`hf-compat plot`")
    expected = "`hf-compat plot` needs the package no_such_package.\n\nHint: pip install no-such-package"
    assert str(caught.value) == expected and caught.value.name == "no_such_package"
    assert isinstance(caught.value, ImportError)
    assert need("math", "math", "a sum").pi > 3


def test_a_container_that_holds_itself_is_shown_twenty_levels_deep():
    deep: list = []
    deep.append(deep)
    assert text.brief(deep) == "[" * 21 + "'…'" + "]" * 21
    named: dict = {}
    named["a"] = named
    assert text.brief(named).count("{'a': ") == 20


def test_an_extra_is_named_by_its_packages(monkeypatch):
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name in ("plot", "transformers", "migrate", "search", "hub", "wandb", "tensorboard", "ray", "deepspeed"):
        assert sorted(shlex.split(pip_install(f"[{name}]"))[2:]) == sorted(extras[name]), name
    assert pip_install("'ray[tune]'") == "pip install 'ray[tune]'"
    monkeypatch.setattr(text, "DISTRIBUTION", "no-such-distribution")  # as in a folder on the path
    assert pip_install("[plot]") == "pip install -e '.[plot]'"


def test_no_message_asks_for_a_name_that_nobody_has_registered():
    package = Path(text.__file__).parents[1]
    assert [str(path) for path in package.rglob("*.py") if f"{text.DISTRIBUTION}[" in path.read_text()] == []


class Own(dict):
    """A mapping of a user's own class."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1, "b": [2]}, "{'a': 1, 'b': [2]}"),
        ((1,), "(1,)"),
        ((1, 2), "(1, 2)"),
        ([1], "[1]"),
        ([], "[]"),
        ((), "()"),
        ({}, "{}"),
        (set(), "set()"),
        ({1}, "{1}"),
        (frozenset({1}), "frozenset([1])"),
        (Own(a=1), "Own({'a': 1})"),
        ({"token": "abc", "hub_token": None}, "{'token': '<TOKEN>', 'hub_token': None}"),
        ({1: "token"}, "{1: 'token'}"),
        (b"ab", "b'ab'"),
        ("x" * 398, "'" + "x" * 398 + "'"),
        ("x" * 399, "'" + "x" * 399 + "…"),
        ("x" * 500, "'" + "x" * 399 + "…"),
        (list(range(500)), None),
        (type("Bad", (), {"__repr__": lambda self: 1 / 0})(), "<Bad, which cannot be shown: ZeroDivisionError>"),
    ],
)
def test_values_are_shown_as_python_does_without_secrets_and_not_whole(value, text):
    found = brief(value)
    assert found == text if text is not None else found == repr(value)[:400] + "…"


@pytest.mark.parametrize(
    ("words", "is_hidden"),
    [
        (["--hub_token", "abc"], True),
        (["--hub-token=abc"], True),
        (["--args.api_key", "abc"], True),
        (["--hub_tokn", "abc"], True),
        (["-Token", "abc"], True),
        (["--tokenizer", "abc"], False),
        (["--include_tokens", "abc"], False),
        (["hub_token", "abc"], False),
        (["--name", "abc"], False),
        (["--name=x", "abc"], False),
        (["--hub_token=x", "abc"], False),
        (["--hub_token=", "abc"], False),
        (["abc", "--hub_token"], False),
    ],
)
def test_values_of_secret_options_are_left_out_of_messages(words, is_hidden):
    assert without_secrets("it has abc", words) == ("it has <hidden>" if is_hidden else "it has abc")
    assert without_secrets("it has --abc", [*words[:-1], "--abc"]) == "it has --abc"
