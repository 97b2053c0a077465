"""Compiling a model block by block, as Accelerate does it: `accelerate launch --dynamo_use_regional_compilation`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hf_compat.runtime.text import is_installed, missing_package


def compile_blocks(model: nn.Module, keywords: Mapping[str, str | bool]) -> nn.Module:
    """Return a model whose repeated blocks are compiled one by one.

    Args:
        model: The model; its parameters are shared.
        keywords: Of `torch.compile`.

    Raises:
        MissingPackage: Accelerate is not installed.
    """
    if not is_installed("accelerate"):
        raise missing_package("accelerate", "accelerate", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true")
    from accelerate.utils import compile_regions

    form: nn.Module = compile_regions(model, **keywords)
    return form
