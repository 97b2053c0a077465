"""`TrainingRun` holds what lasts for one call of `train()`.

Beside it: the flags and the actions they request, the best evaluation, and the check that all ranks have the same
arguments and data.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import lightning.pytorch as pl
import torch
from torch import nn

import hf_compat.upstream  # noqa: F401 - loads Lightning
from hf_compat.checkpoint.layout import checkpoint_step
from hf_compat.checkpoint.model_state import ModelState
from hf_compat.checkpoint.reading import Weights
from hf_compat.checkpoint.run_lock import LONGEST_ID, Owner
from hf_compat.checkpoint.run_state import PlainState, ResumePoint, RunState, SavedAt, readable_state
from hf_compat.data.loader import last_shares
from hf_compat.data.types import Batch, Collator, DataSource, Loader
from hf_compat.engine.internals import is_training_batch
from hf_compat.engine.module import WindowModule
from hf_compat.engine.window_trainer import WindowTrainer
from hf_compat.engine.windows import Accelerator, TrainingSteps, Windows
from hf_compat.errors import ArgumentError, MetricError, MissingMetric, warn_user
from hf_compat.hf.argument_values import OWN_ROWS, ROWS, AcceleratorConfig
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.arguments_rules import infers_direction
from hf_compat.hf.callbacks import EVENTS, Callback, CallbackHandler, TrainerCallback, eval_metric_name
from hf_compat.hf.enums import SaveStrategy
from hf_compat.hf.metric_names import is_error, is_negated
from hf_compat.hf.metrics import number_of_metric, speed_metrics
from hf_compat.hf.search import Metrics, Objective, Space, Trial
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.plan.translate import RunCounts
from hf_compat.runtime.collectives import (
    Rows,
    are_equal,
    as_numbers,
    as_text,
    bounds_of,
    gather_objects,
    highest_on_host,
    is_distributed,
    sum_of_bits,
)
from hf_compat.runtime.inspection import home_of, kept_per_class
from hf_compat.runtime.signals import StopSignals
from hf_compat.runtime.text import brief, shown
from hf_compat.training_run.loss_log import LossLog

if TYPE_CHECKING:
    from hf_compat.training_run.resumer import Resumer
    from hf_compat.training_run.saver import Saver

logger = logging.getLogger(__name__)

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
            function = getattr(method, "__func__", method)
            is_empty = function is getattr(TrainerCallback, event)
            if callable(method) and not is_empty and function.__module__ != "transformers.trainer_callback":
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


FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Controlled(Protocol):
    """A Trainer, or an adapter's run, with its arguments and flags. A callback may replace the control at any event."""

    args: TrainingArguments
    control: TrainerControl


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
        `transformers.Trainer._maybe_log_save_evaluate`, 5.23.
    """
    for action in ("log", "evaluate", "save"):
        if getattr(owner.control, f"should_{action}"):
            yield action
            follows_metric = action == "evaluate" and owner.args.metric_for_best_model is not None
            if agreement.sources.in_updates or follows_metric:
                agreement.agree(owner.control)


def save_if_best(run: Controlled, is_best: bool) -> None:
    """Let an evaluation decide whether to save, with `save_strategy="best"`."""
    if run.args.save_strategy == SaveStrategy.BEST:
        run.control.should_save = is_best


@dataclass(kw_only=True)
class TrainingRun:
    """The state of one call of `train()`."""

    losses: LossLog
    counts: RunCounts | None = None
    loader: Loader = None
    windows: Windows | None = None  # the loader's micro-batches, grouped by update
    checkpoint: str | None = None  # the folder that the run resumes from
    resumed: RunState | None = None  # the state in that folder, if it has one
    start: ResumePoint = field(default_factory=ResumePoint)
    run_id: str = field(default_factory=functools.partial(secrets.token_hex, 4))  # in manifests. A resumed run keeps it
    trial: Trial = None
    ignore_keys_for_eval: list[str] | None = None
    start_time: float = field(default_factory=time.time)
    updates_before: int = 0  # made before this call
    tokens_before: int = 0
    flag_agreement: FlagAgreement = NO_AGREEMENT

    moment: SavedAt = field(default=SavedAt.UPDATE, init=False)  # where in an epoch a checkpoint would be written now
    grad_norm: torch.Tensor | float | None = field(default=None, init=False)  # None before the epoch's first update
    learning_rate: float | None = field(default=None, init=False)  # of the last update, before the schedule stepped
    lightning_trainer: WindowTrainer | None = field(default=None, init=False)  # during the fit
    module: WindowModule | None = field(default=None, init=False)  # during the fit
    frozen: list[nn.Parameter] = field(default_factory=list, init=False)  # at the start, if own code may unfreeze them
    stops_at_start: bool = field(default=False, init=False)  # a callback's time limit was over before the fit
    evaluated: set[str] = field(default_factory=set, init=False)  # sets whose persistent workers have started
    turn: int | None = field(default=None, init=False)  # number of this call of `train` in its output folder

    def state(self, host: RunHost, extras: PlainState) -> RunState | None:
        """Return the state that a resumed run needs, or None if no training is running.

        `extras` are entries that Lightning callbacks have added to the checkpoint.
        """
        if self.lightning_trainer is None or self.windows is None:
            return None
        losses, grad_norm = self.losses.state_with(self.grad_norm)
        # the position after the counted updates, as a resumed run repeats an unfinished update
        is_within_update = is_training_batch(self.lightning_trainer)
        epoch_is_over = host.control.should_epoch_stop and not is_within_update  # a callback is ending the epoch
        position = self.windows.position(epoch_is_over, before_last=is_within_update)
        callbacks = {}
        for callback in host._callbacks.lightning:
            key = callback.state_key
            callbacks[key] = readable_state(callback.state_dict(), f"The state of the callback {key}")
        return RunState(
            data=position,
            moment=self.moment,
            world_size=host.args.world_size,
            sharing=host.accelerator.rank_slice.sharing,
            samples_per_micro_batch=host._train_batch_size * host.accelerator.rank_slice.world_size,
            losses=dict(losses),
            grad_norm=grad_norm,
            learning_rate=None if self.learning_rate is None else float(self.learning_rate),
            callbacks=callbacks,
            extras=extras,
            evaluated=sorted(self.evaluated),
            workers=getattr(self.loader, "num_workers", None),
            keeps_workers=getattr(self.loader, "persistent_workers", False),
        )


def run_summary(
    start_time: float,
    num_samples: float | None,
    num_updates: int,
    total_flos: float,
    train_loss: float,
    nonfinite_updates: int = 0,
) -> dict[str, float]:
    """Return `train_runtime`, `train_samples_per_second`, `train_steps_per_second`, `total_flos` and `train_loss`.

    The times begin at `start_time` (`time.time()`, seconds), as do samples and updates. Operations and mean loss are
    of the whole run. The summary has `nonfinite_steps`, with a warning, if losses were not finite: `nonfinite_updates`
    is the number of the rank that had most updates with such losses.
    """
    speeds = speed_metrics("train", start_time, num_samples=num_samples, num_steps=num_updates)
    summary = {**speeds, "total_flos": total_flos, "train_loss": train_loss}
    if not nonfinite_updates:
        return summary
    logger.warning(
        "The loss of %d updates was not finite (NaN or infinite). `logging_nan_inf_filter` leaves it out of the logs "
        "and of `train_loss`.",
        nonfinite_updates,
    )
    return {**summary, "nonfinite_steps": nonfinite_updates}


def tracked_value(metrics: Mapping[str, float], metric_for_best_model: str) -> float:
    """Return the metric that the arguments name, or raise a MissingMetric or a MetricError."""
    name = eval_metric_name(metric_for_best_model)
    if not isinstance(metrics, Mapping):  # an override may return anything
        raise MetricError(
            f"`evaluate` returned {brief(metrics)}, which is not a mapping with an entry {brief(name)}.\n\n"
            "Hint: return the metrics, or train without `metric_for_best_model`."
        )
    try:
        return number_of_metric(metrics[name], name)
    except KeyError:
        raise MissingMetric(
            f"The `metric_for_best_model` training argument is set to {brief(name)}, which is not found in the "
            f"evaluation metrics. The available evaluation metrics are: {list(metrics)}.\n\n"
            "Hint: name one of them, or let `compute_metrics` return it."
        ) from None


def note_best_metric(state: TrainerState, args: TrainingArguments, metrics: Mapping[str, float]) -> bool:
    """Compare an evaluation with the best one so far, and store it in the state if it is better.

    Returns:
        Whether it is the best so far. False if no metric is tracked.

    Mirrors:
        `transformers.Trainer._determine_best_metric`, 5.23.
    """
    if args.metric_for_best_model is None:
        return False
    value = tracked_value(metrics, args.metric_for_best_model)
    if state.best_metric is None:
        state.best_metric = float("-inf") if args.greater_is_better else float("inf")
    is_best = bool(value > state.best_metric if args.greater_is_better else value < state.best_metric)
    if is_best:
        state.best_metric = value
        if args.save_strategy != SaveStrategy.NO:
            state.best_global_step = state.global_step
    return is_best


def tell_of_direction(args: TrainingArguments) -> None:
    """Warn of a metric whose direction follows from the end of its name, and whose other words say the opposite."""
    name, rises = args.metric_for_best_model, bool(args.greater_is_better)
    if name is None or not infers_direction(args) or args.eval_strategy == "no":
        return
    if is_error(name) if rises else is_negated(name):
        kind, best = ("an error", "largest") if rises else ("the opposite of a loss", "smallest")
        warn_user(
            f"`{shown('metric_for_best_model', name)}` looks like {kind}, and `greater_is_better` is not set: as in "
            f"transformers, the {best} value counts as the best.\n\nHint: set `greater_is_better={not rises}`, or "
            f"{rises} if that is meant."
        )


def tell_of_other_best(args: TrainingArguments, state: TrainerState) -> None:
    """Warn of a resumed best evaluation by another metric, or another direction, than that of the arguments."""
    best, name = state.best_metric, args.metric_for_best_model
    if best is None or name is None or args.eval_strategy == "no":
        return
    key = eval_metric_name(name)
    metrics = [entry for entry in state.log_history if any(one.startswith("eval_") for one in entry)]
    values = {entry[key] for entry in metrics if isinstance(entry.get(key), (int, float))}
    if metrics and not values:
        told = f"no evaluation of the checkpoint has {brief(key)}"
    elif len(values) > 1 and best == (min if args.greater_is_better else max)(values):
        told = f"it is the worst one by `{shown('greater_is_better', args.greater_is_better)}`"
    else:
        return
    warn_user(
        f"New evaluations are compared with the checkpoint's best ({best:g}, update {state.best_global_step}), though "
        f"{told}.\n\nHint: resume with the `metric_for_best_model` and `greater_is_better` of before, or begin a new "
        "run with the checkpoint's weights."
    )


def tell_of_best(args: TrainingArguments, state: TrainerState, updates_before: int = 0) -> None:
    """Warn if `load_best_model_at_end` cannot load the weights of the best evaluation.

    One of the `updates_before` was saved before the run was resumed.
    """
    loaded, update = state.best_model_checkpoint, state.best_global_step
    if args.eval_strategy == "no" or (loaded is not None and checkpoint_step(loaded) == update):
        return
    metric = eval_metric_name(str(args.metric_for_best_model))
    if state.best_metric is None:
        told = "The best evaluation is not known, as none was made"
        way_out = "evaluate earlier: lower `eval_delay`, or call `evaluate` in the methods that you override"
    elif not update:
        told = f"The best evaluation is not known, as none gave a number {brief(metric)} that can be compared"
        way_out = "look at the metric, which was NaN or infinite each time"
    else:
        told = f"The best evaluation ({metric}={state.best_metric:g}, update {update}) has no checkpoint"
        way_out = "save after each evaluation (`save_steps` equal to `eval_steps`), or set `save_strategy='best'`"
        if update <= updates_before:
            way_out = f"resume in an output folder that has checkpoint-{update}, too"
    kept = "the weights of the last update stay" if loaded is None else f"{loaded} is loaded, the best that was saved"
    warn_user(f"{told}: {kept}.\n\nHint: {way_out}.")


def tell_of_no_evaluation(args: TrainingArguments, state: TrainerState) -> None:
    """Warn of a delay that lasts until the run's end, where transformers evaluates whatever the interval is."""
    by_steps = args.eval_strategy == "steps"
    done, unit = (state.global_step, "updates") if by_steps else (state.epoch or 0, "epochs")
    if args.eval_strategy == "no" or args.eval_delay <= done or state.global_step < state.max_steps:
        return
    if not any(name.startswith("eval_") for entry in state.log_history for name in entry):
        warn_user(
            f"The training has evaluated nothing: it ended after {done:g} {unit}, "
            f"with `{shown('eval_delay', args.eval_delay)}`.\n\nHint: set a lower one."
        )


def note_best_checkpoint(
    state: TrainerState,
    path_of: Callable[[int], str],
    current: str,
    was_written: Callable[[str], bool] = os.path.exists,
) -> None:
    """Store the path of the best update's checkpoint in the state, if it is the current one or this run wrote it.

    A folder of that name may belong to another run.
    """
    if not state.best_global_step:
        return
    path = path_of(state.best_global_step)
    if path == current or was_written(path):
        state.best_model_checkpoint = path


def differences(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """List the values that differ between ranks, a line for each name: `max_steps` is 4 on rank 0, 6 on rank 1."""
    lines = []
    for name in dict.fromkeys(name for values in by_rank for name in values):
        ranks: dict[str, list[str]] = {}
        for rank, values in enumerate(by_rank):
            ranks.setdefault(values.get(name, "not set"), []).append(str(rank))
        if len(ranks) > 1:
            by_value = (f"{value} on rank{'s'[: len(on) - 1]} {', '.join(on)}" for value, on in ranks.items())
            lines.append(f"`{name}` is {'; '.join(by_value)}")
    return lines


def compare_updates(args: TrainingArguments, counts: RunCounts, loader: object, own: FlagSources) -> FlagSources:
    """Refuse data from which ranks get different numbers of updates. Return the sources of flags of all ranks."""
    if args.world_size == 1:
        return own
    hint, mine, shares = "pass the same data to every process.", repr(counts.max_updates), last_shares(loader)
    if shares and not shares[-1]:
        hint = "set `dataloader_drop_last=True`, or leave `even_batches` of `accelerator_config` at True."
        # the length of a split batch's parts counts the last round on every rank, as Accelerate's does
        if (
            AcceleratorConfig.from_any(args.accelerator_config).split_batches
            and args.max_steps <= 0 < counts.max_updates >= counts.updates_per_epoch
        ):
            own_share = shares[args.process_index * len(shares) // args.world_size]
            mine += f", with {own_share} samples in the last one of an epoch"
    sources = list(map(int, own))
    refuse_differences({"updates that the training data give": mine}, "training data", hint, sources)
    return FlagSources(*map(bool, sources))


@dataclass(slots=True)
class StartFacts:
    """What the ranks tell each other when a training begins. Afterwards it is what holds for all."""

    owner: Owner = field(default_factory=Owner)  # of the run's locks: the first rank
    # From what the number of updates follows, beside the arguments. None if it is not known yet, or differs
    data: str | None = None
    sources: FlagSources = field(default_factory=FlagSources)


def compare_arguments(
    args: TrainingArguments,
    checkpoint: str | bool | None,
    facts: StartFacts | None = None,
    before: Callable[[], object] | None = None,
) -> None:
    """Refuse arguments and checkpoints that differ between ranks, before the ranks wait for each other.

    All learn the facts in the same exchange, and hear of an error of what a rank does `before`.
    """
    facts = facts or StartFacts()
    if args.world_size == 1:
        if before is not None:
            before()
        return
    wanted = repr(os.path.basename(checkpoint) if isinstance(checkpoint, str) else checkpoint)
    rows, values = ROWS | OWN_ROWS, args.to_dict()
    mine = {name: repr(value) for name, value in values.items() if name in rows and not rows[name].per_rank}
    numbers = [facts.data is None, *bounds_of(facts.data or ""), *map(int, facts.sources)]
    numbers += as_numbers(facts.owner.id if args.process_index == 0 else None, LONGEST_ID)
    refuse_differences({**mine, "resume_from_checkpoint": wanted}, "arguments", numbers=numbers, before=before)
    is_unknown, highest, lowest, in_updates, in_windows, in_epochs, *of_owner = numbers
    facts.data = None if is_unknown or highest != -lowest else facts.data
    facts.sources = FlagSources(bool(in_updates), bool(in_windows), bool(in_epochs))
    facts.owner = Owner.of_id(as_text(of_owner)) or facts.owner


def refuse_differences(
    mine: dict[str, str],
    what: str,
    hint: str = "pass the same values to every process.",
    numbers: list[int] | None = None,
    before: Callable[[], object] | None = None,
) -> None:
    """Refuse values that differ between ranks. They are given as text. `what` is their name in the message."""
    if are_equal(repr(mine), numbers, before):
        return
    found = differences(gather_objects(mine))
    if found:
        raise ArgumentError(
            f"The processes of this run have different {what}. They would wait for each other forever, or not train on "
            "the same model and data.\n" + "\n".join(f"  {line}" for line in found) + f"\n\nHint: {hint}"
        )


class LightningCallbacks(Protocol):
    """A Trainer's callbacks, of which Lightning's have states. `order` has those of both kinds."""

    lightning: list[pl.Callback]
    order: list[pl.Callback | Callback]


class RunAccelerator(Accelerator, Protocol):
    """The attributes of the Trainer's `accelerator` that a run reads."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None: ...
    def unwrap_model(self, model: nn.Module) -> nn.Module: ...
    def clear(self) -> object: ...


class _Pushes(Protocol):
    unpushed: str | None

    def push_checkpoint(self, folder: str) -> None: ...


class RunHost(TrainingSteps, Protocol):
    """The Trainer, as seen by the objects that do its work. Subclasses may override the methods.

    The table `STAGES` names those that load a checkpoint.
    """

    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    processing_class: object
    data_collator: Collator
    stop_signals: StopSignals
    lightning_trainer: pl.Trainer | None
    is_in_train: bool
    current_flos: float
    hub_model_id: str | None
    hp_space: Callable[..., Space]
    compute_objective: Callable[[Metrics], Objective]
    _search_direction: str | list[str] | None  # of a search that is under way
    objective: Objective
    _run: TrainingRun
    _saver: Saver
    _resumer: Resumer
    _train_batch_size: int
    _fit_model_state: ModelState | None
    _compiled_model: nn.Module | None

    @property
    def accelerator(self) -> RunAccelerator: ...
    @property
    def _callbacks(self) -> LightningCallbacks: ...
    @property
    def _model_state(self) -> ModelState: ...
    @property
    def _pushes(self) -> _Pushes: ...

    # Callbacks and logs
    def add_callback(self, callback: Callback) -> None: ...
    def pop_callback(self, callback: Callback) -> Callback: ...
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None: ...
    def _log_of_lightning(self, metrics: Mapping[str, float], step: int | None) -> None: ...
    def is_world_process_zero(self) -> bool: ...

    # Training and evaluation
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Trial = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> object: ...
    def evaluate(
        self, eval_dataset: DataSource = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Metrics: ...
    def _evaluate(
        self, trial: Trial, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> Metrics: ...
    @property
    def _maybe_log_save_evaluate(self) -> Callable[..., None]: ...  # overrides of any release have its arguments
    def _refuse_late_overrides(self) -> None: ...
    def store_flos(self) -> None: ...
    def floating_point_ops(self, inputs: Batch) -> int: ...
    def _track_num_input_tokens(self, inputs: Batch) -> None: ...

    # Saving and pushing
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...
    def _save(self, output_dir: str | None = None, state_dict: Weights | None = None) -> None: ...
    def _save_checkpoint(self, model: nn.Module, trial: Trial) -> None: ...
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...
    def _save_scaler(self, output_dir: str) -> None: ...
    def _save_rng_state(self, output_dir: str) -> None: ...
    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None: ...
    def _sorted_checkpoints(
        self, output_dir: str | None = None, checkpoint_prefix: str = ..., use_mtime: bool = False
    ) -> list[str]: ...
    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None: ...
    def push_to_hub(self, commit_message: str | None = ..., *, revision: str | None = None) -> object: ...
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None: ...


def add_flos(host: RunHost, told: Rows) -> None:
    """Add the operations that the ranks have told, or this rank alone has counted, to the state."""
    flos = host.current_flos
    if told.of_all is not None:
        every = host.accelerator.rank_slice.sharing  # of each model one process counts
        flos = type(flos)(sum_of_bits(told.of_all[::every, 0]))
    host.state.total_flos += flos
    host.current_flos = 0
