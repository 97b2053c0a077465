"""What becomes of each of the 114 arguments: one row a field, and the check of a run's arguments against the rows.

A row either says where the value goes, or refuses any value but the default, with the reason and a way out. The table
in the documentation is made from here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from hf_compat.errors import InertArgumentWarning, UnsupportedArgument
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.arguments_rules import check_again
from hf_compat.hf.enums import DebugOption
from hf_compat.plan.compilation import compilation_of
from hf_compat.runtime.text import shown

_ONE_PROCESS = "it only matters with several processes, and the launcher has started one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What becomes of one argument.

    Args:
        to: Where the value goes, in Lightning's or this package's words.
        refuse: Why a value other than the default is refused; None where it is honoured.
        hint: What to do instead.
        inert: Why a value other than the default changes nothing in this run; None where it counts.
        refuses: Which values are refused; all but the default where it is None.
        alone_only: It is inert in one process only.
    """

    to: str
    refuse: str | None = None
    hint: str = ""
    inert: str | None = None
    refuses: Callable[[object], bool] | None = None
    alone_only: bool = False


def _goes(to: str) -> Row:
    return Row(to=to)


def _later(what: str, hint: str = "leave it out") -> Row:
    return Row(to="not supported yet", refuse=f"{what} is not supported yet", hint=hint)


def _together(to: str) -> Row:
    return Row(to=f"{to}, with several processes", inert=_ONE_PROCESS, alone_only=True)


_FLAG = "nothing: a flag for scripts"
_COMPILE = "torch.compile of what a step calls"

ROWS: dict[str, Row] = {
    "output_dir": _goes("default_root_dir; checkpoint-<updates> folders"),
    "per_device_train_batch_size": _goes("batch size of the training loader (a micro-batch)"),
    "num_train_epochs": _goes("max_epochs, rounded up; the flow callback stops within the last one"),
    "max_steps": _goes("updates at which the flow callback stops"),
    "learning_rate": _goes("optimizer"),
    "lr_scheduler_type": _goes("schedule, one step an update"),
    "lr_scheduler_kwargs": _goes("schedule"),
    "warmup_steps": _goes("schedule"),
    "optim": _goes("optimizer, of the package that has it"),
    "optim_args": _goes("optimizer"),
    "weight_decay": _goes("optimizer, all parameters but biases and norms"),
    "adam_beta1": _goes("optimizer"),
    "adam_beta2": _goes("optimizer"),
    "adam_epsilon": _goes("optimizer"),
    "optim_target_modules": _goes("parameter groups of GaLore and APOLLO"),
    "gradient_accumulation_steps": _goes("micro-batches of a window; Lightning's accumulate_grad_batches stays 1"),
    "average_tokens_across_devices": _goes("count of items that the loss is divided by"),
    "max_grad_norm": _goes("clipping by the module; Lightning's gradient_clip_val stays off"),
    "label_smoothing_factor": _goes("loss"),
    "bf16": _goes("precision='bf16-mixed', around the model's forward"),
    "fp16": _goes("precision='16-mixed' with a gradient scaler, around the model's forward; nothing on the CPU"),
    "bf16_full_eval": _goes("model dtype in evaluations outside training"),
    "fp16_full_eval": _goes("model dtype in evaluations outside training"),
    "tf32": _goes("torch.backends.fp32_precision, when the arguments are made"),
    "activation_checkpointing": _goes("model.gradient_checkpointing_enable()"),
    "activation_checkpointing_kwargs": _goes("model.gradient_checkpointing_enable()"),
    "gradient_checkpointing": _goes("model.gradient_checkpointing_enable()"),
    "gradient_checkpointing_kwargs": _goes("model.gradient_checkpointing_enable()"),
    "torch_compile": _goes(_COMPILE),
    "torch_compile_backend": _goes(f"its backend; {_COMPILE}"),
    "torch_compile_mode": _goes(f"its mode; {_COMPILE}"),
    "use_liger_kernel": _goes("Liger's kernels in the model when `train()` begins"),
    "liger_kernel_config": _goes("which of Liger's kernels"),
    "use_cache": _goes("model.config.use_cache"),
    "neftune_noise_alpha": _goes("noise on the embeddings of the input during `train()`"),
    "torch_empty_cache_steps": _goes("torch.cuda.empty_cache()"),
    "auto_find_batch_size": _goes("a fit with a smaller batch when memory runs out"),
    "logging_strategy": _goes("control.should_log"),
    "logging_steps": _goes("control.should_log; log_every_n_steps"),
    "logging_first_step": _goes("control.should_log"),
    "log_on_each_node": _together("which processes log"),
    "logging_nan_inf_filter": _goes("mean of the logged loss"),
    "include_num_input_tokens_seen": _goes("state.num_input_tokens_seen"),
    "log_level": _goes("level of the hf_compat logger"),
    "log_level_replica": _together("level of the hf_compat logger in processes that do not log"),
    "disable_tqdm": _goes("printed logs instead of progress bars"),
    "report_to": _goes("a callback a tracker, or Lightning loggers as they are"),
    "run_name": _goes("name of the run in trackers"),
    "project": _goes("trackio's callback, which is transformers' own"),
    "trackio_space_id": _goes("trackio's callback"),
    "trackio_bucket_id": _goes("trackio's callback"),
    "trackio_static_space_id": _goes("trackio's callback"),
    "eval_strategy": _goes("control.should_evaluate, which runs Lightning's validation; its own intervals are off"),
    "eval_steps": _goes("control.should_evaluate"),
    "eval_delay": _goes("control.should_evaluate"),
    "per_device_eval_batch_size": _goes("batch size of evaluation loaders"),
    "prediction_loss_only": _goes("evaluation"),
    "eval_on_start": _goes("a validation in on_train_start"),
    "eval_do_concat_batches": _goes("evaluation"),
    "eval_use_gather_object": _together("evaluation: objects are gathered, not tensors"),
    "eval_accumulation_steps": _goes("evaluation: predictions move to the CPU"),
    "include_for_metrics": _goes("evaluation"),
    "batch_eval_metrics": _goes("evaluation"),
    "save_only_model": _goes("files of a checkpoint"),
    "save_strategy": _goes("control.should_save"),
    "save_steps": _goes("control.should_save"),
    "save_on_each_node": _together("which processes write"),
    "save_total_limit": _goes("rotation, by step number"),
    "enable_jit_checkpoint": _goes("a checkpoint at the end of the update when SIGTERM or Ctrl-C comes; then exit"),
    "push_to_hub": _goes("pushes by huggingface_hub, in a thread beside training"),
    "hub_token": _goes("what the Hub knows you by; never written to disk"),
    "hub_private_repo": _goes("whether a repository that is made is private"),
    "hub_model_id": _goes("the repository; by default the name of the output folder"),
    "hub_strategy": _goes("what a save pushes"),
    "hub_always_push": _goes("whether a save is pushed while another push is under way"),
    "hub_revision": _goes("the branch that is pushed to"),
    "load_best_model_at_end": _goes("weights of the best checkpoint after a fit"),
    "metric_for_best_model": _goes("state.best_metric"),
    "greater_is_better": _goes("state.best_metric"),
    "ignore_data_skip": _goes("where a resumed epoch's data starts"),
    "restore_callback_states_from_checkpoint": _goes("callbacks on resuming"),
    "full_determinism": _goes("torch's deterministic algorithms and the variables that they read"),
    "seed": _goes("seeds of Python, NumPy and torch"),
    "data_seed": _goes("seed of the training order"),
    "use_cpu": _goes("accelerator='cpu'"),
    "accelerator_config": _goes("training order (use_seedable_sampler), copies (non_blocking), num_steps"),
    "parallelism_config": _goes("DDP (dp_replicate_size), FSDP 2 (dp_shard_size), or both; tp, cp and sp are refused"),
    "dataloader_drop_last": _goes("loaders"),
    "dataloader_num_workers": _goes("loaders"),
    "dataloader_pin_memory": _goes("loaders, on a GPU"),
    "dataloader_persistent_workers": _goes("loaders"),
    "dataloader_prefetch_factor": _goes("loaders"),
    "dataloader_multiprocessing_context": _goes("loaders"),
    "dataloader_in_order": _goes("loaders"),
    "remove_unused_columns": _goes("loaders"),
    "label_names": _goes("evaluation"),
    "train_sampling_strategy": _goes("sampler of the training loader"),
    "length_column_name": _goes("sampler of the training loader"),
    "ddp_find_unused_parameters": _together("DDPStrategy(find_unused_parameters=…)"),
    "ddp_bucket_cap_mb": _together("DDPStrategy(bucket_cap_mb=…)"),
    "ddp_broadcast_buffers": _together("DDPStrategy(broadcast_buffers=…)"),
    "ddp_static_graph": _together("DDPStrategy(static_graph=…)"),
    "ddp_backend": _together("backend of the process group"),
    "ddp_timeout": _together("timeout of the process group"),
    "fsdp": _goes("ModelParallelStrategy: torch's fully_shard"),
    "fsdp_config": _goes("which modules are sharded, and how"),
    "deepspeed": _goes("DeepSpeedStrategy; every auto resolved from the arguments"),
    "debug": Row(
        to="forward hooks that show what led to the first NaN or infinity, and stop there",
        refuse="tpu_metrics_debug prints what a TPU's compiler has counted, and there is no TPU here",
        hint="leave tpu_metrics_debug out",
        refuses=lambda value: isinstance(value, list) and DebugOption.TPU_METRICS_DEBUG in value,
    ),
    "skip_memory_metrics": _goes("memory of each stage (`train_mem_cpu_alloc_delta` …) in its metrics; needs psutil"),
    "do_train": _goes(_FLAG),
    "do_eval": _goes(_FLAG),
    "do_predict": _goes(_FLAG),
    "resume_from_checkpoint": _goes(_FLAG + "; pass it to train()"),
    "local_rank": _goes("nothing: the launcher's environment counts"),
}

_GENERATION = "`generate` in evaluations and predictions"
# The fields that `Seq2SeqTrainingArguments` adds.
SEQ2SEQ_ROWS: dict[str, Row] = {
    "sortish_sampler": Row(
        to="nothing",
        inert="transformers has no such sampler; `train_sampling_strategy='group_by_length'` sorts by length",
    ),
    "predict_with_generate": _goes(_GENERATION),
    "generation_max_length": _goes("`max_length` of " + _GENERATION),
    "generation_num_beams": _goes("`num_beams` of " + _GENERATION),
    "generation_config": _goes("model.generation_config"),
}


def row_of(name: str) -> Row | None:
    """Return the row of a field; None of one that a subclass adds."""
    return ROWS.get(name) or SEQ2SEQ_ROWS.get(name)


# Defaults that normalisation gives another form.
_NORMAL_FORMS = {
    "output_dir": "trainer_output",
    "report_to": [],
    "debug": [],
    "disable_tqdm": False,
    "activation_checkpointing": False,
    "gradient_checkpointing": False,
}


def default_of(field: Field[Any]) -> object:
    """Return a dataclass field's default, as it is after normalisation."""
    if field.default_factory is not MISSING:
        default: object = field.default_factory()
        return default
    # transformers 4.46 has no default of the folder
    return _NORMAL_FORMS.get(field.name, None if field.default is MISSING else field.default)


def check_supported(args: TrainingArguments) -> None:
    """Refuse what is not supported or contradictory, and warn about what changes nothing.

    Args:
        args: The arguments; fields that a subclass adds are not looked at.

    Raises:
        ArgumentError: Fields that were set after the constructor contradict each other.
        UnsupportedArgument: At least one field asks for something that is not here; all of them are listed.
    """
    check_again(args)
    refused: list[str] = []
    for field in fields(args):
        row, value = row_of(field.name), getattr(args, field.name)
        if row is None or not _is_set(row, value, default_of(field)):
            continue
        told = f"`{shown(field.name, value)}`"
        if row.refuse is not None:
            refused.append(f"{told}: {row.refuse}.\n\nHint: {row.hint}.")
        elif row.inert is not None and not (row.alone_only and args.world_size > 1):
            warnings.warn(f"{told} has no effect: {row.inert}.", InertArgumentWarning, stacklevel=4)
    _warn_of_inert(args)
    if refused:
        raise UnsupportedArgument("\n\n".join(refused))
    compilation_of(args)  # it refuses backends and modes that torch does not know


def _warn_of_inert(args: TrainingArguments) -> None:
    """Warn about arguments whose effect depends on others."""
    if args.mixed_precision == "fp16" and args.device.type == "cpu":
        reason = "on the CPU it is float32 that is computed in, as in transformers; `bf16=True` is mixed there"
        warnings.warn(f"`fp16=True` has no effect: {reason}.", InertArgumentWarning, stacklevel=5)
    if args.liger_kernel_config and not args.use_liger_kernel:
        told = shown("liger_kernel_config", args.liger_kernel_config)
        warnings.warn(f"`{told}` has no effect: `use_liger_kernel` is off.", InertArgumentWarning, stacklevel=5)


def _is_set(row: Row, value: object, default: object) -> bool:
    if row.refuses is not None:
        return row.refuses(value)
    if default is None:  # the object of a parallelism_config may answer `!=` with anything
        return value is not None
    return bool(value != default)
