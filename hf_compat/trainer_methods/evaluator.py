"""`Evaluator` runs the evaluations of a Trainer with Lightning."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from hf_compat.callbacks.bridge import HFBridge
from hf_compat.data.types import DataSource, Loader
from hf_compat.engine.evaluation import WHOLE, ComputeMetrics, EvaluationBatches, EvaluationPart, EvaluationRun
from hf_compat.engine.evaluation_contract import tell_of_nothing
from hf_compat.engine.internals import is_validating_within_fit, run_validation
from hf_compat.engine.module import WindowModule
from hf_compat.engine.strategies import wrap_forward
from hf_compat.engine.window_trainer import WindowTrainer
from hf_compat.errors import SearchError
from hf_compat.hf.metrics import EvalLoopOutput, speed_metrics
from hf_compat.hf.search import Metrics
from hf_compat.optim.stepping import behaviour_of
from hf_compat.plan.translate import LightningPlan
from hf_compat.runtime.collectives import gather_objects, naming_absent_ranks
from hf_compat.runtime.console import log_line
from hf_compat.runtime.inspection import has_length
from hf_compat.runtime.nested import Nested, join_batches
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.trainer_methods.fit import make_lightning_trainer, make_module
from hf_compat.trainer_methods.run_parts import run_parts
from hf_compat.trainer_methods.trainer_base import TrainerBase
from hf_compat.training_run.loss_log import StepAverages
from hf_compat.training_run.run import TrainingRun


class Evaluator:
    """Runs the evaluations of a Trainer, within a fit and outside of one."""

    def __init__(self, host: TrainerBase) -> None:
        self._host = host
        self.averages = StepAverages()  # of the named values that the steps of an evaluation log
        self.is_prepared = False  # the model is compiled and timed, only in a first evaluation before training
        self._name: str | None = None  # of the data set, if there are several
        self._part = WHOLE
        self.kept: _OutsideFit | None = None  # the last trainer of an evaluation

    def evaluate_each(self, datasets: Mapping[str, DataSource], ignore_keys: list[str] | None, prefix: str) -> Metrics:
        """Evaluate several data sets with the Trainer's `evaluate`, each under a prefix with its name.

        A data set may be given by its name, for an overridden `get_eval_dataloader`.
        """
        metrics: Metrics = {}
        last = len(datasets) - 1
        if not datasets:
            tell_of_nothing(is_prediction=False)
        try:
            for place, (name, dataset) in enumerate(datasets.items()):
                self._name = name
                self._part = EvaluationPart(is_first=place == 0, is_last=place == last, earlier=metrics)
                metrics |= self._host.evaluate(
                    eval_dataset=dataset, ignore_keys=ignore_keys, metric_key_prefix=f"{prefix}_{name}"
                )
        finally:
            self._name, self._part = None, WHOLE
        return metrics

    @property
    def compute_metrics(self) -> ComputeMetrics | None:
        """The metrics of this evaluation. With several data sets each may have its own."""
        given = self._host.compute_metrics
        return given.get(str(self._name)) if isinstance(given, Mapping) else given

    def run(
        self, loader: Loader, description: str, loss_only: bool, ignore_keys: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        """Evaluate or predict the batches of a loader, and return what `evaluation_loop` returns."""
        host, args = self._host, self._host.args
        part, self._part = self._part, WHOLE  # an evaluation within it, by a callback, is a whole one
        if host.model is None:
            raise SearchError(
                "The Trainer has no model, as the search has dropped that of its last trial.\n\n"
                "Hint: set the best run's arguments, call `train()`, then evaluate. Or load the best run's checkpoint."
            )
        plan = host._plan.of(args, host.model)
        if not host.is_in_train and args.process_index == 0:
            host._plan.tell_in_evaluation(args, functools.partial(run_parts, host))
        host._call_wrap_model(training=False)
        started = time.time()
        host.is_deepspeed_enabled = plan.strategy == "deepspeed"
        if not host.is_deepspeed_enabled:
            wrap_forward(host.model, plan.precision, args.device.type)
        model = host.model
        if not self.is_prepared:  # as upstream, a first evaluation before any training is timed and runs compiled
            self.is_prepared = True
            host.model_wrapped = model = host.compiled(model)
            host.model_preparation_time = round(time.time() - started, 4)
        # Outside training, use the precision of full evaluations. Use the optimizer's averaged weights, if any.
        if not host.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
            host.model.to(dtype=torch.float16 if args.fp16_full_eval else torch.bfloat16, device=args.device)
        behaviour_of(host.optimizer).to_evaluation()
        host.callback_handler.eval_dataloader = loader
        log_line(f"\n***** Running {description} *****")
        log_line(f"  Num examples = {host.num_examples(loader)}" if has_length(loader) else "  Num examples: Unknown")
        log_line(f"  Batch size = {args.eval_batch_size}")
        gather, drops_fillers = self._gather()
        run = EvaluationRun(
            host,
            model,
            loader,
            prefix,
            loss_only=loss_only,
            ignore_keys=ignore_keys,
            is_prediction=description == "Prediction",
            compute_metrics=self.compute_metrics,
            preprocess_logits=host.preprocess_logits_for_metrics,
            gather=gather,
            logged_values=self.averages.take,
            drops_fillers=drops_fillers,
        )
        with host.accelerator.passes.reading(loader):
            batches = EvaluationBatches(run.loader, part)
            if batches.length == 0:  # Lightning skips an empty evaluation, including its switch to eval mode
                next(iter(batches), None)  # as upstream, the loader draws a random number
                host.model.eval()
            module, trainer = host._run.module, host._run.lightning_trainer
            if module is not None and trainer is not None and not is_validating_within_fit(trainer):
                with module.evaluating(run):
                    run_validation(trainer, batches)
            else:
                with self._outside_fit(plan) as own, own.module.evaluating(run):
                    command = own.trainer.test if run.is_prediction else own.trainer.validation_of(part)
                    own.trainer.run_command(command, own.module, dataloaders=batches, verbose=False)
        return run.output or run.finish()

    def add_speed(self, output: EvalLoopOutput, prefix: str, start_time: float) -> Metrics:
        """Add an evaluation's duration, and its samples and batches per second, to its metrics."""
        metrics = output.metrics if output.metrics is not None else {}
        start_time += metrics.get(f"{prefix}_model_preparation_time", 0.0)
        samples, args = output.num_samples or 0, self._host.args
        batches = math.ceil(samples / (args.eval_batch_size * args.world_size))
        metrics.update(speed_metrics(prefix, start_time, num_samples=samples, num_steps=batches))
        return metrics

    def _gather(self) -> tuple[Callable[[Nested], Nested], bool]:
        """Choose whether to gather results as tensors, as objects, or as a subclass defines.

        A subclass's function drops samples that fill up the last batch itself. Otherwise the run has to.
        """
        host = self._host
        own, chosen = host.accelerator.gather_for_metrics, vars(host).get("gather_function")
        if chosen is not None or _is_another_way(own):
            host.gather_function = own  # as upstream, an override applies to one evaluation only
        if chosen is not None and _is_another_way(chosen):
            return chosen, False
        if host.args.eval_use_gather_object and host.args.world_size > 1:
            every = host.accelerator.rank_slice.sharing  # each model's first process
            return lambda data: join_batches(gather_objects(data)[::every]), True
        return host.accelerator.gather, True

    @contextlib.contextmanager
    def _outside_fit(self, plan: LightningPlan) -> Iterator[_OutsideFit]:
        """Prepare a Lightning trainer for an evaluation outside a fit, the last one if it is still up to date."""
        host, callbacks = self._host, self._host._callbacks
        kept, self.kept = self.kept, None
        is_new = kept is None or kept.run is not host._run or kept.model is not host.model or kept.plan != plan
        if kept is None or is_new or callbacks.lightning or host._lightning_options:
            bridge = HFBridge(host, host._run, host._saver)
            # EarlyStopping chooses its hook in `setup`, by the trainer's validation interval
            looked_at = plan if host.args.eval_strategy == "no" else dataclasses.replace(plan, validate_every_updates=1)
            trainer = make_lightning_trainer(host, looked_at, bridge)
            kept = _OutsideFit(plan, host._run, host.model, trainer, make_module(host, plan), bridge)
        if host._run.module is None:
            host.lightning_trainer = kept.trainer
        kept.bridge.keep_requested_kwargs()
        config = plan.strategy_options.get("config")  # DeepSpeed's
        try:
            with naming_absent_ranks(), host._model_state.running(config) if config else contextlib.nullcontext():
                yield kept
        finally:
            kept.bridge.keep_requested_kwargs(False)
        self.kept = kept  # only after success, as an error may leave it in any state


@dataclasses.dataclass(frozen=True, slots=True)
class _OutsideFit:
    """The trainer for evaluations outside a fit, and the objects that it was made for."""

    plan: LightningPlan
    run: TrainingRun
    model: nn.Module
    trainer: WindowTrainer
    module: WindowModule
    bridge: HFBridge


def _is_another_way(gather: Callable[[Nested], Nested]) -> bool:
    """Whether results are gathered by anything but our accelerator's own method."""
    return getattr(gather, "__func__", None) is not AcceleratorFacade.gather_for_metrics
