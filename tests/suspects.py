"""After tests have failed: the functions that failed tests reach and passed ones do not (a plugin of pytest).

The map of `tests/mutants.py` says which test reaches which statement. A statement's score is Ochiai's: failed tests
that reach it, over the root of all failed tests times all that reach it. A mistake is mostly among the first functions.
"""

from __future__ import annotations

import math

import pytest

MOST = 8
# With fewer passed tests, everything that the failed ones reach has the same score.
LEAST_PASSED = 20


class Suspects:
    """Collects the outcomes of tests, and ranks functions where some have failed."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.failed or len(self.passed) < LEAST_PASSED:
            return
        terminalreporter.section("functions that failed tests reach and passed ones do not")
        for score, place, function, failed, passed in ranked(self.failed, self.passed - self.failed)[:MOST]:
            terminalreporter.line(f"{score:.2f}  {place} {function}: {failed} failed, {passed} passed reach it")


def ranked(failed: set[str], passed: set[str]) -> list[tuple[float, str, str, int, int]]:
    """Rank the functions of the package by their most suspect statement.

    Returns:
        Score, `file:line`, function, number of failed tests and of passed tests that reach the statement.
    """
    from mutation.reached import Reached

    reached = Reached()
    counts = reached.counts(failed, passed)
    best: dict[tuple[str, str], tuple[float, str, str, int, int]] = {}
    for file, function, line, number in reached.statements(counts):
        bad, good = counts[number]
        score = bad / math.sqrt(len(failed) * (bad + good))
        found = (score, f"{file}:{line}", function, bad, good)
        best[file, function] = max(best.get((file, function), found), found, key=lambda one: one[0])
    return sorted(best.values(), key=lambda one: (-one[0], one[1]))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Suspects(), "suspects of failures")
