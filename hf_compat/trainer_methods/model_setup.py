"""Set up the Trainer's model: make, seed, place and load it."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from torch import nn

from hf_compat.engine.embedding_noise import EmbeddingNoise
from hf_compat.engine.module import WindowModule
from hf_compat.errors import ArgumentError, CheckpointError, warn_once
from hf_compat.hf.argument_values import checks_of
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.arguments_rules import choose_tf32
from hf_compat.hf.profiles import generation_beside
from hf_compat.hf.search import Trial
from hf_compat.interop.device_maps import check_placement, is_model_parallel
from hf_compat.interop.liger import apply_liger, check_liger
from hf_compat.interop.transformers_models import align_special_tokens, check_trainable
from hf_compat.runtime.collectives import failing_together
from hf_compat.runtime.inspection import number_of_arguments
from hf_compat.runtime.seeding import enable_full_determinism, set_seed
from hf_compat.runtime.shared_logger import SharedLogger
from hf_compat.trainer_methods.checkpoints import CheckpointMethods
from hf_compat.trainer_methods.model import ModelMethods
from hf_compat.training_run.resumer import ResumeAt, read_state

logger = SharedLogger(__name__, "transformers.trainer")


class ModelSetupMethods(ModelMethods, CheckpointMethods):
    """The steps between receiving a model and training it."""

    model_init: Callable[..., nn.Module] | None
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

    def _resolve_model(self, model: nn.Module | None) -> nn.Module:
        if model is None:
            if self.model_init is None:
                raise RuntimeError("`Trainer` requires either a `model` or `model_init` argument")
            model = self.call_model_init()
        elif self.model_init is not None:
            raise ArgumentError("`Trainer` requires either a `model` or `model_init` argument, but not both.")
        check_trainable(model)
        if self.args.use_liger_kernel:
            check_liger(model, self.args.liger_kernel_config)
        _check_lightning_module(model)
        return model

    def _set_model(self, model: nn.Module) -> None:
        self.model = self.model_wrapped = model
        spread = getattr(model, "hf_device_map", None) is not None
        wants = self.args.place_model_on_device
        casts_later = self.args.fp16_full_eval or self.args.bf16_full_eval
        check_placement(model, self.args.device, self.args.world_size)
        self.is_model_parallel = is_model_parallel(model, self.args.device)
        leaves_it = wants is None or (wants and generation_beside() == "4")
        self.place_model_on_device = (not spread and not casts_later) if leaves_it else bool(wants)
        if self.place_model_on_device:
            self._move_model_to_device(model, self.args.device)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move a model, unless `device_map` has placed it."""
        if getattr(model, "hf_device_map", None) is not None:
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

    def _init_model_again(self, trial: Trial) -> None:
        self._seed()
        self.model = self.model_wrapped = self.call_model_init(trial)
        self.optimizer = self.lr_scheduler = None
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self.args.device)

    def _prepare_model_for_training(self, checkpoint: str | None, trial: Trial) -> None:
        """Make the model if `model_init` does, place it, and load the checkpoint's weights."""
        if self.model_init is not None:
            self._init_model_again(trial)
        if self.args.use_liger_kernel:
            apply_liger(self.model, self.args.liger_kernel_config)
        is_spread = getattr(self.model, "hf_device_map", None) is not None
        if self.model_init is None and not self.place_model_on_device and not is_spread:
            self._move_model_to_device(self.model, self.args.device)
        self._enable_activation_checkpointing()
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
            with failing_together(CheckpointError):
                self._resumer.restore(ResumeAt.MODEL_READY, weights)
        if checkpoint is not None and self.args.auto_find_batch_size:
            self._train_batch_size = read_state(checkpoint).train_batch_size or self._train_batch_size

    def _remove_neftune_noise(self) -> None:
        """Remove the noise, if there is any."""
        if self.neftune_hook_handle is not None:
            self.neftune_hook_handle.remove()
            self.neftune_hook_handle = None


# Methods that Lightning calls of a LightningModule, and a Trainer does not.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "configure_model")


def _check_lightning_module(model: nn.Module) -> None:
    """Warn of a LightningModule's methods that are not called, as a Trainer trains it as a plain module.

    Raises:
        ArgumentError: It is an HFModule, which has its own arguments.
    """
    if not isinstance(model, pl.LightningModule):
        return
    if isinstance(model, WindowModule):
        raise ArgumentError("`model` is an HFModule.\n\nHint: pass its `model`, or fit it with a `lightning.Trainer`.")
    own = [name for name in _STEPS if getattr(type(model), name) is not getattr(pl.LightningModule, name)]
    if own:
        warn_once(
            f"`model` is a LightningModule, and its {', '.join(own)} are not called. The Trainer calls `forward`, "
            "which must return the loss. Fit it with a `lightning.Trainer`, or override the Trainer's methods."
        )
