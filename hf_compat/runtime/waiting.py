"""Say what a process waits for, where it waits long: another machine that does not come, a host without an address."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

PATIENCE_SECONDS = 20.0

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def saying_what_is_awaited(text: str, address: str = "", until: Callable[[], bool] = bool) -> Iterator[None]:
    """Warn once, where this context lasts longer than `PATIENCE_SECONDS`.

    Args:
        text: What is waited for.
        address: The host that is asked; said too where it has none.
        until: Whether it has come meanwhile, though the context lasts.
    """

    def say() -> None:
        if not until():
            logger.warning("%s%s.", text, _unknown_host(address) if address else "")

    timer = threading.Timer(PATIENCE_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def has_children() -> bool:
    """Return whether this process has started others; Linux only, True elsewhere."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    return not lists or any(file.read_text().strip() for file in lists)


def _unknown_host(address: str) -> str:
    """Return words that say that a host has no address now; empty where it has one."""
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        return f"; the host name {address!r} has no address here ({error.strerror or error})"
    return ""
