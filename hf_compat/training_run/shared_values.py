"""Check that all ranks of a run have the same arguments and the same training data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hf_compat.errors import ArgumentError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.runtime.collectives import gather_objects

# Each affects what ranks exchange and when, or how a rank changes its copy of the weights.
SHARED_ARGUMENTS = (
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size"),
    *("gradient_accumulation_steps", "auto_find_batch_size", "dataloader_drop_last", "accelerator_config"),
    *("train_sampling_strategy", "length_column_name", "ignore_data_skip"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps", "batch_eval_metrics"),
    *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics"),
    *("save_strategy", "save_steps", "save_only_model", "save_on_each_node", "enable_jit_checkpoint"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("logging_strategy", "logging_steps", "logging_first_step", "include_num_input_tokens_seen"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
    *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor"),
    *("average_tokens_across_devices", "bf16", "fp16", "gradient_checkpointing", "activation_checkpointing"),
    *("fsdp", "fsdp_config", "deepspeed", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
)


def differences(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """List the values that differ between ranks.

    Args:
        by_rank: The values of each rank, in the order of ranks.

    Returns:
        A line for each name: `max_steps` is 4 on rank 0, 6 on rank 1.
    """
    lines = []
    for name in by_rank[0]:
        ranks: dict[str, list[str]] = {}
        for rank, values in enumerate(by_rank):
            ranks.setdefault(values.get(name, "not set"), []).append(str(rank))
        if len(ranks) > 1:
            by_value = (f"{value} on rank{'s'[: len(on) - 1]} {', '.join(on)}" for value, on in ranks.items())
            lines.append(f"`{name}` is {'; '.join(by_value)}")
    return lines


def compare_arguments(args: TrainingArguments, checkpoint: str | bool | None) -> None:
    """Refuse arguments that differ between ranks, before the ranks wait for each other.

    Args:
        args: This rank's arguments.
        checkpoint: The checkpoint that this rank resumes from.

    Raises:
        ArgumentError: The message names arguments, values and ranks.
    """
    if args.world_size == 1:
        return
    wanted = repr(os.path.basename(checkpoint) if isinstance(checkpoint, str) else checkpoint)
    arguments = args.to_dict()
    mine = {name: repr(arguments[name]) for name in SHARED_ARGUMENTS if name in arguments}
    refuse_differences({**mine, "resume_from_checkpoint": wanted}, "arguments")


def refuse_differences(mine: dict[str, str], what: str) -> None:
    """Refuse values that differ between ranks.

    Args:
        mine: This rank's values, as text.
        what: Their name in the message.

    Raises:
        ArgumentError: The message names values and ranks.
    """
    found = differences(gather_objects(mine))
    if found:
        raise ArgumentError(
            f"The processes of this run have different {what} and would wait for each other forever.\n"
            + "\n".join(f"  {line}" for line in found)
            + "\n\nHint: pass the same values to every process."
        )
