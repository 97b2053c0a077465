"""One training, from its loader to its summary. Within `fitting` Lightning runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import os
from collections.abc import Iterator, Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer
from torch.utils.data import IterableDataset

from hf_compat.callbacks.bridge import HFBridge
from hf_compat.callbacks.callback_set import (
    leave_lightning_callbacks,
    prepare_lightning_callbacks,
    unfreeze_optimized,
)
from hf_compat.checkpoint.convert import HFCheckpointIO
from hf_compat.checkpoint.model_state import make_model_state
from hf_compat.data.collators import check_dataset, check_iterable
from hf_compat.engine.internals import start_from
from hf_compat.engine.module import WindowModule
from hf_compat.engine.strategies import (
    ForwardPrecision,
    HFMeshStrategy,
    uncompiled,
    wrap_forward,
    wrapped_model,
)
from hf_compat.engine.window_trainer import NO_BATCHES, WindowTrainer
from hf_compat.engine.windows import Windows
from hf_compat.errors import CheckpointError
from hf_compat.hf.argument_values import AcceleratorConfig
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.hf.metrics import TrainOutput
from hf_compat.hf.search import Trial
from hf_compat.hf.state import TrainerState, export_states
from hf_compat.optim.lr_schedulers import tell_of_other_optimizer
from hf_compat.optim.optimizers import check_optimized, tell_of_later_parameters
from hf_compat.optim.prepared import unprepared
from hf_compat.plan.translate import LightningPlan, RunCounts, with_counts
from hf_compat.runtime.collectives import failing_together, leave_at_exit, limit_waiting
from hf_compat.runtime.console import log_line
from hf_compat.runtime.inspection import has_length, is_replaced
from hf_compat.runtime.launch import empty_device_cache, slurm_job_id
from hf_compat.runtime.signals import REQUEUED_NAME, is_requeued
from hf_compat.runtime.text import brief
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.hub import HubMethods
from hf_compat.trainer_methods.model_setup import ModelSetupMethods
from hf_compat.trainer_methods.near_names import tell_of_flags
from hf_compat.training_run.best import tell_of_best, tell_of_no_evaluation
from hf_compat.training_run.flags import FLAGS, FlagAgreement, FlagSources, flag_sources, has_own_methods
from hf_compat.training_run.loss_log import LossLog
from hf_compat.training_run.resumer import ResumeAt
from hf_compat.training_run.run import TrainingRun, run_summary
from hf_compat.training_run.same_on_ranks import StartFacts, compare_updates

logger = logging.getLogger(__name__)


class TrainingMethods(ModelSetupMethods, HubMethods):
    """The sequence of one `train()` call."""

    _start: StartFacts  # of the last call of `train`
    _checks_optimizer = False  # whether the optimizer of the fit holds the model's own parameters, not shards

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
        with fitting(self, run) as (trainer, module):
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
            tell_of_later_parameters(unprepared(self.optimizer), self.model, self._run.frozen)

    def _make_module(self, plan: LightningPlan) -> WindowModule:
        return (MeshModule if plan.strategy in ("fsdp2", "tensor_parallel") else TrainerModule)(self.model, steps=self)

    def _make_lightning_trainer(self, plan: LightningPlan, bridge: HFBridge) -> WindowTrainer:
        loggers = self._callbacks.loggers() if self._callbacks.lightning else []  # only Lightning callbacks log to them
        options = dict(self._lightning_options)
        for name, value in self._lightning_options.items():
            if value is None or name == "max_time":  # the limit of fits, by a callback
                del options[name]
        return WindowTrainer(plan, bridge.arranged, loggers, self.args._launch, **options)


@contextlib.contextmanager
def fitting(host: TrainingMethods, run: TrainingRun) -> Iterator[tuple[WindowTrainer, WindowModule]]:
    """Plan a run, and build the Lightning trainer and the module that train it within the context.

    Afterwards the run holds neither. The Trainer's `lightning_trainer` stays readable.
    """
    args, counts, windows = host.args, run.counts, run.windows
    assert counts is not None and windows is not None  # they are made before the fit
    limit = host._lightning_options.get("max_time")
    timer = None if limit is None else Timer(limit)  # type: ignore[arg-type]  # checked when set
    if timer is not None:
        host.add_callback(timer)
    try:
        plan = with_counts(host._plan.of(args, host.model), args, counts)
        if run.start.is_finished:  # Lightning would skip the start if all epochs are done
            plan = dataclasses.replace(plan, max_epochs=-1)
        host._call_wrap_model(training=True)
        host.is_deepspeed_enabled = plan.strategy == "deepspeed"
        if not host.is_deepspeed_enabled:  # its engine holds the model in half precision, without autocast
            wrap_forward(host.model, plan.precision, args.device.type)
        # the fit compiles the model, and the trainer of earlier evaluations may hold another trial's
        host._evaluator.is_prepared, host._evaluator.kept = True, None
        bridge = HFBridge(host, run, host._saver)
        module = host._make_module(plan)
        module.num_training_updates, module.observer = counts.max_updates, bridge
        trainer = host._make_lightning_trainer(plan, bridge)
        done = host.state.global_step
        start_from(trainer, run.start.epoch, done, windows.updates_to_skip)
        precision, host.accelerator.scaler = trainer.precision_plugin, None
        if isinstance(precision, ForwardPrecision) and precision.scaler is not None:
            host.accelerator.scaler, host.accelerator.unscale = precision.scaler, precision.unscale
        log_start(plan, counts, args, host.get_num_trainable_parameters(), done, is_resumed=run.checkpoint is not None)
        host.lightning_trainer, run.lightning_trainer, run.module = trainer, trainer, module
        try:
            of_slurm = slurm_job_id() is not None
            with host.stop_signals.watched(args.enable_jit_checkpoint, of_slurm, args.ddp_timeout):
                yield trainer, module
        finally:
            module.leave_fit()
            run.module = run.lightning_trainer = None
            windows.close()
            held = host._compiled_model
            host.model_wrapped = host.model if held is None or uncompiled(held) is not host.model else held
            host.accelerator.run_backward = host.accelerator.unscale = None
            host.accelerator.sync_gradients = True
            bridge.keep_requested_kwargs(False)
    finally:
        if timer is not None:
            host.pop_callback(timer)


def log_start(
    plan: LightningPlan,
    counts: RunCounts,
    args: TrainingArguments,
    parameters: int,
    updates_done: int,
    is_resumed: bool,
) -> None:
    """Log the lines with which transformers' Trainer starts a training, and one of Lightning's trainer.

    The arguments' log level decides whether transformers' lines are shown, too. Warn if one process trains on one of
    several GPUs, as transformers would use larger updates.
    """
    accumulation, samples = args.gradient_accumulation_steps, counts.total_train_batch_size
    lines = [
        "***** Running training *****",
        f"  Num examples = {counts.num_examples:,}",
        f"  Num Epochs = {counts.num_train_epochs:,}",
        f"  Num update steps per epoch = {counts.updates_per_epoch:,}",
        f"  Instantaneous batch size per device = {args.per_device_train_batch_size:,}",
        f"  Total train batch size (w. parallel, distributed & accumulation) = {samples:,}",
        f"  Gradient Accumulation steps = {accumulation}",
        f"  Total optimization steps = {counts.max_updates:,}",
        f"  Number of trainable parameters = {parameters:,}",
    ]
    if is_resumed:
        epochs, updates = divmod(updates_done, counts.updates_per_epoch)
        lines.append(f"  Resuming training from checkpoint with epoch {epochs} and global step {updates_done}")
        if not args.ignore_data_skip:
            lines.append(
                f"  Fast-forwarding the dataloader past {epochs} epochs and {updates * accumulation} batches to resume "
                "from the exact training state."
            )
    for line in lines:
        log_line(line, logger if args.log_level in ("info", "debug") else None)
    resumed = f", from update {updates_done:,} on" if updates_done else ""
    processes = f" in {plan.world_size} processes ({plan.strategy})" if plan.world_size > 1 else ""
    logger.info(
        f"Training on Lightning: {parameters:,} parameters, {counts.max_updates:,} updates of {samples} "
        f"samples{resumed}, on {plan.device}{processes}, {plan.precision}"
    )
    devices = torch.cuda.device_count() if plan.world_size == 1 and plan.device.startswith("cuda") else 1
    if devices != 1:
        logger.warning(
            f"Training uses one of {devices} GPUs, with {samples} samples an update. transformers would use all in one "
            f"process (DataParallel), with {samples * devices}. "
            "`hf-compat run script.py …` or torchrun starts a process on each."
        )


class TrainerModule(WindowModule):
    """The module of our Trainer. Its steps set the model's mode themselves."""

    steps: TrainingMethods

    def configure_callbacks(self) -> Sequence[pl.Callback] | pl.Callback:
        """Prepare for Lightning's own callbacks, before Lightning checks them."""
        if self.steps._callbacks.lightning:
            prepare_lightning_callbacks(self.trainer, self, self.model)
        return super().configure_callbacks()

    def setup(self, stage: str) -> None:
        """Enable HF folders as checkpoints, and restore Lightning's callbacks once all are set up."""
        if self.trainer.world_size > 1:
            leave_at_exit()
        if stage == "fit":  # an evaluation reads and writes no checkpoint
            strategy = self.trainer.strategy
            strategy.checkpoint_io = HFCheckpointIO(strategy.checkpoint_io)
            with failing_together(CheckpointError, self.steps._resumer.is_loading):
                self.steps._resumer.restore(ResumeAt.CALLBACKS_SET_UP, self.steps._run.checkpoint)

    def teardown(self, stage: str) -> None:
        """Leave the user's callbacks as they were."""
        leave_lightning_callbacks(self.trainer)

    def on_fit_start(self) -> None:
        """Load the optimizer's state, and give the Trainer and its callbacks the optimizer that the fit has made."""
        host, run, strategy = self.steps, self.steps._run, self.trainer.strategy
        # Lightning would leave before `on_train_start`, which obeys it
        run.stops_at_start, self.trainer.should_stop = self.trainer.should_stop, False
        if self.trainer.world_size > 1:
            limit_waiting(host.args.ddp_timeout)
        host.model_wrapped = wrapped_model(strategy, host.model)
        is_spread, shards = isinstance(strategy, HFMeshStrategy), getattr(strategy, "writes_shards", False)
        host._fit_model_state = make_model_state(host.model, host.model_wrapped, shards)
        with failing_together(CheckpointError, host._resumer.is_loading):
            host._resumer.restore(ResumeAt.OPTIMIZER_MADE, run.checkpoint)
        host._resumer.is_loading = False
        host._checks_optimizer = not is_spread and not host.is_deepspeed_enabled
        if host._checks_optimizer:
            is_first = self.trainer.global_rank == 0
            if host._optimizer_made_of is not host.model or host.optimizer is not host._own_optimizer:
                check_optimized(unprepared(host.optimizer), host.model, warns=is_first)
            if not host._created_lr_scheduler and is_first:
                tell_of_other_optimizer(host.lr_scheduler, host.optimizer)
            if run.flag_agreement.sources.in_updates:
                run.frozen = [one for one in host._tree.parameters(host.model) if not one.requires_grad]
        host._optimizer_made_of = None
        host.optimizer = host._own_optimizer = host.accelerator.take_up(host._fit_model_state, host.optimizer)
        handler = host.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = host.model, host.optimizer, host.lr_scheduler
        handler.train_dataloader = run.loader
        if host._callbacks.lightning:
            unfreeze_optimized(self.trainer)  # the parameters that a resumed callback has added to the optimizer
        super().on_fit_start()

    def on_validation_model_train(self) -> None:
        """Stay in eval mode, as values logged in eval mode belong to the evaluation."""

    on_test_model_train = on_validation_model_train


class MeshModule(TrainerModule):
    """The same for a model that processes share. FSDP 2 shards it before its optimizer is made."""

    def configure_model(self) -> None:
        """Shard the model if the strategy does, and load the parts of a checkpoint's weights."""
        assert isinstance(self.trainer.strategy, HFMeshStrategy)  # the plan has chosen it
        self.trainer.strategy.shard(self.model)
        resumer = self.steps._resumer
        folder, resumer.later_weights = resumer.later_weights, None
        if folder is not None:
            with failing_together(CheckpointError):
                resumer.restore(ResumeAt.MODEL_READY, folder)
