"""Windows, and the protocols between the engine, the owner of the steps and the observer of updates.

A window holds the micro-batches of one update and is one Lightning batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hf_compat.checkpoint.run_state import DataPosition, PlainState, ResumePoint
from hf_compat.data.collators import shown_value
from hf_compat.data.loader import PreparedDataLoader, draw_order, read_and_drop, skip_first_batches
from hf_compat.data.order import RankSlice
from hf_compat.data.types import Batch, Loader
from hf_compat.engine.internals import do_nothing
from hf_compat.errors import DataError, OverrideError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.parallelism import SequencePlan
from hf_compat.plan.translate import RunCounts
from hf_compat.runtime.inspection import call_if_there, calling_like_upstream
from hf_compat.runtime.module_tree import ModuleTree
from hf_compat.runtime.nested import Nested, map_nested
from hf_compat.runtime.seeding import read_rng, write_rng

logger = logging.getLogger(__name__)

Items = torch.Tensor | int | None  # the number that divides a window's loss
READ_PARAMETERS = ("epoch_iterator", "num_batches", "device")  # of `get_batch_samples`


class BatchGroup:
    """Batches of a loader that are one Lightning batch.

    Callbacks that expect a mapping read the last one: `window["input_ids"]`. Iteration, `len` and integer keys cover
    all of them.
    """

    __slots__ = ("micro_batches",)
    micro_batches: list[Batch]

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.micro_batches)

    def __getitem__(self, key: object) -> Batch:
        """Return a micro-batch by index, or an entry of the last micro-batch by name."""
        return self.micro_batches[key] if isinstance(key, (int, slice)) else self.as_batch()[key]

    def __contains__(self, key: object) -> bool:
        return key in self.as_batch()

    def change_batches(self, change: Callable[[Batch], Batch]) -> None:
        """Replace each micro-batch."""
        self.micro_batches = [change(batch) for batch in self.micro_batches]

    def keys(self) -> Iterable[object]:
        """Return the keys of the last micro-batch."""
        return self.as_batch().keys()

    def as_batch(self) -> Batch:
        """Return the last micro-batch."""
        return self.micro_batches[-1]


class Window(BatchGroup):
    """The micro-batches of one update.

    Args:
        micro_batches: Batches of the loader, at most `gradient_accumulation_steps`.
        num_items: Number of items (mostly tokens) that divides the loss. None if it is not divided.
        is_complete: Whether an update follows. Data without a length may end within a window. Its gradients then
            accumulate into the next epoch's first window, as in HF.
        epoch_progress: Completed fraction of the epoch after this window.

    Attributes:
        is_trained: Whether the optimizer has stepped.
        poses_as_batch: Whether names return entries of the last micro-batch. A user-defined `training_step` would train
            on that one only.
    """

    __slots__ = ("epoch_progress", "is_complete", "is_trained", "num_items", "poses_as_batch")

    def __init__(self, micro_batches: list[Batch], num_items: Items, is_complete: bool, epoch_progress: float) -> None:
        self.micro_batches = micro_batches
        self.num_items = num_items
        self.is_complete = is_complete
        self.epoch_progress = epoch_progress
        self.is_trained = False
        self.poses_as_batch = True

    def as_batch(self) -> Batch:
        if not self.poses_as_batch and len(self.micro_batches) > 1:
            raise OverrideError(
                f"`training_step` reads its batch by name, and the batch is a window of {len(self.micro_batches)} "
                "micro-batches (`gradient_accumulation_steps`). Only the last one would be trained on.\n\n"
                "Hint: `for inputs in batch:` gives each micro-batch, `batch[-1]` the last one."
            )
        return super().as_batch()


class Windows:
    """The windows of each epoch, as Lightning's fit loop iterates over them.

    The state in Lightning's checkpoints is the position in the data, with the random states. A resumed run reads the
    same data and draws the same random numbers as an uninterrupted one.

    Args:
        steps: Their `get_batch_samples` reads up to a number of micro-batches and counts the items.
        restore_random_states: Sets the random states of the first pass. None sets those of its start, if it has them.
            At an epoch's start or end it is called before the pass, at an exact position once the pass has started.
            Where samples are skipped, it is called after the first window that is read.
        has_length: Whether Lightning may ask for the length. Without one, Lightning's trainer ends the run itself.

    Attributes:
        is_held: Read nothing yet, as the set-up of a native fit asks for a window too early.
        updates_to_skip: Completed updates of the first epoch. 0 if that epoch is over.
    """

    gives_windows: ClassVar[bool] = True  # each is one Lightning batch
    is_held = False

    def __init__(
        self,
        loader: Loader,
        *,
        steps: TrainingSteps,
        counts: RunCounts,
        start: ResumePoint | None = None,
        restore_random_states: Callable[[], None] | None = None,
        has_length: bool = True,
    ) -> None:
        self.loader = loader
        self._has_length = has_length
        self.steps = steps
        self.window_size = steps.args.gradient_accumulation_steps  # stays if a callback changes the arguments
        self.counts = counts
        self.device = steps.args.device
        self.saw_data = self._has_warned = False
        # processes that share sequences exchange their batches, so that each batch of the loader gives as many
        self._sharers = 1 if steps.accelerator.sequence is None else steps.accelerator.sequence.sp_size
        self._shared: Exchanged | None = None
        self._last: Window | None = None
        self._restore_rng = restore_random_states
        self._pass: Iterator[Batch] | None = None
        self.start_at(start or ResumePoint())

    def __getstate__(self) -> dict[str, object]:
        """Leave out the pass of this process."""
        return {**vars(self), "_pass": None, "_shared": None}

    def __len__(self) -> int:
        if not self._has_length:
            raise TypeError("the training data has no length")
        return self.counts.updates_per_epoch

    def begin_at(self, epoch: int) -> None:
        """Start at an epoch, unless a pass has begun or a checkpoint is resumed."""
        if epoch and self._start is not None and self._start.epoch == 0 and self._start.position is None:
            self.start_at(ResumePoint(epoch=epoch))

    def start_at(self, start: ResumePoint) -> None:
        """Start the next pass at a point of a run."""
        self._start: ResumePoint | None = start
        if isinstance(self.loader, PreparedDataLoader):
            has_begun = start.epoch > 0 or start.epoch_is_over
            self.loader.replaces_workers = start.position is not None and has_begun
            if start.shuffle_seed is not None and self.loader.shuffler is not None:
                self.loader.shuffler.initial_seed = start.shuffle_seed
        self.next_epoch = self._epoch = start.epoch
        position = start.position
        is_open = position is not None and position.is_open
        self._done = position.micro_batches_done if position is not None and is_open else start.skip_micro_batches
        self.updates_to_skip = 0 if start.epoch_is_over else self._done // self.window_size
        self._is_leaving = self._is_over = self._is_rewound = False
        self._epoch_rng: PlainState | None = None

    @contextlib.contextmanager
    def resumed_rng(self) -> Iterator[None]:
        """Draw random numbers within the context from the resumed states, before the run itself continues."""
        start = self._start
        if start is None or start.position is None or start.rng is None:
            yield
            return
        write_rng(start.rng)
        yield
        rng = read_rng()
        self._start = dataclasses.replace(start, rng=rng, position=dataclasses.replace(start.position, rng=rng))

    def leave_epoch(self, is_over: bool) -> None:
        """End the pass before its next window.

        Args:
            is_over: Whether the epoch is over, as a callback has ended it. Otherwise training stops within it.
        """
        self._is_leaving = True
        self._is_over |= is_over

    def rewind(self, window: Window) -> None:
        """Mark the last window as not trained."""
        self._done -= len(window)
        self._is_rewound = True

    def finish_epoch(self) -> None:
        """Move the position to the next epoch if this one is over."""
        start = self._start
        if start is not None and start.epoch_is_over and start.position is not None:
            # the trainer has ended the epoch without asking for a window
            following = dataclasses.replace(start.position, epoch=start.epoch + 1, is_open=False)
            self.start_at(ResumePoint(epoch=start.epoch + 1, position=following, rng=start.rng))
        elif self._is_over or self.is_at_end():
            self._epoch_rng = None

    def is_at_end(self) -> bool:
        """Whether the last returned window is the last of its epoch's data."""
        if isinstance(self.loader, PreparedDataLoader) and self.loader.end_of_dataloader and not self._left():
            return not self._is_rewound
        return not self.counts.is_endless and self._done >= self.counts.micro_batches_per_epoch

    def position(
        self, epoch_is_over: bool = False, before_last: bool = False, if_untrained: bool = False
    ) -> DataPosition:
        """Return the position in the data.

        Args:
            epoch_is_over: A callback is ending the epoch.
            before_last: Return the position before the last window, so that a resumed run trains on it again.
            if_untrained: Do so only if its optimizer step was not made.
        """
        if self._start is not None and self._start.position is not None:  # the first pass has not started
            return self._start.position
        shuffler = getattr(self.loader, "shuffler", None)  # a user's wrapper may hand the loader's on
        at_start = DataPosition(
            epoch=self.next_epoch,
            window_size=self.window_size,
            micro_batches_per_epoch=self.counts.micro_batches_per_epoch,
            micro_batch_size=getattr(self.loader, "batch_size", None),
            rng=read_rng(self._epoch_rng),
            shuffle_seed=None if shuffler is None else shuffler.initial_seed,
        )
        if self._epoch_rng is None:
            return at_start
        loader, lookahead, source = self.loader, None, None
        last = self._last if before_last else None
        again = 0 if last is None or (if_untrained and last.is_trained) else len(last)  # micro-batches to read again
        is_rewound = self._is_rewound or again > 0
        if isinstance(loader, PreparedDataLoader) and not is_rewound:
            lookahead = as_plain(loader.lookahead)
            source = None if loader.source is None else as_plain(loader.source.state_dict())
        elif not is_rewound and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            # torchdata's StatefulDataLoader
            source = as_plain(loader.state_dict())
        shared = None if is_rewound or not self._left() else as_plain(self._left())
        return dataclasses.replace(
            at_start,
            epoch=self._epoch,
            is_open=True,
            is_over=epoch_is_over or self._is_over or (not again and self.is_at_end()),
            micro_batches_done=self._done - again,
            lookahead=lookahead,
            source=source,
            shared=shared,
            epoch_rng=self._epoch_rng,
        )

    def state_dict(self) -> PlainState:
        """Return the position in the data, for Lightning's own checkpoints."""
        return self.position().to_plain()

    def load_state_dict(self, state_dict: PlainState) -> None:
        """Start at the position in a Lightning checkpoint."""
        data = DataPosition.read(state_dict)
        if data.updates_done:  # from transformers, which stores nothing else
            skip = data.updates_done * self.window_size
            self.start_at(ResumePoint(epoch=data.epoch, skip_micro_batches=skip, rng=data.rng))
            return
        is_over = data.is_over or data.micro_batches_done >= self.counts.micro_batches_per_epoch
        self.start_at(ResumePoint.at(data, is_over))

    def __iter__(self) -> Iterator[Window]:
        # A generator, so that Lightning's first request starts the reading and the drawing of random numbers.
        if self.is_held:
            yield Window([], None, False, 0.0)
            return
        micro_batches, began, restore = self._open_pass()
        if self._is_leaving:  # of the epoch only its end is left
            return
        counts, size, made = self.counts, self.window_size, False
        whole = counts.micro_batches_per_epoch
        read = calling_like_upstream(self.steps.get_batch_samples, READ_PARAMETERS)  # before 4.50 it took no device
        for update in range(began // size, counts.updates_per_epoch):
            is_short = update == counts.updates_per_epoch - 1
            wanted = whole % size or size if is_short else size
            window = read(micro_batches, wanted, self.device)
            try:
                batches, num_items = window  # a subclass may return anything
            except (TypeError, ValueError) as error:
                raise OverrideError(
                    f"`get_batch_samples` returned {shown_value(window)}.\n\n"
                    "Hint: return the list of micro-batches and the number of their items (or None)."
                ) from error
            if restore is not None:
                restore()
                restore = None
            if not batches:
                self._is_over = True
                if self.saw_data and not (counts.is_endless or self._has_warned):
                    self._has_warned = True
                    logger.warning(
                        "The training data announces %d micro-batches (%d samples) an epoch, and this one had %d. "
                        "Training will make fewer updates than the %d that the learning-rate schedule is made for.",
                        counts.micro_batches_per_epoch,
                        counts.num_examples,
                        self._done,
                        counts.max_updates,
                    )
                break
            self.saw_data = True
            self._done += len(batches)
            is_complete = self._done % size == 0 or self._done == whole
            made |= is_complete
            self._last = Window(batches, num_items, is_complete, self._done / whole)
            yield self._last
            if self._is_leaving:
                return
        if self.saw_data and not made and not began:
            raise DataError(
                f"An epoch of the training data gave {self._done} micro-batches, fewer than the "
                f"`gradient_accumulation_steps={size}` of one update, so no update would ever be made.\n\n"
                "Hint: accumulate fewer, use a smaller batch, or give the data set a length."
            )

    def _open_pass(self) -> tuple[Iterator[Batch], int, Callable[[], None] | None]:
        """Start an epoch, or the rest of one.

        Returns:
            The micro-batches, the number of those before them, and a function that restores the random states once the
            first window is read.
        """
        start, self._start = self._start, None
        restore: Callable[[], None] | None = None
        if start is None:
            start, self._done = ResumePoint(epoch=self.next_epoch), 0
        elif self._restore_rng is not None:
            restore = self._restore_rng
        elif start.rng is not None:
            restore = functools.partial(write_rng, start.rng)
        position, done = start.position, self._done
        self._is_leaving = self._is_over = start.epoch_is_over
        self._is_rewound = False
        self._epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        self.saw_data = done > 0 or start.epoch_is_over
        is_open = position is not None and position.is_open
        if restore is not None and (start.epoch_is_over or not (is_open or done)):
            restore()
            restore = None
        if position is None or not position.is_open:
            self._epoch_rng = read_rng()
            return self._begin(done), done, restore
        self._epoch_rng = position.epoch_rng
        if start.epoch_is_over:
            return iter(()), done, None
        # draw the epoch's order again, from the same random states
        if position.epoch_rng is not None:
            write_rng(position.epoch_rng)
        return self._begin(done, position, restore or do_nothing), done, None

    def _begin(
        self, skip: int, position: DataPosition | None = None, after_start: Callable[[], None] = do_nothing
    ) -> Iterator[Batch]:
        """Start a pass after `skip` micro-batches, of which an exact position tells more."""
        if self._sharers == 1:
            return self._start_loader(skip, position, after_start)
        left = None if position is None else position.shared
        batches, cut = divmod(skip, self._sharers)
        if left is not None:  # the loader has given their batches already
            batches, cut = batches + 1, 0
        under_way = self._start_loader(batches, position, after_start)
        if left is not None and isinstance(self.loader, PreparedDataLoader):
            next(under_way)  # it has started, and reads nothing before these are trained on
        exchanged = self.steps.accelerator.deepspeed_ulysses_dl_adapter(under_way, self.steps.model_wrapped)
        self._shared = cast("Exchanged", exchanged)
        self._shared.micro_batches.extend(left or ())
        # on a CPU they are slices of whole sequences, and models take views
        return islice(map(functools.partial(map_nested, torch.Tensor.contiguous), self._shared), cut, None)

    def _start_loader(
        self, skip: int, position: DataPosition | None, after_start: Callable[[], None]
    ) -> Iterator[Batch]:
        """Start a pass after `skip` batches of the loader."""
        loader, source = self.loader, None if position is None else position.source
        is_ours = isinstance(loader, PreparedDataLoader)
        is_torchs = type(loader) is DataLoader
        has_batches = is_torchs and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
        if is_ours and position is not None:
            loader.resume_at(skip, position.lookahead, source, after_start, waits=position.shared is not None)
        elif is_ours and skip:
            loader.resume_at(skip)
        elif source is not None:
            loader.load_state_dict(source)
            skip = 0
        elif skip and has_batches:
            loader, skip = skip_first_batches(loader, skip), 0
        call_if_there(loader, "set_epoch", self._epoch)
        self._pass = iter(loader)
        if not is_ours:
            if skip:
                read_and_drop(self._pass, skip)
            if position is not None and is_torchs:
                draw_order(self._pass)
            after_start()
        return self._pass

    def _left(self) -> list[Batch]:
        """The micro-batches of a batch that processes share which are not read yet."""
        return [] if self._shared is None else list(self._shared.micro_batches)

    def close(self) -> None:
        """End the pass and its workers, and release its batches. No training follows."""
        self._last = self._shared = None
        under_way, self._pass = self._pass, None
        if isinstance(self.loader, PreparedDataLoader):
            self.loader.lookahead = None
            if isinstance(under_way, Generator):  # an error's traceback would keep it and its workers alive
                under_way.close()


def as_plain(data: Nested) -> Nested:
    """Convert nested data to dicts, lists, numbers, strings and tensors. None if something else is in it."""

    def checked(leaf: Nested) -> Nested:
        if leaf is None or isinstance(leaf, (bool, int, float, str, torch.Tensor)):
            return leaf
        raise TypeError(f"{type(leaf).__name__} is not kept in checkpoints")

    try:
        return map_nested(checked, data, on_other=checked, rebuild=lambda _, items: items)
    except TypeError:
        return None


GradNorm = torch.Tensor | float | None


class Exchanged(Iterator[Batch], Protocol):
    """The micro-batches of processes that share sequences. Mirrors DeepSpeed's `UlyssesSPDataLoaderAdapter`, 0.19."""

    micro_batches: deque[Batch]  # of the last exchange that are left


class CompiledMicroBatches(Protocol):
    """Runs the forward and backward passes of micro-batches as graphs."""

    def run(
        self, compute_loss: Callable[..., object], model: nn.Module, inputs: Batch, items: Items, divisor: int
    ) -> torch.Tensor | None: ...  # the loss, or None if the caller has to compute it
    def take_norm(self) -> torch.Tensor | None: ...  # if the gradients are clipped already
    def end(self) -> None: ...


class Accelerator(Protocol):
    """What a run needs of the object that HF's steps call `accelerator`."""

    run_backward: Callable[..., None] | None  # takes the loss and torch's options
    sync_gradients: bool
    compiled_update: CompiledMicroBatches | None  # in a fit, with `compile_update`

    @property
    def num_processes(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    @property
    def is_alone(self) -> bool: ...  # whether the next two return their input
    @property
    def rank_slice(self) -> RankSlice: ...
    @property
    def sequence(self) -> SequencePlan | None: ...
    def deepspeed_ulysses_dl_adapter(self, dl: Iterable[Batch], model: nn.Module) -> Iterable[Batch]: ...
    def gather(self, tensor: Nested) -> Nested: ...
    def pad_across_processes(self, tensor: Nested, dim: int = 0, pad_index: int = 0) -> Nested: ...


class TrainingSteps(Protocol):
    """The owner of the overridable steps: a Trainer, or `NativeSteps`.

    Optimizer and schedule exist once `create_optimizer_and_scheduler` has run.
    """

    model: nn.Module
    model_wrapped: nn.Module
    current_gradient_accumulation_steps: int

    label_names: list[str]
    _asks_for_count: bool  # whether the next micro-batch finds out if its loss depends on the items counted

    _tree: ModuleTree  # of the model that is trained
    args: TrainingArguments
    optimizer: Any  # torch's or any other optimizer
    lr_scheduler: Any

    @property
    def accelerator(self) -> Accelerator: ...

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Nested | None, Nested | None]: ...  # loss, logits and labels
    def _prepare_input(self, data: Batch) -> Batch: ...
    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Items = None) -> torch.Tensor: ...
    def watched_count(self, items: Items) -> Items: ...
    def judge_count(self, items: Items, loss: torch.Tensor, inputs: Batch) -> None: ...
    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Items]: ...
    def _weight_in_evaluation(self, batch: Batch) -> torch.Tensor: ...
    def compiled(self, model: nn.Module) -> nn.Module: ...  # if the arguments ask for it
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None: ...
    def clips_as_torch(self) -> bool: ...  # whether nothing changes or reads gradients before they are clipped
    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor: ...
    def _get_grad_norm(self, model: nn.Module, grad_norm: GradNorm = None) -> GradNorm: ...
    def _get_learning_rate(self) -> float: ...


class UpdateObserver:
    """Events within an update for which Lightning has no hook. Nothing is done at them here."""

    def micro_batch_done(self, loss: torch.Tensor, inputs: Batch) -> None:
        """Note that a micro-batch's backward pass is done."""

    def update_made(self, window: Window, learning_rate: float, grad_norm: GradNorm) -> None:
        """Note that an update is made, with its learning rate and gradient norm."""

    def fire(self, event: str, /, **values: object) -> None:
        """Fire an event of HF's within an update, with the values that its row offers."""

    def agree_to_stop(self) -> bool:
        """Whether to skip the rest of the window."""
        return False
