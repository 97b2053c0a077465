"""The names of `transformers.optimization`: ours where there are any, transformers' own otherwise."""

from __future__ import annotations

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(
    __name__,
    "transformers.optimization",
    {
        "get_scheduler": "optim.lr_schedulers",
    },
)
