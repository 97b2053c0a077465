"""The arguments in a `training_args.bin` of transformers, of any release: read without running what is in it.

transformers pickles its own object. Each class and function that the pickle names becomes a `_Named` here, which
remembers what the pickle has given it; none is imported, so that transformers need not be there.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum

from hf_compat.checkpoint.files import SMALL_FILE_BYTES, first_line, pinned
from hf_compat.errors import CheckpointError, HfCompatWarning
from hf_compat.hf import enums
from hf_compat.hf.arguments import TrainingArguments

# What every release's arguments have.
_ALWAYS = frozenset({"output_dir", "learning_rate", "seed", "weight_decay"})
# Objects among the arguments whose attributes are options.
_OPTIONS = ("AcceleratorConfig",)
# Enums whose members are texts: those of today, and those that are gone.
_ENUMS = frozenset({*vars(enums), "EvaluationStrategy", "FSDPOption"})
# torch before 1.6 writes three pickles before that of the object.
_OLD_MAGIC = 0x1950A86A20F9469CFC6C


class _Named:
    """What stands for an object: the name of its class, and what the pickle has given it.

    Args:
        given: What the pickle calls the class with.
    """

    name = ""

    def __new__(cls, *given: object, **keywords: object) -> _Named:
        made = object.__new__(cls)
        made.given = given
        made.state = {}
        return made

    def __init__(self, *given: object, **keywords: object) -> None:
        self.given: tuple[object, ...]
        self.state: object

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Reads a pickle without importing anything that it names."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name, (_Named,), {"name": name})

    def persistent_load(self, pid: object) -> _Named:
        return _Named(pid)


def read_pickled_arguments(path: str) -> dict[str, object] | None:
    """Read the arguments that transformers has pickled, as fields of today's.

    Args:
        path: A `training_args.bin`.

    Returns:
        The fields of today by name, old names among them translated; None where the file holds something else.

    Raises:
        CheckpointError: It is damaged.

    Warns:
        HfCompatWarning: A field holds an object of a kind that is not known here.
    """
    try:
        with pinned(path) as opened:
            held = _unpickled(opened)
    except CheckpointError:
        raise
    except Exception as error:  # a pickle raises what it likes; the file is the fact
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    state = held.state if isinstance(held, _Named) else None
    if not isinstance(state, Mapping) or not state.keys() >= _ALWAYS:
        return None
    # Today's fields of a release's attributes; what cannot be known without running it has its default
    known = {name: _plain(held) for name, held in state.items()}
    args = TrainingArguments.__new__(TrainingArguments)
    args.__setstate__({name: value for name, value in known.items() if not isinstance(value, _Named)})
    today = {field.name: vars(args).get(field.name, field.default) for field in fields(args)}
    unknown = [name for name in today if isinstance(known.get(name), _Named)]
    if unknown:
        warnings.warn(
            f"{path} holds objects for {', '.join(unknown)}, which cannot be read without running code; they have "
            "their defaults.\n\nHint: give `args=…`.",
            HfCompatWarning,
            stacklevel=2,
        )
    return today


def _unpickled(path: str) -> object:
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            if _Reader(file).load() != _OLD_MAGIC:
                raise pickle.UnpicklingError("it is no file of torch")
            for _ in ("protocol", "machine"):
                _Reader(file).load()
            return _Reader(file).load()
    with zipfile.ZipFile(path) as archive:
        pickles = [one for one in archive.infolist() if one.filename.endswith("data.pkl")]
        if not pickles or pickles[0].file_size > SMALL_FILE_BYTES:
            raise pickle.UnpicklingError("it holds no pickle of a usual size")
        with archive.open(pickles[0]) as file:
            return _Reader(file).load()


def _plain(value: object) -> object:
    """Return values without the stand-ins: an enum's member as its text, options as a dict."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if not isinstance(value, _Named):
        return value
    if value.name in _OPTIONS and isinstance(value.state, Mapping):
        return _plain(value.state)
    return _member(value)


def _member(value: _Named) -> object:
    """Return the text of an enum's member: Python writes the class with the text, or `getattr` with class and name."""
    match value.given:
        case (str() as text,) if value.name in _ENUMS:
            return text
        case (type() as kind, str() as name) if issubclass(kind, _Named) and kind.name in _ENUMS:
            found = getattr(getattr(enums, kind.name, None), name, name.lower())
            return found.value if isinstance(found, Enum) else found
    return value
