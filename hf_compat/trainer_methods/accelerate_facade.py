"""The part of `accelerate.Accelerator` that Trainer subclasses use."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, Protocol, TypeAlias

import safetensors.torch
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hf_compat.checkpoint.model_state import make_model_state
from hf_compat.data.loader import OpenPasses
from hf_compat.data.samplers import RankSlice
from hf_compat.data.tree import truncate_to
from hf_compat.data.types import Batch
from hf_compat.engine.precision import unwrap_forward
from hf_compat.errors import UnsupportedArgument, warn_once
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.process_state import (
    ProcessState,
    as_distributed_type,
    may_be_asked,
    share_accelerator,
    share_processes,
)
from hf_compat.optim.stepping import Prepared, unprepared
from hf_compat.plan.deepspeed import deepspeed_config, zero_stage
from hf_compat.runtime import collectives as processes
from hf_compat.runtime.inspection import is_replaced
from hf_compat.runtime.launch import launcher_variables
from hf_compat.runtime.nested import Nested, leaves
from hf_compat.trainer_methods.accelerate_states import PreparingMembers, Unused


class ReadingAccelerator(Protocol):
    """What the gradient state asks of the Accelerator."""

    sync_gradients: bool

    @property
    def loader(self) -> Iterable[Batch] | None:
        """The loader whose batches are gathered now."""


class DeepSpeedPlugin:
    """`accelerator.state.deepspeed_plugin`: the stage and the configuration, for models that a script prepares itself.

    Args:
        args: The training arguments.

    Mirrors:
        `accelerate.utils.DeepSpeedPlugin`, 1.15: what libraries read of it.
    """

    selected = True  # Accelerate looks for the one in force
    zero3_init_flag = False

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args

    @functools.cached_property
    def deepspeed_config(self) -> dict[str, object]:
        """DeepSpeed's configuration, each `auto` resolved."""
        with warnings.catch_warnings(action="ignore"):  # the training itself has them
            config = deepspeed_config(self._args, launcher_variables())
        size = self._args.per_device_train_batch_size
        return {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": size, **config}

    @property
    def zero_stage(self) -> int:
        """ZeRO's stage."""
        return zero_stage(self.deepspeed_config)


class AcceleratorState(ProcessState):
    """`accelerator.state`.

    Args:
        args: The training arguments.

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
        if args.deepspeed is not None or args.fsdp:
            self.distributed_type = as_distributed_type("FSDP" if args.fsdp else "DEEPSPEED")
            self.deepspeed_plugin = None if args.fsdp else DeepSpeedPlugin(args)
        # past the arguments' own `__setattr__`, which knows fields: this is no setting
        vars(args)["deepspeed_plugin"] = self.deepspeed_plugin
        if may_be_asked():  # Accelerate's own, which is one object for the whole process
            share_processes(args, self.distributed_type)
            share_accelerator(self.mixed_precision, self.deepspeed_plugin)


class GradientState:
    """`accelerator.gradient_state`: where the run stands within an update and within its data.

    Mirrors:
        `accelerate.state.GradientState`, 1.15.
    """

    initialized = True
    is_xla_gradients_synced = False

    def __init__(self, accelerator: ReadingAccelerator) -> None:
        self._accelerator = accelerator
        self.plugin_kwargs: dict[str, int] = {}  # as Accelerate's plugin has them: numbers and truth values

    @property
    def num_steps(self) -> int:
        """Micro-batches of which `accelerator.accumulate` makes an update."""
        steps: int = self.plugin_kwargs.get("num_steps", 1)
        return steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedules that are prepared count micro-batches, too."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether `accelerator.accumulate` ends an update with the data."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the update's last."""
        return self._accelerator.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, is_last: bool) -> None:
        self._accelerator.sync_gradients = is_last

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self._accelerator.sync_gradients = sync_gradients

    @property
    def active_dataloader(self) -> Iterable[Batch] | None:
        """The loader whose batches are gathered now."""
        return self._accelerator.loader

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is read."""
        return self._accelerator.loader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether that loader has given its last batch."""
        return bool(getattr(self._accelerator.loader, "end_of_dataloader", False))

    @property
    def remainder(self) -> int:
        """Samples of the last round that are no repetitions; -1 where unknown."""
        return int(getattr(self._accelerator.loader, "remainder", -1))


# The engine's backward pass: of a loss, with options of torch's.
Backward: TypeAlias = Callable[..., None]


# Members of Accelerate's that would work beside Lightning's trainer: what does the same here.
INSTEAD = {
    "profile": 'pass a profiler: `lightning_options={"profiler": …}`',
    "project_configuration": "pass the folder to `save_state` and `load_state`",
    "maybe_context_parallel": "a sequence is never shared between devices here; leave the context manager out",
    "ddp_handler": "set the arguments `ddp_find_unused_parameters`, `ddp_bucket_cap_mb` and `ddp_broadcast_buffers`",
    "lomo_backward": "`optim='lomo'` has the engine do it",
    **dict.fromkeys(
        ("autocast_handler", "scaler_handler", "init_handler", "profile_handler"),
        "the arguments `bf16`, `fp16` and `ddp_timeout`, and `lightning_options`, set what it would",
    ),
}


class AcceleratorFacade(PreparingMembers):
    """Answer like an `Accelerator` where subclasses of `transformers.Trainer` ask it something.

    It also says which slice of the data this rank gets.

    Args:
        args: The training arguments.
        run_backward: Backward pass of the engine; the loss's own outside a fit.

    Mirrors:
        `accelerate.Accelerator`, 1.15: the members listed below and no others.
    """

    _args: TrainingArguments

    device_placement = step_scheduler_with_optimizer = True
    is_composable_parallelism_enabled = has_lomo_optimizer = fp8_enabled = False
    project_dir = logging_dir = None
    use_stateful_dataloader = has_fp8_handler = delayed_fp8_autocast = False
    fp8_backend = "NO"
    flag_tensor: torch.Tensor | None = None

    def __init__(self, args: TrainingArguments, run_backward: Backward | None = None) -> None:
        self._args = args
        self.run_backward = run_backward
        self.even_batches = self.dataloader_config.even_batches
        self.mixed_precision = args.mixed_precision
        self.sync_gradients = True
        self.state = AcceleratorState(args)
        config = self.dataloader_config
        self.rank_slice = RankSlice(
            rank=self._args.process_index,
            world_size=self._args.world_size,
            split_batches=config.split_batches,
            even_batches=config.even_batches,
            dispatch_batches=config.dispatch_batches,
        )
        self.passes = OpenPasses()
        self.parallelism_config = args.parallelism_config
        self.torch_device_mesh = None
        self.scaler: torch.amp.GradScaler | None = None
        self.optimizer_step_was_skipped = False
        self._begin_unprepared()
        self.unscale: Callable[[Prepared], None] | None = None  # of the trained optimizer's gradients, where scaled
        self.step = 0  # how often `accumulate` was entered
        self.log_with: list[object] = []
        self.trackers: list[object] = []
        self.gradient_state = GradientState(self)
        # The options of accumulation that are set, as Accelerate's plugin has them
        usual = {"adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False}
        given = self.dataloader_config.gradient_accumulation_kwargs or {}
        self.gradient_state.plugin_kwargs.update(
            {"num_steps": 1} | {name: given[name] for name in usual if given.get(name, usual[name]) != usual[name]}
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Say what to use in the place of a member that is not here.

        Raises:
            AttributeError: Always.
        """
        way_out = INSTEAD.get(name, "ask the Trainer, or Lightning's through `trainer.lightning_trainer`")
        raise AttributeError(f"The Accelerator here has no `{name}`: the engine is Lightning's.\n\nHint: {way_out}.")

    @property
    def loader(self) -> Iterable[Batch] | None:
        """The loader whose batches are gathered now: its last round may hold samples twice."""
        return self.passes.innermost

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
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of which `accumulate` makes an update: 1, as the Trainer counts them itself."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = steps

    def backward(self, loss: torch.Tensor, learning_rate: Unused = None, **options: object) -> None:
        """Run the backward pass, through Lightning while it trains.

        Args:
            loss: A scalar.
            learning_rate: Of LOMO, whose rate the engine knows.
            options: Of `torch.Tensor.backward`: `retain_graph`, `create_graph`, `inputs`, `gradient`.
        """
        steps = self.gradient_state.num_steps
        if steps != 1 and self.distributed_type != "DEEPSPEED":
            loss = loss / steps
        if self.run_backward is not None:
            self.run_backward(loss, **options)
        else:
            loss.backward(**options)  # type: ignore[no-untyped-call]  # torch's

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: Unused = None
    ) -> nn.Module:
        """Return the model inside wrappers of compilation and parallelism.

        Args:
            model: The model.
            keep_fp32_wrapper: False also takes its forward out of autocast.
            keep_torch_compile: Changes nothing: the model is compiled in place, or is returned uncompiled.
        """
        model = getattr(model, "_orig_mod", model)
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            model = model.module
        model = getattr(model, "_orig_mod", model)
        if not keep_fp32_wrapper:
            unwrap_forward(model)
        return model

    @property
    def is_alone(self) -> bool:
        """Whether `gather` and `pad_across_processes` give what they get: one process, and nobody replaced them."""
        names = ("gather", "pad_across_processes")
        return not processes.is_distributed() and not any(is_replaced(self, name, AcceleratorFacade) for name in names)

    def gather(self, tensor: Nested) -> Nested:
        """Return what all processes hold, joined along the first dimension."""
        return processes.gather(tensor)

    def gather_for_metrics(self, input_data: Nested, use_gather_object: bool = False) -> Nested:
        """Return what all processes hold, without samples that were repeated to fill a batch.

        Args:
            input_data: Nested tensors, or anything else.
            use_gather_object: Gather as objects: a list on every process becomes one list.

        Mirrors:
            `accelerate.Accelerator.gather_for_metrics`, 1.15: at the end of the loader that is read now, a training's
            too, all that is longer than the last round's samples is cut.
        """
        as_objects = use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in leaves(input_data))
        gathered = _gathered_objects(input_data) if as_objects else processes.gather(input_data)
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return gathered
        if as_objects:
            return gathered[: state.remainder] if isinstance(gathered, Sequence) else gathered
        return truncate_to(gathered, state.remainder)

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

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """Let processes with fewer batches of the script's own wait for the others: DDP's `join`.

        Raises:
            UnsupportedArgument: `even_batches` is to change for loaders that are made.
        """
        if even_batches is not None and even_batches != self.even_batches:
            raise UnsupportedArgument(
                f"`join_uneven_inputs(even_batches={even_batches})` cannot change loaders that are made.\n\n"
                'Hint: set `accelerator_config={"even_batches": …}`.'
            )
        with contextlib.ExitStack() as stack:
            for model in joinables:
                if isinstance(model, DistributedDataParallel):
                    stack.enter_context(model.join())
            yield

    def trigger_sync_in_backward(self, model: nn.Module) -> None:
        """Exchange the gradients in the next backward pass, though `no_sync` was in force in its forward."""
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = True
            model.reducer.prepare_for_backward([])

    def unscale_gradients(self, optimizer: Prepared = None) -> None:
        """Take the scale of `fp16=True` out of gradients, once an update; without a scale do nothing."""
        if self.scaler is None:
            return
        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for one in self._optimizers if optimizer is None else given:
            if one is self._trained_optimizer and self.unscale is not None:
                self.unscale(one)
            elif one is not self._trained_optimizer:
                self.scaler.unscale_(unprepared(one))

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip gradients by their global norm and return it; scaled ones lose their scale first."""
        if self.unscale is not None:
            self.unscale(self._trained_optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each entry of the gradients; scaled ones lose their scale first."""
        if self.unscale is not None:
            self.unscale(self._trained_optimizer)
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Count a micro-batch of `gradient_accumulation_steps`, and exchange gradients in the last of them only.

        With 1, which is the default, every micro-batch is the last: `sync_gradients` is True from there on, as under
        transformers' Trainer.
        """
        state = self.gradient_state
        ends = state.sync_with_dataloader and state.end_of_dataloader
        self.step = 0 if ends else self.step + 1
        self.sync_gradients = ends or self.step % state.num_steps == 0
        with contextlib.ExitStack() as stack:
            if not (self.sync_gradients or state.plugin_kwargs.get("sync_each_batch", False)):
                for model in models:
                    stack.enter_context(self.no_sync(model))
            yield

    def set_trigger(self) -> None:
        """Set a flag that `check_trigger` finds on all processes."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return whether a process has set the flag, and take it back; every process calls it."""
        flag = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        self.flag_tensor = torch.tensor(0, device=self.device)
        return bool(processes.reduce(flag).item() >= 1)

    def skip_first_batches(self, dataloader: DataLoader[Batch], num_batches: int = 0) -> DataLoader[Batch]:
        """Return a loader that begins after so many batches, which are not read where the data set has places."""
        loader = copy.copy(self.prepare_data_loader(dataloader))
        loader.__dict__["skip_batches"] = loader.skip_batches + num_batches
        return loader

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

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes models."""
        return self.is_main_process

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights to a folder, in shards where they are larger; the first process writes.

        Args:
            model: Wrapped or not.
            save_directory: The folder; made where it is not there.
            max_shard_size: Largest file, bytes or a text such as `5GB`.
            safe_serialization: Write with safetensors.
        """
        weights = self.get_state_dict(model)
        if self.is_main_process:
            from huggingface_hub import save_torch_state_dict

            os.makedirs(save_directory, exist_ok=True)
            save_torch_state_dict(
                weights, str(save_directory), max_shard_size=max_shard_size, safe_serialization=safe_serialization
            )

    def save(self, obj: Prepared, f: str, safe_serialization: bool = False) -> None:
        """Write an object with `torch.save`, or tensors with safetensors, from the first process."""
        if self.is_main_process:
            safetensors.torch.save_file(obj, f) if safe_serialization else torch.save(obj, f)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return a model's weights; those that are sharded are gathered, and the first process gets them."""
        own = self.unwrap_model(model)
        trained = self._trained_state
        return (trained if trained is not None and trained.model is own else make_model_state(own)).whole_weights()

    def free_memory(self, *objects: Prepared) -> tuple[Prepared, ...]:
        """Forget prepared objects."""
        for held in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            held.clear()
        self._trained_optimizer = self._trained_schedule = self._trained_state = None
        self.step = 0
        return tuple(None for _ in objects)

    clear = free_memory

    def end_training(self) -> None:
        """Finish trackers and process groups; Lightning owns both."""


def _gathered_objects(data: Nested) -> Nested:
    """Return what all processes hold as one list; what the only process holds, as it is."""
    return [item for part in processes.gather_objects(data) for item in part] if processes.is_distributed() else data
