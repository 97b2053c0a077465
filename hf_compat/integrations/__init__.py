"""The names of `transformers.integrations`: ours where there are any, transformers' own otherwise."""

from __future__ import annotations

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(
    __name__,
    "transformers.integrations",
    {"TensorBoardCallback": "callbacks.trackers", "WandbCallback": "callbacks.trackers"},
)
