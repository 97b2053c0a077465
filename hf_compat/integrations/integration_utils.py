"""The names of `transformers.integrations.integration_utils`: ours where there are any, transformers' own otherwise."""

from __future__ import annotations

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(
    __name__,
    "transformers.integrations.integration_utils",
    {"TensorBoardCallback": "callbacks.trackers", "WandbCallback": "callbacks.trackers"},
)
