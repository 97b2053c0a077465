"""The flags of `TrainerControl`: who may set one, how ranks agree on them, and the actions that they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.callbacks import EMPTY, EVENTS, Callback, CallbackHandler
from hf_compat.hf.enums import SaveStrategy
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.collectives import highest_on_host, is_distributed
from hf_compat.runtime.inspection import home_of, kept_per_class

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
# Modules whose callbacks set flags by arguments and counts, so equally on every rank. Those that follow a metric are
# agreed on after the evaluation.
_KNOWN = ("hf_compat.", "transformers.integrations.")
# Events before the point at which a flag may end a window early.
_BEFORE_WINDOWS_END = ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end")


def flag_sources(
    callbacks: Iterable[Callback], has_lightning_callbacks: bool, host: object, micro_batches: int
) -> FlagSources:
    """Find out when user code may set a flag: callbacks, and methods of the Trainer or of its class.

    The empty methods of a callback's base class do not count. Lightning callbacks may stop the run. A window of one
    micro-batch cannot end early.
    """
    events = set()
    for callback in callbacks:
        if _is_known(type(callback)) and vars(callback).keys().isdisjoint(EVENTS):
            continue
        for event in EVENTS:
            method = getattr(callback, event, None)
            function, of_theirs = getattr(method, "__func__", method), "transformers.trainer_callback"
            if callable(method) and function is not EMPTY[event] and function.__module__ != of_theirs:
                events.add(event)
    return FlagSources(
        in_updates=bool(events) or has_lightning_callbacks or has_own_methods(host),
        in_windows=micro_batches > 1 and not events.isdisjoint(_BEFORE_WINDOWS_END),
        in_epochs="on_epoch_end" in events or has_lightning_callbacks,
    )


def has_own_methods(host: object) -> bool:
    """Whether the user has defined a method: in a subclass, on the object, or in place of one of our class."""
    kind = host if isinstance(host, type) else type(host)
    ours = [one for one in kind.__mro__ if one.__module__.startswith("hf_compat.")]
    names = [name for one in ours for name in _foreign_methods(one)]
    if not isinstance(host, type):
        names += _foreign_among(vars(host))
    return not _is_known(kind) or any(callable(getattr(kind, name, None)) for name in names)


def _foreign_among(members: Mapping[str, object]) -> list[str]:
    """The names of callables that neither we nor transformers' trackers have put there."""
    methods = {name: value for name, value in members.items() if callable(value) and not name.startswith("__")}
    return [name for name, value in methods.items() if not f"{home_of(value)}.".startswith(_KNOWN)]


@kept_per_class
def _foreign_methods(kind: type) -> list[str]:
    return _foreign_among(vars(kind))


def _is_known(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(_KNOWN)


class Controlled(Protocol):
    """A Trainer, or an adapter's run, with what its callbacks get. A callback may replace the control at any event."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler


class FlagSources(NamedTuple):
    """The points at which user code may set a flag, and so at which ranks must synchronize."""

    in_updates: bool = False  # at any event of an update
    in_windows: bool = False  # between the micro-batches of an update
    in_epochs: bool = False  # at an epoch's end


class FlagAgreement:
    """Synchronizes flags between ranks. A flag set on one rank is set on all.

    Otherwise a rank that obeys a flag alone would leave the others waiting until `ddp_timeout`. The arguments set the
    same flags on all ranks, which needs no exchange. If user code may set one, an update costs a message between CPUs.
    `sources` are those of all ranks.
    """

    def __init__(self, timeout_seconds: float = 0.0, sources: FlagSources | None = None) -> None:
        self.sources = FlagSources() if sources is None else sources
        self._timeout = timeout_seconds if is_distributed() else 0.0

    def agree(self, control: TrainerControl) -> None:
        """Set every flag that another rank has set."""
        if not self._timeout:
            return
        flags = [int(bool(getattr(control, name))) for name in FLAGS]
        for name, value in zip(FLAGS, highest_on_host(flags, self._timeout), strict=True):
            if value and not getattr(control, name):
                setattr(control, name, True)


NO_AGREEMENT = FlagAgreement()


def due_actions(owner: Controlled, agreement: FlagAgreement = NO_AGREEMENT) -> Iterator[str]:
    """Yield `log`, `evaluate` and `save`, in this order, if the flags ask for them.

    Each flag is read just before its action. The ranks agree on their flags after every action if user code may set
    some, and after an evaluation if flags follow a metric, which may differ between ranks: for the best checkpoint,
    or to stop early.

    Mirrors:
        `transformers.Trainer._maybe_log_save_evaluate`.
    """
    for action in ("log", "evaluate", "save"):
        if getattr(owner.control, f"should_{action}"):
            yield action
            follows_metric = action == "evaluate" and owner.args.metric_for_best_model is not None
            if agreement.sources.in_updates or follows_metric:
                agreement.agree(owner.control)


def request_save_if_best(run: Controlled, is_best: bool) -> None:
    """Let an evaluation decide whether to save, with `save_strategy="best"`."""
    if run.args.save_strategy == SaveStrategy.BEST:
        run.control.should_save = is_best
