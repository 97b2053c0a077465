"""`Trainer`: HF's signature and public methods; connects arguments → plan → engine → bridge. No arithmetic, no hooks.

The override points live in method groups by subject: `steps/` (steps, optimization, data) and `bridge/` (logs,
evaluation, checkpoints).
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import hf_compat.engine  # noqa: F401 - loads Lightning

# isort: split
import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import nn

from hf_compat.callbacks.bridge import HFBridge
from hf_compat.callbacks.event_order import CallbackOrder, check_lightning_callback
from hf_compat.callbacks.loggers import LoggerCallback, reporting_callbacks
from hf_compat.callbacks.startup_log import show_logs, startup_lines
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.lightning_io import to_hf
from hf_compat.checkpoint.reading import read_torch_file
from hf_compat.checkpoint.run_state import (
    fits,
    give_back_callbacks,
    give_back_losses,
    place_by_samples,
    read_run_state,
)
from hf_compat.data.collators import PaddingCollator, default_data_collator
from hf_compat.engine.build import NO_BATCHES, build_trainer, run_fit
from hf_compat.engine.internals import (
    accept_modules_in_eval_mode,
    keep_step_signature,
    leave_validation_to_flags,
    start_from,
)
from hf_compat.engine.module import WindowModule
from hf_compat.engine.precision import ForwardPrecision, wrap_forward
from hf_compat.engine.strategies import model_state_of, wrapped_model
from hf_compat.engine.torchmetrics_evaluation import check_metrics
from hf_compat.engine.windows import Windows
from hf_compat.errors import ArgumentError, CheckpointError, UnknownArgument
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.builtin_callbacks import DefaultFlowCallback, PrinterCallback, ProgressCallback
from hf_compat.hf.callbacks import CallbackHandler
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.hf.outputs import TrainOutput
from hf_compat.hf.state import TrainerControl, TrainerState, is_exportable
from hf_compat.interop.arguments import adopt_arguments
from hf_compat.interop.transformers_models import (
    align_special_tokens,
    check_trainable,
    is_pretrained_model,
    pads_itself,
)
from hf_compat.native.module import make_module
from hf_compat.plan.argument_support import check_supported
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.run_counts import RunCounts, make_run_counts
from hf_compat.plan.translate import translate
from hf_compat.runtime import slurm
from hf_compat.runtime.background import BackgroundWriter
from hf_compat.runtime.collectives import broadcast_object, start_processes
from hf_compat.runtime.inspection import (
    fitting_arguments,
    has_length,
    number_of_arguments,
)
from hf_compat.runtime.launch import slurm_job_id
from hf_compat.runtime.out_of_memory import run_with_fitting_batch_size
from hf_compat.runtime.seeding import enable_full_determinism, set_seed
from hf_compat.runtime.signals import StopSignals
from hf_compat.runtime.text import did_you_mean
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.trainer_methods.callbacks import CallbackMethods
from hf_compat.trainer_methods.checkpoints import CheckpointMethods, read_state
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.evaluation import EvaluationMethods
from hf_compat.trainer_methods.hub import HubMethods
from hf_compat.trainer_methods.logs import LogMethods
from hf_compat.trainer_methods.model import ModelMethods
from hf_compat.trainer_methods.optimization import OptimizationMethods
from hf_compat.trainer_methods.steps import StepMethods
from hf_compat.training_run.step_averages import StepAverages
from hf_compat.training_run.summary import run_summary

logger = logging.getLogger(__name__)


class Trainer(
    ModelMethods,
    StepMethods,
    OptimizationMethods,
    DataloaderMethods,
    EvaluationMethods,
    CheckpointMethods,
    LogMethods,
    CallbackMethods,
    HubMethods,
):
    """Train, evaluate and predict as `transformers.Trainer` does, on Lightning's engine.

    Args:
        model: Any `torch.nn.Module` whose forward returns a loss first (tuple, mapping or object with `.loss`).
        args: The training arguments.
        data_collator: From a list of samples to a batch; by default tensors are stacked, or padded by the processor.
        train_dataset: Samples to train on.
        eval_dataset: Samples to evaluate on, or a dict of such sets.
        processing_class: Tokenizer or processor; pads by default, and is saved with the model.
        model_init: Makes the model, anew at each `train()`; in place of `model`.
        compute_loss_func: From outputs, labels and `num_items_in_batch` to the loss.
        compute_metrics: From an `EvalPrediction` to a dict of metrics; or a torchmetrics `Metric` or `MetricCollection`
            (or a function that makes one), updated batch by batch; or a dict of these, by evaluation data set.
        callbacks: HF callbacks and Lightning callbacks, in any mix.
        optimizers: An optimizer and a schedule to use.
        optimizer_cls_and_kwargs: An optimizer's class and keywords, in place of `args.optim`.
        preprocess_logits_for_metrics: Applied to logits before they are kept.
        old_names: `tokenizer`, the name of `processing_class` before 4.46.

    Raises:
        UnknownArgument: A keyword that no release has had (a `TypeError`).
        ArgumentError: Arguments that contradict each other (a `ValueError`).
        UnsupportedArgument: Something that is not here yet.

    Mirrors:
        `transformers.Trainer`, 5.23.

    Differs:
        `lightning_trainer` is the Lightning trainer of the last call. Checkpoints are whole or not there.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Any] | dict[str, Any] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        **old_names: Any,
    ) -> None:
        processing_class = _accept_old_names(old_names, processing_class)
        self.args = TrainingArguments("tmp_trainer") if args is None else adopt_arguments(args)
        check_supported(self.args)
        start_processes(self.args)
        passive = self.args.log_level == "passive" and self.args.should_log
        show_logs(None if passive else self.args.get_process_log_level())
        self._seed()
        self.model_init = model_init
        self.accelerator = AcceleratorFacade(self.args)
        self._set_model(self._resolve_model(model))
        self._introspect()
        self.processing_class = processing_class
        pads = processing_class is not None and pads_itself(processing_class)
        self.data_collator = data_collator or (PaddingCollator(processing_class) if pads else default_data_collator)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._validate_args()
        self._set_running_attributes()
        self._set_callbacks(callbacks)
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)
        self._set_use_cache()

    def _seed(self) -> None:
        if self.args.full_determinism:
            enable_full_determinism(self.args.seed)
        else:
            set_seed(self.args.seed)
        if self.args.tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = self.args.tf32

    def _resolve_model(self, model: nn.Module | None) -> nn.Module:
        if model is None:
            if self.model_init is None:
                raise RuntimeError("`Trainer` requires either a `model` or `model_init` argument")
            model = self.call_model_init()
        elif self.model_init is not None:
            raise ArgumentError("`Trainer` requires either a `model` or `model_init` argument, but not both.")
        check_trainable(model)
        return model

    def _set_model(self, model: nn.Module) -> None:
        self.model = self.model_wrapped = model
        spread = getattr(model, "hf_device_map", None) is not None
        wants = self.args.place_model_on_device
        casts_later = self.args.fp16_full_eval or self.args.bf16_full_eval
        self.is_model_parallel = False
        self.place_model_on_device = (not spread and not casts_later) if wants is None else wants
        if self.place_model_on_device:
            self._move_model_to_device(model, self.args.device)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        model.to(device)

    def _validate_args(self) -> None:
        """Refuse arguments that contradict what the Trainer was given."""
        args = self.args
        check_metrics(self.compute_metrics, self.eval_dataset, args.batch_eval_metrics)
        if (
            args.eval_strategy != IntervalStrategy.NO
            and self.eval_dataset is None
            and self._uses_own("get_eval_dataloader")
        ):
            raise ArgumentError(
                f"You have set `args.eval_strategy` to {args.eval_strategy.value!r} but you didn't pass an "
                "`eval_dataset` to `Trainer`.\n\nHint: pass one, or set `eval_strategy='no'`."
            )
        if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
            raise ArgumentError(
                "`args.metric_for_best_model` must be provided when using 'best' save_strategy.\n\n"
                "Hint: set `metric_for_best_model='loss'`, say."
            )
        if args.save_strategy == SaveStrategy.BEST and args.eval_strategy == IntervalStrategy.NO:
            raise ArgumentError(
                "`save_strategy='best'` saves after evaluations, and `eval_strategy='no'` makes none.\n\n"
                "Hint: set `eval_strategy` to 'steps' or 'epoch'."
            )
        if self.optimizer_cls_and_kwargs is not None and self.optimizer is not None:
            raise RuntimeError("Passing both `optimizers` and `optimizer_cls_and_kwargs` arguments is incompatible.")
        if self.model_init is not None and (self.optimizer is not None or self.lr_scheduler is not None):
            raise RuntimeError(
                "Passing a `model_init` is incompatible with providing the `optimizers` argument: they hold parameters "
                "of another model.\n\nHint: override `create_optimizer_and_scheduler` in a subclass."
            )
        if not callable(self.data_collator):
            raise TypeError("The `data_collator` should be a simple callable (function, class with `__call__`).")
        if self.train_dataset is not None and not has_length(self.train_dataset) and args.max_steps <= 0:
            raise ArgumentError(
                "The train_dataset does not implement __len__, so the number of training steps cannot be inferred; "
                "max_steps has to be specified.\n\nHint: set `max_steps` to the number of updates to train."
            )

    def _uses_own(self, method: str) -> bool:
        """Say whether a method is this class's own, not a subclass's."""
        return getattr(type(self), method) is getattr(Trainer, method)

    def _set_running_attributes(self) -> None:
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )
        self.control = TrainerControl()
        self.is_in_train = False
        self.hp_name = None
        self.hp_search_backend = None
        self._trial = None
        self.current_flos = 0
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self.deepspeed = None
        self._signature_columns = None
        self._train_batch_size = self.args.train_batch_size
        self._created_lr_scheduler = False
        self._is_prepared = False
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = 0
        self._nonfinite_steps: Any = 0
        self._step_averages, self._evaluation_averages = StepAverages(), StepAverages()
        self._initial_num_input_tokens_seen = 0
        self.gather_function = self.accelerator.gather_for_metrics
        self.lightning_trainer: pl.Trainer | None = None
        # further settings of Lightning's trainer: a profiler, say
        self.lightning_options: dict[str, Any] = {}
        self._fit_module: WindowModule | None = None
        self._fit_windows: Windows | None = None
        self._run_state: dict[str, Any] | None = None
        self._fit_loader: Any = None
        self._background = BackgroundWriter()
        self.stop_signals = StopSignals()
        self._resume_checkpoint: str | None = None
        self._converted: tempfile.TemporaryDirectory[str] | None = None

    def _set_callbacks(self, callbacks: list[Any] | None) -> None:
        if callbacks is not None and not isinstance(callbacks, (list, tuple)):
            raise ArgumentError(f"`callbacks={callbacks!r}` is no list.\n\nHint: write `callbacks=[…]`.")
        self._lightning_callbacks: list[pl.Callback] = []
        self._callback_order = CallbackOrder()
        self.callback_handler = CallbackHandler(
            [], self.model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        self.callback_handler.requestable_kwargs["trainer"] = self
        given = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
        for callback in [DefaultFlowCallback, *_not_among(given, reporting_callbacks(self.args)), *given]:
            self.add_callback(callback)
        self.add_callback(PrinterCallback if self.args.disable_tqdm else ProgressCallback)
        stateful = [c for c in [*self.callback_handler.callbacks, self.control] if is_exportable(c)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks

    @property
    def tokenizer(self) -> Any:
        """The processing class, under the name it had before 4.46."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, processing_class: Any) -> None:
        self.processing_class = processing_class

    def add_callback(self, callback: Any) -> None:
        """Add an HF callback, a Lightning callback or a Lightning logger; a class is instantiated.

        Raises:
            CallbackError: It is none of these, or a Lightning callback that cannot work here.
        """
        candidate = callback() if isinstance(callback, type) else callback
        if isinstance(candidate, Logger):
            candidate = LoggerCallback(candidate)
        if isinstance(candidate, pl.Callback):
            check_lightning_callback(candidate, self.model)
            self._lightning_callbacks.append(candidate)
        else:
            self.callback_handler.add_callback(candidate)
        self._callback_order.add(candidate)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback and return it; None where it is not there."""
        for candidate in self._lightning_callbacks:
            if candidate is callback or (isinstance(callback, type) and isinstance(candidate, callback)):
                self._lightning_callbacks.remove(candidate)
                self._callback_order.remove(candidate)
                return candidate
        popped = self.callback_handler.pop_callback(callback)
        self._callback_order.remove(popped)
        return popped

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback."""
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(f"{callback!r} is not among the callbacks")

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a model with `model_init`, which takes nothing or the trial."""
        assert self.model_init is not None  # the callers looked
        count = number_of_arguments(self.model_init)
        if count > 1:
            raise RuntimeError("model_init should have 0 or 1 argument.")
        model = self.model_init(trial) if count else self.model_init()
        if model is None:
            raise RuntimeError("model_init should not return None.")
        return model

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        model_path: str | None = None,
    ) -> TrainOutput:
        """Train.

        Args:
            resume_from_checkpoint: A checkpoint folder; True takes the last one of the output folder.
            trial: The hyperparameter search's trial.
            ignore_keys_for_eval: Outputs that evaluations within training leave out.
            model_path: The name of `resume_from_checkpoint` before 4.3.

        Returns:
            Updates made, mean loss, and the run's metrics.

        Raises:
            CheckpointError: There is no such checkpoint.

        Mirrors:
            `transformers.Trainer.train`, 5.23.
        """
        self._background.wait()
        self.is_in_train = True
        try:
            checkpoint = self._resolve_checkpoint(resume_from_checkpoint or model_path)
            if self.model_init is not None:
                self._init_model_again(trial)
            elif not self.place_model_on_device and getattr(self.model, "hf_device_map", None) is None:
                self._move_model_to_device(self.model, self.args.device)
            self._enable_activation_checkpointing()
            align_special_tokens(self.model, self.processing_class)
            if checkpoint is not None:
                self._load_from_checkpoint(checkpoint)
                if self.args.auto_find_batch_size:
                    self._train_batch_size = read_state(checkpoint).train_batch_size or self._train_batch_size
            return run_with_fitting_batch_size(
                self._inner_training_loop,
                self._train_batch_size,
                self.args.auto_find_batch_size,
                args=self.args,
                resume_from_checkpoint=checkpoint,
                trial=trial,
                ignore_keys_for_eval=ignore_keys_for_eval,
            )
        finally:
            self.is_in_train = False
            if self._converted is not None:
                self._converted.cleanup()
                self._converted = None

    def _resolve_checkpoint(self, wanted: str | bool | None) -> str | None:
        if not wanted and slurm.is_requeued(str(self.args.output_dir)):
            logger.warning("SLURM has started this job again: training goes on from the newest checkpoint.")
            wanted = True
        if wanted is None or wanted is False:
            return None
        if wanted is True:
            folder = str(self.args.output_dir)
            last = broadcast_object(self._newest_checkpoint(folder) if self.is_world_process_zero() else None)
            if last is None:
                raise CheckpointError(
                    f"No valid checkpoint found in output directory ({folder}).\n\n"
                    "Hint: train without `resume_from_checkpoint`, or name a folder."
                )
            return last
        if os.path.isfile(str(wanted)):  # a Lightning checkpoint
            self._converted = tempfile.TemporaryDirectory(prefix="hf_compat_")  # kept while it is read from
            folder = os.path.join(self._converted.name, "checkpoint")
            to_hf(read_torch_file(str(wanted)), folder)
            return folder
        wrong = manifest.problems(str(wanted))
        if wrong:
            raise CheckpointError(
                f"Can't find a valid checkpoint at {wanted}: {'; '.join(wrong)}.\n\n"
                "Hint: `resume_from_checkpoint=True` takes the newest one that is whole."
            )
        return str(wanted)

    @staticmethod
    def _newest_checkpoint(folder: str) -> str | None:
        """Finish what a killed save has left, then return the newest whole checkpoint."""
        manifest.recover(folder)
        return manifest.get_last_checkpoint(folder) if os.path.isdir(folder) else None

    def _init_model_again(self, trial: Any) -> None:
        self._seed()
        self.model = self.model_wrapped = self.call_model_init(trial)
        self.optimizer = self.lr_scheduler = None
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self.args.device)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> RunCounts:
        """Work out the counts of a run from the arguments and the training loader."""
        micro_batches = len(dataloader) if has_length(dataloader) else None
        return make_run_counts(
            args,
            micro_batches=micro_batches,
            num_examples=self.num_examples(dataloader) if micro_batches else None,
            micro_batch_size=self._train_batch_size,
            world_size=args.world_size,
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of one update over all processes."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Fit once: load data, plan, let Lightning train, finish."""
        args = self.args if args is None else args
        if args.auto_find_batch_size and batch_size is not None:
            self._train_batch_size = batch_size
        loader = self.get_train_dataloader()
        schedule = self.set_initial_training_values(args, loader)
        first_epoch, skip = self._init_training_state(schedule, resume_from_checkpoint, trial)
        if self._created_lr_scheduler:  # its length may be another one this time
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._resume_checkpoint, self._fit_loader = resume_from_checkpoint, loader
        start_time = time.time()
        self._reset_counters()
        windows = self._make_windows(loader, schedule, first_epoch, skip)
        self._run_state = (
            None
            if resume_from_checkpoint is None
            else read_run_state(resume_from_checkpoint, args.process_index, args.world_size)
        )
        together = self._train_batch_size * args.world_size
        if self._run_state is not None and not fits(self._run_state, windows, args.world_size, together):
            if not args.ignore_data_skip:
                place_by_samples(self._run_state, self.state.global_step, windows, together)
                first_epoch = windows.next_epoch
        elif self._run_state is not None:
            give_back_losses(self, self._run_state)
            if not args.ignore_data_skip:
                windows.load_state_dict(self._run_state["windows"])
                first_epoch = windows.next_epoch
        finished = first_epoch >= schedule.num_train_epochs
        bridge = HFBridge(self, windows, first_epoch, start_time, ignore_keys_for_eval, trial, finished)
        self._fit(schedule, windows, bridge, first_epoch)
        return self._finalize_training(trial, schedule.num_train_samples, start_time)

    def _init_training_state(self, schedule: RunCounts, checkpoint: str | None, trial: Any) -> tuple[int, int]:
        """Set the state of a run, from a checkpoint where there is one.

        Returns:
            The epoch to begin with, and the micro-batches of it that are trained already.
        """
        stateful = [c for c in [*self.callback_handler.callbacks, self.control] if is_exportable(c)]
        self.state = TrainerState(stateful_callbacks=stateful)
        self.state.train_batch_size = self._train_batch_size
        self.state.is_hyper_param_search = trial is not None
        self.state.compute_steps(self.args, schedule.max_updates)
        epoch = skip = 0
        if checkpoint is not None:
            intervals = (self.state.logging_steps, self.state.eval_steps, self.state.save_steps)
            self.state = read_state(checkpoint)
            self._compare_with_checkpoint(intervals)
            self._load_callback_state()
            epoch, updates = divmod(self.state.global_step, schedule.updates_per_epoch)
            skip = 0 if self.args.ignore_data_skip else updates * self.args.gradient_accumulation_steps
        self.state.init_training_references(self, schedule.max_updates, schedule.num_train_epochs, trial)
        return epoch, skip

    def _compare_with_checkpoint(self, intervals: tuple[float, float, float]) -> None:
        saved = (self.state.logging_steps, self.state.eval_steps, self.state.save_steps)
        for name, now, before in zip(("logging", "eval", "save"), intervals, saved, strict=True):
            if now != before:
                logger.warning("`%s_steps` is %s now and %s in the checkpoint, which counts.", name, now, before)
        before_size, now_size = self.state.train_batch_size, self.args.per_device_train_batch_size
        if before_size not in (None, now_size):
            logger.warning("The micro-batch is %s now and was %s in the checkpoint.", now_size, before_size)
        best = self.state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            logger.warning("The best checkpoint %s of the resumed state does not exist anymore.", best)
            self.state.best_model_checkpoint = None

    def _reset_counters(self) -> None:
        self._tr_loss = torch.tensor(0.0, device=self.args.device)
        self._total_loss_scalar = 0.0
        self._nonfinite_steps, self._step_averages = 0, StepAverages()
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._session_first_update = self._initial_global_step = self._globalstep_last_logged = self.state.global_step

    def _make_windows(self, loader: Any, schedule: RunCounts, first_epoch: int, skip: int) -> Windows:
        checkpoint = self._resume_checkpoint
        # before 4.50 the method took no device
        return Windows(
            loader,
            read_window=lambda *parts: self.get_batch_samples(*fitting_arguments(self.get_batch_samples, parts)),
            window_size=self.args.gradient_accumulation_steps,
            windows_per_epoch=schedule.updates_per_epoch,
            micro_batches_per_epoch=schedule.micro_batches_per_epoch,
            device=self.args.device,
            first_epoch=first_epoch,
            skip_micro_batches=skip,
            after_skip=None if checkpoint is None else lambda: self._load_rng_state(checkpoint),
        )

    def _fit(self, schedule: RunCounts, windows: Windows, bridge: HFBridge, first_epoch: int) -> None:
        plan = self._with_model_options(translate(self.args, schedule, getattr(self.model, "config", None)))
        if bridge.is_finished:  # Lightning would not even begin with as many epochs done as there may be
            plan = dataclasses.replace(plan, max_epochs=-1)
        wrap_forward(self.model, plan.precision, self.args.device.type)
        self._is_prepared = True
        module = self._make_module(plan)
        module.num_training_updates = schedule.max_updates
        module.observer = bridge
        trainer = build_trainer(
            plan,
            bridge.lightning_callback_list(self._lightning_callbacks, self._callback_order),
            self._loggers(),
            self.args._launch,
            **self.lightning_options,
        )
        leave_validation_to_flags(trainer)
        accept_modules_in_eval_mode(trainer)
        keep_step_signature(trainer)
        start_from(trainer, first_epoch, self.state.global_step)
        precision = trainer.precision_plugin
        self.accelerator.scaler = precision.scaler if isinstance(precision, ForwardPrecision) else None
        for line in startup_lines(plan, schedule, self.get_num_trainable_parameters(), self.state.global_step):
            logger.info(line)
        self.lightning_trainer, self._fit_module, self._fit_windows = trainer, module, windows
        try:
            with self.stop_signals.watched(self.args.enable_jit_checkpoint, slurm_job_id() is not None):
                run_fit(trainer, module, windows, NO_BATCHES)
        finally:
            self._fit_module = self._fit_windows = None
            self.accelerator.run_backward = None
            self.model_wrapped = self.model
            self._watch_outputs(False)

    def _make_module(self, plan: LightningPlan) -> WindowModule:
        return make_module(plan, self.model, self)

    def _with_model_options(self, plan: LightningPlan) -> LightningPlan:
        """Add what depends on the model: whether DDP has to look for parameters that a step does not use."""
        if plan.strategy != "ddp" or "find_unused_parameters" in plan.strategy_options:
            return plan
        unused = not (is_pretrained_model(self.model) and self._checkpoints_activations())
        return dataclasses.replace(plan, strategy_options={**plan.strategy_options, "find_unused_parameters": unused})

    def _checkpoints_activations(self) -> bool:
        return bool(getattr(self.model, "is_gradient_checkpointing", False) or self.args.activation_checkpointing)

    def _take_up_optimizer(self) -> None:
        """Load optimizer states, and show callbacks what the run works with; Lightning has just had it made."""
        assert self.lightning_trainer is not None  # it is fitting
        self.model_wrapped = wrapped_model(self.lightning_trainer.strategy, self.model)
        self._fit_model_state = model_state_of(self.lightning_trainer.strategy, self.model)
        if self._resume_checkpoint is not None:
            self._load_optimizer_and_scheduler(self._resume_checkpoint)
            self._load_scaler(self._resume_checkpoint)
        if self._run_state is not None:
            assert self.lightning_trainer is not None and self._fit_module is not None  # it is fitting
            give_back_callbacks(self._lightning_callbacks, self._run_state, self.lightning_trainer, self._fit_module)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = self._fit_loader

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Log the run's summary, load the best model, rotate, and tell that training is over."""
        self._background.wait()
        if self.is_world_process_zero():
            slurm.forget(str(self.args.output_dir))
        self._total_loss_scalar += self._tr_loss.item()
        train_loss = self._total_loss_scalar / max(self.state.global_step - self._initial_global_step, 0.001)
        updates = self.state.global_step - self._session_first_update  # durations are this call's alone
        samples = num_train_samples * updates / max(self.state.max_steps, 1)
        self.store_flos()
        metrics = run_summary(start_time, samples, updates, self.state.total_flos, train_loss)
        self.log(metrics)
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            self._load_best_model()
        if self.args.should_save:
            self._rotate_checkpoints_at_end(self._get_output_dir(trial), best)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.is_in_train = False
        return TrainOutput(self.state.global_step, train_loss, metrics)


def _not_among(given: list[Any], added: list[Any]) -> list[Any]:
    """Return what is to be added, without the kinds that the user brings in a form of their own."""
    kinds = {type(callback) for callback in given} - {LoggerCallback}
    return [callback for callback in added if type(callback) not in kinds]


def _accept_old_names(old_names: dict[str, Any], processing_class: Any) -> Any:
    tokenizer = old_names.pop("tokenizer", None)
    if old_names:
        name = next(iter(old_names))
        known = [p for p in inspect.signature(Trainer.__init__).parameters if p not in ("self", "old_names")]
        hint = did_you_mean(name, [*known, "tokenizer"], f"the arguments are {', '.join(known)}.", cutoff=0.5)
        raise UnknownArgument(f"Trainer got an unknown argument `{name}={old_names[name]!r}`.\n\nHint: {hint}")
    if tokenizer is not None and processing_class is not None:
        raise ArgumentError("`tokenizer` is the old name of `processing_class`: pass one of them.")
    return processing_class if processing_class is not None else tokenizer
