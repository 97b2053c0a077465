"""The actions after an update or an epoch: log → evaluate → save, according to the control's flags.

With several ranks the flags are synchronized first, wherever a callback may set them on one rank only.
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

# Modules whose callbacks set no flag before an evaluation. Ranks synchronize after each evaluation in any case.
_KNOWN = ("hf_compat.", "transformers.integrations.")
# Events before the point at which a flag may end a window early.
_BEFORE_WINDOWS_END = ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end")


def flag_sources(
    callbacks: Iterable[Callback], has_lightning_callbacks: bool, trainer: object, micro_batches: int
) -> FlagSources:
    """Find out when user code may set a flag.

    Args:
        callbacks: The HF callbacks of this rank.
        has_lightning_callbacks: Whether there are Lightning callbacks, which may stop the run.
        trainer: The Trainer, or its class. User-defined methods may set flags, too.
        micro_batches: Micro-batches in an update. A window of one micro-batch cannot end early.
    """
    events = {event for callback in callbacks for event in _events(callback)}
    return FlagSources(
        in_updates=bool(events) or has_lightning_callbacks or _has_methods_of_user(trainer),
        in_windows=micro_batches > 1 and not events.isdisjoint(_BEFORE_WINDOWS_END),
        in_epochs="on_epoch_end" in events or has_lightning_callbacks,
    )


def _events(callback: Callback) -> list[str]:
    """Return the events that a user-defined callback has a method for."""
    if _is_known(type(callback)) and vars(callback).keys().isdisjoint(EVENTS):
        return []
    methods = {event: getattr(callback, event, None) for event in EVENTS}
    return [event for event, method in methods.items() if callable(method) and not _is_empty(method, event)]


def _is_empty(method: Callable[..., object], event: str) -> bool:
    """Whether a method comes from the base class, ours or transformers' own."""
    function = getattr(method, "__func__", method)
    return function is getattr(TrainerCallback, event) or function.__module__ == "transformers.trainer_callback"


def _has_methods_of_user(trainer: object) -> bool:
    """Whether the user has defined a method: in a subclass, on the object, or in place of one of our class."""
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
    """A run with its arguments and flags. A callback may replace the control at any event."""

    args: TrainingArguments
    control: TrainerControl


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagSources:
    """The points at which user code may set a flag, and so at which ranks must synchronize.

    Args:
        in_updates: At any event of an update.
        in_windows: Between the micro-batches of an update.
        in_epochs: At an epoch's end.
    """

    in_updates: bool = False
    in_windows: bool = False
    in_epochs: bool = False


class FlagAgreement:
    """Synchronizes flags between ranks. A flag set on one rank is set on all.

    Otherwise a rank that obeys a flag alone would leave the others waiting until `ddp_timeout`. The arguments set the
    same flags on all ranks, which needs no exchange. If user code may set one, an update costs a message between CPUs.

    Args:
        timeout_seconds: How long a rank waits for the others.
        sources: Where this rank's flags may be set. The union over all ranks applies.
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
        """Set every flag that another rank has set."""
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
    """Log, evaluate and save, in this order. Each flag is read just before its action.

    With `save_strategy="best"` the evaluation decides whether to save.

    Args:
        run: The owner of flags and arguments.
        log: Logs the loss.
        evaluate: Evaluates. Returns whether the tracked metric is the best so far.
        save: Writes a checkpoint.
        agreement: Synchronizes the flags between ranks after each action.

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
        agreement.agree(run.control)  # metrics may differ between ranks, and so may best metric and early stopping
    if run.control.should_save:
        save()
        if agreement.sources.in_updates:
            agreement.agree(run.control)
