"""`trackers.json`: the tracker run of an output folder, so that a resumed training continues it.

The file is only advice. A damaged one costs a warning and a new tracker run, never the training. Its paths are ignored
if they lead outside the output folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, Unpack, cast

from hf_compat.checkpoint.files import first_line, read_json
from hf_compat.errors import CheckpointError

logger = logging.getLogger(__name__)

TRACKERS_NAME = "trackers.json"
_FILE_BYTES = 2**20  # a record takes about 100
_RUN_ID = re.compile(r"[^/\\#?%:\x00-\x1f\ud800-\udfff]{1,128}")  # the ids that wandb accepts


class RunRecord(TypedDict, total=False):
    """The record of a tracker's run.

    Attributes:
        logdir: Folder of a TensorBoard run.
        id: Id of a wandb run.
        step: Update of the last log.
        logs: Logs of that update.
    """

    logdir: str
    id: str
    step: int
    logs: int


def _is_path(value: object) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def _is_run_id(value: object) -> bool:
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 2**63


_FIELDS: dict[str, Callable[[object], bool]] = {
    "logdir": _is_path,
    "id": _is_run_id,
    "step": _is_count,
    "logs": _is_count,
}


class RunMemory:
    """The tracker run that an output folder belongs to.

    Args:
        folder: The output folder.
        tracker: Name of the tracker.
    """

    def __init__(self, folder: str, tracker: str) -> None:
        self.folder = folder
        self.path = os.path.join(folder, TRACKERS_NAME)
        self.tracker = tracker
        self._warned: set[str] = set()

    def read(self) -> RunRecord:
        """Return the run's record, without invalid fields. A warning names these."""
        return cast(RunRecord, self._record(self._records().get(self.tracker, {})))

    def logdir(self) -> str | None:
        """Return the run's folder, created if missing. None, with a warning, for one outside the output folder.

        The output folder may have another author. Only arguments and variables may name folders outside it.
        """
        named = self.read().get("logdir")
        if named is None:
            return None
        path = os.path.expanduser(named)
        if not _is_below(path, self.folder):
            self._warn_once(f"`logdir` of {self.path} is {named[:200]!r}, outside {self.folder}, and is ignored.")
            return None
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            self._warn_once(f"`logdir` of {self.path} is {named[:200]!r}, which cannot be used: {error.strerror}.")
            return None
        return path

    def write(self, **values: Unpack[RunRecord]) -> None:
        """Add to the record. A kill leaves the old record. A file that cannot be written costs a warning."""
        known = self._records()
        known[self.tracker] = {**self._record(known.get(self.tracker, {})), **values}
        partial = f"{self.path}.tmp"
        try:
            os.makedirs(self.folder or ".", exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            with open(partial, "x", encoding="utf-8") as file:  # never follow an existing link
                json.dump(known, file, indent=2)
            os.replace(partial, self.path)
        except OSError as error:
            self._warn_once(
                f"{self.path} cannot be written ({error.strerror}). A resumed training will start new runs."
            )

    def _records(self) -> dict[str, object]:
        """Return the records of all trackers, unchecked."""
        if not os.path.lexists(self.path):
            return {}
        try:
            known = read_json(self.path, _FILE_BYTES)
        except CheckpointError as error:
            self._warn_once(f"{first_line(error)} Trackers start new runs.")
            return {}
        if not isinstance(known, dict):
            self._warn_once(f"{self.path} holds no records of trackers, so they start new runs.")
            return {}
        return known

    def _record(self, values: object) -> dict[str, object]:
        """Return a record's valid and unknown fields."""
        if not isinstance(values, dict):
            self._warn_once(f"`{self.tracker}` in {self.path} holds no fields, so the tracker starts a new run.")
            return {}
        wrong = [name for name, fits in _FIELDS.items() if name in values and not fits(values[name])]
        for name in wrong:
            self._warn_once(f"`{name}` of `{self.tracker}` in {self.path} is not valid and is left out.")
        return {name: value for name, value in values.items() if name not in wrong}

    def _warn_once(self, message: str) -> None:
        """Warn once, as a run writes its record at every log."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


def _is_below(path: str, folder: str) -> bool:
    """Whether a path, with links followed, lies in a folder."""
    try:
        return Path(path).resolve().is_relative_to(Path(folder).resolve())
    except (OSError, RuntimeError, ValueError):  # RuntimeError: circular links
        return False
