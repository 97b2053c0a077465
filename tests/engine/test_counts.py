"""The calls of common runs stay below their bounds. A count does not depend on the machine, so no time is measured."""

import pytest

from sweeps.benchmarks import counts

OURS, PLAIN = "hf_compat", "plain loop"
# The most calls of ours: so many, or so many times the plain loop's, and so many above it.
BOUNDS = {
    "an update (4 tensors)": 620,
    "eight micro-batches and an update": 1_850,
    "`train()` of one update": 12_000,
    "a second `train()`": 12_000,
    "a Trainer": 12_000,
    "evaluation of 8 samples": 3_500,
    "evaluation of 100 sets": 150_000,
    "a save": 14_000,
}
ABOVE_PLAIN = {
    "an update of 100 tensors": (0.5, 350),
    "an update of 1,000 tensors": (0.5, 350),
    "a batch of an Arrow set": (1.05, 30),
}
# The most memory: MiB, where the predictions alone are 122, and bytes a sample, of which an order has 8.
MEMORY = {"tokens' predictions, MiB (alone: 122)": 1.2 * 122, "shuffling 10⁷ samples, bytes a sample": 10}


@pytest.fixture(scope="module")
def rows():
    return counts.rows()


@pytest.mark.parametrize("title", BOUNDS)
def test_a_run_makes_no_more_calls_than_its_bound(rows, title):
    assert rows[title][OURS]() <= BOUNDS[title]


@pytest.mark.parametrize("title", ABOVE_PLAIN)
def test_little_is_called_that_a_plain_loop_does_not_call(rows, title):
    times, above = ABOVE_PLAIN[title]
    assert rows[title][OURS]() <= times * rows[title][PLAIN]() + above


@pytest.mark.parametrize("title", MEMORY)
def test_a_run_takes_no_more_memory_than_its_bound(rows, title):
    assert rows[title][OURS]() <= MEMORY[title]
