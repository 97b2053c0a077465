"""What a run takes on each device, by arithmetic: memory, communication, checkpoints.

Counted are parameters, gradients and Adam's two states in float32, as HF trains under autocast (16 bytes a parameter);
under DeepSpeed's bf16, halves of 2 bytes and float32 masters. Activations come on top: they depend on the model, the
batch and the sequence length, and on activation checkpointing.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        """Return the sizes in words; `write_speed` in bytes a second gives the time of a checkpoint."""
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
    """Return the sizes of a run.

    Args:
        plan: The plan; its strategy says what is sharded.
        parameters: Trained parameters of the model.
    """
    kept, master = (2, 4) if _keeps_halves(plan) else (4, 0)
    # Which share of the parameters, the gradients and the optimizer's states a device holds
    sharded = _sharded(plan)
    share = {part: 1 / plan.world_size if part in sharded else 1.0 for part in ("parameters", "gradients", "optimizer")}
    if plan.strategy == "fsdp2" and plan.micro_batches_per_update > 1 and not _exchanges_every_micro_batch(plan):
        share["gradients"] = 1.0  # they wait whole for the window's last micro-batch
    return RunSize(
        parameters=parameters * kept * share["parameters"],
        gradients=parameters * kept * share["gradients"],
        optimizer=parameters * (8 + master) * share["optimizer"],
        sent=parameters * _bytes_sent(plan) * (plan.world_size - 1) / plan.world_size,
        weights_file=parameters * kept,
        optimizer_file=parameters * (8 + master),
    )


def _keeps_halves(plan: LightningPlan) -> bool:
    """Return whether parameters and gradients have 2 bytes; float32 masters are beside them then."""
    return plan.strategy == "deepspeed" and plan.precision != "32-true"


def _exchanges_every_micro_batch(plan: LightningPlan) -> bool:
    return plan.exchange_every_micro_batch or plan.strategy == "deepspeed"


def _bytes_sent(plan: LightningPlan) -> float:
    """Return the bytes that a device sends in an update for each parameter, before the factor of ring algorithms."""
    micro_batches, halves = plan.micro_batches_per_update, _keeps_halves(plan)
    in_halves = plan.precision != "32-true"
    if "parameters" in _sharded(plan):  # gathered forward and backward, by every micro-batch; gradients are reduced
        exchanges = micro_batches if _exchanges_every_micro_batch(plan) else 1
        return 2 * micro_batches * (2 if in_halves else 4) + exchanges * (2 if halves else 4)
    # an all-reduce is a reduce-scatter and an all-gather
    return 2 * (2 if halves else 4) * (micro_batches if plan.exchange_every_micro_batch else 1)


def _sharded(plan: LightningPlan) -> set[str]:
    """Return what each device holds a slice of: parameters, gradients, the optimizer's states."""
    if plan.strategy == "fsdp2":
        return {"parameters", "gradients", "optimizer"}
    stage = zero_stage(plan.strategy_options["config"]) if plan.strategy == "deepspeed" else 0
    return {part for part, first in (("optimizer", 1), ("gradients", 2), ("parameters", 3)) if stage >= first}
