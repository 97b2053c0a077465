"""HF's events at Lightning's hooks. `EVENTS` in `hf/callbacks.py` has a row for each event."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl

from hf_compat.hf.callbacks import EVENTS, Callback

if TYPE_CHECKING:
    from hf_compat.callbacks.bridge import HFBridge

# Lightning hook → the HF event that it fires.
PAIRS = {hook: event.name for event in EVENTS.values() for hook in event.hooks}
# The hooks' parameters after trainer and module.
PARAMETERS = {hook: tuple(inspect.signature(getattr(pl.Callback, hook)).parameters)[3:] for hook in PAIRS}

Given = Any  # a hook's batch, outputs or index

Kind = TypeVar("Kind", bound=type[pl.Callback])


def fires_at_hooks(kind: Kind) -> Kind:
    """Add the hooks in `PAIRS` that a class lacks. Each calls the class's `fire_at_hook` with its name first."""
    fire = kind.fire_at_hook  # type: ignore[attr-defined]  # each of the decorated classes has it
    for hook in PAIRS.keys() - vars(kind).keys():
        setattr(kind, hook, functools.partialmethod(fire, hook))
    return kind


@fires_at_hooks
class HFEvents(pl.Callback):
    """One segment of the HF callbacks, between two Lightning callbacks.

    Args:
        bridge: Fires the events.
        segment: Index of the segment. Lightning callbacks divide the HF callbacks into segments, starting with 0.
    """

    def __init__(self, bridge: HFBridge, segment: int) -> None:
        self.bridge = bridge
        self.segment = segment

    def fire_at_hook(self, hook: str, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Given) -> None:
        """Fire a hook's event for this segment. The first segment also prepares it."""
        named = dict(zip(PARAMETERS[hook], given, strict=False))
        if self.segment == 0 and hook in self.bridge.preparations:
            self.bridge.preparations[hook](self.bridge, named)
        if hook != "on_train_batch_end" or named["batch"].is_trained:
            self.bridge.fire(PAIRS[hook], self.segment)


def segments_of(order: list[pl.Callback | Callback], hf_callbacks: Iterable[Callback]) -> list[set[int]]:
    """The HF callbacks before, between and after the Lightning ones, as sets of `id`.

    Args:
        order: Callbacks of both kinds in the order in which they were added.
        hf_callbacks: The handler's callbacks. Those that were added to it directly come last.
    """
    segments: list[set[int]] = [set()]
    segment_of: dict[int, int] = {}
    for entry in order:
        if isinstance(entry, pl.Callback):
            segments.append(set())
        else:
            segment_of[id(entry)] = len(segments) - 1
    for callback in hf_callbacks:
        segments[segment_of.get(id(callback), len(segments) - 1)].add(id(callback))
    return segments
