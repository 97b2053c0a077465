"""Every case under transformers 5.23 and under hf_compat: equal to the last bit, or a row of docs/differences.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from helpers.parity.cases import CASES
from helpers.parity.compare import first_difference, same
from helpers.parity.differences import IN_ONE_PROCESS as DIFFERENCES
from helpers.parity.differences import names_to_run
from helpers.two_sides import run_both

DOCS = Path(__file__).resolve().parents[2] / "docs" / "differences.md"
pytestmark = pytest.mark.timeout(1800)  # the first test waits for every case


# Each crosses two things that other cases have alone.
CROSSED = {
    "label_smoothing_padded", "batch_rebalance_drop_last", "bf16_causal_lm", "ragged_predictions_moved",
    "batches_not_joined_moved", "neftune_bf16", "neftune_lora_on_embeddings", "neftune_model_init",
    "bf16_and_bf16_full_eval", "fp16_full_eval_model_init", "compiled_lora", "compiled_neftune",
    "seq2seq_without_metrics", "seq2seq_collator_of_transformers", "seq2seq_to_cpu", "seq2seq_not_joined",
    "seq2seq_inputs_and_losses", "seq2seq_several_sets", "seq2seq_best", "seq2seq_bf16", "seq2seq_model_init",
    "seq2seq_config_and_length", "seq2seq_evaluate_before_training",
}  # fmt: skip


def rows(names):
    return [pytest.param(name, marks=pytest.mark.matrix) if name in CROSSED else name for name in names]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    chosen = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cases = sorted({item.callspec.params["name"] for item in chosen})
    names = {api: names_to_run(api, cases, DIFFERENCES) for api in ("transformers", "hf_compat")}
    return run_both(folder, names, ranks=1)


@pytest.mark.parametrize("name", rows(name for name in CASES if name not in DIFFERENCES))
def test_equals_transformers_bit_for_bit(results, name):
    theirs, ours = results("transformers", name), results("hf_compat", name)
    assert same(theirs, ours), first_difference(theirs, ours)


@pytest.mark.parametrize("name", list(DIFFERENCES))
def test_differs_as_the_differences_page_says_and_only_so(results, name):
    difference = DIFFERENCES[name]
    theirs, ours = results("transformers", name), results("hf_compat", name)
    assert not same(theirs, ours), "nothing differs any more: take it off the list and the differences page"
    expected = difference.expect(theirs, difference.mended and results("transformers", difference.mended))
    assert same(expected, ours), first_difference(expected, ours)
    assert f"## {difference.heading}\n" in DOCS.read_text()


def test_counts():
    assert len(CASES) >= 60 and len({difference.heading for difference in DIFFERENCES.values()}) <= 3
    assert set(CASES) >= CROSSED


def test_the_oracle_is_the_documented_release():
    assert transformers.__version__.startswith("5.23.")
