"""Translate arguments into a plan, which is frozen data, without starting a run or writing a file.

The translation also reads the launcher's environment variables, and the JSON files that `deepspeed`, `fsdp_config` and
`accelerate launch` name.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_compat.errors import ArgumentError, DataError, InertArgumentWarning, UnsupportedArgument, warn_inert, warn_user
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.rows import RunParts
from hf_compat.hf.state import TrainerState
from hf_compat.interop.arguments import as_our_arguments
from hf_compat.interop.deepspeed import is_partitioned
from hf_compat.interop.transformers_models import is_pretrained_model, is_sharded_when_loaded
from hf_compat.plan.argument_support import PRECISIONS, InertSetting, check_supported, in_one_line, inert_settings
from hf_compat.plan.deepspeed import Config, deepspeed_config, tensor_ranks_of, uses_deepspeed, zero_stage
from hf_compat.plan.fsdp import FsdpPlan, fsdp_plan, uses_fsdp
from hf_compat.plan.parallelism import SequencePlan, asked_sizes, check_shared_model, parallel_sizes, sequence_plan
from hf_compat.runtime.launch import environment, has_rendezvous
from hf_compat.runtime.meshes import tensor_ranks
from hf_compat.runtime.text import brief, did_you_mean, parse_switch, shown

StrategyName = Literal["one_device", "ddp", "fsdp2", "tensor_parallel", "deepspeed"]

PrecisionName = Literal["32-true", "bf16-mixed", "16-mixed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LightningPlan:
    """The settings of a run for Lightning."""

    device: str = "cpu"  # the one device of this process (`cpu`, `cuda:0`, `mps`)
    precision: PrecisionName = "32-true"  # Lightning's name of the precision. Autocast covers the model's forward.
    max_epochs: int = -1  # Maximum number of epochs. -1 limits only updates
    default_root_dir: str = "trainer_output"  # the output folder
    log_every_n_steps: int = 50  # updates between logs of Lightning loggers
    micro_batch_size: int = 8  # samples of a micro-batch
    micro_batches_per_update: int = 1  # micro-batches of an update, which is one Lightning batch
    # Norm to which the module clips. None does not clip. Lightning's own clipping stays off.
    gradient_clip_norm: float | None = 1.0
    # Updates between validations, as callbacks read it. None without validation. HF's flags start them, not this
    # interval.
    validate_every_updates: int | None = None
    deterministic: bool = False  # ask torch for deterministic algorithms
    strategy: StrategyName = "one_device"  # how several processes share the work
    strategy_options: Mapping[str, Any] = field(default_factory=dict)  # options of the strategy
    # exchange gradients after every micro-batch, not only the last of a window
    exchange_every_micro_batch: bool = False
    world_size: int = 1  # number of processes
    sharing: int = 1  # processes that hold parts of the same layers and read the same batches
    devices_per_node: int = 1  # processes on this machine

    @property
    def sequence(self) -> SequencePlan | None:
        """How processes share each sequence. None if each process has whole ones."""
        found: SequencePlan | None = self.strategy_options.get("sequence")
        return found

    def trainer_settings(self) -> dict[str, Any]:
        """The keywords of `lightning.Trainer`, without callbacks and strategy."""
        kind, _, index = self.device.partition(":")
        on_gpu = kind == "cuda"
        devices: int | list[int] = self.devices_per_node if self.world_size > 1 else 1
        if on_gpu:
            devices = list(range(self.devices_per_node)) if self.world_size > 1 else [int(index or 0)]
        nodes = max(self.world_size // self.devices_per_node, 1)
        validation: dict[str, int | None] = {}
        if self.validate_every_updates is not None:
            # an interval in batches, so that callbacks read their monitored metric after validations
            validation = {"val_check_interval": self.validate_every_updates, "check_val_every_n_epoch": None}
        return {
            **validation,
            **{"accelerator": "gpu" if on_gpu else kind, "devices": devices, "num_nodes": nodes},
            "max_epochs": self.max_epochs,
            "max_steps": -1,
            "default_root_dir": self.default_root_dir,
            "log_every_n_steps": self.log_every_n_steps,
            "deterministic": self.deterministic or None,
            "logger": False,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            "inference_mode": False,
        }


ENDLESS_EPOCHS = sys.maxsize


class RunCounts(NamedTuple):
    """The counts of one run, in the order of upstream's `set_initial_training_values`."""

    num_train_epochs: int  # Maximum number of epochs. `ENDLESS_EPOCHS` limits only updates.
    updates_per_epoch: int  # windows of an epoch, including a short last one
    num_examples: int  # samples of an epoch, as reported
    num_train_samples: float  # samples of the run, as reported
    total_train_batch_size: int  # samples of one update over all processes
    micro_batches_per_epoch: int  # micro-batches of an epoch, or of the whole run for endless data
    max_updates: int  # updates of the run

    @property
    def is_endless(self) -> bool:
        """Whether the data has no length. Such a run is one epoch, which only the number of updates ends."""
        return self.num_train_epochs == ENDLESS_EPOCHS


def make_run_counts(
    args: TrainingArguments, *, micro_batches: int | None, num_examples: int | None, total_train_batch_size: int
) -> RunCounts:
    """Count the updates, epochs and samples of a run.

    Raises:
        ArgumentError: The data has no length and `max_steps` is not set.
        DataError: The data is empty.

    Mirrors:
        `transformers.Trainer.set_initial_training_values`.
    """
    window, max_steps = args.gradient_accumulation_steps, args.max_steps
    samples: float = total_train_batch_size * max_steps
    if micro_batches is None:
        if max_steps <= 0:
            raise ArgumentError(
                f"The training data has no length, so `max_steps={max_steps}` leaves the end of training open: "
                "max_steps has to be specified.\n\nHint: set `max_steps` to the number of updates to train."
            )
        epochs, updates_per_epoch, updates = ENDLESS_EPOCHS, max_steps, max_steps
        num_examples, micro_batches = total_train_batch_size * max_steps, max_steps * window
    elif micro_batches == 0:
        raise DataError(
            "The training data set gives no batch.\n\n"
            "Hint: check its length. With `dataloader_drop_last=True` it must hold at least one full batch."
        )
    else:
        updates_per_epoch = math.ceil(micro_batches / window)
        # `max_steps` replaces the epochs. With `max_steps=0` the first update is the last, as upstream.
        updates = max_steps if max_steps >= 0 else math.ceil(args.num_train_epochs * updates_per_epoch)
        if max_steps > 0:
            epochs, samples = math.ceil(max_steps / updates_per_epoch), float(samples)
        else:
            epochs, samples = math.ceil(args.num_train_epochs), (num_examples or 0) * args.num_train_epochs
    return RunCounts(
        num_train_epochs=epochs,
        updates_per_epoch=updates_per_epoch,
        num_examples=num_examples or 0,
        num_train_samples=samples,
        total_train_batch_size=total_train_batch_size,
        micro_batches_per_epoch=micro_batches,
        max_updates=updates,
    )


def lightning_precision(mixed_precision: str) -> PrecisionName:
    """Translate HF's `mixed_precision` into Lightning's `precision`."""
    first_spellings = {hf_word: precision for precision, hf_word in reversed(PRECISIONS.items())}
    return cast(PrecisionName, first_spellings[mixed_precision])


def translate(
    args: TrainingArguments, counts: RunCounts | None = None, model: nn.Module | None = None
) -> LightningPlan:
    """Translate arguments into the settings of a Lightning trainer.

    Args:
        args: The training arguments.
        counts: Counts of the run, if its data is known. Otherwise the epochs come from the arguments.
        model: The model. Sizes of DeepSpeed and an option of DDP follow from it, and it may be sharded already.

    Raises:
        ArgumentError: Arguments, or the launcher's variables, that cannot work.
        UnsupportedArgument: An argument asks for a feature that is not supported yet.

    Examples:
        >>> plan = translate(TrainingArguments("out", bf16=True, use_cpu=True, gradient_accumulation_steps=4))
        >>> plan.precision, plan.micro_batches_per_update
        ('bf16-mixed', 4)
    """
    args = as_our_arguments(args)
    check_supported(args)
    compilation_of(args)  # it refuses backends and modes that torch does not know
    strategy, options = _strategy(args, model)
    # On the CPU Accelerate has neither autocast nor a scaler for float16
    is_full = args.mixed_precision == "fp16" and args.device.type == "cpu"
    plan = LightningPlan(
        device=str(args.device),
        precision=lightning_precision("no" if is_full else args.mixed_precision),
        max_epochs=-1 if args.max_steps > 0 else max(math.ceil(args.num_train_epochs), 1),
        default_root_dir=str(args.output_dir),
        log_every_n_steps=_updates_of(args.logging_steps or TrainerState.logging_steps, 1),
        micro_batch_size=args.train_batch_size,
        micro_batches_per_update=args.gradient_accumulation_steps,
        gradient_clip_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
        deterministic=args.full_determinism,
        strategy=strategy,
        exchange_every_micro_batch=exchanges_every_micro_batch(args),
        strategy_options=options,
        world_size=args.world_size,
        sharing=_sharing(args, model),
        devices_per_node=args._launch.local_world_size,
    )
    return plan if counts is None else with_counts(plan, args, counts)


def with_counts(plan: LightningPlan, args: TrainingArguments, counts: RunCounts) -> LightningPlan:
    """Add the intervals of a run whose data is known to a plan."""
    validate_every: int | None = None
    if args.eval_strategy == "epoch":
        validate_every = counts.updates_per_epoch
    elif args.eval_strategy == "steps":
        validate_every = _updates_of(args.eval_steps or TrainerState.eval_steps, counts.max_updates)
    return dataclasses.replace(
        plan,
        max_epochs=-1 if counts.num_train_epochs == ENDLESS_EPOCHS else counts.num_train_epochs,
        log_every_n_steps=_updates_of(args.logging_steps or TrainerState.logging_steps, counts.max_updates),
        validate_every_updates=validate_every,
    )


_values_of = attrgetter(*TrainingArguments.__dataclass_fields__)


class CurrentPlan:
    """The plan of a Trainer's arguments, which is translated again when they change.

    Rank 0 shows each warning once.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._seen = self._evaluated_with = ""
        self._plan = LightningPlan()

    def of(self, args: TrainingArguments, model: nn.Module | None = None) -> LightningPlan:
        """Translate the arguments' current values, if they have changed."""
        seen = repr([args.mixed_precision, args.device, args.world_size, *_values_of(args)])
        if self._seen != seen or self._plan.strategy != "one_device":
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._plan = translate(args, model=model)
            self._seen = seen
            for warning in caught:
                told = str(warning.message)
                if told not in self._told and args.process_index == 0:
                    warn_user(told, warning.category)
                self._told.add(told)
        return self._plan

    def tell_of_inert(self, args: TrainingArguments, parts: RunParts) -> None:
        """Say in one line which arguments have no effect, without those that were said before."""
        self._tell(inert_settings(args, parts))

    def tell_in_evaluation(self, args: TrainingArguments, make_parts: Callable[[], RunParts]) -> None:
        """Say which arguments have no effect in an evaluation, where they have changed since the last one."""
        if self._evaluated_with != self._seen:
            self._evaluated_with = self._seen
            self._tell(inert_settings(args, make_parts(), in_evaluation=True))

    def _tell(self, found: list[InertSetting]) -> None:
        found = [one for one in found if f"{one.name}: {one.why}" not in self._told]  # values may be a search's
        if found:
            self._told.update(f"{one.name}: {one.why}" for one in found)
            warn_user(f"Without effect in this run: {in_one_line(found)}.", InertArgumentWarning)


def _strategy(args: TrainingArguments, model: nn.Module | None) -> tuple[StrategyName, dict[str, Any]]:
    """Choose the strategy of a run and its options."""
    if parse_switch(environment, "ACCELERATE_USE_MEGATRON_LM"):
        raise UnsupportedArgument(
            "`accelerate launch --use_megatron_lm` is not supported yet.\n\nHint: leave it out (`accelerate config`)."
        )
    if tensor_ranks(model) > 1 or is_sharded_when_loaded(model):
        return _strategy_of_spread(args, environment, model)
    sizes = parallel_sizes(args, environment, None)
    in_parts = model is not None and is_partitioned(model)
    if uses_deepspeed(args, environment):
        resolved, sequence = _deepspeed_config(args, model)
        if in_parts and (stage := zero_stage(resolved)) != 3:
            raise ArgumentError(_IN_PARTS.format(f"the configuration asks for stage {stage}"))
        return "deepspeed", {"config": resolved} | ({} if sequence is None else {"sequence": sequence})
    if in_parts:
        raise ArgumentError(_IN_PARTS.format("`deepspeed` is not set"))
    if uses_fsdp(args, environment):
        return "fsdp2", {"plan": _plan_of_fsdp(args, environment, sizes)}
    config = args.fsdp_config
    # by default, arguments of 4.x and 5.0 have a dict of empty values and write it with every dump
    if any(config.values()) if isinstance(config, dict) else config:
        warn_inert(f"fsdp_config={brief(args.fsdp_config)}", "`fsdp` is off. Set `fsdp=True`")
    if args.world_size == 1:
        return "one_device", {}
    return "ddp", ddp_options(args, model)


def _deepspeed_config(args: TrainingArguments, model: nn.Module | None) -> tuple[Config, SequencePlan | None]:
    """Resolve DeepSpeed's configuration, and how processes share sequences."""
    if args.world_size == 1 and not has_rendezvous():
        raise ArgumentError(
            "`deepspeed` needs a launcher, and this process was started without one.\n\n"
            "Hint: `hf-compat run --devices 2 script.py …`, torchrun, or deepspeed."
        )
    config = deepspeed_config(args, environment, model)
    sequence = sequence_plan(args, environment)
    if sequence is None:
        return config, None
    if model is not None:
        check_shared_model(model, sequence)
    # as upstream, whatever the configuration has: processes that share sequences share their micro-batches
    groups = args.world_size // sequence.sp_size
    config["train_batch_size"] = (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * groups
    )
    return config, sequence


def _strategy_of_spread(
    args: TrainingArguments, variables: Mapping[str, str], model: nn.Module | None
) -> tuple[StrategyName, dict[str, Any]]:
    """The strategy for a model that is spread over processes before it is trained.

    Raises:
        ArgumentError: DeepSpeed would divide it again, or nothing exchanges the gradients of several such models.
    """
    split = tensor_ranks(model)
    if uses_deepspeed(args, variables):
        raise ArgumentError(
            "`deepspeed` is set, and the model's parameters are spread over processes already (`distributed_config`, "
            "`parallelize_module`).\n\n"
            "Hint: leave one of them out. DeepSpeed's key `tensor_parallel` splits layers, too."
        )
    if split == 1 or (model is not None and any(isinstance(module, FSDPModule) for module in model.modules())):
        return "fsdp2", {"plan": _plan_of_loaded(args, variables, model)}
    sizes = parallel_sizes(args, variables, split)
    is_fsdp = uses_fsdp(args, variables)
    if is_fsdp == (args.world_size > split):
        return ("fsdp2", {"plan": _plan_of_fsdp(args, variables, sizes)}) if is_fsdp else ("tensor_parallel", {})
    told = f"The model's layers are split between {split} processes, and the launcher has started {args.world_size}"
    raise ArgumentError(
        f"{told}: `fsdp` has none to shard over.\n\nHint: leave it out, or start a multiple of {split}."
        if is_fsdp
        else f"{told}: each of {args.world_size // split} models has its own batches.\n\n"
        "Hint: set `fsdp=True`, which exchanges their gradients, or load it with "
        f"`DistributedConfig(tp_size={split}, fsdp_size={args.world_size // split})`."
    )


def _sharing(args: TrainingArguments, model: nn.Module | None) -> int:
    """The number of processes that share each layer: of the model, or before it is known as the arguments ask."""
    asked = 1 if model is not None else asked_sizes(args, environment).get("tp_size", 1)
    return max(tensor_ranks(model), tensor_ranks_of(args, environment), asked)


def ddp_options(args: TrainingArguments, model: nn.Module | None) -> dict[str, Any]:
    """The options of DDP. By default it looks for unused parameters, unless transformers' model recomputes layers."""
    unused = args.ddp_find_unused_parameters
    if unused is None and model is not None:
        # transformers' models name it `is_gradient_checkpointing` in older releases, which warns in release 5
        recomputes = getattr(model, "is_activation_checkpointing", None)
        if recomputes is None:
            recomputes = getattr(model, "is_gradient_checkpointing", False)
        unused = not (is_pretrained_model(model) and (args.activation_checkpointing or recomputes))
    given = {
        "find_unused_parameters": unused,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    return {name: value for name, value in given.items() if value is not None}


_IN_PARTS = (
    "The model was made in parts (`deepspeed.zero.Init`, or `from_pretrained` under a configuration of ZeRO 3), and {}."
    "\n\nHint: set `deepspeed` to a configuration of ZeRO 3. Or make the model before it and without one, whole."
)


def _plan_of_fsdp(args: TrainingArguments, variables: Mapping[str, str], sizes: tuple[int, int] | None) -> FsdpPlan:
    plan = fsdp_plan(args, variables)
    if args.world_size == 1:
        raise ArgumentError(
            "`fsdp` shards a model over several processes, and the launcher has started one.\n\n"
            "Hint: `hf-compat run --devices 2 script.py …`, or torchrun."
        )
    return plan if sizes is None else dataclasses.replace(plan, hybrid=sizes[0] > 1, shard_size=sizes[1])


def _plan_of_loaded(args: TrainingArguments, variables: Mapping[str, str], model: nn.Module | None) -> FsdpPlan:
    """Plan for a model that `from_pretrained` has sharded. It warns if `fsdp_config` asks for other shards."""
    asked = fsdp_plan(args, variables) if uses_fsdp(args, variables) else FsdpPlan()
    loaded = getattr(getattr(model, "config", None), "distributed_config", None)
    plan = FsdpPlan(state_dict_type=asked.state_dict_type, cpu_offload=bool(getattr(loaded, "fsdp_cpu_offload", False)))
    if asked != dataclasses.replace(FsdpPlan(wrap=asked.wrap), state_dict_type=asked.state_dict_type):
        warn_user(
            f"`fsdp_config={brief(args.fsdp_config)}` counts for `state_dict_type` alone: `from_pretrained` has "
            "sharded the model.",
            InertArgumentWarning,
        )
    return plan


def exchanges_every_micro_batch(args: TrainingArguments) -> bool:
    """Whether `accelerator_config` asks for an exchange of gradients after every micro-batch."""
    options = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}  # an object by now
    return bool(options.get("sync_each_batch", False))


def _updates_of(interval: float, max_updates: int) -> int:
    """Convert an interval to updates. A value below 1 is a share of all updates, rounded up."""
    return int(interval) if interval >= 1 else max(math.ceil(interval * max_updates), 1)


_DYNAMO = "ACCELERATE_DYNAMO_"  # of variables


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """How a model is compiled. Mirrors `accelerate.utils.TorchDynamoPlugin`, 1.15."""

    backend: str  # a backend of torch or one that is registered with it
    mode: str = "default"  # the backend's mode
    fullgraph: bool = False  # refuse a model that splits into several graphs
    dynamic: bool | None = None  # Trace sizes as symbols. None lets torch decide.
    by_blocks: bool = False  # compile repeated blocks one by one, which starts sooner

    def keywords(self) -> dict[str, str | bool]:
        """The keywords of `torch.compile` that differ from its defaults."""
        default = Compilation(backend=self.backend, by_blocks=self.by_blocks)
        changed = dataclasses.asdict(self).items() - dataclasses.asdict(default).items()
        return {"backend": self.backend, **dict(changed)}


def compilation_of(args: TrainingArguments, of_update: bool = False) -> Compilation | None:
    """Read how the model is compiled, or with `of_update` the update. None if it is not."""
    is_asked = args.torch_compile or (of_update and args.compile_update)
    by_arguments = (args.torch_compile_backend or "inductor") if is_asked else None
    backend = (by_arguments or environment.get(_DYNAMO + "BACKEND") or "no").lower()
    if backend in ("no", "none"):
        return None
    name = "torch_compile_backend" if by_arguments else _DYNAMO + "BACKEND"
    known = sorted(torch.compiler.list_backends(exclude_tags=()))
    if backend not in known:
        hint = did_you_mean(backend, known, f"choose one of {', '.join(known)}.")
        raise ArgumentError(f"`{shown(name, backend)}` is not a backend of torch.compile.\n\nHint: {hint}")
    mode = args.torch_compile_mode or environment.get(_DYNAMO + "MODE") or "default"
    if backend == "inductor":
        name = "torch_compile_mode" if args.torch_compile_mode else _DYNAMO + "MODE"
        from torch._inductor import list_mode_options  # slow: only where something is compiled

        known = sorted(list_mode_options())
        if mode not in known:
            raise ArgumentError(
                f"`{shown(name, mode)}` is not a mode of torch.compile.\n\nHint: choose one of {', '.join(known)}."
            )
    dynamic = _DYNAMO + "USE_DYNAMIC"
    return Compilation(
        backend=backend,
        mode=mode,
        fullgraph=parse_switch(environment, _DYNAMO + "USE_FULLGRAPH"),
        dynamic=parse_switch(environment, dynamic) if dynamic in environment else None,
        by_blocks=parse_switch(environment, _DYNAMO + "USE_REGIONAL_COMPILATION"),
    )
