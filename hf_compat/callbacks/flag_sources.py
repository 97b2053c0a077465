"""Which callbacks may set flags that the arguments do not ask for. HF words only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hf_compat.hf.callbacks import EVENTS, Callback, TrainerCallback
from hf_compat.runtime.inspection import home_of
from hf_compat.training_run.flags import FlagSources

# Modules whose callbacks set no flag of their own before an evaluation, after which the processes agree anyway.
_KNOWN = ("hf_compat.", "transformers.integrations.")
# What happens before a window is left for a flag's sake.
_BEFORE_WINDOWS_END = ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end")


def flag_sources(
    callbacks: Iterable[Callback], has_lightning_callbacks: bool, trainer: object, micro_batches: int
) -> FlagSources:
    """Return when code of the user's own may set a flag.

    Args:
        callbacks: The HF callbacks of this process.
        has_lightning_callbacks: Whether there are Lightning callbacks, which may stop the run.
        trainer: The Trainer, or its class; methods that are not ours may set flags, too.
        micro_batches: Micro-batches of an update; a window of one is not left before its end.
    """
    events = {event for callback in callbacks for event in _events(callback)}
    return FlagSources(
        in_updates=bool(events) or has_lightning_callbacks or _has_methods_of_user(trainer),
        in_windows=micro_batches > 1 and not events.isdisjoint(_BEFORE_WINDOWS_END),
        in_epochs="on_epoch_end" in events or has_lightning_callbacks,
    )


def _events(callback: Callback) -> list[str]:
    """Return the events that a callback of the user's own has a method for."""
    if _is_known(type(callback)) and vars(callback).keys().isdisjoint(EVENTS):
        return []
    methods = {event: getattr(callback, event, None) for event in EVENTS}
    return [event for event, method in methods.items() if callable(method) and not _is_empty(method, event)]


def _is_empty(method: Callable[..., object], event: str) -> bool:
    """Return whether a method is the one of the base class, ours or transformers' own."""
    function = getattr(method, "__func__", method)
    return function is getattr(TrainerCallback, event) or function.__module__ == "transformers.trainer_callback"


def _has_methods_of_user(trainer: object) -> bool:
    """Return whether a method is the user's: in a subclass, on the object, or in the place of one of our class."""
    kind = trainer if isinstance(trainer, type) else type(trainer)
    ours = [one for one in kind.__mro__ if one.__module__.startswith("hf_compat.")]
    return not _is_known(kind) or any(
        callable(value) and callable(getattr(kind, name, None)) and not f"{home_of(value)}.".startswith(_KNOWN)
        for owner in (trainer, *ours)
        for name, value in vars(owner).items()
        if not name.startswith("__")
    )


def _is_known(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(_KNOWN)
