"""The measure of the tests: which mistakes `tests/mutants.py` plants, and that it tells killed ones from survivors."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mutation import command, places
from mutation.static import StaticChecks
from mutation.trials import Outcome

ROOT = Path(__file__).resolve().parent.parent
SOURCE = '''"""A module."""
import os

LIMIT: int = 3
__all__ = ["f"]


def f(a: list[int], b=True) -> bool:
    """A docstring with 3 words or 4."""
    if a and not b:
        raise ValueError("too many", 7)
    if f"{a == b}":
        return os.path.isfile("name")
    g(a, max(a, b))
    return all(one <= 2 for one in zip(a, b, strict=True))
'''
LAST = "all(one <= 2 for one in zip(a, b, strict=True))"


def test_a_mistake_is_planted_wherever_the_code_decides():
    found = {
        (one.line, one.old, one.new, one.is_inside, one.names) for one in places.changes_in("hf_compat/x.py", SOURCE)
    }
    assert found == {
        (4, "3", "4", False, ("LIMIT",)),
        (4, "3", "2", False, ("LIMIT",)),
        (8, "True", "False", False, ("f",)),
        (10, "and", "or", True, ()),
        (10, "not b", "(b)", True, ()),
        (10, "a and not b", "(not (a and not b))", True, ()),
        (12, 'f"{a == b}"', '(not (f"{a == b}"))', True, ()),
        (13, 'os.path.isfile("name")', '(not (os.path.isfile("name")))', True, ()),
        (13, '"name"', '"nameXX"', True, ()),
        (14, "g(a, max(a, b))", "pass", True, ()),
        (14, "a, max(a, b)", "max(a, b), a", True, ()),
        (15, LAST, f"(not ({LAST}))", True, ()),
        (15, "<=", "<", True, ()),
        (15, "<=", ">", True, ()),
        (15, "2", "3", True, ()),
        (15, "2", "1", True, ()),
        (15, "a, b", "b, a", True, ()),
    }  # fmt: skip


def test_a_commands_help_is_a_message():
    source = 'parser.add_argument("seed", help="first", default=2, metavar="SEED")\n'
    assert {one.old for one in places.changes_in("hf_compat/x.py", source)} == {'"seed"', "2", source.strip()}


def test_so_is_what_a_missing_package_is_for():
    source = 'found = need("wandb", "[wandb]", "report_to")\n'
    found = {(one.old, one.kind) for one in places.changes_in("hf_compat/x.py", source)}
    assert not any("report_to" in old and kind != "call left out" for old, kind in found)
    assert ('"wandb", "[wandb]"', "swapped arguments") in found and ('"wandb"', "constant") in found


@pytest.mark.parametrize("file", ["engine/evaluation.py", "hf/fields.py"])
def test_every_mistake_is_python_and_leaves_the_lines_in_place(file):
    path = places.PACKAGE / file
    text = path.read_text()
    changes = places.changes_of(path)
    assert len({one.key for one in changes}) == len(changes) > 50
    for change in changes[::10]:
        planted = change.planted(text)
        ast.parse(planted)
        assert planted.count("\n") == text.count("\n")


def test_each_listed_mistake_is_there_with_a_reason():
    keys = {change.key for change in places.all_changes()}
    listed = command.listed()
    assert not listed.keys() - keys
    assert all(listed.values())


@pytest.mark.matrix
@pytest.mark.real_python
@pytest.mark.parametrize(
    ("file", "mistake"),
    [
        ("lr_schedulers.py", "returned value: "),
        ("optimizers.py", "swapped arguments: COUNT, 128 -> 128, COUNT"),  # no other length of the file
    ],
)
def test_mypy_notices_a_planted_mistake_of_types(file, mistake):
    change = next(one for one in places.changes_of(places.PACKAGE / "optim" / file) if mistake in one.key)
    checks = StaticChecks()
    try:
        assert (checks.judge_text(change), checks.judge_types(change)[:6]) == ("", "mypy: ")
    finally:
        checks.close()


@pytest.mark.matrix
@pytest.mark.real_python
def test_a_planted_mistake_is_killed_by_a_test_that_reaches_it(tmp_path):
    file, mistake, by = "lr_schedulers.py", "comparison: ", "tests/optim/"
    path = places.PACKAGE / "optim" / file
    change = next(one for one in places.changes_of(path) if mistake in one.key)
    results = tmp_path / "results.jsonl"
    words = [sys.executable, str(ROOT / "tests" / "mutants.py"), "--only", change.key, "--results", str(results)]
    before = path.read_text()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert (found["status"], found["key"]) == ("killed", change.key)
    assert found["by"].startswith(by)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("seen_by", "expected"),
    [
        ("text", ("killed", "text", 0)),
        ("a::1", ("killed", "a::1", 1)),
        ("types", ("killed", "types", 2)),
        ("b::1", ("killed", "b::1", 3)),
        ("nothing", ("survived", "", 3)),
    ],
)
def test_quick_tests_come_before_the_types_and_slow_ones_after(seen_by, expected):
    examiner = command.Examiner.__new__(command.Examiner)
    examiner.sound, examiner.unsound, examiner.budget = {"a::1", "b::1"}, set(), 100.0
    examiner.static = SimpleNamespace(
        judge_text=lambda change: "text" * (seen_by == "text"),
        judge_types=lambda change: "types" * (seen_by == "types"),
    )
    examiner.reached = SimpleNamespace(
        reaching=lambda change: ["a::1", "a::2", "b::1"], seconds={"a::1": 1.0, "a::2": 1.0, "b::1": 9.0}, shared={}
    )
    work = examiner._examined(None)
    outcome = None
    with pytest.raises(StopIteration) as ended:
        while True:
            _, tests = next(work) if outcome is None else work.send(outcome)
            killer = seen_by if seen_by in tests else ""
            ran = tests[: tests.index(killer) + 1] if killer else tests
            outcome = Outcome(killer, "failed" if killer else "", ran, seconds=1.0, killer_seconds=1.0, said="")
    verdict = ended.value.value
    assert (verdict.status, verdict.by, verdict.run) == expected


def test_a_case_that_ends_by_itself_does_not_run_again():
    """Under load a test may run out of time without a mistake. It is named with its case, and chosen without."""
    examiner = command.Examiner.__new__(command.Examiner)
    examiner.sound, examiner.unsound = set(), set()

    def outcome(killer, why):
        return Outcome(killer, why, ran=["a::x[case]", "b::y"], seconds=1.0, killer_seconds=1.0, said="")

    work = examiner._is_killed(None, ["a::x", "b::y"], outcome("b::y", "failed"))
    assert next(work) == (None, ["a::x", "b::y"])
    assert work.send(outcome("a::x[case]", "timeout")) == (None, ["b::y"])
    with pytest.raises(StopIteration) as ended:
        work.send(outcome("", ""))
    assert ended.value.value is True and examiner.sound == {"b::y"}
