"""The steps of a native `HFModule`: HF's override points without a Trainer around them."""

from __future__ import annotations

import copy
from dataclasses import fields

import torch
from torch import nn

from hf_compat.data.types import Collator
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.arguments_seq2seq import Seq2SeqTrainingArguments
from hf_compat.interop.arguments import adopt_arguments
from hf_compat.optim.stepping import stepping_of
from hf_compat.plan.argument_support import default_of
from hf_compat.runtime.launch import Launch
from hf_compat.runtime.seeding import enable_full_determinism, seed_of_lightning, set_seed
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.trainer_methods.base import Dataset, ProcessingClass
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.generation import GenerationSteps
from hf_compat.trainer_methods.model import ModelMethods
from hf_compat.trainer_methods.optimization import OptimizationMethods
from hf_compat.trainer_methods.setup import SetupMethods
from hf_compat.trainer_methods.windows import WindowMethods


class NativeSteps(SetupMethods, ModelMethods, GenerationSteps, OptimizationMethods, DataloaderMethods, WindowMethods):
    """HF's steps, optimizer and data loading, for Lightning to drive.

    Args:
        model: Any module whose forward returns a loss first; None for data only.
        args: The training arguments; the defaults where none are given.
        train_dataset: Samples to train on.
        eval_dataset: Samples to evaluate on.
        data_collator: From a list of samples to a batch.
        processing_class: Tokenizer or processor.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        train_dataset: Dataset = None,
        eval_dataset: Dataset = None,
        data_collator: Collator | None = None,
        processing_class: ProcessingClass = None,
    ) -> None:
        self.has_own_arguments = args is not None
        self.set_rate: float | None = None  # a learning rate in place of the arguments'
        self.args = TrainingArguments() if args is None else adopt_arguments(args)
        self.accelerator = AcceleratorFacade(self.args)
        self.optimizer = self.lr_scheduler = None
        self.optimizer_cls_and_kwargs = self.compute_loss_func = None
        self.compute_metrics = self.preprocess_logits_for_metrics = None
        self.label_smoother = None
        self._set_up_data(train_dataset, eval_dataset, data_collator, processing_class)
        self._set_up_counters()
        if model is not None:
            self.prepare_model(model)

    def __getstate__(self) -> dict[str, object]:
        """Leave out what the last fit has made: the next one makes its own, and a copied module stays small."""
        of_fit = {"optimizer": None, "lr_scheduler": None, "accelerator": AcceleratorFacade(self.args)}
        kept = {name: value for name, value in self.__dict__.items() if name != "training_step"}  # a fit's own
        return {**kept, **of_fit}

    def use_arguments(self, args: TrainingArguments) -> None:
        """Work with other arguments from now on."""
        if self.set_rate is not None:
            args = copy.copy(args)
            args.learning_rate = self.set_rate
        self.args = args
        self._renew_accelerator()
        self._train_batch_size = args.train_batch_size
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self._gen_kwargs = self._generation_keywords({})

    def set_learning_rate(self, rate: float) -> None:
        """Train at another rate than that of the arguments, which stay as they are."""
        self.set_rate = rate
        self.use_arguments(self.args)

    @property
    def evaluates_as_seq2seq(self) -> bool:
        """Whether evaluations are those of a `Seq2SeqTrainer`: its arguments say so."""
        return isinstance(self.args, Seq2SeqTrainingArguments)

    def _renew_accelerator(self) -> None:
        """Let `accelerator` know the arguments; a fit that is under way keeps its backward pass."""
        run_backward = self.accelerator.run_backward
        self.accelerator = AcceleratorFacade(self.args)
        self.accelerator.run_backward = run_backward

    def forget_optimizer(self) -> None:
        """Let a fit make its own optimizer and schedule, as Lightning has it: those of an earlier fit have ended."""
        stepping_of(self.optimizer).detach()
        self.optimizer = self.lr_scheduler = None

    def take_place(self, rank: int, local_rank: int, world_size: int, local_world_size: int) -> None:
        """Work as one of the processes of a Lightning trainer, which may launch them after the arguments are made.

        Args:
            rank: This process.
            local_rank: On its machine.
            world_size: Processes.
            local_world_size: Processes on this machine.
        """
        if (rank, world_size) == (self.args.process_index, self.args.world_size):
            return
        launch = Launch(
            process_index=rank,
            local_process_index=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
        )
        self.args = copy.copy(self.args)
        self.args.__dict__["_launch"] = launch
        self.args.__dict__.pop("device", None)
        self._renew_accelerator()

    def take_device(self, device: torch.device) -> None:
        """Work on the device that a Lightning trainer has chosen."""
        if self.args.device != device:
            self.args = copy.copy(self.args)
            self.args.__dict__["device"] = device
            self._renew_accelerator()

    def prepare_model(self, model: nn.Module) -> None:
        """Train this model: set in it what the arguments say."""
        self.take_model(model)
        self._set_use_cache()
        self._enable_activation_checkpointing()

    def take_model(self, model: nn.Module, called: nn.Module | None = None) -> None:
        """Work with a model: read off it what it takes and returns.

        Args:
            model: The model.
            called: Whose forward is called in its place.
        """
        self.model = self.model_wrapped = model
        self._called = called
        self._introspect()
        self._signature_columns = None
        if self.evaluates_as_seq2seq:
            self._set_up_generation()
            self._gen_kwargs = self._generation_keywords({})

    def take_forward_of(self, called: nn.Module | None) -> None:
        """Read off the forward of a module around the model what a batch holds; None goes by the model's."""
        if called is not self._called:
            self._called = called
            self._introspect()
            self._signature_columns = None


def seed_from(args: TrainingArguments) -> None:
    """Seed every generator with `args.seed`; where it is the default, with the seed of `seed_everything`.

    All ranks draw the same order of samples then, which is what they share out.

    Args:
        args: `seed` and `full_determinism`.
    """
    by_lightning = seed_of_lightning()
    default = {field.name: default_of(field) for field in fields(args)}["seed"]
    seed = by_lightning if by_lightning is not None and args.seed == default else args.seed
    if args.full_determinism:
        enable_full_determinism(seed)
    else:
        set_seed(seed)
