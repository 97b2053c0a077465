"""What a Trainer and a native module find out about their model, and set on it."""

from __future__ import annotations

from torch import nn

from hf_compat.engine.strategies import compiled, uncompiled
from hf_compat.errors import ArgumentError, warn_user
from hf_compat.interop.transformers_models import (
    loss_shifts_labels,
    takes_loss_keywords,
)
from hf_compat.optim.label_smoothing import LabelSmoother
from hf_compat.plan.translate import compilation_of
from hf_compat.runtime.inspection import (
    accepted_parameters,
    can_return_loss,
    find_labels,
)
from hf_compat.trainer_methods.base import StepsBase
from hf_compat.trainer_methods.dataloaders import model_with_forward


class ModelMethods(StepsBase):
    """The methods that depend on the model, of a Trainer and of native mode."""

    def _introspect(self) -> None:
        """Inspect the model's inputs and outputs."""
        model = model_with_forward(self)
        accepts = getattr(model, "accepts_loss_kwargs", None)
        accepts = takes_loss_keywords(model) if accepts is None else accepts
        if accepts is None:
            accepts = accepted_parameters(model.forward).takes_any_keyword
        # sequences that processes share are weighted by their own counts
        self.model_accepts_loss_kwargs = accepts and self.accelerator.sequence is None
        labels = self.args.label_names
        self.label_names = find_labels(type(model)) if labels is None else labels
        self.can_return_loss = can_return_loss(type(model))
        self._loss_shifts_labels = loss_shifts_labels(model)
        self.label_smoother = None
        if self.args.label_smoothing_factor != 0:
            if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
                warn_user(
                    "Label smoothing is not compatible with multi-label classification and is off for this Trainer.",
                )
            else:
                self.label_smoother = LabelSmoother(epsilon=self.args.label_smoothing_factor)

    def compiled(self, model: nn.Module) -> nn.Module:
        """Compile a model if the arguments ask for it, once for each model."""
        held = self._compiled_model
        if held is None or uncompiled(held) is not model:
            how = compilation_of(self.args)
            held = self._compiled_model = None if how is None else compiled(model, how)
        return model if held is None else held

    def _set_use_cache(self) -> None:
        """Set `use_cache` in the model's configuration, which changes the last bits of gradients.

        None keeps the model's own value. As in transformers 4.x, activation checkpointing switches the cache off.
        """
        config = getattr(self.model, "config", None)
        if config is not None and self.args.use_cache is not None:
            config.use_cache = self.args.use_cache
        elif getattr(config, "use_cache", False) and self.args.activation_checkpointing:
            self.model.config.use_cache = False  # type: ignore[union-attr]  # it has one

    def _enable_activation_checkpointing(self) -> None:
        options = dict(self.args.activation_checkpointing_kwargs or {})  # type: ignore[arg-type]  # a dict once normalised
        enable = getattr(self.model, "activation_checkpointing_enable", None)
        if callable(enable):
            enable(
                every_n_layers=options.pop("every_n_layers", 1),
                offload=options.pop("offload", False),
                activation_checkpointing_kwargs=options or None,
            )
            return
        enable = getattr(self.model, "gradient_checkpointing_enable", None)
        if not callable(enable):
            raise ArgumentError(
                "`gradient_checkpointing=True` (newer name: `activation_checkpointing`), but "
                f"{type(self.model).__name__} has no method to enable it.\n\n"
                "Hint: add `gradient_checkpointing_enable(gradient_checkpointing_kwargs=None)` to the model."
            )
        enable(gradient_checkpointing_kwargs=options or None)
