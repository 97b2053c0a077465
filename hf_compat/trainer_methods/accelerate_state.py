"""`accelerator.state` and `accelerator.gradient_state`, as scripts read them. HF words only."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Protocol

from hf_compat.data.types import Batch
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.process_state import ProcessState
from hf_compat.plan.deepspeed import deepspeed_config, zero_stage
from hf_compat.runtime.accelerate_processes import as_distributed_type, may_be_asked, share_accelerator, share_processes
from hf_compat.runtime.launch import launcher_variables


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
