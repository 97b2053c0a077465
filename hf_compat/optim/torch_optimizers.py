"""The optimizers of torch and of its builds for other chips, and Adafactor."""

from __future__ import annotations

from hf_compat.hf.enums import OptimizerNames
from hf_compat.hf.value_types import TRUTH_VALUE
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
)


def _fused_adamw(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return found, {**request.adam, "fused": True}


def _adafactor(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return found, {"scale_parameter": False, "relative_step": False}


def _torchs(name: str) -> ClassSource:
    return ClassSource(modules=("torch.optim",), name=name, install="torch")


_SWITCH = Option(TRUTH_VALUE)

TORCH_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.ADAMW_TORCH: OptimizerEntry(source=_torchs("AdamW"), choose=with_adam),
    OptimizerNames.ADAMW_TORCH_FUSED: OptimizerEntry(source=_torchs("AdamW"), choose=_fused_adamw),
    OptimizerNames.ADAMW_TORCH_XLA: OptimizerEntry(
        source=ClassSource(modules=("torch_xla.amp.syncfree",), name="AdamW", install="torch_xla"),
        choose=with_adam,
        device="a TPU",
    ),
    OptimizerNames.ADAMW_TORCH_NPU_FUSED: OptimizerEntry(
        source=ClassSource(modules=("torch_npu.optim",), name="NpuFusedAdamW", install="torch_npu"),
        choose=with_adam,
        device="an Ascend NPU",
    ),
    OptimizerNames.ADAFACTOR: OptimizerEntry(
        # transformers' own, for which scripts ask with `isinstance`; without transformers the same from here
        source=ClassSource(
            modules=("transformers.optimization", "hf_compat.optim.adafactor"), name="Adafactor", install="hf-compat"
        ),
        choose=_adafactor,
    ),
    OptimizerNames.SGD: OptimizerEntry(
        source=_torchs("SGD"),
        options={
            "momentum": Option(NOT_NEGATIVE),
            "dampening": Option(FINITE),
            "weight_decay": Option(NOT_NEGATIVE),
            "nesterov": _SWITCH,
        },
    ),
    OptimizerNames.ADAGRAD: OptimizerEntry(
        source=_torchs("Adagrad"),
        options=dict.fromkeys(("lr_decay", "weight_decay", "eps"), Option(NOT_NEGATIVE)),
    ),
    OptimizerNames.RMSPROP: OptimizerEntry(
        source=_torchs("RMSprop"),
        options={
            "momentum": Option(NOT_NEGATIVE),
            "alpha": Option(BELOW_1),
            "eps": Option(NOT_NEGATIVE),
            "weight_decay": Option(NOT_NEGATIVE),
            "centered": _SWITCH,
        },
    ),
}
