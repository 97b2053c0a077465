"""The two paths of a conversion: looked at before anything is read, and nothing of the user's is overwritten. Files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from safetensors import SafetensorError

from hf_compat.checkpoint.files import first_line, short
from hf_compat.checkpoint.hidden_folders import CONVERTING, hidden_folder, remove_ended
from hf_compat.errors import ArgumentError, CheckpointWriteError, HfCompatError


def checked_paths(source: object, target: object) -> tuple[str, str]:
    """Return the paths of a conversion as text.

    Raises:
        ArgumentError: One is no path, there is no source, or the target cannot be made where it is to be.
    """
    from_path, to_path = _as_path("source", source), _as_path("target", target)
    if not os.path.lexists(from_path):
        raise ArgumentError(f"There is nothing to convert: {from_path!r} does not exist.\n\nHint: name a checkpoint.")
    _check_target(to_path)
    inside = os.path.realpath(from_path)
    if os.path.isdir(from_path) and os.path.commonpath([inside, os.path.realpath(to_path)]) == inside:
        raise ArgumentError(
            f"The target {to_path} is inside the source {from_path}, which stays as it is.\n\n"
            "Hint: name a path beside it."
        )
    return from_path, to_path


def _as_path(name: str, given: object) -> str:
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise ArgumentError(f"`{name}` is {short(given)}, not a path.\n\nHint: name a file or a folder.")
    return path.rstrip(os.sep) or os.sep


def _check_target(target: str) -> None:
    try:
        os.lstat(target)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else first_line(error)
        raise ArgumentError(f"{ascii(target)[1:-1]} cannot be written: {cause}.\n\nHint: name another path.") from error
    else:
        raise ArgumentError(f"{target} exists and is not overwritten.\n\nHint: name a new path.")
    parent = os.path.dirname(os.path.abspath(target))
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        raise ArgumentError(f"{target} cannot be written: {parent} is no folder that you may write to.")


@contextlib.contextmanager
def writing(target: str) -> Iterator[str]:
    """Give a new folder beside the target to write in; it, or a file in it, is then `put` into the target's place.

    Raises:
        CheckpointWriteError: Something could not be written; the message names the target and the cause.
    """
    beside, name = os.path.split(os.path.abspath(target))
    try:
        os.makedirs(beside, exist_ok=True)
        remove_ended(beside, CONVERTING)
        with hidden_folder(beside, CONVERTING) as hidden:
            place = os.path.join(hidden, name)
            os.mkdir(place)
            yield place
    except HfCompatError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise CheckpointWriteError(
            f"{target} could not be written: {cause}.\n\nHint: make room, or name another path."
        ) from error


def put(written: str, target: str) -> None:
    """Give what was written its name.

    Raises:
        ArgumentError: Something has got this name meanwhile.
    """
    if os.path.lexists(target):
        raise ArgumentError(f"{target} exists by now and is not overwritten.\n\nHint: name a new path.")
    os.replace(written, target)
