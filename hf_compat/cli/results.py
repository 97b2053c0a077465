"""Files that a command writes beside a run's own: what is there already is kept, and the new file gets a number."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping

from hf_compat.checkpoint.files import STATE_FILE_BYTES, first_line, read_json, short
from hf_compat.errors import CheckpointError, OutputFolderError

logger = logging.getLogger(__name__)

_TIMED = ("_runtime", "_per_second", "_preparation_time")  # differ each time
_ALL = "all_results.json"

IsSame = Callable[[bytes], bool]  # whether the bytes of a file say what is to be written


def keep(folder: str, name: str, content: bytes, is_same: IsSame | None = None) -> str:
    """Write a file unless one there says the same; a file that says something else stays, and the name gets a number.

    Args:
        folder: Made where it is missing.
        name: `config.yaml`, say; then `config-2.yaml` …
        content: What to write.
        is_same: Compares; bytes for bytes where it is not given.

    Returns:
        The path of the file that holds it.

    Raises:
        OutputFolderError: It cannot be written.
    """
    stem, suffix = os.path.splitext(name)
    number, path = 1, os.path.join(folder, name)
    try:
        os.makedirs(folder, exist_ok=True)
        while os.path.lexists(path):
            if _says(path, is_same or content.__eq__):
                return path
            number += 1
            path = os.path.join(folder, f"{stem}-{number}{suffix}")
        with open(path, "xb") as file:
            file.write(content)
    except OSError as error:
        raise OutputFolderError(
            f"{path} cannot be written: {error.strerror}.\n\nHint: choose another `--output_dir`."
        ) from error
    return path


def _says(path: str, is_same: IsSame) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return is_same(file.read())


def keep_metrics(folder: str, split: str, metrics: Mapping[str, object]) -> str:
    """Write metrics to `{split}_results.json`; the first ones of a split go to `all_results.json`, too.

    What a run has written there stays: other metrics go to `{split}_results-2.json`. Times do not count.

    Args:
        folder: The output folder.
        split: `eval`, `test` or `predict`.
        metrics: Names and numbers.

    Returns:
        The path of the file.
    """
    text, name = _as_text(metrics), f"{split}_results.json"
    is_first = not os.path.lexists(os.path.join(folder, name))
    path = keep(folder, name, text, lambda other: _untimed(other) == _untimed(text))
    if is_first:
        _add_to_all(os.path.join(folder, _ALL), metrics)
    return path


def _as_text(metrics: Mapping[str, object]) -> bytes:
    return json.dumps(dict(metrics), indent=4, sort_keys=True).encode()


def _untimed(text: bytes) -> str | None:
    """Return metrics in one form, without times; None for what is no metrics."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict):
        return None
    return json.dumps({name: value for name, value in read.items() if not name.endswith(_TIMED)}, sort_keys=True)


def _add_to_all(path: str, metrics: Mapping[str, object]) -> None:
    """Add metrics to those of a run; what stands there stays."""
    before: object = {}
    try:
        before = read_json(path, STATE_FILE_BYTES) if os.path.lexists(path) else {}
    except CheckpointError as error:
        before = first_line(error)
    if not isinstance(before, dict):
        logger.warning("%s is left as it is: it holds no metrics (%s).", path, short(before))
        return
    partial = f"{path}.{os.getpid()}.partial"
    with open(partial, "wb") as file:
        file.write(_as_text({**metrics, **before}))
    os.replace(partial, path)
