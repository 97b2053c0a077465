"""Checks in a Trainer's constructor: arguments that contradict each other, the data or the model."""

from __future__ import annotations

import warnings

from torch import nn
from torch.utils.data import IterableDataset

from hf_compat.data.checks import check_dataset, check_length
from hf_compat.engine.torchmetrics_evaluation import check_metrics
from hf_compat.errors import ArgumentError, InertArgumentWarning
from hf_compat.hf.arguments_seq2seq import Seq2SeqTrainingArguments
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.hf.value_types import ANYTHING, NONE, TRUTH_VALUE, ValueType, either, read_options
from hf_compat.interop.upstream_log import log_line
from hf_compat.plan.argument_support import check_supported
from hf_compat.plan.optimization_checks import check_optimizer, check_schedule
from hf_compat.runtime.inspection import has_length, is_replaced
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.model_setup import ModelSetupMethods
from hf_compat.trainer_methods.optimization import OptimizationMethods
from hf_compat.trainer_methods.steps import StepMethods

# The keywords of `torch.utils.checkpoint.checkpoint`.
_RECOMPUTATION: dict[str, ValueType] = {
    **dict.fromkeys(("use_reentrant", "preserve_rng_state", "debug", "early_stop"), either((NONE, TRUTH_VALUE))),
    **dict.fromkeys(("context_fn", "determinism_check"), ANYTHING),
}


class ArgumentChecks(ModelSetupMethods, DataloaderMethods):
    """The constructor's checks, by subject."""

    def _validate_args(self) -> None:
        """Refuse arguments that contradict each other, the data or the model.

        Raises:
            ArgumentError: Strategies or data that contradict each other.
            RuntimeError: An optimizer passed twice, or for a model that does not exist yet.
            TypeError: A collator that is not callable.
        """
        check_metrics(self.compute_metrics, self.eval_dataset, self.args.batch_eval_metrics)
        self._check_strategies()
        if self.optimizer_cls_and_kwargs is not None and self.optimizer is not None:
            raise RuntimeError("Passing both `optimizers` and `optimizer_cls_and_kwargs` arguments is incompatible.")
        if self.model_init is not None and (self.optimizer is not None or self.lr_scheduler is not None):
            raise RuntimeError(
                "Passing a `model_init` is incompatible with providing the `optimizers` argument: they hold parameters "
                "of another model.\n\nHint: override `create_optimizer_and_scheduler` in a subclass."
            )

        self._check_optimization()
        # Transformers' models pass these options to torch's checkpoint, which would refuse them in a forward
        enable = getattr(self.model, "gradient_checkpointing_enable", None)
        options = self.args.activation_checkpointing_kwargs
        if (
            self.args.activation_checkpointing
            and isinstance(options, dict)
            and str(getattr(enable, "__module__", "")).startswith("transformers.")
        ):
            read_options("activation_checkpointing_kwargs` (`gradient_checkpointing_kwargs", _RECOMPUTATION, options)
        if not callable(self.data_collator):
            raise TypeError("The `data_collator` should be a simple callable (function, class with `__call__`).")
        own_loader = is_replaced(self, "get_train_dataloader", DataloaderMethods)
        if self.train_dataset is not None and not own_loader:
            check_length("train_dataset", self.train_dataset)
        if isinstance(self.train_dataset, IterableDataset):
            strategy = self.args.train_sampling_strategy
            log_line(f"The `train_sampling_strategy='{strategy}'` option is ignored when using an `IterableDataset`.")
        if self.train_dataset is not None and not has_length(self.train_dataset) and self.args.max_steps <= 0:
            if not own_loader:
                check_dataset("train_dataset", self.train_dataset)
            raise ArgumentError(
                "The train_dataset does not implement __len__, so the number of training steps cannot be inferred; "
                "max_steps has to be specified.\n\nHint: set `max_steps` to the number of updates to train."
            )
        asks = isinstance(self.args, Seq2SeqTrainingArguments) and self.args.predict_with_generate
        if asks and not is_replaced(self, "prediction_step", StepMethods):
            warnings.warn(
                f"`predict_with_generate=True` has no effect, as a {type(self).__name__} does not generate. Use a "
                "Seq2SeqTrainer, or override `prediction_step`.",
                InertArgumentWarning,
                stacklevel=3,
            )

    def _can_train(self) -> bool:
        """Whether there is training data, or a subclass's method that provides it."""
        own_loader = is_replaced(self, "get_train_dataloader", DataloaderMethods)
        return self.train_dataset is not None or own_loader

    def _check_strategies(self) -> None:
        args = self.args
        evaluates = args.eval_strategy != IntervalStrategy.NO
        own_loader = is_replaced(self, "get_eval_dataloader", DataloaderMethods)
        if evaluates and self.eval_dataset is None and not own_loader:
            raise ArgumentError(
                f"You have set `args.eval_strategy` to {IntervalStrategy(args.eval_strategy).value!r} but you didn't "
                "pass an `eval_dataset` to `Trainer`.\n\nHint: pass one, or set `eval_strategy='no'`."
            )
        if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
            raise ArgumentError(
                "`args.metric_for_best_model` must be provided when using 'best' save_strategy.\n\n"
                "Hint: set `metric_for_best_model='loss'`, say."
            )
        if args.save_strategy == SaveStrategy.BEST and not evaluates:
            raise ArgumentError(
                "`save_strategy='best'` saves after evaluations, but `eval_strategy='no'` makes none.\n\n"
                "Hint: set `eval_strategy` to 'steps' or 'epoch'."
            )

    def _check_optimization(self) -> None:
        """Refuse options that the arguments' optimizer or schedule does not accept."""
        if self.optimizer is not None or self._overrides("create_optimizer", "create_optimizer_and_scheduler"):
            return
        optimizer = None
        if self.optimizer_cls_and_kwargs is None and not self._overrides("get_optimizer_cls_and_kwargs"):
            optimizer = check_optimizer(self.args, self.model if isinstance(self.model, nn.Module) else None)
        if self.lr_scheduler is None and not self._overrides("create_scheduler"):
            check_schedule(self.args, optimizer)

    def _check_arguments_of_trial(self) -> None:
        """Refuse a trial's arguments that cannot be trained with, as the constructor does."""
        check_supported(self.args)
        self._check_optimization()

    def _overrides(self, *names: str) -> bool:
        return any(is_replaced(self, name, OptimizationMethods) for name in names)
