"""The names of `transformers.debug_utils`: ours where there are any, transformers' own otherwise."""

from __future__ import annotations

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(
    __name__,
    "transformers.debug_utils",
    {
        "DebugOption": "hf.enums",
        "DebugUnderflowOverflow": "engine.model_hooks",
        "detect_overflow": "engine.model_hooks",
    },
)
