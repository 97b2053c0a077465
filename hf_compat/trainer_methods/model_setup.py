"""Make, seed, place and load the Trainer's model, and check the arguments of the constructor."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import IterableDataset

from hf_compat.data.collators import check_dataset, check_length
from hf_compat.engine.evaluation import check_metrics
from hf_compat.engine.model_hooks import EmbeddingNoise
from hf_compat.engine.module import WindowModule
from hf_compat.errors import ArgumentError, CheckpointError, UnsupportedArgument, warn_once
from hf_compat.hf.argument_values import checks_of
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.arguments_rules import choose_tf32, generation_beside
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.hf.search import Trial
from hf_compat.hf.value_types import ANYTHING, NONE, ValueType, either, read_options, truth_value
from hf_compat.interop.transformers_models import (
    align_special_tokens,
    apply_liger,
    check_liger,
    check_placement,
    check_trainable,
    is_model_parallel,
)
from hf_compat.plan.parallelism import check_shared_model, parallel_sizes, sequence_plan
from hf_compat.runtime.collectives import failing_together
from hf_compat.runtime.console import SharedLogger, log_line
from hf_compat.runtime.inspection import has_device_map, has_length, is_replaced, number_of_arguments, package_of
from hf_compat.runtime.launch import environment
from hf_compat.runtime.seeding import enable_full_determinism, set_seed
from hf_compat.trainer_methods.checkpoints import CheckpointMethods
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.training_run.resumer import ResumeAt, read_state

logger = SharedLogger(__name__, "transformers.trainer")

# Methods that Lightning calls of a LightningModule, and a Trainer does not.
_LIGHTNING_STEPS = (
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "configure_optimizers",
    "configure_model",
)
# The keywords of `torch.utils.checkpoint.checkpoint`.
_RECOMPUTATION: dict[str, ValueType] = {
    **dict.fromkeys(("use_reentrant", "preserve_rng_state", "debug", "early_stop"), either((NONE, truth_value))),
    **dict.fromkeys(("context_fn", "determinism_check"), ANYTHING),
}


class ModelSetupMethods(CheckpointMethods):
    """The steps between receiving a model and training it, and the constructor's checks."""

    place_model_on_device: bool
    is_model_parallel: bool
    # as upstream, the Trainer's own copy of the argument, which a script may set before `train()`
    neftune_noise_alpha: float | None
    neftune_hook_handle: EmbeddingNoise | None = None

    def _seed(self) -> None:
        if self.args.full_determinism:
            enable_full_determinism(self.args.seed)
        else:
            set_seed(self.args.seed)
        choose_tf32(self.args)

    def _take_model(self, model: nn.Module | None) -> None:
        """Take the model, or make it with `model_init`. Place it, unless the arguments or `device_map` keep it.

        Raises:
            RuntimeError: There is neither.
            ArgumentError: There are both, or the model cannot be trained.
        """
        if model is None:
            if self.model_init is None:
                raise RuntimeError("`Trainer` requires either a `model` or `model_init` argument")
            model = self.call_model_init()
        elif self.model_init is not None:
            raise ArgumentError("`Trainer` requires either a `model` or `model_init` argument, but not both.")
        if isinstance(model, nn.Module) and "_parameters" not in vars(model):
            raise ArgumentError(
                f"The constructor of {type(model).__name__} has not called that of `torch.nn.Module`.\n\n"
                "Hint: begin its `__init__` with `super().__init__()`."
            )
        check_trainable(model)
        if self.args.use_liger_kernel:
            check_liger(model, self.args.liger_kernel_config)
        if isinstance(model, WindowModule):
            raise ArgumentError(
                "`model` is an HFModule.\n\nHint: pass its `model`, or fit it with a `lightning.Trainer`."
            )
        if isinstance(model, pl.LightningModule):  # a Trainer trains it as a plain module
            kind, base = type(model), pl.LightningModule
            own = [name for name in _LIGHTNING_STEPS if getattr(kind, name) is not getattr(base, name)]
            if own:
                warn_once(
                    f"`model` is a LightningModule, and its {', '.join(own)} are not called. The Trainer calls "
                    "`forward`, which must return the loss. Fit it with a `lightning.Trainer`, or override the "
                    "Trainer's methods."
                )
        self.model = self.model_wrapped = model
        self._divide_data()
        spread = has_device_map(model)
        wants = self.args.place_model_on_device
        casts_later = self.args.fp16_full_eval or self.args.bf16_full_eval
        check_placement(model, self.args.device, self.args.world_size)
        self.is_model_parallel = is_model_parallel(model, self.args.device)
        leaves_it = wants is None or (wants and generation_beside() == "4")
        self.place_model_on_device = (not spread and not casts_later) if leaves_it else bool(wants)
        if self.place_model_on_device:
            self._move_model_to_device(model, self.args.device)

    def _divide_data(self) -> None:
        """Let processes that hold parts of one model read the same batches, and those of a sequence exchange them."""
        accelerator, split = self.accelerator, self.get_tp_size()
        parallel_sizes(self.args, environment, split)  # refuse others than the model's
        accelerator.rank_slice = accelerator.rank_slice.shared_by(split)
        accelerator.sequence = sequence_plan(self.args, environment)
        if accelerator.sequence is not None:
            check_shared_model(self.model, accelerator.sequence)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move a model, unless `device_map` has placed it."""
        if has_device_map(model):
            logger.warning(f"The model's `hf_device_map` has placed it, so it is not moved to {device}.")
            return
        model.to(device)

    def call_model_init(self, trial: Trial = None) -> nn.Module:
        """Make a model with `model_init`, which may accept the trial."""
        assert self.model_init is not None  # callers have checked it
        count = number_of_arguments(self.model_init)
        if count > 1:
            raise RuntimeError("model_init should have 0 or 1 argument.")
        model = self.model_init(trial) if count else self.model_init()
        if model is None:
            raise RuntimeError("model_init should not return None.")
        return model

    def _prepare_model_for_training(self, checkpoint: str | None, trial: Trial) -> None:
        """Make the model if `model_init` does, place it, and load the checkpoint's weights."""
        if self.model_init is not None:
            self._seed()
            self.model = self.model_wrapped = self.call_model_init(trial)
            self._divide_data()
            self.optimizer = self.lr_scheduler = self._own_optimizer = None
            if self.place_model_on_device:
                self._move_model_to_device(self.model, self.args.device)
        if self.args.use_liger_kernel:
            apply_liger(self.model, self.args.liger_kernel_config)
        if self.model_init is None and not self.place_model_on_device and not has_device_map(self.model):
            self._move_model_to_device(self.model, self.args.device)
        if self.args.activation_checkpointing:
            self._enable_activation_checkpointing()
        if self.processing_class is not None:
            align_special_tokens(self.model, self.processing_class)
        # Add NEFTune's noise to the embeddings until the end of this `train()`
        self._remove_neftune_noise()
        strength = self.neftune_noise_alpha
        if strength is not None:
            checks_of(TrainingArguments, TrainingArguments)["neftune_noise_alpha"].read(strength)
            self.neftune_hook_handle = EmbeddingNoise(self.accelerator.unwrap_model(self.model), strength)
        self._hp_search_setup(trial)  # after making the model, as upstream, so a trial's seed is for the next model
        weights = self._resumer.weights_alone if checkpoint is None else checkpoint
        if weights is not None:
            self._load_weights(weights)
        if checkpoint is not None and self.args.auto_find_batch_size:
            self._train_batch_size = read_state(checkpoint).train_batch_size or self._train_batch_size

    def _load_weights(self, checkpoint: str) -> None:
        """Load a checkpoint's weights, or leave it to the fit, which shards the model."""
        log_line(f"Loading model from {checkpoint}.")
        loads_now = [1]  # all processes do if one has to
        with failing_together(CheckpointError, numbers=loads_now):
            loads_now[0] = int(not self._can_load_shards_later(checkpoint))
        self._resumer.later_weights = None if loads_now == [1] else checkpoint
        if loads_now == [1]:
            with failing_together(CheckpointError), self._loading_whole_weights():
                self._resumer.restore(ResumeAt.MODEL_READY, checkpoint)

    def _remove_neftune_noise(self) -> None:
        """Remove the noise, if there is any."""
        if self.neftune_hook_handle is not None:
            self.neftune_hook_handle.remove()
            self.neftune_hook_handle = None

    def _validate_args(self) -> None:
        """Refuse arguments that contradict each other, the data or the model.

        Raises:
            ArgumentError: Strategies or data that contradict each other.
            RuntimeError: An optimizer passed twice, or for a model that does not exist yet.
            TypeError: A collator that is not callable.
        """
        args = self.args
        check_metrics(self.compute_metrics, self.eval_dataset, args.batch_eval_metrics)
        evaluates, saves_best = args.eval_strategy != IntervalStrategy.NO, args.save_strategy == SaveStrategy.BEST
        has_evaluation = self.eval_dataset is not None or is_replaced(self, "get_eval_dataloader", DataloaderMethods)
        if evaluates and not has_evaluation:
            raise ArgumentError(
                f"You have set `args.eval_strategy` to '{IntervalStrategy(args.eval_strategy).value}' but you didn't "
                "pass an `eval_dataset` to `Trainer`.\n\nHint: pass one, or set `eval_strategy='no'`."
            )
        if saves_best and args.metric_for_best_model is None:
            raise ArgumentError(
                "`args.metric_for_best_model` must be provided when using 'best' save_strategy.\n\n"
                "Hint: set `metric_for_best_model='loss'`, say."
            )
        if saves_best and not evaluates:
            raise ArgumentError(
                "`save_strategy='best'` saves after evaluations, but `eval_strategy='no'` makes none.\n\n"
                "Hint: set `eval_strategy` to 'steps' or 'epoch'."
            )
        if self.optimizer_cls_and_kwargs is not None and self.optimizer is not None:
            raise RuntimeError("Passing both `optimizers` and `optimizer_cls_and_kwargs` arguments is incompatible.")
        if self.model_init is not None and (self.optimizer is not None or self.lr_scheduler is not None):
            raise RuntimeError(
                "Passing a `model_init` is incompatible with providing the `optimizers` argument: they hold parameters "
                "of another model.\n\nHint: override `create_optimizer_and_scheduler` in a subclass."
            )
        if self.compute_loss_func is not None and self.accelerator.sequence is not None:
            raise UnsupportedArgument(
                "`compute_loss_func` is set, and processes share sequences (`sp_size`): the model computes the loss of "
                "each part, so transformers would not call it in training.\n\nHint: leave one of them out."
            )
        self._check_optimization()
        # Transformers' models pass these options to torch's checkpoint, which would refuse them in a forward
        options = args.activation_checkpointing_kwargs
        is_theirs = package_of(getattr(self.model, "gradient_checkpointing_enable", None)) == "transformers"
        if args.activation_checkpointing and isinstance(options, dict) and is_theirs:
            read_options("activation_checkpointing_kwargs` (`gradient_checkpointing_kwargs", _RECOMPUTATION, options)
        if not callable(self.data_collator):
            raise TypeError("The `data_collator` should be a simple callable (function, class with `__call__`).")
        self._check_training_data()

    def _check_training_data(self) -> None:
        if self.train_dataset is None:
            return
        own_loader = is_replaced(self, "get_train_dataloader", DataloaderMethods)
        if not own_loader:
            check_length("train_dataset", self.train_dataset)
        if isinstance(self.train_dataset, IterableDataset):
            strategy = self.args.train_sampling_strategy
            log_line(f"The `train_sampling_strategy='{strategy}'` option is ignored when using an `IterableDataset`.")
        if not has_length(self.train_dataset) and self.args.max_steps <= 0:
            if not own_loader:
                check_dataset("train_dataset", self.train_dataset)
            raise ArgumentError(
                "The train_dataset does not implement __len__, so the number of training steps cannot be inferred; "
                "max_steps has to be specified.\n\nHint: set `max_steps` to the number of updates to train."
            )
