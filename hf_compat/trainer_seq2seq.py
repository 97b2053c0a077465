"""`Seq2SeqTrainer`: a Trainer whose evaluations generate. Also the names of `transformers.trainer_seq2seq`."""

from __future__ import annotations

from hf_compat.errors import warn_once
from hf_compat.hf.arguments import Seq2SeqTrainingArguments
from hf_compat.hf.metrics import PredictionOutput
from hf_compat.hf.search import Metrics, Trial
from hf_compat.interop.mirrors import mirror
from hf_compat.trainer import Trainer
from hf_compat.trainer_methods.base import Dataset
from hf_compat.trainer_methods.generation import GenerationSteps

__getattr__, __dir__ = mirror(__name__)


class Seq2SeqTrainer(GenerationSteps, Trainer):
    """Train, evaluate and predict as `transformers.Seq2SeqTrainer` does, on Lightning's engine.

    With `predict_with_generate`, evaluations and predictions return the tokens of `model.generate`.

    Args:
        args: `Seq2SeqTrainingArguments`. The other arguments are those of `Trainer`.
        processing_class: Tokenizer or processor. Its padding token pads generated tokens.
        compute_metrics: Computes a dict of metrics from an `EvalPrediction`, whose predictions are tokens.
        preprocess_logits_for_metrics: Applied to the generated tokens before they are kept.

    Raises:
        ArgumentError: The arguments lack generation's fields, the model does not generate, or `generation_config`
            cannot be read.

    Mirrors:
        `transformers.Seq2SeqTrainer`, 5.23.

    Differs:
        It accepts `optimizer_cls_and_kwargs`, at the position where upstream has `preprocess_logits_for_metrics`.
    """

    _kind_of_arguments = Seq2SeqTrainingArguments

    def _validate_args(self) -> None:
        super()._validate_args()
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
            `transformers.Seq2SeqTrainer.evaluate`, 5.23. A short last batch counts as a full one in the loss, and
            samples that fill up the last round of ranks are kept.
        """
        if gen_kwargs and isinstance(self.eval_dataset if eval_dataset is None else eval_dataset, dict):
            warn_once(
                f"`evaluate({', '.join(gen_kwargs)}=…)` over several data sets uses the arguments only, as in "
                "transformers. Set `generation_max_length`, `generation_num_beams` or `generation_config`, or evaluate "
                "one set at a time."
            )
        self._set_generation_keywords(gen_kwargs)
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
            `transformers.Seq2SeqTrainer.predict`, 5.23.
        """
        self._set_generation_keywords(gen_kwargs)
        return super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def _set_generation_keywords(self, given: dict[str, object]) -> None:
        """Set the keywords and the gathering for the steps of one evaluation."""
        self._gen_kwargs = self._generation_keywords(given)
        # as upstream, keep all samples
        self.gather_function = self.accelerator.gather

    def _prepare_model_for_training(self, checkpoint: str | None, trial: Trial) -> None:
        if self.model_init is not None and self._option("generation_config") is not None:
            warn_once(
                "`generation_config` has no effect on a model that `model_init` makes for training, as in "
                "transformers. Set it in `model_init`."
            )
        super()._prepare_model_for_training(checkpoint, trial)
