"""Where tests fail, the functions that only they reach are named."""

from __future__ import annotations

import suspects
from mutation import recording
from mutation.reached import Reached
from mutation.view import ROOT

FILE = "hf_compat/engine/evaluation.py"


def test_what_only_failed_tests_reach_comes_first():
    reached = Reached()
    today = recording.digests((ROOT / FILE).read_text())
    sets = {(name, row[2]) for name, one in reached.files[FILE].items() if name in today for row in one["lines"]}
    function, number = min(sets, key=lambda one: (abs(len(reached.named(one[1])) - 5), one))
    failed = reached.named(number)
    found = suspects.ranked(failed, set(reached.tests) - failed)
    assert found[0][0] == 1.0
    first = {place.partition(":")[0] + " " + name for score, place, name, *_ in found if score == 1.0}
    assert f"{FILE} {function}" in first


def test_a_run_without_passed_tests_has_nothing_to_compare_with(capsys):
    class Terminal:
        section = line = staticmethod(print)

    watching = suspects.Suspects()
    watching.failed = {"tests/engine/test_windows.py::a"}
    watching.pytest_terminal_summary(Terminal())
    assert capsys.readouterr().out == ""
    watching.passed = {f"tests/engine/test_windows.py::{number}" for number in range(suspects.LEAST_PASSED)}
    watching.pytest_terminal_summary(Terminal())
    assert capsys.readouterr().out.startswith("functions that failed tests reach and passed ones do not")
