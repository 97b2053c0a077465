"""`CompiledUpdate`: the micro-batches of an update as graphs of `torch.compile`, for `compile_update`."""

from __future__ import annotations

import contextlib
import logging
import math
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from hf_compat.data.types import Batch
from hf_compat.engine.strategies import UpdateMechanics
from hf_compat.engine.windows import Items, TrainingSteps
from hf_compat.plan.translate import Compilation

logger = logging.getLogger(__name__)

ComputeLoss = Callable[..., object]  # a subclass may return anything
Gradients = list[torch.Tensor | None]


def _micro_batch(
    compute_loss: ComputeLoss,
    model: nn.Module,
    inputs: Batch,
    items: Items,
    divisor: int,
    parameters: list[nn.Parameter],
    earlier: Gradients | None,
    max_norm: float | None,
) -> tuple[torch.Tensor, Gradients, torch.Tensor | None]:
    """Do what one graph holds: the loss, the gradients so far, and with `max_norm` their norm and clipping.

    Clipping is that of `torch.nn.utils.clip_grad_norm_`, on gradients that no parameter has yet.
    """
    loss = cast(torch.Tensor, compute_loss(model, inputs, num_items_in_batch=items))
    if divisor != 1:
        loss = loss / divisor
    gradients: Gradients = list(torch.autograd.grad(loss, parameters, allow_unused=True))
    with torch.no_grad():
        if earlier is not None:
            pairs = zip(earlier, gradients, strict=True)
            gradients = [new if old is None else old if new is None else old + new for old, new in pairs]
        if max_norm is None:
            return loss.detach(), gradients, None
        norm = get_total_norm([one for one in gradients if one is not None], 2.0)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return loss.detach(), [None if one is None else one * factor for one in gradients], norm


def reuses_memory(how: Compilation) -> bool:
    """Whether graphs write their results where they wrote those of the call before, as CUDA graphs do."""
    if how.backend != "inductor":
        return how.backend == "cudagraphs"
    from torch._inductor import config, list_mode_options  # slow: only where something is compiled

    return bool(list_mode_options(how.mode).get("triton.cudagraphs", config.triton.cudagraphs))


def _kept(tensors: Sequence[torch.Tensor | None]) -> Gradients:
    """Copy tensors to memory of their own, of a device by few kernels."""
    given = [one for one in tensors if one is not None]
    copies = [torch.empty_like(one) for one in given]
    torch._foreach_copy_(copies, given)
    left = iter(copies)
    return [None if one is None else next(left) for one in tensors]


class CompiledUpdate:
    """Runs forward, loss and backward of a micro-batch as one graph, which clips if the update ends.

    A shape of the inputs, or a number of micro-batches, that is new gets a graph of its own. The step stays outside:
    torch does not trace the kernel of a fused optimizer, which is one call. Between the two, callbacks find the clipped
    gradients where they always are. What cannot be traced as one graph runs as without this, and the log says why.

    Args:
        steps: The owner of the overridable steps.
        how: The backend, its mode and its options.
        clips: Clip in the graph. Overrides of the steps may need the gradients before.
    """

    def __init__(self, steps: TrainingSteps, how: Compilation, clips: bool) -> None:
        self.steps, self._clips = steps, clips
        self._norm: torch.Tensor | None = None
        self._reuses_memory = reuses_memory(how)
        # torch keeps the graphs with a function's code, and eight of them at most. So each object has its own code
        own = types.FunctionType(_micro_batch.__code__.replace(), globals(), _micro_batch.__name__)
        graph = torch.compile(own, **{**how.keywords(), "fullgraph": True})  # type: ignore[call-overload]  # a dict
        self._settings = contextlib.ExitStack()
        self._settings.enter_context(tracing_gradients())
        self._graph: Callable[..., tuple[torch.Tensor, Gradients, torch.Tensor | None]] | None = graph

    def run(
        self, compute_loss: ComputeLoss, model: nn.Module, inputs: Batch, items: Items, divisor: int
    ) -> torch.Tensor | None:
        """Add a micro-batch's gradients to the parameters', and return its loss. None if the caller has to."""
        if self._graph is None:
            return None
        steps, self._norm = self.steps, None
        if steps.accelerator.run_backward is not None:
            self.give_up("a callback or the module hears of backward passes")
            return None
        parameters = [one for one in steps._tree.parameters(model) if one.requires_grad]
        earlier = [one.grad for one in parameters]
        max_norm = None
        if self._clips and steps.accelerator.sync_gradients:
            max_norm = float(steps.args.max_grad_norm) or math.inf
        is_first = all(one is None for one in earlier)
        try:
            loss, gradients, self._norm = self._graph(
                compute_loss, model, inputs, items, divisor, parameters, None if is_first else earlier, max_norm
            )
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            self.give_up("model or loss read a value that changes, and torch made eight graphs of one update")
            return None
        except torch._dynamo.exc.TorchDynamoException as error:
            self.give_up(str(error).partition("\n\n")[0].strip())
            return None
        if self._reuses_memory:  # the gradients and the norm are read after the next call, and the loss at the next log
            kept, self._norm, *gradients = _kept([loss, self._norm, *gradients])
            loss = cast(torch.Tensor, kept)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss

    def end(self) -> None:
        """Give torch's settings back, at the end of the fit."""
        self._settings.close()

    def take_norm(self) -> torch.Tensor | None:
        """The norm of the gradients before they were clipped. None if the graph has not clipped them."""
        norm, self._norm = self._norm, None
        return norm

    def give_up(self, reason: str) -> None:
        """Run uncompiled from now on, and say why."""
        self._graph = None
        tell_of_uncompiled(reason)


def tell_of_uncompiled(reason: str) -> None:
    """Log that updates run uncompiled."""
    logger.warning("`compile_update=True`: updates run uncompiled, because %s.", reason.rstrip("."))


def tracing_gradients() -> AbstractContextManager[None]:
    """Let torch trace `torch.autograd.grad`, which it does not by default, and skip warnings of models."""
    once = getattr(logging.Logger, "warning_once", None)  # transformers adds it
    skipped = {logging.Logger.warning, *([once] if once is not None else [])}
    return torch._dynamo.config.patch(trace_autograd_ops=True, ignore_logging_functions=skipped)


def _checkpoints(model: nn.Module) -> bool:
    """Whether a model of transformers checkpoints activations."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def reason_against(
    steps: TrainingSteps, mechanics: UpdateMechanics, parameters: Iterable[nn.Parameter], beside: Sequence[str]
) -> str | None:
    """Return why the updates of a fit cannot be compiled, as far as it is known before the first one."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    reasons = {
        "DeepSpeed's engine runs the backward pass": mechanics.engine is not None,
        "gradients are exchanged between processes": steps.accelerator.num_processes > 1,
        "float16's gradient scaler reads gradients on the host": mechanics.scaling is not None,
        "the optimizer steps within the backward pass": mechanics.stepping.steps_in_backward,
        "parameters beside the model are trained": bool(beside),
        "parameters have hooks for their gradients": any(getattr(one, h, None) for one in parameters for h in hooks),
        "activation checkpointing would draw other random numbers when it computes again": _checkpoints(steps.model),
        "`torch_empty_cache_steps` acts before a backward pass": steps.args.torch_empty_cache_steps is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
