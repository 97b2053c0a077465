"""`evaluate`, `predict` and the loop behind them, on Lightning's validation. HF's method names.

Every method is an override point of `transformers.Trainer` under its own name and signature.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from hf_compat.callbacks.bridge import HFBridge
from hf_compat.data.tree import join_batches
from hf_compat.engine.build import build_trainer, quietly
from hf_compat.engine.evaluation import EvaluationBatches, EvaluationRun, EvaluationSettings
from hf_compat.engine.internals import is_validating_within_fit, run_validation
from hf_compat.engine.precision import wrap_forward
from hf_compat.hf.metrics import speed_metrics
from hf_compat.hf.outputs import EvalLoopOutput, PredictionOutput
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.translate import translate
from hf_compat.runtime.collectives import gather_objects
from hf_compat.runtime.inspection import call_by_signature
from hf_compat.trainer_methods.base import TrainerBase


class EvaluationMethods(TrainerBase):
    """The public methods and override points of evaluation."""

    _evaluated_name: str | None = None
    model_preparation_time: float

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate and return the metrics.

        Args:
            eval_dataset: A data set, or a dict of them (`eval_{name}_…` then), in place of the trainer's.
            ignore_keys: Outputs of the model to leave out.
            metric_key_prefix: Prefix of the metrics, added where it is missing.

        Raises:
            DataError: There is nothing to evaluate on.

        Mirrors:
            `transformers.Trainer.evaluate`, 5.23.
        """
        given = eval_dataset is not None
        dataset = eval_dataset if given else self.eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                self._evaluated_name = name
                metrics |= self.evaluate(
                    eval_dataset=part if given else name,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=f"{metric_key_prefix}_{name}",
                )
            self._evaluated_name = None
            return metrics
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
        call_by_signature(self.log, evaluated, optional={})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, evaluated)
        return evaluated

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
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
        loader = self.get_test_dataloader(test_dataset)
        start_time = time.time()
        output = self.evaluation_loop(
            loader, description="Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )
        metrics = self._with_speed(output, metric_key_prefix, start_time)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
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
        dataloader: Any,
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
        args = self.args
        plan = translate(args, model_config=getattr(self.model, "config", None))
        self._prepare_model(plan)
        if not self.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
            self.model.to(dtype=torch.float16 if args.fp16_full_eval else torch.bfloat16, device=args.device)
        optimizer_eval = getattr(self.optimizer, "eval", None)
        if callable(optimizer_eval):
            optimizer_eval()
        self.callback_handler.eval_dataloader = dataloader
        settings = EvaluationSettings(
            metric_key_prefix=metric_key_prefix,
            prediction_loss_only=args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only,
            ignore_keys=ignore_keys,
            is_prediction=description == "Prediction",
            batch_size=args.eval_batch_size,
            to_cpu_every_batches=args.eval_accumulation_steps,
            join=args.eval_do_concat_batches,
            keep_inputs="inputs" in args.include_for_metrics,
            give_losses="loss" in args.include_for_metrics,
            batch_metrics=args.batch_eval_metrics,
            skip_non_finite=args.logging_nan_inf_filter,
        )
        steps: Any = self  # the Trainer, which has all the method groups
        run = EvaluationRun(
            steps,
            self.model,
            dataloader,
            settings,
            self._metrics_in_force(),
            self.preprocess_logits_for_metrics,
            self._gather_of_evaluation(dataloader),
            self._evaluation_averages.take,
        )
        self._drive(run, plan)
        output = run.output or run.finish()
        self._add_preparation_time(output, metric_key_prefix)
        return output

    def _metrics_in_force(self) -> Any:
        """Return what computes the metrics of this evaluation; with several data sets each may have its own."""
        if isinstance(self.compute_metrics, Mapping):
            return self.compute_metrics.get(str(self._evaluated_name))
        return self.compute_metrics

    def _gather_of_evaluation(self, loader: Any) -> Any:
        """Return how results are gathered: tensors, objects where the arguments ask for it, or as a subclass says."""
        self.accelerator.loader = loader
        own = self.accelerator.gather_for_metrics
        chosen = self.__dict__.get("gather_function", own)
        if chosen != own:
            self.gather_function = own  # as upstream: another one holds for one evaluation
            return chosen
        if self.args.eval_use_gather_object and self.args.world_size > 1:
            return lambda data: join_batches(gather_objects(data))
        return self.accelerator.gather

    def _prepare_model(self, plan: LightningPlan) -> None:
        """Put the model under the run's precision; the first time outside training is measured, as in HF."""
        start_time = time.time()
        wrap_forward(self.model, plan.precision, self.args.device.type)
        if not self._is_prepared:
            self._is_prepared = True
            self.model_preparation_time = round(time.time() - start_time, 4)

    def _add_preparation_time(self, output: EvalLoopOutput, prefix: str) -> None:
        seconds = self.__dict__.get("model_preparation_time")
        if seconds is not None and output.metrics is not None:
            output.metrics[f"{prefix}_model_preparation_time"] = seconds

    def _drive(self, run: EvaluationRun, plan: LightningPlan) -> None:
        """Let Lightning run an evaluation: in the fit that is under way, or in a trainer of its own."""
        batches = EvaluationBatches(run.loader)
        batches.start_if_empty()
        module, trainer = self._run.module, self._run.lightning_trainer
        if module is not None and trainer is not None and not is_validating_within_fit(trainer):
            with module.evaluating(run):
                run_validation(trainer, batches)
            return
        bridge = HFBridge(self)
        alone = build_trainer(
            plan,
            bridge.lightning_callback_list(self._lightning_callbacks, self._callback_order),
            self._loggers(),
            self.args._launch,
            **self.lightning_options,
        )
        if self._run.module is None:
            self.lightning_trainer = alone
        validate = alone.test if run.settings.is_prediction else alone.validate
        module = self._make_module(plan)
        bridge.find_requested_kwargs()
        try:
            with module.evaluating(run), quietly():
                validate(module, dataloaders=batches, verbose=False)
        finally:
            self._watch_outputs(False)
