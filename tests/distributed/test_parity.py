"""Two processes under transformers (torchrun) and under hf_compat (`hf-compat run`): equal on both ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.parity.compare import first_difference, same
from helpers.parity.differences import IN_TWO_PROCESSES as DIFFERENCES
from helpers.parity.differences import names_to_run
from helpers.two_sides import run_both

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "differences.md"
pytestmark = pytest.mark.timeout(1800)  # the first test waits for every case

# Of tests/helpers/parity/cases.py: what several processes change. (All 132 were compared once.)
ONE_MODEL = ("baseline", "evaluate_before_training", "causal_lm")
NAMES = [
    "baseline",
    "accumulation",
    "accumulation_larger_than_epoch",
    "short_last_window",
    "fractional_epochs",
    "max_steps_over_epochs",
    "drop_last",
    "two_workers",
    "no_clipping",
    "hard_clipping",
    "label_smoothing_padded",
    "nan_losses_filtered",
    "stream_that_ends",
    "stream_with_leftover_windows",
    "stream_with_length",
    "stream_told_its_epoch",
    "model_init",
    "data_seed",
    "sequential",
    "global_random_sampler",
    "group_by_length",
    "batch_rebalance",
    "random_collator",
    "datasets_with_extra_columns",
    "count_all_tokens",
    "bf16",
    "causal_lm",
    "causal_lm_tokens_of_this_device",
    "activation_checkpointing",
    "compute_loss_func",
    "optim_adafactor",
    "optim_schedule_free_adamw",
    "compiled_accumulating",
    "schedule_reduce_lr_on_plateau",
    "metrics",
    "several_eval_sets",
    "batch_metrics",
    "each_metric_over_each_data",
    "inputs_and_losses_for_metrics",
    "ragged_predictions",
    "batches_not_joined",
    "nested_outputs",
    "stream_evaluated",
    "one_eval_set_without_a_batch",
    "bert",
    "with_a_tokenizer",
    "save_limit",
    "load_best",
    "flags_at_substeps",
    "stop_within_a_window",
    "early_stopping",
    "weighted_loss",
    "gathered_in_the_loss",
    "own_prepared_loader",
    "seq2seq_t5",
    "seq2seq_marian_beams",
    "seq2seq_several_sets",
    "seq2seq_best",
]


# Of these, what runs with `-m matrix` only: several processes change it as one of the others.
IN_THE_MATRIX = {
    "accumulation_larger_than_epoch", "max_steps_over_epochs", "drop_last", "no_clipping", "hard_clipping", "data_seed",
    "sequential", "random_collator", "activation_checkpointing", "optim_adafactor", "inputs_and_losses_for_metrics",
    "batches_not_joined", "nested_outputs", "one_eval_set_without_a_batch", "with_a_tokenizer", "flags_at_substeps",
    "count_all_tokens", "label_smoothing_padded", "stream_told_its_epoch", "global_random_sampler", "bert",
    "save_limit", "optim_schedule_free_adamw", "schedule_reduce_lr_on_plateau", "each_metric_over_each_data",
    "stop_within_a_window", "seq2seq_marian_beams", "seq2seq_best", "accumulation", "fractional_epochs", "metrics",
    "load_best", "weighted_loss", "seq2seq_t5",
}  # fmt: skip


def selected(session) -> list[str]:
    """Return the cases of the tests that were asked for."""
    asked = {item.callspec.params.get("name") for item in session.items if hasattr(item, "callspec")}
    return [name for name in NAMES if name in asked or name in ONE_MODEL]


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    chosen = [*selected(request.session), *DIFFERENCES]
    names = {api: names_to_run(api, chosen, DIFFERENCES) for api in ("transformers", "hf_compat")}
    return run_both(tmp_path_factory.mktemp("two"), names)


def differing(results, name: str, rank: int) -> tuple[set[str], str]:
    theirs, ours = results("transformers", name, rank), results("hf_compat", name, rank)
    parts = {part for part in theirs if not same(theirs[part], ours[part])}
    return parts, first_difference(theirs, ours) if parts else ""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix) if name in IN_THE_MATRIX else name for name in NAMES]
)
def test_both_ranks_equal_transformers_bit_for_bit(results, name):
    for rank in (0, 1):
        parts, where = differing(results, name, rank)
        assert not parts, f"rank {rank}: {where}"


@pytest.mark.parametrize("name", list(DIFFERENCES))
def test_differs_as_the_differences_page_says_and_only_so(results, name):
    difference = DIFFERENCES[name]
    for rank in (0, 1):
        theirs, ours = results("transformers", name, rank), results("hf_compat", name, rank)
        assert not same(theirs, ours), "nothing differs any more: take it off the list and the differences page"
        expected = difference.expect(theirs, difference.mended and results("transformers", difference.mended, rank))
        assert same(expected, ours), f"rank {rank}: {first_difference(expected, ours)}"
    assert f"## {difference.heading}\n" in DOCS.read_text()


def test_the_ranks_have_one_model(results):
    for name in ONE_MODEL:
        assert same(results("hf_compat", name, 0)["weights"], results("hf_compat", name, 1)["weights"])
    # theirs have not: the model that was evaluated first is not wrapped any more
    first, second = (results("transformers", "evaluate_before_training", rank)["weights"] for rank in (0, 1))
    assert not same(first, second)
