"""A search on optuna. The first rank proposes the trials, and all ranks train them."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import optuna

from hf_compat.errors import ArgumentError, ProcessError, SearchError, UnknownArgument
from hf_compat.hf.search import BestRun, Objective, Trial
from hf_compat.runtime.collectives import broadcast_object
from hf_compat.runtime.devices import empty_device_cache
from hf_compat.runtime.text import did_you_mean, shown
from hf_compat.search.trials import Directions, Options, checked_objective
from hf_compat.training_run.interface import TrainerApi

_OF_STUDY = frozenset(inspect.signature(optuna.create_study).parameters) - {"direction", "directions"}
_OF_RUN = frozenset(inspect.signature(optuna.study.Study.optimize).parameters) - {"self", "func", "n_trials"}


@dataclass(frozen=True)
class _End:
    """The first rank's message to the others that the search has ended."""

    error: str | None = None


def search_optuna(
    host: TrainerApi, n_trials: int | None, direction: Directions, options: Options
) -> BestRun | list[BestRun] | None:
    """Run a search.

    Mirrors:
        `transformers.integrations.run_hp_search_optuna`.

    Differs:
        Several ranks prune together, and end together if the first one stops the search.
    """
    _check_options(options, host.args.world_size)
    runner = _Trials(host, options.get("catch", ()))
    if host.args.process_index == 0:
        try:
            several = isinstance(direction, list)
            chosen = {name: value for name, value in options.items() if name in _OF_STUDY}
            study = optuna.create_study(
                direction=None if several else direction,
                directions=direction if several else None,
                **chosen,
            )
            chosen = {name: value for name, value in options.items() if name in _OF_RUN}
            study.optimize(runner, n_trials=n_trials, **chosen)
        except BaseException as error:
            if not runner.is_training:  # the other ranks wait for a trial
                broadcast_object(_End(f"{type(error).__name__}: {error}"))
            raise
        broadcast_object(_End())
        states = Counter(trial.state.name.lower() for trial in study.get_trials(deepcopy=False))
        if not states["complete"]:
            counts = ", ".join(f"{count} {state}" for state, count in states.items() if count) or "none was begun"
            raise SearchError(f"No trial of the search was completed: {counts}.\n\nHint: read the warnings above.")
        if len(study.directions) == 1:
            best = study.best_trial
            assert best.value is not None  # it was completed
            return BestRun(str(best.number), best.value, best.params)
        return [BestRun(str(best.number), best.values, best.params) for best in study.best_trials]
    while True:
        trial = broadcast_object(None)
        if isinstance(trial, _End):
            if trial.error is not None:
                raise ProcessError(f"Another process of this run has failed.\n\nrank 0: {trial.error}")
            return None
        with contextlib.suppress(optuna.TrialPruned):
            runner(trial)


class _Trials:
    """Runs one trial after the other on a Trainer."""

    def __init__(self, host: TrainerApi, catch: object) -> None:
        self.host = host
        named = catch if isinstance(catch, Iterable) else [catch]
        self._survived = (optuna.TrialPruned, *(kind for kind in named if isinstance(kind, type)))
        self.is_training = self._has_left_a_model = False

    def __call__(self, trial: Trial) -> Objective:
        """Train one trial, on all ranks."""
        if self.host.args.world_size > 1 and self.host.args.process_index == 0:
            self.host.hp_space(trial)
            fixed = optuna.trial.FixedTrial(trial.params, trial.number)
            broadcast_object(fixed)
        self.is_training = True
        if self._has_left_a_model:  # by a trial that was pruned or has failed. As upstream, the last one's stays
            release_model(self.host)
        self._has_left_a_model = True
        try:
            self.host.objective = None
            self.host.train(resume_from_checkpoint=None, trial=trial)
            if self.host.objective is None:  # the training has made no evaluation
                self.host.objective = checked_objective(self.host, self.host.evaluate())
            objective = self.host.objective
        except self._survived:
            self.is_training = False
            raise
        release_model(self.host)
        self.is_training = self._has_left_a_model = False
        return objective


def release_model(host: TrainerApi) -> None:
    """Drop a trial's model and optimizer to free memory for the next trial.

    Mirrors:
        The end of a trial in `transformers.integrations.run_hp_search_optuna`. `trainer.model` is None then.
    """
    host.model = host.model_wrapped = None  # type: ignore[assignment]  # as upstream, until the next `train`
    host.optimizer = host.lr_scheduler = None
    host.lightning_trainer = host._fit_model_state = host._compiled_model = None  # they hold the model, too
    handler = host.callback_handler
    handler.model = handler.optimizer = handler.lr_scheduler = None
    host.accelerator.clear()
    gc.collect()
    empty_device_cache()


def _check_options(options: Options, world_size: int) -> None:
    known = _OF_STUDY | _OF_RUN
    for name, value in options.items():
        if name not in known:
            hint = did_you_mean(name, sorted(known), f"optuna takes {', '.join(sorted(known))}.")
            raise UnknownArgument(f"The search got an unknown argument `{shown(name, value)}`.\n\nHint: {hint}")
    if options.get("n_jobs", 1) != 1:
        raise ArgumentError(
            f"`{shown('n_jobs', options['n_jobs'])}`: the trials of a search share this Trainer and its arguments, so "
            "they run one after the other.\n\nHint: start the script several times with one `storage=` and "
            "`load_if_exists=True`."
        )
    if options.get("catch", ()) != () and world_size > 1:
        raise ArgumentError(
            f"`{shown('catch', options['catch'])}`: with {world_size} processes an error of one leaves the others "
            "waiting, so a search cannot continue after it.\n\n"
            "Hint: leave `catch` out, or raise `optuna.TrialPruned` on all processes."
        )


def report(host: TrainerApi, trial: Trial, update: int) -> None:
    """Report an evaluation to optuna, and end the trial on all ranks if optuna prunes it."""
    is_pruned = False
    if hasattr(trial, "study") and len(trial.study.directions) == 1:  # a `FixedTrial` has none
        trial.report(host.objective, update)
        is_pruned = trial.should_prune()
    if broadcast_object(is_pruned):
        host.callback_handler.on_train_end(host.args, host.state, host.control)
        raise optuna.TrialPruned
