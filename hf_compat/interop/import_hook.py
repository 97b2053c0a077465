"""Patch at the first import of transformers' trainers, in each Python that a patched script starts.

This file imports the standard library only. A child that never imports a Trainer then does not load torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

# The modules that a script imports, directly or through the lazy top level, for a Trainer, its arguments or callbacks
_TRAINER_MODULES = frozenset(
    f"transformers.{name}"
    for name in (
        "trainer", "trainer_seq2seq", "training_args", "training_args_seq2seq", "trainer_callback", "hf_argparser",
    )
)  # fmt: skip


class PatchAfterImport(importlib.abc.MetaPathFinder):
    """Finds the watched modules as Python does, and patches when the outermost of them is loaded."""

    def __init__(self) -> None:
        self._loading = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a watched module and make its loader patch."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in _TRAINER_MODULES else None
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            self._loading += 1
            try:
                load(module)
            finally:
                self._loading -= 1
            if not self._loading and self in sys.meta_path:
                sys.meta_path.remove(self)
                importlib.import_module("hf_compat.interop.patching").patch()

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]  # this loader has one module only
        return spec
