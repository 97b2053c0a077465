"""The settings of a run as frozen data.

`LightningPlan` has the settings of Lightning. `Compilation` has keywords of `torch.compile` from `torch_compile` and
`accelerate launch --dynamo_backend`. `RunCounts` has the numbers of updates, epochs and samples.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from hf_compat.errors import ArgumentError, DataError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.runtime.launch import launcher_variables
from hf_compat.runtime.text import did_you_mean, parse_switch, shown

StrategyName = Literal["one_device", "ddp", "fsdp2", "deepspeed"]

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
    strategy: StrategyName = "one_device"  # `one_device`, or `ddp`, `fsdp2` or `deepspeed` for several processes
    strategy_options: Mapping[str, Any] = field(default_factory=dict)  # options of the strategy
    # exchange gradients after every micro-batch, not only the last of a window
    exchange_every_micro_batch: bool = False
    world_size: int = 1  # number of processes
    devices_per_node: int = 1  # processes on this machine

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


_VARIABLE = "ACCELERATE_DYNAMO_"
# Accelerate's word for no compilation.
OFF = "no"
_DEFAULT_MODE = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """How a model is compiled. Mirrors `accelerate.utils.TorchDynamoPlugin`, 1.15."""

    backend: str  # a backend of torch or one that is registered with it
    mode: str = _DEFAULT_MODE  # the backend's mode
    fullgraph: bool = False  # refuse a model that splits into several graphs
    dynamic: bool | None = None  # Trace sizes as symbols. None lets torch decide.
    by_blocks: bool = False  # compile repeated blocks one by one, which starts sooner

    def keywords(self) -> dict[str, str | bool]:
        """The keywords of `torch.compile` that differ from its defaults."""
        default = Compilation(backend=self.backend)
        changed = [name for name in ("mode", "fullgraph", "dynamic") if getattr(self, name) != getattr(default, name)]
        return {"backend": self.backend, **{name: getattr(self, name) for name in changed}}


def compilation_of(args: TrainingArguments) -> Compilation | None:
    """Read how the model is compiled. None if it is not."""
    variables = launcher_variables()
    by_arguments = (args.torch_compile_backend or "inductor") if args.torch_compile else None
    backend = (by_arguments or variables.get(_VARIABLE + "BACKEND") or OFF).lower()
    if backend in (OFF, "none"):
        return None
    name = "torch_compile_backend" if by_arguments else _VARIABLE + "BACKEND"
    known = sorted(torch.compiler.list_backends(exclude_tags=()))
    if backend not in known:
        hint = did_you_mean(backend, known, f"choose one of {', '.join(known)}.")
        raise ArgumentError(f"`{shown(name, backend)}` is not a backend of torch.compile.\n\nHint: {hint}")
    mode = args.torch_compile_mode or variables.get(_VARIABLE + "MODE") or _DEFAULT_MODE
    if backend == "inductor":
        name = "torch_compile_mode" if args.torch_compile_mode else _VARIABLE + "MODE"
        from torch._inductor import list_mode_options  # slow: only where something is compiled

        known = sorted(list_mode_options())
        if mode not in known:
            raise ArgumentError(
                f"`{shown(name, mode)}` is not a mode of torch.compile.\n\nHint: choose one of {', '.join(known)}."
            )
    dynamic = _VARIABLE + "USE_DYNAMIC"
    return Compilation(
        backend=backend,
        mode=mode,
        fullgraph=parse_switch(variables, _VARIABLE + "USE_FULLGRAPH"),
        dynamic=parse_switch(variables, dynamic) if dynamic in variables else None,
        by_blocks=parse_switch(variables, _VARIABLE + "USE_REGIONAL_COMPILATION"),
    )


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
    args: TrainingArguments,
    *,
    micro_batches: int | None,
    num_examples: int | None,
    total_train_batch_size: int,
) -> RunCounts:
    """Count the updates, epochs and samples of a run.

    Raises:
        ArgumentError: The data has no length and `max_steps` is not set.
        DataError: The data is empty.

    Mirrors:
        `transformers.Trainer.set_initial_training_values`, 5.23.
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
