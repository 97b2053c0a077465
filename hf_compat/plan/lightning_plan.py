"""The plan: everything that Lightning is told about a run, as one frozen dataclass. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

StrategyName = Literal["one_device", "ddp", "fsdp2", "deepspeed"]

PrecisionName = Literal["32-true", "bf16-mixed", "16-mixed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LightningPlan:
    """What Lightning is told about a run.

    Args:
        device: The one device of this process (`cpu`, `cuda:0`, `mps`).
        precision: Lightning's name of the precision; autocast is around the model's forward.
        max_epochs: Epochs that may begin; -1 where only updates count.
        default_root_dir: The output folder.
        log_every_n_steps: Updates between logs of Lightning loggers.
        micro_batch_size: Samples of a micro-batch.
        micro_batches_per_update: Micro-batches of an update: one Lightning batch.
        gradient_clip_norm: Norm to which the module clips; None does not. Lightning's own clipping stays off.
        validate_every_updates: Updates between validations, for callbacks that ask; None where none is planned.
            HF's flags start them, not this interval.
        deterministic: Ask torch for deterministic algorithms.
        strategy: `one_device`, or how several processes train together: `ddp`, `fsdp2`, `deepspeed`.
        strategy_options: Options of the strategy, in its own words.
        exchange_every_micro_batch: Exchange gradients after every micro-batch; else after a window's last one.
        world_size: Processes.
        devices_per_node: Processes on this machine.
    """

    device: str = "cpu"
    precision: PrecisionName = "32-true"
    max_epochs: int = -1
    default_root_dir: str = "trainer_output"
    log_every_n_steps: int = 50
    micro_batch_size: int = 8
    micro_batches_per_update: int = 1
    gradient_clip_norm: float | None = 1.0
    validate_every_updates: int | None = None
    deterministic: bool = False
    strategy: StrategyName = "one_device"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    exchange_every_micro_batch: bool = False
    world_size: int = 1
    devices_per_node: int = 1

    def trainer_settings(self) -> dict[str, Any]:
        """Return the keywords of `lightning.Trainer`, all but callbacks and strategy."""
        kind, _, index = self.device.partition(":")
        on_gpu = kind == "cuda"
        devices: int | list[int] = self.devices_per_node if self.world_size > 1 else 1
        if on_gpu:
            devices = list(range(self.devices_per_node)) if self.world_size > 1 else [int(index or 0)]
        nodes = max(self.world_size // self.devices_per_node, 1)
        validation: dict[str, int | None] = {}
        if self.validate_every_updates is not None:
            # an interval in batches, so that callbacks which monitor a metric look at it after validations
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
