"""JSON with indents, written by the compiled encoder, is what Python's own writes."""

from __future__ import annotations

import dataclasses
import enum
import json
import random
import sys

import pytest

from hf_compat.hf.state import TrainerState
from hf_compat.runtime.indented import indented_json

TEXTS = ("", "null", 'a": null', "a,\n  b", "}],\n    {", "é\u2028\ud800", '"\\')
PLAIN = (None, True, False, 0, -7, 2**70, 0.1, -1e300, float("inf"), float("nan"), *TEXTS)


class Kind(enum.StrEnum):
    ONE = "one"


@dataclasses.dataclass
class Own:
    rate: float


def drawn(draw: random.Random, depth: int = 0) -> object:
    """A value of JSON, nested at random."""
    form = draw.choice(("plain", "list", "tuple", "logs", "dict", "numbered")) if depth < 5 else "plain"
    count = draw.randrange(4)
    if form == "plain":
        return draw.choice((*PLAIN, Kind.ONE))
    if form in ("list", "tuple"):
        members = [drawn(draw, depth + 1) for _ in range(count)]
        return members if form == "list" else tuple(members)
    if form == "logs":
        return [{draw.choice(TEXTS): draw.choice(PLAIN) for _ in range(draw.randrange(4))} for _ in range(count)]
    names = TEXTS if form == "dict" else (1, 2.5, 3)
    return {draw.choice(names): drawn(draw, depth + 1) for _ in range(count)}


@pytest.mark.parametrize("seed", range(20))
def test_the_text_is_that_of_python(seed):
    draw = random.Random(seed)
    for _ in range(300):
        value = drawn(draw)
        for indent, sort_keys in ((1, False), (2, True)):
            assert indented_json(value, indent, sort_keys) == json.dumps(value, indent=indent, sort_keys=sort_keys)


def test_values_that_json_lacks_are_asked_for():
    value = {"a": {1, 2}, "b": [{"c": {3}}], "d": {"e": {"f": {4}}}}
    assert indented_json(value, 2, default=str) == json.dumps(value, indent=2, default=str)
    with pytest.raises(TypeError):
        indented_json(value, 2)


def calls_of_a_save(logs: int, path) -> int:
    state, calls = TrainerState(), 0
    state.log_history = [{"loss": 1 / (step + 1), "grad_norm": 0.5, "step": step} for step in range(logs)]

    def note(frame, kind, argument):
        nonlocal calls
        calls += kind == "call"

    sys.setprofile(note)
    try:
        state.save_to_json(path)
    finally:
        sys.setprofile(None)
    return calls


def test_a_state_costs_no_call_for_each_log(tmp_path):
    few, many = (calls_of_a_save(logs, tmp_path / "state.json") for logs in (3, 3000))
    assert few == many < 300
    assert TrainerState.load_from_json(tmp_path / "state.json").log_history[-1]["step"] == 2999


def test_a_state_takes_dataclasses_of_the_user(tmp_path):
    state = TrainerState(trial_params={"own": Own(0.5)})
    state.save_to_json(tmp_path / "state.json")
    assert json.loads((tmp_path / "state.json").read_text())["trial_params"] == {"own": {"rate": 0.5}}
