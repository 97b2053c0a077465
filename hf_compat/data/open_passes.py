"""Which loaders are being read: an evaluation's within a training's. Gathered batches are cut by the innermost."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator

from hf_compat.data.types import Batch


class OpenPasses:
    """The loaders whose passes have begun and are not read to their end, the innermost last.

    Mirrors:
        `dataloader_references` of `accelerate.state.GradientState`, 1.15: a pass that is left before its end stays
        until its loader is gone, and so does one whose last batch was given and nobody asked for more.
    """

    def __init__(self) -> None:
        self._loaders: list[Callable[[], Iterable[Batch] | None]] = []

    def begin(self, loader: Iterable[Batch]) -> None:
        """Note that a pass over a loader begins."""
        self._loaders.append(weakref.ref(loader))

    def end(self, loader: Iterable[Batch]) -> None:
        """Note that a loader is read to its end."""
        self._loaders = [held for held in self._loaders if held() is not loader]

    @contextlib.contextmanager
    def reading(self, loader: Iterable[Batch]) -> Iterator[None]:
        """Let any iterable be the innermost loader meanwhile; it may be one that tells nobody of its passes."""

        def held() -> Iterable[Batch]:
            return loader

        self._loaders.append(held)
        try:
            yield
        finally:
            self._loaders = [other for other in self._loaders if other is not held]

    @property
    def innermost(self) -> Iterable[Batch] | None:
        """The loader that is read now; None where none is."""
        self._loaders = [held for held in self._loaders if held() is not None]
        return self._loaders[-1]() if self._loaders else None
