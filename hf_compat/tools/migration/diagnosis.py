"""Paths → what comes of each script as it stands, gravest first. The rules are migrate's; nothing is written or run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_compat.tools.migration.migrate import migrate
from hf_compat.tools.migration.report import Effect, FileChange, Finding, Passed, Target
from hf_compat.tools.migration.resolving import looked_up_in


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptDiagnosis:
    """What comes of one file.

    Args:
        path: As it was named, or found in a folder that was.
        findings: Gravest first, then by line.
        mendable: How many of them `migrate` rewrites.
    """

    path: str
    findings: tuple[Finding, ...]
    mendable: int

    @property
    def verdict(self) -> str:
        """The gravest effect, or `fine`."""
        return self.findings[0].effect.value if self.findings else "fine"

    @property
    def gravity(self) -> int:
        """Place from the gravest."""
        return self.findings[0].effect.gravity if self.findings else len(Effect)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All scripts of one command, gravest first.

    Args:
        target: What they are to run under.
        release: Of the transformers in which names were looked up; empty where there is none of that generation.
        scripts: Every file that was read.
        skipped: Paths in folders that were left out on purpose.
        errors: Paths that could not be read or understood.
    """

    target: Target
    release: str
    scripts: tuple[ScriptDiagnosis, ...]
    skipped: tuple[Passed, ...]
    errors: tuple[Passed, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing differs silently, and nothing fails."""
        return all(one.effect is Effect.LOOK for script in self.scripts for one in script.findings)


def diagnose(paths: Sequence[str], target: Target = Target.HF_COMPAT) -> Diagnosis:
    """Read files, and the sources in folders, and say what comes of each as it stands.

    Args:
        paths: Files and folders.
        target: `HF_COMPAT` is `hf-compat run` beside the installed transformers, `TRANSFORMERS_5` transformers alone.
    """
    result = migrate(paths, target)
    names = looked_up_in(target)
    return Diagnosis(
        target=target,
        release="" if names is None else names.version,
        scripts=tuple(sorted(map(_diagnosed, result.files), key=lambda one: one.gravity)),
        skipped=result.skipped,
        errors=result.errors,
    )


def _diagnosed(file: FileChange) -> ScriptDiagnosis:
    told = sorted({*file.findings, *file.mended}, key=lambda one: (one.effect.gravity, one.cell or 0, one.line))
    return ScriptDiagnosis(path=file.path, findings=tuple(told), mendable=len(file.mended))
