"""Our callbacks as `transformers`' own classes, for scripts that ask with `isinstance`."""

from __future__ import annotations

import functools
import importlib

from hf_compat.hf.callbacks import EVENTS, TrainerCallback
from hf_compat.interop.transformers_models import loaded
from hf_compat.runtime.progress import in_notebook
from hf_compat.runtime.text import is_installed

# Where transformers has the classes that a Trainer adds by itself.
_HOMES = (
    "transformers.trainer_callback",
    "transformers.integrations.integration_utils",
    "transformers.trainer_jit_checkpoint",
)


def known_to_transformers(kind: type[TrainerCallback]) -> type[TrainerCallback]:
    """Return our class, or one that is transformers' class of the same name too, where somebody has imported that.

    Every event stays ours.
    """
    for home in _HOMES:
        theirs = getattr(loaded(home), kind.__name__, None)
        if isinstance(theirs, type) and not issubclass(kind, theirs):
            return _both(kind, theirs)  # type: ignore[arg-type]  # classes have a hash
    return kind


def notebooks_callback() -> type | None:
    """Return transformers' `NotebookProgressCallback` where this process is a notebook's and transformers is there."""
    if not in_notebook() or not is_installed("transformers"):
        return None
    bar: type = importlib.import_module("transformers.utils.notebook").NotebookProgressCallback
    return bar


def exportable_of_transformers() -> type | None:
    """Return transformers' `ExportableState`; None where it is not installed, or before 4.44."""
    if not is_installed("transformers"):
        return None
    theirs = getattr(importlib.import_module("transformers.trainer_callback"), "ExportableState", None)
    return theirs if isinstance(theirs, type) else None


@functools.cache
def _both(ours: type[TrainerCallback], theirs: type) -> type[TrainerCallback]:
    content = {"__module__": ours.__module__, "__qualname__": ours.__qualname__, "__doc__": ours.__doc__}
    # Where `patch()` came before theirs was imported, its base class is ours: its events would come before our base's
    events = {name: getattr(ours, name) for name in EVENTS}

    def reduce(callback: TrainerCallback, protocol: int) -> tuple[object, ...]:
        """Say how to copy or pickle a callback: its class cannot be found by its name."""
        return _made_again, (ours, vars(callback))

    return type(ours.__name__, (ours, theirs), {**content, **events, "__reduce_ex__": reduce})


def _made_again(ours: type[TrainerCallback], attributes: dict[str, object]) -> TrainerCallback:
    kind = known_to_transformers(ours)
    callback = object.__new__(kind)
    vars(callback).update(attributes)
    return callback
