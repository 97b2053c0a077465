"""With several evaluation sets, an evaluation of all of them is one validation to Lightning callbacks."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as plc

from helpers.toy import Classifier, rows
from hf_compat import Trainer, TrainerCallback
from hf_compat.engine import window_trainer as lean_evaluation

SETS = {"a": rows(8, seed=1), "b": rows(12, seed=2), "c": rows(4, seed=3)}


class Watch(pl.Callback):
    """Records the called hooks, and the losses available at the end."""

    def __init__(self, trace):
        self.trace = trace

    def on_validation_start(self, trainer, pl_module):
        self.trace.append("start")

    def on_validation_epoch_start(self, trainer, pl_module):
        self.trace.append("epoch start")

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.trace.append("batch")

    def on_validation_epoch_end(self, trainer, pl_module):
        self.trace.append("epoch end")

    def on_validation_end(self, trainer, pl_module):
        self.trace.append({name for name in trainer.callback_metrics if name.endswith("_loss")})


class Events(TrainerCallback):
    def __init__(self, trace):
        self.trace = trace

    def on_log(self, args, state, control, logs, **kwargs):
        self.trace.append("log " + next(iter(logs)))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.trace.append("evaluate " + next(iter(metrics)))


def make(make_args, callbacks, **values):
    torch.manual_seed(0)
    args = make_args(**{"eval_strategy": "epoch", "num_train_epochs": 1, "logging_strategy": "no", **values})
    return Trainer(Classifier(), args, train_dataset=rows(16), eval_dataset=SETS, callbacks=callbacks)


WHOLE = """
start, epoch start, batch, log eval_a_loss, evaluate eval_a_loss,
batch, batch, log eval_b_loss, evaluate eval_b_loss,
batch, epoch end, *, log eval_c_loss, evaluate eval_c_loss
"""


@pytest.mark.parametrize("within", ["training", "no training"])
def test_the_hooks_of_one_validation_surround_the_events_of_each_set(make_args, within):
    trace = []
    trainer = make(make_args, [Watch(trace), Events(trace)])
    if within == "training":
        trainer.train()
        assert trace.pop() == "log train_runtime"
    else:
        trainer.evaluate()
    found = [entry for entry in trace if isinstance(entry, set)]
    assert found == [{"eval_a_loss", "eval_b_loss", "eval_c_loss"}]
    expected = [part.strip() for part in WHOLE.split(",")]
    assert ["*" if isinstance(entry, set) else entry for entry in trace] == expected


def test_patience_counts_evaluations_and_any_set_can_be_monitored(make_args, tmp_path):
    stop = plc.EarlyStopping("eval_b_loss", patience=2, min_delta=100.0)
    keep = plc.ModelCheckpoint(tmp_path / "best", monitor="eval_c_loss", save_top_k=-1, filename="{step}-{eval_a_loss}")
    trainer = make(make_args, [stop, keep], num_train_epochs=9)
    trainer.train()
    assert trainer.state.epoch == 3.0 and stop.wait_count == 2
    assert len(list((tmp_path / "best").iterdir())) == 3
    best = min(
        (log for log in trainer.state.log_history if "eval_c_loss" in log), key=lambda entry: entry["eval_c_loss"]
    )
    assert f"step={best['step']}-" in keep.best_model_path
    assert float(keep.best_model_score) == pytest.approx(best["eval_c_loss"], rel=1e-6)


def test_averaged_weights_are_in_place_for_all_sets_and_out_afterwards(make_args):
    seen = []

    class Weights(TrainerCallback):
        def on_evaluate(self, args, state, control, model, **kwargs):
            seen.append(model.outer.bias.detach().clone())

        def on_step_end(self, args, state, control, model, **kwargs):
            seen.append(model.outer.bias.detach().clone())

    make(make_args, [plc.EMAWeightAveraging(decay=0.5), Weights()], eval_strategy="steps", eval_steps=3).train()
    third, a, b, c = seen[2:6]
    assert torch.equal(a, b) and not torch.equal(a, third) and torch.equal(c, third)  # the validation is over


def test_an_evaluation_that_a_callback_starts_is_one_of_its_own(make_args):
    trace = []

    class EvaluatesMore(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, trainer, **kwargs):
            if "eval_a_loss" in metrics:
                trainer.evaluate(SETS["b"], metric_key_prefix="more")

    make(make_args, [Watch(trace), EvaluatesMore()]).train()
    ends = [entry for entry in trace if isinstance(entry, set)]
    assert len(ends) == trace.count("start") == 2
    assert ends[-1] >= {"eval_a_loss", "eval_b_loss", "eval_c_loss"}


def test_an_error_between_two_sets_leaves_the_trainer_usable(make_args):
    trace = []

    class Fails(TrainerCallback):
        fails = True

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            if self.fails and "eval_b_loss" in metrics:
                raise OSError("the disk is full")

    failing = Fails()
    trainer = make(make_args, [Watch(trace), failing])
    with pytest.raises(OSError, match="the disk is full"):
        trainer.train()
    trace.clear()
    failing.fails = False
    assert "eval_a_loss" in trainer.evaluate(SETS["a"], metric_key_prefix="eval_a")
    assert trace[0] == "start" and isinstance(trace[-1], set)


@pytest.mark.parametrize("within", ["training", "no training"])
def test_what_a_set_costs_does_not_grow_with_the_sets_before_it(make_args, within, monkeypatch):
    """Lightning moves all its metrics each time a trainer ends."""
    noted, note = [], lean_evaluation.note_metrics
    monkeypatch.setattr(
        lean_evaluation, "note_metrics", lambda trainer, metrics: (noted.append(len(metrics)), note(trainer, metrics))
    )
    trainer = make(make_args, [])
    of_all = len(trainer.evaluate())
    if within == "training":
        noted.clear()
        trainer.train()
    assert 0 < sum(noted) < of_all


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_sets_after_the_first_are_evaluated_as_alone_also_after_an_error(make_args, error):
    trainer = make(make_args, None)
    alone = {name: trainer.evaluate(part)["eval_loss"] for name, part in SETS.items()}
    forward, calls = trainer.model.forward, []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:  # in the second set
            raise error
        return forward(*args, **kwargs)

    trainer.model.forward = fail
    with pytest.raises(error):
        trainer.evaluate()
    found = trainer.evaluate()
    assert {name: found[f"eval_{name}_loss"] for name in SETS} == alone
    assert not trainer.model.training and trainer.lightning_trainer.state.finished
