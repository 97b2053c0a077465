"""The arguments on which all processes of a run have to agree, and where they differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Each shapes what the processes exchange and when, or what each of them does to its copy of the weights.
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


def shared_arguments(arguments: Mapping[str, object]) -> dict[str, str]:
    """Return those of a process's arguments on which all have to agree, as text."""
    return {name: repr(arguments[name]) for name in SHARED_ARGUMENTS if name in arguments}


def differences(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """Say which values differ between the processes.

    Args:
        by_rank: The values of each process, in the order of ranks.

    Returns:
        A line for each name: `max_steps` is 4 on rank 0, 6 on rank 1.
    """
    names = [name for name in by_rank[0] if any(values.get(name) != by_rank[0][name] for values in by_rank)]
    return [f"`{name}` is {_by_value([values.get(name, 'not set') for values in by_rank])}" for name in names]


def _by_value(values: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    named = ((value, "rank" if len(found) == 1 else "ranks", ", ".join(found)) for value, found in ranks.items())
    return "; ".join(f"{value} on {word} {found}" for value, word, found in named)
