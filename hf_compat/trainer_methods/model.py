"""Inspect a Trainer's model, and change it as the arguments ask."""

from __future__ import annotations

import warnings

from torch import nn

from hf_compat.engine.compilation import compiled, uncompiled
from hf_compat.errors import ArgumentError
from hf_compat.interop.transformers_models import loss_shifts_labels, takes_loss_keywords, unwrap_peft
from hf_compat.optim.label_smoothing import LabelSmoother
from hf_compat.plan.compilation import compilation_of
from hf_compat.runtime.inspection import can_return_loss, find_labels, has_var_keyword
from hf_compat.trainer_methods.base import TrainerBase


class ModelMethods(TrainerBase):
    """The methods that depend on the model."""

    def _introspect(self) -> None:
        """Inspect the model's inputs and outputs."""
        model = self._model_with_forward()
        accepts = getattr(model, "accepts_loss_kwargs", None)
        accepts = takes_loss_keywords(model) if accepts is None else accepts
        self.model_accepts_loss_kwargs = has_var_keyword(model.forward) if accepts is None else accepts
        labels = self.args.label_names
        self.label_names = find_labels(type(model)) if labels is None else labels
        self.can_return_loss = can_return_loss(type(model))
        self._loss_shifts_labels = loss_shifts_labels(model)
        self.label_smoother = None
        if self.args.label_smoothing_factor != 0:
            if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
                warnings.warn(
                    "Label smoothing is not compatible with multi-label classification and is off for this Trainer.",
                    stacklevel=4,
                )
            else:
                self.label_smoother = LabelSmoother(epsilon=self.args.label_smoothing_factor)

    def _model_with_forward(self) -> nn.Module:
        """Return the module whose forward determines the columns of a batch and the divisor of a loss."""
        return unwrap_peft(self.accelerator.unwrap_model(self.model if self._called is None else self._called))

    def compiled(self, model: nn.Module) -> nn.Module:
        """Compile a model as the arguments ask, once for each model. Without such arguments return it unchanged."""
        held = self._compiled_model
        if held is None or held is model or uncompiled(held) is not model:
            held = self._compiled_model = compiled(model, compilation_of(self.args))
        return held

    def _wrapped_between_runs(self) -> nn.Module:
        """Return `model_wrapped` for the time between runs: the model, compiled if it was."""
        held = self._compiled_model
        return held if held is not None and uncompiled(held) is self.model else self.model

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
        if not self.args.activation_checkpointing:
            return
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
                f"`activation_checkpointing=True`, but {type(self.model).__name__} has no method to enable it.\n\n"
                "Hint: add `gradient_checkpointing_enable(gradient_checkpointing_kwargs=None)` to the model."
            )
        enable(gradient_checkpointing_kwargs=options or None)
