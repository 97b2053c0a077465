"""Hyperparameter search: `hyperparameter_search`, and the methods that a trial calls."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hf_compat.callbacks.callback_set import SavedCallbackStates
from hf_compat.hf.search import BestRun, HPSearchBackend, Metrics, Objective, Space, Trial, default_compute_objective
from hf_compat.interop.releases import of_transformers
from hf_compat.plan.argument_support import check_supported
from hf_compat.runtime.console import log_line
from hf_compat.runtime.tracebacks import with_brief_traceback
from hf_compat.search.trials import (
    check_search,
    checked_objective,
    chosen_backend,
    search_of,
    set_from_trial,
    space_of,
)
from hf_compat.trainer_methods.upstream_hooks import UpstreamHooks
from hf_compat.training_run.same_on_ranks import compare_arguments

logger = logging.getLogger(__name__)


class SearchMethods(UpstreamHooks):
    """A search over hyperparameters. Every trial is a `train()` of this Trainer with a new model."""

    _search_direction: str | list[str] | None = None  # of a search that is under way
    _fresh_states: SavedCallbackStates | None = None  # of Lightning callbacks, restored before every trial

    @with_brief_traceback
    def hyperparameter_search(
        self,
        hp_space: Callable[[Trial], Space] | None = None,
        compute_objective: Callable[[Metrics], Objective] | None = None,
        n_trials: int | None = 20,
        direction: str | list[str] = "minimize",
        backend: str | HPSearchBackend | None = None,
        hp_name: Callable[[Trial], str] | None = None,
        **kwargs: object,
    ) -> BestRun | list[BestRun] | None:
        """Search for the hyperparameters with the best objective.

        Args:
            hp_space: Returns names and values of training arguments for a trial. By default the backend's space.
            compute_objective: Returns the objective for an evaluation's metrics: a number, or a list of numbers with
                several directions. By default the loss, or the sum of the other metrics if there are any.
            n_trials: Number of trials. With optuna, None continues until `timeout=` seconds have passed.
            direction: `minimize` or `maximize`, or a list with one for each objective.
            backend: `optuna`, `ray` or `wandb`. By default the first of them that is installed.
            hp_name: Returns a trial's name, which its folder and its tracker run get.
            kwargs: Keywords of the backend: of `create_study` and `Study.optimize` for optuna, of `tune.run` for ray,
                and `sweep_id`, `project`, `entity`, `name` and `metric` for wandb.

        Returns:
            The best run. With several directions a list of the runs that no other run beats. With optuna and several
            ranks, None on ranks other than the first.

        Raises:
            SearchError: There is no `model_init`, or no trial was completed (a `RuntimeError`, a `ValueError`).
            MissingSearchBackend: The backend is not installed (a `SearchError`, and an `ImportError`).
            ArgumentError: A setting is not supported by any search.

        Mirrors:
            `transformers.Trainer.hyperparameter_search`, 5.23. As there, the arguments keep the last trial's values,
            and `model` is None until the next `train()`.

        Differs:
            Lightning callbacks start every trial in their state before the search.
        """
        check_search(
            self.model_init,
            n_trials,
            direction,
            hp_space=hp_space,
            compute_objective=compute_objective,
            hp_name=hp_name,
        )
        chosen = chosen_backend(backend)
        run, default_space = search_of(chosen)
        self.hp_space = default_space if hp_space is None else hp_space
        self.hp_name = hp_name
        self.compute_objective = default_compute_objective if compute_objective is None else compute_objective
        self.hp_search_backend = chosen
        self._fresh_states = SavedCallbackStates(self._callbacks.lightning)
        try:
            # a list means several directions
            self._search_direction = list(direction) if isinstance(direction, (list, tuple)) else direction
            return run(self, n_trials, self._search_direction, kwargs)
        finally:
            self.hp_search_backend = self._search_direction = None

    def _hp_search_setup(self, trial: Trial) -> None:
        """Set the arguments of a trial.

        Raises:
            ArgumentError: An argument cannot have the trial's value.

        Mirrors:
            `transformers.Trainer._hp_search_setup`, 5.23.
        """
        self._trial = trial
        if self.hp_search_backend is None or trial is None:
            return
        if self._fresh_states is not None:
            self._fresh_states.restore()
        for name, value in space_of(self, self.hp_search_backend, trial).items():
            set_from_trial(self.args, name, value)
        if self.hp_search_backend == HPSearchBackend.OPTUNA:
            log_line(f"Trial: {trial.params}")
        if self.hp_search_backend == HPSearchBackend.WANDB:
            log_line(f"W&B Sweep parameters: {trial}")
        check_supported(self.args)
        self._check_optimization()
        if self.args.world_size > 1:
            compare_arguments(self.args, None)
        self._train_batch_size = self.args.train_batch_size
        self._make_accelerator()

    def _report_to_hp_search(self, trial: Trial, step: int, metrics: Metrics) -> None:
        """Report an evaluation to the search.

        Raises:
            TrialPruned: optuna prunes the trial.

        Mirrors:
            `transformers.Trainer._report_to_hp_search`, 5.23.
        """
        if self.hp_search_backend is None or trial is None:
            return
        if self.hp_search_backend == HPSearchBackend.RAY:  # its search is transformers' own
            of_transformers("trainer", "Trainer", "A search on ray")._report_to_hp_search(self, trial, step, metrics)
            return
        self.objective = checked_objective(self, metrics)
        if self.hp_search_backend == HPSearchBackend.OPTUNA:
            from hf_compat.search.with_optuna import report

            report(self, trial, step)

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write a checkpoint into a folder of ray's.

        Mirrors:
            `transformers.Trainer._tune_save_checkpoint`, 5.23.
        """
        of_transformers("trainer", "Trainer", "A search on ray")._tune_save_checkpoint(self, checkpoint_dir)
