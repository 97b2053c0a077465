"""`lightning_fit` builds the Lightning trainer and the module of a training, for as long as it lasts."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer

from hf_compat.callbacks.bridge import HFBridge
from hf_compat.callbacks.callback_set import leave_lightning_callbacks, prepare_lightning_callbacks, unfreeze_optimized
from hf_compat.checkpoint.convert import HFCheckpointIO
from hf_compat.checkpoint.model_state import make_model_state
from hf_compat.engine.internals import start_from
from hf_compat.engine.module import WindowModule
from hf_compat.engine.strategies import ForwardPrecision, HFMeshStrategy, wrap_forward, wrapped_model
from hf_compat.engine.window_trainer import WindowTrainer
from hf_compat.errors import CheckpointError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.optim.lr_schedulers import tell_of_other_optimizer
from hf_compat.optim.optimizers import check_optimized
from hf_compat.optim.prepared import unwrap_optimizer
from hf_compat.plan.translate import LightningPlan, RunCounts, with_counts
from hf_compat.runtime.collectives import failing_together, leave_at_exit, limit_waiting
from hf_compat.runtime.console import log_line
from hf_compat.runtime.inspection import uncompiled
from hf_compat.runtime.launch import slurm_job_id
from hf_compat.trainer_methods.trainer_base import TrainerBase
from hf_compat.training_run.resumer import ResumeAt
from hf_compat.training_run.run import TrainingRun

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def lightning_fit(host: TrainerBase, run: TrainingRun) -> Iterator[tuple[WindowTrainer, WindowModule]]:
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
        bridge = HFBridge(host, run, host._saver)
        module = make_module(host, plan)
        module.num_training_updates, module.observer = counts.max_updates, bridge
        trainer = make_lightning_trainer(host, plan, bridge)
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

    steps: TrainerBase

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
                check_optimized(unwrap_optimizer(host.optimizer), host.model, warns=is_first)
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


def make_module(host: TrainerBase, plan: LightningPlan) -> WindowModule:
    """Make the module that Lightning trains or evaluates."""
    return (MeshModule if plan.strategy in ("fsdp2", "tensor_parallel") else TrainerModule)(host.model, steps=host)


def make_lightning_trainer(host: TrainerBase, plan: LightningPlan, bridge: HFBridge) -> WindowTrainer:
    """Make the Lightning trainer of a plan, with the Trainer's callbacks, loggers and `lightning_*` options."""
    loggers = host._callbacks.loggers() if host._callbacks.lightning else []  # only Lightning callbacks log to them
    options = dict(host._lightning_options)
    for name, value in host._lightning_options.items():
        if value is None or name == "max_time":  # the limit of fits, by a callback
            del options[name]
    return WindowTrainer(plan, bridge.arranged, loggers, host.args._launch, **options)
