"""The data-loading options that HF keeps in `accelerator_config`. HF words only."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Protocol

from hf_compat.errors import ArgumentError
from hf_compat.runtime.text import did_you_mean


class HasDict(Protocol):
    """An object of the same options, such as `transformers`' own."""

    def to_dict(self) -> dict[str, Any]:
        """Return the options."""


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
    def from_any(cls, value: dict[str, Any] | str | os.PathLike[str] | HasDict | None) -> AcceleratorConfig:
        """Build the options from None, a mapping, a JSON file's path or an object of the same attributes.

        Raises:
            ArgumentError: An unknown key, or a class where an object is wanted.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, type):
            raise ArgumentError(
                f"`accelerator_config={value!r}` is a class.\n\nHint: pass an object of it, or a dict of its options."
            )
        if isinstance(value, (str, os.PathLike)):
            with open(value, encoding="utf-8") as file:
                read: dict[str, Any] = json.load(file)
                value = read
        options = dict(value) if isinstance(value, dict) else dict(value.to_dict())
        _check_names(options, [field.name for field in fields(cls)])
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a plain dict."""
        return copy.deepcopy(self.__dict__)


def _check_names(options: Iterable[str], known: list[str]) -> None:
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known, f"the options are {', '.join(known)}.")
            raise ArgumentError(f"`accelerator_config` has no option {name!r}.\n\nHint: {hint}")
