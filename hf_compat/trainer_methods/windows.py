"""The run's counts, and the training data cut into updates, for the Trainer and for native mode."""

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
    """The methods that count a run's updates and cut its data into them."""

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Loader, total_train_batch_size: int | None = None
    ) -> RunCounts:
        """Compute the counts of a run.

        Args:
            args: The arguments.
            dataloader: The training loader.
            total_train_batch_size: Samples in an update, which 4.57 and 5.0 pass. Computed by default.

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
        """Return the counts as `RunCounts`. An override from any release may return a plain tuple."""
        method = self.set_initial_training_values
        # before 5.0 the method also took the samples of an update
        is_old = needs_parameter(method, "total_train_batch_size")
        return RunCounts(*method(args, dataloader, *([self.get_total_train_batch_size(args)] if is_old else [])))

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the number of samples in one update over all ranks."""
        processes = args.world_size // self.get_tp_size() // self.get_cp_size() // self.get_sp_size()
        return int(self._train_batch_size * args.gradient_accumulation_steps * processes)

    def get_tp_size(self) -> int:
        """Return the number of devices that share a tensor, always 1."""
        return 1

    def get_cp_size(self) -> int:
        """Return the number of devices that share a sequence's context, always 1."""
        return 1

    def get_sp_size(self) -> int:
        """Return the number of devices that share a sequence, always 1."""
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
            start: The point at which the run starts.
            kind: The class of the windows.
            restore_rng: Sets the random states of the start. With None it sets those of the checkpoint.
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
