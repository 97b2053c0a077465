"""From arguments to a plan. Pure: nothing is started, no file is touched."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from hf_compat.errors import ArgumentError, InertArgumentWarning, UnsupportedArgument
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.argument_support import check_supported
from hf_compat.plan.deepspeed import deepspeed_config, uses_deepspeed
from hf_compat.plan.fsdp import fsdp_plan, uses_fsdp
from hf_compat.plan.lightning_equivalents import lightning_precision
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.run_counts import ENDLESS_EPOCHS, RunCounts
from hf_compat.runtime.launch import has_rendezvous, launcher_variables


def translate(args: TrainingArguments, schedule: RunCounts | None = None, model_config: Any = None) -> LightningPlan:
    """Say what Lightning will be told for these arguments.

    Args:
        args: The training arguments.
        schedule: Counts of the run, where its data is known; else the epochs are read off the arguments.
        model_config: The model's configuration, which sizes of DeepSpeed's follow.

    Raises:
        UnsupportedArgument: An argument asks for something that is not here yet.

    Example:
        >>> plan = translate(TrainingArguments("out", bf16=True, use_cpu=True, gradient_accumulation_steps=4))
        >>> plan.precision, plan.micro_batches_per_update
        ('bf16-mixed', 4)
    """
    check_supported(args)
    strategy, options = _strategy(args, model_config)
    return LightningPlan(
        device=str(args.device),
        precision=lightning_precision(args.mixed_precision),  # type: ignore[arg-type]  # one of the three
        max_epochs=_max_epochs(args, schedule),
        default_root_dir=str(args.output_dir),
        log_every_n_steps=_log_interval(args, schedule),
        micro_batch_size=args.train_batch_size,
        micro_batches_per_update=args.gradient_accumulation_steps,
        gradient_clip_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
        validate_every_updates=_validation_interval(args, schedule),
        deterministic=args.full_determinism,
        strategy=strategy,
        exchange_every_micro_batch=exchanges_every_micro_batch(args),
        strategy_options=options,
        world_size=args.world_size,
        devices_per_node=args._launch.local_world_size,
    )


def _strategy(args: Any, model_config: Any) -> tuple[Any, dict[str, Any]]:
    """Say how the processes of a run train together, and with which options."""
    variables = launcher_variables()
    _refuse_of_launcher(variables)
    if uses_deepspeed(args, variables):
        if args.world_size == 1 and not has_rendezvous():
            raise ArgumentError(
                "`deepspeed` needs a launcher, and this process was started without one.\n\n"
                "Hint: `hf-compat run --devices 2 script.py …`, torchrun, or deepspeed."
            )
        return "deepspeed", {"config": deepspeed_config(args, variables, model_config)}
    if uses_fsdp(args, variables):
        plan = fsdp_plan(args, variables)
        if args.world_size == 1:
            raise ArgumentError(
                "`fsdp` shards a model over several processes, and the launcher has started one.\n\n"
                "Hint: `hf-compat run --devices 2 script.py …`, or torchrun."
            )
        if plan.version == 1:
            raise UnsupportedArgument(
                "`fsdp_config={'version': 1}` is not supported.\n\n"
                "Hint: leave `version` out: FSDP 2 has taken its place in torch and transformers."
            )
        return "fsdp2", {"plan": plan}
    if args.fsdp_config:
        warnings.warn(
            f"`fsdp_config={args.fsdp_config!r}` has no effect: `fsdp` is off. Set `fsdp=True`.",
            InertArgumentWarning,
            stacklevel=4,
        )
    if args.world_size > 1:
        return "ddp", _ddp_options(args)
    return "one_device", {}


def _refuse_of_launcher(variables: Mapping[str, str]) -> None:
    """Refuse what `accelerate launch` was told and nothing here does."""
    compiler = variables.get("ACCELERATE_DYNAMO_BACKEND", "no")
    told = [("--dynamo_backend " + compiler, compiler.lower() not in ("no", "none"))]
    for flag, name in (
        ("--use_megatron_lm", "USE_MEGATRON_LM"),
        ("--use_parallelism_config", "USE_PARALLELISM_CONFIG"),
    ):
        told.append((flag, variables.get(f"ACCELERATE_{name}", "false").lower() == "true"))
    refused = [flag for flag, is_on in told if is_on]
    if refused:
        raise UnsupportedArgument(
            f"`accelerate launch {' '.join(refused)}` is not supported yet.\n\n"
            "Hint: leave it out (`accelerate config`)."
        )


def _ddp_options(args: Any) -> dict[str, Any]:
    """Return the keywords of `DistributedDataParallel` that the arguments set; the model decides about others."""
    given = {
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    return {name: value for name, value in given.items() if value is not None}


def exchanges_every_micro_batch(args: Any) -> bool:
    """Say whether `accelerator_config` asks for an exchange of gradients after every micro-batch."""
    return bool((args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch", False))


def _validation_interval(args: Any, schedule: RunCounts | None) -> int | None:
    if args.eval_strategy == "no" or schedule is None:
        return None
    if args.eval_strategy == "epoch":
        return schedule.updates_per_epoch
    steps = args.eval_steps
    return max(-int(-steps * schedule.max_updates // 1), 1) if steps < 1 else int(steps)


def _max_epochs(args: Any, schedule: RunCounts | None) -> int:
    if schedule is not None:
        return -1 if schedule.num_train_epochs == ENDLESS_EPOCHS else schedule.num_train_epochs
    return -1 if args.max_steps > 0 else max(-int(-args.num_train_epochs // 1), 1)


def _log_interval(args: Any, schedule: RunCounts | None) -> int:
    if args.logging_steps >= 1:
        return int(args.logging_steps)
    updates = schedule.max_updates if schedule is not None else 1
    return max(-int(-args.logging_steps * updates // 1), 1)
