"""A search as a sweep of Weights & Biases, whose server proposes the trials."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import wandb
import wandb.env

from hf_compat.callbacks.fresh_states import FreshStates
from hf_compat.callbacks.trackers import WandbCallback
from hf_compat.errors import ArgumentError, SearchError, UnknownArgument
from hf_compat.hf.search import BestRun, Objective, Space
from hf_compat.hf.tracking import rewrite_logs
from hf_compat.runtime.text import did_you_mean, shown
from hf_compat.search.backends import Directions, Options, text_of
from hf_compat.search.trials import SearchHost, checked_objective, is_better

logger = logging.getLogger(__name__)

_OPTIONS = ("sweep_id", "project", "name", "entity", "metric")


@dataclass
class _Best:
    """The best trial so far."""

    run_id: str | None = None
    objective: Objective = None
    hyperparameters: Space | None = None


def search(trainer: SearchHost, n_trials: int | None, direction: Directions, options: Options) -> BestRun:
    """Run a search.

    Args:
        trainer: The Trainer.
        n_trials: How many runs of the sweep.
        direction: `minimize` or `maximize`.
        options: `sweep_id` goes on with a sweep; `project`, `entity` and `name` say where a new one is made; `metric`
            is what wandb compares (`eval/loss`).

    Returns:
        The best run; `run_summary` is the sweep's id.

    Raises:
        UnknownArgument: There is no such option.
        ArgumentError: Several objectives, or several processes.
        SearchError: No run came to an end.

    Mirrors:
        `transformers.integrations.run_hp_search_wandb`, 5.23.
    """
    _check(trainer, direction, options)
    if not any(isinstance(callback, WandbCallback) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(WandbCallback())
    trainer.args.report_to = ["wandb"]
    sweep = _Sweep(trainer, str(direction), text_of(options, "metric") or "eval/loss")
    sweep_id = text_of(options, "sweep_id")
    if sweep_id is None:
        sweep_id = _make_sweep(trainer, str(direction), sweep.metric, options)
    else:
        # Tell wandb where a sweep that exists already is
        entity, project = text_of(options, "entity"), text_of(options, "project")
        if entity is not None:
            wandb.env.set_entity(entity)
        if project is not None:
            wandb.env.set_project(project)
    logger.info("wandb sweep id - %s", sweep_id)
    wandb.agent(sweep_id, function=sweep.run_one, count=n_trials)
    best = sweep.best
    if best.run_id is None or best.hyperparameters is None:
        raise SearchError(f"No run of the sweep {sweep_id} has come to an end.\n\nHint: look at wandb's messages.")
    return BestRun(best.run_id, best.objective, best.hyperparameters, sweep_id)  # type: ignore[arg-type]  # it was reached


class _Sweep:
    """Trains what wandb's agent asks for.

    Args:
        trainer: The Trainer.
        direction: `minimize` or `maximize`.
        metric: What wandb compares.
    """

    def __init__(self, trainer: SearchHost, direction: str, metric: str) -> None:
        self.trainer, self.direction, self.metric = trainer, direction, metric
        self.best = _Best()
        self._fresh = FreshStates(trainer._callbacks.lightning)

    def run_one(self) -> Objective:
        """Train one run of the sweep."""
        trainer = self.trainer
        run = wandb.run or wandb.init()
        trainer.state.trial_name = run.name
        run.config.update({"assignments": {}, "metric": self.metric})
        config = wandb.config
        trainer.objective = None
        self._fresh.give_back()
        trainer.train(resume_from_checkpoint=None, trial=vars(config)["_items"])
        if getattr(trainer, "objective", None) is None:
            self._evaluate_at_end()
        self._compare(run.id, dict(config))
        return trainer.objective

    def _evaluate_at_end(self) -> None:
        metrics = self.trainer.evaluate()
        self.trainer.objective = checked_objective(self.trainer, metrics)
        logged = rewrite_logs(metrics)
        if self.metric not in logged:
            logger.warning(
                "`metric=%r` is not among the metrics %s: wandb's charts of the sweep stay empty.",
                self.metric,
                ", ".join(logged),
            )

    def _compare(self, run_id: str, hyperparameters: Space) -> None:
        objective, best = self.trainer.objective, self.best
        if best.run_id is None or is_better(objective, best.objective, self.direction):  # type: ignore[arg-type]  # numbers
            self.best = _Best(run_id, objective, hyperparameters)


def _check(trainer: SearchHost, direction: Directions, options: Options) -> None:
    for name, value in options.items():
        if name not in _OPTIONS:
            hint = did_you_mean(name, _OPTIONS, f"wandb takes {', '.join(_OPTIONS)}.")
            raise UnknownArgument(f"The search got an unknown argument `{shown(name, value)}`.\n\nHint: {hint}")
    if not isinstance(direction, str):
        raise ArgumentError(f"`{shown('direction', direction)}`: wandb takes one.\n\nHint: use `backend='optuna'`.")
    if trainer.args.world_size > 1:
        raise ArgumentError(
            f"A sweep of wandb gives its hyperparameters to one process, and there are {trainer.args.world_size}.\n\n"
            "Hint: use `backend='optuna'`."
        )


def _make_sweep(trainer: SearchHost, direction: str, metric: str, options: Options) -> str:
    sweep = trainer.hp_space(None)
    sweep.setdefault("metric", {}).update(goal=direction, name=metric)
    if options.get("name"):
        sweep["name"] = options["name"]
    return wandb.sweep(sweep, project=text_of(options, "project"), entity=text_of(options, "entity"))
