"""What optimizers that update each parameter in the backward pass cannot do, or leave undone. HF words only."""

from __future__ import annotations

import warnings

from hf_compat.errors import InertArgumentWarning, UnsupportedArgument
from hf_compat.optim.entries import OptimizerRequest

_DEFAULT_CLIPPING = 1.0


def check_in_backward(request: OptimizerRequest) -> None:
    """Refuse what needs the gradients after the backward pass; warn of what clips or decays nothing.

    Raises:
        UnsupportedArgument: Gradients are to be scaled, or exchanged between processes.
    """
    refuse_in_backward(request)
    args = request.args
    found = []
    if args.max_grad_norm not in (0, _DEFAULT_CLIPPING):
        found.append(f"max_grad_norm={args.max_grad_norm}")
    if args.weight_decay:
        found.append(f"weight_decay={args.weight_decay}")
    for setting in found:
        warnings.warn(
            f"`{setting}` has no effect: {_reason(request)}, as in transformers.", InertArgumentWarning, stacklevel=6
        )


def refuse_in_backward(request: OptimizerRequest) -> None:
    """Refuse the same, without a warning: for who has been warned when the run was planned.

    Raises:
        UnsupportedArgument: Gradients are to be scaled, or exchanged between processes.
    """
    args, why = request.args, _reason(request)
    if args.mixed_precision == "fp16":
        raise UnsupportedArgument(f"{why}, where gradients are still scaled for `fp16=True`.\n\nHint: `bf16=True`.")
    if args.world_size > 1:
        raise UnsupportedArgument(
            f"{why}, before gradients are exchanged: it cannot train in {args.world_size} processes.\n\n"
            "Hint: train in one process, or choose another optimizer."
        )


def _reason(request: OptimizerRequest) -> str:
    return f"`optim={request.name!r}` updates each parameter in the backward pass"
