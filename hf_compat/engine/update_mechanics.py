"""How an update differs between strategies and optimizers. `make_update_mechanics` chooses once a fit.

This covers gradient exchange, the backward pass, clipping and the gradient norm. `optim/stepping.py` describes each
optimizer's hooks on the parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hf_compat.engine.precision import ForwardPrecision
from hf_compat.engine.protocols import GradNorm, TrainingSteps
from hf_compat.errors import OverrideError, UnsupportedArgument
from hf_compat.interop.deepspeed import DeepSpeedEngine, is_deepspeed_engine
from hf_compat.optim.stepping import Stepping
from hf_compat.plan.translate import exchanges_every_micro_batch

Backward = Callable[..., None]  # takes the loss and torch's options


class UpdateMechanics:
    """Updates on one device, or with gradients exchanged in every backward pass. The steps clip, the optimizer steps.

    Args:
        steps: The owner of the overridable steps.
        backward: Lightning's backward pass.
        precision: The trainer's precision plugin.
    """

    # whether `begin_micro_batch` does anything, so that one device can skip the call
    exchanges_at_the_end = False
    # how the optimizer steps, under any strategy
    stepping = Stepping()

    def __init__(self, steps: TrainingSteps, backward: Backward, precision: Precision) -> None:
        self.steps = steps
        self.backward = backward
        self._scaling = precision if isinstance(precision, ForwardPrecision) and precision.scaler else None

    def begin(self, module: pl.LightningModule, stepping: Stepping, rate: Callable[[], float]) -> None:
        """Prepare a fit with an optimizer.

        Args:
            module: The trained module. If the optimizer runs the backward pass, the module passes losses to it.
            stepping: How the optimizer steps.
            rate: Returns the learning rate of the current update.

        Raises:
            OverrideError: The optimizer runs the backward pass, and the module overrides `backward`.
            UnsupportedArgument: The optimizer updates parameters in the backward pass, and gradients have to be scaled
                or exchanged.
        """
        if stepping.steps_in_backward:
            self._refuse_later_gradients(stepping)
        self.stepping = stepping
        stepping.attach()
        send = stepping.fused_backward
        if send is None:
            return
        if type(module).backward is not pl.LightningModule.backward:
            raise OverrideError(
                f"{type(module).__name__} overrides `backward`, and {type(stepping.optimizer).__name__} runs the "
                "backward pass itself.\n\nHint: leave the override out, or choose another optimizer."
            )
        # Lightning's own backward pass finds it here, so all its hooks run
        module.__dict__["backward"] = lambda loss, *args, **kwargs: send(loss, rate())

    def _refuse_later_gradients(self, stepping: Stepping) -> None:
        processes = self.steps.accelerator.num_processes
        what = f"exchanged between {processes} processes" if processes > 1 else "scaled for `fp16=True`"
        if processes > 1 or self._scaling is not None:
            raise UnsupportedArgument(
                f"{type(stepping.optimizer).__name__} updates each parameter in the backward pass, and gradients are "
                f"to be {what}.\n\nHint: train in one process, without `fp16`, or choose another optimizer."
            )

    def end(self, module: pl.LightningModule) -> None:
        """Undo `begin`."""
        self.stepping.detach()
        module.__dict__.pop("backward", None)

    def begin_micro_batch(self, is_last: bool) -> None:
        """Set whether the coming backward pass exchanges gradients."""

    def step(self, model: nn.Module, take_step: Callable[[], None]) -> GradNorm:
        """Clip the gradients, step, and return the norm before clipping.

        Args:
            model: The wrapped model.
            take_step: Calls the hooks before the step, and steps the optimizer.
        """
        steps = self.steps
        if self._scaling is not None:
            self._scaling.unscale(steps.optimizer)
        clipped = steps._clip_grad_norm(model) if steps.args.max_grad_norm > 0 else None
        norm = steps._get_grad_norm(model, grad_norm=clipped)
        take_step()
        return norm

    @property
    def step_was_skipped(self) -> bool:
        """Whether the gradient scaler skipped the last step because of non-finite gradients."""
        return self._scaling is not None and self._scaling.step_was_skipped


class DDPMechanics(UpdateMechanics):
    """Several ranks under DDP. They exchange gradients in a window's last backward pass.

    Args:
        steps: The owner of the overridable steps.
        backward: Lightning's backward pass.
        precision: The trainer's precision plugin.
        wrapper: DDP around the model, or around the LightningModule.
    """

    exchanges_at_the_end = True

    def __init__(
        self, steps: TrainingSteps, backward: Backward, precision: Precision, wrapper: DistributedDataParallel
    ) -> None:
        super().__init__(steps, backward, precision)
        self._wrapper = wrapper

    def begin_micro_batch(self, is_last: bool) -> None:
        # the attribute that `no_sync` sets, without a context manager for each micro-batch
        self._wrapper.require_backward_grad_sync = is_last


class FSDP2Mechanics(UpdateMechanics):
    """Several ranks under FSDP 2. They reduce gradients in a window's last backward pass.

    Args:
        steps: The owner of the overridable steps.
        backward: Lightning's backward pass.
        precision: The trainer's precision plugin.
        sharded: The sharded model.
    """

    exchanges_at_the_end = True

    def __init__(self, steps: TrainingSteps, backward: Backward, precision: Precision, sharded: FSDPModule) -> None:
        super().__init__(steps, backward, precision)
        self._sharded = sharded

    def begin_micro_batch(self, is_last: bool) -> None:
        self._sharded.set_requires_gradient_sync(is_last)


class DeepSpeedMechanics(UpdateMechanics):
    """DeepSpeed's engine, which runs the backward pass, clips when it steps, and has the norm afterwards.

    Args:
        steps: The owner of the overridable steps.
        precision: The trainer's precision plugin.
        engine: The engine around the model.
    """

    exchanges_at_the_end = True
    step_was_skipped = False

    def __init__(self, steps: TrainingSteps, precision: Precision, engine: DeepSpeedEngine) -> None:
        super().__init__(steps, self._run_backward, precision)
        self._engine = engine

    def _run_backward(self, loss: torch.Tensor, **options: bool) -> None:
        self._engine.backward(loss, scale_wrt_gas=False, **options)  # the loss is already divided by the window

    def begin_micro_batch(self, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)

    def step(self, model: nn.Module, take_step: Callable[[], None]) -> GradNorm:
        take_step()
        return self._engine.get_global_grad_norm()


def make_update_mechanics(
    steps: TrainingSteps, backward: Backward, precision: Precision, of_strategy: object = None
) -> UpdateMechanics:
    """Make the mechanics for the model's wrapper, in our strategies or Lightning's own.

    Args:
        steps: The owner of the overridable steps. Forward passes call its `model_wrapped`.
        backward: Lightning's backward pass.
        precision: The trainer's precision plugin.
        of_strategy: The strategy's wrapper. Lightning's own DDP wraps the whole module.
    """
    wrapped: object = steps.model_wrapped
    if is_deepspeed_engine(wrapped):
        return DeepSpeedMechanics(steps, precision, wrapped)
    at_the_end = steps.accelerator.num_processes > 1 and not exchanges_every_micro_batch(steps.args)
    for wrapper in (wrapped, of_strategy):
        if at_the_end and isinstance(wrapper, DistributedDataParallel):
            return DDPMechanics(steps, backward, precision, wrapper)
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(True)  # a fit that ended within a window may have switched it off
        if at_the_end:
            return FSDP2Mechanics(steps, backward, precision, wrapped)
    return UpdateMechanics(steps, backward, precision)
