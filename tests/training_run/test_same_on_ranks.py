"""What ranks must share: the lines about what differs, and the reason where one rank has fewer updates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_compat.training_run import same_on_ranks
from hf_compat.training_run.flags import FlagSources
from hf_compat.training_run.same_on_ranks import StartFacts, compare_arguments, compare_updates, differences


def test_a_difference_names_each_value_and_its_ranks():
    ranks = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2", "c": "4"}]
    assert differences(ranks) == ["`b` is 2 on ranks 0, 2; 3 on rank 1", "`c` is not set on ranks 0, 1; 4 on rank 2"]
    assert differences([{"a": "1"}, {"a": "1"}]) == []


@pytest.fixture
def asked(monkeypatch):
    """What is compared; the other ranks have the same."""
    found = []
    monkeypatch.setattr(same_on_ranks, "refuse_differences", lambda *given, **named: found.append((given, named)))
    return found


def facts(world_size=2, split=False, max_steps=-1, rank=1):
    config = {"split_batches": split}
    return SimpleNamespace(world_size=world_size, process_index=rank, max_steps=max_steps, accelerator_config=config)


@pytest.mark.parametrize(
    ("shares", "args", "updates", "text", "words"),
    [
        ((), facts(), (10, 5), "10", "pass the same data"),
        ((2, 1), facts(split=True), (10, 5), "10", "pass the same data"),
        ((2, 0), facts(), (10, 5), "10", "dataloader_drop_last=True"),
        ((2, 0), facts(split=True), (10, 5), "10, with 0 samples in the last one of an epoch", "dataloader_drop_last"),
        ((2, 0), facts(split=True, rank=0), (10, 5), "10, with 2 samples in the last one of an epoch", "drop_last"),
        ((2, 0), facts(split=True), (5, 5), "5, with 0 samples in the last one of an epoch", "drop_last"),
        ((2, 0), facts(split=True), (4, 5), "4", "drop_last"),
        ((2, 0), facts(split=True), (0, 0), "0", "drop_last"),
        ((2, 0), facts(split=True, max_steps=10), (10, 5), "10", "drop_last"),
        ((4, 3, 2, 0), facts(split=True, world_size=2, rank=1), (9, 5), "9, with 2 samples", "drop_last"),
    ],
)
def test_what_is_compared_of_the_updates(monkeypatch, asked, shares, args, updates, text, words):
    monkeypatch.setattr(same_on_ranks, "last_shares", lambda loader: shares)
    counts = SimpleNamespace(max_updates=updates[0], updates_per_epoch=updates[1])
    own = FlagSources(True, False, True)
    assert compare_updates(args, counts, None, own) == own
    (((mine, what, hint, sources), _),) = asked
    (found,) = mine.values()
    assert found.startswith(text) and (found == text or "with" in text) and what == "training data" and words in hint
    assert sources == [1, 0, 1]


def test_one_process_compares_nothing(asked):
    own, before = FlagSources(True, True, False), []
    assert compare_updates(facts(world_size=1), None, None, own) is own
    compare_arguments(facts(world_size=1), None, None, lambda: before.append(1))
    compare_arguments(facts(world_size=1), None)
    assert asked == [] and before == [1]


@pytest.mark.parametrize(
    ("data", "answer", "expected"),
    [("5", None, "5"), (None, None, None), ("5", "unknown", None), ("5", "differs", None)],
)
def test_data_are_known_to_all_where_all_know_the_same(monkeypatch, data, answer, expected):
    def exchange(mine, what, *, numbers, before):
        assert mine["resume_from_checkpoint"] == "'checkpoint-2'" and "max_steps" in mine and "local_rank" not in mine
        if answer == "unknown":
            numbers[0] = 1
        if answer == "differs":
            numbers[1] += 1
        numbers[3] = 1  # another rank's source

    monkeypatch.setattr(same_on_ranks, "refuse_differences", exchange)
    start = StartFacts(data=data)
    args = SimpleNamespace(world_size=2, process_index=1, to_dict=lambda: {"max_steps": 3, "local_rank": 1})
    compare_arguments(args, "out/checkpoint-2", start)
    assert start.data == expected and start.sources == FlagSources(True, False, False)
