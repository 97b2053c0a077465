"""Which rank has let the others down: each leaves a word of its error in the store through which they met.

A rank that waits for another in vain gets an error of Gloo or NCCL, about a socket or a timeout. Here it becomes one
that names the rank, and the reason where that rank could still give one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator

from torch import distributed
from torch.distributed.distributed_c10d import Store, _get_default_store

from hf_compat.errors import ProcessError
from hf_compat.runtime.collectives import is_distributed

# Ranks give up waiting at moments that lie apart, and the store may be gone with the rank that held it.
PATIENCE_SECONDS = 5.0
_SECONDS_BETWEEN = 0.05
# What Gloo and NCCL say when a rank is gone, and when it does not answer.
_GONE = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "remote process exited",
    "pair closure",
)
_SILENT = ("Timed out", "timeout", "Timeout", "pair closure")
_BACKENDS = ("gloo", "NCCL", "ProcessGroup", "Socket", "pair closure")
_FAILED_AFTER_ANOTHER = "-"
# Where a rank leaves its error of a constructor, which need not be called on every rank.
_CONSTRUCTOR = "constructor"

_calls = itertools.count()


@contextlib.contextmanager
def naming_absent_ranks() -> Iterator[None]:
    """Turn the failure of an exchange within this context into an error that names the rank that was missing.

    Every process enters it as often as the others. A process that has an error of its own tells the others.

    Raises:
        ProcessError: Another process has failed, has gone, or does not answer; the message says which, and why if that
            is known.
    """
    if not is_distributed():
        yield
        return
    board = _Board(next(_calls))
    try:
        yield
    except BaseException as error:
        if not is_failed_exchange(error):
            board.leave(f"{type(error).__name__}: {error}")
            raise
        board.leave(_FAILED_AFTER_ANOTHER)
        reasons = _reasons(board.read(), error)
        if not reasons:
            raise
        raise ProcessError("Another process of this run has failed.\n\n" + "\n".join(reasons)) from error


@contextlib.contextmanager
def telling_of_failure() -> Iterator[None]:
    """Tell the other ranks of an error within this context, where they wait for this rank later.

    No process waits here: one that calls a constructor may be the only one that does.
    """
    try:
        yield
    except BaseException as error:
        if is_distributed():
            _Board(_CONSTRUCTOR).leave(f"{type(error).__name__}: {error}")
        raise


def is_failed_exchange(error: BaseException) -> bool:
    """Return whether an error says that an exchange between processes did not come about."""
    if isinstance(error, distributed.DistError):
        return True
    text = str(error)
    speaks_of_it = any(word in text for word in (*_GONE, *_SILENT)) and any(word in text for word in _BACKENDS)
    return (isinstance(error, RuntimeError) and speaks_of_it) or (
        error.__cause__ is not None and is_failed_exchange(error.__cause__)
    )


def _reasons(words: dict[int, str | None], error: BaseException) -> list[str]:
    """Return a line for each rank that did not merely fail after another."""
    text = str(error)
    # Gloo closes a connection itself when nobody answers: "Application timeout caused pair closure"
    gone = any(word in text for word in _GONE) and "imeout" not in text
    silence = (
        "has gone without an error: it was killed, or left by itself"
        if gone
        else "does not answer: it hangs, is stopped, or does something else than the others; `ddp_timeout` has passed"
    )
    return [
        f"rank {rank}: {silence if word is None else word}"
        for rank, word in words.items()
        if word != _FAILED_AFTER_ANOTHER
    ]


class _Board:
    """What the ranks leave for each other during one call.

    Args:
        call: Which call of this process it is; or `_CONSTRUCTOR`, for what went wrong outside of all calls.
    """

    def __init__(self, call: int | str) -> None:
        self._call = call

    def _key(self, rank: int) -> str:
        return f"hf_compat/ended/{self._call}/{rank}"

    def leave(self, word: str) -> None:
        """Tell the others; nothing happens where they cannot be told."""
        key = self._key(distributed.get_rank())
        _in_time(lambda store: store.set(key, word))

    def read(self) -> dict[int, str | None]:
        """Return the words of the other ranks; None for one that leaves none while this one waits."""
        own, size = distributed.get_rank(), distributed.get_world_size()
        words: dict[int, str | None] = {rank: None for rank in range(size) if rank != own}
        _in_time(lambda store: self._collect(store, words))
        return dict(words)

    def _collect(self, store: Store, words: dict[int, str | None]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while None in words.values() and time.monotonic() < until:
            self._look(store, words)
            time.sleep(_SECONDS_BETWEEN)
        _Board(_CONSTRUCTOR)._look(store, words)

    def _look(self, store: Store, words: dict[int, str | None]) -> None:
        """Fill in the words that are there by now."""
        for rank in [rank for rank, word in words.items() if word is None]:
            if store.check([self._key(rank)]):
                words[rank] = store.get(self._key(rank)).decode(errors="replace")


def _in_time(ask: Callable[[Store], object]) -> None:
    """Ask the store in a thread of its own: one whose process is stopped never answers."""
    store = _get_default_store()

    def quietly() -> None:
        # it is gone with the process that held it; who asks finds no answer, and says so
        with contextlib.suppress(RuntimeError):
            ask(store)

    thread = threading.Thread(target=quietly, name="hf_compat-store", daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS + 1.0)
