"""What a run takes on each device, by arithmetic: memory, communication, checkpoints. Pure.

Counted are parameters, gradients and Adam's two states in float32, as HF trains under autocast (16 bytes a parameter);
under DeepSpeed's bf16, halves of 2 bytes and float32 masters. Activations come on top: they depend on the model, the
batch and the sequence length, and on activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_compat.plan.deepspeed import zero_stage
from hf_compat.plan.lightning_plan import LightningPlan

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """Sizes of a run, bytes.

    Args:
        parameters: On each device.
        gradients: On each device.
        optimizer: On each device.
        sent: By each device in an update (ring algorithms).
        weights_file: Of a checkpoint.
        optimizer_file: Of a checkpoint.
    """

    parameters: float
    gradients: float
    optimizer: float
    sent: float
    weights_file: float
    optimizer_file: float

    @property
    def on_device(self) -> float:
        """All that is held on each device, activations aside."""
        return self.parameters + self.gradients + self.optimizer

    def lines(self, write_speed: float = 1e9) -> list[str]:
        """Say it in words; `write_speed` in bytes a second gives the time of a checkpoint."""
        files = self.weights_file + self.optimizer_file
        return [
            f"each device holds {self.on_device / GIB:.1f} GiB and activations: "
            f"parameters {self.parameters / GIB:.1f}, gradients {self.gradients / GIB:.1f}, "
            f"optimizer {self.optimizer / GIB:.1f}",
            f"each device sends {self.sent / GIB:.1f} GiB an update",
            f"a checkpoint has {files / GIB:.0f} GiB (weights {self.weights_file / GIB:.0f}): "
            f"{files / write_speed:.0f} s at {write_speed / 1e9:g} GB/s",
        ]


def size_of_run(plan: LightningPlan, parameters: float) -> RunSize:
    """Work out the sizes of a run.

    Args:
        plan: The plan; its strategy says what is cut into parts.
        parameters: Trained parameters of the model.
    """
    world, micro_batches = plan.world_size, plan.micro_batches_per_update
    halves = plan.strategy == "deepspeed" and plan.precision != "32-true"
    kept, master = (2, 4) if halves else (4, 0)
    cut = _cut(plan.strategy, plan.strategy_options)
    share = {part: 1 / world if part in cut else 1.0 for part in ("parameters", "gradients", "optimizer")}
    every = plan.exchange_every_micro_batch or plan.strategy == "deepspeed"
    if plan.strategy == "fsdp2" and micro_batches > 1 and not every:
        share["gradients"] = 1.0  # they wait whole for the window's last micro-batch
    wire = 2 if plan.precision != "32-true" and ("parameters" in cut or halves) else 4
    exchanges = micro_batches if every else 1
    if "parameters" in cut:  # gathered forward and backward, by every micro-batch; gradients are reduced
        sent = parameters * (2 * micro_batches * wire + exchanges * (2 if halves else 4))
    else:  # an all-reduce is a reduce-scatter and an all-gather
        sent = parameters * 2 * wire * (micro_batches if plan.exchange_every_micro_batch else 1)
    return RunSize(
        parameters=parameters * kept * share["parameters"],
        gradients=parameters * kept * share["gradients"],
        optimizer=parameters * (8 + master) * share["optimizer"],
        sent=sent * (world - 1) / world,
        weights_file=parameters * kept,
        optimizer_file=parameters * (8 + master),
    )


def _cut(strategy: str, options: Mapping[str, Any]) -> set[str]:
    if strategy == "fsdp2":
        return {"parameters", "gradients", "optimizer"}
    stage = zero_stage(options["config"]) if strategy == "deepspeed" else 0
    return {part for part, at in (("optimizer", 1), ("gradients", 2), ("parameters", 3)) if stage >= at}
