"""What both trainers get wrong without a word is told here, once, with the way out."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil

import lightning.pytorch as pl
import optuna
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from helpers import toy
from helpers.line import Line, points
from hf_compat import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from hf_compat.errors import ArgumentError, CheckpointError, OverrideError
from hf_compat.trainer_methods.near_names import near_name, tell_of_callback_names
from hf_compat.training_run.same_on_ranks import compare_arguments

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
        "miss_rate",
        "hallucination_rate",
        "minDCF",
        "levenshtein",
        "training_cost",
    ],
)
def test_an_error_that_counts_as_better_the_larger_it_is_is_told(make_args, told, name):
    scored(make_args, [0.5, 0.4, 0.3], name)
    assert f"`metric_for_best_model='{name}'` looks like an error" in told() and "greater_is_better=False" in told()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "accuracy",
            "f1",
            "eval_neg_mse",
            "layer_norm",
            "answer",
            "loss",
            "f1_per_class",
            "error_detection_f1",
            "1-wer",
        ),
        *("error_rate_reduction", "levenshtein_similarity", "hamming_score", "inv_rmse", "entropy_bonus"),
    ],
)
def test_other_metrics_and_a_chosen_direction_are_quiet(make_args, told, name):
    if name != "loss":
        scored(make_args, [0.5, 0.4, 0.3], name)
    scored(make_args, [0.5, 0.4, 0.3], "wer", greater_is_better=True)
    scored(make_args, [0.5, 0.4, 0.3], "wer", greater_is_better=False)
    assert "looks like" not in told()


@pytest.mark.parametrize("name", ["neg_log_loss", "negative_loss", "eval_-loss"])
def test_the_opposite_of_a_loss_is_told_where_the_smallest_counts(make_args, told, name):
    assert scored(make_args, [-0.5, -0.1, -0.3], name).state.best_global_step == 1, "as transformers"
    assert "looks like the opposite of a loss" in told() and "set `greater_is_better=True`" in told()
    assert scored(make_args, [-0.5, -0.1, -0.3], name, greater_is_better=True).state.best_global_step == 2
    scored(make_args, [0.5, 0.1, 0.3], "log_loss")
    assert told().count("looks like") == 1


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


def resumed(make_args, scores, name="score", **values):
    """Resume a run of three evaluations, of which the first one is the best, and evaluate once more."""
    folder = make_args().output_dir
    scored(make_args, [0.9, 0.5, 0.4], greater_is_better=True)
    return scored_from(make_args, f"{folder}/checkpoint-3", scores, name, max_steps=4, **values)


def scored_from(make_args, checkpoint, scores, name, **values):
    left = iter(scores)
    args = make_args(**{**BEST, "metric_for_best_model": name, "greater_is_better": True, **values})
    parts = {"train_dataset": points(16), "eval_dataset": points(2)}
    trainer = Trainer(Line(), args, **parts, compute_metrics=lambda p: {name: next(left)})
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("wer", {"greater_is_better": False}, "though no evaluation of the checkpoint has 'eval_wer'"),
        ("score", {"greater_is_better": False}, "though it is the worst one by `greater_is_better=False`"),
    ],
)
def test_a_best_evaluation_by_another_metric_is_told_at_a_resume(make_args, told, name, values, words):
    resumed(make_args, [0.7], name, **values)
    assert f"compared with the checkpoint's best (0.9, update 1), {words}" in told()
    resumed(make_args, [0.7])
    resumed(make_args, [0.95])
    assert told().count("compared with") == 1, "not with the values of before"


def test_a_best_checkpoint_that_a_resume_does_not_find_is_told(make_args, told, tmp_path):
    scored(make_args, [0.9, 0.5, 0.4], greater_is_better=True)
    shutil.copytree(tmp_path / "out" / "checkpoint-3", tmp_path / "other" / "checkpoint-3")
    there = {"output_dir": str(tmp_path / "other"), "max_steps": 4}
    scored_from(make_args, str(tmp_path / "other" / "checkpoint-3"), [0.7], "score", **there)
    assert "update 1) has no checkpoint" in told() and "an output folder that has checkpoint-1, too" in told()
    shutil.copytree(tmp_path / "out" / "checkpoint-1", tmp_path / "other" / "checkpoint-1")
    trainer = scored_from(make_args, str(tmp_path / "other" / "checkpoint-3"), [0.7], "score", **there)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "other" / "checkpoint-1")
    assert told().count("has no checkpoint") == 1


def test_a_delay_of_evaluations_that_outlasts_the_run_is_told(make_args, told):
    def run(**values):
        args = make_args(max_steps=2, eval_strategy="steps", eval_steps=1, num_train_epochs=3.0, **values)
        Trainer(Line(), args, train_dataset=points(16), eval_dataset=points(2)).train()

    run(eval_delay=1)
    assert "has evaluated nothing" not in told()
    run(eval_delay=9)
    assert "has evaluated nothing: it ended after 2 updates, with `eval_delay=9`" in told()


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


class Changing(TrainerCallback):
    """Changes the model after the first update."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step == 1:
            self.change(model, optimizer)


def unfreeze(model, optimizer):
    model.outer.weight.requires_grad_(True)


def unfreeze_and_add(model, optimizer):
    unfreeze(model, optimizer)
    optimizer.add_param_group({"params": [model.outer.weight], "lr": 0.1})


def replace(model, optimizer):
    model.outer = nn.Linear(model.outer.in_features, model.outer.out_features)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreeze, "['outer.weight'] were unfrozen after the optimizer (AdamW) was made"),
        (unfreeze_and_add, None),
        (replace, "holds 2 parameters that the model (Classifier) does not have"),
        (lambda model, optimizer: None, None),
    ],
)
def test_parameters_that_come_after_the_optimizer_are_told(make_args, told, change, words):
    model = toy.Classifier()
    model.outer.weight.requires_grad_(change is replace)
    args = make_args(max_steps=3, num_train_epochs=3.0, lr_scheduler_type="constant")
    trainer = Trainer(model, args, train_dataset=toy.rows(16), callbacks=[Changing(change)])
    before = model.outer.weight.detach().clone()
    trainer.train()
    if words is None:
        assert not told()
        assert torch.equal(before, model.outer.weight) == (change is not unfreeze_and_add)
    else:
        assert words in told() and told().count("Hint") == 1


def test_parameters_that_are_frozen_when_the_training_begins_may_be_unfrozen(make_args, told):
    class Freezing(Changing):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            model.outer.weight.requires_grad_(False)

    model = toy.Classifier()
    before = model.outer.weight.detach().clone()
    args = make_args(max_steps=3, num_train_epochs=3.0)
    Trainer(model, args, train_dataset=toy.rows(16), callbacks=[Freezing(unfreeze)]).train()
    assert not told() and not torch.equal(before, model.outer.weight)


def test_an_optimizer_that_is_returned_and_not_set_is_an_error(make_args):
    class Own(Trainer):
        def create_optimizer(self, model=None):
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    with pytest.raises(OverrideError, match="`create_optimizer` of Own has returned SGD, and has not set"):
        Own(toy.Classifier(), make_args(max_steps=1), train_dataset=toy.rows(8)).train()


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
            control.should_stop_training = control.should_sav = control.should_stop = True

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
    assert (
        "`control.should_stop` was set" in told() and "its flags are should_training_stop, should_epoch_stop" in told()
    )
    others = ("on_batch", "compute_losses", "my_own", "something")  # `call_event` may fire the first one
    assert not any(name in told() for name in others)


HIDDEN = ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics", "data_collator", "model_init")


@pytest.mark.parametrize("name", HIDDEN)
def test_methods_that_an_attribute_hides_are_told(make_args, told, name):
    def method(self, *given, **more):
        raise AssertionError("no Trainer calls it")

    class Passing(Trainer):
        def compute_metrics(self, prediction):
            return {"n": len(prediction.predictions)}

        def __init__(self, *given, **more):
            super().__init__(*given, compute_metrics=self.compute_metrics, **more)

    args = make_args(max_steps=1)
    type("Own", (Trainer,), {name: method})(Line(), args, train_dataset=points(8), eval_dataset=points(4)).train()
    assert f"Own has a method `{name}`, which no Trainer calls" in told() and f"set `trainer.{name}`" in told()
    assert Passing(Line(), args, eval_dataset=points(4)).evaluate()["eval_n"] == 4
    assert told().count("has a method") == 1


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


class Seeing(Line):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, labels=None):
        self.seen += x.tolist()
        return super().forward(x, labels)


def test_a_resume_into_another_order_without_an_optimizer_or_without_updates_is_told(make_args, caplog):
    caplog.handler.setLevel(logging.WARNING)

    def run(resume=None, model=None, **values):
        kept = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "num_train_epochs": 3, **values}
        trainer = Trainer(model or Line(), make_args(**kept), train_dataset=points(16))
        trainer.train(resume_from_checkpoint=resume)
        return f"{trainer.args.output_dir}/checkpoint-"

    first, rest = Seeing(), Seeing()
    checkpoint = run(model=first)
    run(f"{checkpoint}2", rest, seed=7)
    assert not caplog.text and sorted(first.seen[:8] + rest.seen) == [float(i) for i in range(16)]
    rest.seen.clear()
    run(f"{checkpoint}2", rest, data_seed=7)
    assert len(set(first.seen[:8] + rest.seen)) < 16
    assert "The rest of the epoch has another order than its beginning: data_seed: 7" in caplog.text
    run(f"{checkpoint}2", train_sampling_strategy="sequential")
    assert "train_sampling_strategy: sequential (from args) != random" in caplog.text
    run(f"{checkpoint}4")
    assert "Nothing is left to train" in caplog.text
    caplog.clear()
    checkpoint = run(save_only_model=True)
    run(f"{checkpoint}2")
    assert "has no optimizer and schedule, so both start anew" in caplog.text


def test_the_state_of_another_optimizer_is_refused(make_args):
    def run(resume=None, **values):
        args = make_args(save_strategy="steps", save_steps=2, max_steps=4, num_train_epochs=3, **values)
        Trainer(Line(), args, train_dataset=points(16)).train(resume_from_checkpoint=resume)
        return f"{args.output_dir}/checkpoint-2"

    checkpoint = run()
    with pytest.raises(CheckpointError, match="it is of no Adafactor"):
        run(checkpoint, optim="adafactor")
    run(run(optim="adafactor"), optim="adafactor")


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
    monkeypatch.setattr("hf_compat.training_run.same_on_ranks.are_equal", lambda *told: False)
    monkeypatch.setattr("hf_compat.training_run.same_on_ranks.gather_objects", gather)


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


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("e_v_a_l_u_a_t_e", ["evaluate"], "evaluate"),
        ("getTrainDataLoader", ["get_train_dataloader", "train"], "get_train_dataloader"),
        ("evaluate", ["_evaluate", "e_valuate"], "e_valuate"),
        ("evalute", ["evaluate", "predict"], "evaluate"),
        ("evl", ["evaluate"], None),
    ],
)
def test_a_name_that_is_nearly_anothers(name, known, near):
    assert near_name(name, known) == near
