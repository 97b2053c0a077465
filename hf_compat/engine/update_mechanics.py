"""What an update does differently under each strategy and optimizer: chosen once a fit, asked at every update.

When gradients are exchanged, how the backward pass runs, who clips, where the gradient norm comes from; and, as
`optim/stepping.py` says of each optimizer, what is put on the parameters for a fit.
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

Backward = Callable[..., None]  # of a loss, with options of torch's backward pass


class UpdateMechanics:
    """One device, or gradients that are exchanged in every backward pass: the steps clip, then the optimizer steps.

    Args:
        steps: The owner of the overridable steps.
        backward: Lightning's backward pass.
        precision: The trainer's precision plugin.
    """

    # whether `begin_micro_batch` does anything: one device leaves the call out
    exchanges_at_the_end = False
    # how the optimizer steps, which no strategy changes
    stepping = Stepping()

    def __init__(self, steps: TrainingSteps, backward: Backward, precision: Precision) -> None:
        self.steps = steps
        self.backward = backward
        self._scaling = precision if isinstance(precision, ForwardPrecision) and precision.scaler else None

    def begin(self, module: pl.LightningModule, stepping: Stepping, rate: Callable[[], float]) -> None:
        """Make ready for a fit with an optimizer.

        Args:
            module: What is trained; where the optimizer runs the backward pass, the module sends losses to it.
            stepping: How the optimizer steps.
            rate: Gives the learning rate of the update that is under way.

        Raises:
            OverrideError: The optimizer runs the backward pass, and the module has one of its own.
            UnsupportedArgument: It updates parameters there, and gradients are to be scaled or exchanged.
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
        # found by Lightning's own backward pass, so that every hook around it is called
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
        """Take back what `begin` has done."""
        self.stepping.detach()
        module.__dict__.pop("backward", None)

    def begin_micro_batch(self, is_last: bool) -> None:
        """Have gradients exchanged in the coming backward pass, or not."""

    def step(self, model: nn.Module, take_step: Callable[[], None]) -> GradNorm:
        """Clip the gradients and step; returns their norm before clipping.

        Args:
            model: The model, as it is wrapped.
            take_step: Steps the optimizer, and calls the hooks before it.
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
        """Whether the gradient scaler has skipped the last step, its gradients not being finite."""
        return self._scaling is not None and self._scaling.step_was_skipped


class DDPMechanics(UpdateMechanics):
    """Several processes under DDP: gradients are exchanged in a window's last backward pass.

    Args:
        steps: The owner of the overridable steps.
        backward: Lightning's backward pass.
        precision: The trainer's precision plugin.
        wrapper: DDP around the model, or around the module that has it.
    """

    exchanges_at_the_end = True

    def __init__(
        self, steps: TrainingSteps, backward: Backward, precision: Precision, wrapper: DistributedDataParallel
    ) -> None:
        super().__init__(steps, backward, precision)
        self._wrapper = wrapper

    def begin_micro_batch(self, is_last: bool) -> None:
        # what `no_sync` sets, without a context manager a micro-batch
        self._wrapper.require_backward_grad_sync = is_last


class FSDP2Mechanics(UpdateMechanics):
    """Several processes under FSDP 2: gradients are reduced in a window's last backward pass.

    Args:
        steps: The owner of the overridable steps.
        backward: Lightning's backward pass.
        precision: The trainer's precision plugin.
        sharded: The model.
    """

    exchanges_at_the_end = True

    def __init__(self, steps: TrainingSteps, backward: Backward, precision: Precision, sharded: FSDPModule) -> None:
        super().__init__(steps, backward, precision)
        self._sharded = sharded

    def begin_micro_batch(self, is_last: bool) -> None:
        self._sharded.set_requires_gradient_sync(is_last)


class DeepSpeedMechanics(UpdateMechanics):
    """DeepSpeed's engine: it runs the backward pass, clips when it steps, and knows the norm afterwards.

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
        self._engine.backward(loss, scale_wrt_gas=False, **options)  # the loss is divided by the window already

    def begin_micro_batch(self, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)

    def step(self, model: nn.Module, take_step: Callable[[], None]) -> GradNorm:
        take_step()
        return self._engine.get_global_grad_norm()


def make_update_mechanics(
    steps: TrainingSteps, backward: Backward, precision: Precision, of_strategy: object = None
) -> UpdateMechanics:
    """Return what goes with the way in which the model is wrapped, in a strategy of ours or of Lightning's own.

    Args:
        steps: The owner of the overridable steps; its `model_wrapped` is what forward passes go through.
        backward: Lightning's backward pass.
        precision: The trainer's precision plugin.
        of_strategy: What the strategy has wrapped; Lightning's own DDP is around the whole module.
    """
    wrapped: object = steps.model_wrapped
    if is_deepspeed_engine(wrapped):
        return DeepSpeedMechanics(steps, precision, wrapped)
    at_the_end = steps.accelerator.num_processes > 1 and not exchanges_every_micro_batch(steps.args)
    for wrapper in (wrapped, of_strategy):
        if at_the_end and isinstance(wrapper, DistributedDataParallel):
            return DDPMechanics(steps, backward, precision, wrapper)
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(True)  # a fit that ended within a window has left it off
        if at_the_end:
            return FSDP2Mechanics(steps, backward, precision, wrapped)
    return UpdateMechanics(steps, backward, precision)
