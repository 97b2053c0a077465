"""The part of `accelerate.Accelerator` that Trainer subclasses use. HF words and torch only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeAlias

import safetensors.torch
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from hf_compat.data.loader import LoaderOptions, PreparedDataLoader
from hf_compat.data.rank_slices import RankSlice
from hf_compat.data.tree import truncate_to
from hf_compat.data.types import Batch, DataSource
from hf_compat.errors import warn_once
from hf_compat.hf.accelerator_config import AcceleratorConfig
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.process_state import ProcessMembers
from hf_compat.runtime import collectives as processes
from hf_compat.runtime.nested import Nested
from hf_compat.trainer_methods.accelerate_state import AcceleratorState, GradientState

# What scripts hand to `prepare`: loaders, models, optimizers, schedules.
Prepared: TypeAlias = Any
# Options of Accelerate's that change nothing here.
Unused: TypeAlias = Any


# Members of Accelerate's that would work beside Lightning's trainer: what does the same here.
INSTEAD = {
    "save_state": "`trainer._save_checkpoint(trainer.model, None)` writes a whole checkpoint",
    "load_state": "`trainer.train(resume_from_checkpoint=…)` loads one",
    "save_model": "use `trainer.save_model(…)`",
    "register_for_checkpointing": "a callback that is an `ExportableState` keeps its state in checkpoints",
    "unscale_gradients": "clip in `on_pre_optimizer_step`, where gradients are unscaled",
    "profile": 'pass a profiler: `lightning_options={"profiler": …}`',
    "step": "the engine steps the optimizer",
}


class AcceleratorFacade(ProcessMembers):
    """Answer like an `Accelerator` where subclasses of `transformers.Trainer` ask it something.

    It also says which slice of the data this rank gets.

    Args:
        args: The training arguments.
        run_backward: Backward pass of the engine; the loss's own outside a fit.

    Mirrors:
        `accelerate.Accelerator`, 1.15: the members listed below and no others.
    """

    _args: TrainingArguments

    # as upstream's Trainer sets its Accelerator up: the Trainer counts the micro-batches itself
    gradient_accumulation_steps = 1
    device_placement = step_scheduler_with_optimizer = True
    is_composable_parallelism_enabled = has_lomo_optimizer = fp8_enabled = False
    project_dir = logging_dir = None
    save_iteration = 0

    def __init__(self, args: TrainingArguments, run_backward: Callable[[torch.Tensor], None] | None = None) -> None:
        self._args = args
        self.run_backward = run_backward
        self.even_batches = self.dataloader_config.even_batches
        self.mixed_precision = args.mixed_precision
        self.sync_gradients = True
        self.state = AcceleratorState(args)
        self.rank_slice = self._rank_slice()
        # the loader whose batches are gathered now: its last round may hold samples twice
        self.loader: Iterable[Batch] | None = None
        self.parallelism_config = args.parallelism_config
        self.torch_device_mesh = None
        self.scaler: torch.amp.GradScaler | None = None
        self.optimizer_step_was_skipped = False
        # what a script has prepared, and what a fit trains
        self._models: list[Prepared] = []
        self._optimizers: list[Prepared] = []
        self._schedulers: list[Prepared] = []
        self._dataloaders: list[Prepared] = []
        self._taken_up: tuple[object, ...] = ()
        self.trackers: list[object] = []
        self.gradient_state = GradientState(self)

    def __getattr__(self, name: str) -> NoReturn:
        """Say what to use in the place of a member that is not here.

        Raises:
            AttributeError: Always.
        """
        way_out = INSTEAD.get(name, "ask the Trainer, or Lightning's through `trainer.lightning_trainer`")
        raise AttributeError(f"The Accelerator here has no `{name}`: the engine is Lightning's.\n\nHint: {way_out}.")

    @property
    def distributed_type(self) -> str:
        """By what the processes train together: `NO`, `MULTI_CPU`, `MULTI_GPU`, `FSDP`, `DEEPSPEED`."""
        return self.state.distributed_type

    @property
    def deepspeed_plugin(self) -> object:
        """DeepSpeed's stage and configuration, as the arguments have them; None without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def fsdp_plugin(self) -> object:
        """None: FSDP's options are those of the arguments."""
        return self.state.fsdp_plugin

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP 2 shards the model."""
        return self.state.is_fsdp2

    @property
    def native_amp(self) -> bool:
        """Whether the forward runs under autocast."""
        return self._half_precision() is not None

    @property
    def multi_device(self) -> bool:
        """Whether several processes train together."""
        return self.use_distributed

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is split between the processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the first process reads the data for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of samples depends on the seed and the epoch alone."""
        return self.dataloader_config.use_seedable_sampler

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

    def backward(self, loss: torch.Tensor, **kwargs: Unused) -> None:
        """Run the backward pass, through Lightning while it trains."""
        if self.run_backward is not None:
            self.run_backward(loss)
        else:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch's

    def prepare(self, *objects: Prepared) -> Prepared:
        """Prepare data loaders; put models on the device; the engine prepares what it trains, so that is returned."""
        prepared = tuple(self._prepare_one(candidate) for candidate in objects)
        return prepared if len(prepared) != 1 else prepared[0]

    def _prepare_one(self, candidate: Prepared) -> Prepared:
        if isinstance(candidate, DataLoader):
            return self.prepare_data_loader(candidate)
        if isinstance(candidate, nn.Module):
            return self.prepare_model(candidate)
        if isinstance(candidate, torch.optim.Optimizer):
            return self.prepare_optimizer(candidate)
        return self.prepare_scheduler(candidate) if hasattr(candidate, "get_last_lr") else candidate

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, **kwargs: Unused) -> nn.Module:
        """Put a further model (a reference or reward model) on the device."""
        self._note(self._models, model)
        return model if device_placement is False else model.to(self.device)

    def prepare_optimizer(self, optimizer: Prepared, **kwargs: Unused) -> Prepared:
        """Return an optimizer of the script's own as it is."""
        return self._note(self._optimizers, optimizer)

    def prepare_scheduler(self, scheduler: Prepared) -> Prepared:
        """Return a schedule of the script's own as it is."""
        return self._note(self._schedulers, scheduler)

    def take_up(self, model: nn.Module, optimizer: object, scheduler: object) -> None:
        """List what a fit trains before what the script has prepared, as long as the fit lasts."""
        self.give_back()
        self._models.insert(0, model)
        self._optimizers.insert(0, optimizer)
        self._schedulers.insert(0, scheduler)
        self._taken_up = (model, optimizer, scheduler)

    def give_back(self) -> None:
        """Take what a fit has trained off the lists."""
        for held in (self._models, self._optimizers, self._schedulers):
            held[:] = [one for one in held if not any(one is taken for taken in self._taken_up)]
        self._taken_up = ()

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
            **options.keywords(),
            **chosen,
        )

    def unwrap_model(self, model: nn.Module, **kwargs: Unused) -> nn.Module:
        """Return the model inside wrappers of compilation and parallelism."""
        model = getattr(model, "_orig_mod", model)
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
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

    def _half_precision(self) -> torch.dtype | None:
        """Return what autocast computes in; None in full precision, and for float16 on the CPU."""
        if self.mixed_precision == "fp16" and self.device.type == "cpu":
            return None
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mixed_precision)

    @contextlib.contextmanager
    def autocast(self, *args: Unused, **kwargs: Unused) -> Iterator[None]:
        """Run under the arguments' mixed precision."""
        dtype = self._half_precision()
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

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each entry of the gradients."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Leave the gradients of wrapped models unsynchronised until the update's last micro-batch."""
        with contextlib.ExitStack() as stack:
            if not self.sync_gradients:
                for model in models:
                    stack.enter_context(self.no_sync(model))
            yield

    def log(self, values: Mapping[str, object], step: int | None = None, log_kwargs: Unused = None) -> None:
        """Log nothing, with a warning: the Accelerator has no trackers, as upstream's Trainer sets it up."""
        warn_once("`accelerator.log` has no tracker to log to. Log with `trainer.log({…})` or `report_to`.")

    def init_trackers(self, project_name: str, config: Unused = None, init_kwargs: Unused = None) -> None:
        """Begin nothing: `report_to` says what logs."""

    def get_tracker(self, name: str, unwrap: bool = False) -> NoReturn:
        """Refuse: there are no trackers.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{name} is not a tracker of the Accelerator.\n\nHint: `report_to`, or a callback, logs here.")

    def save(self, obj: Prepared, f: str, safe_serialization: bool = False) -> None:
        """Write an object with `torch.save`, or tensors with safetensors, from the first process."""
        if self.is_main_process:
            safetensors.torch.save_file(obj, f) if safe_serialization else torch.save(obj, f)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return a model's weights."""
        return self.unwrap_model(model).state_dict()

    def free_memory(self, *objects: Prepared) -> tuple[Prepared, ...]:
        """Forget prepared objects."""
        for held in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            held.clear()
        return tuple(None for _ in objects)

    clear = free_memory

    def end_training(self) -> None:
        """Finish trackers and process groups; Lightning owns both."""
