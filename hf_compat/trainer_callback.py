"""The names of `transformers.trainer_callback`, from this package where it has them, otherwise from transformers."""

from __future__ import annotations

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(
    __name__,
    "transformers.trainer_callback",
    {
        "CallbackHandler": "hf.callbacks",
        "TrainerCallback": "hf.callbacks",
        "ExportableState": "hf.state",
        "TrainerControl": "hf.state",
        "TrainerState": "hf.state",
        "DefaultFlowCallback": "hf.builtin_callbacks",
        "EarlyStoppingCallback": "hf.builtin_callbacks",
        "PrinterCallback": "hf.builtin_callbacks",
        "ProgressCallback": "hf.builtin_callbacks",
    },
)
