"""A search on ray: ray trains copies of the Trainer in processes of its own."""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import ray.tune

from hf_compat.callbacks.trackers import TensorBoardCallback
from hf_compat.checkpoint.layout import PREFIX_CHECKPOINT_DIR
from hf_compat.errors import ArgumentError
from hf_compat.hf.builtin_callbacks import ProgressCallback
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.hf.notebook import NotebookProgressCallback
from hf_compat.hf.search import BestRun, Metrics, Trial
from hf_compat.runtime.launch import variable
from hf_compat.runtime.text import shown
from hf_compat.search.backends import Directions, Options
from hf_compat.search.trials import SearchHost, checked_objective

logger = logging.getLogger(__name__)

Trainable: TypeAlias = Callable[..., object]
# Schedulers that compare trials while they run.
_COMPARING = ("ASHAScheduler", "MedianStoppingRule", "HyperBandForBOHB", "PopulationBasedTraining")


def search(trainer: SearchHost, n_trials: int | None, direction: Directions, options: Options) -> BestRun:
    """Run a search.

    Args:
        trainer: The Trainer; ray trains copies of it.
        n_trials: How many samples of the space.
        direction: `minimize` or `maximize`.
        options: Keywords of `ray.tune.run`.

    Returns:
        The best run; `run_summary` is ray's analysis. The variable RAY_SCOPE says which of a trial's results counts.

    Raises:
        ArgumentError: Several objectives, or a scheduler that needs evaluations where the arguments ask for none.

    Mirrors:
        `transformers.integrations.run_hp_search_ray`, 5.23.
    """
    if not isinstance(direction, str):
        raise ArgumentError(f"`{shown('direction', direction)}`: ray takes one.\n\nHint: use `backend='optuna'`.")
    if "resources_per_trial" not in options:
        gpus = {"gpu": 1} if trainer.args.n_gpu > 0 else {}
        options["resources_per_trial"] = {"cpu": 1, **gpus}
        logger.info("Each trial gets %s; `resources_per_trial=` says otherwise.", options["resources_per_trial"])
    if "progress_reporter" not in options:
        options["progress_reporter"] = ray.tune.CLIReporter(metric_columns=["objective"])
    name = type(options.get("scheduler")).__name__
    evaluates = trainer.args.do_eval and trainer.args.eval_strategy != IntervalStrategy.NO
    if name in _COMPARING and not evaluates:
        raise ArgumentError(
            f"`scheduler={name}(…)` compares trials while they run, and they are not evaluated then.\n\n"
            "Hint: set `do_eval=True` and `eval_strategy='steps'` in the arguments, or leave the scheduler out."
        )
    board = trainer.pop_callback(TensorBoardCallback)  # an open file cannot be sent to another process
    trainer.model = trainer.model_wrapped = None  # type: ignore[assignment]  # each trial makes its own
    trainer.callback_handler.model = None
    try:
        # What ray calls for each trial
        trainable = ray.tune.with_parameters(_train_trial, local_trainer=trainer)

        @functools.wraps(trainable)
        def train(*args: object, **kwargs: object) -> object:
            return trainable(*args, **kwargs)

        if hasattr(trainable, "__mixins__"):  # set by `with_parameters`
            train.__mixins__ = trainable.__mixins__  # type: ignore[attr-defined]
        analysis = ray.tune.run(
            train,
            config=trainer.hp_space(None),
            num_samples=1 if n_trials is None else n_trials,
            **options,
        )
    finally:
        if board is not None:
            trainer.add_callback(board)
    best = analysis.get_best_trial(metric="objective", mode=direction[:3], scope=variable("RAY_SCOPE", "last"))
    return BestRun(best.trial_id, best.last_result["objective"], best.config, analysis)


def _train_trial(trial: Trial, local_trainer: SearchHost) -> None:
    """Train one trial in a process of ray's, from ray's checkpoint where the trial goes on."""
    if local_trainer.pop_callback(NotebookProgressCallback):
        local_trainer.add_callback(ProgressCallback)
    checkpoint = ray.tune.get_checkpoint()
    # a trial that goes on and finds nothing left to train has reported before
    local_trainer.objective = "objective" if checkpoint else None  # type: ignore[assignment]  # as upstream
    if checkpoint:
        with checkpoint.as_directory() as folder:
            path = next(Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}*")).as_posix()
            local_trainer.train(resume_from_checkpoint=path, trial=trial)
    else:
        local_trainer.train(trial=trial)
    if getattr(local_trainer, "objective", None) is None:
        _evaluate_at_end(local_trainer)


def _evaluate_at_end(trainer: SearchHost) -> None:
    metrics = trainer.evaluate()
    trainer.objective = checked_objective(trainer, metrics)
    _report(trainer, {**metrics, "objective": trainer.objective, "done": True}, saves=True)


def report_evaluation(trainer: SearchHost, metrics: Metrics) -> None:
    """Tell ray of an evaluation; with a checkpoint where one is due."""
    _report(trainer, {**metrics, "objective": trainer.objective}, saves=trainer.control.should_save)


def _report(trainer: SearchHost, metrics: dict[str, object], saves: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if saves:
            trainer._tune_save_checkpoint(checkpoint_dir=folder)
            checkpoint = ray.tune.Checkpoint.from_directory(folder)
        ray.tune.report(metrics, checkpoint=checkpoint)
