"""Hooks of an `HFModule` that its subclasses override: what the module itself does in them happens in any case.

Lightning's own hooks are empty, so overrides rarely call `super()`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import lightning.pytorch as pl

Hook = Callable[..., object]

KEPT = (
    "configure_callbacks", "setup", "teardown", "on_fit_start", "on_train_start", "on_train_epoch_start",
    "on_train_epoch_end", "on_validation_batch_end", "on_test_batch_end", "on_validation_epoch_end",
    "on_test_epoch_end", "on_save_checkpoint", "on_load_checkpoint", "on_validation_model_eval",
    "on_test_model_eval", "on_predict_model_eval",
)  # fmt: skip


def note_hooks(module: type[pl.LightningModule]) -> None:
    """Let a class note which of its hooks have run."""
    for name in KEPT:
        setattr(module, name, _noting(name, getattr(module, name)))


def keep_hooks(subclass: type[pl.LightningModule], base: type[pl.LightningModule]) -> None:
    """Let the hooks of a subclass be followed by those of the base, where they have not called them."""
    for name in KEPT:
        override = vars(subclass).get(name)
        if inspect.isfunction(override):
            setattr(subclass, name, _followed(name, override, getattr(base, name)))


def _noting(name: str, hook: Hook) -> Hook:
    @functools.wraps(hook)
    def run(self: pl.LightningModule, *args: object, **kwargs: object) -> object:
        noted: set[str] | None = self.__dict__.get("_hooks_run")
        if noted is not None:  # an override asks
            noted.add(name)
        return hook(self, *args, **kwargs)

    return run


def _followed(name: str, override: Hook, base: Hook) -> Hook:
    @functools.wraps(override)
    def run(self: pl.LightningModule, *args: object, **kwargs: object) -> object:
        _hooks_run(self).discard(name)
        result = override(self, *args, **kwargs)
        if name not in _hooks_run(self):
            base(self, *args, **kwargs)
        return result

    return run


def _hooks_run(module: pl.LightningModule) -> set[str]:
    noted: set[str] = module.__dict__.setdefault("_hooks_run", set())
    return noted
