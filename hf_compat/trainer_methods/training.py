"""One training, from its loader to its summary: plan, build, fit, finish."""

from __future__ import annotations

import functools
import logging

from hf_compat.data.checks import check_iterable
from hf_compat.errors import CheckpointError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.outputs import TrainOutput
from hf_compat.hf.search import Trial
from hf_compat.hf.state import TrainerState, is_exportable
from hf_compat.interop.upstream_log import log_line
from hf_compat.runtime.collectives import agree, failing_together
from hf_compat.runtime.signals import forget_requeue
from hf_compat.trainer_methods.checkpoints import CheckpointMethods
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.fit import Fit
from hf_compat.trainer_methods.optimization import OptimizationMethods
from hf_compat.trainer_methods.upstream_hooks import UpstreamHooks
from hf_compat.trainer_methods.windows import WindowMethods
from hf_compat.training_run.loss_log import LossLog
from hf_compat.training_run.resumer import ResumeAt
from hf_compat.training_run.run import TrainingRun, run_summary
from hf_compat.training_run.shared_values import refuse_differences

logger = logging.getLogger(__name__)


class TrainingMethods(WindowMethods, CheckpointMethods, DataloaderMethods, OptimizationMethods, UpstreamHooks):
    """The sequence of one `train()` call."""

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Trial = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Fit once: load data, plan, train with Lightning, finish."""
        args = self.args if args is None else args
        self.accelerator.free_memory()
        if args.auto_find_batch_size and batch_size is not None:
            self._update_auto_batch_size(batch_size)
        self._check_evaluation_data()
        loader = self.get_train_dataloader()
        check_iterable("get_train_dataloader", loader, "a `DataLoader`")
        counts = self.run_counts(args, loader)  # an override may return a plain tuple
        if args.world_size > 1:
            refuse_differences({"updates that the training data give": repr(counts.max_updates)}, "training data")
        if self._created_lr_scheduler:  # its length may have changed
            self.lr_scheduler, self._created_lr_scheduler = None, False
        with failing_together(CheckpointError, self._resumer.is_loading):
            self._init_training_state(
                counts.max_updates, counts.updates_per_epoch, counts.num_train_epochs, resume_from_checkpoint, trial
            )
            self._run = run = TrainingRun(
                losses=LossLog(args.device, self.state.global_step, args.logging_nan_inf_filter),
                counts=counts,
                cut=self._data_cut(counts),
                loader=loader,
                checkpoint=resume_from_checkpoint,
                run_id=self._resumer.new_run_id(resume_from_checkpoint),
                updates_before=self.state.global_step,
                tokens_before=self.state.num_input_tokens_seen,
                trial=trial,
                ignore_keys_for_eval=ignore_keys_for_eval,
            )
            self._resumer.start(run)
            restore_rng = functools.partial(self._resumer.restore_rng, resume_from_checkpoint)
            run.windows = self._make_windows(loader, counts, run.start, restore_rng=restore_rng)
        Fit(self, run, counts).run()
        return self._finalize_training(trial, counts.num_train_samples, run.start_time)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Trial,
    ) -> tuple[int, int]:
        """Set the state of a run, from a checkpoint if there is one.

        Returns:
            Whole epochs of the checkpoint, and micro-batches of the next. `resume_point` is more exact.

        Mirrors:
            `transformers.Trainer._init_training_state`, 5.23.
        """
        stateful = [c for c in [*self.callback_handler.callbacks, self.control] if is_exportable(c)]
        self.state = TrainerState(stateful_callbacks=stateful)
        self.state.train_batch_size = self._train_batch_size
        self.state.is_hyper_param_search = trial is not None
        self.state.compute_steps(self.args, max_steps)
        self._resumer.restore(ResumeAt.STATE_NEW, resume_from_checkpoint)
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        epochs, updates = divmod(self.state.global_step, num_update_steps_per_epoch)
        return epochs, 0 if self.args.ignore_data_skip else updates * self.args.gradient_accumulation_steps

    def _finalize_training(self, trial: Trial, num_train_samples: float, start_time: float) -> TrainOutput:
        """Log the run's summary, load the best model, rotate, and fire `on_train_end`."""
        agree(self._saver.background.settle())
        log_line("\n\nTraining completed. Do not forget to share your model on huggingface.co/models =)\n\n")
        self._pushes.push_what_was_written()
        if self.is_world_process_zero():
            forget_requeue(str(self.args.output_dir))
        train_loss = self._run.losses.mean(self.state.global_step)
        updates = self.state.global_step - self._run.updates_before  # the durations cover this call only
        samples = num_train_samples * updates / max(self.state.max_steps, 1)
        self.store_flos()
        nonfinite = self._run.losses.nonfinite_over_processes()
        metrics = run_summary(start_time, samples, updates, self.state.total_flos, train_loss, nonfinite)
        if not self._memory_tracker.skip_memory_metrics:  # name the stage, as transformers 4 cannot derive it here
            self._memory_tracker.stop("train")
            self._memory_tracker.update_metrics("train", metrics)
        self.log(metrics)
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            with self._loading_whole_weights():
                self._load_best_model()
        if self.args.should_save:
            self._saver.rotate_at_end(self._get_output_dir(trial), best)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._finish_current_push()
        self._pushes.tell_what_has_not_arrived()
        self._remove_neftune_noise()
        self.is_in_train = False
        return TrainOutput(self.state.global_step, train_loss, metrics)
