"""`EvaluationRun`, batch by batch, as one of two ranks: what is gathered, kept, cut off and computed, and when."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchmetrics import MeanMetric, MeanSquaredError, Metric, MetricCollection

from hf_compat.data.order import RankSlice
from hf_compat.engine import evaluation
from hf_compat.engine.evaluation import EvaluationBatch, EvaluationRun, check_metrics, is_metric_source, torch_metrics
from hf_compat.errors import ArgumentError, OverrideError

TWO = RankSlice(rank=0, world_size=2)


def doubled(data):
    """What two ranks with the same data gather."""
    return torch.cat([data, data])


class Steps:
    """What an evaluation asks of its owner. A model gives back `x`."""

    def __init__(self, ranks=None, has_loss=True, **values):
        usual = {
            "eval_batch_size": 2, "include_for_metrics": [], "eval_do_concat_batches": True, "device": "cpu",
            "eval_accumulation_steps": None, "logging_nan_inf_filter": True, "batch_eval_metrics": False,
            "eval_loss_by_token": False, "dataloader_drop_last": False,
        }  # fmt: skip
        self.args = SimpleNamespace(**{**usual, **values})
        self.padded = []
        self.accelerator = SimpleNamespace(
            rank_slice=ranks or RankSlice(), gather=doubled if ranks else lambda data: data, is_alone=ranks is None,
            process_index=1, pad_across_processes=self._pad,
        )  # fmt: skip
        self.has_loss, self.label_names = has_loss, ["labels"]
        self.model = SimpleNamespace(forward=lambda input_ids, labels: None, main_input_name="x")

    def _pad(self, data, dim, pad_index):
        self.padded.append((dim, pad_index))
        return data

    def prediction_step(self, model, inputs, loss_only, ignore_keys=None):
        loss = inputs["x"].float().mean() if self.has_loss else None
        return (loss, None, None) if loss_only else (loss, inputs["x"], inputs["labels"])

    def _prepare_input(self, value):
        return value

    def _weight_in_evaluation(self, inputs):
        return torch.tensor(float(len(inputs["x"])))


def batch(*numbers, is_last=False, remainder=0):
    x = torch.tensor(numbers)
    return EvaluationBatch({"x": x, "labels": x + 1}, is_last, remainder)


BATCHES = (batch(1.0, 2.0), batch(3.0, 5.0, is_last=True, remainder=3))


def finished(steps, batches=BATCHES, prefix="eval", **options):
    run = EvaluationRun(steps, steps.model, list(batches), prefix, **options)
    for one in batches:
        run.step(one)
    return run, run.finish()


def test_one_process_keeps_its_rows_and_means_its_losses_by_sample():
    run, output = finished(Steps(), compute_metrics=lambda prediction: {"rows": len(prediction.predictions)})
    assert output.predictions.tolist() == [1, 2, 3, 5] and output.label_ids.tolist() == [2, 3, 4, 6]
    # as upstream each batch's loss counts as often as a batch has samples, and a short last one by the remainder
    assert output.metrics == {"eval_loss": pytest.approx((1.5 * 2 + 4.0 * 2) / 4), "eval_rows": 4}
    assert run.observed_samples == 4 and run.batches_seen == 2 and output.num_samples == 4


def test_two_ranks_pad_gather_and_cut_the_fillers_of_the_last_round_off():
    steps = Steps(TWO)
    _, output = finished(steps, compute_metrics=lambda prediction: {"rows": len(prediction.predictions)})
    assert output.predictions.tolist() == [1, 2, 1, 2, 3, 5, 3] and output.metrics["eval_rows"] == 7
    assert output.metrics["eval_loss"] == pytest.approx((1.5 * 4 + 4.0 * 3) / 7)
    assert set(steps.padded) == {(1, -100)} and len(steps.padded) == 4
    _, output = finished(Steps(TWO), drops_fillers=False)
    assert len(output.predictions) == 8
    _, output = finished(Steps(TWO), [BATCHES[0], batch(3.0, 5.0, remainder=3)])  # it is not known to be the last one
    assert len(output.predictions) == 8
    _, output = finished(Steps(TWO), [BATCHES[0], batch(3.0, 5.0, is_last=True, remainder=0)])
    assert len(output.predictions) == 8


def test_neighbours_that_share_a_model_give_their_rows_once():
    ranks = RankSlice(rank=0, world_size=1, sharing=2)
    _, output = finished(Steps(ranks))
    assert output.predictions.tolist() == [1, 2, 3, 5]


def test_nothing_but_losses_is_kept_where_only_they_are_asked_for():
    _, output = finished(Steps(), loss_only=True, compute_metrics=lambda prediction: {"never": 1})
    assert output.predictions is None and output.label_ids is None and list(output.metrics) == ["eval_loss"]
    _, output = finished(Steps(has_loss=False), loss_only=True)
    assert output.metrics == {}


@pytest.mark.parametrize(("skips", "expected"), [(True, 4.0), (False, None)])
def test_losses_that_are_not_finite_are_left_out_by_the_argument(skips, expected):
    batches = (batch(float("nan"), 1.0), batch(3.0, 5.0, is_last=True))
    _, output = finished(Steps(logging_nan_inf_filter=skips), batches)
    assert output.metrics["eval_loss"] == expected or (expected is None and np.isnan(output.metrics["eval_loss"]))


def test_losses_weighted_by_tokens():
    batches = (batch(1.0), batch(3.0, 5.0, 7.0, is_last=True))
    _, output = finished(Steps(eval_loss_by_token=True), batches)
    assert output.metrics["eval_loss"] == pytest.approx((1.0 * 1 + 5.0 * 3) / 4)
    batches = (batch(float("inf")), batch(3.0, 5.0, 7.0, is_last=True))
    _, output = finished(Steps(eval_loss_by_token=True), batches)
    assert output.metrics["eval_loss"] == pytest.approx(5.0)
    _, output = finished(Steps(eval_loss_by_token=True, logging_nan_inf_filter=False), batches)
    assert output.metrics["eval_loss"] == float("inf")
    _, output = finished(Steps(eval_loss_by_token=True), (batch(float("inf"), is_last=True),))
    assert output.metrics["eval_loss"] == float("inf")  # there is no other


def test_metrics_by_batch_are_told_which_is_the_last_one():
    told = []

    def metrics(prediction, compute_result):
        told.append((prediction.predictions.tolist(), compute_result))
        return {"number": len(told)} if compute_result or len(told) == 1 else None

    _, output = finished(Steps(batch_eval_metrics=True), compute_metrics=metrics)
    assert told == [([1, 2], False), ([3, 5], True)]
    assert output.predictions is None and output.metrics["eval_number"] == 2
    told.clear()
    _, output = finished(Steps(batch_eval_metrics=True), [*BATCHES, BATCHES[0]], compute_metrics=metrics)
    assert [last for _, last in told] == [False, False, True]
    _, output = finished(Steps(batch_eval_metrics=True), compute_metrics=metrics, is_prediction=True)
    assert output.predictions.tolist() == [1, 2, 3, 5]
    told.clear()
    finished(Steps(batch_eval_metrics=True), loss_only=True, compute_metrics=metrics)
    assert told == []


def test_what_is_kept_moves_to_the_cpu_every_few_batches(monkeypatch):
    moved = []
    monkeypatch.setattr(evaluation.KeptBatches, "to_cpu", lambda self: moved.append(self))
    finished(Steps(eval_accumulation_steps=2), [BATCHES[0]] * 5)
    assert len(moved) == 2 * 4  # after the second and the fourth batch; losses, predictions, labels, inputs
    moved.clear()
    finished(Steps(eval_accumulation_steps=6), [BATCHES[0]] * 5)
    assert moved == []


def test_inputs_and_losses_come_with_the_predictions_if_asked_for():
    seen = []
    for names in ([], ["inputs"], ["loss"], ["inputs", "loss"]):
        finished(Steps(include_for_metrics=names), compute_metrics=lambda one: seen.append(one) or {})
    assert [(one.inputs is not None, one.losses is not None) for one in seen] == [
        (False, False), (True, False), (False, True), (True, True),
    ]  # fmt: skip
    assert seen[3].inputs.tolist() == [1, 2, 3, 5] and seen[3].losses.tolist() == [1.5, 1.5, 4.0, 4.0]
    steps = Steps(include_for_metrics=["inputs"])
    steps.model.main_input_name = "pixels"
    with pytest.raises(ArgumentError, match="the batch has x, labels"):
        finished(steps)


def test_what_a_step_must_return():
    steps = Steps()
    steps.prediction_step = lambda *_, **__: 3
    with pytest.raises(OverrideError, match=r"`prediction_step` returned int \(3\)"):
        finished(steps)
    steps.prediction_step = lambda *_, **__: (0.5, None, None)
    with pytest.raises(OverrideError, match=r"the loss 0\.5"):
        finished(steps)


def test_logits_are_changed_before_they_are_kept():
    _, output = finished(Steps(), preprocess_logits=lambda logits, labels: logits * 10 + labels)
    assert output.predictions.tolist() == [12, 23, 34, 56]


def test_names_get_the_prefix_and_others_metrics_follow():
    _, output = finished(
        Steps(), prefix="a", compute_metrics=lambda one: {"a_x": 1, "ax": 2, "y": 3}, logged_values=lambda: {"z": 4}
    )
    assert list(output.metrics) == ["a_x", "a_loss", "a_ax", "a_y", "a_z"]


@pytest.mark.parametrize(
    ("ranks", "last", "expected"),
    [
        (RankSlice(rank=0, world_size=2), 3, 3.0),  # both samples
        (RankSlice(rank=1, world_size=2), 3, 2.0),  # the second one is a filler
        (RankSlice(rank=1, world_size=2), 2, 1.5),  # both are
        (RankSlice(rank=1, world_size=2), 0, 3.0),  # the round is full
    ],
)
def test_a_metric_object_gets_a_ranks_own_samples_without_fillers(monkeypatch, ranks, last, expected):
    class Mean(Metric):
        def __init__(self):
            super().__init__()
            self.add_state("total", torch.zeros(()))
            self.add_state("count", torch.zeros(()))

        def update(self, predictions, labels):
            assert len(predictions) == len(labels)
            self.total += predictions.sum()
            self.count += len(predictions)

        def compute(self):
            return self.total / self.count

    batches = (batch(1.0, 2.0), batch(3.0, 6.0, is_last=True, remainder=last))
    _, output = finished(Steps(ranks), batches, compute_metrics=Mean)
    assert output.predictions is None
    assert output.metrics["eval_Mean"] == pytest.approx({3.0: 12 / 4, 2.0: 6 / 3, 1.5: 3 / 2}[expected])


def test_a_neighbours_samples_are_counted_once():
    steps = Steps(RankSlice(rank=0, world_size=1, sharing=2, place=1))
    run = EvaluationRun(steps, steps.model, [], "eval", compute_metrics=MeanSquaredError)
    run.step(BATCHES[0])
    assert run.torch_metrics["MeanSquaredError"].total == 0


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (MeanMetric(), True),
        (MetricCollection([MeanMetric()]), True),
        (MeanMetric, True),
        (dict, False),
        (lambda: MeanMetric(), True),
        (lambda prediction: {}, False),
        (lambda prediction=None: {}, False),
        (lambda *predictions: {}, False),
        (lambda **options: MeanMetric(), True),
        (lambda *, threshold=0.5: MeanMetric(), True),
        ({}, False),
        ("accuracy", False),
        (None, False),
        (min, False),
    ],
)
def test_what_makes_metric_objects(candidate, expected):
    assert is_metric_source(candidate) is expected


def test_metric_objects_are_made_reset_and_wrapped():
    assert torch_metrics(None, "cpu") is None and torch_metrics(lambda prediction: {}, "cpu") is None
    one = MeanMetric()
    one.update(3.0)
    made = torch_metrics(one, torch.device("cpu"))
    assert isinstance(made, MetricCollection) and not made["MeanMetric"].update_called
    both = MetricCollection({"a": MeanMetric()})
    assert torch_metrics(both, torch.device("cpu")) is both
    with pytest.raises(ArgumentError, match="takes no argument and gave 3"):
        torch_metrics(lambda: 3, torch.device("cpu"))


def by_batch(prediction, compute_result): ...


@pytest.mark.parametrize(
    ("metrics", "sets", "is_by_batch", "error"),
    [
        (None, None, True, None),
        (MeanMetric, None, True, None),
        (lambda prediction: {}, None, False, None),
        (lambda prediction: {}, None, True, "which it does not take"),
        (by_batch, None, True, None),
        (3, None, False, "cannot be called"),
        ({"a": by_batch, "b": None}, {"a": [], "b": []}, True, None),
        ({"a": by_batch}, {"a": [], "b": []}, True, None),
        ({"c": by_batch}, {"a": []}, True, r"metrics for \['c'\], and the evaluation data sets are \['a'\]"),
        ({"a": by_batch}, [], True, r"the evaluation data sets are \[\]"),
        ({"a": 3}, {"a": []}, False, "cannot be called"),
    ],
)
def test_metrics_that_cannot_be_computed_are_refused(metrics, sets, is_by_batch, error):
    if error is None:
        check_metrics(metrics, sets, is_by_batch)
    else:
        with pytest.raises(ArgumentError, match=error):
            check_metrics(metrics, sets, is_by_batch)


class Endless:
    """A loader without a length."""

    def __iter__(self):
        return iter(["a", "b"])


@pytest.mark.parametrize(
    ("loader", "length", "last"), [(["a", "b", "c"], 3, [False, False, True]), (Endless(), None, [False, False])]
)
def test_the_last_batch_of_a_loader_of_another_kind_is_known_by_its_length(loader, length, last):
    batches = evaluation.EvaluationBatches(loader)
    found = list(batches)
    assert [one.inputs for one in found] == list(loader) and [one.is_last for one in found] == last
    assert {one.remainder for one in found} == {-1} and batches.length == length
    if length is None:
        with pytest.raises(TypeError, match="no length"):
            len(batches)
    else:
        assert len(batches) == length


@pytest.mark.parametrize(
    ("loss", "kept"),
    [
        (torch.tensor(3.0), [3.0, 3.0]),
        (torch.tensor([3.0, 4.0]), [3.0, 4.0, 3.0, 4.0]),
        (torch.tensor([3.0]), [3.0, 3.0]),
        (torch.nn.Parameter(torch.tensor(3.0)), [3.0, 3.0]),
        (3.0, None),
        (3, None),
    ],
)
@pytest.mark.parametrize("ranks", [None, TWO])
def test_a_loss_counts_once_for_each_sample(loss, kept, ranks):
    steps = Steps(ranks)
    run = EvaluationRun(steps, steps.model, [], "eval")
    if kept is None:
        with pytest.raises(OverrideError, match="losses are gathered as tensors"):
            run._repeated(loss, batch(1.0, 2.0), None)
    else:
        assert run._repeated(loss, batch(1.0, 2.0), None).tolist() == kept * (1 if ranks is None else 2)


IDS = torch.tensor([[1, -100, 2], [3, 4, -100]])


@pytest.mark.parametrize(
    ("labels", "differ"),
    [
        ([IDS, IDS], False),
        ([IDS, IDS[:1], IDS], False),
        ([IDS, torch.tensor([[1, 2, 3]])], True),
        ([IDS, IDS, torch.tensor([[1, 2, 3]])], False),  # two batches are looked at
        ([IDS], False),
        ([IDS[0], torch.tensor([[1, 2, 3]])], False),
        ([IDS.float(), torch.tensor([[1.0, 2.0, 3.0]])], False),
        ([None, torch.tensor([[1, 2, 3]])], False),
    ],
)
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_batches_with_other_numbers_of_tokens_are_noted(labels, differ, by_token, index, monkeypatch):
    told = []
    monkeypatch.setattr(evaluation, "tell_of_breaches", told.append)
    steps = Steps(eval_loss_by_token=by_token)
    steps.accelerator.process_index = index
    steps.prediction_step = lambda model, inputs, *_, **__: (inputs["x"].mean(), None, None)
    batches = [EvaluationBatch({"x": torch.ones(2), "labels": one}, False, 0) for one in labels]
    run = EvaluationRun(steps, steps.model, batches, "eval", loss_only=True)
    for one in batches:
        run.step(one)
    run.finish()
    assert len(told) == (index == 0)
    assert all(facts.weighs_batches_alike is (differ and not by_token) for facts in told)


@pytest.mark.parametrize("is_prediction", [False, True])
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("has_metrics", [False, True])
@pytest.mark.parametrize("reads_all", [False, True])
@pytest.mark.parametrize("ranks", [None, TWO])
def test_what_an_evaluation_is_judged_by(is_prediction, joins, has_metrics, reads_all, ranks, monkeypatch):
    told = []
    monkeypatch.setattr(evaluation, "tell_of_breaches", told.append)
    steps = Steps(ranks, eval_do_concat_batches=joins)
    steps.accelerator.process_index = 0
    options = {"compute_metrics": (lambda prediction: {}) if has_metrics else None}
    loader = torch.utils.data.DataLoader(range(4), batch_size=2)
    run = EvaluationRun(steps, steps.model, loader, "eval", is_prediction=is_prediction, reads_all=reads_all, **options)
    for one in BATCHES:
        run.step(one)
    run.finish()
    (facts,) = told
    rows = (4 if ranks is None else 7) if joins and (is_prediction or has_metrics) else None
    assert (facts.rows, facts.label_rows) == (rows, rows)
    assert facts.expected_batches == (2 if reads_all else None)
    assert facts.expected_rows == (4 if reads_all and ranks is None else None)
    assert (facts.is_prediction, facts.batches, facts.samples, facts.rows_read) == (is_prediction, 2, 4, 4)
    assert (facts.has_metrics, facts.called_metrics, facts.has_loss, facts.has_labels) == (
        has_metrics,
        has_metrics,
        True,
        True,
    )
    assert (facts.dropped, facts.unsampled, facts.names, facts.removed) == (0, 0, ("x", "labels"), ())
    assert facts.has_own_step and not facts.weighs_batches_alike and not facts.loss_only


def test_inputs_that_a_batch_lacks_are_named():
    steps = Steps(include_for_metrics=["inputs"])
    steps.model.main_input_name = "ids"
    with pytest.raises(ArgumentError, match="keeps the input 'ids', and the batch has x, labels"):
        finished(steps)
