"""Files of arguments, JSON or YAML: bounded before anything is built of them. Files and plain values only."""

from __future__ import annotations

import os

import yaml

from hf_compat.checkpoint.files import first_line, read_json, read_text, short
from hf_compat.cli.configuration import MOST_BYTES, check_bounds
from hf_compat.errors import ArgumentError, CheckpointError

Named = dict[str, object]


class MissingFile(ArgumentError, FileNotFoundError):
    """There is no such file of arguments."""


def read_json_arguments(path: str | os.PathLike[str]) -> Named:
    """Read names and values from a JSON file of at most 4 MiB.

    Raises:
        ArgumentError: It cannot be read, is no JSON, or holds something else.
    """
    _check_is_there(path)
    try:
        return _named(path, read_json(path, MOST_BYTES))
    except CheckpointError as error:
        raise ArgumentError(first_line(error)) from error


def read_yaml_arguments(path: str | os.PathLike[str]) -> Named:
    """Read names and values from a YAML file, with the bounds of `hf-compat fit --config`.

    Raises:
        ArgumentError: It cannot be read, is no YAML, passes a bound, or holds something else.
    """
    _check_is_there(path)
    try:
        text = read_text(path, MOST_BYTES)
        check_bounds(text)
        return _named(path, yaml.safe_load(text))
    except CheckpointError as error:
        raise ArgumentError(first_line(error)) from error
    except yaml.MarkedYAMLError as error:  # its text may quote the file, a token in it say
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ArgumentError(f"{os.fspath(path)} is no valid YAML: {error.problem or error.context}{where}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ArgumentError(f"{os.fspath(path)} cannot be read: {first_line(error)}.") from None


def _check_is_there(path: str | os.PathLike[str]) -> None:
    if "\0" not in os.fspath(path) and not os.path.lexists(path):
        raise MissingFile(f"{os.fspath(path)!r} cannot be read: there is no such file.")


def _named(path: str | os.PathLike[str], content: object) -> Named:
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ArgumentError(f"{os.fspath(path)} holds {short(content)}, not names of arguments and their values.")
    return content
