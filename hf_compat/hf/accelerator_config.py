"""The data-loading options that HF keeps in `accelerator_config`."""

from __future__ import annotations

import copy
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_compat.errors import ArgumentError, UnsupportedArgument
from hf_compat.hf.value_types import (
    LARGEST_COUNT,
    NONE,
    OPTIONS,
    PATH,
    TRUTH_VALUE,
    Range,
    Unreadable,
    ValueType,
    either,
    read_options,
    read_options_file,
    type_of,
    whole_number,
)
from hf_compat.runtime.text import shown

# Of `gradient_accumulation_kwargs`: the fields of Accelerate's `GradientAccumulationPlugin`.
_ACCUMULATION: dict[str, ValueType] = {
    "num_steps": either((NONE, whole_number(Range(low=1, high=LARGEST_COUNT)))),
    **dict.fromkeys(("adjust_scheduler", "sync_with_dataloader", "sync_each_batch"), TRUTH_VALUE),
}


@dataclass
class AcceleratorConfig:
    """Options of data loading across processes.

    Args:
        split_batches: The batch size given is the global one, split over the processes.
        dispatch_batches: The main process reads and sends the batches; None decides by the kind of data set.
        even_batches: Repeat first samples so that every process gets batches of one size.
        use_seedable_sampler: Shuffle with a generator of its own, seeded by seed + epoch.
        non_blocking: Copy to the device without waiting (useful with pinned memory).
        gradient_accumulation_kwargs: `num_steps` stands in for `gradient_accumulation_steps`.
        use_configured_state: Reuse an Accelerate state that the script has set up.

    Mirrors:
        `transformers.trainer_pt_utils.AcceleratorConfig`, 5.23.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    @classmethod
    def from_any(cls, value: object) -> AcceleratorConfig:
        """Build the options from None, a mapping, its JSON, a JSON file's path or an object with `to_dict()`.

        Raises:
            ArgumentError: An unknown option, or one with a wrong value.
            UnsupportedArgument: A class where an object is wanted (a `NotImplementedError`, as upstream).
        """
        if value is None:
            return cls()
        if isinstance(value, type):
            raise UnsupportedArgument(
                f"Tried passing in a callable to `accelerator_config`: {value!r} is a class.\n\n"
                "Hint: pass an object of it, or a dict of its options."
            )
        options = read_options("accelerator_config", _OPTION_TYPES, _options_of(value))
        accumulation = options.get("gradient_accumulation_kwargs")
        if isinstance(accumulation, dict):
            options["gradient_accumulation_kwargs"] = read_options(
                "accelerator_config['gradient_accumulation_kwargs']", _ACCUMULATION, accumulation
            )
        return value if isinstance(value, cls) and options == value.to_dict() else cls(**options)  # type: ignore[arg-type]

    @classmethod
    def from_json_file(cls, json_file: str) -> AcceleratorConfig:
        """Read the options from a JSON file.

        Raises:
            ArgumentError: The file cannot be read, or holds an unknown option or a wrong value.
        """
        return cls.from_any(json_file)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a plain dict."""
        return copy.deepcopy(self.__dict__)

    def pop(self, key: str, default: object = None) -> object:
        """Take an option out, as upstream's own arguments do."""
        return self.__dict__.pop(key, default)


_OPTION_TYPES = {name: type_of(hint) or OPTIONS for name, hint in typing.get_type_hints(AcceleratorConfig).items()}


def _options_of(value: object) -> dict[str, object]:
    """Return the options that a value holds.

    Raises:
        ArgumentError: It holds none.
    """
    to_dict = getattr(value, "to_dict", None)
    try:
        if callable(to_dict):
            value = to_dict()
        if isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip().startswith("{")):
            return typing.cast("dict[str, object]", OPTIONS.read(value))
        return read_options_file(str(PATH.read(value)))
    except Unreadable as error:
        hint = str(error) or "pass a dict of its options, its JSON, or the path of a JSON file."
        raise ArgumentError(f"`{shown('accelerator_config', value)}` cannot be read.\n\nHint: {hint}") from error
