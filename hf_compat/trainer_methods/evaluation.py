"""`evaluate`, `predict` and the loop that both use. `Evaluator` runs the loop with Lightning."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hf_compat.data.types import Loader
from hf_compat.hf.callbacks import eval_metric_name
from hf_compat.hf.metrics import EvalLoopOutput, PredictionOutput
from hf_compat.hf.search import Metrics
from hf_compat.runtime.tracebacks import with_brief_traceback
from hf_compat.trainer_methods.base import Dataset
from hf_compat.trainer_methods.evaluator import Evaluator
from hf_compat.trainer_methods.trainer_base import TrainerBase
from hf_compat.training_run.best import tracked_value

if TYPE_CHECKING:
    pass


class EvaluationMethods(TrainerBase):
    """The public and overridable methods of evaluation."""

    _evaluator: Evaluator

    @with_brief_traceback
    def evaluate(
        self, eval_dataset: Dataset = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Metrics:
        """Evaluate and return the metrics.

        Args:
            eval_dataset: A data set, or a dict of them (with metrics `eval_{name}_…`). By default the Trainer's.
            ignore_keys: Outputs of the model to leave out.
            metric_key_prefix: Prefix of the metrics, added if missing.

        Raises:
            DataError: There is no evaluation data set.
            MetricError: A metric cannot be logged, or the metric to compare is not a number.

        Mirrors:
            `transformers.Trainer.evaluate`, 5.23.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            # pass the name of the Trainer's own sets, as a subclass's `get_eval_dataloader` may use it
            parts = {name: name if eval_dataset is None else part for name, part in dataset.items()}
            return self._evaluator.evaluate_each(parts, ignore_keys, metric_key_prefix)
        self._memory_tracker.start()
        loader = self.get_eval_dataloader(dataset)
        start_time = time.time()
        output = self.evaluation_loop(
            loader,
            description="Evaluation",
            # do not keep predictions without a metric that reads them
            prediction_loss_only=True if self._evaluator.compute_metrics is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        evaluated = self._evaluator.add_speed(output, metric_key_prefix, start_time)
        tracked = self.args.metric_for_best_model
        if tracked is not None and eval_metric_name(tracked) in evaluated:
            tracked_value(evaluated, tracked)  # refuses one that is not a number
        self.log(evaluated)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, evaluated)
        self._memory_tracker.stop_and_update_metrics(evaluated)
        return evaluated

    @with_brief_traceback
    def predict(
        self, test_dataset: Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict a data set, and compute metrics if it has labels.

        Args:
            test_dataset: The data set.
            ignore_keys: Outputs of the model to leave out.
            metric_key_prefix: Prefix of the metrics, added if missing.

        Returns:
            Predictions and labels (padded with -100 if lengths differ), and the metrics.

        Mirrors:
            `transformers.Trainer.predict`, 5.23.
        """
        self._memory_tracker.start()
        loader = self.get_test_dataloader(test_dataset)
        start_time = time.time()
        output = self.evaluation_loop(
            loader, description="Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )
        metrics = self._evaluator.add_speed(output, metric_key_prefix, start_time)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return PredictionOutput(predictions=output.predictions, label_ids=output.label_ids, metrics=metrics)

    def evaluation_loop(
        self,
        dataloader: Loader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run Lightning's validation over a loader and collect predictions and metrics.

        Args:
            dataloader: The loader.
            description: `Evaluation` or `Prediction`.
            prediction_loss_only: Keep the loss only. None uses the arguments' value.
            ignore_keys: Outputs of the model to leave out.
            metric_key_prefix: Prefix of the metrics.

        Mirrors:
            `transformers.Trainer.evaluation_loop`, 5.23.

        Differs:
            Predictions are joined once, at the end.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        return self._evaluator.run(dataloader, description, loss_only, ignore_keys, metric_key_prefix)

    def prediction_loop(
        self,
        dataloader: Loader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Call `evaluation_loop`, for overrides of `evaluate` that use the loop's name of 3.x and 4.x.

        This package never calls it, so an override causes a warning.

        Mirrors:
            `transformers.Trainer.prediction_loop`, 4.57.
        """
        return self.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
