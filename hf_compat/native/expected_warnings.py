"""Warnings of Lightning that do not apply to an `HFModule`: left out while a trainer works with one."""

from __future__ import annotations

import warnings

from hf_compat.engine.window_trainer import EXPECTED

_EXPECTED = frozenset(
    {
        *(message for message in EXPECTED if "sync_dist" not in message),  # of a subclass's own logs it holds
        # every HFModule has a `validation_step`
        ".*You defined a `validation_step` but have no `val_dataloader`.*",
    }
)


def leave_out_expected() -> None:
    """Leave the warnings out from now on."""
    for message in _EXPECTED:
        warnings.filterwarnings("ignore", message)


def show_expected() -> None:
    """Show the warnings again: other modules of this process may need them."""
    warnings.filters[:] = [  # type: ignore[index]  # a list, which typeshed declares to be read only
        entry for entry in warnings.filters if getattr(entry[1], "pattern", None) not in _EXPECTED
    ]
