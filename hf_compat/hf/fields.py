"""HF's 114 fields of `TrainingArguments`, and our own arguments, each with its row.

Their types are in `argument_values.py`, and the conditions under which one has no effect in `inert.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_compat.hf import argument_values as values
from hf_compat.hf import inert as when
from hf_compat.hf.argument_values import AcceleratorConfig, ArgumentCheck, ArgumentValue, default_of
from hf_compat.hf.enums import DebugOption, HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from hf_compat.hf.process_place import ProcessPlace
from hf_compat.hf.rows import ROWS, OwnArgument, Row
from hf_compat.hf.value_types import NAME, Range, choice, or_none, path_or_store

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_declared: list[Row] = []  # of the fields of the class whose body is being read


def arg(default: ArgumentValue, help: str, row: Row, **metadata: object) -> ArgumentValue:  # of its annotation's type
    """Declare a field and its row. `HfArgumentParser` reads all metadata."""
    _declared.append(row)
    given: dict[str, ArgumentValue] = {"default_factory": list} if default is list else {"default": default}
    return field(**given, metadata={"help": help, **metadata})


def own_arg(default: object, help: str, row: Row) -> ArgumentValue:  # of its annotation's type
    """Declare an argument that transformers does not have."""
    return OwnArgument(default, help, row)


@dataclass(repr=False, eq=False)
class TrainingFields(ProcessPlace):
    """The arguments of a training, without the methods of `TrainingArguments`."""

    # Upstream's class attributes for fields given as JSON text and for Accelerate's plugins. Subclasses use them.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *("accelerator_config", "deepspeed", "fsdp_config"),
        *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs"),
    ]
    default_optim: ClassVar[str] = "adamw_torch_fused"
    deepspeed_plugin: ClassVar[object] = None
    fsdp_plugin_args: ClassVar[object] = None

    # fmt: off
    output_dir: str | None = arg(
        None, "Folder, or object store (`s3://…`), for checkpoints and results; by default `trainer_output`.", Row(
        "default_root_dir; checkpoint-<updates> folders", "nothing", subject="run", kind=path_or_store,
        takes_none=True, form=values.folder, native="", per_rank=True, normal="trainer_output"))

    per_device_train_batch_size: int = arg(8, "Samples of one micro-batch on each device while training.", Row(
        "batch size of the training loader (a micro-batch)", "taken", subject="run", allowed=values.COUNT, data=True,
        loader="batch_size"))
    num_train_epochs: float = arg(3.0, "Epochs to train. The decimal part is that share of a last epoch.", Row(
        "max_epochs, rounded up (the flow callback stops within the last one)", "taken", subject="run",
        allowed=values.COUNT_OR_0, way_out="for training without an end in sight, set `max_steps`.", native="",
        inert=(when.UPDATES_COUNT,)))
    max_steps: int = arg(-1, "Updates to train. -1 counts epochs, and 0 ends after the first update.", Row(
        "updates at which the flow callback stops", "taken", subject="run", allowed=values.STEPS,
        way_out="give the number of updates, or -1 to count epochs (`num_train_epochs`).", native=""))

    learning_rate: float = arg(5e-5, "Peak learning rate.", Row(
        "optimizer", "taken", subject="optimizer and schedule", allowed=values.NOT_NEGATIVE,
        inert=(when.OWN_OPTIMIZER,)))
    lr_scheduler_type: SchedulerType | str = arg("linear", "Learning-rate schedule.", Row(
        "schedule, one step an update", "taken", subject="optimizer and schedule",
        form=values.member_of(SchedulerType), inert=(when.OWN_SCHEDULE,)))
    lr_scheduler_kwargs: dict | str | None = arg(None, "Further options of the schedule, a dict or its JSON.", Row(  # type: ignore[type-arg]  # HfArgumentParser reads the bare type
        "schedule", "taken", subject="optimizer and schedule", kind=values.OPTIONS_OR_NONE,
        inert=(when.OWN_SCHEDULE, when.NO_OPTIONS)))
    warmup_steps: float = arg(0, "Updates in which the rate rises; below 1 a share of all updates, rounded up.", Row(
        "schedule", "taken", subject="optimizer and schedule", allowed=values.COUNT_OR_0,
        inert=(when.OWN_SCHEDULE, when.NO_WARMUP)))

    optim: OptimizerNames | str = arg("adamw_torch_fused", "Optimizer.", Row(
        "optimizer, of the package that has it", "taken", subject="optimizer and schedule", kind=values.optimizer,
        form=values.member_of(OptimizerNames), inert=(when.OWN_OPTIMIZER,)))
    optim_args: str | None = arg(None, "Further options of the optimizer, as `key=value,key=value`.", Row(
        "optimizer", "taken", subject="optimizer and schedule", inert=(when.OWN_OPTIMIZER,)))
    weight_decay: float = arg(0.0, "Weight decay on all parameters but biases and norms.", Row(
        "optimizer, all parameters but biases and norms", "taken", subject="optimizer and schedule",
        kind=values.ZERO_IF_OFF, inert=(when.OWN_OPTIMIZER_OBJECT, when.unread("weight_decay"))))
    adam_beta1: float = arg(0.9, "First beta of Adam.", Row("optimizer", "taken", kind=values.BETA,
        inert=(when.OWN_OPTIMIZER, when.unread("adam_beta1"))))
    adam_beta2: float = arg(0.999, "Second beta of Adam.", Row("optimizer", "taken", kind=values.BETA,
        inert=(when.OWN_OPTIMIZER, when.unread("adam_beta2"))))
    adam_epsilon: float = arg(1e-8, "Epsilon of Adam.", Row("optimizer", "taken", allowed=values.NOT_NEGATIVE,
        inert=(when.OWN_OPTIMIZER, when.unread("adam_epsilon"))))
    optim_target_modules: None | str | list[str] = arg(None, "Modules that GaLore and APOLLO project.", Row(  # noqa: RUF036 - HfArgumentParser reads the order
        "parameter groups of GaLore and APOLLO", "taken", kind=values.target_modules,
        inert=(when.OWN_OPTIMIZER, when.unread("optim_target_modules"))))

    gradient_accumulation_steps: int = arg(1, "Micro-batches of one update.", Row(
        "micro-batches of a window (Lightning's accumulate_grad_batches stays 1)", "taken", subject="run",
        allowed=values.COUNT, data=True))
    average_tokens_across_devices: bool = arg(True, "Divide the loss by the tokens of all devices together.", Row(
        "count of items that the loss is divided by", "taken", data=True, inert=(when.ALONE,)))
    max_grad_norm: float = arg(1.0, "Norm to which gradients are clipped. 0 does not clip.", Row(
        "clipping by the module (Lightning's gradient_clip_val stays off)", "taken", subject="optimizer and schedule",
        kind=values.ZERO_IF_OFF, none_means=0.0,
        way_out="use 0 to keep gradients unchanged, or a large number (1e9) to only log their norm.",
        inert=(when.unread("max_grad_norm"),)))
    label_smoothing_factor: float = arg(0.0, "Label smoothing epsilon. 0 does not smooth.", Row(
        "loss", "taken", subject="optimizer and schedule", kind=values.BELOW_1_OR_OFF, inert=(when.OWN_LOSS,),
        of_trainer=True))

    bf16: bool = arg(False, "Train under bfloat16 autocast.", Row(
        "precision='bf16-mixed', around the model's forward", "taken", subject="precision and memory", native=""))
    fp16: bool = arg(False, "Train under float16 autocast with a gradient scaler.", Row(
        "precision='16-mixed' with a gradient scaler, around the model's forward; nothing on the CPU", "taken",
        subject="precision and memory", native="", inert=(when.FP16_ON_CPU,)))
    bf16_full_eval: bool = arg(False, "Cast the whole model to bfloat16 for evaluation outside training.", Row(
        "model dtype in evaluations outside training", "refused", says="evaluations in bfloat16"))
    fp16_full_eval: bool = arg(False, "Cast the whole model to float16 for evaluation outside training.", Row(
        "model dtype in evaluations outside training", "refused", says="evaluations in float16"))
    tf32: bool | None = arg(None, "Allow or forbid TF32 on Ampere and newer GPUs. None leaves torch's setting.", Row(
        "torch.backends.fp32_precision, when the arguments are made", "taken", subject="precision and memory",
        inert=(when.ON_CPU,)))

    activation_checkpointing: bool | None = arg(
        None, "Recompute activations in the backward pass to save memory.", Row(
        "model.gradient_checkpointing_enable()", "taken", subject="precision and memory",
        normal=False), nargs="?", const=True)
    activation_checkpointing_kwargs: dict[str, Any] | str | None = arg(
        None, "Options of activation checkpointing (`use_reentrant` …), a dict or its JSON.", Row(
        "model.gradient_checkpointing_enable()", "taken", kind=values.OPTIONS_OR_NONE,
        inert=(when.NO_CHECKPOINTING,)))
    gradient_checkpointing: bool | None = arg(None, "Older name of `activation_checkpointing`.", Row(
        "model.gradient_checkpointing_enable()", "taken", normal=False), nargs="?", const=True)
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = arg(
        None, "Older name of `activation_checkpointing_kwargs`.", Row(
        "model.gradient_checkpointing_enable()", "taken", kind=values.OPTIONS_OR_NONE,
        inert=(when.NO_CHECKPOINTING,)))

    torch_compile: bool = arg(False, "Compile the model with torch.compile.", Row(
        "torch.compile of what a step calls", "left out",
        says="`self.model.compile()` at the end of `TrainingModule.__init__` does it", subject="precision and memory",
        reaches_out=True))
    torch_compile_backend: str | None = arg(None, "Backend of torch.compile. Setting it switches compilation on.", Row(
        "its backend; torch.compile of what a step calls", "nothing", kind=values.NAME_OR_NONE, reaches_out=True))
    torch_compile_mode: str | None = arg(None, "Mode of torch.compile. Setting it switches compilation on.", Row(
        "its mode; torch.compile of what a step calls", "nothing", kind=values.NAME_OR_NONE, reaches_out=True))
    use_liger_kernel: bool = arg(False, "Replace layers by Liger kernels.", Row(
        "Liger's kernels in the model when `train()` begins", "refused",
        says="Liger's kernels put in the model's place"))
    liger_kernel_config: dict[str, bool] | None = arg(None, "Which Liger kernels to use.", Row(
        "which of Liger's kernels", "nothing", kind=values.OPTIONS_OR_NONE, inert=(when.NO_LIGER,)))

    use_cache: bool = arg(False, "Value of `model.config.use_cache` while training.", Row(
        "model.config.use_cache", "taken", kind=values.TRUTH_OR_NONE, inert=(when.NO_CONFIG,)))
    neftune_noise_alpha: float | None = arg(None, "Strength of NEFTune noise on embeddings.", Row(
        "noise on the embeddings of the input during `train()`", "refused", says="noise on the embeddings",
        allowed=values.NOT_NEGATIVE))
    torch_empty_cache_steps: int | None = arg(None, "Empty the device cache every so many updates.", Row(
        "torch.cuda.empty_cache(), torch.mps.empty_cache()", "nothing", allowed=values.COUNT,
        inert=(when.ON_CPU,), per_rank=True))
    auto_find_batch_size: bool = arg(False, "Start again with a smaller batch when memory runs out.", Row(
        "a fit with a smaller batch when memory runs out", "left out",
        says="the batch size is the one that the script says", subject="run", reaches_out=True))

    logging_strategy: IntervalStrategy | str = arg("steps", "When to log (no, steps or epoch).", Row(
        "control.should_log", "taken", subject="logs", kind=values.INTERVALS, form=values.member_of(IntervalStrategy),
        native="log_every_n_steps"))
    logging_steps: float = arg(500, "Updates between logs, or below 1 a share of all updates.", Row(
        "control.should_log; log_every_n_steps", "taken", subject="logs", allowed=values.STEPS, takes_none=True,
        form=values.rounded, native="log_every_n_steps", inert=(when.NO_STEPS_OF["logging"],)))
    logging_first_step: bool = arg(False, "Log the first update too.", Row(
        "control.should_log", "taken", subject="logs", native="log_every_n_steps"))
    log_on_each_node: bool = arg(True, "Log on the first process of every machine, not of the first one only.", Row(
        "which processes log, with several processes", "nothing", inert=(when.ALONE,), per_rank=True))
    logging_nan_inf_filter: bool = arg(True, "Leave NaN and infinite losses out of the logged mean.", Row(
        "mean of the logged loss", "nothing", per_rank=True))
    include_num_input_tokens_seen: str | bool = arg("no", "How to count input tokens (no, all or non_padding).", Row(
        "state.num_input_tokens_seen", "nothing", kind=values.tokens_seen, data=True))
    log_level: str = arg("passive", "Log level of the main process. passive does not change it.", Row(
        "level of the hf_compat logger", "nothing", kind=values.LOG_LEVEL, per_rank=True,
        of_trainer=True), choices=values.LOG_LEVELS)
    log_level_replica: str = arg("warning", "Log level of the other processes.", Row(
        "level of the hf_compat logger in processes that do not log, with several processes", "nothing",
        kind=values.LOG_LEVEL_REPLICA, inert=(when.ALONE,), per_rank=True), choices=values.LOG_LEVELS)
    disable_tqdm: bool | None = arg(None, "Print logs instead of showing progress bars.", Row(
        "printed logs instead of progress bars", "nothing", subject="logs", form=values.is_without_bars,
        per_rank=True, of_trainer=True, normal=False))

    report_to: None | str | list[str] = arg("none", "Trackers to report to.", Row(  # noqa: RUF036 - HfArgumentParser reads the order
        "a callback a tracker, or Lightning loggers as they are", "taken", subject="logs", kind=values.trackers,
        takes_none=True, form=values.tracker_names, native="logger", per_rank=True, of_trainer=True, normal=[]))
    run_name: str | None = arg(None, "Name of the run for trackers.", Row(
        "name of the run in trackers", "taken", subject="logs", native="logger",
        inert=(when.NO_TRACKER,), per_rank=True))
    project: str = arg("huggingface", "Trackio project.", Row(
        "trackio's callback, which is transformers' own", "taken", inert=(when.NO_TRACKIO,), per_rank=True))
    trackio_space_id: str | None = arg(None, "Trackio Space to deploy to.", Row("trackio's callback", "nothing",
        inert=(when.NO_TRACKIO,), per_rank=True))
    trackio_bucket_id: str | None = arg(None, "Trackio bucket.", Row("trackio's callback", "nothing",
        inert=(when.NO_TRACKIO,), per_rank=True))
    trackio_static_space_id: str | None | Literal[False] = arg(None, "Static Trackio Space.", Row(  # noqa: RUF036 - as above
        "trackio's callback", "nothing", kind=values.TEXT_OR_FALSE, inert=(when.NO_TRACKIO,), per_rank=True))

    eval_strategy: IntervalStrategy | str = arg("no", "When to evaluate (no, steps or epoch).", Row(
        "control.should_evaluate, which runs Lightning's validation (its own intervals are off)", "taken",
        subject="evaluation and best model", kind=values.INTERVALS, form=values.member_of(IntervalStrategy),
        native="val_check_interval", reaches_out=True))
    eval_steps: float | None = arg(None, "Updates between evaluations; below 1 a share; None is `logging_steps`.", Row(
        "control.should_evaluate", "taken", subject="evaluation and best model", allowed=values.STEPS,
        form=values.rounded, native="val_check_interval", inert=(when.NO_STEPS_OF["eval"],), derived=when.AS_LOGGING))
    eval_delay: float = arg(0, "Epochs or updates (as `eval_strategy` counts) before the first evaluation.", Row(
        "control.should_evaluate", "refused", says="evaluations that begin late", allowed=values.COUNT_OR_0,
        native="val_check_interval", inert=(when.NO_EVALUATION_TO_DELAY,)))
    per_device_eval_batch_size: int = arg(8, "Samples of one batch on each device while evaluating.", Row(
        "batch size of evaluation loaders", "taken", subject="evaluation and best model", allowed=values.COUNT,
        data=True))
    prediction_loss_only: bool = arg(False, "Evaluate the loss only, keep no predictions.", Row("evaluation", "taken"))
    eval_on_start: bool = arg(False, "Evaluate once before training.", Row(
        "a validation in on_train_start", "refused", says="an evaluation before the first update",
        subject="evaluation and best model", native="num_sanity_val_steps", reaches_out=True))
    eval_do_concat_batches: bool = arg(True, "Join the batches' predictions instead of returning a list.", Row(
        "evaluation", "nothing"))
    eval_use_gather_object: bool = arg(False, "Gather nested objects over processes while evaluating.", Row(
        "evaluation: objects are gathered, not tensors, with several processes", "nothing", inert=(when.ALONE,)))
    eval_accumulation_steps: int | None = arg(None, "Batches after which predictions move to the CPU.", Row(
        "evaluation: predictions move to the CPU", "nothing", allowed=values.COUNT, data=True,
        inert=(when.KEEPS_NO_PREDICTIONS,)))
    include_for_metrics: list[str] = arg(list, "What `compute_metrics` also gets: inputs, loss.", Row(
        "evaluation", "refused", says="inputs or losses for the metrics", kind=values.metric_inputs, none_means=[],
        inert=(when.NO_METRIC_FUNCTION,)))
    batch_eval_metrics: bool = arg(
        False, "Call `compute_metrics` batch by batch, with `compute_result` at the end.", Row(
        "evaluation", "refused", says="metrics batch by batch", inert=(when.NO_METRIC_FUNCTION,)))

    save_only_model: bool = arg(False, "Leave optimizer, schedule and random states out of checkpoints.", Row(
        "files of a checkpoint", "nothing", subject="checkpoints", inert=(when.NO_SAVE,)))
    save_strategy: SaveStrategy | str = arg("steps", "When to save (no, steps, epoch or best).", Row(
        "control.should_save", "taken", subject="checkpoints", kind=values.SAVES, form=values.member_of(SaveStrategy),
        native="a ModelCheckpoint"))
    save_steps: float = arg(500, "Updates between checkpoints, or below 1 a share of all updates.", Row(
        "control.should_save", "taken", subject="checkpoints", allowed=values.STEPS, takes_none=True,
        form=values.rounded, native="a ModelCheckpoint", inert=(when.NO_STEPS_OF["save"],)))
    save_on_each_node: bool = arg(False, "Save on every machine, not on the first one only.", Row(
        "which processes write, with several processes", "nothing", inert=(when.ALONE,)))
    save_total_limit: int | None = arg(None, "Checkpoints to keep, in addition to the best one.", Row(
        "rotation, by step number", "taken", subject="checkpoints", allowed=values.STEPS,
        way_out="give the number of checkpoints to keep, or None to keep all.", native="a ModelCheckpoint",
        inert=(when.NO_SAVE,), reaches_out=True))
    enable_jit_checkpoint: bool = arg(
        False, "On SIGTERM or Ctrl-C, save a checkpoint after the update, then stop.", Row(
        "a checkpoint at the end of the update when SIGTERM or Ctrl-C comes; then exit", "left out",
        says="Lightning's `OnExceptionCheckpoint` is near to it", reaches_out=True))

    push_to_hub: bool = arg(False, "Push the model to the Hub.", Row(
        "pushes by huggingface_hub, in a thread beside training", "left out",
        says="`model.push_to_hub(…)` after the fit does it", native="huggingface_hub's `upload_folder`",
        reaches_out=True))
    hub_token: str | None = arg(None, "Token for the Hub, which is never written to disk.", Row(
        "your login on the Hub (never written to disk)", "nothing", kind=values.TOKEN, takes_none=True,
        inert=(when.NO_PUSH,), per_rank=True))
    hub_private_repo: bool | None = arg(None, "Make the Hub repository private.", Row(
        "whether a repository that is made is private", "nothing", inert=(when.NO_PUSH,)))
    hub_model_id: str | None = arg(None, "Hub repository.", Row(
        "the repository; by default the name of the output folder", "nothing", inert=(when.NO_PUSH,)))
    hub_strategy: HubStrategy | str = arg("every_save", "What is pushed to the Hub and when.", Row(
        "what a save pushes", "nothing", form=values.member_of(HubStrategy), inert=(when.NO_PUSH,)))
    hub_always_push: bool = arg(False, "Push even while the last push is running.", Row(
        "whether a save is pushed while another push is under way", "nothing", inert=(when.NO_PUSH,)))
    hub_revision: str | None = arg(None, "Hub branch to push to.", Row("the branch that is pushed to", "nothing",
        inert=(when.NO_PUSH,)))

    load_best_model_at_end: bool = arg(False, "Load the best checkpoint's weights at the end of training.", Row(
        "weights of the best checkpoint after a fit", "taken", subject="evaluation and best model",
        native="a ModelCheckpoint", inert=(when.NO_EVALUATION,), reaches_out=True))
    metric_for_best_model: str | None = arg(None, "Metric that says which checkpoint is best; `loss` by default.", Row(
        "state.best_metric", "taken", subject="evaluation and best model", kind=values.NAME_OR_NONE,
        inert=(when.NO_EVALUATION,), derived=when.IS_LOSS))
    greater_is_better: bool | None = arg(
        None, "Whether that metric should grow; by default unless it ends in loss.", Row(
        "state.best_metric", "taken", subject="evaluation and best model",
        inert=(when.NO_METRIC, when.NO_EVALUATION), derived=when.BY_NAME))

    ignore_data_skip: bool = arg(False, "On resuming, start the epoch's data from its beginning.", Row(
        "where a resumed epoch's data starts", "nothing", data=True))
    restore_callback_states_from_checkpoint: bool = arg(
        False, "On resuming, restore callbacks that save a state.", Row(
        "callbacks on resuming", "nothing", reaches_out=True))

    full_determinism: bool = arg(False, "Switch on every deterministic mode.", Row(
        "torch's deterministic algorithms and the variables that they read", "taken"))
    seed: int = arg(42, "Random seed of the run.", Row(
        "seeds of Python, NumPy and torch", "taken", subject="run", allowed=Range(low=0, high=2**32 - 1), data=True))
    data_seed: int | None = arg(None, "Random seed of the data order; None is `seed`.", Row(
        "seed of the training order", "taken", allowed=Range(low=-(2**63), high=2**63 - 1), data=True,
        inert=(when.NOT_SHUFFLED,)))

    use_cpu: bool = arg(False, "Train on the CPU even where a GPU is.", Row(
        "accelerator='cpu'", "taken", subject="precision and memory", data=True))
    accelerator_config: dict | str | None = arg(None, "Data-loading options, a dict, a JSON file or an object.", Row(  # type: ignore[type-arg]  # HfArgumentParser reads the bare type
        "training order (use_seedable_sampler), copies (non_blocking), num_steps", "nothing",
        kind=values.ACCELERATOR_CONFIG, takes_none=True, form=AcceleratorConfig.from_any, data=True,
        inert=(when.NO_OPTION,)))
    parallelism_config: Any = arg(None, "Mesh of parallel dimensions.", Row(
        "DDP (dp_replicate_size), FSDP 2 (dp_shard_size), or both; sequences shared by DeepSpeed (sp_size)", "refused",
        says="a mesh of devices", kind=values.MESH, native="strategy"))

    dataloader_drop_last: bool = arg(False, "Drop the last short batch.", Row(
        "loaders", "taken", subject="data", data=True, inert=(when.ONLY_STREAMS,), loader="drop_last"))
    dataloader_num_workers: int = arg(0, "Worker processes that load data. 0 loads in the main process.", Row(
        "loaders", "taken", subject="data", allowed=Range(low=0, high=4096), data=True, per_rank=True,
        loader="num_workers"))
    dataloader_pin_memory: bool = arg(True, "Keep batches in pinned memory.", Row(
        "loaders, on a GPU", "nothing", data=True, inert=(when.ON_CPU,), per_rank=True, derived=when.ON_GPU))
    dataloader_persistent_workers: bool = arg(False, "Keep workers alive between epochs.", Row(
        "loaders", "nothing", data=True, per_rank=True, loader="persistent_workers"))
    dataloader_prefetch_factor: int | None = arg(None, "Batches that each worker loads ahead.", Row(
        "loaders", "nothing", allowed=Range(low=1, high=2**31), data=True, per_rank=True, loader="prefetch_factor"))
    dataloader_multiprocessing_context: str | None = arg(None, "Start method of workers.", Row(
        "loaders", "nothing", data=True, per_rank=True), choices=["fork", "spawn", "forkserver"])
    dataloader_in_order: bool = arg(True, "Give batches in the order they were asked for.", Row(
        "loaders", "nothing", data=True, inert=(when.NO_WORKERS,)))
    remove_unused_columns: bool = arg(True, "Drop columns that the model's forward does not take.", Row(
        "loaders", "taken", subject="data", data=True))
    label_names: list[str] | None = arg(None, "Keys of the inputs that are labels. None finds them.", Row(
        "evaluation", "taken", subject="data", kind=values.LABEL_NAMES, takes_none=True, data=True, of_trainer=True))
    train_sampling_strategy: str = arg("random", "Order of training data.", Row(
        "sampler of the training loader", "taken", subject="data", takes_none=True, data=True,
        inert=(when.NO_ORDER,)),
        choices=["random", "sequential", "group_by_length", "batch_rebalance"])
    length_column_name: str = arg("length", "Column with the samples' lengths.", Row(
        "sampler of the training loader", "taken", kind=NAME, takes_none=True, data=True,
        inert=(when.NOT_BY_LENGTH,)))

    ddp_find_unused_parameters: bool | None = arg(None, "`find_unused_parameters` of DDP.", Row(
        "DDPStrategy(find_unused_parameters=…), with several processes", "nothing", subject="several devices",
        inert=(when.ALONE, when.NO_DDP)))
    ddp_bucket_cap_mb: int | None = arg(None, "`bucket_cap_mb` of DDP.", Row(
        "DDPStrategy(bucket_cap_mb=…), with several processes", "nothing", allowed=Range(low=0, high=2**31),
        inert=(when.ALONE, when.NO_DDP)))
    ddp_broadcast_buffers: bool | None = arg(None, "`broadcast_buffers` of DDP.", Row(
        "DDPStrategy(broadcast_buffers=…), with several processes", "nothing", inert=(when.ALONE, when.NO_DDP)))
    ddp_static_graph: bool | None = arg(None, "`static_graph` of DDP.", Row(
        "DDPStrategy(static_graph=…), with several processes", "nothing", inert=(when.ALONE, when.NO_DDP)))
    ddp_backend: str | None = arg(None, "Backend of the process group.", Row(
        "backend of the process group, with several processes", "nothing", inert=(when.ALONE,)),
        choices=["nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"])
    ddp_timeout: int = arg(1800, "Timeout of the process group, seconds.", Row(
        "timeout of the process group, with several processes", "nothing", allowed=Range(low=1, high=10**9),
        inert=(when.ALONE,)))
    fsdp: str | None = arg(None, "Fully sharded data parallelism.", Row(
        "ModelParallelStrategy: torch's fully_shard", "sharded", says="FSDPStrategy", subject="several devices",
        kind=values.fsdp, takes_none=True, native=""), nargs="?", const=True)
    fsdp_config: dict[str, Any] | str | None = arg(None, "Options of FSDP, a dict or a JSON file.", Row(
        "which modules are sharded, and how", "nothing", subject="several devices", kind=values.FILE_OR_NONE,
        native=""))
    deepspeed: dict | str | None = arg(None, "DeepSpeed configuration, a dict or a JSON file.", Row(  # type: ignore[type-arg]  # HfArgumentParser reads the bare type
        "DeepSpeedStrategy; every auto resolved from the arguments", "sharded", says="DeepSpeedStrategy",
        subject="several devices", kind=values.FILE_OR_NONE, native=""))

    debug: str | list[DebugOption] = arg("", "Debug modes, separated by spaces.", Row(
        "forward hooks that show what led to the first NaN or infinity, and stop there (tpu_metrics_debug is refused)",
        "refused", says="hooks that watch for NaN", kind=values.debug, takes_none=True, form=values.debug_options,
        reaches_out=True, normal=[]))
    skip_memory_metrics: bool = arg(True, "Do not measure memory.", Row(
        "memory of each stage (`train_mem_cpu_alloc_delta` …) in its metrics; by transformers and psutil", "nothing",
        native="a DeviceStatsMonitor", per_rank=True))

    do_train: bool = arg(False, "For scripts: whether to train.", Row("nothing: a flag for scripts", "nothing",
        per_rank=True))
    do_eval: bool = arg(False, "For scripts: whether to evaluate; on when `eval_strategy` is.", Row(
        "nothing: a flag for scripts", "nothing", native="", per_rank=True, derived=when.EVALUATES))
    do_predict: bool = arg(False, "For scripts: whether to predict.", Row("nothing: a flag for scripts", "nothing",
        per_rank=True))
    resume_from_checkpoint: str | None = arg(None, "For scripts: checkpoint to resume from.", Row(
        "nothing: a flag for scripts; pass it to train()", "left out",
        says="`--ckpt_path` of the fit continues a checkpoint of the project itself", subject="run",
        kind=values.checkpoint, takes_none=True, native="ckpt_path", per_rank=True))
    local_rank: int = arg(
        -1, "Rank on this machine as old launchers passed it; `local_process_index` is the truth.", Row(
        "nothing: the launcher's environment counts", "nothing", allowed=Range(low=-1, high=2**31),
        inert=(when.OTHER_RANK,), per_rank=True))

    # Arguments that transformers does not have. They are no fields, because the fields are exactly upstream's.
    async_save: ClassVar[bool] = own_arg(
        False, "Write checkpoints in the background. Training waits for the copy, not for the disk.", Row(
        "when a save writes its files", "nothing", subject="checkpoints", inert=(when.NO_SAVE,),
        native="a ModelCheckpoint", reaches_out=True))
    compile_update: ClassVar[bool] = own_arg(
        False, "Compile each micro-batch as one graph. Rounding may differ.", Row(
        "torch.compile of the parts of an update", "nothing", subject="precision and memory"))
    eval_loss_by_token: ClassVar[bool] = own_arg(
        False, "Weigh the batches of `eval_loss` by their target tokens, so that it does not depend on the batch "
        "size.", Row(
        "the mean of an evaluation's losses", "nothing", subject="evaluation and best model"))
    log_format: ClassVar[str | None] = own_arg(
        None, "How logs are printed: as lines of a table, or as dicts. None: as a table on a terminal, as dicts "
        "elsewhere.", Row(
        "printed logs", "nothing", subject="logs", kind=or_none(choice(("table", "dict"))),
        inert=(when.PRINTS_NO_LOGS,)))
    output_store: ClassVar[str | None] = own_arg(
        None, "Object store that gets a copy of `output_dir`, as an address of fsspec: `s3://bucket/run`. Such an "
        "address as `output_dir` sets it, and `output_dir` then is a folder in the user's cache.", Row(
        "where checkpoints and results are stored", "left out", says="the project writes to its folder alone",
        subject="checkpoints", kind=values.store, native="default_root_dir, which takes addresses, too",
        reaches_out=True))
    # Not annotated, because a subclass may have a field of that name.
    compat = own_arg(
        None, "Generation of transformers whose defaults apply, 4 or 5. None reads the variable HF_COMPAT_PROFILE, "
        "then the release that `hf-compat run` replaces, then takes 5.", Row(
        "the defaults of arguments", "nothing", kind=values.COMPAT, normal=values.NEWEST))
    # fmt: on

    @classmethod
    def _checks(cls) -> Mapping[str, ArgumentCheck]:
        raise NotImplementedError


def declare(kind: type[DataclassInstance]) -> None:
    """Note the rows of a class's own fields, and put every field into its docstring: name, type, default, help."""
    own = [one.name for one in fields(kind) if one.name not in ROWS]
    ROWS.update(zip(own, _declared, strict=True))
    _declared.clear()
    lines = [
        f"        {one.name} ({one.type}, default {default_of(one)!r}): {one.metadata.get('help', '')}"
        for one in fields(kind)
    ]
    text = "    Args:\n" + "\n".join(lines) + "\n\n    Raises:"
    kind.__doc__ = str(kind.__doc__).replace("    Raises:", text, 1)
