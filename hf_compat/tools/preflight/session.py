"""One preflight: the Trainer works on a copy of its state, and the checks collect findings."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from hf_compat.callbacks.callback_set import CallbackSet
from hf_compat.data.types import Batch
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.callbacks import Callback, CallbackHandler
from hf_compat.hf.rows import OWN_ROWS, ROWS
from hf_compat.plan.argument_support import defaults_of
from hf_compat.plan.translate import RunCounts, compilation_of
from hf_compat.runtime.collectives import gather_objects
from hf_compat.runtime.nested import Nested
from hf_compat.tools.isolation.plan import real_path
from hf_compat.tools.preflight.report import Finding, PreflightReport, Severity, Unchecked, finding_of, line_of
from hf_compat.tools.preflight.snapshot import Snapshot
from hf_compat.trainer import Trainer


def _quiet(args: TrainingArguments) -> dict[str, object]:
    """The defaults of arguments that would reach beyond an update, or beyond the scratch folder."""
    found = {}
    for name, default in defaults_of(type(args)).items():
        row = ROWS.get(name) or OWN_ROWS.get(name)
        if row is not None and row.reaches_out and name in vars(args):
            found[name] = default if row.form is None else row.form(default)
    return found


@dataclass
class Session:
    """The state that the checks share."""

    trainer: Trainer
    folder: str  # the scratch folder of all processes of this machine
    output_dir: str
    resume_from_checkpoint: str | bool | None = None
    strategy: str = "one_device"
    counts: RunCounts | None = None  # updates, epochs and samples. None if the data does not give them
    loader: object = None  # the training loader that was read
    batches: list[Batch] = field(default_factory=list)  # the collated micro-batches of the first update
    checkpoint_bytes: int | None = None
    metrics: dict[str, Nested] | None = None  # names and values of an evaluation. None if there was none
    evaluated: list[tuple[int, int]] = field(default_factory=list)  # bytes of predictions and samples of each batch
    dropped_columns: tuple[str, ...] = ()  # of the training data, because the forward does not take them
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self.compiles = compilation_of(self.trainer.args) is not None

    @functools.cached_property
    def _snapshot(self) -> Snapshot:
        """What is restored after each check that works on a copy, taken before the first of them."""
        return Snapshot((self.trainer,), (self.trainer.train_dataset, self.trainer.eval_dataset))

    @contextlib.contextmanager
    def on_a_copy(self, *callbacks: Callback, name: str = "run") -> Iterator[str]:
        """Let the Trainer work as in a run, and restore it afterwards. Logs and warnings are left out."""
        place, trainer, before = os.path.join(self.folder, name), self.trainer, logging.root.manager.disable
        snapshot = self._snapshot
        try:
            os.makedirs(place, exist_ok=True)
            args = trainer.args
            trainer.args = object.__new__(type(args))
            vars(trainer.args).update(vars(args), **_quiet(args), output_dir=place)
            trainer.state, trainer.control = copy.deepcopy(trainer.state), copy.deepcopy(trainer.control)
            handler = CallbackHandler(
                [], trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
            )
            handler.requestable_kwargs["trainer"] = trainer
            trainer.callback_handler = handler
            trainer._callbacks = CallbackSet(trainer)
            for one in callbacks:
                handler.add_callback(one)
                trainer._callbacks.order.append(one)
            vars(trainer)["log"] = lambda logs, start_time=None: None  # an override may report to a tracker
            logging.disable(logging.CRITICAL)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield place
        finally:
            logging.disable(before)
            snapshot.restore()

    def error(self, check: str, problem: str, way_out: str) -> None:
        self.findings.append(Finding(severity=Severity.ERROR, check=check, problem=problem, way_out=way_out))

    def warn(self, check: str, problem: str, way_out: str) -> None:
        self.findings.append(Finding(severity=Severity.WARNING, check=check, problem=problem, way_out=way_out))

    def note(self, check: str, problem: str, way_out: str = "") -> None:
        self.findings.append(Finding(severity=Severity.NOTE, check=check, problem=problem, way_out=way_out))

    def raised(self, error: BaseException, check: str, doing: str, way_out: str = "") -> None:
        self.findings.append(finding_of(error, check, doing, way_out))

    def leave_out(self, check: str, reason: str) -> None:
        """Record a check that was not made."""
        self.unchecked.append(Unchecked(check=check, reason=reason))

    def has_error(self, *checks: str) -> bool:
        return any(one.check in checks and one.severity == Severity.ERROR for one in self.findings)

    @contextlib.contextmanager
    def checking(self, check: str) -> Iterator[None]:
        """Count a check as made. If it fails by itself, record that, so that the others are still made."""
        try:
            yield
            self.checked.append(check)
        except Exception as error:  # of a user's object that the check has called
            self.leave_out(check, f"it could not be made ({line_of(error)})")

    def report(self) -> PreflightReport:
        """Collect the findings of all processes. A finding that not all have names its ranks."""
        of_ranks = gather_objects(self.findings)
        found: dict[Finding, list[int]] = {}
        for rank, of_rank in enumerate(of_ranks):
            for finding in dict.fromkeys(of_rank):
                found.setdefault(finding, []).append(rank)
        findings: list[Finding] = []
        for one, ranks in found.items():
            of_some = "" if len(ranks) == len(of_ranks) else f"rank {', '.join(map(str, ranks))}: "
            findings.append(replace(one, problem=f"{of_some}{one.problem}"))
        return PreflightReport(
            findings=tuple(sorted(findings, key=lambda finding: list(Severity).index(finding.severity))),
            unchecked=tuple(self.unchecked),
            checked=tuple(self.checked),
            measured=tuple(self.measured),
            seconds=round(time.monotonic() - self._began, 3),
        )


def without_workers(args: TrainingArguments) -> None:
    """Let a copy of arguments read its data in this process. Only the update starts the workers."""
    vars(args).update(
        dataloader_num_workers=0,
        dataloader_persistent_workers=False,
        dataloader_prefetch_factor=None,
        dataloader_multiprocessing_context=None,
    )


def existing_parent(folder: str) -> str:
    """The nearest existing folder of a path, outside of the check's isolation."""
    path = os.path.abspath(folder)
    while not os.path.isdir(real_path(path)) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def weights_in_bytes(model: nn.Module) -> int:
    """The size of a model's weights in memory."""
    return sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
