"""Find out which isolation the system offers, and prepare commands for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from hf_compat.errors import ArgumentError
from hf_compat.tools.isolation import copies
from hf_compat.tools.isolation.plan import CHOSEN, NAMED, Plan

_ROOT = str(Path(__file__).resolve().parents[3])
_ENTER = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from hf_compat.tools.isolation.entering import main; main(sys.argv[2:])"
)
COPY_LIMIT_GIB = 2.0
_LEAST_FREE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """The isolation that the system offers for runs in one working folder."""

    how: str
    working_folder: str
    open_to: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    refused: str = ""
    copy_limit_bytes: int = int(COPY_LIMIT_GIB * 2**30)

    @property
    def told(self) -> str:
        """The covered and the uncovered changes, in one line."""
        opened = f"; as they are: {', '.join(self.open_to)}" if self.open_to else ""
        if self.how == "overlay":
            more = f" and {len(self.read_only) - NAMED} more" if len(self.read_only) > NAMED else ""
            closed = f"; read-only: {', '.join(self.read_only[:NAMED])}{more}" if self.read_only else ""
            return (
                "isolation: overlay: every file is there, and none of yours is changed; not covered: devices, services "
                f"and the network{closed}{opened}"
            )
        if copies.has_landlock():
            rest = (
                "elsewhere files are read-only (Landlock), but for caches and temporary files, which are real; not "
                "covered: modes, owners and times of files elsewhere, devices, services and the network"
            )
        else:
            rest = "not covered: whatever is written by a whole path, or through a link out of the folder"
        return f"isolation: a copy of {self.working_folder} (no overlay: {self.refused}); {rest}{opened}"

    def begin(self, folder: str, is_kept: bool, progress: copies.Progress) -> Plan:
        """Prepare a folder for one command, and make the plan that `command` takes.

        Args:
            folder: The folder for everything that the command leaves. It is made if it is missing.
            is_kept: As in `Plan`.
            progress: Called with lines about copies.

        Raises:
            ArgumentError: There is no room in the folder, or too much in the working folder that cannot be closed.
        """
        plan = Plan(
            folder=folder, working_folder=self.working_folder, open_to=self.open_to, how=self.how, is_kept=is_kept
        )
        if self.how == "copies" and self.working_folder == os.sep:
            raise ArgumentError(
                f"The system offers no overlay ({self.refused}), and {os.sep} is too much to copy.\n\n"
                "Hint: work in the script's folder."
            )
        try:
            for name in ("root", "real", "files"):
                os.makedirs(plan.in_folder(name), exist_ok=True)
            plan.write()
            linked = copies.make(plan, self.copy_limit_bytes, progress) if self.how == "copies" else []
            size = sum(os.path.getsize(path) for path in linked) / 2**30
        except OSError as error:
            raise ArgumentError(
                f"{folder} cannot take what a script writes: {error}\n\nHint: set TMPDIR to a disk with room."
            ) from error
        if not linked:
            return plan
        named = ", ".join(linked[-NAMED:])
        more = f"{len(linked)} files of {self.working_folder} ({size:.1f} GiB) are above --copy-limit: {named}"
        if not copies.has_landlock():
            raise ArgumentError(
                f"{more}\n\nHint: nothing here can keep a script from changing them; raise `--copy-limit GIB`, or work "
                "in a smaller folder."
            )
        progress(f"{more}; they are read-only")
        return plan


def shortage(folder: str) -> str:
    """A message about a full disk. Mostly empty."""
    free = shutil.disk_usage(folder).free
    if free > _LEAST_FREE_BYTES:
        return ""
    return f"the disk of {folder} is full, and what is written in isolation goes there: set TMPDIR to a larger one"


def command(plan: Plan, words: list[str]) -> list[str]:
    """The command that runs another one in isolation and ends as it does. Without words it only tries."""
    return [sys.executable, "-I", "-c", _ENTER, _ROOT, plan.in_folder("plan.json"), *words]


def offered(folder: str, allow_writes: tuple[str, ...] = (), copy_limit: float = COPY_LIMIT_GIB) -> Isolation:
    """Try which isolation the system offers for runs in the current folder.

    Args:
        folder: The folder of the runs. Files of the trial in it are removed.
        allow_writes: Folders that stay real. Missing ones are made.
        copy_limit: Bound in GiB on the copied files if there is no overlay.
    """
    for one in allow_writes:
        try:
            os.makedirs(one, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"`--allow-writes {one}` is not a folder, and cannot be made: {error}") from error
    found = Isolation(
        how="overlay",
        working_folder=os.path.realpath(os.getcwd()),
        open_to=tuple(os.path.realpath(one) for one in allow_writes),
        copy_limit_bytes=int(copy_limit * 2**30),
    )
    if os.environ.get(CHOSEN, "") == "copies":  # noqa: TID251 - runtime/ imports torch
        return replace(found, how="copies", refused=f"{CHOSEN}=copies")
    if not sys.platform.startswith("linux"):
        return replace(found, how="copies", refused=f"{sys.platform} has none")
    trial = os.path.join(folder, "trial")
    try:
        plan = found.begin(trial, False, lambda _: None)
        done = subprocess.run(command(plan, []), capture_output=True, text=True)
        if done.returncode == 0:
            told = json.loads(Path(plan.in_folder("entered.json")).read_text("utf-8"))
            return replace(found, read_only=tuple(told["read_only"]))
        why = Path(plan.in_folder("refused"))
        reason = why.read_text("utf-8") if why.exists() else done.stderr.strip()[-200:]
        return replace(found, how="copies", refused=reason)
    finally:
        Plan(folder=trial, working_folder="").remove()
