"""Compile the model that the steps call, outside the strategy's wrapper. The saved model stays uncompiled."""

from __future__ import annotations

import torch
from torch import nn

from hf_compat.interop.deepspeed import compile_engine, is_deepspeed_engine
from hf_compat.interop.regional_compilation import compile_blocks
from hf_compat.plan.compilation import Compilation

_INNER = "_orig_mod"  # the attribute in which torch.compile keeps the original module


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside a compiled one, or the model itself."""
    inner = getattr(model, _INNER, None)
    return inner if isinstance(inner, nn.Module) else model


def compiled(model: nn.Module, how: Compilation | None) -> nn.Module:
    """Compile a model. A compiled model is returned as it is, and so is any model if `how` is None.

    Both share their parameters. The original still runs uncompiled.

    Mirrors:
        The end of `accelerate.Accelerator.prepare_model`, 1.15.
    """
    if how is None or uncompiled(model) is not model or getattr(model, "_compiled_call_impl", None) is not None:
        return model
    keywords = how.keywords()
    if is_deepspeed_engine(model):  # the engine compiles the module inside it
        compile_engine(model, keywords)
        return model  # type: ignore[return-value]  # a module, though its protocol does not say so
    if how.by_blocks:
        return compile_blocks(model, keywords)
    form: nn.Module = torch.compile(model, **keywords)  # type: ignore[call-overload]  # the keywords are a dict
    return form
