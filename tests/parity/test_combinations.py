"""A sample of `combinations.py`; what the comparison leaves out stands on the differences page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sweeps.parity import combinations
from sweeps.parity.combination_calls import CALLS
from sweeps.parity.combination_features import FEATURES
from sweeps.parity.combination_rules import RULES
from sweeps.parity.combinations import Table, drawn, parse

DOCS = Path(__file__).resolve().parents[2] / "docs" / "differences.md"
# Each of these has differed once, or is of a kind in which faults were found.
SAMPLE = [
    "regression,does_new_optimizer,accumulate_2,train",
    "rows,does_new_schedule,eval_2,train_twice",
    "tags,restore_callbacks,accumulate_3,should_epoch_stop_on_step_end_3,killed_on_step_end_8",
    "gpt2,load_best,limit_1,bf16,killed_on_save_4",
    "bert_datasets,control_replaced,accumulate_4,killed_resumed_by_name",
    "rows_few,save_epoch,async_save,accumulate_3,interrupted_same_substep",
    "stream_sized,accumulate_4,ignore_data_skip,stopped_13",
    "rows,auto_batch_late,eval_epoch,two_sets,evaluate_around",
    "rows_few,drop_last,eval_2,train",  # evaluations without a batch
]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    table = Table(tmp_path_factory.mktemp("combinations"))
    yield table
    table.close()


@pytest.mark.parametrize("row", SAMPLE)
def test_a_combination_is_equal_under_both_trainers(table, row):
    verdict = table.verdict(parse(row))
    assert not verdict.fault, verdict.fault


IN_TWO_PROCESSES = [
    # saving before a log counted operations as a float, where transformers keeps the number 0
    "rows_few,calls_save_checkpoint_on_epoch_begin,eval_2,killed_on_step_end_8",
    # a second training was said to end in other weights
    "rows_table,data_seed,eval_on_start,should_evaluate_on_epoch_end_3,accumulate_3,epochs_1_5,train_twice",
]


@pytest.mark.parametrize("row", IN_TWO_PROCESSES)
def test_two_processes_are_equal_under_both_trainers(table, row):
    verdict = table.verdict(replace(parse(row), devices=2))
    assert not verdict.fault, verdict.fault


def test_a_difference_is_found_and_named(table, monkeypatch):
    monkeypatch.setattr(combinations, "RULES", [])
    # a resumed run there draws other noise, which a rule explains
    assert ".said[1]" in table.verdict(parse("rows_noisy,killed_on_step_end_5")).fault


def test_rows_are_drawn_from_all_features_and_calls():
    rows = [drawn("sample", number) for number in range(3000)]
    assert {row.calls for row in rows} == set(CALLS)
    assert len({name for row in rows for name in row.features}) > 0.95 * len(FEATURES)
    assert rows[:300] == [drawn("sample", number) for number in range(300)]


def test_rules_name_rows_of_the_differences_page():
    text = DOCS.read_text()
    assert [rule.heading for rule in RULES if f"## {rule.heading}\n" not in text] == []
