"""The arguments in a `training_args.bin` of transformers, of any release: read without running what is in it.

transformers pickles its own object. Each class and function that the pickle names becomes a `Named`, which remembers
what the pickle has given it; none is imported, so that transformers need not be there.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum

from hf_compat.checkpoint.files import read_small
from hf_compat.checkpoint.pickles import Named, walked_torch_file
from hf_compat.errors import HfCompatWarning
from hf_compat.hf import enums
from hf_compat.hf.arguments import TrainingArguments

# What every release's arguments have.
_ALWAYS = frozenset({"output_dir", "learning_rate", "seed", "weight_decay"})
# Objects among the arguments whose attributes are options.
_OPTIONS = ("AcceleratorConfig",)
# Enums whose members are texts: those of today, and those that are gone.
_ENUMS = frozenset({*vars(enums), "EvaluationStrategy", "FSDPOption"})


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
    held = walked_torch_file(path, io.BytesIO(read_small(path)))
    state = held.state if isinstance(held, Named) else None
    if not isinstance(state, Mapping) or not state.keys() >= _ALWAYS:
        return None
    # Today's fields of a release's attributes; what cannot be known without running it has its default
    known = {name: _plain(held) for name, held in state.items()}
    args = TrainingArguments.__new__(TrainingArguments)
    args.__setstate__({name: value for name, value in known.items() if not isinstance(value, Named)})
    today = {field.name: vars(args).get(field.name, field.default) for field in fields(args)}
    unknown = [name for name in today if isinstance(known.get(name), Named)]
    if unknown:
        warnings.warn(
            f"{path} holds objects for {', '.join(unknown)}, which cannot be read without running code; they have "
            "their defaults.\n\nHint: give `args=…`.",
            HfCompatWarning,
            stacklevel=2,
        )
    return today


def _plain(value: object) -> object:
    """Return values without the stand-ins: an enum's member as its text, options as a dict."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if not isinstance(value, Named):
        return value
    if value.name in _OPTIONS and isinstance(value.state, Mapping):
        return _plain(value.state)
    return _member(value)


def _member(value: Named) -> object:
    """Return the text of an enum's member: Python writes the class with the text, or `getattr` with class and name."""
    match tuple(value.given):
        case (str() as text,) if value.name in _ENUMS:
            return text
        case (type() as kind, str() as name) if issubclass(kind, Named) and kind.name in _ENUMS:
            found = getattr(getattr(enums, kind.name, None), name, name.lower())
            return found.value if isinstance(found, Enum) else found
    return value
