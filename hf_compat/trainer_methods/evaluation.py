"""Evaluations, logs and metrics of a run, and the files of results. `Evaluator` has Lightning run evaluations."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping

import torch
from torch import nn

from hf_compat.callbacks.loggers import LoggerCallback
from hf_compat.checkpoint.layout import TRAINER_STATE_NAME
from hf_compat.data.types import Loader
from hf_compat.engine.internals import note_metrics
from hf_compat.errors import ArgumentError, warn_once
from hf_compat.hf.callbacks import eval_metric_name
from hf_compat.hf.metrics import (
    EvalLoopOutput,
    PredictionOutput,
    loggable,
    metrics_format,
    plain_metrics,
    speed_metrics,
)
from hf_compat.hf.search import Metrics, Trial
from hf_compat.optim.lr_schedulers import follows_metric
from hf_compat.runtime.collectives import is_distributed
from hf_compat.runtime.inspection import accepted_parameters, calling_like_upstream
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.text import brief
from hf_compat.runtime.tracebacks import with_brief_traceback
from hf_compat.trainer_methods.base import Dataset
from hf_compat.trainer_methods.evaluator import Evaluator
from hf_compat.trainer_methods.trainer_base import TrainerBase
from hf_compat.training_run.best import tracked_value, update_best_metric
from hf_compat.training_run.flags import due_actions, request_save_if_best
from hf_compat.training_run.loss_log import ENTRIES, LoggedValue


class EvaluationMethods(TrainerBase):
    """The overridable methods at the end of an update, those of evaluation, and the public methods for results."""

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
            `transformers.Trainer.evaluate`.
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
            `transformers.Trainer.predict`.
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
            `transformers.Trainer.evaluation_loop`.

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

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        model: nn.Module,
        trial: Trial,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save, in this order, according to the control's flags. 4.46 and before lack `start_time`.

        Mirrors:
            `transformers.Trainer._maybe_log_save_evaluate`.
        """
        if self._pushes.unpushed is not None:
            self._pushes.push_checkpoint(self._pushes.unpushed)
        run, updates = self._run, self.state.global_step
        for action in due_actions(self, run.flag_agreement):
            if action == "log" and updates > run.losses.last_logged:
                # A run cuts its data into updates when it starts
                windows, accumulation = run.windows, self.args.gradient_accumulation_steps
                if windows is not None and windows.window_size != accumulation:
                    warn_once(
                        f"`gradient_accumulation_steps` was set to {accumulation} during training, which continues "
                        f"with {windows.window_size}, as the data are cut into updates at its start.\n\n"
                        "Hint: end the training (`control.should_training_stop`) and call `train()` again."
                    )
                rate = self._get_learning_rate() if learning_rate is None else learning_rate
                logs = run.losses.take(updates, grad_norm, rate, self.accelerator.gather, summed=tr_loss)
                self.store_flos()
                since = run.start_time if start_time is None else start_time
                calling_like_upstream(self.log, ("logs", "start_time"))(logs, since)
            elif action == "evaluate":
                metrics = self._evaluate(trial, ignore_keys_for_eval)
                request_save_if_best(self, self._determine_best_metric(metrics=metrics, trial=trial))
            elif action == "save":
                # before 4.47 the method also took metrics, which today's overrides may have as an optional parameter
                old = {"metrics": None} if "metrics" in accepted_parameters(self._save_checkpoint).required else {}
                self._saver.is_by_flag = True
                try:
                    self._save_checkpoint(model, trial, **old)
                finally:
                    self._saver.is_by_flag = False
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)
                self._saver.end_of_event()

    def _evaluate(
        self, trial: Trial, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate within training, and step a schedule that depends on a metric."""
        metrics: dict[str, float] = self.evaluate(ignore_keys=ignore_keys_for_eval)
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if follows_metric(self.lr_scheduler) and not skip_scheduler:
            self.lr_scheduler.step(tracked_value(metrics, str(self.args.metric_for_best_model)))
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Trial) -> bool:
        """Compare an evaluation with the best one so far, and store it in the state if it is better.

        Raises:
            MissingMetric: The metric is not among them (a `KeyError`).
        """
        return update_best_metric(self.state, self.args, metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log numbers to `state.log_history` and to every callback.

        Args:
            logs: The numbers. The epoch is added.
            start_time: Start of training, for the tokens per second if tokens are counted.

        Mirrors:
            `transformers.Trainer.log`.
        """
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            seen = self.state.num_input_tokens_seen
            logs["num_input_tokens_seen"] = seen
            if start_time is not None:
                new = seen - self._initial_num_input_tokens_seen
                logs.update(speed_metrics("train", start_time, num_tokens=new))
        self.state.log_history.append({**loggable(logs), "step": self.state.global_step})
        if self._callbacks.lightning and self.lightning_trainer is not None:
            note_metrics(self.lightning_trainer, logs)  # so that callbacks may monitor `loss`, too
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def log_metric(self, name: str, value: LoggedValue, weight: float = 1.0) -> None:
        """Log the mean of a named value since the last log, from `compute_loss` or `training_step`.

        In an evaluation the mean over the batches is added to the metrics, with their prefix.

        Args:
            name: The name in the logs.
            value: A number, a tensor (which adds its mean and may stay on its device), or an updated torchmetrics
                `Metric`, which is computed and reset when it is logged.
            weight: Weight in the mean, for instance the samples of the batch.

        Raises:
            ArgumentError: The log already contains the name.
        """
        if name in ENTRIES:
            raise ArgumentError(
                f"`log_metric({brief(name)}, …)`: the log already has {brief(name)}.\n\nHint: use another name."
            )
        (self._run.losses.averages if self.model.training else self._evaluator.averages).add(name, value, weight)

    def _log_of_lightning(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Pass values logged by a Lightning callback to the history and to reporting HF callbacks."""
        logs = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        handler = self.callback_handler
        # The callback itself writes to Lightning loggers. Flags are kept, as a log may still be due.
        handler.active_ids = {id(c) for c in handler.callbacks if not isinstance(c, LoggerCallback)}
        try:
            self.control = handler.call_event("on_log", self.args, self.state, self.control, logs=logs)
        finally:
            handler.active_ids = None

    def store_flos(self) -> None:
        """Add the floating-point operations counted since the last call to the state."""
        flos = self.current_flos
        if is_distributed():
            flos = self.accelerator.reduce(torch.tensor(flos, device=self.args.device)).item()
            flos //= self.accelerator.rank_slice.sharing
        self.state.total_flos += flos
        self.current_flos = 0

    metrics_format = staticmethod(metrics_format)

    def log_metrics(self, split: str, metrics: Mapping[str, object]) -> None:
        """Print metrics as a table.

        Args:
            split: `train`, `eval`, `test` …
            metrics: The result of train, evaluate or predict.
        """
        if not self.is_world_process_zero():
            return
        shown = metrics_format(metrics)
        names = max((len(str(name)) for name in shown), default=0)
        values = max((len(str(value)) for value in shown.values()), default=0)
        rows = (f"  {name:<{names}} = {shown[name]!s:>{values}}" for name in sorted(shown))
        print("\n".join([f"***** {split} metrics *****", *rows]))  # noqa: T201 - as documented

    def save_metrics(self, split: str, metrics: Mapping[str, object], combined: bool = True) -> None:
        """Write metrics to `{split}_results.json`, and add them to `all_results.json`.

        Args:
            split: `train`, `eval`, `test` …
            metrics: The result of train, evaluate or predict.
            combined: Whether to write `all_results.json`, too.
        """
        if not self.is_world_process_zero():
            return
        folder = str(self.args.output_dir)
        self._saver.check_folder(folder)
        local_path("split", f"{split}_results.json")
        os.makedirs(folder, exist_ok=True)
        for name, is_joint in ((split, False), ("all", True)) if combined else ((split, False),):
            path, values = os.path.join(folder, f"{name}_results.json"), plain_metrics(metrics, "evaluate")
            if is_joint and os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    values = {**json.load(file), **values}
            with open(path, "w", encoding="utf-8") as file:
                json.dump(values, file, indent=4, sort_keys=True)
        self._saver.mirror.store_files()

    def save_state(self) -> None:
        """Write the state to `trainer_state.json` in the output folder."""
        if self.is_world_process_zero():
            self._saver.check_folder(str(self.args.output_dir))
            os.makedirs(str(self.args.output_dir), exist_ok=True)
            self.state.save_to_json(os.path.join(str(self.args.output_dir), TRAINER_STATE_NAME))
            self._saver.mirror.store_files()

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return bool(self.args.process_index == 0)

    # Their names in 3.x
    def is_local_master(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.is_local_process_zero()

    def is_world_master(self) -> bool:
        """Whether this is the first process of all."""
        return self.is_world_process_zero()
