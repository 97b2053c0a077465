"""Warnings of Lightning that follow from how an `HFModule` works, and are hidden while it does."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

from hf_compat.engine.quiet import EXPECTED

OF_STEP = ".*You defined a `validation_step` but have no `val_dataloader`.*"  # every HFModule has HFModule's
OF_HFS_UPDATES = [message for message in EXPECTED if "sync_dist" not in message]  # a subclass's own logs may need it
_hidden: list[tuple[object, ...]] = []  # the filters that hide them


def hide_expected(messages: Iterable[str]) -> None:
    """Hide expected warnings until `show_expected`."""
    for message in messages:
        entry = ("ignore", re.compile(message, re.IGNORECASE), Warning, None, 0)
        if entry not in warnings.filters:
            warnings.filterwarnings("ignore", message)
            _hidden.append(entry)


def show_expected() -> None:
    """Show the expected warnings again, unless the user hides them. Other modules of this process may need them."""
    warnings.filters[:] = [  # type: ignore[index]  # a list, which typeshed declares to be read only
        entry for entry in warnings.filters if entry not in _hidden
    ]
    _hidden.clear()
