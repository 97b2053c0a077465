"""One training from its loader to its summary: plan, build, let Lightning fit, finish. HF's method names."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence

from hf_compat.callbacks.bridge import HFBridge
from hf_compat.callbacks.startup_log import opening_lines, unused_devices
from hf_compat.data.checks import check_iterable
from hf_compat.engine.build import NO_BATCHES, build_trainer, run_fit
from hf_compat.engine.internals import (
    accept_modules_in_eval_mode,
    keep_step_signature,
    leave_validation_to_flags,
    start_from,
)
from hf_compat.engine.precision import ForwardPrecision, wrap_forward
from hf_compat.engine.strategies import model_state_of, wrapped_model
from hf_compat.errors import ArgumentError, CheckpointError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.outputs import TrainOutput
from hf_compat.hf.search import Trial
from hf_compat.hf.state import TrainerState, is_exportable
from hf_compat.interop.transformers_models import is_pretrained_model
from hf_compat.interop.upstream_log import log_line, log_resumption, log_training
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.run_counts import RunCounts
from hf_compat.plan.translate import translate
from hf_compat.runtime.collectives import agree, failing_together, gather_objects, limit_waiting
from hf_compat.runtime.launch import slurm_job_id
from hf_compat.runtime.signals import forget_requeue
from hf_compat.trainer_methods.checkpoints import CheckpointMethods
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.optimization import OptimizationMethods
from hf_compat.trainer_methods.upstream_hooks import UpstreamHooks
from hf_compat.trainer_methods.windows import WindowMethods
from hf_compat.training_run.flags import NO_AGREEMENT, FlagAgreement, flag_sources
from hf_compat.training_run.loss_log import LossLog
from hf_compat.training_run.resumer import ResumeAt
from hf_compat.training_run.run import TrainingRun, run_summary

logger = logging.getLogger(__name__)


# Each shapes what the processes exchange and when, or what each of them does to its copy of the weights.
SHARED_ARGUMENTS = (
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size"),
    *("gradient_accumulation_steps", "auto_find_batch_size", "dataloader_drop_last", "accelerator_config"),
    *("train_sampling_strategy", "length_column_name", "ignore_data_skip"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps", "batch_eval_metrics"),
    *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics"),
    *("save_strategy", "save_steps", "save_only_model", "save_on_each_node", "enable_jit_checkpoint"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("logging_strategy", "logging_steps", "logging_first_step", "include_num_input_tokens_seen"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
    *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor"),
    *("average_tokens_across_devices", "bf16", "fp16", "gradient_checkpointing", "activation_checkpointing"),
    *("fsdp", "fsdp_config", "deepspeed", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
)


def shared_arguments(arguments: Mapping[str, object]) -> dict[str, str]:
    """Return those of a process's arguments on which all have to agree, as text."""
    return {name: repr(arguments[name]) for name in SHARED_ARGUMENTS if name in arguments}


def differences(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """Say which values differ between the processes.

    Args:
        by_rank: The values of each process, in the order of ranks.

    Returns:
        A line for each name: `max_steps` is 4 on rank 0, 6 on rank 1.
    """
    names = [name for name in by_rank[0] if any(values.get(name) != by_rank[0][name] for values in by_rank)]
    return [f"`{name}` is {_by_value([values.get(name, 'not set') for values in by_rank])}" for name in names]


def _by_value(values: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    named = ((value, "rank" if len(found) == 1 else "ranks", ", ".join(found)) for value, found in ranks.items())
    return "; ".join(f"{value} on {word} {found}" for value, word, found in named)


class TrainingMethods(WindowMethods, CheckpointMethods, DataloaderMethods, OptimizationMethods, UpstreamHooks):
    """The order of things in one call of `train()`."""

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Trial = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Fit once: load data, plan, let Lightning train, finish."""
        args = self.args if args is None else args
        self.accelerator.free_memory()
        if args.auto_find_batch_size and batch_size is not None:
            self._update_auto_batch_size(batch_size)
        self._check_evaluation_data()
        loader = self.get_train_dataloader()
        check_iterable("get_train_dataloader", loader, "a `DataLoader`")
        counts = self.run_counts(args, loader)  # an override may return a plain tuple
        if args.world_size > 1:
            self._refuse_differences({"updates that the training data give": repr(counts.max_updates)}, "training data")
        if self._created_lr_scheduler:  # its length may be another one this time
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
        with self._limited_time():
            run.flags = self._flag_agreement()
            self._fit(run, counts)
        return self._finalize_training(trial, counts.num_train_samples, run.start_time)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Trial,
    ) -> tuple[int, int]:
        """Set the state of a run, from a checkpoint where there is one.

        Returns:
            Whole epochs that the checkpoint has behind it, and micro-batches of the next; `resume_point` knows better.

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

    def _fit(self, run: TrainingRun, counts: RunCounts) -> None:
        assert run.windows is not None  # they are made before the fit
        plan = self._with_model_options(translate(self.args, counts, getattr(self.model, "config", None)))
        if run.start.is_finished:  # Lightning would not even begin with as many epochs done as there may be
            plan = dataclasses.replace(plan, max_epochs=-1)
        self._let_wrap_model(training=True)
        wrap_forward(self.model, plan.precision, self.args.device.type)
        self._is_prepared = True
        # of several processes one alone has the error: the next save, or the end, lets all of them know
        bridge = HFBridge(self, run, self._saver.background if self.args.world_size == 1 else None)
        module = self._make_module(plan)
        module.num_training_updates = counts.max_updates
        module.observer = bridge
        trainer = build_trainer(
            plan,
            bridge.lightning_callback_list(self._lightning_callbacks, self._callback_order),
            self._loggers(),
            self.args._launch,
            **self._lightning_options.of_trainers(),
        )
        leave_validation_to_flags(trainer)
        accept_modules_in_eval_mode(trainer)
        keep_step_signature(trainer)
        start_from(trainer, run.start.epoch, self.state.global_step)
        precision = trainer.precision_plugin
        self.accelerator.scaler = precision.scaler if isinstance(precision, ForwardPrecision) else None
        if isinstance(precision, ForwardPrecision) and precision.scaler is not None:
            self.accelerator.unscale = precision.unscale
        parameters, done = self.get_num_trainable_parameters(), self.state.global_step
        # Log the lines that transformers' Trainer begins a training with
        args, accumulation = self.args, self.args.gradient_accumulation_steps
        log_training(counts, args.per_device_train_batch_size, accumulation, parameters)
        if run.checkpoint is not None:
            log_resumption(self.state.global_step, counts.updates_per_epoch, accumulation, args.ignore_data_skip)
        for line in opening_lines(plan, counts, parameters, done, self.args.log_level in ("info", "debug")):
            logger.info(line)
        unused = unused_devices(plan, counts)
        if unused is not None:
            logger.warning("%s", unused)
        self.lightning_trainer = run.lightning_trainer = trainer
        run.module = module
        try:
            with self._watched_signals():
                run_fit(trainer, module, run.windows, NO_BATCHES)
        finally:
            module.leave_fit()
            run.module = run.lightning_trainer = None
            run.windows.close()
            self.model_wrapped = self._wrapped_between_runs()
            self.accelerator.leave_fit()
            self._watch_outputs(False)

    @contextlib.contextmanager
    def _limited_time(self) -> Iterator[None]:
        """Let a callback of this fit's own end it in time, where the options set a limit."""
        timer = self._lightning_options.timer()
        if timer is None:
            yield
            return
        self.add_callback(timer)
        try:
            yield
        finally:
            self.pop_callback(timer)

    def _watched_signals(self) -> contextlib.AbstractContextManager[None]:
        args = self.args
        return self.stop_signals.watched(args.enable_jit_checkpoint, slurm_job_id() is not None, args.ddp_timeout)

    def _compare_ranks(self, checkpoint: str | bool | None) -> None:
        """Refuse arguments that differ between the processes, before they wait for each other.

        Raises:
            ArgumentError: The message names arguments, values and ranks.
        """
        if self.args.world_size == 1:
            return
        wanted = os.path.basename(checkpoint) if isinstance(checkpoint, str) else checkpoint
        mine = {**self.args.to_dict(), "resume_from_checkpoint": wanted}
        self._refuse_differences(shared_arguments(mine) | {"resume_from_checkpoint": repr(wanted)}, "arguments")

    def _refuse_differences(self, mine: dict[str, str], what: str) -> None:
        found = differences(gather_objects(mine))
        if found:
            raise ArgumentError(
                f"The processes of this run have different {what}; they would wait for each other in vain.\n"
                + "\n".join(f"  {line}" for line in found)
                + "\n\nHint: give every process the same."
            )

    def _flag_agreement(self) -> FlagAgreement:
        """Return what makes flags the same on all processes, for the callbacks there are now."""
        args = self.args
        if args.world_size == 1:
            return NO_AGREEMENT
        callbacks, lightning = self.callback_handler.callbacks, bool(self._lightning_callbacks)
        sources = flag_sources(callbacks, lightning, self, args.gradient_accumulation_steps)
        return FlagAgreement(args.ddp_timeout, sources)

    def _with_model_options(self, plan: LightningPlan) -> LightningPlan:
        """Add what depends on the model: whether DDP has to look for parameters that a step does not use."""
        if plan.strategy != "ddp" or "find_unused_parameters" in plan.strategy_options:
            return plan
        unused = not (is_pretrained_model(self.model) and self._checkpoints_activations())
        return dataclasses.replace(plan, strategy_options={**plan.strategy_options, "find_unused_parameters": unused})

    def _checkpoints_activations(self) -> bool:
        known = getattr(self.model, "is_activation_checkpointing", None)
        if known is None:  # its older name, which warns in transformers 5
            known = getattr(self.model, "is_gradient_checkpointing", False)
        return bool(known or self.args.activation_checkpointing)

    def _take_up_optimizer(self) -> None:
        """Load optimizer states, and show callbacks what the run works with; Lightning has just had it made."""
        run = self._run
        assert run.lightning_trainer is not None and run.module is not None  # it is fitting
        limit_waiting(self.args.ddp_timeout)
        self.model_wrapped = self.compiled(wrapped_model(run.lightning_trainer.strategy, self.model))
        self._fit_model_state = model_state_of(run.lightning_trainer.strategy, self.model)
        self._resumer.restore_together(ResumeAt.OPTIMIZER_MADE, run.checkpoint)
        self._resumer.is_loading = False
        self.accelerator.take_up(self._fit_model_state, self.optimizer, self.lr_scheduler)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = run.loader

    def _finalize_training(self, trial: Trial, num_train_samples: float, start_time: float) -> TrainOutput:
        """Log the run's summary, load the best model, rotate, and tell that training is over."""
        agree(self._saver.background.settle())
        log_line("\n\nTraining completed. Do not forget to share your model on huggingface.co/models =)\n\n")
        self._pushes.push_what_was_written()
        if self.is_world_process_zero():
            forget_requeue(str(self.args.output_dir))
        train_loss = self._run.losses.mean(self.state.global_step)
        updates = self.state.global_step - self._run.updates_before  # durations are this call's alone
        samples = num_train_samples * updates / max(self.state.max_steps, 1)
        self.store_flos()
        nonfinite = self._run.losses.nonfinite_over_processes()
        metrics = run_summary(start_time, samples, updates, self.state.total_flos, train_loss, nonfinite)
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            with self._taking_whole_weights():
                self._load_best_model()
        if self.args.should_save:
            self._saver.rotate_at_end(self._get_output_dir(trial), best)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._finish_current_push()
        self._pushes.tell_what_has_not_arrived()
        self._remove_neftune_noise()
        self.is_in_train = False
        return TrainOutput(self.state.global_step, train_loss, metrics)
