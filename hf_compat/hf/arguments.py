"""`TrainingArguments`: the 114 fields of HF, with their help.

What stands beside: `argument_values.py` (what each field may be), `arguments_rules.py` (rules over several fields),
`arguments_views.py` (properties, dumps), `arguments_setters.py` (the `set_*` methods), `legacy.py` (old names) and
`old_attributes.py` (reading and setting them).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import FORMS, LOG_LEVELS, ArgumentCheck, ArgumentValue, checks_of, read_all
from hf_compat.hf.arguments_rules import (
    choose_tf32,
    intervals,
    metrics_needed,
    normalise_arguments,
    precision,
    repository,
    workers,
)
from hf_compat.hf.arguments_setters import ArgumentSetters
from hf_compat.hf.arguments_views import ArgumentViews
from hf_compat.hf.declared_old_names import (
    REPLACE,
    declared_old_names,
    follow_declared,
    hand_over_old,
    obey_declared,
    source_of_replace,
    without_outdated,
)
from hf_compat.hf.enums import (
    DebugOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)
from hf_compat.hf.legacy import OLD_NAMES, Translation, translate_legacy
from hf_compat.hf.old_attributes import OldAttributes, assign_old, is_old_attribute, read_old_state, remember
from hf_compat.hf.profiles import NEWEST, followed, generation_beside, read_profile
from hf_compat.hf.profiles import VARIABLE as PROFILE
from hf_compat.hf.value_types import OPTIONS
from hf_compat.runtime.accelerate_processes import has_state, may_be_asked
from hf_compat.runtime.launch import variable
from hf_compat.runtime.text import shown


def _arg(default: ArgumentValue, help: str, **metadata: object) -> Any:  # dataclass fields have their annotation's type
    return field(default=default, metadata={"help": help, **metadata})


# Arguments of hf_compat, off by default. They are not dataclass fields: the fields are exactly upstream's.
OWN_ARGUMENTS = {
    "async_save": "Write checkpoints in the background: training waits for the copy, not for the disk.",
    "compat": "Generation of transformers whose defaults count, 4 or 5; else the variable HF_COMPAT_PROFILE, else that "
    "of the release that `hf-compat run` stands in for, else 5.",
}


class AcceptOldNames(type):
    """Metaclass that lets every old argument name into the constructor, of subclasses too, and reads the values.

    All complaints about a call come in one error, before a subclass's own `__post_init__` sees the values.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """What `inspect.signature` says: the constructor's own names, by which code filters its settings."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]  # of this very class
        return own.replace(parameters=list(own.parameters.values())[1:])

    def __call__(cls, *args: ArgumentValue, **kwargs: ArgumentValue) -> Any:  # an instance of the class
        takes = _interface_of(cls)
        by_place = dict(zip(takes.places, args, strict=False))
        if not by_place.keys().isdisjoint(kwargs):
            return super().__call__(*args, **kwargs)  # a value is given twice, and Python says so
        caller = sys._getframe(1)
        source = source_of_replace(cls, caller) if caller.f_code is REPLACE else None
        if source is not None:
            of_source = {name: getattr(source, name) for name in takes.own}
            kwargs = of_source | without_outdated(source, kwargs, takes.checks)
        # Read all values
        given, problems = read_all(takes.checks, by_place | kwargs)
        own = {name: given.pop(name) for name in takes.own & kwargs.keys() & given.keys()}
        # Say them by today's names
        old: Translation = {}
        known = takes.known | (given.keys() - OLD_NAMES.keys() if takes.any_name else set())
        if not given.keys() <= known:
            given, old = translate_legacy({**given, **_as_written(kwargs)}, known, takes.checks)
        if problems:
            raise ArgumentError("\n\n".join([*problems, *_further_problems(given)]))
        # Add the defaults of the generation that the call, the environment or the release that ours stands in for names
        guest = followed()
        compat = own.pop("compat", None) or variable(PROFILE) or (guest.generation if guest is not None else NEWEST)
        defaults: Translation = {}
        if compat != NEWEST or guest is not None:
            compat, defaults = read_profile(compat, given, known, takes.checks, TrainingArguments._checks())
            given.update(defaults)
        # Make the instance
        places = [*map(given.pop, by_place), *args[len(by_place) :]]
        instance: ArgumentValue = cls.__new__(cls, *places, **given)  # type: ignore[arg-type]  # of the class
        if compat != NEWEST or defaults:
            instance.__dict__.update({"compat": compat, "_defaults_of_profile": tuple(defaults)})
        if source is not None:
            hand_over_old(source, instance, kwargs)
        if old:
            remember(instance, old)  # a subclass's `__post_init__` reads old names, too
        instance.__init__(*places, **given)
        for name, value in own.items():
            setattr(instance, name, value)
        return instance


@dataclass(frozen=True, kw_only=True, slots=True)
class _Interface:
    """What a class of arguments takes; a subclass may have an `__init__` of its own.

    Args:
        places: Names by position.
        known: All names.
        any_name: Whether it takes any other name.
        own: Our own arguments, but for those that the class has as fields.
        checks: What each argument may be.
    """

    places: tuple[str, ...]
    known: frozenset[str]
    any_name: bool
    own: Set[str]
    checks: Mapping[str, ArgumentCheck]


@functools.lru_cache(maxsize=64)
def _interface_of(kind: type) -> _Interface:
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]  # of this very class
    return _Interface(
        places=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
        known=frozenset({f.name for f in fields(kind) if f.init} | {p.name for p in parameters}),
        any_name=any(p.kind is p.VAR_KEYWORD for p in parameters),
        own=OWN_ARGUMENTS.keys() - {f.name for f in fields(kind)},
        checks=kind._checks(),  # type: ignore[attr-defined]  # a subclass of TrainingArguments
    )


def _as_written(values: Mapping[str, object]) -> dict[str, object]:
    """Return options as they were written: what is not among them, an old name may say."""
    config = values.get("accelerator_config")
    is_written = isinstance(config, Mapping) or (isinstance(config, str) and config.lstrip().startswith("{"))
    return {"accelerator_config": config} if is_written else {}


def _further_problems(good: Mapping[str, object]) -> list[str]:
    """Return what the rules over several fields say about values that are allowed one by one."""
    trial = TrainingArguments.__new__(TrainingArguments)
    try:
        for known in fields(TrainingArguments):
            default = known.default if known.name != "include_for_metrics" else []
            setattr(trial, known.name, good.get(known.name, default))
        normalise_arguments(trial)
        trial._validate_args()
    except ArgumentError as error:
        return [str(error)]
    return []


@dataclass(repr=False)
class TrainingArguments(ArgumentViews, ArgumentSetters, OldAttributes, metaclass=AcceptOldNames):
    """How to train, evaluate and save.

    Every name that a release of `transformers` from 3.0 to 5.23 had is accepted: today's are the fields below, the
    older ones are translated or explained by `hf/legacy.py`. What is not supported yet says so when it is set.

    Raises:
        UnknownArgument: A name that no release has had (a `TypeError`).
        ArgumentError: A value, or a combination of values, that cannot work (a `ValueError`).
        UnsupportedArgument: A field that is set away from its default and has no machinery here yet.

    Mirrors:
        `transformers.TrainingArguments`, 5.23: names, defaults, properties.

    Example:
        >>> args = TrainingArguments("out", evaluation_strategy="steps", eval_steps=5, use_cpu=True)
        >>> args.eval_strategy.value, args.eval_steps
        ('steps', 5)
    """

    async_save: ClassVar[bool] = False

    # Upstream's names that subclasses extend or read: fields that may come as JSON text, and plugins of Accelerate.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *("accelerator_config", "deepspeed", "fsdp_config"),
        *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs"),
    ]
    default_optim: ClassVar[str] = "adamw_torch_fused"
    deepspeed_plugin: ClassVar[object] = None
    fsdp_plugin_args: ClassVar[object] = None

    output_dir: str | None = _arg(None, "Folder for checkpoints and results; `trainer_output` where none is given.")

    per_device_train_batch_size: int = _arg(8, "Samples of one micro-batch on each device while training.")
    num_train_epochs: float = _arg(3.0, "Epochs to train; the decimal part is that share of a last epoch.")
    max_steps: int = _arg(-1, "Updates to train; above 0 it takes the place of `num_train_epochs`.")

    learning_rate: float = _arg(5e-5, "Peak learning rate.")
    lr_scheduler_type: SchedulerType | str = _arg("linear", "Learning-rate schedule.")
    lr_scheduler_kwargs: dict | str | None = _arg(None, "Further options of the schedule, a dict or its JSON.")  # type: ignore[type-arg]  # HfArgumentParser reads the bare type
    warmup_steps: float = _arg(0, "Updates of linear warmup; below 1 a share of all updates.")

    optim: OptimizerNames | str = _arg("adamw_torch_fused", "Optimizer.")
    optim_args: str | None = _arg(None, "Further options of the optimizer, as `key=value,key=value`.")
    weight_decay: float = _arg(0.0, "Weight decay on all parameters but biases and norms.")
    adam_beta1: float = _arg(0.9, "First beta of Adam.")
    adam_beta2: float = _arg(0.999, "Second beta of Adam.")
    adam_epsilon: float = _arg(1e-8, "Epsilon of Adam.")
    optim_target_modules: None | str | list[str] = _arg(None, "Modules that GaLore and APOLLO project.")  # noqa: RUF036 - HfArgumentParser reads the order

    gradient_accumulation_steps: int = _arg(1, "Micro-batches of one update.")
    average_tokens_across_devices: bool = _arg(True, "Divide the loss by the tokens of all devices together.")
    max_grad_norm: float = _arg(1.0, "Norm to which gradients are clipped; 0 does not clip.")
    label_smoothing_factor: float = _arg(0.0, "Label smoothing epsilon; 0 does not smooth.")

    bf16: bool = _arg(False, "Train under bfloat16 autocast.")
    fp16: bool = _arg(False, "Train under float16 autocast with a gradient scaler.")
    bf16_full_eval: bool = _arg(False, "Cast the whole model to bfloat16 for evaluation outside training.")
    fp16_full_eval: bool = _arg(False, "Cast the whole model to float16 for evaluation outside training.")
    tf32: bool | None = _arg(None, "Allow (or forbid) TF32 on Ampere and newer GPUs; None leaves torch's setting.")

    activation_checkpointing: bool | None = _arg(
        None, "Recompute activations in the backward pass to save memory.", nargs="?", const=True
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = _arg(
        None, "Options of activation checkpointing (`use_reentrant` …), a dict or its JSON."
    )
    gradient_checkpointing: bool | None = _arg(None, "Older name of `activation_checkpointing`.", nargs="?", const=True)
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = _arg(
        None, "Older name of `activation_checkpointing_kwargs`."
    )

    torch_compile: bool = _arg(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = _arg(None, "Backend of torch.compile; setting it switches compilation on.")
    torch_compile_mode: str | None = _arg(None, "Mode of torch.compile; setting it switches compilation on.")
    use_liger_kernel: bool = _arg(False, "Replace layers by Liger kernels.")
    liger_kernel_config: dict[str, bool] | None = _arg(None, "Which Liger kernels to use.")

    use_cache: bool = _arg(False, "Value of `model.config.use_cache` while training.")
    neftune_noise_alpha: float | None = _arg(None, "Strength of NEFTune noise on embeddings.")
    torch_empty_cache_steps: int | None = _arg(None, "Empty the device cache every so many updates.")
    auto_find_batch_size: bool = _arg(False, "Start again with a smaller batch when memory runs out.")

    logging_strategy: IntervalStrategy | str = _arg("steps", "When to log: no, steps or epoch.")
    logging_steps: float = _arg(500, "Updates between logs; below 1 a share of all updates.")
    logging_first_step: bool = _arg(False, "Log the first update too.")
    log_on_each_node: bool = _arg(True, "Log on the first process of every machine, not of the first one only.")
    logging_nan_inf_filter: bool = _arg(True, "Leave NaN and infinite losses out of the logged mean.")
    include_num_input_tokens_seen: str | bool = _arg("no", "Count input tokens: no, all or non_padding.")
    log_level: str = _arg("passive", "Log level of the main process; passive leaves it alone.", choices=LOG_LEVELS)
    log_level_replica: str = _arg("warning", "Log level of the other processes.", choices=LOG_LEVELS)
    disable_tqdm: bool | None = _arg(None, "Print logs instead of showing progress bars.")

    report_to: None | str | list[str] = _arg("none", "Trackers to report to.")  # noqa: RUF036 - HfArgumentParser reads the order
    run_name: str | None = _arg(None, "Name of the run for trackers.")
    project: str = _arg("huggingface", "Trackio project.")
    trackio_space_id: str | None = _arg(None, "Trackio Space to deploy to.")
    trackio_bucket_id: str | None = _arg(None, "Trackio bucket.")
    trackio_static_space_id: str | None | Literal[False] = _arg(None, "Static Trackio Space.")  # noqa: RUF036 - as above

    eval_strategy: IntervalStrategy | str = _arg("no", "When to evaluate: no, steps or epoch.")
    eval_steps: float | None = _arg(None, "Updates between evaluations; below 1 a share; None is `logging_steps`.")
    eval_delay: float = _arg(0, "Epochs or updates (as `eval_strategy` counts) before the first evaluation.")
    per_device_eval_batch_size: int = _arg(8, "Samples of one batch on each device while evaluating.")
    prediction_loss_only: bool = _arg(False, "Evaluate the loss only, keep no predictions.")
    eval_on_start: bool = _arg(False, "Evaluate once before training.")
    eval_do_concat_batches: bool = _arg(True, "Join the batches' predictions; else a list of them is given.")
    eval_use_gather_object: bool = _arg(False, "Gather nested objects over processes while evaluating.")
    eval_accumulation_steps: int | None = _arg(None, "Batches after which predictions move to the CPU.")
    include_for_metrics: list[str] = field(
        default_factory=list, metadata={"help": "What `compute_metrics` also gets: inputs, loss."}
    )
    batch_eval_metrics: bool = _arg(False, "Call `compute_metrics` batch by batch, with `compute_result` at the end.")

    save_only_model: bool = _arg(False, "Leave optimizer, schedule and random states out of checkpoints.")
    save_strategy: SaveStrategy | str = _arg("steps", "When to save: no, steps, epoch or best.")
    save_steps: float = _arg(500, "Updates between checkpoints; below 1 a share of all updates.")
    save_on_each_node: bool = _arg(False, "Save on every machine, not on the first one only.")
    save_total_limit: int | None = _arg(None, "Checkpoints to keep; the best one is kept besides.")
    enable_jit_checkpoint: bool = _arg(False, "On SIGTERM or Ctrl-C, save a checkpoint after the update, then stop.")

    push_to_hub: bool = _arg(False, "Push the model to the Hub.")
    hub_token: str | None = _arg(None, "Token for the Hub; never written to disk.")
    hub_private_repo: bool | None = _arg(None, "Make the Hub repository private.")
    hub_model_id: str | None = _arg(None, "Hub repository.")
    hub_strategy: HubStrategy | str = _arg("every_save", "What is pushed to the Hub and when.")
    hub_always_push: bool = _arg(False, "Push even while the last push is running.")
    hub_revision: str | None = _arg(None, "Hub branch to push to.")

    load_best_model_at_end: bool = _arg(False, "Load the best checkpoint's weights at the end of training.")
    metric_for_best_model: str | None = _arg(None, "Metric that says which checkpoint is best; `loss` by default.")
    greater_is_better: bool | None = _arg(None, "Whether that metric should grow; by default unless it ends in loss.")

    ignore_data_skip: bool = _arg(False, "On resuming, start the epoch's data from its beginning.")
    restore_callback_states_from_checkpoint: bool = _arg(False, "On resuming, restore callbacks that save a state.")

    full_determinism: bool = _arg(False, "Switch on every deterministic mode.")
    seed: int = _arg(42, "Random seed of the run.")
    data_seed: int | None = _arg(None, "Random seed of the data order; None is `seed`.")

    use_cpu: bool = _arg(False, "Train on the CPU even where a GPU is.")
    accelerator_config: dict | str | None = _arg(None, "Data-loading options, a dict, a JSON file or an object.")  # type: ignore[type-arg]  # HfArgumentParser reads the bare type
    parallelism_config: Any = _arg(None, "Mesh of parallel dimensions.")

    dataloader_drop_last: bool = _arg(False, "Drop the last short batch.")
    dataloader_num_workers: int = _arg(0, "Worker processes that load data; 0 loads in the main one.")
    dataloader_pin_memory: bool = _arg(True, "Keep batches in pinned memory.")
    dataloader_persistent_workers: bool = _arg(False, "Keep workers alive between epochs.")
    dataloader_prefetch_factor: int | None = _arg(None, "Batches that each worker loads ahead.")
    dataloader_multiprocessing_context: str | None = _arg(
        None, "Start method of workers.", choices=["fork", "spawn", "forkserver"]
    )
    dataloader_in_order: bool = _arg(True, "Give batches in the order they were asked for.")
    remove_unused_columns: bool = _arg(True, "Drop columns that the model's forward does not take.")
    label_names: list[str] | None = _arg(None, "Keys of the inputs that are labels; None finds them.")
    train_sampling_strategy: str = _arg(
        "random",
        "Order of training data.",
        choices=["random", "sequential", "group_by_length", "batch_rebalance"],
    )
    length_column_name: str = _arg("length", "Column with the samples' lengths.")

    ddp_find_unused_parameters: bool | None = _arg(None, "`find_unused_parameters` of DDP.")
    ddp_bucket_cap_mb: int | None = _arg(None, "`bucket_cap_mb` of DDP.")
    ddp_broadcast_buffers: bool | None = _arg(None, "`broadcast_buffers` of DDP.")
    ddp_static_graph: bool | None = _arg(None, "`static_graph` of DDP.")
    ddp_backend: str | None = _arg(
        None, "Backend of the process group.", choices=["nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"]
    )
    ddp_timeout: int = _arg(1800, "Timeout of the process group, seconds.")
    fsdp: str | None = _arg(None, "Fully sharded data parallelism.", nargs="?", const=True)
    fsdp_config: dict[str, Any] | str | None = _arg(None, "Options of FSDP, a dict or a JSON file.")
    deepspeed: dict | str | None = _arg(None, "DeepSpeed configuration, a dict or a JSON file.")  # type: ignore[type-arg]  # HfArgumentParser reads the bare type

    debug: str | list[DebugOption] = _arg("", "Debug modes, separated by spaces.")
    skip_memory_metrics: bool = _arg(True, "Do not measure memory.")

    do_train: bool = _arg(False, "For scripts: whether to train.")
    do_eval: bool = _arg(False, "For scripts: whether to evaluate; on when `eval_strategy` is.")
    do_predict: bool = _arg(False, "For scripts: whether to predict.")
    resume_from_checkpoint: str | None = _arg(None, "For scripts: checkpoint to resume from.")
    local_rank: int = _arg(-1, "Rank on this machine as old launchers passed it; `local_process_index` is the truth.")

    @classmethod
    def _checks(cls) -> Mapping[str, ArgumentCheck]:
        return checks_of(cls, TrainingArguments)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an argument, or any other attribute.

        Raises:
            ArgumentError: The argument cannot have that value; it keeps the one it has.
        """
        takes = _interface_of(type(self))
        is_complete = "mixed_precision" in self.__dict__  # set last: from then on fields keep their one form
        if name in OLD_NAMES:
            if is_old_attribute(self, name):
                assign_old(self, name, value)
                return
            if is_complete:
                follow_declared(self, name, value)
        if name == "compat" and name in takes.own:
            raise ArgumentError(
                f"`{shown(name, value)}` comes too late: it gives the defaults while the arguments are made.\n\n"
                'Hint: `TrainingArguments(…, compat="4")`.'
            )
        check = takes.checks.get(name)
        if check is not None and value is not check.default and not check.is_lenient:
            value = check.read(value)
        if is_complete and name in FORMS:
            value = FORMS[name](value)
        super().__setattr__(name, value)

    def __setstate__(self, state: Mapping[str, ArgumentValue]) -> None:
        read_old_state(self, state)

    def __post_init__(self) -> None:
        if declared_old_names(type(self)):
            obey_declared(self)
        if generation_beside() == "4":  # 4.x sets it when arguments are made, whatever a launcher has passed
            self.local_rank = self._launch.local_process_index
        _ = self.device  # from here on the process's place among those launched is fixed
        normalise_arguments(self)
        # JSON text that a command line gave becomes a dict
        for name in set(self._VALID_DICT_FIELDS) - set(TrainingArguments._VALID_DICT_FIELDS):
            value = getattr(self, name)
            if isinstance(value, str) and value.startswith("{"):
                setattr(self, name, ArgumentCheck(name, OPTIONS, None).read(value))
        self._validate_args()
        choose_tf32(self)
        config: ArgumentValue = self.accelerator_config  # an object by now
        if config.use_configured_state:
            if not has_state():
                raise ArgumentError(
                    "`accelerator_config`'s `use_configured_state=True` keeps Accelerate's state: there is none.\n\n"
                    "Hint: make an `accelerate.Accelerator()` before the arguments, or leave the option out."
                )
        elif may_be_asked():
            _ = self.distributed_state

    def _validate_args(self) -> None:
        """Check the arguments together; a subclass may add to it.

        Raises:
            ArgumentError: Values that cannot work together.

        Mirrors:
            `transformers.TrainingArguments._validate_args`, 5.23.
        """
        problems = [
            *intervals(self),
            *metrics_needed(self),
            *workers(self),
            *precision(self),
            *repository(self),
        ]
        if problems:
            raise ArgumentError("\n\n".join(problems))


def describe_fields(kind: type[TrainingArguments]) -> None:
    """Put every argument into the docstring of a class: name, type, default and the text of `--help`."""
    lines = []
    for one in fields(kind):
        default = one.default_factory() if callable(one.default_factory) else one.default
        lines.append(f"        {one.name} ({one.type}, default {default!r}): {one.metadata.get('help', '')}")
    text = "    Args:\n" + "\n".join(lines) + "\n\n    Raises:"
    kind.__doc__ = str(kind.__doc__).replace("    Raises:", text, 1)


describe_fields(TrainingArguments)
