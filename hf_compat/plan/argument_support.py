"""The check of a run's arguments against their rows: what is refused, and what changes nothing."""

from __future__ import annotations

import warnings
from dataclasses import MISSING, Field, fields
from typing import Any

from hf_compat.errors import InertArgumentWarning, UnsupportedArgument
from hf_compat.hf.argument_values import ALONE, ROWS, Row
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.arguments_rules import check_again
from hf_compat.plan.compilation import compilation_of
from hf_compat.runtime.text import shown

# Defaults that normalisation gives another form.
_NORMAL_FORMS = {
    "output_dir": "trainer_output",
    "report_to": [],
    "debug": [],
    "disable_tqdm": False,
    "activation_checkpointing": False,
    "gradient_checkpointing": False,
}


def default_of(field: Field[Any]) -> object:
    """Return a dataclass field's default, as it is after normalisation."""
    if field.default_factory is not MISSING:
        default: object = field.default_factory()
        return default
    # transformers 4.46 has no default of the folder
    return _NORMAL_FORMS.get(field.name, None if field.default is MISSING else field.default)


def check_supported(args: TrainingArguments) -> None:
    """Refuse what is not supported or contradictory, and warn about what changes nothing.

    Args:
        args: The arguments; fields that a subclass adds are not looked at.

    Raises:
        ArgumentError: Fields that were set after the constructor contradict each other.
        UnsupportedArgument: At least one field asks for something that is not here; all of them are listed.
    """
    check_again(args)
    refused: list[str] = []
    for field in fields(args):
        row, value = ROWS.get(field.name), getattr(args, field.name)
        if row is None or not _is_set(row, value, default_of(field)):
            continue
        told = f"`{shown(field.name, value)}`"
        if row.refuse is not None:
            refused.append(f"{told}: {row.refuse}.\n\nHint: {row.hint}.")
        elif row.inert is not None and (row.inert != ALONE or args.world_size == 1):
            warnings.warn(f"{told} has no effect: {row.inert}.", InertArgumentWarning, stacklevel=4)
    _warn_of_inert(args)
    if refused:
        raise UnsupportedArgument("\n\n".join(refused))
    compilation_of(args)  # it refuses backends and modes that torch does not know


def _warn_of_inert(args: TrainingArguments) -> None:
    """Warn about arguments whose effect depends on others."""
    if args.mixed_precision == "fp16" and args.device.type == "cpu":
        reason = "on the CPU it is float32 that is computed in, as in transformers; `bf16=True` is mixed there"
        warnings.warn(f"`fp16=True` has no effect: {reason}.", InertArgumentWarning, stacklevel=5)
    if args.liger_kernel_config and not args.use_liger_kernel:
        told = shown("liger_kernel_config", args.liger_kernel_config)
        warnings.warn(f"`{told}` has no effect: `use_liger_kernel` is off.", InertArgumentWarning, stacklevel=5)


def _is_set(row: Row, value: object, default: object) -> bool:
    if row.refuses is not None:
        return row.refuses(value)
    if default is None:  # the object of a parallelism_config may answer `!=` with anything
        return value is not None
    return bool(value != default)
