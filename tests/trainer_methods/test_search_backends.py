"""Searches with stand-ins for ray and wandb propose the same trials under transformers and under hf_compat."""

from __future__ import annotations

import functools
import pickle
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import transformers
import wandb.sdk.lib.config_util  # transformers' callback imports it, so it stays the real one

import hf_compat
from helpers import toy
from hf_compat.errors import ArgumentError, UnknownArgument

RATES = (1e-4, 3e-2, 1e-2)


def make_model():
    return toy.Classifier()


def loss(metrics) -> float:
    return metrics["eval_loss"]


def make_trainer(api, folder, **arguments):
    chosen = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2} | arguments
    args = api.TrainingArguments(
        str(folder), max_steps=4, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, **chosen
    )
    data = toy.rows(24)
    return api.Trainer(args=args, model_init=make_model, train_dataset=data, eval_dataset=data[:8])


class Ray(types.ModuleType):
    """`ray.tune` in this process: each sample of the space is a trial, and reports are recorded."""

    def __init__(self):
        super().__init__("ray.tune")
        self.__spec__ = ModuleSpec("ray.tune", None)
        self.reports: list = []
        self.schedulers = types.ModuleType("ray.tune.schedulers")
        for name in ("ASHAScheduler", "HyperBandForBOHB", "MedianStoppingRule", "PopulationBasedTraining"):
            setattr(self.schedulers, name, type(name, (), {}))

    class Checkpoint:
        def __init__(self, files):
            self.files = files

        @classmethod
        def from_directory(cls, folder):
            return cls(sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()))

    class CLIReporter:
        def __init__(self, metric_columns):
            self.columns = metric_columns

    def with_parameters(self, function, **parameters):
        return functools.wraps(function)(functools.partial(function, **parameters))

    def get_checkpoint(self):
        return None

    def get_context(self):
        return types.SimpleNamespace(get_trial_id=lambda: f"id{self.trial}")

    def report(self, metrics, checkpoint=None):
        self.reports.append((self.trial, metrics, checkpoint and checkpoint.files))

    def run(self, trainable, config, num_samples, **options):
        self.options = options
        for self.trial in range(num_samples):
            trainable({name: values[self.trial] for name, values in config.items()})
        return self

    def get_best_trial(self, metric, mode, scope):
        assert (mode, scope) == ("min", "last")
        last = {trial: metrics for trial, metrics, _ in self.reports}
        best = min(last, key=lambda trial: last[trial][metric])
        return types.SimpleNamespace(trial_id=f"id{best}", last_result=last[best], config={"chosen": best})


@pytest.fixture
def ray(monkeypatch):
    tune = Ray()
    package = types.ModuleType("ray")
    package.__spec__, package.tune, package.__path__ = ModuleSpec("ray", None, is_package=True), tune, []
    for name, module in (("ray", package), ("ray.tune", tune), ("ray.tune.schedulers", tune.schedulers)):
        monkeypatch.setitem(sys.modules, name, module)
    return tune


def ray_space(trial) -> dict:
    return {"learning_rate": RATES, "seed": (3.7, 5.2, 8.0)}  # ray draws whole numbers as others, too


@pytest.mark.parametrize("evaluates", ["steps", "no"])
def test_ray_is_told_what_transformers_tells_it(ray, evaluates, tmp_path):
    def outcome(api, folder):
        ray.reports.clear()
        trainer = make_trainer(api, folder, eval_strategy=evaluates)
        best = trainer.hyperparameter_search(ray_space, loss, 3, "minimize", "ray")
        told = [
            (trial, {k: v for k, v in metrics.items() if not k.endswith(("_runtime", "_per_second"))}, saved)
            for trial, metrics, saved in ray.reports
        ]
        folders = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*") if path.is_dir())
        return best[:3], told, folders, sorted(ray.options), trainer.args.seed, trainer.hp_search_backend

    ours, theirs = outcome(hf_compat, tmp_path / "ours"), outcome(transformers, tmp_path / "theirs")
    assert [o[:2] for o in ours[1]] == [t[:2] for t in theirs[1]] and ours[:1] + ours[2:] == theirs[:1] + theirs[2:]
    for (*_, saved), (*_, expected) in zip(ours[1], theirs[1], strict=True):
        assert saved is None if expected is None else {Path(p).name for p in expected} <= {Path(p).name for p in saved}
    assert ours[4] == 8 and len(ours[2]) == 6


def test_ray_s_schedulers_need_evaluations(ray, tmp_path):
    trainer = make_trainer(hf_compat, tmp_path, eval_strategy="no")
    with pytest.raises(RuntimeError, match="make sure you pass `do_eval=True`"):
        trainer.hyperparameter_search(ray_space, backend="ray", scheduler=ray.schedulers.ASHAScheduler())
    with pytest.raises(ArgumentError, match="ray takes one"):
        trainer.hyperparameter_search(ray_space, backend="ray", direction=["minimize", "maximize"])


def test_a_trainer_can_be_sent_to_another_process(tmp_path):
    assert transformers.TrainerCallback  # where it is imported, callbacks are of its classes, too
    trainer = make_trainer(hf_compat, tmp_path)
    again = pickle.loads(pickle.dumps(trainer))
    assert again.train().training_loss == trainer.train().training_loss


class Config:
    def __init__(self, items):
        self._items = items

    def update(self, values, allow_val_change=False):
        self.updated = values

    def keys(self):
        return self._items.keys()

    def __getitem__(self, name):
        return self._items[name]


@pytest.fixture
def wandb(monkeypatch):
    fake = MagicMock()
    fake.__path__ = []
    fake.__spec__, fake.run, fake.sweep.return_value = ModuleSpec("wandb", None), None, "sweep7"

    def agent(sweep_id, function, count):
        for number in range(count):
            fake.config = Config({"learning_rate": RATES[number]})
            fake.run = MagicMock(id=f"id{number}", config=fake.config)
            fake.run.name = f"name{number}"
            function()

    fake.agent.side_effect = agent
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setitem(sys.modules, "wandb.env", fake.env)
    return fake


def wandb_space(trial) -> dict:
    return {"method": "random", "metric": {}, "parameters": {"learning_rate": {"values": list(RATES)}}}


@pytest.mark.parametrize("evaluates", ["steps", "no"])
def test_a_sweep_of_wandb_is_that_of_transformers(wandb, evaluates, tmp_path):
    def outcome(api, folder):
        wandb.sweep.reset_mock()
        trainer = make_trainer(api, folder, eval_strategy=evaluates)
        best = trainer.hyperparameter_search(
            wandb_space, loss, 3, "minimize", "wandb", project="p", name="n", metric="eval/loss"
        )
        folders = sorted(str(path.relative_to(folder)) for path in folder.glob("run-*/*"))
        return tuple(best), wandb.sweep.call_args, folders, trainer.args.report_to, trainer.args.learning_rate

    ours, theirs = outcome(hf_compat, tmp_path / "ours"), outcome(transformers, tmp_path / "theirs")
    assert ours == theirs
    assert ours[0][0] in ("id1", "id2") and ours[0][3] == "sweep7" and len(ours[2]) == 6


def test_what_a_sweep_cannot_follow_is_named(wandb, tmp_path):
    trainer = make_trainer(hf_compat, tmp_path)
    with pytest.raises(UnknownArgument, match="did you mean `project`"):
        trainer.hyperparameter_search(wandb_space, backend="wandb", projekt="p")
    with pytest.raises(ArgumentError, match="wandb takes one"):
        trainer.hyperparameter_search(wandb_space, backend="wandb", direction=["minimize", "maximize"])
    with pytest.raises(ArgumentError, match="sweep_id=3"):
        trainer.hyperparameter_search(wandb_space, backend="wandb", sweep_id=3)
    assert torch.is_grad_enabled() and trainer.hp_search_backend is None
