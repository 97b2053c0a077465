"""The run's counts, and the training data cut into updates: for the Trainer and for native mode. HF's method names."""

from __future__ import annotations

from collections.abc import Callable

from hf_compat.checkpoint.run_state import DataCut, PlainState, ResumePoint
from hf_compat.data.types import Loader
from hf_compat.engine.windows import Windows
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.run_counts import RunCounts, make_run_counts
from hf_compat.runtime.inspection import fitting_arguments, has_length, needs_parameter
from hf_compat.trainer_methods.base import TrainerBase


class WindowMethods(TrainerBase):
    """How a run counts its updates and cuts its data into them."""

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Loader, total_train_batch_size: int | None = None
    ) -> RunCounts:
        """Work out the counts of a run.

        Args:
            args: The arguments.
            dataloader: The training loader.
            total_train_batch_size: Samples of an update, which 4.57 and 5.0 hand over; by default they are worked out.

        Mirrors:
            `transformers.Trainer.set_initial_training_values`, 5.23.
        """
        micro_batches = len(dataloader) if has_length(dataloader) else None
        return make_run_counts(
            args,
            micro_batches=micro_batches,
            num_examples=self.num_examples(dataloader) if micro_batches else None,
            total_train_batch_size=total_train_batch_size or self.get_total_train_batch_size(args),
        )

    def run_counts(self, args: TrainingArguments, dataloader: Loader) -> RunCounts:
        """Return the counts that an override of any era gives, which may be a plain tuple."""
        method = self.set_initial_training_values
        # before 5.0 the method also took the samples of an update
        is_old = needs_parameter(method, "total_train_batch_size")
        return RunCounts(*method(args, dataloader, *([self.get_total_train_batch_size(args)] if is_old else [])))

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of one update over all processes."""
        processes = args.world_size // self.get_tp_size() // self.get_cp_size() // self.get_sp_size()
        return int(self._train_batch_size * args.gradient_accumulation_steps * processes)

    def get_tp_size(self) -> int:
        """Return the devices that share a tensor: 1."""
        return 1

    def get_cp_size(self) -> int:
        """Return the devices that share a sequence's context: 1."""
        return 1

    def get_sp_size(self) -> int:
        """Return the devices that share a sequence: 1."""
        return 1

    def _data_cut(self, counts: RunCounts) -> DataCut:
        return DataCut(
            counts=counts,
            window_size=self.args.gradient_accumulation_steps,
            world_size=self.args.world_size,
            samples_per_micro_batch=self._train_batch_size * self.args.world_size,
        )

    def _make_windows(
        self,
        loader: Loader,
        counts: RunCounts,
        start: ResumePoint | None = None,
        kind: type[Windows] = Windows,
        restore_rng: Callable[[PlainState | None], None] | None = None,
    ) -> Windows:
        """Cut a loader's micro-batches into updates.

        Args:
            loader: The training loader.
            counts: The run's counts.
            start: Where the run begins.
            kind: The class of the windows.
            restore_rng: Sets the random states of the place where the run goes on; given None, those of the checkpoint.
        """
        # before 4.50 the method took no device
        return kind(
            loader,
            read_window=lambda *parts: self.get_batch_samples(*fitting_arguments(self.get_batch_samples, parts)),
            window_size=self.args.gradient_accumulation_steps,
            counts=counts,
            device=self.args.device,
            start=start,
            restore_rng=restore_rng,
        )
