"""Searches with optuna have the same trials, objectives and files as transformers', and the same start of a trial."""

from __future__ import annotations

import os
import weakref

import lightning.pytorch as pl
import optuna
import pytest
import transformers

import hf_compat
from helpers import toy
from helpers.searches import SAVES, files, make_trainer, rate, recorder, samples, search
from hf_compat.errors import (
    ArgumentError,
    MissingSearchBackend,
    OverrideError,
    SearchError,
    UnknownArgument,
)
from hf_compat.trainer_utils import BestRun, HPSearchBackend, default_compute_objective


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def outcome(api, folder, arguments: dict, options: dict) -> list:
    seen: list = []
    trainer = make_trainer(api, folder, callbacks=[recorder(api, seen)], **arguments)
    best = search(trainer, **options)
    args = trainer.args
    after = (args.learning_rate, args.seed, args.per_device_train_batch_size, args.gradient_accumulation_steps)
    left = (trainer.objective, trainer.hp_search_backend, trainer.model is None)
    again = trainer.train()
    return [best, seen, files(folder), after, left, again.training_loss, again.global_step]


CASES = {
    "plain": ({}, {"n_trials": 4}),
    "default_objective": ({}, {"compute_objective": None, "direction": "maximize"}),
    "no_evaluation": ({"eval_strategy": "no"}, {}),
    "evaluation_on_start": ({"eval_on_start": True}, {}),
    "saves_and_rotates": (SAVES | {"save_total_limit": 1, "max_steps": 6}, {}),
    "best_model": (
        SAVES | {"load_best_model_at_end": True, "save_total_limit": 1},
        {"hp_name": lambda t: f"t{t.number}"},
    ),
    "pruned": (
        SAVES | {"load_best_model_at_end": True, "max_steps": 6},
        {"n_trials": 6, "pruner": optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=2)},
    ),
    "several_objectives": (
        {},
        {
            "direction": ["minimize", "maximize"],
            "compute_objective": lambda metrics: [metrics["eval_loss"], metrics["eval_accuracy"]],
        },
    ),
}


SAMPLE = ("default_objective", "no_evaluation", "pruned", "several_objectives")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in SAMPLE else pytest.mark.matrix) for c in CASES])
def test_a_search_equals_that_of_transformers(case, tmp_path):
    arguments, options = CASES[case]
    fresh = lambda: options | ({"sampler": optuna.samplers.NSGAIISampler(seed=5)} if "several" in case else {})  # noqa: E731
    theirs = outcome(transformers, tmp_path / "theirs", arguments, fresh())
    ours = outcome(hf_compat, tmp_path / "ours", arguments, fresh())
    assert ours == theirs
    assert len(ours[1]) >= 3


def test_a_trial_writes_into_a_folder_of_its_own(tmp_path):
    trainer = make_trainer(hf_compat, tmp_path, **SAVES)
    best = search(trainer, n_trials=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0", "run-1"]
    assert sorted(os.listdir(tmp_path / f"run-{best.run_id}")) == ["checkpoint-2", "checkpoint-4"]
    assert isinstance(best, BestRun) and best == transformers.trainer_utils.BestRun(*best)
    assert trainer._get_output_dir(None) == str(tmp_path)


def test_lightning_callbacks_begin_each_trial_as_they_were(tmp_path):
    patience: list = []

    class Stopping(pl.callbacks.EarlyStopping):
        def __init__(self, seen):
            super().__init__(monitor="eval_loss", patience=1, mode="max", check_on_train_epoch_end=False)
            self.seen = seen

        def on_train_start(self, trainer, module):
            patience.append((self.wait_count, float(self.best_score), self.stopped_epoch))
            self.seen.append("start")
            super().on_train_start(trainer, module)

    seen: list = []
    trainer = make_trainer(hf_compat, tmp_path, callbacks=[Stopping(seen)], max_steps=8)
    search(trainer, hp_space=rate)
    assert patience == [(0, float("-inf"), 0)] * 3
    assert seen == ["start"] * 3


def test_a_trial_s_model_is_gone_before_the_next_one_is_made(tmp_path):
    alive: list = []
    made: list = []

    def counting(trial=None):
        alive.append(sum(reference() is not None for reference in made))
        model = toy.Classifier()
        if trial is not None:
            made.append(weakref.ref(model))
        return model

    search(make_trainer(hf_compat, tmp_path, model_init=counting), hp_space=rate)
    assert alive == [0, 0, 0, 0]


def test_errors_end_the_search_or_are_caught(tmp_path):
    def failing(trial=None):
        if trial is not None and trial.number == 0:
            raise FileNotFoundError("no weights")
        return toy.Classifier()

    trainer = make_trainer(hf_compat, tmp_path, model_init=failing)
    with pytest.raises(FileNotFoundError, match="no weights"):
        search(trainer)
    assert trainer.hp_search_backend is None
    assert search(trainer, catch=(OSError,)).run_id in "12"
    with pytest.raises(SearchError, match="No trial of the search was completed: 1 fail"):
        search(trainer, catch=OSError, n_trials=1)


def test_a_study_in_a_file_goes_on(tmp_path):
    stored = {"storage": f"sqlite:///{tmp_path}/study.db", "study_name": "one", "load_if_exists": True}
    trainer = make_trainer(hf_compat, tmp_path / "out", **SAVES)
    first = search(trainer, n_trials=1, hp_space=rate, **stored)
    second = search(trainer, n_trials=2, hp_space=rate, **stored)
    assert sorted(os.listdir(tmp_path / "out")) == ["run-0", "run-1", "run-2"]
    assert second.objective <= first.objective


REFUSED = {
    "no_trials": ({"n_trials": -1}, ArgumentError, "n_trials=-1"),
    "direction": ({"direction": "min"}, ArgumentError, "direction='min'"),
    "directions": ({"direction": []}, ArgumentError, "direction="),
    "space": ({"hp_space": {"learning_rate": 1}}, ArgumentError, "hp_space"),
    "empty_space": ({"hp_space": lambda trial: None}, OverrideError, "hp_space=None"),
    "wrong_value": ({"hp_space": lambda trial: {"learning_rate": "fast"}}, ArgumentError, "learning_rate='fast'"),
    "read_only": ({"hp_space": lambda trial: {"world_size": 2}}, ArgumentError, "world_size=2"),
    "wrong_optimizer": ({"hp_space": lambda trial: {"optim_args": "speed=1"}}, ArgumentError, "optim_args"),
    "objective": ({"compute_objective": lambda metrics: None}, OverrideError, "compute_objective=None.*eval_loss"),
    "threads": ({"n_jobs": 2}, ArgumentError, "n_jobs=2"),
    "option": ({"sampling": 1}, UnknownArgument, "did you mean `sampler`"),
    "name": ({"hp_name": lambda trial: 3}, ArgumentError, "hp_name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_search_can_follow_is_refused_by_name(case, tmp_path):
    options, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        search(make_trainer(hf_compat, tmp_path, **SAVES), **options)


def test_backends_that_are_not_there(tmp_path, monkeypatch):
    trainer = make_trainer(hf_compat, tmp_path)
    with pytest.raises(ValueError, match="'sigopt' is not a valid HPSearchBackend"):
        trainer.hyperparameter_search(backend="sigopt")
    monkeypatch.setattr("hf_compat.search.trials.is_installed", lambda module: False)
    with pytest.raises(MissingSearchBackend, match="pip install 'optuna>="):
        trainer.hyperparameter_search(backend=transformers.trainer_utils.HPSearchBackend.OPTUNA)
    with pytest.raises(RuntimeError, match=r"pip install 'ray\[tune\]'"):
        trainer.hyperparameter_search()
    monkeypatch.setattr("hf_compat.search.trials.is_installed", lambda module: module != "transformers")
    for backend in ("ray", "wandb"):  # their searches are transformers' own
        with pytest.raises(MissingSearchBackend, match="pip install 'transformers>="):
            trainer.hyperparameter_search(backend=backend)


def test_a_search_needs_model_init(tmp_path):
    args = hf_compat.TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = hf_compat.Trainer(toy.Classifier(), args, train_dataset=samples())
    with pytest.raises(RuntimeError, match="model_init"):
        trainer.hyperparameter_search()
    assert trainer.hp_search_backend is None


def test_a_name_that_is_no_argument_is_named_and_left_to_the_model(tmp_path, caplog):
    sizes: list = []

    def sized(trial=None):
        sizes.append(None if trial is None else trial.suggest_int("layers", 1, 3))
        return toy.Classifier()

    trainer = make_trainer(hf_compat, tmp_path, model_init=sized)
    search(trainer, n_trials=1, hp_space=lambda t: {"layers": t.suggest_int("layers", 1, 3), "learning_rat": 1e-3})
    assert sizes[1] in (1, 2, 3)
    assert "layers=" in caplog.text and "did you mean `learning_rate`" in caplog.text


def test_overrides_are_called_as_upstream_calls_them(tmp_path):
    def calls_of(api, folder) -> list:
        calls: list = []

        class Own(api.Trainer):
            def _hp_search_setup(self, trial):
                calls.append(("setup", getattr(trial, "number", None), self.model is not None))
                super()._hp_search_setup(trial)

            def _report_to_hp_search(self, trial, step, metrics):
                calls.append(("report", trial.number, step, sorted(metrics)))
                super()._report_to_hp_search(trial, step, metrics)

            def _get_output_dir(self, trial):
                calls.append(("folder", trial.number))
                return super()._get_output_dir(trial)

            def call_model_init(self, trial=None):
                calls.append(("model", getattr(trial, "number", None)))
                return super().call_model_init(trial)

            def create_accelerator_and_postprocess(self):
                calls.append("accelerator")
                super().create_accelerator_and_postprocess()

        trainer = make_trainer(api, folder, trainer=Own, **SAVES)
        calls.clear()
        search(trainer, n_trials=2)
        return calls

    assert calls_of(hf_compat, tmp_path / "ours") == calls_of(transformers, tmp_path / "theirs")


def test_the_default_objective():
    loss_alone = {"eval_loss": 0.5, "epoch": 1.0, "eval_runtime": 3.0, "eval_steps_per_second": 2.0}
    for metrics in (loss_alone, loss_alone | {"eval_accuracy": 0.25, "eval_f1": 0.5}, {"eval_runtime": 1.0}):
        theirs = transformers.trainer_utils.default_compute_objective(dict(metrics))
        assert default_compute_objective(metrics) == theirs
    assert default_compute_objective(loss_alone | {"eval_model_preparation_time": 9.0}) == 0.5
    assert HPSearchBackend("optuna") == transformers.trainer_utils.HPSearchBackend.OPTUNA
