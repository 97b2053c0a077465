"""What the lint, the look for misspelt names and the type check say of a mistake."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from house import test_names_in_strings as names
from mutation.places import PACKAGE, Change
from mutation.view import ROOT

TEXT = "E501"  # a longer line, which is no mistake
# More than any file of the package. mypy compares a file with its cache by the size, and then by the hash of the
# unchanged file, so each mistake gets a size of its own.
LARGER = 10**6


class StaticChecks:
    """The checks of text, a quarter of a second, and of types, some seconds with the unchanged package's results."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hfm-static-"))
        self.planted = 0
        self.names = "\n".join([*names.count_names(), names.names_of_upstream()])
        self._mypy(str(PACKAGE), check=True)

    def judge_text(self, change: Change) -> str:
        """Name the check of names, or the rule of ruff, that notices a mistake; empty if none does."""
        text = change.new.strip("\"'")
        is_name = change.kind == "constant" and names.IS_NAME.fullmatch(text)
        if is_name and any(name not in self.names for name in names.NAMES.findall(text)):
            return "tests/house/test_names_in_strings.py"
        source = change.planted((ROOT / change.file).read_text())
        ruff = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format", "concise", "--extend-ignore", TEXT]
        ruff += ["--stdin-filename", change.file, "-"]
        found = subprocess.run(ruff, cwd=ROOT, input=source, capture_output=True, text=True)
        if found.returncode == 1:
            return f"ruff: {found.stdout.splitlines()[0].partition(' ')[2]}"
        return ""

    def judge_types(self, change: Change) -> str:
        """Repeat what mypy says of a mistake; empty if it says nothing."""
        source = change.planted((ROOT / change.file).read_text())
        self.planted += 1
        planted = self.folder / "planted.py"
        planted.write_text(source.ljust(LARGER + self.planted, "\n"))
        said = self._mypy("--shadow-file", change.file, str(planted), change.file)
        return next(
            (f"mypy: {line.partition(': error: ')[2]}" for line in said.splitlines() if ": error: " in line), ""
        )

    def _mypy(self, *words: str, check: bool = False) -> str:
        command = [sys.executable, "-m", "mypy", "--cache-dir", str(self.folder / "cache"), *words]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if check and found.returncode != 0:
            raise RuntimeError(f"the package has faults without a mistake:\n{found.stdout}{found.stderr}")
        return found.stdout

    def close(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.folder, ignore_errors=True)
