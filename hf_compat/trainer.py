"""`Trainer`: HF's signature and public methods; connects arguments → plan → engine → bridge. No arithmetic, no hooks.

The override points live in method groups by subject: `steps/` (steps, optimization, data) and `bridge/` (logs,
evaluation, checkpoints).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, cast

import hf_compat.engine  # noqa: F401 - loads Lightning

# isort: split
import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import nn

from hf_compat.callbacks.bridge import HFBridge
from hf_compat.callbacks.event_order import CallbackOrder, check_lightning_callback
from hf_compat.callbacks.lightning_states import give_back_states
from hf_compat.callbacks.loggers import LoggerCallback, reporting_callbacks
from hf_compat.callbacks.startup_log import show_logs, startup_lines
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.lightning_io import to_hf
from hf_compat.checkpoint.reading import read_torch_file
from hf_compat.checkpoint.run_state import DataCut, RunState, resume_point
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
from hf_compat.trainer_methods.base import Loader, Trial
from hf_compat.trainer_methods.callbacks import CallbackMethods
from hf_compat.trainer_methods.checkpoints import CheckpointMethods, read_state
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.evaluation import EvaluationMethods
from hf_compat.trainer_methods.hub import HubMethods
from hf_compat.trainer_methods.logs import LogMethods
from hf_compat.trainer_methods.model import ModelMethods
from hf_compat.trainer_methods.optimization import OptimizationMethods
from hf_compat.trainer_methods.steps import StepMethods
from hf_compat.training_run.loss_log import LossLog, LossLogState
from hf_compat.training_run.run import TrainingRun
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
                f"You have set `args.eval_strategy` to {IntervalStrategy(args.eval_strategy).value!r} but you didn't "
                "pass an `eval_dataset` to `Trainer`.\n\nHint: pass one, or set `eval_strategy='no'`."
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
        self._evaluation_averages = StepAverages()
        self.gather_function = self.accelerator.gather_for_metrics
        self.lightning_trainer: pl.Trainer | None = None
        # further settings of Lightning's trainer: a profiler, say
        self.lightning_options: dict[str, Any] = {}
        self._run = TrainingRun(losses=LossLog(self.args.device, 0, self.args.logging_nan_inf_filter))
        self._background = BackgroundWriter()
        self.stop_signals = StopSignals()

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
        trial: Trial = None,
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
            with self._resolved_checkpoint(resume_from_checkpoint or model_path) as checkpoint:
                self._prepare_model_for_training(checkpoint, trial)
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

    def _prepare_model_for_training(self, checkpoint: str | None, trial: Trial) -> None:
        """Make the model where `model_init` does, put it in its place, and load the checkpoint's weights."""
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

    @contextlib.contextmanager
    def _resolved_checkpoint(self, wanted: str | bool | None) -> Iterator[str | None]:
        """Give the folder to go on from; one that is made of a Lightning checkpoint is there while it is read from."""
        if isinstance(wanted, bool) or not wanted or not os.path.isfile(str(wanted)):
            yield self._resolve_checkpoint(wanted)
            return
        with tempfile.TemporaryDirectory(prefix="hf_compat_") as place:
            folder = os.path.join(place, "checkpoint")
            to_hf(read_torch_file(str(wanted)), folder)
            yield folder

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

    @property
    def _samples_per_micro_batch(self) -> int:
        """Samples of a micro-batch of all processes together."""
        return self._train_batch_size * self.args.world_size

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
        counts = self.set_initial_training_values(args, loader)
        self._init_training_state(counts, resume_from_checkpoint, trial)
        if self._created_lr_scheduler:  # its length may be another one this time
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._run = run = self._begin_run(loader, counts, resume_from_checkpoint)
        run.trial, run.ignore_keys_for_eval = trial, ignore_keys_for_eval
        self._fit(run, counts)
        return self._finalize_training(trial, counts.num_train_samples, run.start_time)

    def _begin_run(self, loader: Loader, counts: RunCounts, checkpoint: str | None) -> TrainingRun:
        """Say where a run goes on, and cut its data into updates from there."""
        args, updates_done = self.args, self.state.global_step
        run = TrainingRun(
            losses=LossLog(args.device, updates_done, args.logging_nan_inf_filter),
            counts=counts,
            loader=loader,
            checkpoint=checkpoint,
            updates_before=updates_done,
            tokens_before=self.state.num_input_tokens_seen,
        )
        if checkpoint is not None:
            ranks = (args.process_index, args.world_size)
            run.resumed = RunState.load(checkpoint, *ranks, ended_by_callback=self.state.was_leaving_epoch)
            run.start = resume_point(run.resumed, updates_done, self._data_cut(counts), args.ignore_data_skip)
            if run.resumed is not None and run.start.is_exact:
                run.losses.load_state_dict(cast(LossLogState, run.resumed.losses))
        run.windows = self._make_windows(run, counts)
        return run

    def _data_cut(self, counts: RunCounts) -> DataCut:
        return DataCut(
            counts=counts,
            window_size=self.args.gradient_accumulation_steps,
            world_size=self.args.world_size,
            samples_per_micro_batch=self._samples_per_micro_batch,
        )

    def _init_training_state(self, counts: RunCounts, checkpoint: str | None, trial: Trial) -> None:
        """Set the state of a run, from a checkpoint where there is one."""
        stateful = [c for c in [*self.callback_handler.callbacks, self.control] if is_exportable(c)]
        self.state = TrainerState(stateful_callbacks=stateful)
        self.state.train_batch_size = self._train_batch_size
        self.state.is_hyper_param_search = trial is not None
        self.state.compute_steps(self.args, counts.max_updates)
        if checkpoint is not None:
            intervals = (self.state.logging_steps, self.state.eval_steps, self.state.save_steps)
            self.state = read_state(checkpoint)
            self._compare_with_checkpoint(intervals)
            self._load_callback_state()
        self.state.init_training_references(self, counts.max_updates, counts.num_train_epochs, trial)

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

    def _make_windows(self, run: TrainingRun, counts: RunCounts) -> Windows:
        checkpoint = run.checkpoint
        # before 4.50 the method took no device
        return Windows(
            run.loader,
            read_window=lambda *parts: self.get_batch_samples(*fitting_arguments(self.get_batch_samples, parts)),
            window_size=self.args.gradient_accumulation_steps,
            counts=counts,
            device=self.args.device,
            start=run.start,
            load_folder_rng=None if checkpoint is None else lambda: self._load_rng_state(checkpoint),
        )

    def _fit(self, run: TrainingRun, counts: RunCounts) -> None:
        plan = self._with_model_options(translate(self.args, counts, getattr(self.model, "config", None)))
        if run.start.is_finished:  # Lightning would not even begin with as many epochs done as there may be
            plan = dataclasses.replace(plan, max_epochs=-1)
        wrap_forward(self.model, plan.precision, self.args.device.type)
        self._is_prepared = True
        bridge = HFBridge(self, run, self._background)
        module = self._make_module(plan)
        module.num_training_updates = counts.max_updates
        module.observer = bridge
        trainer = self._build_fitting_trainer(plan, bridge, run)
        for line in startup_lines(plan, counts, self.get_num_trainable_parameters(), self.state.global_step):
            logger.info(line)
        self.lightning_trainer = run.lightning_trainer = trainer
        run.module = module
        try:
            with self.stop_signals.watched(self.args.enable_jit_checkpoint, slurm_job_id() is not None):
                run_fit(trainer, module, run.windows, NO_BATCHES)
        finally:
            run.module = run.lightning_trainer = None
            self.accelerator.run_backward = None
            self.model_wrapped = self.model
            self._watch_outputs(False)

    def _build_fitting_trainer(self, plan: LightningPlan, bridge: HFBridge, run: TrainingRun) -> pl.Trainer:
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
        start_from(trainer, run.start.epoch, self.state.global_step)
        precision = trainer.precision_plugin
        self.accelerator.scaler = precision.scaler if isinstance(precision, ForwardPrecision) else None
        return trainer

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
        run = self._run
        assert run.lightning_trainer is not None and run.module is not None  # it is fitting
        self.model_wrapped = wrapped_model(run.lightning_trainer.strategy, self.model)
        self._fit_model_state = model_state_of(run.lightning_trainer.strategy, self.model)
        if run.checkpoint is not None:
            self._load_optimizer_and_scheduler(run.checkpoint)
            self._load_scaler(run.checkpoint)
        if run.resumed is not None:
            give_back_states(self._lightning_callbacks, run.resumed, run.lightning_trainer, run.module)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = run.loader

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Log the run's summary, load the best model, rotate, and tell that training is over."""
        self._background.wait()
        if self.is_world_process_zero():
            slurm.forget(str(self.args.output_dir))
        train_loss = self._run.losses.mean(self.state.global_step)
        updates = self.state.global_step - self._run.updates_before  # durations are this call's alone
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
