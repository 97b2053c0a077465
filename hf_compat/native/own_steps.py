"""A `training_step` of the user's own: HF's update is made of the loss that it returns, or it makes updates itself.

The steps of HF's switch schedule-free optimizers themselves, and count their micro-batches; others do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_compat.data.tree import nested_detach
from hf_compat.data.types import Batch
from hf_compat.engine.precision import autocast_of
from hf_compat.engine.windows import Items, Window
from hf_compat.errors import ArgumentError, LossError, OverrideError
from hf_compat.native.steps import NativeSteps
from hf_compat.optim.stepping import Stepping
from hf_compat.runtime.inspection import call_with_optional
from hf_compat.trainer_methods.steps import checked_loss, raise_for_bad_loss

Step = Callable[..., object]


def serve_own_step(module: pl.LightningModule, stepping: Stepping) -> None:
    """Give a module with a `training_step` of its own what the steps of HF's do for its optimizers.

    Raises:
        ArgumentError: Lightning is to accumulate or clip gradients, and there are none after a backward pass.
    """
    if stepping.steps_in_backward and module.automatic_optimization:
        _refuse_gradients(module.trainer)
    if stepping.switches:
        own = module.on_train_batch_start

        def on_train_batch_start(batch: Batch, batch_idx: int) -> int | None:
            stepping.to_training()
            return own(batch, batch_idx)

        module.__dict__["on_train_batch_start"] = on_train_batch_start


def leave_own_step(module: pl.LightningModule | SimpleNamespace) -> None:
    """Give the module, or a copy of its attributes, its own hook back."""
    module.__dict__.pop("on_train_batch_start", None)
    GuardedStep.leave(module)


class AuthorStep:
    """A `training_step` that returns a loss: HF's update calls it for each micro-batch, and trains by what it returns.

    It takes the place of HF's own `training_step(model, inputs, num_items_in_batch)`.

    Args:
        module: Whose step it is.
        steps: The steps of the module; their arguments say how many micro-batches make an update.

    Attributes:
        runs: Whether the step is under way.
        batch: The micro-batch that it was given last.
        output: The mapping that it returned last, detached.
        logged: Names of the values that it has logged.
    """

    def __init__(self, module: pl.LightningModule, steps: NativeSteps) -> None:
        self.module, self.steps = module, steps
        self.step: Step = type(module).training_step.__get__(module)
        self.takes_index = is_param_in_hook_signature(self.step, "batch_idx", min_args=2)
        self.runs, self.batch_idx = False, 0
        self.batch: Batch = None
        self.output: Mapping[str, object] | None = None
        self.logged: set[str] = set()
        self._items: Items = None
        self._losses_of_hf: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, model: nn.Module, inputs: Batch, num_items_in_batch: Items = None) -> torch.Tensor:
        """Run the step on a micro-batch, and the backward pass of its loss.

        Raises:
            OverrideError: It has made an update itself.
            LossError: It returned no loss with a gradient.
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
        steps._empty_cache_in_time()
        if self.module.trainer.global_step != updates:
            raise makes_updates(self.module, "stepped an optimizer")
        loss = result.get("loss") if isinstance(result, Mapping) else result
        self.output = nested_detach(dict(result)) if isinstance(result, Mapping) else None
        if loss is None:
            return torch.zeros((), device=steps.args.device)  # as in Lightning, such a batch trains nothing
        if not isinstance(loss, torch.Tensor):
            raise LossError(
                f"`training_step` of {type(self.module).__name__} returned {type(loss).__name__}, and no loss.\n\n"
                "Hint: return a tensor, or a mapping with one under `loss`; or None to leave a batch out."
            )
        loss, self._losses_of_hf = self._scaled(loss), {}
        try:
            steps.accelerator.backward(loss)
        except RuntimeError as error:
            raise_for_bad_loss(loss, error, self.module)
            raise
        return loss.detach()

    def update_made(self, loss: torch.Tensor | None) -> STEP_OUTPUT:
        """Return what callbacks are given of an update: what the step returned beside its loss."""
        return loss if self.output is None else {**self.output, "loss": loss}

    def loss_of_hf(self, batch: Batch) -> torch.Tensor:
        """Return HF's loss of a micro-batch, for a step that calls `super().training_step(…)`.

        A loss that is divided by the items of the whole window is given as their mean over its micro-batches, as any
        other loss: what the step adds has the same weight then.
        """
        with torch.autocast(self.steps.args.device.type, enabled=False):  # as HF, around the model's forward only
            loss = loss_of_micro_batch(self.steps, batch, self._items)
        size = self.steps.current_gradient_accumulation_steps
        shown = loss * size if size != 1 and self.steps._is_scaled_for_window(self._items) else loss
        self._losses_of_hf[id(shown)] = shown, loss
        return shown

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        size = self.steps.current_gradient_accumulation_steps
        own, is_scaled = self._losses_of_hf.get(id(loss), (None, loss))
        if size == 1:
            return loss
        if own is loss and self.steps._is_scaled_for_window(self._items):
            return is_scaled  # to the last bit what HF trains by
        return loss / size


def loss_of_micro_batch(steps: NativeSteps, batch: Batch, num_items: Items = None) -> torch.Tensor:
    """Return HF's loss of a micro-batch, with its graph."""
    inputs = steps._prepare_inputs(batch)
    with steps.compute_loss_context_manager():
        return checked_loss(
            call_with_optional(
                steps.compute_loss, steps.model_wrapped, inputs, optional={"num_items_in_batch": num_items}
            )
        )


def loss_of_batch(steps: NativeSteps, batch: Batch | Window) -> torch.Tensor:
    """Return HF's loss of what a loader gave, with its graph: of a window the loss that its update trains by."""
    if not isinstance(batch, Window):
        return loss_of_micro_batch(steps, batch)
    losses = [loss_of_micro_batch(steps, inputs, batch.num_items) for inputs in batch]
    total = torch.stack(losses).sum()
    return total if steps._is_scaled_for_window(batch.num_items) else total / len(losses)


def makes_updates(module: pl.LightningModule, what: str) -> OverrideError:
    """Return the error for a step that makes updates, and does not say so."""
    return OverrideError(
        f"`training_step` of {type(module).__name__} {what}, and an update is made of the loss that it returns.\n\n"
        "Hint: set `self.automatic_optimization = False` after `super().__init__(…)` to make the updates in "
        "`training_step`; or leave that to HFModule, and return the loss."
    )


class GuardedStep:
    """A `training_step` of the user's own, which is watched for losses that nothing trains by.

    Args:
        module: Whose step it is.
        accumulated: Batches that an update takes, as the arguments say.

    Attributes:
        made_update: Whether the step under way has called HFModule's.
        loss_of_update: What that returned.
    """

    def __init__(self, module: pl.LightningModule, accumulated: int) -> None:
        self.leave(module)  # of a fit that has failed
        self.module, self.accumulated = module, accumulated
        self.step: Step = module.training_step
        self.made_update = self.has_run = False
        self.loss_of_update: torch.Tensor | None = None
        self._own = module.__dict__.get("training_step")  # torch.compile puts one into the module itself
        functools.update_wrapper(self, self.step)
        module.__dict__["training_step"] = self

    @staticmethod
    def leave(module: pl.LightningModule | SimpleNamespace) -> None:
        """Give a module its own step back."""
        guarded = module.__dict__.get("training_step")
        if isinstance(guarded, GuardedStep):
            del module.__dict__["training_step"]
            if guarded._own is not None:
                module.__dict__["training_step"] = guarded._own

    def update_made(self, loss: torch.Tensor | None) -> STEP_OUTPUT:
        """Note that the step under way has called HFModule's, which made an update."""
        self.made_update, self.loss_of_update = True, loss
        return loss

    def __call__(self, batch: Batch | Window, *args: object, **kwargs: object) -> object:
        """Run the step.

        Raises:
            OverrideError: It returned a loss that trains nothing, or it reads a window as if that were one batch.
        """
        self.made_update, self.loss_of_update, updates = False, None, self.module.trainer.global_step
        watches = not self.has_run and not self.module.automatic_optimization
        if isinstance(batch, Window):
            batch.poses_as_batch = False
        try:
            with _backward_passes(self.module, watches) as passes:
                result = self.step(batch, *args, **kwargs)
        finally:
            if isinstance(batch, Window):
                batch.poses_as_batch = True
        if not self.module.automatic_optimization:
            self._check(result, bool(passes))
            if watches and not isinstance(batch, Window) and self.module.trainer.global_step > updates:
                self._check_accumulation()
        self.has_run = True
        return result

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
                "Hint: set `self.automatic_optimization = True` after `super().__init__(…)`, and Lightning trains by "
                "the loss; or call `self.manual_backward(loss)` and step `self.optimizers()`; or override "
                "`compute_loss` in the place of `training_step`."
            )

    def _differs_from_update(self, loss: torch.Tensor) -> bool:
        made = self.loss_of_update
        if made is None or loss is made:
            return False
        same_shape = loss.shape == made.shape
        return loss.requires_grad or not same_shape or not torch.allclose(loss.to(made), made, 0, 0, equal_nan=True)

    def _check_accumulation(self) -> None:
        if self.accumulated > 1 and not self.made_update:
            raise OverrideError(
                f"`training_step` of {type(self.module).__name__} made an update of one batch, and "
                f"`gradient_accumulation_steps={self.accumulated}` of the arguments says {self.accumulated}; the "
                "schedule counts on that.\n\nHint: leave the argument out, or take the data from an HFDataModule: "
                "its batches are the micro-batches of an update."
            )


@contextmanager
def _backward_passes(module: pl.LightningModule, watches: bool) -> Iterator[list[object]]:
    """Collect gradients that reach a parameter within the context."""
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


def _refuse_gradients(trainer: pl.Trainer) -> None:
    for name, unset in (("accumulate_grad_batches", 1), ("gradient_clip_val", None)):
        value = getattr(trainer, name)
        if value not in (unset, 0):
            raise ArgumentError(
                f"`{name}={value!r}` of lightning.Trainer needs gradients, and this optimizer updates each parameter "
                "in the backward pass.\n\nHint: leave it out, or choose another optimizer."
            )
