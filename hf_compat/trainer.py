"""`Trainer`: HF's constructor, one training, and a search of many. `trainer_methods/` has the other methods by subject.

Within `lightning_fit` Lightning trains.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import hf_compat.engine  # noqa: F401 - loads Lightning

# isort: split
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import IterableDataset

from hf_compat.callbacks.bridge import close_bars
from hf_compat.callbacks.callback_set import CallbackSet, SavedCallbackStates
from hf_compat.callbacks.loggers import mark_as_failed
from hf_compat.data.collators import check_dataset, check_iterable
from hf_compat.data.types import Collator
from hf_compat.engine.model_hooks import watch_for_overflow
from hf_compat.engine.window_trainer import NO_BATCHES
from hf_compat.engine.windows import Windows
from hf_compat.errors import ArgumentError, CheckpointError, UnknownArgument
from hf_compat.hf.argument_values import AcceleratorConfig
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import DebugOption, IntervalStrategy
from hf_compat.hf.metrics import TrainOutput
from hf_compat.hf.search import BestRun, HPSearchBackend, Metrics, Objective, Space, Trial, default_compute_objective
from hf_compat.hf.state import TrainerState, export_states
from hf_compat.hub.pushes import Pushes
from hf_compat.interop.arguments import adopt_arguments
from hf_compat.interop.patching import refuse_edited_methods, tell_of_unread_globals
from hf_compat.interop.releases import of_transformers
from hf_compat.optim.optimizers import tell_of_later_parameters
from hf_compat.optim.prepared import unwrap_optimizer
from hf_compat.plan.argument_support import check_supported
from hf_compat.plan.deepspeed import uses_deepspeed
from hf_compat.plan.parallelism import parallel_sizes
from hf_compat.plan.translate import CurrentPlan, compilation_of
from hf_compat.runtime.collectives import failing_together, naming_absent_ranks, start_processes, telling_of_failure
from hf_compat.runtime.console import follow_level, log_line, show_logs
from hf_compat.runtime.devices import empty_device_cache
from hf_compat.runtime.inspection import accepts_positionally, delegated, has_length, is_replaced
from hf_compat.runtime.launch import environment
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.signals import REQUEUED_NAME, StopSignals, is_requeued
from hf_compat.runtime.text import brief, check_callables, did_you_mean, need, shown
from hf_compat.runtime.tracebacks import with_brief_traceback
from hf_compat.search.trials import check_search, checked_objective, chosen_backend, search_of, set_from_trial, space_of
from hf_compat.trainer_methods.base import AnyCallback, Dataset, MetricSource, ModelOutput, ProcessingClass
from hf_compat.trainer_methods.checkpoints import CheckpointMethods
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.evaluation import EvaluationMethods
from hf_compat.trainer_methods.evaluator import Evaluator
from hf_compat.trainer_methods.fit import lightning_fit
from hf_compat.trainer_methods.lightning_options import CheckedOptions, LightningOptions
from hf_compat.trainer_methods.memory import memory_tracker
from hf_compat.trainer_methods.model_setup import ModelSetupMethods
from hf_compat.trainer_methods.near_names import tell_of_callback_names, tell_of_flags, tell_of_trainer_names
from hf_compat.trainer_methods.run_parts import run_parts
from hf_compat.training_run.best import tell_of_best, tell_of_direction, tell_of_no_evaluation
from hf_compat.training_run.flags import FLAGS, FlagAgreement, FlagSources, flag_sources, has_own_methods
from hf_compat.training_run.loss_log import LossLog
from hf_compat.training_run.mirror import check_store
from hf_compat.training_run.output_folder import make_output_folder, saves_checkpoints
from hf_compat.training_run.resumer import ResumeAt, Resumer, wanted_checkpoint
from hf_compat.training_run.run import TrainingRun, run_summary
from hf_compat.training_run.same_on_ranks import StartFacts, compare_arguments, compare_updates
from hf_compat.training_run.saver import Saver

if TYPE_CHECKING:
    from hf_compat.tools.preflight.report import PreflightReport


def refuse_moved_places(
    trainer: Trainer, compute_loss_func: Callable[..., object] | None, compute_metrics: object
) -> None:
    """Refuse positional arguments at the places that they had before transformers 4.46.

    A subclass with a loss or a step of its own may call `compute_loss_func` in any way.

    Raises:
        ArgumentError: `compute_loss_func` takes no labels, or `compute_metrics` is a list.
    """
    moved = ""
    calls_it_itself = any(is_replaced(trainer, name, Trainer) for name in ("compute_loss", "training_step"))
    takes_labels = compute_loss_func is None or accepts_positionally(compute_loss_func, "labels", 1)
    if not (takes_labels or calls_it_itself):
        moved = f"`{shown('compute_loss_func', compute_loss_func)}` takes no labels"
    elif isinstance(compute_metrics, list | tuple):
        moved = f"`{shown('compute_metrics', compute_metrics)}` cannot be called"
    if moved:
        raise ArgumentError(
            f"{moved}.\n\nHint: a loss function is given the outputs, the labels and `num_items_in_batch`. "
            "Since transformers 4.46 `compute_loss_func` stands before `compute_metrics` and `callbacks`: name these "
            "arguments."
        )


class Trainer(ModelSetupMethods, EvaluationMethods):
    """Train, evaluate and predict as `transformers.Trainer` does, on Lightning's engine.

    Args:
        model: Any module whose forward returns the loss: as `.loss`, as the key `"loss"`, or first in a tuple.
        args: The training arguments.
        data_collator: Makes a batch from a list of samples. By default it stacks tensors, or the processor pads them.
        train_dataset: Samples to train on.
        eval_dataset: Samples to evaluate on, or a dict of such sets.
        processing_class: Tokenizer or processor. It pads by default, and is saved with the model.
        model_init: Makes the model, again for each `train()`. It replaces `model`.
        compute_loss_func: Computes the loss from outputs, labels and `num_items_in_batch`.
        compute_metrics: Computes a dict of metrics from an `EvalPrediction`. It may also be a torchmetrics `Metric` or
            `MetricCollection` (or a function that makes one), updated batch by batch, or a dict of these by data set.
        callbacks: HF callbacks and Lightning callbacks, in any mix.
        optimizers: An optimizer and a schedule to use.
        optimizer_cls_and_kwargs: An optimizer's class and keywords, instead of `args.optim`.
        preprocess_logits_for_metrics: Applied to logits before they are kept.
        lightning_options: Options of `lightning.Trainer` without a training argument. `LightningOptions` lists them.
            They can also be set later: `trainer.lightning_options["profiler"] = "simple"`.
        old_names: `tokenizer`, the name of `processing_class` before 4.46.

    Raises:
        UnknownArgument: A keyword that no release has (a `TypeError`).
        ArgumentError: Arguments that contradict each other (a `ValueError`).
        UnsupportedArgument: A feature that is not supported yet.
        OutputFolderError: `output_dir` cannot be written to, and the run would save there.
        HubError: `push_to_hub=True`, but the repository cannot be created.

    Mirrors:
        `transformers.Trainer`.

    Differs:
        `lightning_trainer` is the Lightning trainer of the last call. A checkpoint is either complete or absent.
    """

    _start: StartFacts  # of the last call of `train`
    _search_direction: str | list[str] | None = None  # of a search that is under way
    _fresh_states: SavedCallbackStates | None = None  # of Lightning callbacks, restored before every trial

    @with_brief_traceback
    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Collator | None = None,
        train_dataset: Dataset = None,
        eval_dataset: Dataset = None,
        processing_class: ProcessingClass = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: MetricSource = None,
        callbacks: Sequence[AnyCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),  # any optimizer and schedule
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[ModelOutput, ModelOutput], ModelOutput] | None = None,
        *,
        lightning_options: LightningOptions | None = None,
        **old_names: ProcessingClass,
    ) -> None:
        with telling_of_failure():
            refuse_edited_methods(type(self))
            tell_of_unread_globals()
            tokenizer = old_names.pop("tokenizer", None)
            if old_names:
                name = next(iter(old_names))
                known = [p for p in inspect.signature(Trainer.__init__).parameters if p not in ("self", "old_names")]
                hint = did_you_mean(name, [*known, "tokenizer"], f"the arguments are {', '.join(known)}.", cutoff=0.5)
                raise UnknownArgument(
                    f"Trainer got an unknown argument `{shown(name, old_names[name])}`.\n\nHint: {hint}"
                )
            if tokenizer is not None and processing_class is not None:
                raise ArgumentError(
                    "`tokenizer` is the old name of `processing_class`.\n\nHint: pass only one of them."
                )
            processing_class = processing_class if processing_class is not None else tokenizer
            check_callables(
                model_init=model_init,
                compute_loss_func=compute_loss_func,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            )
            refuse_moved_places(self, compute_loss_func, compute_metrics)
            if not isinstance(optimizers, Sequence) or len(optimizers) != 2:
                raise ArgumentError(
                    f"`{shown('optimizers', optimizers)}` must be a pair of an optimizer and a schedule.\n\n"
                    "Hint: `optimizers=(optimizer, None)` lets the arguments make the schedule."
                )
            self.lightning_options = {} if lightning_options is None else lightning_options
            if args is None:
                log_line("No `TrainingArguments` passed, using `output_dir=tmp_trainer`.")
                args = TrainingArguments("tmp_trainer")
            self._set_up_process(adopt_arguments(args))
            self.model_init = model_init
            self.model = model  # type: ignore[assignment]  # None until `model_init` is called, as upstream
            self._make_accelerator()
            self._memory_tracker = memory_tracker(self.args.skip_memory_metrics)
            self._memory_tracker.start()
            self._take_model(model)
            self._introspect()
            self._set_up_data(train_dataset, eval_dataset, data_collator, processing_class)
            self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
            self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
            self.optimizer, self.lr_scheduler = optimizers
            self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
            self._validate_args()
            check_store(self.args)
            if self.args.should_save:
                has_data = self.train_dataset is not None or is_replaced(
                    self, "get_train_dataloader", DataloaderMethods
                )
                make_output_folder(self.args, saves=has_data and saves_checkpoints(self.args))
            self._set_up_counters()
            self.state.is_local_process_zero = self.is_local_process_zero()
            self.state.is_world_process_zero = self.is_world_process_zero()
            self.deepspeed = None
            self.neftune_noise_alpha = self.args.neftune_noise_alpha
            self.lightning_trainer: pl.Trainer | None = None
            self.stop_signals = StopSignals()
            self._evaluator = Evaluator(self)
            overrides_saving = functools.partial(is_replaced, self, original=CheckpointMethods)
            self._saver = Saver(self, overrides_saving)
            self._resumer = Resumer(self, self._saver)
            self._pushes = Pushes(self, self._saver.check_folder)
            _ = self._saver.mirror.uploads  # an error if a package is missing
            # an empty run, until `train` begins one
            self._run = TrainingRun(losses=LossLog(self.args.device, 0, self.args.logging_nan_inf_filter))
            self._start = StartFacts()
            self._callbacks = CallbackSet(self)
            self._callbacks.fill(callbacks)
            if self.args.push_to_hub:
                with failing_together():
                    self.init_hf_repo()
            self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)
            self._set_use_cache()
            self._memory_tracker.stop_and_update_metrics()
            self._own_attributes = frozenset(("_own_attributes", *vars(self)))
            self._tell_of_names()

    def _set_up_process(self, args: TrainingArguments) -> None:
        """Set the arguments, then join the other ranks, set up logging and seed accordingly."""
        self.args = args
        self._plan = CurrentPlan()
        if uses_deepspeed(args, environment):  # its configuration depends on the model, which is not set yet
            check_supported(args)
            compilation_of(args)
            parallel_sizes(args, environment, None)
        else:
            self._plan.of(args)
        args._refuse_claims()
        start_processes(args)
        own_level = is_replaced(args, "get_process_log_level", TrainingArguments)
        passive = args.log_level == "passive" and args.should_log and not own_level
        level = None if passive else args.get_process_log_level()
        show_logs(level)
        follow_level(level)
        if args.max_steps > 0:
            log_line("max_steps is given, it will override any value given in num_train_epochs")
        self._seed()

    @property
    def lightning_options(self) -> CheckedOptions:
        """Options of `lightning.Trainer` beside the arguments, checked on assignment."""
        return self._lightning_options

    @lightning_options.setter
    def lightning_options(self, options: Mapping[str, object]) -> None:
        if not isinstance(options, Mapping):
            raise ArgumentError(
                f"`{shown('lightning_options', options)}` is not a mapping.\n\nHint: write {{'profiler': 'simple'}}."
            )
        self._lightning_options: CheckedOptions = CheckedOptions(options)

    tokenizer: ProcessingClass = delegated("processing_class")  # its name before 4.46

    def add_callback(self, callback: AnyCallback) -> None:
        """Add an HF callback, a Lightning callback or a Lightning logger. A class is instantiated.

        Raises:
            CallbackError: It is none of these, or is a Lightning callback that cannot work here.
        """
        self._callbacks.add(callback)

    def pop_callback(self, callback: AnyCallback) -> AnyCallback:
        """Remove a callback and return it. None if it is not among the callbacks."""
        return self._callbacks.remove_callback(callback)

    def remove_callback(self, callback: AnyCallback) -> None:
        """Remove a callback.

        Raises:
            ValueError: It is not among the callbacks.
        """
        if self._callbacks.remove_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(f"{brief(callback)} is not among the callbacks")

    @with_brief_traceback
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Trial = None,
        ignore_keys_for_eval: list[str] | None = None,
        model_path: str | None = None,
    ) -> TrainOutput:
        """Train.

        Args:
            resume_from_checkpoint: A checkpoint folder. True uses the last one in the output folder.
            trial: The hyperparameter search's trial.
            ignore_keys_for_eval: Outputs that evaluations within training leave out.
            model_path: The name of `resume_from_checkpoint` before 4.3.

        Returns:
            The number of updates, the mean loss, and the run's metrics.

        Raises:
            CheckpointError: The checkpoint does not exist, is damaged, or is of another model.
            OutputFolderError: Another run saves into the output folder.

        Mirrors:
            `transformers.Trainer.train`.
        """
        self._saver.background.wait()
        self._memory_tracker.start()
        wanted = wanted_checkpoint(model_path if resume_from_checkpoint is None else resume_from_checkpoint)
        is_of_search = trial is not None and self.hp_search_backend is not None
        unloadable: dict[str, str] = {}  # checkpoints that turned out to be damaged, with the reasons
        self.is_in_train = True
        try:
            if trial is None and wanted is None and self._callbacks.lightning:  # a trial never resumes from another's
                wanted = self._callbacks.checkpoint_of_exception()
            with naming_absent_ranks():
                self._refuse_late_overrides()
                self._tell_before_training()
                self._start, compare = self._start_facts(), functools.partial(compare_arguments, self.args, wanted)
                with self._saver.taking_folder(not is_of_search, self._start, compare):  # a trial has its own folder
                    while True:  # `trying` suppresses the error of a damaged checkpoint; next comes the one before
                        with self._resumer.attempting_resume(wanted, unloadable) as checkpoint:
                            self._prepare_model_for_training(checkpoint, trial)
                            watches = DebugOption.UNDERFLOW_OVERFLOW in self.args.debug
                            with watch_for_overflow(self.model) if watches else contextlib.nullcontext():
                                run: Callable[..., TrainOutput] = functools.partial(
                                    self._inner_training_loop,
                                    args=self.args,
                                    resume_from_checkpoint=checkpoint,
                                    trial=trial,
                                    ignore_keys_for_eval=ignore_keys_for_eval,
                                )
                                if self.args.auto_find_batch_size:  # searched by Accelerate, as upstream
                                    accelerate = need("accelerate.utils.memory", "accelerate", "`auto_find_batch_size`")
                                    run = accelerate.find_executable_batch_size(run, self._train_batch_size)
                                    return run()
                                return run(batch_size=self._train_batch_size)
        except BaseException as error:
            self._memory_tracker.peak_monitoring, self._memory_tracker.cur_stage = False, None  # ends its thread
            close_bars(self.callback_handler)
            if self.is_world_process_zero():
                mark_as_failed(self.callback_handler.callbacks, error)
            raise
        finally:
            self._remove_neftune_noise()
            self.is_in_train = False

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
            `transformers.Trainer._inner_training_loop`.
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
            `transformers.Trainer._init_training_state`.
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
            `transformers.Trainer.hyperparameter_search`. As there, the arguments keep the last trial's values,
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
            `transformers.Trainer._hp_search_setup`.
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
            `transformers.Trainer._report_to_hp_search`.
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
            `transformers.Trainer._tune_save_checkpoint`.
        """
        of_transformers("trainer", "Trainer", "A search on ray")._tune_save_checkpoint(self, checkpoint_dir)

    def _tell_of_names(self) -> None:
        """Warn on rank 0 of names of the user's that nearly are a Trainer's or a callback's."""
        if self.args.process_index == 0:
            tell_of_trainer_names(self, self._own_attributes)
            tell_of_callback_names(self._callbacks.order)

    def _tell_before_training(self) -> None:
        """Warn on rank 0 of what a training would get wrong without a word."""
        self._tell_of_names()
        if self.args.process_index == 0:
            self._plan.tell_of_inert(self.args, run_parts(self))
            tell_of_direction(self.args)

    def _explain_error(self, error: Exception) -> None:
        """Add notes to an error that leaves the first updates or an evaluation: what a preflight would have said."""
        from hf_compat.tools.preflight.diagnosis import tell  # a tool, so import it only here

        is_made = "callback_handler" in vars(self)  # a subclass may have forgotten our constructor
        tell(self, error, self.state.global_step - self._run.updates_before if is_made else None)

    def preflight(
        self, resume_from_checkpoint: str | bool | None = None, output_dir: str | None = None
    ) -> PreflightReport:
        """Check a run before it starts, on a copy of its state, and report everything that is wrong with it.

        It makes one update with the training data (collator, forward, backward, optimizer), saves into a temporary
        folder and loads from it. It evaluates one batch. It also checks the tracked metric, the free space on the disk
        and the keys of trackers. Then it restores everything, including random states, so a later `train()` gives
        the same numbers as without it.

        It calls no callbacks and logs nothing. With several ranks, all of them have to call it.

        Args:
            resume_from_checkpoint: The same argument as for `train`.
            output_dir: The folder that the run will save to, if it is not that of the arguments.

        Differs:
            `transformers.Trainer` has no such method.
        """
        from hf_compat.tools.preflight.checking import check  # a tool, so import it only here

        folder = str(self.args.output_dir) if output_dir is None else local_path("output_dir", output_dir)
        return check(self, resume_from_checkpoint, folder)
