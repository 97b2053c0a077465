"""`Fit`: one fit of a Trainer, from its plan to the end of `lightning.Trainer.fit`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Protocol

import lightning.pytorch as pl
import torch
from torch import nn

from hf_compat.callbacks.bridge import BridgedTrainer, HFBridge
from hf_compat.callbacks.startup_log import opening_lines, unused_devices
from hf_compat.checkpoint.model_state import ModelState
from hf_compat.engine.internals import start_from
from hf_compat.engine.module import WindowModule
from hf_compat.engine.precision import ForwardPrecision, wrap_forward
from hf_compat.engine.strategies import model_state_of, wrapped_model
from hf_compat.engine.window_trainer import NO_BATCHES, WindowTrainer
from hf_compat.interop.transformers_models import is_pretrained_model
from hf_compat.interop.upstream_log import log_resumption, log_training
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.run_counts import RunCounts
from hf_compat.plan.translate import CurrentPlan, with_counts
from hf_compat.runtime.collectives import limit_waiting
from hf_compat.runtime.launch import slurm_job_id
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.trainer_methods.evaluator import Evaluator
from hf_compat.trainer_methods.lightning_options import CheckedOptions
from hf_compat.training_run.flags import NO_AGREEMENT, FlagAgreement, flag_sources
from hf_compat.training_run.resumer import ResumeAt
from hf_compat.training_run.run import TrainingRun

logger = logging.getLogger(__name__)


class FitHost(BridgedTrainer, Protocol):
    """What a `Fit` needs of its Trainer besides `BridgedTrainer`. Subclasses may override the methods."""

    is_deepspeed_enabled: bool
    model_wrapped: nn.Module
    accelerator: AcceleratorFacade
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: object
    lightning_trainer: pl.Trainer | None
    _evaluator: Evaluator
    _fit_model_state: ModelState | None
    _lightning_options: CheckedOptions
    _plan: CurrentPlan

    def add_callback(self, callback: pl.Callback) -> None: ...

    def pop_callback(self, callback: pl.Callback) -> object: ...

    def get_num_trainable_parameters(self) -> int: ...

    def compiled(self, model: nn.Module) -> nn.Module: ...

    def _call_wrap_model(self, training: bool) -> None: ...

    def _make_module(self, plan: LightningPlan) -> WindowModule: ...

    def _wrapped_between_runs(self) -> nn.Module: ...


class Fit:
    """Trains a run with Lightning: arguments → plan → module → `lightning.Trainer.fit`.

    Args:
        trainer: The Trainer. It keeps the Lightning trainer and the model's state in the strategy's wrapper.
        run: The run, with its loader and windows.
        counts: The run's updates, epochs and samples.
    """

    def __init__(self, trainer: FitHost, run: TrainingRun, counts: RunCounts) -> None:
        self._trainer, self._run, self._counts = trainer, run, counts

    def run(self) -> None:
        """Plan, build and train. Afterwards the Trainer holds no part of the fit."""
        host, run = self._trainer, self._run
        assert run.windows is not None  # they are made before the fit
        with self._time_limit():
            run.flags = self._flag_agreement()
            plan = self._plan()
            host._call_wrap_model(training=True)
            host.is_deepspeed_enabled = plan.strategy == "deepspeed"
            if not host.is_deepspeed_enabled:  # its engine holds the model in half precision, without autocast
                wrap_forward(host.model, plan.precision, host.args.device.type)
            host._evaluator.begin_fit()
            # with several ranks, one rank's error is raised on all at the next save or at the end
            writer = host._saver.background if host.args.world_size == 1 else None
            bridge = HFBridge(host, run, writer, self.on_optimizer_made)
            module = host._make_module(plan)
            module.num_training_updates = self._counts.max_updates
            module.observer = bridge
            trainer = self._build(plan, bridge)
            self._log_start(plan)
            host.lightning_trainer = run.lightning_trainer = trainer
            run.module = module
            try:
                args = host.args
                is_requeued = slurm_job_id() is not None
                with host.stop_signals.watched(args.enable_jit_checkpoint, is_requeued, args.ddp_timeout):
                    trainer.run_command(trainer.fit, module, train_dataloaders=run.windows, val_dataloaders=NO_BATCHES)
            finally:
                self._clean_up(module)

    @contextlib.contextmanager
    def _time_limit(self) -> Iterator[None]:
        """Add a callback that ends this fit in time, if the options set a limit."""
        timer = self._trainer._lightning_options.timer()
        if timer is None:
            yield
            return
        self._trainer.add_callback(timer)
        try:
            yield
        finally:
            self._trainer.pop_callback(timer)

    def _flag_agreement(self) -> FlagAgreement:
        """Return the synchronization of flags between ranks for the current callbacks."""
        host, args = self._trainer, self._trainer.args
        if args.world_size == 1:
            return NO_AGREEMENT
        callbacks, lightning = host.callback_handler.callbacks, bool(host._callbacks.lightning)
        return FlagAgreement(
            args.ddp_timeout, flag_sources(callbacks, lightning, host, args.gradient_accumulation_steps)
        )

    def _plan(self) -> LightningPlan:
        """Translate the arguments, and add settings that depend on the model and on the start of the run."""
        host = self._trainer
        plan = with_counts(host._plan.of(host.args, getattr(host.model, "config", None)), host.args, self._counts)
        if plan.strategy == "ddp" and "find_unused_parameters" not in plan.strategy_options:
            recomputes = host.args.activation_checkpointing or recomputes_activations(host.model)
            unused = not (is_pretrained_model(host.model) and recomputes)
            options = {**plan.strategy_options, "find_unused_parameters": unused}
            plan = dataclasses.replace(plan, strategy_options=options)
        if self._run.start.is_finished:  # Lightning would skip the start if all epochs are done
            plan = dataclasses.replace(plan, max_epochs=-1)
        return plan

    def _build(self, plan: LightningPlan, bridge: HFBridge) -> WindowTrainer:
        host = self._trainer
        callbacks, options = host._callbacks, host._lightning_options.of_trainers()
        trainer = WindowTrainer(
            plan,
            bridge.lightning_callback_list(callbacks.lightning, callbacks.order),
            callbacks.loggers(),
            host.args._launch,
            **options,
        )
        start_from(trainer, self._run.start.epoch, host.state.global_step)
        precision = trainer.precision_plugin
        host.accelerator.scaler = precision.scaler if isinstance(precision, ForwardPrecision) else None
        if isinstance(precision, ForwardPrecision) and precision.scaler is not None:
            host.accelerator.unscale = precision.unscale
        return trainer

    def _log_start(self, plan: LightningPlan) -> None:
        """Log the lines with which transformers' Trainer starts a training, and the settings of Lightning's trainer."""
        host, counts, args = self._trainer, self._counts, self._trainer.args
        parameters, done = host.get_num_trainable_parameters(), host.state.global_step
        accumulation = args.gradient_accumulation_steps
        detailed = logger if args.log_level in ("info", "debug") else None
        log_training(counts, args.per_device_train_batch_size, accumulation, parameters, detailed)
        if self._run.checkpoint is not None:
            log_resumption(done, counts.updates_per_epoch, accumulation, args.ignore_data_skip, detailed)
        for line in opening_lines(plan, counts, parameters, done, in_detail=detailed is not None):
            logger.info(line)
        unused = unused_devices(plan, counts)
        if unused is not None:
            logger.warning("%s", unused)

    def on_optimizer_made(self) -> None:
        """Load optimizer states and update the callbacks' references, once Lightning has made the optimizer."""
        host, run = self._trainer, self._run
        assert run.lightning_trainer is not None and run.module is not None  # set before the fit
        limit_waiting(host.args.ddp_timeout)
        strategy = run.lightning_trainer.strategy
        host.model_wrapped = host.compiled(wrapped_model(strategy, host.model))
        host._fit_model_state = model_state_of(strategy, host.model)
        host._resumer.restore_together(ResumeAt.OPTIMIZER_MADE, run.checkpoint)
        host._resumer.is_loading = False
        host.accelerator.take_up(host._fit_model_state, host.optimizer, host.lr_scheduler)
        handler = host.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = host.model, host.optimizer, host.lr_scheduler
        handler.train_dataloader = run.loader

    def _clean_up(self, module: WindowModule) -> None:
        host, run = self._trainer, self._run
        assert run.windows is not None  # `run` has checked it
        module.leave_fit()
        run.module = run.lightning_trainer = None
        run.windows.close()
        host.model_wrapped = host._wrapped_between_runs()
        host.accelerator.leave_fit()
        host._callbacks.watch_outputs(False)


def recomputes_activations(model: nn.Module) -> bool:
    """Whether a model of transformers recomputes activations in the backward pass."""
    known = getattr(model, "is_activation_checkpointing", None)
    if known is None:  # its older name, which warns in transformers 5
        known = getattr(model, "is_gradient_checkpointing", False)
    return bool(known)
