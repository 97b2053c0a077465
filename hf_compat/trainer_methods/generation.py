"""Prediction steps that generate, for `Seq2SeqTrainer` and native modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_compat.engine.strategies import gathering_method
from hf_compat.errors import ArgumentError, InertArgumentWarning, warn_user
from hf_compat.hf.inert import CANNOT_GENERATE
from hf_compat.hf.rows import without_effect
from hf_compat.interop.deepspeed import is_partitioned
from hf_compat.interop.releases import of_transformers
from hf_compat.runtime.nested import Nested
from hf_compat.runtime.text import brief, need, shown
from hf_compat.trainer_methods.steps import Inputs, StepMethods

# The keywords of `generate`.
GenerationKeywords: TypeAlias = dict[str, Any]


class GenerationSteps(StepMethods):
    """Prediction with `generate`, if the arguments ask for it."""

    # Keywords of `generate` for the current evaluation. Subclasses set this attribute of upstream.
    _gen_kwargs: GenerationKeywords

    @staticmethod
    def load_generation_config(gen_config_arg: object) -> object:
        """Make the generation config for `args.generation_config`.

        Args:
            gen_config_arg: A config, a dict of its options, a JSON file, a folder, or the name of a model.

        Raises:
            ArgumentError: It cannot be read, or contradicts itself.

        Mirrors:
            `transformers.Seq2SeqTrainer.load_generation_config`.
        """
        kind = of_transformers("generation", "GenerationConfig", "`generation_config`")
        load = of_transformers("trainer_seq2seq", "Seq2SeqTrainer", "`generation_config`").load_generation_config
        try:
            config: object = load(kind(**gen_config_arg) if isinstance(gen_config_arg, Mapping) else gen_config_arg)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ArgumentError(
                f"`{shown('generation_config', gen_config_arg)}` cannot be used: {error}\n\nHint: give a "
                "GenerationConfig, its options, a JSON file of it, or a folder or the name of a model that has one."
            ) from error
        return config

    def _set_up_generation(self) -> None:
        """Set the model's generation config from the arguments.

        Raises:
            ArgumentError: The arguments lack generation's fields, or the model does not generate.
            MissingPackage: transformers is not installed, and the arguments ask for generation.
        """
        missing = [name for name in without_effect(CANNOT_GENERATE) if not hasattr(self.args, name)]
        if missing:
            raise ArgumentError(
                f"`args` is of type {type(self.args).__name__}, which has no {', '.join(missing)}.\n\n"
                "Hint: pass `Seq2SeqTrainingArguments`."
            )
        generates = callable(getattr(self.model, "generate", None))
        own_step = type(self).prediction_step is not GenerationSteps.prediction_step
        if self._option("predict_with_generate") and not own_step:
            need("transformers", "[transformers]", "`predict_with_generate=True`")  # the step is its own
            if not generates:
                raise ArgumentError(
                    f"`predict_with_generate=True`, but {type(self.model).__name__} has no method `generate`.\n\n"
                    "Hint: give it one (`transformers.GenerationMixin`), or override `prediction_step`."
                )
        config = self._option("generation_config")
        if config is not None:
            self.model.generation_config = self.load_generation_config(config)  # type: ignore[assignment]  # no module

    def _option(self, name: str) -> object:
        """Read an argument that `TrainingArguments` lacks. None if these arguments lack it, too."""
        return getattr(self.args, name, None)

    def _generation_keywords(self, given: GenerationKeywords) -> GenerationKeywords:
        """Make the keywords of `generate`, with the arguments as defaults."""
        told = [f"{name}={brief(value)}" for name, value in given.items() if value is not None]
        if told and not self._option("predict_with_generate"):
            warn_user(
                f"`{', '.join(told)}` has no effect without `predict_with_generate=True`.",
                InertArgumentWarning,
            )
        keywords = dict(given)
        longest, beams = self._option("generation_max_length"), self._option("generation_num_beams")
        open_length = keywords.get("max_length") is None and keywords.get("max_new_tokens") is None
        if open_length and longest is not None:
            keywords["max_length"] = longest
        if keywords.get("num_beams") is None and beams is not None:
            keywords["num_beams"] = beams
        return keywords

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Inputs,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: object,
    ) -> tuple[torch.Tensor | None, Nested | None, Nested | None]:
        """Generate for one batch, and compute its loss if it has labels.

        Args:
            model: The model to call for the loss.
            inputs: The batch.
            prediction_loss_only: Return the loss only, and do not generate.
            ignore_keys: Outputs to leave out if nothing is generated.
            gen_kwargs: Keywords of `generate`, instead of those of the current evaluation.

        Returns:
            Loss, generated tokens and labels, the last two padded to the greatest allowed length.

        Shapes:
            tokens, labels: [batch, max_length]

        Mirrors:
            `transformers.Seq2SeqTrainer.prediction_step`.
        """
        if not self._option("predict_with_generate") or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        # every rank has to call each forward pass of a sharded model
        is_spread = isinstance(self.model, FSDPModule) or is_partitioned(self.model)
        keywords = {"synced_gpus": is_spread, **(gen_kwargs or getattr(self, "_gen_kwargs", {}))}
        with gathering_method(self.model, "generate"):
            theirs = of_transformers("trainer_seq2seq", "Seq2SeqTrainer", "`predict_with_generate=True`")
            step: Callable[..., tuple[torch.Tensor | None, Nested | None, Nested | None]] = theirs.prediction_step
            return step(self, model, inputs, prediction_loss_only, ignore_keys, **keywords)

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        """Pad rows of tokens with the padding token.

        Raises:
            ArgumentError: Neither the processing class nor the model's configuration has one.
        """
        padded = self._padding_token() * torch.ones(
            (tensor.shape[0], max_length), dtype=tensor.dtype, device=tensor.device
        )
        padded[:, : tensor.shape[-1]] = tensor
        return padded

    def _padding_token(self) -> int:
        if hasattr(self.processing_class, "pad_token_id"):
            pad = self.processing_class.pad_token_id
            pad = self.processing_class.eos_token_id if pad is None else pad
        else:
            pad = getattr(getattr(self.model, "config", None), "pad_token_id", None)
        if pad is None:
            raise ArgumentError(
                "Pad_token_id must be set in the configuration of the model, in order to pad tensors.\n\n"
                "Hint: set `model.config.pad_token_id`, or give the Trainer a tokenizer that has one."
            )
        return int(pad)
