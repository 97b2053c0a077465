"""What happens after an update or an epoch: log → evaluate → save, as the control's flags say.

With several processes the flags of all ranks are made the same first, wherever a callback may set them on one alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Protocol

from hf_compat.hf.enums import SaveStrategy
from hf_compat.hf.state import TrainerControl
from hf_compat.runtime.collectives import CPUAgreement, is_distributed

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments
from collections.abc import Iterable

from hf_compat.hf.callbacks import EVENTS, Callback, TrainerCallback
from hf_compat.runtime.inspection import home_of

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


FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Controlled(Protocol):
    """A run with its arguments and flags; a callback may put another control in place at any event."""

    args: TrainingArguments
    control: TrainerControl


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagSources:
    """When code of the user's own may set a flag: only then do the processes ask each other.

    Args:
        in_updates: At any event of an update.
        in_windows: Between the micro-batches of an update.
        in_epochs: At an epoch's end.
    """

    in_updates: bool = False
    in_windows: bool = False
    in_epochs: bool = False


class FlagAgreement:
    """Let all processes act on the same flags: one that a process sets holds on all of them.

    A flag that one process alone obeys leaves the others waiting for it until `ddp_timeout`. The arguments set the same
    flags everywhere, and nothing is asked; where code of the user's own may set one, an update costs one message
    between the CPUs.

    Args:
        timeout_seconds: How long a process waits for the others.
        sources: Where this process's flags may come from; what holds for one process holds for all.
    """

    def __init__(self, timeout_seconds: float = 0.0, sources: FlagSources | None = None) -> None:
        self.sources = FlagSources() if sources is None else sources
        self._agreement = CPUAgreement(timeout_seconds) if timeout_seconds and is_distributed() else None
        if self._agreement is not None:
            in_updates, in_windows, in_epochs = self._agreement.highest_each([int(s) for s in astuple(self.sources)])
            self.sources = FlagSources(
                in_updates=bool(in_updates), in_windows=bool(in_windows), in_epochs=bool(in_epochs)
            )

    def agree(self, control: TrainerControl) -> None:
        """Set every flag that another process has set."""
        if self._agreement is None:
            return
        for name, value in zip(FLAGS, self._agreement.highest_each(flags_of(control)), strict=True):
            if value and not getattr(control, name):
                setattr(control, name, True)


def flags_of(control: TrainerControl) -> list[int]:
    """Return the flags as 0 or 1, in the order of `FLAGS`."""
    return [int(bool(getattr(control, name))) for name in FLAGS]


NO_AGREEMENT = FlagAgreement()


def log_evaluate_save(
    run: Controlled,
    *,
    log: Callable[[], None],
    evaluate: Callable[[], bool],
    save: Callable[[], None],
    agreement: FlagAgreement = NO_AGREEMENT,
) -> None:
    """Log, evaluate and save, in this order, as the flags say when it is their turn.

    With `save_strategy="best"` an evaluation decides whether to save.

    Args:
        run: Whose flags and arguments.
        log: Logs the loss.
        evaluate: Evaluates, and returns whether the tracked metric is the best so far.
        save: Writes a checkpoint.
        agreement: Makes what these set the same on all processes.

    Mirrors:
        `transformers.Trainer._maybe_log_save_evaluate`, 5.23.
    """
    if run.control.should_log:
        log()
        if agreement.sources.in_updates:
            agreement.agree(run.control)
    if run.control.should_evaluate:
        is_best = evaluate()
        if run.args.save_strategy == SaveStrategy.BEST:
            run.control.should_save = is_best
        agreement.agree(run.control)  # metrics may differ, and with them what is the best or stops early
    if run.control.should_save:
        save()
        if agreement.sources.in_updates:
            agreement.agree(run.control)
