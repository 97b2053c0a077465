"""Convert objects of `pytorch_lightning`, the other distribution of `lightning.pytorch`.

Both packages hold the same code under two names, and neither recognises the other's classes. Objects from outside pass
through `adopt`, so that all other files only handle classes of `lightning.pytorch`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import TypeVar

import lightning
import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Checkpoint,
    EMAWeightAveraging,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger

from hf_compat.engine.internals import attach_data_module, given_data
from hf_compat.errors import CallbackError
from hf_compat.interop.transformers_models import loaded

Candidate = TypeVar("Candidate")

_OTHER, _OWN = "pytorch_lightning", "lightning.pytorch"
_ADOPTED = (pl.Callback, Logger, pl.LightningDataModule)
# Their inherited code needs modules or plugins of its own distribution.
_TIED_TO_THEIR_DISTRIBUTION = (WeightAveraging, EMAWeightAveraging, ThroughputMonitor)
# Callbacks that Lightning adds by default if it recognises none.
_ADDED_BY_DEFAULT = (Checkpoint, ProgressBar, ModelSummary)


def is_of_other_distribution(candidate: object) -> bool:
    """Whether an object's class is one of `pytorch_lightning` or inherits from one."""
    return loaded(_OTHER) is not None and _shipped_class(type(candidate)) is not None


def adopt(candidate: Candidate) -> Candidate:
    """Make an object of `pytorch_lightning` an instance of `lightning.pytorch`, too. Return others unchanged.

    Callbacks, loggers and data modules get a class that inherits from their own and from its namesake here. They keep
    their identity, and both distributions recognise them.

    Raises:
        CallbackError: The distributions have different versions, so that hooks may differ. Or the object inherits code
            that works in its own distribution only.
    """
    kind: type = type(candidate)
    if (
        isinstance(candidate, _ADOPTED)
        or not is_of_other_distribution(candidate)
        or not issubclass(_namesake_of(kind), _ADOPTED)
    ):
        return candidate
    theirs, ours = getattr(loaded(_OTHER), "__version__", "?"), lightning.__version__
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        raise CallbackError(
            f"{kind.__name__} is from {_OTHER} {theirs}, but the Trainer uses lightning {ours}.\n\n"
            f"Hint: import it from `{_OWN}`, which has the same classes."
        )
    twin = _namesake_of(kind)
    if twin in _TIED_TO_THEIR_DISTRIBUTION and _shipped_class(kind) is not kind:
        raise CallbackError(
            f"{kind.__name__} inherits from `{_OTHER}`'s {twin.__name__}, whose code needs modules and plugins of "
            f"{_OTHER}.\n\nHint: inherit from `{_OWN}.callbacks.{twin.__name__}` instead."
        )
    candidate.__class__ = _joined(kind)
    return candidate


def _shipped_class(kind: type) -> type | None:
    """Return the nearest class in the inheritance chain that `pytorch_lightning` ships."""
    return next((base for base in kind.__mro__ if f"{base.__module__}.".startswith(f"{_OTHER}.")), None)


def _namesake_of(kind: type) -> type:
    """Return the `lightning.pytorch` namesake of a class's nearest shipped base."""
    shipped = _shipped_class(kind)
    assert shipped is not None  # callers have checked it
    home = importlib.import_module(shipped.__module__.replace(_OTHER, _OWN, 1))
    twin: type = getattr(home, shipped.__name__)
    return twin


@functools.cache
def _joined(kind: type) -> type:
    """Make a class of both. Methods without an override come from `lightning.pytorch`, which compares them."""
    twin = _namesake_of(kind)
    root = next(base for base in _ADOPTED if issubclass(twin, base))
    empty = getattr(importlib.import_module(root.__module__.replace(_OWN, _OTHER, 1)), root.__name__)
    methods = {name: method for name, method in inspect.getmembers(root, inspect.isfunction) if name[0] != "_"}
    inherited = {name: method for name, method in methods.items() if getattr(kind, name) is getattr(empty, name)}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    bases = (twin, kind) if kind is _shipped_class(kind) else (kind, twin)  # a shipped class runs its namesake's code
    return type(kind)(kind.__name__, bases, {**names, **(inherited if bases[0] is kind else {})})


def adopt_callbacks_of(trainer: pl.Trainer) -> None:
    """Convert the callbacks of a plain `lightning.Trainer`, and remove the defaults that they replace."""
    given: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    foreign = [callback for callback in given if is_of_other_distribution(callback)]
    new = [adopt(callback) for callback in foreign if not isinstance(callback, pl.Callback)]
    kinds = tuple(kind for kind in _ADDED_BY_DEFAULT if any(isinstance(callback, kind) for callback in new))
    kept = [c for c in given if c in foreign or not isinstance(c, kinds)]
    last = [callback for callback in kept if isinstance(callback, Checkpoint)]
    trainer.callbacks = [*(c for c in kept if c not in last), *last]  # type: ignore[attr-defined]


def adopt_data_of(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Attach a foreign data module, which a plain `lightning.Trainer` has mistaken for a loader."""
    given = given_data(trainer)
    data = adopt(given) if is_of_other_distribution(given) else None
    if isinstance(data, pl.LightningDataModule):
        attach_data_module(trainer, module, data)
