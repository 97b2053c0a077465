"""Windows: the micro-batches of one update, which are one batch to Lightning. Lightning words only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_compat.data.loader import PreparedDataLoader, Resume, skip_first_batches
from hf_compat.data.samplers import SkipFirstBatches
from hf_compat.errors import DataError
from hf_compat.runtime.nested import Nested, as_plain_type, map_nested
from hf_compat.runtime.rng import read_rng, write_rng


class Window:
    """The micro-batches of one update.

    Args:
        micro_batches: What the loader gave, at most as many as an update takes.
        num_items: Items (tokens, mostly) in them, by which the loss is divided; None where it is not.
        is_complete: Whether an update follows. Data without a length may end in the middle of a window: its gradients
            stay for the next epoch's first window, as in HF.
        epoch_progress: Share of the epoch that is done after this window.
    """

    __slots__ = ("epoch_progress", "is_complete", "micro_batches", "num_items")

    def __init__(self, micro_batches: list[Any], num_items: Any, is_complete: bool, epoch_progress: float) -> None:
        self.micro_batches = micro_batches
        self.num_items = num_items
        self.is_complete = is_complete
        self.epoch_progress = epoch_progress

    def __len__(self) -> int:
        return len(self.micro_batches)


class Windows:
    """An epoch's windows, again and again: what Lightning's fit loop iterates over.

    Stateful in Lightning's sense: `state_dict` says where the data stands, random states included, so that a run that
    is resumed from it reads and draws what the uninterrupted one would have.

    Args:
        loader: The training loader.
        read_window: Reads up to so many micro-batches and counts their items (`get_batch_samples`).
        window_size: Micro-batches of an update.
        windows_per_epoch: Updates of an epoch.
        micro_batches_per_epoch: Micro-batches of an epoch.
        device: Where counts go.
        first_epoch: Epoch that comes first.
        skip_micro_batches: Micro-batches of the first epoch that are trained already.
        after_skip: Called once the first window after a skip is read, or before an epoch that starts at its beginning;
            random states are restored there, as HF does for folders that say no more.
    """

    def __init__(
        self,
        loader: Any,
        *,
        read_window: Callable[[Iterator[Any], int, torch.device], tuple[list[Any], Any]],
        window_size: int,
        windows_per_epoch: int,
        micro_batches_per_epoch: int,
        device: torch.device,
        first_epoch: int = 0,
        skip_micro_batches: int = 0,
        after_skip: Callable[[], None] | None = None,
    ) -> None:
        self.loader = loader
        self.read_window = read_window
        self.window_size = window_size
        self.windows_per_epoch = windows_per_epoch
        self.micro_batches_per_epoch = micro_batches_per_epoch
        self.device = device
        self.next_epoch = first_epoch
        self.skip_micro_batches = skip_micro_batches
        self.after_skip = after_skip
        self.saw_data = False
        self._resume: dict[str, Any] | None = None
        self._epoch = first_epoch
        self._done = 0
        self._closed = False
        self._epoch_rng: dict[str, Any] | None = None

    def __len__(self) -> int:
        return self.windows_per_epoch

    def close_epoch(self) -> None:
        """End the epoch before its next window."""
        self._closed = True

    def finish_epoch(self) -> None:
        """Say that the epoch is over: a state that is taken from now on begins with the next one."""
        self._epoch_rng = None

    def state_dict(self, closing: bool = False) -> dict[str, Any]:
        """Return where the data stands, in plain values.

        Args:
            closing: The epoch is about to be left: what is left of it is not part of the run.
        """
        cut = {
            "micro_batch_size": getattr(self.loader, "batch_size", None),
            "window_size": self.window_size,
            "micro_batches_per_epoch": self.micro_batches_per_epoch,
        }
        if self._epoch_rng is None:
            return {**cut, "epoch": self.next_epoch, "is_open": False, "rng": read_rng()}
        prepared = isinstance(self.loader, PreparedDataLoader)
        source = self.loader.source_state() if prepared else _state_of(self.loader)
        lookahead = as_plain(self.loader.lookahead) if prepared else None
        return {
            **cut,
            "epoch": self._epoch,
            "is_open": True,
            "is_closed": closing or self._closed or (prepared and self.loader.end_of_dataloader),
            "micro_batches_done": self._done,
            "lookahead": lookahead,
            "source": as_plain(source),
            "epoch_rng": self._epoch_rng,
            "rng": read_rng(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin where a state says, not where the arguments did."""
        self._resume = state_dict if "is_open" in state_dict else None
        self.skip_micro_batches, self.after_skip = 0, None
        rng = state_dict.get("rng")
        if self._resume is None:  # of transformers, which says no more than the update
            self.skip_micro_batches = int(state_dict["updates_done"]) * self.window_size
            self.after_skip = None if rng is None else lambda: write_rng(rng)
        self.next_epoch = int(state_dict["epoch"])

    def __iter__(self) -> Iterator[Window]:
        # A generator, so that nothing is read, and no random number drawn, before Lightning asks for the first window.
        self._closed = False
        self._epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        state, self._resume = self._resume, None
        if state is not None:
            yield from self._resumed_epoch(state)
        else:
            skip, self.skip_micro_batches = self.skip_micro_batches, 0
            restore, self.after_skip = self.after_skip, None
            yield from self._new_epoch(skip, restore)

    def _new_epoch(self, skip: int, restore: Callable[[], None] | None) -> Iterator[Window]:
        loader = skip_first_batches(self.loader, skip) if skip else self.loader
        if restore is not None and not skip:
            restore()
            restore = None
        self._epoch_rng = read_rng()
        micro_batches = self._begin(loader)
        yield from self._windows(micro_batches, skip, restore)

    def _resumed_epoch(self, state: dict[str, Any]) -> Iterator[Window]:
        if not state["is_open"]:
            yield from self._new_epoch(0, lambda: write_rng(state["rng"]))
            return
        self._epoch_rng, done = state["epoch_rng"], int(state["micro_batches_done"])
        self._done, self.saw_data = done, True
        if state["is_closed"] or done >= self.micro_batches_per_epoch:
            write_rng(state["rng"])
            self._closed = True
            return
        # the order of the epoch is drawn again from the states that it was drawn from
        write_rng(state["epoch_rng"])
        loader = self._position(state, done)
        micro_batches = self._begin(loader)
        if not isinstance(loader, PreparedDataLoader):
            sampler = getattr(loader, "batch_sampler", None)
            if isinstance(sampler, SkipFirstBatches):
                sampler.prime()
            write_rng(state["rng"])
        yield from self._windows(micro_batches, done, None)

    def _position(self, state: dict[str, Any], done: int) -> Any:
        if isinstance(self.loader, PreparedDataLoader):
            self.loader.resume_at(
                Resume(
                    skip=done,
                    lookahead=state["lookahead"],
                    source=state["source"],
                    after_start=lambda: write_rng(state["rng"]),
                )
            )
            return self.loader
        if state["source"] is not None:
            self.loader.load_state_dict(state["source"])
            return self.loader
        return skip_first_batches(self.loader, done)

    def _begin(self, loader: Any) -> Iterator[Any]:
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._epoch)
        return iter(loader)

    def _windows(self, micro_batches: Iterator[Any], done: int, restore: Callable[[], None] | None) -> Iterator[Window]:
        self._done, began = done, done
        self.saw_data = done > 0
        made = False
        for update in range(done // self.window_size, self.windows_per_epoch):
            batches, num_items = self.read_window(micro_batches, self._size_of(update), self.device)
            if restore is not None:
                restore()
                restore = None
            self._forget_skip()
            if not batches:
                break
            self.saw_data = True
            self._done += len(batches)
            complete = self._done % self.window_size == 0 or self._done == self.micro_batches_per_epoch
            made |= complete
            yield Window(batches, num_items, complete, self._done / self.micro_batches_per_epoch)
            if self._closed:
                return
        if self.saw_data and not made and not began:
            raise DataError(
                f"An epoch of the training data gave {self._done} micro-batches, fewer than the "
                f"`gradient_accumulation_steps={self.window_size}` of one update, so no update would ever be made.\n\n"
                "Hint: accumulate fewer, use a smaller batch, or give the data set a length."
            )

    def _size_of(self, update: int) -> int:
        if update != self.windows_per_epoch - 1:
            return self.window_size
        return self.micro_batches_per_epoch % self.window_size or self.window_size

    def _forget_skip(self) -> None:
        if isinstance(self.loader, PreparedDataLoader):
            self.loader.skip_batches = 0


def _state_of(loader: Any) -> Any:
    """Return the state of a loader that knows its own position (torchdata's StatefulDataLoader)."""
    stateful = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
    return loader.state_dict() if stateful else None


def as_plain(data: Nested) -> Nested:
    """Return nested data as dicts, lists, numbers, strings and tensors; None where something else is in it."""
    try:
        return map_nested(_itself, data, on_other=_plain_leaf, rebuild=as_plain_type)
    except TypeError:
        return None


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _plain_leaf(leaf: Nested) -> bool | float | str | None:
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise TypeError(f"{type(leaf).__name__} is not kept in checkpoints")
