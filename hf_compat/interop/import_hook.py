"""`patch()` at the first import of transformers' trainers, for Pythons that a patched script starts.

A Python that never imports them pays nothing: this file imports the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

# What a script, or the lazy top level for it, imports when it asks for a Trainer, its arguments or callbacks.
_WATCHED = frozenset(
    f"transformers.{name}"
    for name in (
        "trainer", "trainer_seq2seq", "training_args", "training_args_seq2seq", "trainer_callback", "hf_argparser",
    )
)  # fmt: skip


class _PatchAfterImport(importlib.abc.MetaPathFinder):
    """Finds the watched modules as Python does, and patches when the outermost of them is loaded."""

    def __init__(self) -> None:
        self._loading = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a watched module, whose loader patches; None for all others."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in _WATCHED else None
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: importlib.abc.Loader) -> None:
        load = loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            self._loading += 1
            try:
                load(module)
            finally:
                self._loading -= 1
            if not self._loading:
                self._patch()

        loader.exec_module = load_and_patch  # type: ignore[method-assign]  # the loader is of this one module

    def _patch(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            importlib.import_module("hf_compat.interop.patching").patch()


def patch_when_imported() -> None:
    """Patch as soon as somebody imports one of transformers' trainer modules."""
    sys.meta_path.insert(0, _PatchAfterImport())
