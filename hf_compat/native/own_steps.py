"""A `training_step` of the user's own, in automatic or in manual optimization: what it needs, and what is refused.

The steps of HF's switch schedule-free optimizers themselves, and count their micro-batches; others do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
from torch.utils.hooks import RemovableHandle

from hf_compat.data.types import Batch
from hf_compat.engine.windows import Window
from hf_compat.errors import ArgumentError, OverrideError
from hf_compat.optim.stepping import Stepping

Step = Callable[..., object]


def serve_own_step(module: pl.LightningModule, stepping: Stepping) -> None:
    """Give a module with a `training_step` of its own what the steps of HF's do for its optimizers.

    Raises:
        ArgumentError: Lightning is to accumulate or clip gradients, and there are none after a backward pass.
    """
    if stepping.steps_in_backward and module.automatic_optimization:
        _refuse_gradients(module.trainer)
    if stepping.switches:
        _switch_before_batches(module, stepping)


def leave_own_step(module: pl.LightningModule | SimpleNamespace) -> None:
    """Give the module, or a copy of its attributes, its own hook back."""
    module.__dict__.pop("on_train_batch_start", None)
    GuardedStep.leave(module)


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


def _switch_before_batches(module: pl.LightningModule, stepping: Stepping) -> None:
    own = module.on_train_batch_start

    def on_train_batch_start(batch: Batch, batch_idx: int) -> int | None:
        stepping.to_training()
        return own(batch, batch_idx)

    module.__dict__["on_train_batch_start"] = on_train_batch_start
