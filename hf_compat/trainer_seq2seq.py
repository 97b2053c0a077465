"""`Seq2SeqTrainer`: a Trainer whose evaluations generate. Also the names of `transformers.trainer_seq2seq`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_compat.data.types import Collator
from hf_compat.errors import warn_once
from hf_compat.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
from hf_compat.hf.metrics import PredictionOutput
from hf_compat.hf.search import Metrics, Trial
from hf_compat.interop.mirrors import mirror
from hf_compat.trainer import Trainer
from hf_compat.trainer_methods.base import AnyCallback, Dataset, MetricSource, ModelOutput, ProcessingClass
from hf_compat.trainer_methods.generation import GenerationSteps
from hf_compat.trainer_methods.lightning_options import LightningOptions

__getattr__, __dir__ = mirror(__name__)


class Seq2SeqTrainer(GenerationSteps, Trainer):
    """Train, evaluate and predict as `transformers.Seq2SeqTrainer` does, on Lightning's engine.

    With `predict_with_generate`, evaluations and predictions return the tokens of `model.generate`.

    Args:
        args: `Seq2SeqTrainingArguments`. The other arguments are a Trainer's, without `optimizer_cls_and_kwargs`.
        processing_class: Tokenizer or processor. Its padding token pads generated tokens.
        compute_metrics: Computes a dict of metrics from an `EvalPrediction`, whose predictions are tokens.
        preprocess_logits_for_metrics: Applied to the generated tokens before they are kept.

    Raises:
        ArgumentError: The arguments lack generation's fields, the model does not generate, or `generation_config`
            cannot be read.
        MissingPackage: The arguments ask for generation, and transformers is not installed.

    Mirrors:
        `transformers.Seq2SeqTrainer`.
    """

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
        preprocess_logits_for_metrics: Callable[[ModelOutput, ModelOutput], ModelOutput] | None = None,
        *,
        lightning_options: LightningOptions | None = None,
        **old_names: ProcessingClass,
    ) -> None:
        super().__init__(
            model=model,
            args=Seq2SeqTrainingArguments("tmp_trainer") if args is None else args,
            model_init=model_init,
            optimizers=optimizers,
            callbacks=callbacks,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            processing_class=processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            lightning_options=lightning_options,
            **old_names,
        )
        self._set_up_generation()

    def evaluate(
        self,
        eval_dataset: Dataset = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: object,
    ) -> Metrics:
        """Evaluate and return the metrics.

        `gen_kwargs` are keywords of `generate`: `max_length`, `num_beams`, `do_sample` …

        Mirrors:
            `transformers.Seq2SeqTrainer.evaluate`. A short last batch counts as a full one in the loss, and
            samples that fill up the last round of ranks are kept.
        """
        if gen_kwargs and isinstance(self.eval_dataset if eval_dataset is None else eval_dataset, dict):
            warn_once(
                f"`evaluate({', '.join(gen_kwargs)}=…)` over several data sets uses the arguments only, as in "
                "transformers. Set `generation_max_length`, `generation_num_beams` or `generation_config`, or evaluate "
                "one set at a time."
            )
        self._gen_kwargs = self._generation_keywords(gen_kwargs)
        self.gather_function = self.accelerator.gather  # as upstream, keep all samples
        return super().evaluate(eval_dataset, metric_key_prefix=metric_key_prefix, ignore_keys=ignore_keys)

    def predict(
        self,
        test_dataset: Dataset,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: object,
    ) -> PredictionOutput:
        """Predict a data set, and compute metrics if it has labels.

        `gen_kwargs` are keywords of `generate`: `max_length`, `num_beams`, `do_sample` …

        Returns:
            Tokens and labels (padded with the padding token), and the metrics.

        Mirrors:
            `transformers.Seq2SeqTrainer.predict`.
        """
        self._gen_kwargs = self._generation_keywords(gen_kwargs)
        self.gather_function = self.accelerator.gather  # as upstream, keep all samples
        return super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def _prepare_model_for_training(self, checkpoint: str | None, trial: Trial) -> None:
        if self.model_init is not None and self._option("generation_config") is not None:
            warn_once(
                "`generation_config` has no effect on a model that `model_init` makes for training, as in "
                "transformers. Set it in `model_init`."
            )
        super()._prepare_model_for_training(checkpoint, trial)
