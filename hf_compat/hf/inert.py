"""When an argument has no effect: conditions over the other arguments and over the parts that a run is given.

The `Row` of an argument names its conditions. The warning at a run's start, `explain`, `preflight` and the table of the
documentation read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from hf_compat.hf.enums import SchedulerType
from hf_compat.hf.rows import Derived, Inert, RunParts

if TYPE_CHECKING:
    from hf_compat.hf.fields import TrainingFields


Condition: TypeAlias = Inert["TrainingFields"]
Following: TypeAlias = Derived["TrainingFields"]
# Schedules without a warm-up.
_WITHOUT_WARMUP = (SchedulerType.CONSTANT, SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
_BY_LENGTH = ("group_by_length", "batch_rebalance")


def unread(name: str) -> Condition:
    """Make the condition of an argument that some optimizers do not read."""
    return Condition("`optim` does not read it", lambda args, parts: parts.unread().get(name, False))


def _is_on_cpu(args: TrainingFields) -> bool:
    return args.device.type == "cpu"


ALONE = Condition(
    "it only matters with several processes, and the launcher has started one",
    lambda args, parts: args.world_size == 1,
)
NO_DDP = Condition(
    "`fsdp` or `deepspeed` shards the model, without DDP", lambda args, parts: bool(args.fsdp or args.deepspeed)
)
ON_CPU = Condition("the run is on the CPU", lambda args, parts: _is_on_cpu(args))
NO_STEPS_OF = {
    name: Condition(f"`{name}_strategy` is not 'steps'", lambda args, parts, name=name: _has_no_steps(args, name))  # type: ignore[misc]  # bound at once
    for name in ("eval", "save", "logging")
}
NO_EVALUATION = Condition(
    "`eval_strategy='no'` evaluates nothing while training",
    lambda args, parts: args.eval_strategy == "no" and not parts.reads("should_evaluate"),
)
NO_EVALUATION_TO_DELAY = Condition(NO_EVALUATION.why, lambda args, parts: args.eval_strategy == "no")
NO_SAVE = Condition(
    "`save_strategy='no'` saves no checkpoint",
    lambda args, parts: args.save_strategy == "no" and not (args.enable_jit_checkpoint or parts.reads("should_save")),
)
NO_METRIC = Condition("`metric_for_best_model` names no metric", lambda args, parts: args.metric_for_best_model is None)
UPDATES_COUNT = Condition("`max_steps` counts instead", lambda args, parts: args.max_steps > 0)
OWN_OPTIMIZER = Condition("you pass an optimizer", lambda args, parts: parts.optimizer is not None)
OWN_OPTIMIZER_OBJECT = Condition("you pass an optimizer", lambda args, parts: parts.optimizer == "optimizers")
OWN_SCHEDULE = Condition("you pass a schedule in `optimizers`", lambda args, parts: parts.has_schedule)
NO_WARMUP = Condition(
    "the schedule has no warm-up",
    lambda args, parts: (
        args.lr_scheduler_type in _WITHOUT_WARMUP
        and (parts.optimizer is not None or "warmup_steps" in parts.unread())
        and f"the schedule '{SchedulerType(args.lr_scheduler_type).value}' has no warm-up"
    ),
)
OWN_LOSS = Condition(
    "your own `compute_loss_func` or `compute_loss` computes the loss",
    lambda args, parts: parts.loss is not None and f"your own `{parts.loss}` computes the loss",
)
NO_OPTIONS = Condition(
    "the constant schedule has no options", lambda args, parts: args.lr_scheduler_type == SchedulerType.CONSTANT
)
FP16_ON_CPU = Condition(
    "the CPU computes in float32, as in transformers, and mixes precisions only with `bf16=True`",
    lambda args, parts: _is_on_cpu(args),
    in_evaluation=True,
)
NO_CHECKPOINTING = Condition(
    "`gradient_checkpointing` (`activation_checkpointing`) is off",
    lambda args, parts: not args.activation_checkpointing,
)
NO_LIGER = Condition("`use_liger_kernel` is off", lambda args, parts: not args.use_liger_kernel)
NO_CONFIG = Condition("the model has no `config`", lambda args, parts: bool(args.use_cache) and not parts.has_config)
NO_WORKERS = Condition("`dataloader_num_workers=0` starts none", lambda args, parts: not args.dataloader_num_workers)
NOT_BY_LENGTH = Condition(
    "`train_sampling_strategy` does not look at lengths",
    lambda args, parts: args.train_sampling_strategy not in _BY_LENGTH,
)
NO_ORDER = Condition(
    "it looks at lengths, and the training data set has none",
    lambda args, parts: (
        not parts.has_length
        and args.train_sampling_strategy in _BY_LENGTH
        and "the training data set has no length, so its samples keep their own order"
    ),
)
NOT_SHUFFLED = Condition(
    "the training data are not shuffled",
    lambda args, parts: (
        "the training data are a stream, which has its own order"
        if parts.trains_on_stream
        else args.train_sampling_strategy == "sequential"
    ),
)
ONLY_STREAMS = Condition(
    "streams keep their last batch", lambda args, parts: parts.trains_on_stream and not parts.has_other_sets
)
NO_PUSH = Condition(
    "`push_to_hub` is off, so only your own call of `push_to_hub()` reads it",
    lambda args, parts: not args.push_to_hub,
)
NO_TRACKER = Condition("`report_to` names no tracker", lambda args, parts: not (args.report_to or parts.has_trackers))
NO_TRACKIO = Condition(
    "`report_to` does not name trackio",
    lambda args, parts: "trackio" not in (args.report_to or ()) and not parts.has_trackers,
)
PRINTS_NO_LOGS = Condition(
    "another callback shows the logs", lambda args, parts: args.log_format is not None and not parts.prints_logs
)
NO_METRIC_FUNCTION = Condition(
    "`compute_metrics` is not a function of predictions",
    lambda args, parts: (
        "there is no `compute_metrics`"
        if parts.metrics == "none"
        else parts.metrics == "torchmetrics" and "torchmetrics in `compute_metrics` are updated batch by batch"
    ),
    in_evaluation=True,
)
KEEPS_NO_PREDICTIONS = Condition(
    "metrics are computed batch by batch, so an evaluation keeps no predictions",
    lambda args, parts: (args.batch_eval_metrics and parts.metrics == "function") or parts.metrics == "torchmetrics",
    in_evaluation=True,
)
NO_GENERATION = Condition(
    "`predict_with_generate` is off",
    lambda args, parts: not args.predict_with_generate,  # type: ignore[attr-defined]  # of Seq2SeqTrainingArguments
    in_evaluation=True,
)
CANNOT_GENERATE = Condition(
    "a Trainer does not generate. Use a Seq2SeqTrainer, or override `prediction_step`",
    lambda args, parts: not parts.generates,
    in_evaluation=True,
)
NO_SUCH_SAMPLER = Condition(
    "transformers has no such sampler, but `train_sampling_strategy='group_by_length'` sorts by length",
    lambda args, parts: True,
)
OTHER_RANK = Condition(
    "the launcher's environment counts",
    lambda args, parts: args.local_rank != args.local_process_index,
)


def _has_no_steps(args: TrainingFields, name: str) -> bool:
    """Whether a number of updates counts for nothing. Evaluations by steps may take that of logs."""
    serves_evaluations = name == "logging" and args.eval_strategy == "steps" and args.eval_steps == args.logging_steps
    chosen = {"logging": args.logging_strategy, "eval": args.eval_strategy, "save": args.save_strategy}
    return chosen[name] != "steps" and not serves_evaluations


def _options_alone(args: TrainingFields, parts: RunParts) -> bool | str:
    """Name the options of `accelerator_config` without an effect, if none of those that are set has one."""
    config = args.accelerator_config
    chosen = {name for name, value in vars(config).items() if value != getattr(type(config), name, None)}
    divided = chosen & {"split_batches", "dispatch_batches", "even_batches"} if args.world_size == 1 else set()
    copied = chosen & {"non_blocking"} if _is_on_cpu(args) else set()
    if not chosen or chosen - divided - copied:
        return False
    why = [(divided, ALONE.why), (copied, ON_CPU.why)]
    return "; ".join(f"of `{'`, `'.join(sorted(names))}`, {reason}" for names, reason in why if names)


NO_OPTION = Condition("its options divide batches between processes, or copy to a GPU", _options_alone)


EVALUATES = Following("eval_strategy", lambda args: args.eval_strategy != "no")
ON_GPU = Following("use_cpu", lambda args: not args.use_cpu)
AS_LOGGING = Following("logging_steps", lambda args: args.logging_steps if args.eval_strategy == "steps" else None)
IS_LOSS = Following("load_best_model_at_end", lambda args: "loss" if args.load_best_model_at_end else None)
BY_NAME = Following(
    "metric_for_best_model",
    lambda args: None if args.metric_for_best_model is None else not args.metric_for_best_model.endswith("loss"),
)
