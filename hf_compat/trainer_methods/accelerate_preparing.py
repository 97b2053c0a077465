"""What a script hands to `accelerator.prepare`, and what a fit trains beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from hf_compat.checkpoint.model_state import ModelState
from hf_compat.data.loader import LoaderOptions, OpenPasses, PreparedDataLoader
from hf_compat.data.rank_slices import RankSlice
from hf_compat.data.types import Batch, DataSource
from hf_compat.engine.precision import wrap_forward
from hf_compat.hf.accelerator_config import AcceleratorConfig
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.optim.prepared import Prepared, PreparedOptimizer, PreparedScheduler, unprepared
from hf_compat.trainer_methods.accelerate_states import StateMembers

# Options of Accelerate's that change nothing here.
Unused: TypeAlias = Any


def _is_never(_: nn.Module) -> bool:
    return False  # no lambda: native modules hold this object, and pickle finds a function by its name


class PreparingMembers(StateMembers):
    """What makes loaders, models, optimizers and schedules of the script's own work beside the engine's."""

    _args: TrainingArguments
    mixed_precision: str
    rank_slice: RankSlice
    sync_gradients: bool
    passes: OpenPasses
    run_backward: Callable[..., None] | None
    unscale: Callable[[Prepared], None] | None

    def _begin_unprepared(self) -> None:
        # what a script has prepared, and what a fit trains
        self._models: list[Prepared] = []
        self._optimizers: list[Prepared] = []
        self._schedulers: list[Prepared] = []
        self._dataloaders: list[Prepared] = []
        self._trained_optimizer: Prepared = None
        self.is_trained_by_engine: Callable[[nn.Module], bool] = _is_never
        self._begin_without_states()

    @property
    def dataloader_config(self) -> AcceleratorConfig:
        """How data is loaded across processes: `accelerator_config` of the arguments."""
        return AcceleratorConfig.from_any(self._args.accelerator_config)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is split between the processes."""
        return self.dataloader_config.split_batches

    def _half_precision(self) -> torch.dtype | None:
        raise NotImplementedError

    def prepare(self, *objects: Prepared, device_placement: list[bool] | None = None) -> Prepared:
        """Prepare loaders, models, optimizers and schedules of the script's own; the engine prepares what it trains."""
        prepared = [self._prepare_one(one) for one in objects if not hasattr(one, "get_last_lr")]
        made = iter(prepared)  # schedules come last: they follow the optimizers
        found = tuple(self.prepare_scheduler(one) if hasattr(one, "get_last_lr") else next(made) for one in objects)
        return found if len(found) != 1 else found[0]

    def _prepare_one(self, candidate: Prepared) -> Prepared:
        if isinstance(candidate, DataLoader):
            return self.prepare_data_loader(candidate)
        if isinstance(candidate, nn.Module):
            return self.prepare_model(candidate)
        return self.prepare_optimizer(candidate) if isinstance(candidate, torch.optim.Optimizer) else candidate

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Put a further model on the device and under the run's precision; of several processes, into DDP.

        Args:
            model: A reference or reward model, a discriminator; the Trainer's own is left to the engine.
            device_placement: False leaves it where it is.
            evaluation_mode: It is not trained: DDP is left out.
        """
        if self.is_trained_by_engine(model):
            return model if device_placement is False else model.to(self.device)
        if device_placement is not False and not self.verify_device_map(model):
            model = model.to(self.device)
        if self._half_precision() is not None:
            wrap_forward(model, {"bf16": "bf16-mixed", "fp16": "16-mixed"}[self.mixed_precision], self.device.type)
        self._note(self._models, model)
        is_wrapped = isinstance(model, DistributedDataParallel)
        return (
            self._in_ddp(model)
            if (self.use_distributed and not is_wrapped and any(one.requires_grad for one in model.parameters()))
            and not evaluation_mode
            else model
        )

    def _in_ddp(self, model: nn.Module) -> nn.Module:
        unused = self._args.ddp_find_unused_parameters
        place = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, place, find_unused_parameters=True if unused is None else unused)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a model, or a part of it, stands on several devices by its `hf_device_map`."""
        return any(len(getattr(part, "hf_device_map", None) or ()) > 1 for part in model.modules())

    def prepare_optimizer(self, optimizer: Prepared, device_placement: bool | None = None) -> Prepared:
        """Let an optimizer of the script's own step where an update ends, and not at each micro-batch."""
        if optimizer is not self._trained_optimizer and not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer = PreparedOptimizer(optimizer, self)
        return self._note(self._optimizers, optimizer)

    def prepare_scheduler(self, scheduler: Prepared) -> Prepared:
        """Let a schedule of the script's own step with its optimizer."""
        if not isinstance(scheduler, PreparedScheduler):
            followed = [one for one in self._optimizers if isinstance(one, PreparedOptimizer)]
            own = [one for one in followed if one.optimizer is getattr(scheduler, "optimizer", None)]
            scheduler = PreparedScheduler(scheduler, own or followed, self)
        return self._note(self._schedulers, scheduler)

    def take_up(self, held: ModelState, optimizer: object, scheduler: object) -> None:
        """List what a fit trains before what the script has prepared.

        Args:
            held: The model, and what reads and writes its state.
            optimizer: Its optimizer.
            scheduler: Its schedule.
        """
        self._optimizers[:] = [one for one in self._optimizers if unprepared(one) is not optimizer]
        self._models[:] = [held.model, *(one for one in self._models if one is not held.model)]
        self._optimizers.insert(0, optimizer)
        self._trained_state, self._trained_optimizer, self._trained_schedule = held, optimizer, scheduler

    def leave_fit(self) -> None:
        """Go on without the engine's passes; what was trained stays listed."""
        self.run_backward = self.unscale = None
        self.sync_gradients = True

    @staticmethod
    def _note(held: list[Prepared], candidate: Prepared) -> Prepared:
        if not any(candidate is one for one in held):
            held.append(candidate)
        return candidate

    def prepare_data_loader(self, loader: DataLoader[Batch], **kwargs: Unused) -> PreparedDataLoader:
        """Make a loader like the Trainer's own: one batch ahead, on the device, seeded shuffling."""
        if isinstance(loader, PreparedDataLoader):
            return loader
        chosen: dict[str, Any]
        if isinstance(loader.dataset, IterableDataset):
            chosen = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader.batch_sampler is None:  # the data set is asked for a batch at a time
            chosen = {"batch_size": None, "sampler": loader.sampler}
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
            passes=self.passes,
            **options.keywords(),
            **chosen,
        )
