"""Data loaders, samplers, columns and counts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from hf_compat.data.collators import RemoveColumnsCollator, check_dataset, check_iterable, raise_no_columns
from hf_compat.data.loader import PreparedDataLoader, measure_lengths
from hf_compat.data.order import IterableDatasetSlice
from hf_compat.data.types import Batch, Collator, DataSource, Loader
from hf_compat.errors import ArgumentError, DataError
from hf_compat.hf.argument_values import COUNT, read_as
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.value_types import whole_number
from hf_compat.interop.releases import of_transformers
from hf_compat.interop.transformers_models import is_datasets_dataset, knows_its_rank
from hf_compat.plan.deepspeed import tensor_ranks_of
from hf_compat.plan.translate import RunCounts, make_run_counts
from hf_compat.runtime.console import log_ignored_columns
from hf_compat.runtime.inspection import accepted_parameters, calling_like_upstream, dataset_of, has_length, length_of
from hf_compat.runtime.launch import environment
from hf_compat.runtime.meshes import tensor_ranks
from hf_compat.runtime.seeding import seed_worker
from hf_compat.runtime.text import brief, shown
from hf_compat.trainer_methods.base import StepsBase, model_with_forward

# Indices of single samples, or of one rank's batches.
Order: TypeAlias = Sampler[int] | Sampler[list[int]]

logger = logging.getLogger(__name__)


class DataloaderMethods(StepsBase):
    """The overridable methods that load data and count a run's updates."""

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Make the loader of training micro-batches.

        Raises:
            DataError: `train_dataset` is missing, empty, or not a data set.
        """
        if self.train_dataset is None:
            raise DataError("Trainer: training requires a train_dataset.\n\nHint: pass `train_dataset=…`.")
        check_dataset("train_dataset", self.train_dataset)
        if length_of(self.train_dataset) == 0:
            raise DataError("`train_dataset` is empty.\n\nHint: check how it was loaded or filtered.")
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self._train_batch_size,
            sampler_fn=calling_like_upstream(
                self._get_train_sampler, ("train_dataset",)
            ),  # before 4.52 it took no data set
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: DataSource | str | None = None) -> DataLoader[Batch]:
        """Make the loader of evaluation batches. One with persistent workers is kept, so that they start only once.

        Args:
            eval_dataset: A data set, or the name of one if there are several. None uses the Trainer's.

        Raises:
            DataError: The data set is missing, has an unknown name, or is not a data set.
        """
        if eval_dataset is None and self.eval_dataset is None:
            raise DataError("Trainer: evaluation requires an eval_dataset.\n\nHint: pass `eval_dataset=…`.")
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        kept: dict[str, DataLoader[Batch]] = self.__dict__.setdefault("_eval_dataloaders", {})
        begun: set[str] = self._run.evaluated if "_run" in self.__dict__ else set()  # native mode does not record it
        has_begun, is_kept = key in begun, self.args.dataloader_persistent_workers
        if is_kept:
            begun.add(key)
            is_own = eval_dataset is None or isinstance(eval_dataset, str)
            if key in kept and (is_own or kept[key].dataset is eval_dataset):
                return kept[key]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            try:
                dataset = self.eval_dataset[eval_dataset]
            except (KeyError, TypeError) as error:
                names = list(self.eval_dataset) if isinstance(self.eval_dataset, dict) else []
                raise DataError(
                    f"There is no evaluation data set named {brief(eval_dataset)}, only {names}."
                ) from error
        check_dataset("eval_dataset", dataset)
        loader = self._get_dataloader(
            dataset=dataset,
            description="Evaluation",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
            dataloader_key=key,
        )
        if is_kept:
            kept[key] = loader
            loader.replaces_workers = has_begun
        return loader

    def get_test_dataloader(self, test_dataset: DataSource) -> DataLoader[Batch]:
        """Make the loader of batches to predict.

        Raises:
            DataError: `test_dataset` is not a data set.
        """
        check_dataset("test_dataset", test_dataset)
        return self._get_dataloader(
            dataset=test_dataset,
            description="test",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
        )

    def num_examples(self, dataloader: DataLoader[Batch]) -> int:
        """Count the samples of a loader by its data set's length, else by the length of the loader."""
        dataset = dataset_of(dataloader)
        dataset = dataset.dataset if isinstance(dataset, IterableDatasetSlice) else dataset
        samples = length_of(dataset)
        return len(dataloader) * int(self.args.per_device_train_batch_size) if samples is None else samples

    def _get_dataloader(
        self,
        dataset: DataSource,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[DataSource], Order | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> PreparedDataLoader:
        """Make a loader from a data set and the arguments.

        Mirrors:
            `transformers.Trainer._get_dataloader`.
        """
        args, collator = self.args, self.data_collator
        if is_datasets_dataset(dataset):
            kept = self._remove_unused_columns(dataset, description=description)
            # Overrides written for 4.2 and before change the data set in place, or leave it, and return nothing
            dataset = dataset if kept is None else kept
        else:
            collator = self._get_collator_with_removed_columns(collator, description=description)
        is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
        chosen: dict[str, Any] = {"batch_size": batch_size}
        if not is_iterable:
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            if sampler is not None:
                method = "_get_train_sampler" if is_training else "_get_eval_sampler"
                check_iterable(method, sampler, "a `Sampler`")
            chosen |= {"sampler": sampler, "drop_last": args.dataloader_drop_last}
            if knows_its_rank(sampler):  # it yields this rank's batches
                ranks = self.accelerator.rank_slice
                if ranks.world_size > 1 and (ranks.split_batches or ranks.dispatch_batches):
                    option = "split_batches" if ranks.split_batches else "dispatch_batches"
                    raise ArgumentError(
                        f"`accelerator_config={{'{option}': True}}` divides batches between ranks, but "
                        f"`{shown('train_sampling_strategy', args.train_sampling_strategy)}` already does.\n\n"
                        f"Hint: leave out `{option}`."
                    )
                chosen = {"batch_sampler": sampler}
        seed = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=self.accelerator.rank_slice.rank)
        return self.accelerator.make_loader(
            dataset,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            in_order=args.dataloader_in_order,
            worker_init_fn=seed if is_training and not is_iterable else None,
            **chosen,
        )

    def _get_train_sampler(self, train_dataset: DataSource | None = None) -> Order | None:
        """Make the training sampler for `train_sampling_strategy`.

        Mirrors:
            `transformers.Trainer._get_train_sampler`.
        """
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not has_length(dataset):
            return None
        args, strategy = self.args, self.args.train_sampling_strategy
        if strategy == "batch_rebalance":
            ranks = self.accelerator.rank_slice
            for_what = "`train_sampling_strategy='batch_rebalance'`"
            sampler: Order = of_transformers("trainer_pt_utils", "BatchRebalanceSampler", for_what)(
                self._lengths(dataset),
                # smaller than the arguments' batch after running out of memory
                effective_batch_size=self._train_batch_size * args.gradient_accumulation_steps * ranks.world_size,
                dp_size=ranks.world_size,
                grad_accum=args.gradient_accumulation_steps,
                rank=ranks.rank,
                drop_last=args.dataloader_drop_last,
            )
            return sampler
        if strategy == "group_by_length":
            return self._length_sampler(dataset, args.train_batch_size * args.gradient_accumulation_steps)
        return SequentialSampler(dataset) if strategy == "sequential" else RandomSampler(dataset)

    def _get_eval_sampler(self, eval_dataset: DataSource) -> Sampler[int] | None:
        """Make the evaluation sampler, sequential or grouped by length with a seeded generator."""
        if eval_dataset is None or not has_length(eval_dataset):
            return None
        if self.args.train_sampling_strategy == "group_by_length":
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            generator = torch.Generator().manual_seed(seed)
            return self._length_sampler(eval_dataset, self.args.eval_batch_size, generator)
        return SequentialSampler(eval_dataset)

    def _length_sampler(
        self, dataset: DataSource, batch_size: int, generator: torch.Generator | None = None
    ) -> Sampler[int]:
        for_what = "`train_sampling_strategy='group_by_length'`"
        grouped = of_transformers("trainer_pt_utils", "LengthGroupedSampler", for_what)
        sampler: Sampler[int] = grouped(batch_size, lengths=self._lengths(dataset), generator=generator)
        return sampler

    def _lengths(self, dataset: DataSource) -> list[int]:
        if self._has_lengths(dataset):
            return [int(length) for length in dataset[self.args.length_column_name]]
        return measure_lengths(dataset, self._length_key)

    def _has_lengths(self, dataset: DataSource) -> bool:
        """Whether the data set has the column of lengths."""
        return is_datasets_dataset(dataset) and self.args.length_column_name in dataset.column_names

    @property
    def _length_key(self) -> str:
        """Key of the entry whose length is the sample's length."""
        names = getattr(self.processing_class, "model_input_names", None)
        return str(names[0]) if names else "input_ids"

    def _set_signature_columns_if_needed(self) -> None:
        """Set `_signature_columns` to the parameters of the model's forward, and the labels."""
        if self._signature_columns is None:
            parameters = inspect.signature(model_with_forward(self).forward).parameters
            extra = dict.fromkeys(["label", "label_ids", *self.label_names])
            self._signature_columns = [*parameters, *extra]

    def _remove_unused_columns(self, dataset: DataSource, description: str | None = None) -> DataSource:
        """Drop columns of a `datasets` table that the model does not accept."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        columns = self._signature_columns or []
        dropped = [name for name in dataset.column_names if name not in columns]
        if len(dropped) == len(dataset.column_names):
            raise_no_columns(dropped, columns, description, type(self.model).__name__)
        if dropped:
            log_ignored_columns(dropped, description, type(self.model).__name__, logger)
        return dataset.remove_columns(dropped)

    def _get_collator_with_removed_columns(self, data_collator: Collator, description: str | None = None) -> Collator:
        """Wrap a collator so that it gets only columns that the model accepts."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        return RemoveColumnsCollator(
            data_collator,
            self._signature_columns or [],
            model_name=type(self.model).__name__,
            description=description,
        )

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Loader, total_train_batch_size: int | None = None
    ) -> RunCounts:
        """Compute the counts of a run. 4.57 and 5.0 pass the samples in an update.

        Mirrors:
            `transformers.Trainer.set_initial_training_values`.
        """
        micro_batches, samples = length_of(dataloader), total_train_batch_size or self.get_total_train_batch_size(args)
        if micro_batches is not None:
            micro_batches *= self.get_sp_size()  # processes that share sequences share the batches of all of them
        count = read_as("total_train_batch_size", whole_number(COUNT), samples)
        assert isinstance(count, int)  # as read
        return make_run_counts(
            args,
            micro_batches=micro_batches,
            num_examples=self.num_examples(dataloader) if micro_batches else None,
            total_train_batch_size=count,
        )

    def run_counts(self, args: TrainingArguments, dataloader: Loader) -> RunCounts:
        """Call `set_initial_training_values`. An override from any release may return a plain tuple."""
        method = self.set_initial_training_values
        # before 5.0 the method also took the samples of an update
        is_old = "total_train_batch_size" in accepted_parameters(method).required
        return RunCounts(*method(args, dataloader, *([self.get_total_train_batch_size(args)] if is_old else [])))

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Number of samples in one update over all ranks."""
        processes = args.world_size // self.get_tp_size() // self.get_cp_size() // self.get_sp_size()
        return int(self._train_batch_size * args.gradient_accumulation_steps * processes)

    def get_tp_size(self) -> int:
        """Number of processes that hold parts of the same layers: of the model, or by DeepSpeed's configuration."""
        model = getattr(self, "model", None)  # a data module of native mode is asked before there is one
        return max(tensor_ranks(model), tensor_ranks_of(self.args, environment))

    def get_cp_size(self) -> int:
        """Number of devices that share the context of a sequence, always 1."""
        return 1

    def get_sp_size(self) -> int:
        """Number of processes that share a sequence."""
        plan = self.accelerator.sequence
        return 1 if plan is None else plan.sp_size
