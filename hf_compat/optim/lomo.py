"""LOMO and AdaLomo: parameters are updated in the backward pass, which the optimizer runs. HF words and torch only."""

from __future__ import annotations

import torch

from hf_compat.errors import ArgumentError, UnsupportedArgument
from hf_compat.hf.enums import OptimizerNames
from hf_compat.optim.entries import ClassAndKeywords, ClassSource, OptimizerClass, OptimizerEntry, OptimizerRequest
from hf_compat.optim.in_backward import check_in_backward, refuse_in_backward


def _of_whole_model(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    if request.model is None:
        raise ArgumentError(
            f"`optim={request.name!r}` puts hooks on a model's parameters, and there is no model.\n\n"
            "Hint: pass the model as the second argument."
        )
    refuse_in_backward(request)
    return found, {"model": request.model}


def _check_adalomo(request: OptimizerRequest) -> None:
    """Refuse a run without CUDA, on which the package keeps its averages whatever the model is on."""
    check_in_backward(request)
    if _ADALOMO.load("AdaLomo").__module__.startswith("lomo_optim.") and not torch.cuda.is_available():
        raise UnsupportedArgument(
            f"`optim={request.name!r}` keeps its averages on a CUDA GPU, and there is none.\n\nHint: `optim='lomo'`."
        )


_LOMO = ClassSource(modules=("lomo_optim",), name="Lomo", install="lomo-optim")
_ADALOMO = ClassSource(modules=("lomo_optim",), name="AdaLomo", install="lomo-optim")

LOMO_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.LOMO: OptimizerEntry(
        source=_LOMO, choose=_of_whole_model, check=check_in_backward, needs_model=True
    ),
    OptimizerNames.ADALOMO: OptimizerEntry(
        source=_ADALOMO, choose=_of_whole_model, check=_check_adalomo, needs_model=True
    ),
}
