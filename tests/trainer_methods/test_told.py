"""What both trainers get wrong without a word is told here, once, with the way out."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re

import lightning.pytorch as pl
import numpy as np
import optuna
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from helpers import toy
from helpers.line import Line, points
from hf_compat import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from hf_compat.engine.loss_count import Count
from hf_compat.errors import ArgumentError
from hf_compat.trainer_methods.near_names import tell_of_callback_names
from hf_compat.training_run.run import compare_arguments

# The loss ------------------------------------------------------------------------------------------------------------


class Dropping(Line):
    """Takes keywords, and drops them."""

    def forward(self, x, labels=None, **kwargs):
        return super().forward(x, labels)


class Wrapping(Line):
    """Hands keywords to a part that drops them."""

    def __init__(self):
        super().__init__()
        self.inner = Dropping()

    def forward(self, x, labels=None, **kwargs):
        return self.inner(x, labels, **kwargs)


class Dividing(Line):
    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        out = super().forward(x, labels)
        if num_items_in_batch is not None:
            out["loss"] = out["loss"] * len(x) / num_items_in_batch
        return out


class DividingByNumber(Dividing):
    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        items = num_items_in_batch if num_items_in_batch is None else num_items_in_batch.item()
        return super().forward(x, labels, items)


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(x=inputs["x"], labels=inputs["labels"])
        return (out["loss"], out) if return_outputs else out["loss"]


def squared(outputs, labels, num_items_in_batch=None):
    return ((outputs["logits"] - labels) ** 2).mean()


def accumulated(make_args, model, kind=Trainer, steps=4, after=lambda trainer: None, **parts):
    values = {"max_steps": 1, "gradient_accumulation_steps": steps, "per_device_train_batch_size": 1}
    args = make_args(**values, logging_steps=1, max_grad_norm=1e6, num_train_epochs=3.0)
    trainer = kind(model, args, train_dataset=points(4), **parts)
    after(trainer)
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def in_class(trainer):
    type(trainer.model).accepts_loss_kwargs = False
    trainer._introspect()


def in_trainer(trainer):
    trainer.loss_is_scaled_for_ga = False


@pytest.mark.parametrize(
    ("model", "kind", "parts", "who", "way_out"),
    [
        (Dropping, Trainer, {}, "`forward` of Dropping", in_class),
        (Wrapping, Trainer, {}, "`forward` of Wrapping", in_class),
        (Dividing, OwnLoss, {}, "`compute_loss` of OwnLoss", in_trainer),
        (Line, Trainer, {"compute_loss_func": squared}, "`compute_loss_func` ignores", in_trainer),
    ],
)
def test_a_loss_that_ignores_its_count_is_told_with_the_factor(make_args, told, model, kind, parts, who, way_out):
    class Fresh(model):
        pass

    Fresh.__name__ = model.__name__
    assert accumulated(make_args, Fresh(), kind, **parts) == pytest.approx(14.0), "as transformers"
    assert f"{who}" in told() and "are 4 times too large" in told()
    assert accumulated(make_args, Fresh(), kind, after=way_out, **parts) == pytest.approx(3.5), "by the way out"
    assert told().count("too large") == 1


@pytest.mark.parametrize("model", [Line, Dividing, DividingByNumber])
def test_a_loss_that_is_divided_is_not_told(make_args, told, model):
    assert accumulated(make_args, model()) == pytest.approx(3.5)
    accumulated(make_args, Dropping(), steps=1)
    assert "too large" not in told()


USES_OF_A_COUNT = (
    *(float, int, torch.Tensor.item, torch.Tensor.numpy, np.asarray, copy.deepcopy, math.log),
    lambda n: 8 / n,
    lambda n: torch.ones(2) / n.to("cpu"),
    lambda n: torch.ones(()).div(n.clone()),
    lambda n: n.long().item(),
    lambda n: torch.stack([n]),
    lambda n: pickle.loads(pickle.dumps(n)),
)


def test_a_count_under_watch_behaves_as_a_tensor():
    items = torch.tensor(4.0)
    count = Count.of(items)
    assert count.dtype == items.dtype and count.shape == items.shape and f"{count:.1f}" == "4.0" and count.is_cpu
    assert count and count > 3 and not count.uses
    for use in USES_OF_A_COUNT:
        count = Count.of(items)
        found, right = use(count), use(items)
        assert count.uses, use
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(right)), use
        assert not isinstance(right / 1, Count)
    count /= 2
    assert items == 2.0, "code may change it in place"


@pytest.mark.parametrize("kind", [Trainer, OwnLoss])
def test_finding_out_calls_nothing_twice(make_args, told, kind):
    calls = []

    class Counting(kind):
        def compute_loss(self, *given, **more):
            calls.append("loss")
            return super().compute_loss(*given, **more)

    model = Dropping()
    model.register_forward_hook(lambda *given: calls.append("forward"))
    accumulated(make_args, model, Counting)
    assert calls == ["forward", "loss"] * 4 or calls == ["loss", "forward"] * 4
    assert told().count("too large") == 1


def test_preflight_tells_of_an_ignored_count(make_args):
    args = make_args(gradient_accumulation_steps=2, per_device_train_batch_size=2)
    report = Trainer(Dropping(), args, train_dataset=points(8)).preflight()
    assert any("2 times too large" in one.problem for one in report.warnings), report


# The best ------------------------------------------------------------------------------------------------------------

BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
BEST |= {"num_train_epochs": 3.0, "load_best_model_at_end": True}


def scored(make_args, scores, name="score", **values):
    left = iter(scores)
    args = make_args(**{**BEST, "metric_for_best_model": name, **values})
    parts = {"train_dataset": points(16), "eval_dataset": points(2)}
    trainer = Trainer(Line(), args, **parts, compute_metrics=lambda p: {name: next(left)})
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "name",
    [
        "wer",
        "eval_cer",
        "val_MSE",
        "perplexity",
        "MeanSquaredError",
        "errorrate",
        "loss_of_a",
        "eval_a_per",
        "bits_per_byte",
    ],
)
def test_an_error_that_counts_as_better_the_larger_it_is_is_told(make_args, told, name):
    scored(make_args, [0.5, 0.4, 0.3], name)
    assert f"`metric_for_best_model='{name}'` looks like an error" in told() and "greater_is_better=False" in told()


@pytest.mark.parametrize(
    "name",
    ["accuracy", "f1", "eval_neg_mse", "layer_norm", "answer", "loss", "f1_per_class", "error_detection_f1", "1-wer"],
)
def test_other_metrics_and_a_chosen_direction_are_quiet(make_args, told, name):
    if name != "loss":
        scored(make_args, [0.5, 0.4, 0.3], name)
    scored(make_args, [0.5, 0.4, 0.3], "wer", greater_is_better=True)
    scored(make_args, [0.5, 0.4, 0.3], "wer", greater_is_better=False)
    assert "looks like" not in told()


def test_a_direction_of_replaced_arguments_is_told(make_args, told):
    args = dataclasses.replace(make_args(**BEST, metric_for_best_model="wer"), seed=7)
    metrics = {"compute_metrics": lambda p: {"wer": 0.1}}
    Trainer(Line(), args, train_dataset=points(8), eval_dataset=points(2), **metrics).train()
    assert "looks like" in told()


def test_a_direction_set_later_is_chosen_as_well(make_args, told):
    args = make_args(**BEST, metric_for_best_model="wer")
    args.greater_is_better = True
    Trainer(
        Line(), args, train_dataset=points(8), eval_dataset=points(2), compute_metrics=lambda p: {"wer": 0.1}
    ).train()
    assert "looks like" not in told()


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([0.9, 0.5, 0.6, 0.3], "(eval_score=0.9, update 2) has no checkpoint: the weights of the last update stay"),
        ([0.5, 0.6, 0.9, 0.3], "(eval_score=0.9, update 6) has no checkpoint: "),
        ([float("nan")] * 4, "The best evaluation is not known, as none gave a number 'eval_score'"),
    ],
)
def test_a_best_evaluation_that_was_not_saved_is_told(make_args, told, scores, words):
    values = {"max_steps": 8, "eval_steps": 2, "save_steps": 4, "greater_is_better": True}
    trainer = scored(make_args, scores, **values)
    assert words in told(), told()
    loaded = trainer.state.best_model_checkpoint
    assert loaded is None or f"{loaded} is loaded, the best that was saved" in told()


def test_evaluations_that_begin_too_late_are_told(make_args, told):
    scored(make_args, [], eval_delay=9, greater_is_better=True)
    assert "The best evaluation is not known, as none was made: the weights of the last update stay" in told()


@pytest.mark.parametrize(
    ("name", "scores", "best", "values"),
    [
        ("wer", [0.5, 0.1, 0.3], 2, {"greater_is_better": False}),
        ("score", [0.9, 0.5, 0.6, 0.3], 2, {"eval_steps": 2, "save_steps": 2, "max_steps": 8}),
        ("score", [0.9, 0.5, 0.6], 1, {"save_strategy": "best"}),
        ("score", [0.5, 0.6, 0.4], 2, {"eval_delay": 0}),
    ],
)
def test_the_ways_out_load_the_best(make_args, told, name, scores, best, values):
    trainer = scored(make_args, scores, name, **values)
    folder = f"{trainer.args.output_dir}/checkpoint-{best}"
    assert trainer.state.best_model_checkpoint == folder
    assert trainer.model.w.item() == load_file(f"{folder}/model.safetensors")["w"].item()
    assert "est evaluation" not in told() and "looks like" not in told()


def test_a_best_evaluation_that_was_saved_is_quiet(make_args, told):
    scored(make_args, [0.5, 0.9, 0.3], greater_is_better=True)
    scored(make_args, [0.5, 0.9, 0.3], greater_is_better=True, save_strategy="best")
    assert "best evaluation" not in told()


# The update, names, a resume, ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["passed", "overridden"])
def test_an_optimizer_over_another_model_is_refused(make_args, way):
    other = toy.Classifier()

    class Own(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            return self.optimizer

    args = make_args(max_steps=1)
    passed = (torch.optim.SGD(other.parameters(), lr=0.1), None) if way == "passed" else (None, None)
    trainer = (Trainer if way == "passed" else Own)(
        toy.Classifier(), args, train_dataset=toy.rows(8), optimizers=passed
    )
    told = "holds 6 parameters, and none of the 6 that the model"
    assert any(told in one.problem for one in trainer.preflight().errors)
    with pytest.raises(ArgumentError, match=told):
        trainer.train()


@pytest.mark.parametrize("passes_optimizer", [True, False])
def test_a_schedule_of_another_optimizer_is_told(make_args, told, passes_optimizer):
    model = toy.Classifier()
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda update: 0.5)
    given = (mine if passes_optimizer else None, schedule)
    trainer = Trainer(model, make_args(max_steps=1), train_dataset=toy.rows(8), optimizers=given)
    trainer.train()
    assert "The schedule (LambdaLR) is one of another optimizer (SGD)" in told()
    right = torch.optim.lr_scheduler.LambdaLR(mine, lambda update: 0.5)
    Trainer(model, make_args(max_steps=1), train_dataset=toy.rows(8), optimizers=(mine, right)).train()
    assert told().count("is one of another optimizer") == 1


def test_an_optimizer_made_before_a_layer_was_replaced_is_told(make_args, told):
    model, extra = toy.Classifier(), nn.Parameter(torch.zeros(2))  # as a loss may have parameters

    def train(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        Trainer(model, make_args(max_steps=1), train_dataset=toy.rows(8), optimizers=(optimizer, None)).train()

    train([*model.parameters(), extra])
    train([model.outer.weight])
    assert "does not have" not in told()
    before = list(model.parameters())
    model.outer = nn.Linear(model.outer.in_features, model.outer.out_features)
    train(before)
    assert "holds 2 parameters that the model (Classifier) does not have, and does not train ['outer.weight'" in told()
    train(model.parameters())
    assert told().count("does not have") == 1


def test_an_optimizer_without_parameters_is_refused(make_args):
    optimizer = torch.optim.SGD([{"params": []}], lr=0.1)
    trainer = Trainer(Line(), make_args(max_steps=1), train_dataset=points(8), optimizers=(optimizer, None))
    with pytest.raises(ArgumentError, match="holds 0 parameters"):
        trainer.train()


def test_an_optimizer_over_frozen_parameters_alone_is_refused(make_args):
    model = toy.Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    model.adapter = nn.Linear(3, 3)  # as wrapping a model for PEFT does
    model.register_forward_hook(lambda module, given, out: {**out, "loss": out["loss"] + module.adapter.weight.sum()})
    trainer = Trainer(model, make_args(max_steps=1), train_dataset=toy.rows(8), optimizers=(optimizer, None))
    with pytest.raises(ArgumentError, match="none of the 2 that the model"):
        trainer.train()


def test_an_optimizer_kept_for_another_model_is_refused(make_args):
    trainer = Trainer(toy.Classifier(), make_args(max_steps=1), train_dataset=toy.rows(8))
    trainer.train()
    trainer.train()
    trainer.model = trainer.model_wrapped = toy.Classifier()
    with pytest.raises(ArgumentError, match="so nothing is trained"):
        trainer.train()


def test_near_names_of_overrides_and_attributes_are_told(make_args, told):
    class Misspelt(Trainer):
        def computeloss(self, model, inputs):
            pass

        def get_train_dataloaders(self):
            pass

        def trainingstep(self):
            pass

        def compute_losses(self, model):  # its own code calls it
            pass

        def evaluate(self, *given, **kwargs):
            self.compute_losses(None)
            return super().evaluate(*given, **kwargs)

    class Counter(TrainerCallback):
        def on_step_ends(self, args, state, control, **kwargs):
            pass

        def on_batch(self, args, state, control, **kwargs):
            pass

        def on_train_begin(self, args, state, control, **kwargs):
            control.should_stop_training = control.should_sav = True

    args = make_args(max_steps=1)
    args.learning_rte = 3
    args.my_own_setting = 3
    trainer = Misspelt(toy.Classifier(), args, train_dataset=toy.rows(8), callbacks=[Counter()])
    trainer.compute_metric = trainer.something_else = print
    trainer.train()
    found = re.findall(r"`([\w.]+)(?:=3)?`[^`]*?\n\nHint: did you mean `(\w+)`", told())
    assert dict(found) == {
        "args.learning_rte": "learning_rate",
        "computeloss": "compute_loss",
        "get_train_dataloaders": "get_train_dataloader",
        "trainingstep": "training_step",
        "on_step_ends": "on_step_end",
        "trainer.compute_metric": "compute_metrics",
        "control.should_sav": "should_save",
    }
    others = ("on_batch", "compute_losses", "my_own", "something")  # `call_event` may fire the first one
    assert not any(name in told() for name in others)


def test_names_of_the_other_kind_of_callbacks_are_told(told):
    def made(base, *names):
        return type("Own", base, {name: lambda *args, **kwargs: None for name in names})()

    tell_of_callback_names([made((TrainerCallback, pl.Callback), "on_train_begin", "on_train_start")])
    tell_of_callback_names([made((TrainerCallback,), "on_custom", "setup")])
    assert not told()
    tell_of_callback_names([made((TrainerCallback,), "on_train_start"), made((pl.Callback,), "on_train_begin")])
    assert "`on_train_start` is of `lightning.pytorch.Callback`" in told()
    assert "`on_train_begin` is of `transformers.TrainerCallback`" in told()
    tell_of_callback_names([made((TrainerCallback,), "on_evaluation"), made((pl.Callback,), "on_train_epoch_ends")])
    assert "did you mean `on_evaluate`" in told() and "did you mean `on_train_epoch_end`" in told()


def test_states_of_callbacks_that_begin_anew_are_told_at_the_resume(make_args, told):
    def run(resume, **more):
        left = iter([0.9, 0.8, 0.7, 0.6])
        values = {**BEST, "greater_is_better": True, "metric_for_best_model": "score", **more}
        trainer = Trainer(
            Line(),
            make_args(**values),
            train_dataset=points(16),
            eval_dataset=points(2),
            compute_metrics=lambda p: {"score": next(left)},
            callbacks=[EarlyStoppingCallback(9)],
        )
        trainer.train(resume_from_checkpoint=resume)
        return f"{trainer.args.output_dir}/checkpoint-3"

    checkpoint = run(None)
    assert "begin" not in told() and "restore the states" not in told()
    run(checkpoint, max_steps=4, restore_callback_states_from_checkpoint=True)
    assert "restore the states" not in told()
    run(checkpoint, max_steps=4)
    assert "EarlyStoppingCallback.early_stopping_patience_counter is 0 (it was 2)" in told()
    assert "`restore_callback_states_from_checkpoint=True`" in told()


def test_options_that_a_resume_takes_from_the_checkpoint_are_told(make_args, told):
    def run(resume=None, **values):
        args = make_args(save_strategy="steps", save_steps=2, max_steps=4, num_train_epochs=3, **values)
        Trainer(Line(), args, train_dataset=points(16)).train(resume_from_checkpoint=resume)
        return f"{args.output_dir}/checkpoint-2"

    checkpoint = run()
    run(checkpoint)
    assert not told()
    run(checkpoint, learning_rate=0.5, weight_decay=0.3, adam_beta1=0.2)
    assert "initial_lr is 0.01 (now set to 0.5), weight_decay is 0.0 (now set to 0.3), betas is" in told()
    assert "for another value of learning_rate, weight_decay, adam_beta1, adam_beta2" in told()


@pytest.mark.parametrize(
    ("metric", "direction", "right"),
    [("accuracy", "minimize", "maximize"), ("wer", "maximize", "minimize"), (None, "maximize", "minimize")],
)
def test_a_search_away_from_what_its_metric_says_is_told(make_args, told, metric, direction, right):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    metrics = {} if metric is None else {"compute_metrics": lambda p: {metric: 0.5}}
    args = make_args(max_steps=1, num_train_epochs=3, eval_strategy="steps", eval_steps=1)

    def search(**values):
        trainer = Trainer(None, args, train_dataset=points(8), eval_dataset=points(2), model_init=Line, **metrics)
        space = {"hp_space": lambda trial: {"seed": trial.suggest_int("seed", 1, 2)}}
        trainer.hyperparameter_search(n_trials=1, backend="optuna", **space, **values)

    search(direction=right)
    search(direction=direction, compute_objective=lambda found: found["eval_loss"])
    assert not told()
    search(direction=direction)
    assert f"eval_{metric or 'loss'} look like" in told() and f"pass `direction='{right}'`" in told()


def as_of_two_ranks(monkeypatch, gather):
    """Let this process be the first of two, whose texts are gathered by a function."""
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    monkeypatch.setattr("hf_compat.training_run.run.are_equal", lambda text, numbers: False)
    monkeypatch.setattr("hf_compat.training_run.run.gather_objects", gather)


@pytest.mark.parametrize(
    "values",
    [{"seed": 1}, {"data_seed": 1}, {"remove_unused_columns": False}, {"async_save": True}, {"full_determinism": True}],
)
def test_arguments_that_differ_between_ranks_are_refused(make_args, monkeypatch, values):
    def with_another_rank(mine):
        return [mine, {**mine, **{name: repr(value) for name, value in values.items()}}]

    as_of_two_ranks(monkeypatch, with_another_rank)
    (name,) = values
    with pytest.raises(ArgumentError, match=f"different arguments.*\n  `{name}` is .* on rank 0"):
        compare_arguments(make_args(), None)


def test_what_each_rank_may_choose_is_not_compared(make_args, monkeypatch):
    compared = []
    as_of_two_ranks(monkeypatch, lambda mine: compared.append(mine) or [mine])
    compare_arguments(make_args(), None)
    assert not {"output_dir", "report_to", "run_name", "local_rank", "disable_tqdm", "log_level"} & compared[0].keys()
