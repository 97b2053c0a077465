"""`evaluate`, `predict` and the loop behind them, on Lightning's validation. HF's method names.

Every method is an override point of `transformers.Trainer` under its own name and signature.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

from hf_compat.callbacks.bridge import HFBridge
from hf_compat.data.tree import join_batches
from hf_compat.engine.build import build_trainer, run_evaluation
from hf_compat.engine.evaluation import EvaluationBatches, EvaluationRun, EvaluationSettings
from hf_compat.engine.internals import WHOLE, EvaluationPart, as_part, is_validating_within_fit, run_validation
from hf_compat.engine.precision import wrap_forward
from hf_compat.engine.torchmetrics_evaluation import ComputeMetrics
from hf_compat.hf.metrics import speed_metrics
from hf_compat.hf.outputs import EvalLoopOutput, PredictionOutput
from hf_compat.hf.search import Metrics
from hf_compat.interop.upstream_log import log_evaluation
from hf_compat.optim.stepping import stepping_of
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.translate import translate
from hf_compat.runtime.absent_ranks import naming_absent_ranks
from hf_compat.runtime.collectives import gather_objects
from hf_compat.runtime.inspection import has_length
from hf_compat.runtime.nested import Nested
from hf_compat.runtime.tracebacks import brief
from hf_compat.search.trials import check_model_is_there
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.trainer_methods.base import Dataset, Loader
from hf_compat.trainer_methods.upstream_hooks import UpstreamHooks
from hf_compat.training_run.best_metric import check_tracked_value


class EvaluationMethods(UpstreamHooks):
    """The public methods and override points of evaluation."""

    _evaluated_name: str | None = None
    _evaluation_part = WHOLE
    model_preparation_time: float

    @brief
    def evaluate(
        self, eval_dataset: Dataset = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Metrics:
        """Evaluate and return the metrics.

        Args:
            eval_dataset: A data set, or a dict of them (`eval_{name}_…` then), in place of the trainer's.
            ignore_keys: Outputs of the model to leave out.
            metric_key_prefix: Prefix of the metrics, added where it is missing.

        Raises:
            DataError: There is nothing to evaluate on.
            MetricError: A metric is something that cannot be logged, or is to be compared and no number.

        Mirrors:
            `transformers.Trainer.evaluate`, 5.23.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            # the trainer's own sets are named: a subclass's `get_eval_dataloader` may ask which one it is
            parts = {name: name if eval_dataset is None else part for name, part in dataset.items()}
            # Evaluate several data sets, each under a prefix with its name
            metrics: Metrics = {}
            last = len(parts) - 1
            try:
                for i, (name, part) in enumerate(parts.items()):
                    self._evaluated_name = name
                    self._evaluation_part = EvaluationPart(is_first=i == 0, is_last=i == last, earlier=metrics)
                    metrics |= self.evaluate(
                        eval_dataset=part, ignore_keys=ignore_keys, metric_key_prefix=f"{metric_key_prefix}_{name}"
                    )
            finally:
                self._evaluated_name, self._evaluation_part = None, WHOLE
            return metrics
        self._memory_tracker.start()
        loader = self.get_eval_dataloader(dataset)
        start_time = time.time()
        output = self.evaluation_loop(
            loader,
            description="Evaluation",
            # predictions that no metric reads are not kept
            prediction_loss_only=True if self._metrics_in_force() is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        evaluated = self._with_speed(output, metric_key_prefix, start_time)
        check_tracked_value(evaluated, self.args.metric_for_best_model)
        self.log(evaluated)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, evaluated)
        self._memory_tracker.stop_and_update_metrics(evaluated)
        return evaluated

    def _take_part(self) -> EvaluationPart:
        """Return the part that the next run of Lightning's loop is; one that a callback starts within it is whole."""
        part, self._evaluation_part = self._evaluation_part, WHOLE
        return part

    @brief
    def predict(
        self, test_dataset: Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict a data set, and compute metrics where it has labels.

        Args:
            test_dataset: The data set.
            ignore_keys: Outputs of the model to leave out.
            metric_key_prefix: Prefix of the metrics, added where it is missing.

        Returns:
            Predictions and labels (padded with -100 where lengths differ), and the metrics.

        Mirrors:
            `transformers.Trainer.predict`, 5.23.
        """
        self._memory_tracker.start()
        loader = self.get_test_dataloader(test_dataset)
        start_time = time.time()
        output = self.evaluation_loop(
            loader, description="Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )
        metrics = self._with_speed(output, metric_key_prefix, start_time)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return PredictionOutput(predictions=output.predictions, label_ids=output.label_ids, metrics=metrics)

    def _with_speed(self, output: EvalLoopOutput, prefix: str, start_time: float) -> dict[str, float]:
        metrics = output.metrics if output.metrics is not None else {}
        start_time += metrics.get(f"{prefix}_model_preparation_time", 0.0)
        samples = output.num_samples or 0
        batches = math.ceil(samples / (self.args.eval_batch_size * self.args.world_size))
        metrics.update(speed_metrics(prefix, start_time, num_samples=samples, num_steps=batches))
        return metrics

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
            prediction_loss_only: Keep the loss only; None asks the arguments.
            ignore_keys: Outputs of the model to leave out.
            metric_key_prefix: Prefix of the metrics, added where it is missing.

        Mirrors:
            `transformers.Trainer.evaluation_loop`, 5.23.

        Differs:
            Predictions are joined once, at the end.
        """
        check_model_is_there(self.model)
        plan = translate(self.args, model_config=getattr(self.model, "config", None))
        self._let_wrap_model(training=False)
        model = self._prepare_model(plan)
        # Bring the model to the precision of evaluations outside training, the optimizer to its averaged weights
        args = self.args
        if not self.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
            self.model.to(dtype=torch.float16 if args.fp16_full_eval else torch.bfloat16, device=args.device)
        stepping_of(self.optimizer).to_evaluation()
        self.callback_handler.eval_dataloader = dataloader
        count = self.num_examples(dataloader) if has_length(dataloader) else None
        log_evaluation(description, count, self.args.eval_batch_size)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        gather, drops = self._gather_of_evaluation()
        run = EvaluationRun(
            self,
            model,
            dataloader,
            EvaluationSettings.of(
                self.args, metric_key_prefix, loss_only, ignore_keys, is_prediction=description == "Prediction"
            ),
            self._metrics_in_force(),
            self.preprocess_logits_for_metrics,
            gather,
            self._evaluation_averages.take,
            drops,
        )
        with self.accelerator.passes.reading(dataloader):
            # Let Lightning run an evaluation: in the fit that is under way, or in a trainer of its own
            batches = EvaluationBatches(run.loader)
            batches.start_if_empty()
            if batches.length == 0:  # Lightning leaves all of it out
                self.model.eval()
            module, trainer = self._run.module, self._run.lightning_trainer
            if module is not None and trainer is not None and not is_validating_within_fit(trainer):
                with module.evaluating(run), as_part(trainer, self._take_part()):
                    run_validation(trainer, batches)
            else:
                self._drive_alone(run, plan, batches)
        output = run.output or run.finish()
        seconds = self.__dict__.get("model_preparation_time")
        if seconds is not None and output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_model_preparation_time"] = seconds
        return output

    def _metrics_in_force(self) -> ComputeMetrics | None:
        """Return what computes the metrics of this evaluation; with several data sets each may have its own."""
        if isinstance(self.compute_metrics, Mapping):
            return self.compute_metrics.get(str(self._evaluated_name))
        return self.compute_metrics

    def _gather_of_evaluation(self) -> tuple[Callable[[Nested], Nested], bool]:
        """Return how results are gathered: tensors, objects where the arguments ask for it, or as a subclass says.

        Also returns whether samples that fill up the last batch are to be dropped: a subclass's way does that itself.
        """
        own = self.accelerator.gather_for_metrics
        chosen = self.__dict__.get("gather_function")
        if chosen is not None or _is_another_way(own):
            self.gather_function = own  # holds for one evaluation, as upstream; then the accelerator's
        if chosen is not None and _is_another_way(chosen):
            return chosen, False
        if self.args.eval_use_gather_object and self.args.world_size > 1:
            return lambda data: join_batches(gather_objects(data)), True
        return self.accelerator.gather, True

    def _prepare_model(self, plan: LightningPlan) -> nn.Module:
        """Put the model under the run's precision; return what is evaluated.

        As in HF, the first evaluation before any training is measured, and is the one that runs compiled.
        """
        start_time = time.time()
        wrap_forward(self.model, plan.precision, self.args.device.type)
        if self._is_prepared:
            return self.model
        self._is_prepared = True
        self.model_wrapped = model = self.compiled(self.model)
        self.model_preparation_time = round(time.time() - start_time, 4)
        return model

    def _drive_alone(self, run: EvaluationRun, plan: LightningPlan, batches: EvaluationBatches) -> None:
        """Let a Lightning trainer of its own run an evaluation."""
        bridge = HFBridge(self, self._run)
        callbacks = bridge.lightning_callback_list(self._lightning_callbacks, self._callback_order)
        options = self._lightning_options.of_trainers()
        if self.args.eval_strategy != "no":  # EarlyStopping decides once, when it is set up, what it looks at
            plan = dataclasses.replace(plan, validate_every_updates=1)
        trainer = build_trainer(plan, callbacks, self._loggers(), self.args._launch, **options)
        if self._run.module is None:
            self.lightning_trainer = trainer
        module = self._make_module(plan)
        bridge.find_requested_kwargs()
        try:
            with naming_absent_ranks(), module.evaluating(run), as_part(trainer, self._take_part()):
                run_evaluation(trainer, module, batches, run.settings.is_prediction)
        finally:
            self._watch_outputs(False)


def _is_another_way(gather: Callable[[Nested], Nested]) -> bool:
    """Return whether results are gathered by something else than our accelerator's own method."""
    return getattr(gather, "__func__", None) is not AcceleratorFacade.gather_for_metrics
