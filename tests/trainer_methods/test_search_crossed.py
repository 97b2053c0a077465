"""Searches combined with early stopping, several sets, async saves, trackers, the command line and the docs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import optuna
import pytest
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hf_compat
from helpers import toy
from helpers.searches import (
    SAVES,
    files,
    loss,
    make_model,
    make_trainer,
    name_of,
    rate,
    recorder,
    samples,
    search,
    space,
)
from hf_compat.errors import SearchError
from hf_compat.plan.deepspeed import deepspeed_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def test_early_stopping_and_a_second_search_equal_transformers(tmp_path):
    def outcome(api, folder) -> list:
        seen: list = []
        callbacks = [api.EarlyStoppingCallback(1), recorder(api, seen)]
        arguments = SAVES | {"load_best_model_at_end": True, "max_steps": 8, "metric_for_best_model": "accuracy"}
        trainer = make_trainer(api, folder, callbacks=callbacks, **arguments)
        bests = [search(trainer, n_trials=2, hp_name=name_of), search(trainer, n_trials=2, hp_space=rate)]
        return [bests, seen, files(folder)]

    ours, theirs = outcome(hf_compat, tmp_path / "ours"), outcome(transformers, tmp_path / "theirs")
    assert ours == theirs
    assert len(ours[1]) == 4


def test_several_evaluation_sets_in_seq2seq_equal_transformers(tmp_path):
    def outcome(api, folder) -> tuple:
        sets = {"one": samples(16), "two": samples(24)[16:]}
        args = api.Seq2SeqTrainingArguments(
            str(folder), max_steps=4, eval_strategy="steps", eval_steps=2, report_to="none", use_cpu=True,
            disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = api.Seq2SeqTrainer(args=args, model_init=make_model, train_dataset=samples(), eval_dataset=sets)
        return tuple(search(trainer, compute_objective=None)), trainer.objective

    ours, theirs = outcome(hf_compat, tmp_path / "ours"), outcome(transformers, tmp_path / "theirs")
    assert ours == theirs
    assert ours[1] > 0


def test_saves_in_the_background_stand_in_their_trial_s_folder(tmp_path):
    pruner = optuna.pruners.ThresholdPruner(upper=0.0, n_warmup_steps=4)
    trainer = make_trainer(hf_compat, tmp_path, **SAVES | {"async_save": True, "max_steps": 6})
    with pytest.raises(SearchError, match="2 pruned"):
        search(trainer, n_trials=2, pruner=pruner)
    folders = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    assert folders == ["run-0/checkpoint-2", "run-1/checkpoint-2"]


def test_what_an_error_left_is_not_the_next_trial_s_beginning(tmp_path):
    class Failing(hf_compat.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and state.trial_name == "t0":
                raise OSError("gone")

    steps: list = []

    class Steps(hf_compat.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    left = pl.callbacks.OnExceptionCheckpoint(str(tmp_path / "left"))
    trainer = make_trainer(hf_compat, tmp_path / "out", callbacks=[Failing(), Steps(), left])
    search(trainer, hp_space=rate, hp_name=name_of, catch=OSError)
    assert steps == [0, 0, 0]


def test_ctrl_c_ends_the_search_and_the_trainer_goes_on(tmp_path):
    class Impatient(hf_compat.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.trial_name == "t1" and state.global_step == 2:
                raise KeyboardInterrupt

    trainer = make_trainer(hf_compat, tmp_path, callbacks=[Impatient()], **SAVES)
    with pytest.raises(KeyboardInterrupt):
        search(trainer, hp_name=name_of)
    assert trainer.hp_search_backend is None and trainer.model is not None
    assert trainer.train().global_step == 4
    assert trainer.state.trial_name is None and not trainer.state.is_hyper_param_search
    assert "checkpoint-4" in os.listdir(tmp_path)


def test_after_a_search_an_evaluation_says_what_is_missing(tmp_path):
    trainer = make_trainer(hf_compat, tmp_path)
    search(trainer, n_trials=1)
    with pytest.raises(SearchError, match="call `train\\(\\)`, then evaluate"):
        trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("chosen", [pytest.param(None, marks=pytest.mark.matrix), "boards"])
def test_each_trial_has_a_run_of_tensorboard(chosen, tmp_path, monkeypatch):
    if chosen is not None:
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / chosen))
    trainer = make_trainer(hf_compat, tmp_path, callbacks=[hf_compat.callbacks.trackers.TensorBoardCallback()])
    best = search(trainer, n_trials=2, hp_name=name_of)
    runs = {path.parent.name: path.parent for path in tmp_path.rglob("events.out.*")}
    assert sorted(runs) == ["t0", "t1"]
    board = EventAccumulator(str(runs[f"t{best.run_id}"])).Reload()
    assert board.Scalars("eval/loss")[-1].value == pytest.approx(best.objective)


def test_a_search_goes_on_from_a_checkpoint_inside_a_trial(tmp_path):
    class Resuming(hf_compat.Trainer):
        def train(self, resume_from_checkpoint=None, trial=None, **kwargs):
            if trial is not None and trial.number == 1:
                resume_from_checkpoint = str(tmp_path / "run-0" / "checkpoint-2")
            return super().train(resume_from_checkpoint, trial, **kwargs)

    seen: list = []
    own = {"trainer": Resuming, "callbacks": [recorder(hf_compat, seen)], "model_init": lambda: toy.Classifier()}
    trainer = make_trainer(hf_compat, tmp_path, **own, **SAVES)
    search(trainer, hp_space=lambda trial: {"learning_rate": 1e-3}, n_trials=2)
    assert [log["loss"] for log in seen[1][3] if "loss" in log] == [log["loss"] for log in seen[0][3] if "loss" in log]
    assert os.listdir(tmp_path / "run-1") == ["checkpoint-4"]


def run(*words: str, folder: Path) -> str:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_page_s_example_runs(tmp_path):
    text = (ROOT / "docs" / "search.md").read_text()
    (tmp_path / "example.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1))
    assert "'learning_rate':" in run("example.py", folder=tmp_path)


SCRIPT = """
import optuna
from helpers import toy
from transformers import Trainer, TrainingArguments

args = TrainingArguments("out", max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, save_steps=2)
rows = toy.rows(16)
trainer = Trainer(args=args, model_init=lambda: toy.Classifier(), train_dataset=rows, eval_dataset=rows[:8])
best = trainer.hyperparameter_search(
    lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)},
    n_trials=2, direction="minimize", backend="optuna", sampler=optuna.samplers.TPESampler(seed=1),
)
print("BEST", best.run_id, best.objective, best.hyperparameters)
"""


@pytest.mark.matrix
def test_a_script_that_searches_runs_with_the_command(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    best = [
        re.search("BEST.*", run(*words, "script.py", folder=tmp_path)).group()
        for words in ([], ["-m", "hf_compat.cli.main", "run"])
    ]
    assert best[0] == best[1]
    assert (tmp_path / "out" / "run-1" / "checkpoint-2" / "manifest.json").exists()


def test_a_space_of_deepspeed_arguments_follows_the_trial(tmp_path):
    seen: list = []

    class Own(hf_compat.Trainer):
        def _inner_training_loop(self, *args, **kwargs):
            seen.append(deepspeed_config(self.args, {}))
            raise optuna.TrialPruned

    options = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    trainer = make_trainer(hf_compat, tmp_path, trainer=Own, deepspeed=options)
    with pytest.raises(SearchError, match="2 pruned"):
        search(trainer, n_trials=2, hp_space=space, compute_objective=loss)
    sizes = [config["train_micro_batch_size_per_gpu"] for config in seen]
    assert len(sizes) == 2 and sizes[-1] == trainer.args.per_device_train_batch_size
    assert seen[-1]["gradient_accumulation_steps"] == trainer.args.gradient_accumulation_steps
