"""What a run takes on each device, by arithmetic: memory, communication, checkpoints.

Counted are parameters, gradients and the optimizer's states in float32, as HF trains under autocast (with Adam 16 bytes
a parameter); under DeepSpeed's bf16, halves of 2 bytes and float32 masters. Activations come on top: they depend on the
model, the batch and the sequence length, and on activation checkpointing.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_compat.plan.deepspeed import zero_stage
from hf_compat.plan.lightning_plan import LightningPlan

GIB = 2**30
ADAM = 8  # two moments in float32

# `optim` → bytes of its states for each trained parameter; what factors matrices keeps next to nothing
STATE_BYTES: dict[str, int] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), ADAM),
    **dict.fromkeys(("paged_adamw_32bit", "stable_adamw", "schedule_free_adamw", "schedule_free_radam"), ADAM),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), 2),
    "adamw_torch_4bit": 1,
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit", "grokadamw"), 12),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), 3),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "adagrad", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_32bit"), 4),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"), 1),
    "schedule_free_sgd": 4,
    **dict.fromkeys(("adafactor", "lomo", "adalomo"), 0),
}


def state_bytes(optim: str, optim_args: str | None) -> int | None:
    """Return the bytes of an optimizer's states for each trained parameter; None where its rank says how many."""
    if optim == "sgd":
        return 4 if "momentum" in str(optim_args or "") else 0
    return STATE_BYTES.get(optim)


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
        gathered: What the first process of all holds beside that, in its memory, to write a checkpoint.
        per_node: Processes of a machine.
        unknown: The optimizer whose states are not counted; empty where they are.
    """

    parameters: float
    gradients: float
    optimizer: float
    sent: float
    weights_file: float
    optimizer_file: float
    gathered: float = 0
    per_node: int = 1
    unknown: str = ""

    @property
    def on_device(self) -> float:
        """All that is held on each device, activations aside."""
        return self.parameters + self.gradients + self.optimizer

    def lines(self, write_speed: float = 1e9) -> list[str]:
        """Return the sizes in words; `write_speed` in bytes a second gives the time of a checkpoint."""
        files = self.weights_file + self.optimizer_file
        more = []
        if self.unknown:
            more.append(f"not counted: the states of optim={self.unknown!r}, which depend on its options")
        if self.gathered:
            more.append(
                f"the first process gathers {self.gathered / GIB:.0f} GiB in its memory to write a checkpoint: "
                "`state_dict_type='SHARDED_STATE_DICT'` (FSDP 2) gathers nothing"
            )
        if self.per_node > 1:
            more.append(f"a machine's {self.per_node} processes hold {self.per_node * self.on_device / GIB:.0f} GiB")
        return [
            f"each device holds {self.on_device / GIB:.1f} GiB and activations: "
            f"parameters {self.parameters / GIB:.1f}, gradients {self.gradients / GIB:.1f}, "
            f"optimizer {self.optimizer / GIB:.1f}",
            f"each device sends {self.sent / GIB:.1f} GiB an update",
            f"a checkpoint has {files / GIB:.0f} GiB (weights {self.weights_file / GIB:.0f}): "
            f"{files / write_speed:.0f} s at {write_speed / 1e9:g} GB/s",
            *more,
        ]


def size_of_run(
    plan: LightningPlan,
    parameters: float,
    trained: float | None = None,
    optim: str = "adamw_torch",
    optim_args: str = "",
) -> RunSize:
    """Return the sizes of a run.

    Args:
        plan: The plan; its strategy says what is sharded.
        parameters: Of the model.
        trained: Those of them that are trained and saved, as adapters are; None for all.
        optim: Name of the optimizer.
        optim_args: Its options.
    """
    kept, master = (2, 4) if _keeps_halves(plan) else (4, 0)
    trained = parameters if trained is None else trained
    states = state_bytes(optim, optim_args)
    optimizer = trained * ((states or 0) + master)
    # Which share of the parameters, the gradients and the optimizer's states a device holds
    sharded = _sharded(plan)
    share = {part: 1 / plan.world_size if part in sharded else 1.0 for part in ("parameters", "gradients", "optimizer")}
    if plan.strategy == "fsdp2" and plan.micro_batches_per_update > 1 and not _exchanges_every_micro_batch(plan):
        share["gradients"] = 1.0  # they wait whole for the window's last micro-batch
    gathered = 0.0
    if plan.strategy == "fsdp2" and plan.strategy_options["plan"].state_dict_type == "FULL_STATE_DICT":
        gathered = trained * kept + optimizer
    elif plan.strategy == "deepspeed" and "parameters" in sharded:
        gathered = trained * kept  # DeepSpeed's own files are each rank's
    # Frozen parameters are gathered as well, and no gradients of theirs are exchanged
    sent = trained * _bytes_sent(plan)
    if "parameters" in sharded:
        sent += (parameters - trained) * 2 * plan.micro_batches_per_update * (2 if plan.precision != "32-true" else 4)
    return RunSize(
        parameters=parameters * kept * share["parameters"],
        gradients=trained * kept * share["gradients"],
        optimizer=optimizer * share["optimizer"],
        sent=sent * (plan.world_size - 1) / plan.world_size,
        weights_file=trained * kept,
        optimizer_file=optimizer,
        gathered=gathered,
        per_node=min(plan.devices_per_node, plan.world_size),
        unknown=optim if states is None else "",
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
