"""Hyperparameter search: `hyperparameter_search`, and the methods that a trial calls. HF's method names."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
from collections.abc import Callable

import torch

from hf_compat.callbacks.fresh_states import FreshStates
from hf_compat.checkpoint import layout as names
from hf_compat.hf.search import BestRun, HPSearchBackend, Metrics, Objective, Space, Trial, default_compute_objective
from hf_compat.interop.upstream_log import log_line
from hf_compat.runtime.tracebacks import brief
from hf_compat.search.backends import PACKAGES, chosen_backend
from hf_compat.search.settings import as_list, check_search, set_from_trial, space_of
from hf_compat.search.trials import checked_objective
from hf_compat.trainer_methods.upstream_hooks import UpstreamHooks
from hf_compat.training_run.shared_values import compare_arguments

logger = logging.getLogger(__name__)


class SearchMethods(UpstreamHooks):
    """A search over hyperparameters: every trial is a `train()` of this Trainer with a model of its own."""

    _fresh_states: FreshStates | None = None  # what Lightning callbacks begin every trial of a search with

    @brief
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
        """Search for the hyperparameters that reach the best objective.

        Args:
            hp_space: From a trial to names and values of training arguments; the backend's default space without it.
            compute_objective: From the metrics of an evaluation to what is compared: a number, or a list of numbers
                with several directions. By default the loss, or the sum of the metrics where there are others.
            n_trials: How many trials; with optuna None goes on until `timeout=` seconds have passed.
            direction: `minimize` or `maximize`; a list, one for each objective.
            backend: `optuna`, `ray` or `wandb`; the first of them that is installed without it.
            hp_name: From a trial to its name, which names its folder and its run of a tracker.
            kwargs: Of the backend: for optuna those of `create_study` and of `Study.optimize`, for ray those of
                `tune.run`, for wandb `sweep_id`, `project`, `entity`, `name` and `metric`.

        Returns:
            The best run, or a list of those that no other is better than with several directions. With optuna and
            several processes: None on processes other than the first.

        Raises:
            SearchError: There is no `model_init`, or no trial was completed (a `RuntimeError`, a `ValueError`).
            MissingSearchBackend: The backend is not installed (a `SearchError`, and an `ImportError`).
            ArgumentError: A setting that no search can follow.

        Mirrors:
            `transformers.Trainer.hyperparameter_search`, 5.23. As there the arguments keep what the last trial has
            set, and `model` is None until the next `train()`.

        Differs:
            Lightning callbacks begin every trial as they were before the search.
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
        package = PACKAGES[chosen]
        self.hp_space = package.default_space if hp_space is None else hp_space
        self.hp_name = hp_name
        self.compute_objective = default_compute_objective if compute_objective is None else compute_objective
        self.hp_search_backend = chosen
        self._fresh_states = FreshStates(self._callbacks.lightning)
        try:
            return package.search()(self, n_trials, as_list(direction), kwargs)
        finally:
            self.hp_search_backend = None

    def _hp_search_setup(self, trial: Trial) -> None:
        """Set the arguments that a trial asks for.

        Raises:
            ArgumentError: An argument cannot have the trial's value.

        Mirrors:
            `transformers.Trainer._hp_search_setup`, 5.23.
        """
        self._trial = trial
        if self.hp_search_backend is None or trial is None:
            return
        if self._fresh_states is not None:
            self._fresh_states.give_back()
        for name, value in space_of(self, self.hp_search_backend, trial).items():
            set_from_trial(self.args, name, value)
        if self.hp_search_backend == HPSearchBackend.OPTUNA:
            log_line(f"Trial: {trial.params}")
        if self.hp_search_backend == HPSearchBackend.WANDB:
            log_line(f"W&B Sweep parameters: {trial}")
        self._check_arguments_of_trial()
        compare_arguments(self.args, None)
        self._train_batch_size = self.args.train_batch_size
        self._take_accelerator()

    def _report_to_hp_search(self, trial: Trial, step: int, metrics: Metrics) -> None:
        """Report an evaluation to the search.

        Raises:
            TrialPruned: optuna gives the trial up.

        Mirrors:
            `transformers.Trainer._report_to_hp_search`, 5.23.
        """
        if self.hp_search_backend is None or trial is None:
            return
        self.objective = checked_objective(self, metrics)
        if self.hp_search_backend == HPSearchBackend.OPTUNA:
            from hf_compat.search.with_optuna import report

            report(self, trial, step)
        elif self.hp_search_backend == HPSearchBackend.RAY:
            tune = importlib.import_module("ray.tune")
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if self.control.should_save:
                    self._tune_save_checkpoint(checkpoint_dir=folder)
                    saved = tune.Checkpoint.from_directory(folder)
                tune.report({**metrics, "objective": self.objective}, checkpoint=saved)

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write a checkpoint for ray into a folder of ray's.

        Mirrors:
            `transformers.Trainer._tune_save_checkpoint`, 5.23.
        """
        folder = names.checkpoint_path(checkpoint_dir, self.state.global_step)
        self.save_model(folder, _internal_call=True)
        if self.args.should_save:
            self.state.stateful_callbacks["TrainerControl"] = self.control.state()
            self.state.save_to_json(os.path.join(folder, names.TRAINER_STATE_NAME))
            torch.save(self.optimizer.state_dict(), os.path.join(folder, names.OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(folder, names.SCHEDULER_NAME))
