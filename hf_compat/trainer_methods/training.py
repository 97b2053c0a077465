"""One training, from its loader to its summary, and a search of many. Within `lightning_fit` Lightning runs it."""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Callable

from torch.utils.data import IterableDataset

from hf_compat.callbacks.callback_set import SavedCallbackStates
from hf_compat.data.collators import check_dataset, check_iterable
from hf_compat.engine.window_trainer import NO_BATCHES
from hf_compat.engine.windows import Windows
from hf_compat.errors import CheckpointError
from hf_compat.hf.argument_values import AcceleratorConfig
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.hf.metrics import TrainOutput
from hf_compat.hf.search import BestRun, HPSearchBackend, Metrics, Objective, Space, Trial, default_compute_objective
from hf_compat.hf.state import TrainerState, export_states
from hf_compat.interop.releases import of_transformers
from hf_compat.optim.optimizers import tell_of_later_parameters
from hf_compat.optim.prepared import unwrap_optimizer
from hf_compat.plan.argument_support import check_supported
from hf_compat.runtime.collectives import failing_together
from hf_compat.runtime.console import log_line
from hf_compat.runtime.devices import empty_device_cache
from hf_compat.runtime.inspection import has_length, is_replaced
from hf_compat.runtime.signals import REQUEUED_NAME, is_requeued
from hf_compat.runtime.text import brief
from hf_compat.runtime.tracebacks import with_brief_traceback
from hf_compat.search.trials import (
    check_search,
    checked_objective,
    chosen_backend,
    search_of,
    set_from_trial,
    space_of,
)
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.evaluation import EvaluationMethods
from hf_compat.trainer_methods.fit import lightning_fit
from hf_compat.trainer_methods.hub import HubMethods
from hf_compat.trainer_methods.model_setup import ModelSetupMethods
from hf_compat.trainer_methods.near_names import tell_of_flags
from hf_compat.training_run.best import tell_of_best, tell_of_no_evaluation
from hf_compat.training_run.flags import FLAGS, FlagAgreement, FlagSources, flag_sources, has_own_methods
from hf_compat.training_run.loss_log import LossLog
from hf_compat.training_run.resumer import ResumeAt
from hf_compat.training_run.run import TrainingRun, run_summary
from hf_compat.training_run.same_on_ranks import StartFacts, compare_arguments, compare_updates

logger = logging.getLogger(__name__)


class TrainingMethods(ModelSetupMethods, HubMethods, EvaluationMethods):
    """The sequence of one `train()` call, and a search, of which every trial is a `train()` with a new model."""

    _start: StartFacts  # of the last call of `train`
    _search_direction: str | list[str] | None = None  # of a search that is under way
    _fresh_states: SavedCallbackStates | None = None  # of Lightning callbacks, restored before every trial

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Trial = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Load data, count updates, train with Lightning, finish.

        Mirrors:
            `transformers.Trainer._inner_training_loop`, 5.23.
        """
        args = self.args if args is None else args
        self.accelerator.free_memory()
        if args.auto_find_batch_size and batch_size is not None:
            if batch_size != self._train_batch_size:
                # Accelerate empties the cache while the error still holds the failed try's tensors.
                gc.collect()
                empty_device_cache()
            self._update_auto_batch_size(batch_size)
        evaluates = args.eval_strategy != IntervalStrategy.NO or args.eval_on_start
        if evaluates and not is_replaced(self, "get_eval_dataloader", DataloaderMethods):
            parts = self.eval_dataset if isinstance(self.eval_dataset, dict) else {None: self.eval_dataset}
            for name, part in parts.items():
                if part is not None:
                    check_dataset("eval_dataset" if name is None else f"eval_dataset[{brief(name)}]", part)
        loader = self.get_train_dataloader()
        check_iterable("get_train_dataloader", loader, "a `DataLoader`")
        counts = self.run_counts(args, loader)
        sources = self._start.sources
        if self._start.data is None:
            sources = compare_updates(args, counts, loader, self._flag_sources())
        if self._created_lr_scheduler:  # its length may have changed
            self.lr_scheduler, self._created_lr_scheduler = None, False
        with failing_together(CheckpointError, self._resumer.is_loading):
            self._init_training_state(
                counts.max_updates, counts.updates_per_epoch, counts.num_train_epochs, resume_from_checkpoint, trial
            )
            self._run = run = TrainingRun(
                losses=LossLog(args.device, self.state.global_step, args.logging_nan_inf_filter),
                counts=counts,
                loader=loader,
                checkpoint=resume_from_checkpoint,
                updates_before=self.state.global_step,
                tokens_before=self.state.num_input_tokens_seen,
                trial=trial,
                ignore_keys_for_eval=ignore_keys_for_eval,
                flag_agreement=FlagAgreement(args.ddp_timeout, sources),
            )
            self._resumer.start(run)
            restore = functools.partial(self._resumer.restore, ResumeAt.DATA_OPENED, resume_from_checkpoint)
            run.windows = Windows(loader, steps=self, counts=counts, start=run.start, restore_random_states=restore)
        # the fit compiles the model, and the trainer of earlier evaluations may hold another trial's
        self._evaluator.is_prepared, self._evaluator.kept = True, None
        with lightning_fit(self, run) as (trainer, module):
            trainer.run_command(trainer.fit, module, train_dataloaders=run.windows, val_dataloaders=NO_BATCHES)
        return self._finalize_training(trial, counts.num_train_samples, run.start_time)

    def _start_facts(self) -> StartFacts:
        """What the other ranks need to know before they train. The updates follow from the length of plain data."""
        if self.args.world_size == 1:
            return StartFacts()
        split = AcceleratorConfig.from_any(self.args.accelerator_config)
        is_plain = has_length(self.train_dataset) and not isinstance(self.train_dataset, IterableDataset)
        is_decided_later = (
            (has_own_methods(self) or self.model_init is not None or self.args.auto_find_batch_size)
            or (not is_plain or split.split_batches or not split.even_batches)
        )  # fmt: skip
        data = None if is_decided_later else repr((len(self.train_dataset), self._train_batch_size))
        return StartFacts(data=data, sources=self._flag_sources())

    def _flag_sources(self) -> FlagSources:
        has_lightning = bool(self._callbacks.lightning) or self._lightning_options.get("max_time") is not None
        return flag_sources(self.callback_handler.callbacks, has_lightning, self, self.args.gradient_accumulation_steps)

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """Set the micro-batch size that `auto_find_batch_size` tries next."""
        self._train_batch_size = batch_size

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Trial,
    ) -> tuple[int, int]:
        """Set the state of a run, from a checkpoint if there is one.

        The result, as upstream's, is whole epochs of the checkpoint, and micro-batches of the next. Nothing here uses
        it: a run continues at `TrainingRun.start`.

        Mirrors:
            `transformers.Trainer._init_training_state`, 5.23.
        """
        stateful = export_states([*self.callback_handler.callbacks, self.control])
        self.state = TrainerState(stateful_callbacks=stateful)
        self.state.train_batch_size = self._train_batch_size
        self.state.is_hyper_param_search = trial is not None
        self.state.compute_steps(self.args, max_steps)
        self._resumer.restore(ResumeAt.STATE_NEW, resume_from_checkpoint)
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        epochs, updates = divmod(self.state.global_step, num_update_steps_per_epoch)
        return epochs, 0 if self.args.ignore_data_skip else updates * self.args.gradient_accumulation_steps

    def _finalize_training(self, trial: Trial, num_train_samples: float, start_time: float) -> TrainOutput:
        """Log the run's summary, load the best model, keep it alone if asked, and fire `on_train_end`."""
        train_loss = self._run.losses.mean(self.state.global_step)
        nonfinite = [self._run.losses.nonfinite_updates]  # the most of all ranks, after the exchange
        with failing_together(numbers=nonfinite):
            self._saver.background.wait()
            self._saver.check_folder()
        log_line("\n\nTraining completed. Do not forget to share your model on huggingface.co/models =)\n\n")
        if self._pushes.unpushed is not None:
            self._pushes.push_checkpoint(self._pushes.unpushed)
        folder = str(self.args.output_dir)
        if self.is_world_process_zero() and is_requeued(folder):  # this job, whose training has ended
            os.unlink(os.path.join(folder, REQUEUED_NAME))
        updates = self.state.global_step - self._run.updates_before  # the durations cover this call only
        samples = num_train_samples * updates / max(self.state.max_steps, 1)
        self.store_flos()
        metrics = run_summary(start_time, samples, updates, self.state.total_flos, train_loss, *nonfinite)
        if not self._memory_tracker.skip_memory_metrics:  # name the stage, as transformers 4 cannot derive it here
            self._memory_tracker.stop("train")
            self._memory_tracker.update_metrics("train", metrics)
        self.log(metrics)
        best = self.state.best_model_checkpoint
        if self.is_world_process_zero():
            self._tell_after_training()
        if self.args.load_best_model_at_end and best is not None:
            with self._loading_whole_weights():
                self._load_best_model()
        if self.args.should_save:
            folder = self._get_output_dir(trial)  # upstream calls an override here with any limit
            if self.args.save_total_limit == 1 and best is not None:
                self._saver.keep_best_alone(folder, best)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._finish_current_push()
        if self.args.push_to_hub:
            self._pushes.warn_of_missing()
        self._remove_neftune_noise()
        self.is_in_train = False
        return TrainOutput(self.state.global_step, train_loss, metrics)

    def _tell_after_training(self) -> None:
        """Warn of what the training has not done, though it was asked for."""
        tell_of_flags(self.control, FLAGS)
        if self.args.load_best_model_at_end:
            tell_of_best(self.args, self.state, self._run.updates_before)
        else:
            tell_of_no_evaluation(self.args, self.state)
        if self._checks_optimizer and self._run.flag_agreement.sources.in_updates:
            tell_of_later_parameters(unwrap_optimizer(self.optimizer), self.model, self._run.frozen)

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
