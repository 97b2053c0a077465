"""`WindowModule`: a model as a LightningModule whose batch is a window of micro-batches."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import LRSchedulerConfig, OptimizerLRScheduler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric, MetricCollection

from hf_compat.checkpoint.convert import OWN_KEY
from hf_compat.checkpoint.run_state import readable_checkpoint
from hf_compat.engine.compiled_update import CompiledUpdate, reason_against, tell_of_uncompiled
from hf_compat.engine.evaluation import EvaluationBatch, EvaluationRun
from hf_compat.engine.internals import (
    HooksOfPlainBatches,
    attached_trainer,
    batch_under_way,
    call_before_zero_grad,
    is_training_batch,
    note_for_callbacks,
    replace_optimizer,
    validates_after_this_batch,
    warn_of_newer_lightning,
)
from hf_compat.engine.strategies import UpdateMechanics
from hf_compat.engine.windows import BatchGroup, GradNorm, TrainingSteps, UpdateObserver, Window, Windows
from hf_compat.optim.lr_schedulers import DeepSpeedSchedule, follows_metric, is_schedule_of
from hf_compat.optim.prepared import PreparedOptimizer, unwrap_optimizer
from hf_compat.optim.stepping import OptimizerBehaviour, behaviour_of
from hf_compat.plan.translate import compilation_of
from hf_compat.runtime.inspection import calling_like_upstream, is_replaced
from hf_compat.runtime.module_tree import ModuleTree
from hf_compat.runtime.nested import Nested, find_batch_size

logger = logging.getLogger(__name__)

# What upstream passes to `training_step` positionally.
STEP_PARAMETERS = ("model", "inputs", "num_items_in_batch")


def samples_of(micro_batches: Iterable[object]) -> int:
    """Count the samples of micro-batches, or 1 if their data does not say how many there are."""
    return sum(find_batch_size(inputs) or 0 for inputs in micro_batches) or 1


def is_stepped_by_hf(config: LRSchedulerConfig, own: object) -> bool:
    """Whether `config` holds HF's schedule `own`, which each update or evaluation steps.

    A subclass may have given it another interval, or a metric of its own. Then Lightning steps it.
    """
    is_as_made = config.interval == "step" and config.frequency == 1 and not config.reduce_on_plateau
    return config.scheduler is own and is_as_made


class WindowModule(HooksOfPlainBatches):
    """A model that trains as HF's Trainer trains it: one Lightning batch is one update.

    Optimization is manual: micro-batches, clipping, step, schedule, zeroing, in HF's order.

    Args:
        model: Any module whose forward returns the loss: as `.loss`, as the key `"loss"`, or first in a tuple.
        steps: The owner of the overridable steps: a Trainer, or `NativeSteps`.
        compute_metrics: Metrics of validation and test if no Trainer runs the evaluation. A torchmetrics object, a
            function that makes one, or a function of an `EvalPrediction`.
    """

    # whether the module logs the metrics of an evaluation to Lightning's loggers, as without a Trainer
    logs_to_lightning = False
    # set at the start of a fit, with the steps' optimizer and schedule at that time
    mechanics: UpdateMechanics
    _in_force: tuple[object, object]
    # learning rate (before the schedule stepped) and gradient norm of the last update
    measured: Mapping[str, Any] = {}
    # a faster optimizer step than Lightning's, if only callbacks have hooks there. `LeanEpochLoop` sets it
    take_step: Callable[[], None] | None = None
    # parameters that an update trains although they are not part of the model
    parameters_outside_model: Sequence[str] = ()

    def __init__(
        self,
        model: nn.Module,
        steps: TrainingSteps,
        compute_metrics: Metric | MetricCollection | Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        warn_of_newer_lightning()
        self.automatic_optimization = False
        self.model = model
        self.steps = steps
        self.compute_metrics = compute_metrics
        self.observer = UpdateObserver()
        self.evaluation: EvaluationRun | None = None
        self.num_training_updates: int | None = None
        self._calls_before_zero_grad = True

    def log(self, name: str, value: object, *args: object, **kwargs: object) -> None:
        """Log a value as any LightningModule does. In means it is weighted by the samples of the batch."""
        batch = batch_under_way(self)
        if kwargs.get("batch_size") is None and isinstance(batch, BatchGroup):
            kwargs["batch_size"] = samples_of(batch)
        super().log(name, value, *args, **kwargs)  # type: ignore[arg-type]  # passed on unchanged

    def forward(self, *args: object, **kwargs: object) -> Nested:
        """Call the model."""
        return self.model(*args, **kwargs)

    def configure_optimizers(self, updates: int | None = None) -> OptimizerLRScheduler:
        """Make the optimizer, and the schedule for a number of updates. Updates step the schedule, not Lightning."""
        planned = self.num_training_updates if updates is None else updates
        assert planned is not None  # set before a fit of the Trainer
        self.steps.create_optimizer_and_scheduler(planned)
        optimizer, scheduler = self.steps.optimizer, self.steps.lr_scheduler
        if scheduler is None or not is_schedule_of(scheduler, optimizer):
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the position in the data, which Lightning saves within epochs only, and make values readable."""
        self.stepping.tell_of_saving()
        checkpoint.update(readable_checkpoint(checkpoint))
        trainer = attached_trainer(self)  # None after processes that were spawned for a fit
        windows = None if trainer is None else trainer.train_dataloader
        if not isinstance(windows, Windows):
            return
        # in a plain `lightning.Trainer` an epoch may end before its data
        is_over = self.logs_to_lightning and self.trainer.is_last_batch
        data = windows.position(is_over, before_last=is_training_batch(self.trainer), if_untrained=True)
        if self.trainer.world_size > 1:  # one rank writes for all, and each has read different batches ahead
            data = dataclasses.replace(data, lookahead=None, source=None)
        checkpoint[OWN_KEY] = {
            "windows": data.to_plain(),
            "updates": self.trainer.global_step,
            "validates_next": self.logs_to_lightning and validates_after_this_batch(self.trainer),
        }

    def on_fit_start(self) -> None:
        """Connect the steps' forward and backward passes to Lightning's strategy.

        A subclass has set their `model_wrapped`, which is compiled here if the arguments ask for it.
        """
        self.leave_fit()  # a fit that failed
        steps = self.steps
        wrapper = self.trainer.strategy.model
        self.mechanics = UpdateMechanics(steps, self.manual_backward, self.trainer.precision_plugin, wrapper)
        self.mechanics.begin(self, behaviour_of(*self.trainer.optimizers), self._rate_of_update)
        self._in_force = steps.optimizer, steps.lr_scheduler
        steps.model_wrapped = steps.compiled(steps.model_wrapped)
        steps.accelerator.run_backward = self.mechanics.backward
        steps.accelerator.compiled_update = self._compiled_update()
        steps._asks_for_count = True
        self._calls_before_zero_grad = is_replaced(self, "on_before_zero_grad", pl.LightningModule)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
            self._calls_before_zero_grad |= is_replaced(callback, "on_before_zero_grad", pl.Callback)

    def _compiled_update(self) -> CompiledUpdate | None:
        """Make the graphs of the updates, if the arguments ask for them and nothing known is against it."""
        steps = self.steps
        how = compilation_of(steps.args, of_update=True) if steps.args.compile_update else None
        if how is None:
            return None
        parameters = steps._tree.parameters(steps.model_wrapped)
        reason = reason_against(steps, self.mechanics, parameters, self.parameters_outside_model)
        if reason is not None:
            tell_of_uncompiled(reason)
            return None
        return CompiledUpdate(steps, how, clips=steps.clips_as_torch())

    @property
    def stepping(self) -> OptimizerBehaviour:
        """How the optimizers of the current or the last fit step."""
        mechanics: UpdateMechanics | None = self.__dict__.get("mechanics")
        return UpdateMechanics.stepping if mechanics is None else mechanics.stepping

    def leave_fit(self) -> None:
        """Remove the fit's hooks from the parameters and the optimizer, after it has ended or failed."""
        mechanics = self.__dict__.get("mechanics")
        if mechanics is not None:
            mechanics.end(self)
        if self.steps.accelerator.compiled_update is not None:
            self.steps.accelerator.compiled_update.end()
            self.steps.accelerator.compiled_update = None
        self.steps._tree = ModuleTree()  # the last one would keep a replaced model alive

    def training_step(self, window: Window, batch_idx: int) -> torch.Tensor | None:
        """Make one update: forward and backward of each micro-batch, then clip, step, schedule and zero.

        Returns:
            The window's loss, detached.
        """
        steps, observer, mechanics = self.steps, self.observer, self.mechanics
        model, step = steps.model_wrapped, calling_like_upstream(steps.training_step, STEP_PARAMETERS)
        size = steps.current_gradient_accumulation_steps = len(window.micro_batches)
        total: torch.Tensor | None = None
        for index, inputs in enumerate(window.micro_batches, start=1):
            is_last = index == size
            # an optimizer's wrapper steps if an update ends. The last window of a stream may be incomplete
            ends_update = steps.accelerator.sync_gradients = is_last and window.is_complete
            if mechanics.exchange is not None:
                mechanics.exchange(is_last)
            is_first = steps._asks_for_count
            items = steps.watched_count(window.num_items) if is_first else window.num_items
            loss = step(model, inputs, items)
            if is_first:
                steps.judge_count(items, loss, inputs)
            observer.micro_batch_done(loss, inputs)
            total = loss if total is None else total + loss
            if ends_update:
                self._update(window)
                break
            observer.fire("on_substep_end")
            if observer.agree_to_stop():
                break
        return total

    def _update(self, window: Window) -> None:
        steps, mechanics = self.steps, self.mechanics
        model = self if self.parameters_outside_model else steps.model_wrapped  # whose gradients are clipped and zeroed
        if self._in_force[0] is not steps.optimizer or self._in_force[1] is not steps.lr_scheduler:
            self._take_over_replaced()
        # Either calls `on_before_optimizer_step`: `LeanEpochLoop._step_directly`, or Lightning's optimizer
        take_step = self.take_step or cast(LightningOptimizer, self.optimizers()).step
        if mechanics.engine is not None:
            take_step()
            grad_norm: GradNorm = mechanics.engine.get_global_grad_norm()
        else:
            if mechanics.scaling is not None:
                mechanics.scaling.unscale(unwrap_optimizer(steps.optimizer))
            compiled = steps.accelerator.compiled_update
            clipped = None if compiled is None else compiled.take_norm()
            if clipped is None and steps.args.max_grad_norm > 0:
                clipped = steps._clip_grad_norm(model)
            grad_norm = steps._get_grad_norm(model, grad_norm=clipped)
            take_step()
        # whether the gradient scaler skipped the step because of non-finite gradients
        is_skipped = mechanics.scaling is not None and mechanics.scaling.step_was_skipped
        window.is_trained = True
        self.observer.fire("on_optimizer_step")  # the gradients still exist
        is_replaced = self._has_other_schedule()
        own = None if is_replaced else steps.lr_scheduler
        # DeepSpeed's engine steps its own schedule with the optimizer, so upstream logs the rate of the next update
        is_of_deepspeed = isinstance(steps.lr_scheduler, DeepSpeedSchedule)
        if is_of_deepspeed and not is_skipped:
            self._step_schedules(own)
        rate = steps.optimizer.param_groups[0]["lr"] if is_replaced else steps._get_learning_rate()
        norms = {} if grad_norm is None else {"grad_norm": grad_norm}
        self.__dict__["measured"] = {"learning_rate": rate, **norms}
        if isinstance(steps.optimizer, PreparedOptimizer):
            steps.optimizer.step_was_skipped = is_skipped
        if not is_of_deepspeed and not is_skipped:
            self._step_schedules(own)
        if self._calls_before_zero_grad:
            call_before_zero_grad(self.trainer, unwrap_optimizer(steps.optimizer))
        steps._tree.zero_grad(model)
        self.observer.update_made(window, rate, grad_norm)

    def _take_over_replaced(self) -> None:
        """Switch to an optimizer or schedule that a callback has assigned to the steps."""
        (optimizer, schedule), steps = self._in_force, self.steps
        self._in_force = steps.optimizer, steps.lr_scheduler
        if steps.optimizer is not optimizer:
            replace_optimizer(self.trainer, unwrap_optimizer(steps.optimizer))
            self.mechanics.end(self)
            self.mechanics.begin(self, behaviour_of(*self.trainer.optimizers), self._rate_of_update)
            steps.accelerator.run_backward = self.mechanics.backward  # the new optimizer may run the backward pass
        for config in self.trainer.lr_scheduler_configs:
            if config.scheduler is schedule and steps.lr_scheduler is not None:
                config.scheduler = steps.lr_scheduler

    def _rate_of_update(self) -> float:
        """Return the learning rate, for an optimizer that needs it in the backward pass."""
        optimizer = self.trainer.optimizers[0]
        if optimizer is unwrap_optimizer(self.steps.optimizer) and not self._has_other_schedule():
            return self.steps._get_learning_rate()
        return float(optimizer.param_groups[0]["lr"])

    def _step_installed(self, moment: Literal["step", "epoch"]) -> None:
        """Step the schedules that a callback has installed and that are due."""
        count = self.trainer.global_step if moment == "step" else self.trainer.current_epoch + 1
        for config in self.trainer.lr_scheduler_configs:
            is_due = config.interval == moment and not config.reduce_on_plateau and count % config.frequency == 0
            if is_due and config.scheduler is not self.steps.lr_scheduler:
                config.scheduler.step()  # type: ignore[call-arg]  # it follows no metric

    def _step_schedules(self, own: LRScheduler | None) -> None:
        """Step those that a callback has installed for each update, and the steps' `own`."""
        self._step_installed("step")
        if own is None or follows_metric(own):
            return
        # Step the schedule for its own parameter groups only. A group that a callback has added keeps its rate
        groups = self.steps.optimizer.param_groups
        known = len(getattr(own, "base_lrs", groups))
        added = groups[known:]
        for group in added:
            group.setdefault("initial_lr", group["lr"])  # the other groups have it, so checkpoints expect it
        del groups[known:]
        try:
            own.step()
        finally:
            groups.extend(added)

    def _has_other_schedule(self) -> bool:
        """Whether others replace the steps' own schedule, as a callback or a subclass has installed them."""
        configs, own = self.trainer.lr_scheduler_configs, self.steps.lr_scheduler
        return bool(configs) and not any(is_stepped_by_hf(config, own) for config in configs)

    def end_epoch(self) -> None:
        """Finish the epoch's data. Step a per-epoch schedule, which weight-averaging callbacks install.

        A checkpoint at the epoch's end stores the next epoch's rate.
        """
        windows = self.trainer.train_dataloader
        if isinstance(windows, Windows):
            windows.finish_epoch()
        self._step_installed("epoch")

    def __getstate__(self) -> dict[str, object]:
        """Leave out the state of a running fit, including its trainer. A copy or a pickle has no fit."""
        state: dict[str, object] = super().__getstate__()
        if self.logs_to_lightning:
            state["observer"] = UpdateObserver()
        return {name: value for name, value in state.items() if name not in ("mechanics", "_in_force")}

    def __deepcopy__(self, memo: dict[int, Any]) -> WindowModule:
        """Copy the model for weight-averaging callbacks. A Trainer and its data are shared, steps of its own copied."""
        shared = () if self.logs_to_lightning else (self.steps, self.observer, self.evaluation)
        memo = memo | {id(one): one for one in shared}
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return copied

    def validation_step(self, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor | None:
        """Predict one batch, keep its results for the metrics, and return its loss."""
        assert self.evaluation is not None  # a Trainer evaluates. HFModule has a step of its own
        # Lightning disables gradients, and the prediction step may need them
        with torch.enable_grad():
            return self.evaluation.step(batch)

    # Lightning asks for it at each start of a loop
    vars(validation_step)["__signature__"] = inspect.signature(validation_step)
    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Compute the metrics and log them, so that `on_validation_end` finds them in `callback_metrics`."""
        numbers = self.evaluated_numbers()
        for name, value in () if self.trainer.barebones else numbers.items():
            if self.logs_to_lightning:
                self.log(name, value, batch_size=1, sync_dist=True, reduce_fx="max")
            else:  # with a Trainer, HF's own log goes to the trackers
                note_for_callbacks(self.trainer, name, value)

    on_test_epoch_end = on_validation_epoch_end

    def evaluated_numbers(self, metrics: Mapping[str, object] | None = None) -> dict[str, float]:
        """Return the numeric metrics of the evaluation that is ending, by default those of the Trainer's."""
        run, numbers = self.evaluation, {}
        if metrics is None:
            assert run is not None  # as above
            metrics = (run.output or run.finish()).metrics or {}
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                numbers[name] = float(value)
        return numbers

    @contextlib.contextmanager
    def evaluating(self, run: EvaluationRun) -> Iterator[None]:
        """Collect the batches that are validated within the context in `run`."""
        fields = self.__dict__  # `nn.Module` searches for a parameter of that name first
        previous, fields["evaluation"] = self.evaluation, run
        try:
            yield
        finally:
            fields["evaluation"] = previous
