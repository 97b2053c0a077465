"""Shims around releases of the packages below us: symptom, version, and when each can go. Importing loads Lightning."""

from __future__ import annotations

import importlib
import sys


def load_lightning() -> None:
    """Import Lightning, also where `transformers` is installed but cannot be imported.

    Symptom: torchmetrics, which Lightning imports, imports `transformers` for its text metrics wherever a release of it
    is installed; where that import fails (blocked, or half installed), Lightning cannot be imported at all.
    Seen with torchmetrics 1.9.0. Remove when torchmetrics imports it where it is used.
    """
    try:
        importlib.import_module("lightning.pytorch")
    except ImportError as error:
        if "transformers" not in str(error) and getattr(error, "name", None) != "transformers":
            raise
        from lightning_utilities.core.imports import RequirementCache

        is_there = RequirementCache.__bool__

        def is_there_but_for_transformers(cache: RequirementCache) -> bool:
            return not str(cache.requirement).startswith("transformers") and is_there(cache)

        for name in [name for name in sys.modules if name.split(".")[0] == "torchmetrics"]:
            del sys.modules[name]  # what the failed import left half made
        RequirementCache.__bool__ = is_there_but_for_transformers  # type: ignore[method-assign,assignment]
        try:
            importlib.import_module("lightning.pytorch")
        finally:
            RequirementCache.__bool__ = is_there  # type: ignore[method-assign]


load_lightning()
