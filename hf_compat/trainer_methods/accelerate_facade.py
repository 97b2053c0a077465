"""The part of `accelerate.Accelerator` that Trainer subclasses use. HF words and torch only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from hf_compat.data.loader import LoaderOptions, PreparedDataLoader
from hf_compat.data.rank_slices import RankSlice
from hf_compat.data.tree import truncate_to
from hf_compat.data.types import Batch, DataSource
from hf_compat.hf.accelerator_config import AcceleratorConfig
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.runtime import collectives as processes
from hf_compat.runtime.nested import Nested

# What scripts hand to `prepare`: loaders, models, optimizers, schedules.
Prepared: TypeAlias = Any
# Options of Accelerate's that change nothing here.
Unused: TypeAlias = Any


class AcceleratorFacade:
    """Answer like an `Accelerator` where subclasses of `transformers.Trainer` ask it something.

    It also says which slice of the data this rank gets.

    Args:
        args: The training arguments.
        run_backward: Backward pass of the engine; the loss's own outside a fit.

    Mirrors:
        `accelerate.Accelerator`, 1.15: the members listed below and no others.
    """

    def __init__(self, args: TrainingArguments, run_backward: Callable[[torch.Tensor], None] | None = None) -> None:
        self._args = args
        self.run_backward = run_backward
        self.even_batches = self.dataloader_config.even_batches
        self.mixed_precision = args.mixed_precision
        self.sync_gradients = True
        kind = "NO" if args.world_size == 1 else f"MULTI_{'CPU' if args.device.type == 'cpu' else 'GPU'}"
        self.distributed_type = kind
        self.rank_slice = self._rank_slice()
        # the loader whose batches are gathered now: its last round may hold samples twice
        self.loader: Iterable[Batch] | None = None
        self.parallelism_config = None
        self.torch_device_mesh = None
        self.scaler: torch.amp.GradScaler | None = None
        self.optimizer_step_was_skipped = False
        self.state = SimpleNamespace(
            deepspeed_plugin=None, fsdp_plugin=None, distributed_type=kind, mixed_precision=args.mixed_precision
        )

    @property
    def dataloader_config(self) -> AcceleratorConfig:
        """How data is loaded across processes: `accelerator_config` of the arguments."""
        return AcceleratorConfig.from_any(self._args.accelerator_config)

    def _rank_slice(self) -> RankSlice:
        config = self.dataloader_config
        return RankSlice(
            rank=self._args.process_index,
            world_size=self._args.world_size,
            split_batches=config.split_batches,
            even_batches=config.even_batches,
            dispatch_batches=config.dispatch_batches,
        )

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._args.device

    @property
    def num_processes(self) -> int:
        """Processes that train together."""
        return self._args.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self._args.process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self._args.local_process_index

    @property
    def is_main_process(self) -> bool:
        """First process of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """First process of this machine."""
        return self.local_process_index == 0

    def backward(self, loss: torch.Tensor, **kwargs: Unused) -> None:
        """Run the backward pass, through Lightning while it trains."""
        if self.run_backward is not None:
            self.run_backward(loss)
        else:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch's

    def prepare(self, *objects: Prepared) -> Prepared:
        """Prepare data loaders; models and optimizers, which the engine prepares, are returned as they are."""
        prepared = tuple(self._prepare_one(candidate) for candidate in objects)
        return prepared if len(prepared) != 1 else prepared[0]

    def _prepare_one(self, candidate: Prepared) -> Prepared:
        return self.prepare_data_loader(candidate) if isinstance(candidate, DataLoader) else candidate

    def prepare_model(self, model: nn.Module, **kwargs: Unused) -> nn.Module:
        """Put a further model (a reference or reward model) on the device."""
        return model.to(self.device)

    def prepare_data_loader(self, loader: DataLoader[Batch], **kwargs: Unused) -> PreparedDataLoader:
        """Make a loader like the Trainer's own: one batch ahead, on the device, seeded shuffling."""
        if isinstance(loader, PreparedDataLoader):
            return loader
        chosen: dict[str, Any]
        if isinstance(loader.dataset, IterableDataset):
            chosen = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader.batch_size is None:
            chosen = {"batch_sampler": loader.batch_sampler}
        else:
            chosen = {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
        return self.make_loader(loader.dataset, LoaderOptions.of(loader), **chosen)

    def make_loader(self, dataset: DataSource, options: LoaderOptions, **chosen: Any) -> PreparedDataLoader:
        """Make a loader for this process as the arguments ask for it.

        Args:
            dataset: Map-style or iterable.
            options: How it reads.
            chosen: Which samples it reads: `batch_size`, `sampler`, `drop_last`, `batch_sampler` of torch's loader.
        """
        config = self.dataloader_config
        return PreparedDataLoader(
            dataset,
            device=self.device,
            non_blocking=config.non_blocking,
            seed=self._args.data_seed,
            use_seedable_sampler=config.use_seedable_sampler,
            rank_slice=self.rank_slice,
            **options.keywords(),
            **chosen,
        )

    def unwrap_model(self, model: nn.Module, **kwargs: Unused) -> nn.Module:
        """Return the model inside wrappers of compilation and parallelism."""
        model = getattr(model, "_orig_mod", model)
        if isinstance(model, DistributedDataParallel):
            model = model.module
        return getattr(model, "_orig_mod", model)

    def gather(self, tensor: Nested) -> Nested:
        """Return what all processes hold, joined along the first dimension."""
        return processes.gather(tensor)

    def gather_for_metrics(self, tensor: Nested, use_gather_object: bool = False) -> Nested:
        """Return what all processes hold, without samples that were repeated to fill a batch."""
        if use_gather_object:
            gathered: Nested = [item for part in processes.gather_objects(tensor) for item in part]
        else:
            gathered = processes.gather(tensor)
        # asked for by name: Accelerate's own loaders have these too
        remainder = getattr(self.loader, "remainder", -1)
        if not processes.is_distributed() or not getattr(self.loader, "end_of_dataloader", False) or remainder <= 0:
            return gathered
        return gathered[:remainder] if use_gather_object else truncate_to(gathered, remainder)

    def reduce(self, tensor: Nested, reduction: str = "sum", scale: float = 1.0) -> Nested:
        """Sum (or average) over the processes."""
        return processes.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Nested, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Nested:
        """Pad to the longest of all processes."""
        return processes.pad_across(tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        """Wait for the other processes."""
        processes.barrier()

    @contextlib.contextmanager
    def autocast(self, *args: Unused, **kwargs: Unused) -> Iterator[None]:
        """Run under the arguments' mixed precision."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mixed_precision)
        with torch.autocast(self.device.type, dtype=dtype) if dtype else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave gradients of a wrapped model unsynchronised."""
        with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip gradients by their global norm and return it."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return a model's weights."""
        return self.unwrap_model(model).state_dict()

    def free_memory(self, *objects: Prepared) -> tuple[Prepared, ...]:
        """Forget prepared objects; none are held."""
        return objects

    def end_training(self) -> None:
        """Finish trackers and process groups; Lightning owns both."""
