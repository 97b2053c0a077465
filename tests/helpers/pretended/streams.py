"""Streams and events of a pretended device: which work is known to come before which.

Work runs at once, so its results are right whatever the order. What the order would be on a device is kept as clocks:
each stream counts its work, and knows how much of the others' it has waited for.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from helpers.pretended.machine import Machine

_numbers = itertools.count(1)
Clock = dict["Stream", int]


@dataclass(frozen=True)
class Mark:
    """A piece of work: the stream that does it, and its number there."""

    stream: Stream
    number: int

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.number


class Stream:
    """A queue of work on a device.

    Args:
        machine: Of which device.
        index: The device's number.
        is_default: The one that is current at first.
    """

    def __init__(self, machine: Machine, index: int, is_default: bool = False) -> None:
        self.machine, self.device_index = machine, index
        self.device = machine.device(index)
        self.cuda_stream = self.stream_id = 0 if is_default else next(_numbers)
        self.number = 0
        self.seen: Clock = {}
        self._outer: list[Stream] = []

    def begin_work(self) -> Mark:
        """Queue a piece of work; the host's own waits come before it."""
        self.number += 1
        for stream, number in self.machine.finished.items():
            self.seen[stream] = max(self.seen.get(stream, 0), number)
        self.seen[self] = self.number
        return Mark(self, self.number)

    def _clock(self) -> Clock:
        return {**self.seen, self: self.number}

    def wait_stream(self, stream: Stream) -> None:
        self._wait_for(stream._clock())

    def wait_event(self, event: Event) -> None:
        self._wait_for(event.clock)

    def _wait_for(self, clock: Clock) -> None:
        for stream, number in clock.items():
            self.seen[stream] = max(self.seen.get(stream, 0), number)

    def record_event(self, event: Event | None = None) -> Event:
        recorded = event or Event(self.machine)
        recorded.record(self)
        return recorded

    def synchronize(self) -> None:
        self.machine.wait("stream")
        self.machine.finish(self._clock())

    def query(self) -> bool:
        """All work is done by the time that somebody asks."""
        self.machine.finish(self._clock())
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        self._outer.append(self.machine.current_stream(self.device_index))
        self.machine.set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.machine.set_stream(self._outer.pop())


class Event:
    """A point in a stream."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        at = stream or self.machine.current_stream()
        self.clock = {**at.seen, at: at.number}

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.machine.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.machine.wait("event")
        self.machine.finish(self.clock)

    def query(self) -> bool:
        self.machine.finish(self.clock)
        return True

    def elapsed_time(self, _: Event) -> float:
        return 1.0


@dataclass(eq=False)
class PendingCopy:
    """A copy that the host has not waited for.

    Args:
        mark: The work that makes it.
        host: The host's tensor: the target of a copy from the device, the source of one to it.
        content: What the target will hold, or what the source has to hold until then.
        is_to_host: From the device.
    """

    mark: Mark
    host: torch.Tensor
    content: torch.Tensor
    is_to_host: bool
