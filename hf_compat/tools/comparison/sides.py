"""The two sides of a comparison: which interpreter, which engine, which release."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from hf_compat.errors import ArgumentError

# Asked of an interpreter: what it is, without importing transformers.
_QUESTION = (
    "import importlib.metadata as m, json\n"
    "def of(n):\n"
    "    try: return m.version(n)\n"
    "    except m.PackageNotFoundError: return ''\n"
    "print(json.dumps([of('transformers'), of('torch')]))"
)
_SECONDS = 60  # for an answer; a first start on a slow disk takes some


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two that run the script.

    Args:
        name: In tables and folders: `transformers` or `hf_compat`.
        python: The interpreter.
        transformers: The release of transformers that is installed there.
    """

    name: str
    python: str
    transformers: str

    @property
    def title(self) -> str:
        """What a table calls it."""
        return f"{self.name} {self.transformers}" if self.name == "transformers" else self.name


def own_side() -> Side:
    """Return the side that is this package, in this interpreter."""
    return Side(name="hf_compat", python=sys.executable, transformers=_installed())


def other_side(against: str | None) -> Side:
    """Return the side that is transformers.

    Args:
        against: `PYTHON`, or `RELEASE:PYTHON`, an interpreter that has transformers; None is this one.

    Raises:
        ArgumentError: It is no interpreter, has no transformers, or another release than was said.
    """
    if against is None:
        return Side(name="transformers", python=sys.executable, transformers=_installed())
    release, python = _split(against)
    found = _asked(python, against)
    if release and not f"{found}.".startswith(f"{release}."):
        raise ArgumentError(
            f"`--against {against}`: {python} has transformers {found}, not {release}.\n\n"
            "Hint: leave the release out to take what is there."
        )
    return Side(name="transformers", python=python, transformers=found)


def _installed() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ArgumentError(
            "transformers is not installed in this interpreter, and a comparison needs it.\n\n"
            "Hint: pip install 'hf-compat[transformers]'"
        ) from None


def _split(against: str) -> tuple[str, str]:
    """Return the release and the interpreter's path of `RELEASE:PYTHON`."""
    head, colon, rest = against.partition(":")
    is_release = bool(colon) and head.replace(".", "").isdigit()
    release, named = (head, rest) if is_release else ("", against)
    found = shutil.which(named) or shutil.which(os.path.expanduser(named))
    if found is None:
        raise ArgumentError(
            f"`--against {against}`: there is no interpreter {named!r}.\n\n"
            "Hint: the path of a Python that has transformers, `--against 4.57:old/bin/python` say."
        )
    return release, os.path.abspath(found)


def _asked(python: str, against: str) -> str:
    """Return the release of transformers that an interpreter has.

    Raises:
        ArgumentError: It does not answer as a Python does, or has none.
    """
    try:
        done = subprocess.run(
            [python, "-c", _QUESTION], capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
        release, torch = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ArgumentError(
            f"`--against {against}`: {python} does not answer as a Python interpreter does.\n\n"
            "Hint: give the path of the interpreter itself, `env/bin/python`."
        ) from error
    if not (release and torch):
        lacking = "transformers" if not release else "torch"
        raise ArgumentError(
            f"`--against {against}`: {python} has no {lacking}.\n\nHint: {python} -m pip install {lacking}"
        )
    return str(release)
