"""The part of `accelerate.Accelerator` that Trainer subclasses use.

Its engine is Lightning's. Accelerate's own code saves and loads the states of prepared objects.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from hf_compat.checkpoint.model_state import ModelState, PlainState, make_model_state
from hf_compat.checkpoint.reading import read_torch_file
from hf_compat.data.loader import OpenPasses, PreparedDataLoader, options_of
from hf_compat.data.order import RankSlice
from hf_compat.data.types import Batch, DataSource
from hf_compat.engine.strategies import unwrap_forward, wrap_forward
from hf_compat.engine.windows import CompiledMicroBatches
from hf_compat.errors import ArgumentError, CheckpointError, UnsupportedArgument, warn_once
from hf_compat.hf.argument_values import AcceleratorConfig
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.process_state import (
    OfAccelerate,
    ProcessMembers,
    ProcessState,
    as_distributed_type,
    has_state,
    may_be_asked,
    of_accelerate,
    share_accelerator,
    share_processes,
)
from hf_compat.interop.deepspeed import exchanging_sequences
from hf_compat.interop.transformers_models import is_spread
from hf_compat.optim.prepared import Prepared, PreparedOptimizer, unwrap_optimizer
from hf_compat.plan.deepspeed import deepspeed_config, uses_deepspeed, zero_stage
from hf_compat.plan.parallelism import SequencePlan
from hf_compat.runtime import collectives as processes
from hf_compat.runtime.inspection import delegated, is_replaced
from hf_compat.runtime.launch import environment
from hf_compat.runtime.meshes import clip_on_meshes
from hf_compat.runtime.nested import Nested, leaves, slice_nested
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.seeding import LEGACY_GLOBALS
from hf_compat.runtime.text import need

# Options of Accelerate's that change nothing here.
Unused: TypeAlias = Any


class DeepSpeedPlugin:
    """`accelerator.state.deepspeed_plugin`, with the stage and configuration for models that a script prepares itself.

    Mirrors:
        `accelerate.utils.DeepSpeedPlugin`, 1.15, as far as libraries read it.
    """

    selected = True  # Accelerate looks for the active one

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args

    @functools.cached_property
    def deepspeed_config(self) -> dict[str, object]:
        """DeepSpeed's configuration, each `auto` resolved."""
        with warnings.catch_warnings(action="ignore"):  # the training itself warns
            config = deepspeed_config(self._args, environment)
        size = self._args.per_device_train_batch_size
        return {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": size, **config}

    @property
    def zero_stage(self) -> int:
        """ZeRO's stage."""
        return zero_stage(self.deepspeed_config)

    def is_zero3_init_enabled(self) -> bool:
        """Whether `from_pretrained` makes models in parts."""
        return self.zero_stage == 3

    zero3_init_flag = property(is_zero3_init_enabled)


class AcceleratorState(ProcessState):
    """`accelerator.state`.

    Mirrors:
        `accelerate.state.AcceleratorState`, 1.15.
    """

    deepspeed_plugin: DeepSpeedPlugin | None = None
    deepspeed_plugins = fsdp_plugin = torch_tp_plugin = dynamo_plugin = None
    parallelism_config = device_mesh = None

    def __init__(self, args: TrainingArguments) -> None:
        super().__init__(args)
        self.mixed_precision = args.mixed_precision
        options = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
        self.is_fsdp2 = bool(args.fsdp) and int(options.get("version", 2)) == 2
        if args.fsdp or uses_deepspeed(args, environment):
            self.distributed_type = as_distributed_type("FSDP" if args.fsdp else "DEEPSPEED")
            self.deepspeed_plugin = None if args.fsdp else DeepSpeedPlugin(args)
        # not by `setattr`, which accepts fields only
        vars(args)["deepspeed_plugin"] = self.deepspeed_plugin
        if may_be_asked():  # Accelerate's own state, one object for the whole process
            share_processes(args, self.distributed_type)
            share_accelerator(self.mixed_precision, self.deepspeed_plugin)


def _of_plugin(name: str, default: object) -> Any:
    """A property that is an option of gradient accumulation, to read and to write."""
    return property(
        lambda state: state.plugin_kwargs.get(name, default),
        lambda state, value: state.plugin_kwargs.update({name: value}),
    )


class GradientState:
    """`accelerator.gradient_state`, the position within an update and within the data.

    Mirrors:
        `accelerate.state.GradientState`, 1.15.
    """

    initialized = True
    is_xla_gradients_synced = False
    sync_gradients: bool = delegated("_accelerator.sync_gradients")  # whether this micro-batch is the update's last
    active_dataloader: Iterable[Batch] | None = delegated("_accelerator.loader")

    def __init__(self, accelerator: AcceleratorFacade) -> None:
        self._accelerator = accelerator
        self.plugin_kwargs: dict[str, int] = {}  # as in Accelerate's plugin, numbers and truth values

    num_steps: int = _of_plugin("num_steps", 1)  # micro-batches of which `accelerator.accumulate` makes an update
    adjust_scheduler: bool = _of_plugin("adjust_scheduler", False)  # whether schedules count micro-batches, too
    sync_with_dataloader: bool = _of_plugin("sync_with_dataloader", True)  # whether an update ends with the data

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether that loader has given its last batch."""
        return bool(getattr(self.active_dataloader, "end_of_dataloader", False))

    @property
    def remainder(self) -> int:
        """Samples of the last round that are not repetitions. -1 if unknown."""
        return int(getattr(self.active_dataloader, "remainder", -1))


Backward: TypeAlias = Callable[..., None]  # takes a loss, and options of torch's

# The alternatives to members of Accelerate's that are missing here.
INSTEAD = {
    "profile": 'pass a profiler: `lightning_options={"profiler": …}`',
    "maybe_context_parallel": "leave the context manager out, as devices never share a sequence here",
    "ddp_handler": "set the arguments `ddp_find_unused_parameters`, `ddp_bucket_cap_mb` and `ddp_broadcast_buffers`",
    "lomo_backward": "set `optim='lomo'`, and the engine does it",
    **dict.fromkeys(
        ("autocast_handler", "scaler_handler", "init_handler", "profile_handler"),
        "the arguments `bf16`, `fp16` and `ddp_timeout`, and `lightning_options`, set what it would",
    ),
}


class AcceleratorFacade(ProcessMembers):
    """The part of an `Accelerator` that subclasses of `transformers.Trainer` use. It also makes loaders.

    Mirrors:
        `accelerate.Accelerator`, 1.15, with these members and no others.
    """

    device_placement = step_scheduler_with_optimizer = True
    is_composable_parallelism_enabled = has_lomo_optimizer = fp8_enabled = False
    project_dir = logging_dir = None
    use_stateful_dataloader = has_fp8_handler = delayed_fp8_autocast = False
    fp8_backend = "NO"
    flag_tensor: torch.Tensor | None = None

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args
        # the objects that a script has prepared, and those that a fit trains
        self._models: list[Prepared] = []
        self._optimizers: list[Prepared] = []
        self._schedulers: list[Prepared] = []
        self._dataloaders: list[Prepared] = []
        # of the running fit, or of the last one
        self._trained_state: ModelState | None = None
        self._trained_optimizer: Prepared = None
        self._custom_objects: list[object] = []
        self._save_model_state_pre_hook: dict[int, Callable[..., None]] = OrderedDict()
        self._load_model_state_pre_hook: dict[int, Callable[..., None]] = OrderedDict()
        self.run_backward: Backward | None = None  # the engine's. Outside a fit, the loss's own
        self.compiled_update: CompiledMicroBatches | None = None
        self.is_trained_by_engine: Callable[[nn.Module], bool] | None = None
        config = AcceleratorConfig.from_any(args.accelerator_config)  # checks an object that was changed in place
        self.even_batches = config.even_batches
        self.mixed_precision = args.mixed_precision
        self.sync_gradients = True
        self.state = AcceleratorState(args)
        options = {name: getattr(config, name) for name in ("split_batches", "even_batches", "dispatch_batches")}
        self.rank_slice = RankSlice(rank=args.process_index, world_size=args.world_size, **options)
        self.sequence: SequencePlan | None = None  # how processes share sequences. A Trainer sets it
        self.passes = OpenPasses()
        self.parallelism_config = args.parallelism_config
        self.torch_device_mesh = None
        self.scaler: torch.amp.GradScaler | None = None
        self.unscale: Callable[[Prepared], None] | None = None  # removes the scale of the trained optimizer's gradients
        self.step = 0  # how often `accumulate` was entered
        self.log_with: list[object] = []
        self.trackers: list[object] = []
        self.gradient_state = GradientState(self)
        # The accumulation options that differ from their defaults, as in Accelerate's plugin
        usual = {"adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False}
        given = config.gradient_accumulation_kwargs or {}
        self.gradient_state.plugin_kwargs.update(
            {"num_steps": 1} | {name: given[name] for name in usual if given.get(name, usual[name]) != usual[name]}
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Name the alternative to a missing member."""
        way_out = INSTEAD.get(name, "use the Trainer, or Lightning's, which is `trainer.lightning_trainer`")
        raise AttributeError(f"The Accelerator here has no `{name}`: the engine is Lightning's.\n\nHint: {way_out}.")

    def deepspeed_ulysses_dl_adapter(self, dl: Iterable[Batch], model: nn.Module) -> Iterable[Batch]:
        """Let processes exchange the batches of a pass, so that each has its part of all their sequences.

        Mirrors:
            `accelerate.Accelerator.deepspeed_ulysses_dl_adapter`, 1.15. The groups are those of the running fit.
        """
        return dl if self.sequence is None else exchanging_sequences(dl, self._args.device)

    @property
    def native_amp(self) -> bool:
        """Whether the forward runs under autocast."""
        return self._half_precision() is not None

    @property
    def dataloader_config(self) -> AcceleratorConfig:
        """How data is loaded across ranks, by the argument `accelerator_config`."""
        held: object = self._args.accelerator_config
        return held if isinstance(held, AcceleratorConfig) else AcceleratorConfig.from_any(held)

    # The loader whose batches are gathered now. Its last round may hold samples twice.
    loader: Iterable[Batch] | None = delegated("passes.innermost")
    should_save_model: bool = delegated("is_main_process")  # whether this rank writes models
    # Micro-batches of which `accumulate` makes an update. By default 1, as the Trainer counts them itself.
    gradient_accumulation_steps: int = delegated("gradient_state.num_steps")
    distributed_type: str = delegated("state.distributed_type")
    deepspeed_plugin: object = delegated("state.deepspeed_plugin")
    fsdp_plugin: object = delegated("state.fsdp_plugin")
    is_fsdp2: bool = delegated("state.is_fsdp2")
    multi_device = ProcessMembers.use_distributed
    dispatch_batches: bool | None = delegated("dataloader_config.dispatch_batches")
    split_batches: bool = delegated("dataloader_config.split_batches")
    save_iteration: int = delegated("project_configuration.iteration")
    non_blocking: bool = delegated("dataloader_config.non_blocking")
    use_seedable_sampler: bool = delegated("dataloader_config.use_seedable_sampler")

    def backward(self, loss: torch.Tensor, learning_rate: Unused = None, **options: object) -> None:
        """Run the backward pass, through Lightning while it trains.

        Args:
            loss: A scalar.
            learning_rate: Has no effect. The engine knows LOMO's rate.
            options: Keywords of `torch.Tensor.backward`.
        """
        steps = self.gradient_state.plugin_kwargs.get("num_steps", 1)
        if steps != 1 and self.distributed_type != "DEEPSPEED":
            loss = loss / steps
        if self.run_backward is not None:
            self.run_backward(loss, **options)
        else:
            loss.backward(**options)  # type: ignore[no-untyped-call]  # torch's

    @property
    def is_alone(self) -> bool:
        """Whether `gather` and `pad_across_processes` return their input, as with one rank and no override."""
        names = ("gather", "pad_across_processes")
        return not processes.is_distributed() and not any(is_replaced(self, name, AcceleratorFacade) for name in names)

    gather = staticmethod(processes.gather)
    reduce = staticmethod(processes.reduce)
    pad_across_processes = staticmethod(processes.pad_across)

    def gather_for_metrics(self, input_data: Nested, use_gather_object: bool = False) -> Nested:
        """Join the data of all ranks, without samples that were repeated to fill a batch.

        Args:
            input_data: Nested tensors, or any other object.
            use_gather_object: Gather as objects. A list on every rank becomes one list.

        Mirrors:
            `accelerate.Accelerator.gather_for_metrics`, 1.15. At the end of the loader that is being read, results
            longer than the last round's samples are cut. This holds for a training loader, too.
        """
        as_objects = use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in leaves(input_data))
        ranks = self.rank_slice
        gathered = input_data if as_objects else ranks.once_each(processes.gather(input_data))
        if as_objects and processes.is_distributed():
            gathered = [item for part in processes.gather_objects(input_data)[:: ranks.sharing] for item in part]
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return gathered
        if as_objects:
            with contextlib.suppress(TypeError, KeyError):  # as upstream, what has no slices stays whole
                return gathered[: state.remainder]
            return gathered
        return slice_nested(gathered, 0, state.remainder)

    def _half_precision(self) -> torch.dtype | None:
        """Precision of autocast. None in full precision, and for float16 on the CPU."""
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
        """Leave gradients of a wrapped model unsynchronized."""
        with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
            yield

    def unscale_gradients(self, optimizer: Prepared = None) -> None:
        """Remove the scale of `fp16=True` from gradients, once an update. Without a scale do nothing."""
        if self.scaler is None:
            return
        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for one in map(unwrap_optimizer, self._optimizers if optimizer is None else given):
            if one is not self._trained_optimizer:
                self.scaler.unscale_(one)
            elif self.unscale is not None:
                self.unscale(one)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip gradients by their global norm, and return the norm. Scaled gradients lose their scale first."""
        if self.unscale is not None:
            self.unscale(self._trained_optimizer)
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.rank_slice.sharing > 1:  # some parameters are split, others whole
            return clip_on_meshes(parameters, max_norm, norm_type)
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def prepare(self, *objects: Prepared, device_placement: list[bool] | None = None) -> Prepared:
        """Prepare a script's own loaders, models, optimizers and schedules. The engine prepares its own."""

        def prepared(candidate: Prepared) -> Prepared:
            if isinstance(candidate, DataLoader):
                return self.prepare_data_loader(candidate)
            if isinstance(candidate, nn.Module):
                return self.prepare_model(candidate)
            return self.prepare_optimizer(candidate) if isinstance(candidate, torch.optim.Optimizer) else candidate

        made = iter([prepared(one) for one in objects if not hasattr(one, "get_last_lr")])
        # schedules come last, as they follow the optimizers
        found = tuple(self.prepare_scheduler(one) if hasattr(one, "get_last_lr") else next(made) for one in objects)
        return found if len(found) != 1 else found[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a further model to the device and set the run's precision. With several ranks, wrap it in DDP.

        Args:
            model: A reference or reward model, or a discriminator. The engine prepares the Trainer's own.
            device_placement: False leaves it where it is.
            evaluation_mode: The model is not trained, so it needs no DDP.
        """
        if self.is_trained_by_engine is not None and self.is_trained_by_engine(model):
            return model if device_placement is False else model.to(self.device)
        if device_placement is not False and not self.verify_device_map(model):
            model = model.to(self.device)
        if self._half_precision() is not None:
            wrap_forward(model, {"bf16": "bf16-mixed", "fp16": "16-mixed"}[self.mixed_precision], self.device.type)
        self._note(self._models, model)
        is_trained = not evaluation_mode and any(one.requires_grad for one in model.parameters())
        if not (self.use_distributed and is_trained) or isinstance(model, DistributedDataParallel):
            return model
        unused = self._args.ddp_find_unused_parameters
        place = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, place, find_unused_parameters=True if unused is None else unused)

    verify_device_map = staticmethod(is_spread)

    def prepare_optimizer(self, optimizer: Prepared, device_placement: bool | None = None) -> Prepared:
        """Let a script's own optimizer step at the end of an update, and not at each micro-batch."""
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            prepared = (one for one in self._optimizers if unwrap_optimizer(one) is optimizer)
            optimizer = next(prepared, None) or PreparedOptimizer(optimizer, self)
        return self._note(self._optimizers, optimizer)

    def prepare_scheduler(self, scheduler: Prepared) -> Prepared:
        """Let a script's own schedule step with its optimizers, once an update for each process, as Accelerate does.

        Raises:
            MissingPackage: Accelerate is not installed.
        """
        kind = need("accelerate.scheduler", "accelerate", "a schedule in `accelerator.prepare`").AcceleratedScheduler
        if not isinstance(scheduler, kind):
            if not has_state():
                share_processes(self._args, self.distributed_type)
            followed = [one for one in self._optimizers if isinstance(one, PreparedOptimizer)]
            own = [one for one in followed if one.optimizer is getattr(scheduler, "optimizer", None)]
            scheduler = kind(scheduler, own or followed, split_batches=self.split_batches)
            scheduler.gradient_state = self.gradient_state  # Accelerate's own does not know this run's updates
        return self._note(self._schedulers, scheduler)

    @staticmethod
    def _note(held: list[Prepared], candidate: Prepared) -> Prepared:
        if not any(candidate is one for one in held):
            held.append(candidate)
        return candidate

    def prepare_data_loader(self, loader: DataLoader[Batch], **kwargs: Unused) -> PreparedDataLoader:
        """Make a loader like the Trainer's own, which reads one batch ahead, shuffles by seed and moves batches."""
        if isinstance(loader, PreparedDataLoader):
            return loader
        # without a size and a sampler of batches, the data set gives a batch at a time
        chosen: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if loader.batch_size is None and loader.batch_sampler is not None:
            chosen = {"batch_sampler": loader.batch_sampler}
        elif not isinstance(loader.dataset, IterableDataset):
            chosen["sampler"] = loader.sampler
        return self.make_loader(loader.dataset, **options_of(loader), **chosen)

    def make_loader(self, dataset: DataSource, **options: Any) -> PreparedDataLoader:
        """Make a loader for this rank according to the arguments. The options are those of torch's `DataLoader`."""
        config = self.dataloader_config
        return PreparedDataLoader(
            dataset,
            device=self.device,
            non_blocking=config.non_blocking,
            seed=self._args.data_seed,
            use_seedable_sampler=config.use_seedable_sampler,
            rank_slice=self.rank_slice,
            passes=self.passes,
            **options,
        )

    def skip_first_batches(self, dataloader: DataLoader[Batch], num_batches: int = 0) -> DataLoader[Batch]:
        """Make a loader that begins after some batches. It does not read them from a map-style set."""
        loader = copy.copy(self.prepare_data_loader(dataloader))
        loader.__dict__["skip_batches"] = loader.skip_batches + num_batches
        return loader

    def log(self, values: Mapping[str, object], step: int | None = None, log_kwargs: Unused = None) -> None:
        """Warn that nothing is logged, as upstream's Trainer gives the Accelerator no trackers."""
        warn_once("`accelerator.log` has no tracker to log to. Log with `trainer.log({…})` or `report_to`.")

    @functools.cached_property
    def project_configuration(self) -> object:
        """Accelerate's `ProjectConfiguration`. Without a folder, so pass one to `save_state` and `load_state`."""
        return need("accelerate.utils", "accelerate", "`accelerator.project_configuration`").ProjectConfiguration()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of an optimizer was skipped because of gradients that are not finite."""
        return any(getattr(one, "step_was_skipped", False) for one in self._optimizers)

    def take_up(self, held: ModelState, optimizer: Prepared) -> Prepared:
        """List the objects that a fit trains before those that the script has prepared.

        Returns:
            The optimizer as callbacks and scripts see it: torch's are wrapped, as by Accelerate.
        """
        for one in list(self._optimizers):
            if unwrap_optimizer(one) is optimizer:
                self._optimizers.remove(one)
        seen = optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            seen = PreparedOptimizer(optimizer, self, is_trained=True)
        if held.model in self._models:
            self._models.remove(held.model)
        self._models.insert(0, held.model)
        self._optimizers.insert(0, seen)
        self._trained_state, self._trained_optimizer = held, optimizer
        return seen

    def free_memory(self, *objects: Prepared) -> tuple[Prepared, ...]:
        """Forget prepared objects."""
        for held in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            held.clear()
        self._trained_optimizer = self._trained_state = None
        self.step = 0
        return (None,) * len(objects)

    clear = free_memory

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: Unused = None
    ) -> nn.Module:
        """Take the wrappers of compilation and parallelism off a model, unless it is compiled in place.

        Args:
            model: The model.
            keep_fp32_wrapper: False also takes its forward out of autocast.
            keep_torch_compile: Has no effect.
        """
        model = getattr(model, "_orig_mod", model)
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            model = model.module
        model = getattr(model, "_orig_mod", model)
        if not keep_fp32_wrapper:
            unwrap_forward(model)
        return model

    def _held(self, model: nn.Module) -> ModelState:
        """Find the reader and writer of a model's weights."""
        own, trained = self.unwrap_model(model), self._trained_state
        return trained if trained is not None and trained.model is own else make_model_state(own)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Give a model's weights. Sharded weights are gathered to the first rank. `unwrap` leaves out names of DDP."""
        is_wrapped = isinstance(model, DistributedDataParallel) and not unwrap
        return model.state_dict() if is_wrapped else self._held(model).whole_weights()

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: object,
    ) -> Path:
        """Write models, optimizers, schedules, the gradient scaler, registered objects and random states to a folder.

        Every rank calls it. Within a fit, the trained objects come first. `trainer.state` and the training's own
        schedule are not saved, as under transformers. Keywords of DeepSpeed's own saving are refused.

        Raises:
            ArgumentError: No folder, or a keyword of DeepSpeed's.
            MissingPackage: Accelerate is not installed.
            UnsupportedArgument: A model is sharded by FSDP 2 or DeepSpeed.

        Mirrors:
            `accelerate.Accelerator.save_state`, 1.15, which this calls.
        """
        if output_dir is None or save_model_func_kwargs:
            what = "no `output_dir`" if output_dir is None else ", ".join(save_model_func_kwargs)
            raise ArgumentError(f"`accelerator.save_state` got {what}.\n\nHint: pass the folder, and nothing else.")
        folder = os.path.expanduser(local_path("output_dir", output_dir))
        if not self._models:
            warn_once("`accelerator.save_state` saves no model, as none is prepared and none is trained yet.")
        self._check_whole_models()
        of_accelerate(self, "save_state")(folder, safe_serialization)
        return Path(folder)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, object] | None = None,
        **load_model_func_kwargs: object,
    ) -> None:
        """Load a folder that `save_state` has written, this one or Accelerate's. Every rank calls it.

        Raises:
            ArgumentError: No folder.
            CheckpointError: The folder does not exist, or a file that is not safetensors is damaged or holds other
                objects than tensors and plain containers. Nothing is loaded then.
            MissingPackage: Accelerate is not installed.
            UnsupportedArgument: A model is sharded by FSDP 2 or DeepSpeed.

        Mirrors:
            `accelerate.Accelerator.load_state`, 1.15, which this calls.
        """
        if input_dir is None:
            raise ArgumentError("`accelerator.load_state` got no `input_dir`.\n\nHint: pass the folder.")
        folder = os.path.expanduser(local_path("input_dir", input_dir))
        if not os.path.isdir(folder):
            raise CheckpointError(f"{folder} is not a folder.\n\nHint: name one that `save_state` has written.")
        self._check_whole_models()
        for name in sorted(os.listdir(folder)):
            if name.endswith((".bin", ".pkl")):  # Accelerate unpickles states of registered objects with their code
                read_torch_file(os.path.join(folder, name), allowed=LEGACY_GLOBALS)
        of_accelerate(self, "load_state")(folder, load_kwargs, **load_model_func_kwargs)
        if not os.path.isfile(os.path.join(folder, f"random_states_{self.process_index}.pkl")):
            warn_once(f"{folder} has no random states of process {self.process_index}. The present ones stay.")

    def _check_whole_models(self) -> None:
        """Refuse models that are sharded, which Accelerate would look for in plugins of its own."""
        if not all(isinstance(self._held(model), PlainState) for model in self._models):
            raise UnsupportedArgument(
                "`accelerator.save_state` and `load_state` do not know the states of FSDP 2 and DeepSpeed.\n\n"
                "Hint: `trainer._save_checkpoint(trainer.model, None)` writes them, and "
                "`trainer.train(resume_from_checkpoint=…)` loads them."
            )


# Methods that are Accelerate's own.
for _name in (
    *("save", "save_model", "register_for_checkpointing"),
    *("register_save_state_pre_hook", "register_load_state_pre_hook"),
    *("init_trackers", "get_tracker", "end_training"),
    *("accumulate", "join_uneven_inputs", "trigger_sync_in_backward", "_do_sync"),
    *("clip_grad_value_", "set_trigger", "check_trigger"),
):
    setattr(AcceleratorFacade, _name, OfAccelerate(_name))
