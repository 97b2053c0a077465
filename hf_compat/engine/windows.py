"""Windows: the micro-batches of one update, which are one batch to Lightning. Lightning words only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_compat.errors import DataError
from hf_compat.recipe.loader import PreparedDataLoader, skip_first_batches


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

    Args:
        loader: The training loader.
        read_window: Reads up to so many micro-batches and counts their items (`get_batch_samples`).
        window_size: Micro-batches of an update.
        windows_per_epoch: Updates of an epoch.
        micro_batches_per_epoch: Micro-batches of an epoch.
        device: Where counts go.
        first_epoch: Epoch that comes first.
        skip_micro_batches: Micro-batches of the first epoch that are trained already.
        after_skip: Called with True once the first window after a skip is read, with False before an epoch that
            starts at its beginning (random states are restored there).
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
        self.epoch = first_epoch
        self.skip_micro_batches = skip_micro_batches
        self.after_skip = after_skip
        self._closed = False
        self._updates_made = 0
        self.saw_data = False

    def __len__(self) -> int:
        return self.windows_per_epoch

    def close_epoch(self) -> None:
        """End the epoch before its next window."""
        self._closed = True

    def __iter__(self) -> Iterator[Window]:
        # A generator, so that nothing is read, and no random number drawn, before Lightning asks for the first window.
        self._closed = False
        epoch, skip = self.epoch, self.skip_micro_batches
        self.epoch, self.skip_micro_batches = epoch + 1, 0
        resumed, self.after_skip = self.after_skip, None
        yield from self._epoch(epoch, skip, resumed)

    def _epoch(self, epoch: int, skip: int, resumed: Callable[[], None] | None) -> Iterator[Window]:
        loader = skip_first_batches(self.loader, skip) if skip else self.loader
        if resumed is not None and not skip:
            resumed()
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        micro_batches = iter(loader)
        done, updates = skip, skip // self.window_size
        self.saw_data, made_before = skip > 0, self._updates_made
        for update in range(updates, self.windows_per_epoch):
            batches, num_items = self.read_window(micro_batches, self._size_of(update), self.device)
            if resumed is not None and skip:
                resumed()
            resumed = None
            self._forget_skip(loader)
            if not batches:
                break
            self.saw_data = True
            done += len(batches)
            complete = done % self.window_size == 0 or done == self.micro_batches_per_epoch
            self._updates_made += complete
            yield Window(batches, num_items, complete, done / self.micro_batches_per_epoch)
            if self._closed:
                return
        if self.saw_data and self._updates_made == made_before and not skip:
            raise DataError(
                f"An epoch of the training data gave {done} micro-batches, fewer than the "
                f"`gradient_accumulation_steps={self.window_size}` of one update, so no update would ever be made.\n\n"
                "Hint: accumulate fewer, use a smaller batch, or give the data set a length."
            )

    def _size_of(self, update: int) -> int:
        if update != self.windows_per_epoch - 1:
            return self.window_size
        return self.micro_batches_per_epoch % self.window_size or self.window_size

    @staticmethod
    def _forget_skip(loader: Any) -> None:
        if isinstance(loader, PreparedDataLoader):
            loader.skip_batches = 0
