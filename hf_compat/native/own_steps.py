"""A user-defined `training_step`. It returns a loss for HF's update, or makes updates itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_compat.data.types import Batch
from hf_compat.engine.strategies import autocast_of
from hf_compat.engine.windows import Items, Window
from hf_compat.errors import ArgumentError, LossError, OverrideError, warn_user
from hf_compat.hf.enums import SchedulerType
from hf_compat.native.steps import NativeSteps
from hf_compat.optim.lr_schedulers import follows_metric, is_schedule_of
from hf_compat.optim.stepping import Stepping
from hf_compat.runtime.inspection import accepting
from hf_compat.runtime.launch import empty_device_cache
from hf_compat.runtime.nested import nested_detach
from hf_compat.trainer_methods.steps import checked_loss, raise_for_bad_loss

Step = Callable[..., object]


def serve_own_step(module: pl.LightningModule, stepping: Stepping) -> None:
    """Prepare a module with a user-defined `training_step` for its optimizers, as HF's steps do themselves.

    Raises:
        ArgumentError: Lightning is to accumulate or clip gradients, and the optimizer leaves none.
    """
    unset = {"accumulate_grad_batches": (1, 0), "gradient_clip_val": (None, 0)}
    for name, values in unset.items() if stepping.steps_in_backward and module.automatic_optimization else ():
        value = getattr(module.trainer, name)
        if value not in values:
            raise ArgumentError(
                f"`{name}={value!r}` of lightning.Trainer needs gradients, and this optimizer updates each parameter "
                "in the backward pass.\n\nHint: leave it out, or choose another optimizer."
            )
    if stepping.switches:
        own = module.on_train_batch_start

        def on_train_batch_start(batch: Batch, batch_idx: int) -> int | None:
            stepping.to_training()
            return own(batch, batch_idx)

        module.__dict__["on_train_batch_start"] = on_train_batch_start


def leave_own_step(attributes: dict[str, object]) -> None:
    """Restore the attributes of a module, or a copy of them, in which a fit has put its form of the step."""
    attributes.pop("on_train_batch_start", None)
    own = attributes.pop("_own_step", None)
    if isinstance(own, (AuthorStep, GuardedStep)):
        attributes.pop("training_step", None)
        if own.before is not None:
            attributes["training_step"] = own.before


class AuthorStep:
    """A `training_step` that returns a loss. HF's update calls it for each micro-batch and trains with its loss.

    It replaces HF's own `training_step(model, inputs, num_items_in_batch)`.

    Attributes:
        runs: Whether the step is running.
        batch: Its last micro-batch.
        output: The mapping that it returned last, detached.
        logged: Names of the values that it has logged.
    """

    def __init__(self, module: pl.LightningModule, steps: NativeSteps) -> None:
        self.module, self.steps = module, steps
        self.before = module.__dict__.get("training_step")  # torch.compile puts one into the module itself
        self.step: Step = type(module).training_step.__get__(module)
        self.takes_index = is_param_in_hook_signature(self.step, "batch_idx", min_args=2)
        self.runs, self.batch_idx = False, 0
        self.batch: Batch = None
        self.output: Mapping[str, object] | None = None
        self.logged: set[str] = set()
        self._items: Items = None
        self._losses_of_hf: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, model: nn.Module, inputs: Batch, num_items_in_batch: Items = None) -> torch.Tensor:
        """Run the step on a micro-batch, then the backward pass of its loss.

        Raises:
            OverrideError: The step has made an update itself.
            LossError: The step returned no loss with a gradient.
        """
        steps, updates = self.steps, self.module.trainer.global_step
        self._items, self._losses_of_hf = num_items_in_batch, {}
        batch = self.batch = steps._prepare_input(inputs)
        self.runs = True
        try:
            with autocast_of(self.module.trainer.precision_plugin, steps.args.device.type):
                result = self.step(batch, self.batch_idx) if self.takes_index else self.step(batch)
        finally:
            self.runs = False
        self.batch_idx += 1
        every = steps.args.torch_empty_cache_steps
        if every is not None and steps.state.global_step % every == 0:
            empty_device_cache()
        if self.module.trainer.global_step != updates:
            raise makes_updates(self.module, "stepped an optimizer")
        loss = result.get("loss") if isinstance(result, Mapping) else result
        self.output = nested_detach(dict(result)) if isinstance(result, Mapping) else None
        if loss is None:
            return torch.zeros((), device=steps.args.device)  # as in Lightning, such a batch trains nothing
        if not isinstance(loss, torch.Tensor):
            raise LossError(
                f"`training_step` of {type(self.module).__name__} returned {type(loss).__name__} instead of a loss.\n\n"
                "Hint: return a tensor, or a mapping with one under `loss`. None leaves a batch out."
            )
        size = steps.current_gradient_accumulation_steps
        if size != 1:
            own, is_scaled = self._losses_of_hf.get(id(loss), (None, loss))
            # HF's own loss stays as it is, to the last bit
            is_of_hf = own is loss and steps._is_scaled_for_window(num_items_in_batch)
            loss = is_scaled if is_of_hf else loss / size
        self._losses_of_hf = {}
        try:
            steps.accelerator.backward(loss)
        except RuntimeError as error:
            raise_for_bad_loss(loss, error, self.module)
            raise
        return loss.detach()

    def update_made(self, loss: torch.Tensor | None) -> STEP_OUTPUT:
        """The output of an update for callbacks: the step's mapping with the update's loss, or the loss."""
        return loss if self.output is None else {**self.output, "loss": loss}

    def loss_of_hf(self, batch: Batch) -> torch.Tensor:
        """Compute HF's loss of a micro-batch, for a step that calls `super().training_step(…)`.

        A loss that is divided by the items of the whole window is scaled to a mean over micro-batches, as any other
        loss is. Terms that the step adds then have the same weight.
        """
        with torch.autocast(self.steps.args.device.type, enabled=False):  # as HF, around the model's forward only
            loss = loss_of_micro_batch(self.steps, batch, self._items)
        size = self.steps.current_gradient_accumulation_steps
        shown = loss * size if size != 1 and self.steps._is_scaled_for_window(self._items) else loss
        self._losses_of_hf[id(shown)] = shown, loss
        return shown


def loss_of_micro_batch(steps: NativeSteps, batch: Batch, num_items: Items = None) -> torch.Tensor:
    """Compute HF's loss of a micro-batch, with its graph."""
    inputs = steps._prepare_inputs(batch)
    with steps.compute_loss_context_manager():
        compute_loss = accepting(steps.compute_loss, "num_items_in_batch")
        return checked_loss(compute_loss(steps.model_wrapped, inputs, num_items_in_batch=num_items))


def loss_of_batch(steps: NativeSteps, batch: Batch | Window) -> torch.Tensor:
    """Compute HF's loss of a batch or a window, with its graph. A window's is the loss of its update."""
    if not isinstance(batch, Window):
        return loss_of_micro_batch(steps, batch)
    losses = [loss_of_micro_batch(steps, inputs, batch.num_items) for inputs in batch]
    total = torch.stack(losses).sum()
    return total if steps._is_scaled_for_window(batch.num_items) else total / len(losses)


def makes_updates(module: pl.LightningModule, what: str) -> OverrideError:
    """Make the error for a step that makes updates without `automatic_optimization = False`."""
    return OverrideError(
        f"`training_step` of {type(module).__name__} {what}, and an update is made of the loss that it returns.\n\n"
        "Hint: set `self.automatic_optimization = False` after `super().__init__(…)` to make the updates in "
        "`training_step`. Or return the loss only, and HFModule makes them."
    )


class GuardedStep:
    """A user-defined `training_step`, checked for losses that train nothing and for a schedule that it never steps.

    Attributes:
        made_update: Whether the running step has called HFModule's.
        loss_of_update: The loss that HFModule's step returned.
    """

    def __init__(self, module: pl.LightningModule, steps: NativeSteps) -> None:
        self.module, self.steps = module, steps
        self.before = module.__dict__.get("training_step")
        self.step: Step = module.training_step
        self.made_update = self.has_run = False
        self.loss_of_update: torch.Tensor | None = None
        self._count_before: int | None = None  # HF's schedule's, before the first update that the step made itself
        self._is_told = False
        functools.update_wrapper(self, self.step)

    def update_made(self, loss: torch.Tensor | None) -> STEP_OUTPUT:
        """Note that the running step has called HFModule's, which made an update."""
        self.made_update, self.loss_of_update = True, loss
        return loss

    def __call__(self, batch: Batch | Window, *args: object, **kwargs: object) -> object:
        """Run the step.

        Raises:
            OverrideError: The step returned a loss that trains nothing, or reads a window as one batch.
        """
        self._tell_of_schedule()
        self.made_update, self.loss_of_update, updates = False, None, self.module.trainer.global_step
        count = getattr(self.steps.lr_scheduler, "last_epoch", None)
        is_first = not self.has_run
        if isinstance(batch, Window):
            batch.poses_as_batch = False
        try:
            with _backward_passes(self.module, is_first) as passes:
                result = self.step(batch, *args, **kwargs)
        finally:
            if isinstance(batch, Window):
                batch.poses_as_batch = True
        self._check(result, bool(passes))
        made_its_own = self.module.trainer.global_step > updates and not self.made_update
        if made_its_own and self._count_before is None:
            self._count_before = count
        accumulated = self.steps.args.gradient_accumulation_steps
        if is_first and made_its_own and not isinstance(batch, Window) and accumulated > 1:
            raise OverrideError(
                f"`training_step` of {type(self.module).__name__} made an update of one batch, and "
                f"`gradient_accumulation_steps={accumulated}` of the arguments sets {accumulated}, which "
                "the schedule depends on.\n\nHint: leave the argument out, or take the data from an HFDataModule. "
                "Its batches are the micro-batches of an update."
            )
        self.has_run = True
        return result

    def _tell_of_schedule(self) -> None:
        """Warn once of HF's schedule if nothing has stepped it since the first update that the step made itself."""
        schedule, args = self.steps.lr_scheduler, self.steps.args
        if self._is_told or self._count_before is None or not is_schedule_of(schedule, self.steps.optimizer):
            return
        self._is_told = True
        is_constant = follows_metric(schedule) or args.lr_scheduler_type == SchedulerType.CONSTANT
        if is_constant or schedule.last_epoch != self._count_before:
            return
        rate = self.steps.optimizer.param_groups[0]["lr"]
        clipping = f" `max_grad_norm={args.max_grad_norm}` is left to the step, too: `self.clip_gradients(…)`."
        warn_user(
            f"`training_step` of {type(self.module).__name__} made an update (`automatic_optimization = False`), and "
            f"nothing has stepped the schedule: the learning rate stays {rate:g}.\n\n"
            "Hint: call `self.lr_schedulers().step()` after each step of the optimizer."
            + (clipping if args.max_grad_norm else "")
        )

    def _check(self, result: object, ran_backward: bool) -> None:
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, torch.Tensor):
            return
        kind = type(self.module).__name__
        if self._differs_from_update(loss):
            raise OverrideError(
                f"`training_step` of {kind} changes the loss that `super().training_step()` returned. The update has "
                "been made by then, so the change would train nothing.\n\n"
                "Hint: override `compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None)`; return "
                "the loss as it is, and log other values by `self.log`."
            )
        if loss.requires_grad and not (self.made_update or self.has_run or ran_backward):
            raise OverrideError(
                f"`training_step` of {kind} returned a loss, and made no backward pass: nothing would be trained.\n\n"
                "Hint: set `self.automatic_optimization = True` after `super().__init__(…)`, and Lightning trains with "
                "the loss. Or call `self.manual_backward(loss)` and step `self.optimizers()`. Or override "
                "`compute_loss` instead of `training_step`."
            )

    def _differs_from_update(self, loss: torch.Tensor) -> bool:
        made = self.loss_of_update
        if made is None or loss is made:
            return False
        same_shape = loss.shape == made.shape
        return loss.requires_grad or not same_shape or not torch.allclose(loss.to(made), made, 0, 0, equal_nan=True)


@contextmanager
def _backward_passes(module: pl.LightningModule, watches: bool) -> Iterator[list[object]]:
    """Collect the gradients that reach a parameter within the context."""
    passes: list[object] = []
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad] if watches else []
    handles: list[RemovableHandle] = [
        parameter.register_hook(lambda _: passes.append(True))  # type: ignore[no-untyped-call]  # torch's
        for parameter in parameters
    ]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()
