"""Optimizers whose packages give nothing else: AnyPrecision, GrokAdamW, StableAdamW."""

from __future__ import annotations

import torch

from hf_compat.hf.enums import OptimizerNames
from hf_compat.hf.value_types import NONE, TRUTH_VALUE, ValueType, choice, either
from hf_compat.optim.entries import (
    BELOW_1,
    FINITE,
    NOT_NEGATIVE,
    ClassAndKeywords,
    ClassSource,
    OptimizerClass,
    OptimizerEntry,
    OptimizerRequest,
    Option,
    with_adam,
    with_options,
)

_DTYPES = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "float", "half", "double")
}
_DTYPE_NAME = choice(_DTYPES)
_DTYPE = ValueType(_DTYPE_NAME.expected, lambda value: _DTYPES[str(_DTYPE_NAME.read(value))], takes_text=True)


def _stable_adamw(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    keywords = {**request.adam, "weight_decay": request.args.weight_decay, **request.options}
    return found, keywords


PACKAGE_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.ADAMW_ANYPRECISION: OptimizerEntry(
        source=ClassSource(
            modules=("torchdistx.optimizers",),
            name="AnyPrecisionAdamW",
            install="git+https://github.com/pytorch/torchdistx",
        ),
        options={
            "use_kahan_summation": Option(TRUTH_VALUE, False),
            "momentum_dtype": Option(_DTYPE, torch.float32),
            "variance_dtype": Option(_DTYPE, torch.float32),
            "compensation_buffer_dtype": Option(_DTYPE, torch.bfloat16),
        },
        choose=with_adam,
    ),
    OptimizerNames.GROKADAMW: OptimizerEntry(
        source=ClassSource(modules=("grokadamw",), name="GrokAdamW", install="grokadamw"),
        options={
            "alpha_init": Option(BELOW_1, 0.98),
            "lamb": Option(FINITE, 2.0),
            "gamma": Option(FINITE, 0.1),
            "grokking_signal_decay_rate": Option(FINITE, 0.1),
            "gradient_clipping": Option(NOT_NEGATIVE, 1.0),
        },
        choose=with_options,
        refused_with={"fsdp": "its step does not end on sharded parameters"},
    ),
    OptimizerNames.STABLE_ADAMW: OptimizerEntry(
        source=ClassSource(modules=("optimi",), name="StableAdamW", install="torch-optimi"),
        options={
            "decouple_lr": Option(TRUTH_VALUE, False),
            "max_lr": Option(either((NONE, NOT_NEGATIVE)), None),
            "kahan_sum": Option(either((NONE, TRUTH_VALUE)), None),
        },
        choose=_stable_adamw,
    ),
}
