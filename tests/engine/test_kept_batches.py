"""Kept results are the same arrays, whether their rows were counted beforehand or not."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
import torchmetrics

import hf_compat
from helpers import toy
from hf_compat.engine import evaluation, padded_rows
from hf_compat.engine.evaluation import KeptBatches
from sweeps.benchmarks import counts

ROWS = {
    "as counted": [(4, 3), (4, 3), (2, 3)],
    "fewer than counted": [(4, 3), (2, 3)],
    "more than counted": [(4, 3), (4, 3), (4, 3)],
    "more at once": [(12, 3)],
    "wider later": [(4, 3), (4, 5), (2, 3)],
    "vectors": [(4,), (4,), (2,)],
    "more vectors than counted": [(4,), (4,), (4,), (4,), (3,)],
    "a longer vector": [(4,), (12,), (4,)],
    "an empty one": [(4, 2), (0, 2), (2, 2)],
    "no rows": [(), ()],
    "nothing": [],
}


def kept(kind, batches, join=True):
    for batch in batches:
        kind.add(batch)
    return kind.result(join)


def same(left, right) -> bool:
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left is right is None or (left.dtype == right.dtype and np.array_equal(left, right))


@pytest.fixture(params=[1, 60, 2**18], autouse=True)
def _bytes_at_once(request, monkeypatch):
    """Set how many bytes of batches wait before they are copied: none, some, all."""
    monkeypatch.setattr(evaluation, "_BYTES_AT_ONCE", request.param)


@pytest.mark.parametrize("shapes", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_counted_rows_are_what_batches_give(shapes, dtype):
    torch.manual_seed(0)
    batches = [(torch.rand(shape) * 100).to(dtype) for shape in shapes]
    assert same(kept(KeptBatches(), batches), kept(KeptBatches(10), batches))


LENGTHS = [[1, 2, 3, 5, 8], [8, 5, 3, 2, 1], [3, 3, 7, 1, 1, 7, 2], [4, 4, 4], [0, 2], [2, 0, 3], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("platform", [sys.platform, "another"])
def test_rows_of_different_lengths_are_padded_as_joined_ones(monkeypatch, dtype, platform):
    monkeypatch.setattr(padded_rows.sys, "platform", platform)
    monkeypatch.setattr(padded_rows, "_AT_ONCE", 100)
    torch.manual_seed(0)
    for lengths, rest in itertools.product(LENGTHS, [(), (5,), (2, 0)]):
        batches = [(torch.rand(3, length, *rest) * 100).to(dtype) for length in lengths]
        assert same(kept(KeptBatches(), batches), kept(KeptBatches(10), batches)), (lengths, rest)


def test_what_pads_no_number_of_the_type_is_told_as_before():
    batches = [torch.ones(2, length, dtype=torch.uint8) for length in (2, 3)]
    there, here = outcome(KeptBatches(), batches), outcome(KeptBatches(10), batches)
    assert type(there) is type(here) and (isinstance(there, str) or same(there, here))


@pytest.mark.parametrize("lengths", [range(100, 200), range(199, 99, -1)], ids=["growing", "shrinking"])
def test_results_of_different_lengths_take_their_own_size_at_the_peak(lengths):
    kind = KeptBatches(100 * 64)
    before = counts.peak_mib(reset=True)
    for length in lengths:
        kind.add(torch.ones(64, length, 16))
    result = kind.result(join=True)
    assert result.shape == (6400, 199, 16)
    assert counts.peak_mib() - before <= 1.15 * result.nbytes / 2**20


def test_gradients_are_left_out():
    """An overridden `prediction_step` may compute them."""
    batches = [torch.rand(4, 3, requires_grad=True) for _ in range(2)]
    assert same(kept(KeptBatches(), batches), kept(KeptBatches(10), batches))


def outcome(kind, batches):
    try:
        return kept(kind, batches)
    except hf_compat.errors.DataError as error:
        return str(error).partition(")")[0]


@pytest.mark.parametrize("odd", [torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 2, 2), (torch.ones(2, 3),)])
@pytest.mark.parametrize("first", [True, False])
def test_what_does_not_fit_is_joined_as_before(odd, first):
    batches = [odd, torch.rand(4, 3)] if first else [torch.rand(4, 3), odd, torch.rand(4, 3)]
    there, here = outcome(KeptBatches(), batches), outcome(KeptBatches(10), batches)
    assert type(there) is type(here)
    assert isinstance(there, str) or same(there, here)


def test_an_evaluation_makes_no_second_copy(tmp_path, monkeypatch):
    joined = []
    join = evaluation.join_batches
    monkeypatch.setattr(
        evaluation, "join_batches", lambda batches: joined.extend(b.ndim for b in batches) or join(batches)
    )
    args = hf_compat.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    output = hf_compat.Trainer(toy.Classifier(), args).predict(toy.rows(21))
    assert output.predictions.shape == (21, 3)
    assert joined == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("moved", [True, False])
def test_numbers_of_another_type_follow_the_earlier_ones(dtype, moved):
    """Losses begin another tensor, also after full ones have been moved to the CPU."""
    torch.manual_seed(0)
    losses = torch.rand(5).to(dtype)
    losses[1] = float("nan")
    numbers, batches = KeptBatches(10), KeptBatches()
    for number, loss in enumerate([*losses, torch.tensor(0.1, dtype=torch.float64)]):
        for kind in (numbers, batches):
            kind.add(loss.repeat(4 if number < 4 else 3))
            if moved:
                kind.to_cpu()
    left, right = (kind.result(True) for kind in (numbers, batches))
    assert left.dtype == right.dtype and np.array_equal(left, right, equal_nan=True)


@pytest.mark.parametrize("joins", [True, False])
def test_torchmetrics_leave_the_loss_as_it_is(tmp_path, monkeypatch, joins):
    """Of more samples than one tensor of losses holds, too, with single batches without a finite loss."""
    monkeypatch.setattr(evaluation, "_NUMBERS", 10)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x, labels=None):
            loss = (x * self.scale).mean()
            return {"loss": loss / (x[0] > 0.2), "logits": x}

    rows = [{"x": float(number), "labels": 0.0} for number in np.random.default_rng(0).random(41)]
    args = hf_compat.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, per_device_eval_batch_size=3,
        eval_do_concat_batches=joins,
    )  # fmt: skip
    by_torchmetrics, by_function = (
        hf_compat.Trainer(Model(), args, eval_dataset=rows, compute_metrics=metrics).evaluate()["eval_loss"]
        for metrics in (torchmetrics.MeanSquaredError, lambda prediction: {})
    )
    # means of several tensors are weighted, which rounds otherwise than one mean of all losses
    assert by_torchmetrics == pytest.approx(by_function, rel=1e-6)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("shape", [(2,), (2, 3)])
@pytest.mark.parametrize("join", [False, True])
def test_what_was_moved_or_kept_apart_is_part_of_the_result(moved, odd, shape, join):
    kept = KeptBatches(20)
    batches = [torch.full(shape, float(number)) for number in range(3)]
    kept.add(batches[0])
    if odd:  # another type, which ends the tensor of all
        kept._place()
        kept.add(batches[1].long())
    else:
        kept.add(batches[1])
    if moved:
        kept._take_apart()
        kept.to_cpu()
        assert kept.on_device == [] and kept.arrays
    kept.add(batches[2])
    found = kept.result(join)
    whole = np.concatenate([np.full(shape, float(number)) for number in range(3)])
    joined = found if join else np.concatenate(found)
    assert np.array_equal(joined, whole)


@pytest.mark.parametrize("join", [False, True])
def test_nothing_that_was_kept_has_no_result(join):
    assert KeptBatches(20).result(join) is None and KeptBatches().result(join) is None
