"""Which arguments the project takes over, and what is said of the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.argument_support import default_of
from hf_compat.runtime.text import shown
from hf_compat.tools.ejection.findings import Findings

# Arguments that the project's code, configuration or files take over.
TAKEN_OVER = frozenset(
    (
        "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type",
        "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "optim_args", "weight_decay", "adam_beta1",
        "adam_beta2", "adam_epsilon", "max_grad_norm", "gradient_accumulation_steps", "label_smoothing_factor", "bf16",
        "fp16", "gradient_checkpointing", "activation_checkpointing", "gradient_checkpointing_kwargs",
        "activation_checkpointing_kwargs", "logging_strategy", "logging_steps", "logging_first_step", "report_to",
        "run_name", "project", "eval_strategy", "eval_steps", "per_device_eval_batch_size", "prediction_loss_only",
        "save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end", "metric_for_best_model",
        "greater_is_better", "seed", "data_seed", "use_cpu", "full_determinism", "dataloader_drop_last",
        "dataloader_num_workers", "remove_unused_columns", "label_names", "use_cache", "train_sampling_strategy",
        "length_column_name", "predict_with_generate", "generation_max_length", "generation_num_beams",
        "generation_config", "optim_target_modules", "average_tokens_across_devices", "tf32",
    )
)  # fmt: skip
# Arguments that say nothing about a run of one process, or nothing that Lightning does not do by itself.
WITHOUT_EFFECT = frozenset(
    (
        "output_dir", "do_train", "do_eval", "do_predict", "disable_tqdm", "log_level", "log_level_replica",
        "log_on_each_node", "include_num_input_tokens_seen", "logging_nan_inf_filter", "eval_accumulation_steps",
        "save_only_model", "save_on_each_node", "local_rank", "ddp_backend", "ddp_timeout",
        "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
        "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context", "dataloader_in_order", "torch_empty_cache_steps", "ignore_data_skip",
        "eval_use_gather_object", "restore_callback_states_from_checkpoint", "skip_memory_metrics",
        "overwrite_output_dir", "eval_do_concat_batches", "accelerator_config", "fsdp_config",
    )
)  # fmt: skip
# Arguments that are left out, and what the user does in their place.
LEFT_OUT = {
    "push_to_hub": "`model.push_to_hub(…)` after the fit does it",
    "enable_jit_checkpoint": "Lightning's `OnExceptionCheckpoint` is near to it",
    "auto_find_batch_size": "the batch size is the one that the script says",
    "torch_compile": "`self.model.compile()` at the end of `TrainingModule.__init__` does it",
    "resume_from_checkpoint": "`--ckpt_path` of the fit continues a checkpoint of the project itself",
}
# Arguments that only say more of another one.
_FOLLOWS = ("hub_", "torch_compile_", "trackio_", "liger_")
# Arguments that change the numbers, and that the project has no words for.
REFUSED = {
    "eval_on_start": "an evaluation before the first update",
    "eval_delay": "evaluations that begin late",
    "neftune_noise_alpha": "noise on the embeddings",
    "use_liger_kernel": "Liger's kernels put in the model's place",
    "batch_eval_metrics": "metrics batch by batch",
    "include_for_metrics": "inputs or losses for the metrics",
    "bf16_full_eval": "evaluations in bfloat16",
    "fp16_full_eval": "evaluations in float16",
    "debug": "hooks that watch for NaN",
    "parallelism_config": "a mesh of devices",
}
# Arguments that spread the weights over devices, and Lightning's strategy for each.
SHARDING = {"fsdp": "FSDPStrategy", "deepspeed": "DeepSpeedStrategy"}


def check_arguments(args: TrainingArguments, findings: Findings) -> None:
    """Say what becomes of the arguments that are set and that the project does not take over."""
    for name in _set_away_from_default(args):
        told = shown(name, getattr(args, name))
        if name in REFUSED:
            findings.forbid(f"`{told}`: {REFUSED[name]} cannot be written in plain Lightning here.", "leave it out.")
        elif name in SHARDING:
            findings.forbid(
                f"`{told}` spreads the weights over devices, and the project clips gradients, chooses parameter groups "
                "and saves the model by whole weights.",
                f"leave it out; Lightning's {SHARDING[name]} goes into `config.yaml` afterwards, with its own clipping "
                "in the place of the project's.",
            )
        elif name in LEFT_OUT:
            findings.tell(f"`{told}` is left out: {LEFT_OUT[name]}.")
        elif not name.startswith(_FOLLOWS):
            findings.tell(f"`{told}` is left out: the project has no word for it.")


def _set_away_from_default(args: TrainingArguments) -> Iterator[str]:
    known = TAKEN_OVER | WITHOUT_EFFECT
    for field in fields(args):
        is_of_hf = field.name in TrainingArguments.__dataclass_fields__
        if not field.init or field.name in known or not is_of_hf:
            continue
        default, value = default_of(field), getattr(args, field.name)
        if (value is not None) if default is None else bool(value != default):
            yield field.name
