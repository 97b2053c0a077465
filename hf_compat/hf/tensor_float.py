"""TF32: what `tf32` and `torch_compile` say about how a GPU multiplies float32. HF words only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments  # which imports this module


def has_tf32() -> bool:
    """Return whether the GPU of this process multiplies in TF32: Ampere and newer ones do."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


def choose_tf32(args: TrainingArguments) -> None:
    """Switch TF32 on or off as the arguments say, for the whole process; where they say nothing, leave it.

    Mirrors:
        `transformers.TrainingArguments.__post_init__`, 5.23: compiling switches it on, but for float16.
    """
    wanted = args.tf32
    if args.torch_compile and ((wanted is None and not args.fp16) or args.bf16) and wanted is not False:
        wanted = True
    if wanted is None or not has_tf32():
        return
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = "tf32" if wanted else "ieee"
    else:  # torch before 2.9
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = wanted
