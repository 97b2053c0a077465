"""What rank 0 pays for a phase of a run does not grow with the number of ranks: counted on a fake process group."""

from __future__ import annotations

import importlib
import json

import pytest

from helpers.forking import run_ranks
from sweeps.benchmarks import meshes, ranks

SIZES = (8, 512)
# Collectives of ours, without Lightning's. transformers makes 0, 0, 0, 2, 2, 2, 1 and 1, counted by the same program.
COLLECTIVES = {
    "start": 1, "update": 0, "read": 0, "log": 2, "first evaluation": 3, "evaluation": 3, "save": 2, "end": 2,
}  # fmt: skip


def counted(folder, size, side):
    """What a process counts that believes to be the first of so many."""

    def body(rank):
        ranks.pretend(size)
        api = importlib.import_module(ranks.SIDES[side])
        (folder / "counts.json").write_text(json.dumps(ranks.count(api, size, folder)))

    [ended] = run_ranks(folder / "logs", body, world=1)
    assert ended.status == 0, ended.said
    return json.loads((folder / "counts.json").read_text())


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """By number of ranks and phase."""
    return {size: counted(tmp_path_factory.mktemp(f"ranks{size}"), size, "ours") for size in SIZES}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """What transformers counts with the fewest ranks, by phase."""
    return counted(tmp_path_factory.mktemp("transformers"), SIZES[0], "transformers")


def test_threads_beside_the_training_do_the_same_with_more_ranks(counts):
    few, many = (counts[size]["beside"]["calls"] for size in SIZES)
    assert 0 < many <= 1.1 * few


@pytest.mark.parametrize("phase", COLLECTIVES)
def test_a_phase_costs_the_same_with_more_ranks(counts, phase):
    few, many = (counts[size][phase] for size in SIZES)
    assert many["calls"] <= 1.1 * few["calls"], (few, many)
    assert {**few, "calls": 0} == {**many, "calls": 0}
    assert few["collectives"] == COLLECTIVES[phase]
    assert few["objects"] == few["groups"] == 0, "success is told by one small tensor through the group that exists"


@pytest.mark.parametrize("phase", ["start", "update", "read", "log", "first evaluation", "evaluation", "save"])
def test_a_phase_costs_no_more_than_under_transformers(counts, theirs, phase):
    for size in SIZES:
        assert counts[size][phase]["calls"] <= theirs[phase]["calls"]


@pytest.mark.parametrize(
    ("what", "size", "kind", "each", "tokens"),
    [
        pytest.param("layers", 8, "all_reduce", 7, 16, id="layers, few"),
        pytest.param("layers", 512, "all_reduce", 7, 16, id="layers, many"),
        pytest.param("sequences", 8, "all_to_all_single", 4 + 4, 16 // 2, id="sequences, few"),
        pytest.param("sequences", 512, "all_to_all_single", 4 + 4, 16 // 2, id="many", marks=pytest.mark.matrix),
    ],
)
def test_what_two_ranks_share_is_exchanged_as_explain_says(tmp_path, size, what, kind, each, tokens):
    """Of a Llama of 2 layers and 64 hidden numbers of 4 bytes, in a micro-batch of one sample."""

    def body(rank):
        mode = meshes.count(what, size, 2)
        (tmp_path / "counts.json").write_text(json.dumps([mode.count[kind], mode.given[kind]]))

    [ended] = run_ranks(tmp_path / "logs", body, world=1, seconds=240)  # DeepSpeed may have to build its code
    assert ended.status == 0, ended.said
    exchanges = each * 2
    assert json.loads((tmp_path / "counts.json").read_text()) == [exchanges, exchanges * tokens * 64 * 4]
