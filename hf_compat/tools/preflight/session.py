"""One preflight: the Trainer on a copy of its state, and what is found on the way."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from hf_compat.data.types import Batch
from hf_compat.hf.callbacks import Callback
from hf_compat.plan.lightning_plan import RunCounts, compilation_of
from hf_compat.runtime.collectives import gather_objects
from hf_compat.runtime.nested import Nested
from hf_compat.tools.preflight.explaining import finding_of, line_of
from hf_compat.tools.preflight.report import Finding, PreflightReport, Severity, Unchecked
from hf_compat.tools.preflight.snapshot import Snapshot
from hf_compat.tools.preflight.subject import Train, enter_scratch, quietly
from hf_compat.trainer import Trainer

_ORDER = list(Severity)


@dataclass
class Session:
    """What the checks share.

    Args:
        trainer: The Trainer that is checked.
        train: Its `train`.
        folder: The scratch folder, of all processes of this machine.
        output_dir: Where the run will save.
        resume_from_checkpoint: What the run will go on from.
        strategy: How several processes train together, in the plan's words.
        counts: Updates, epochs and samples; None where the data does not give them.
        batches: The micro-batches of the first update, as the collator makes them; empty where there are none.
        checkpoint_bytes: Size of a checkpoint, measured; None where none was written.
        metrics: Names and values that an evaluation gave; None where none was made.
        dropped_columns: Columns of the training data that the forward does not take, and that are removed.
    """

    trainer: Trainer
    train: Train
    folder: str
    output_dir: str
    resume_from_checkpoint: str | bool | None = None
    strategy: str = "one_device"
    counts: RunCounts | None = None
    batches: list[Batch] = field(default_factory=list)
    checkpoint_bytes: int | None = None
    metrics: dict[str, Nested] | None = None
    dropped_columns: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self.compiles = compilation_of(self.trainer.args) is not None
        self._snapshot = Snapshot((self.trainer,), (self.trainer.train_dataset, self.trainer.eval_dataset))

    @contextlib.contextmanager
    def on_a_copy(self, *callbacks: Callback, name: str = "run") -> Iterator[str]:
        """Let the Trainer work as in a run within a context, and be as it was after it.

        Args:
            callbacks: The callbacks that are called, in place of the Trainer's.
            name: Of the folder that it saves into, within the scratch folder.
        """
        place = os.path.join(self.folder, name)
        try:
            os.makedirs(place, exist_ok=True)
            enter_scratch(self.trainer, place, list(callbacks))
            with quietly():
                yield place
        finally:
            self._snapshot.restore()

    def add(self, severity: Severity, check: str, problem: str, way_out: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(severity=severity, check=check, problem=problem, way_out=way_out))

    def error(self, check: str, problem: str, way_out: str) -> None:
        """Add something with which the run fails."""
        self.add(Severity.ERROR, check, problem, way_out)

    def warn(self, check: str, problem: str, way_out: str) -> None:
        """Add something with which the run hardly does what is meant."""
        self.add(Severity.WARNING, check, problem, way_out)

    def note(self, check: str, problem: str, way_out: str = "") -> None:
        """Add something that is worth knowing."""
        self.add(Severity.NOTE, check, problem, way_out)

    def raised(self, error: BaseException, check: str, doing: str, way_out: str = "") -> None:
        """Add what an exception says."""
        self.findings.append(finding_of(error, check, doing, way_out))

    def leave_out(self, check: str, reason: str) -> None:
        """Say that something was not looked at."""
        self.unchecked.append(Unchecked(check=check, reason=reason))

    def has_error(self, *checks: str) -> bool:
        """Return whether one of some checks has found an error."""
        return any(one.check in checks and one.severity == Severity.ERROR for one in self.findings)

    @contextlib.contextmanager
    def checking(self, check: str) -> Iterator[None]:
        """Count a check as made; where it fails by itself, say so, and let the others go on."""
        try:
            yield
            self.checked.append(check)
        except Exception as error:  # of an object of the user's, which a check has asked something
            self.leave_out(check, f"it could not be made ({line_of(error)})")

    def report(self) -> PreflightReport:
        """Return what was found, of all processes."""
        findings = sorted(self._findings_of_all(), key=lambda finding: _ORDER.index(finding.severity))
        return PreflightReport(
            findings=tuple(findings),
            unchecked=tuple(self.unchecked),
            checked=tuple(self.checked),
            measured=tuple(self.measured),
            seconds=round(time.monotonic() - self._began, 3),
        )

    def _findings_of_all(self) -> list[Finding]:
        """Return the findings of all processes; one that not all have says whose it is."""
        of_ranks = gather_objects(self.findings)
        found: dict[Finding, list[int]] = {}
        for rank, findings in enumerate(of_ranks):
            for finding in findings:
                found.setdefault(finding, []).append(rank)
        return [_of_ranks(finding, ranks, len(of_ranks)) for finding, ranks in found.items()]


def _of_ranks(finding: Finding, ranks: list[int], world_size: int) -> Finding:
    if len(set(ranks)) == world_size:
        return finding
    told = ", ".join(map(str, sorted(set(ranks))))
    return Finding(
        severity=finding.severity,
        check=finding.check,
        problem=f"rank {told}: {finding.problem}",
        way_out=finding.way_out,
    )
