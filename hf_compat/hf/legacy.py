"""The table of old argument names, their translation into current ones, and old names as attributes.

Each row says how the old value becomes current keywords, and how the old name is read as an attribute. An old name is
read from the current arguments if they have its meaning. Otherwise it has the value set by the user, or the default of
its last release. Setting it sets the current arguments. Subclasses may declare old names as fields, which then work as
in their release. `dataclasses.replace` copies the values of old names.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from types import CodeType, FrameType
from typing import TYPE_CHECKING, TypeAlias, cast

from hf_compat.errors import ArgumentError, InertArgumentWarning, UnknownArgument, warn_inert, warn_once
from hf_compat.hf.argument_values import (
    NO_DEFAULT,
    AcceleratorConfig,
    ArgumentCheck,
    ArgumentValue,
    default_of,
    read_as,
)
from hf_compat.hf.enums import default_logdir
from hf_compat.hf.rows import ROWS
from hf_compat.hf.value_types import (
    LARGEST_COUNT,
    Range,
    Unreadable,
    ValueType,
    choice,
    either,
    list_of,
    number,
    options_value,
    or_none,
    path_value,
    plain,
    read_choice,
    text_value,
    truth_value,
    typed,
    whole_number,
)
from hf_compat.runtime.launch import environment
from hf_compat.runtime.text import brief, is_secret, nearest, shown

if TYPE_CHECKING:
    from hf_compat.hf.fields import TrainingFields

# Current keywords of an old value. Empty if the value had no effect.
Translation: TypeAlias = dict[str, ArgumentValue]
_PLACE = "_given_by_old_names"  # the instance attribute with the values of old names


def remembered(args: object) -> Translation:
    """The values that arguments were given under old names."""
    return cast(Translation, vars(args).get(_PLACE, {}))


def remember(args: object, values: Translation) -> None:
    """Add values of old names, and forget those that are None. A copy of the arguments gets a dict of its own."""
    if values:
        held = {**remembered(args), **values}
        vars(args)[_PLACE] = {name: value for name, value in held.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class OldName:
    """One retired name."""

    lifetime: str  # releases that had it
    means: str  # its current name or replacement, for the documentation and for warnings
    translate: Callable[[ArgumentValue], Translation] = lambda value: {}  # converts the old value to current keywords
    inert: bool = False  # a value other than `harmless` has no effect here and is warned about
    harmless: tuple[ArgumentValue, ...] = (None,)  # values that had no effect
    kind: ValueType | None = None  # The type of its value. None takes the type of the current argument.
    default: ArgumentValue = None  # the attribute's value if it is not set
    # Reads the attribute from the current arguments. None reads the value that the user set, or the default.
    read: Callable[[ArgumentValue], ArgumentValue] | None = None
    reads_if_set: bool = False  # the attribute is None, as in 4.x, unless the user set the name
    # the current arguments that a false value sets, if the attribute is true
    off: Callable[[ArgumentValue], Translation] | None = None


def _renamed(lifetime: str, new: str, reads: bool = True, if_set: bool = True) -> OldName:
    return OldName(
        lifetime=lifetime,
        means=new,
        translate=lambda value: {} if value is None else {new: value},
        read=(lambda args: getattr(args, new)) if reads else None,
        reads_if_set=if_set,
    )


def _flag(
    lifetime: str, new: str, when_true: ArgumentValue, read: Callable[[ArgumentValue], ArgumentValue] | None = None
) -> OldName:
    """A flag that gave an argument one value. False restores the argument's default."""
    return OldName(
        lifetime=lifetime,
        means=f"{new}={json.dumps(when_true)}",
        kind=truth_value,
        translate=lambda value: {new: when_true} if value else {},
        read=read or (lambda args: bool(getattr(args, new) == when_true)),
        off=lambda args: {new: next(field.default for field in fields(args) if field.name == new)},
    )


def _item(lifetime: str, new: str, item: str, translated: ArgumentValue) -> OldName:
    """A flag that added an item to a list. False removes the item."""
    return replace(
        _flag(lifetime, new, translated, lambda args: item in getattr(args, new)),
        off=lambda args: {new: [held for held in getattr(args, new) if held != item]},
    )


def _inert(lifetime: str, kind: ValueType, default: ArgumentValue, why: str, *harmless: ArgumentValue) -> OldName:
    """A name that no longer has an effect, with further values that never had one."""
    return OldName(
        lifetime=lifetime,
        means=f"nothing: {why}",
        inert=True,
        kind=kind,
        default=default,
        harmless=(None, default, *harmless),
    )


def _warmup_steps(ratio: ArgumentValue) -> Translation:
    if ratio is None or ratio == 0:
        return {}
    # `warmup_steps=1.0` would be a single update. The float just below 1 is a ratio still, and as warmup steps are
    # rounded up it gives the whole run.
    return {"warmup_steps": min(float(ratio), math.nextafter(1.0, 0.0))}


def _warmup_ratio(args: ArgumentValue) -> float:
    given: float = remembered(args).get("warmup_ratio", 0.0)
    steps: float = args.warmup_steps
    return given if steps >= 1 or _warmup_steps(given).get("warmup_steps", 0) == steps else steps


def _logging_dir(args: ArgumentValue) -> str:
    """The folder for TensorBoard, which is fixed at the first reading."""
    folder: str | None = remembered(args).get("logging_dir")
    if folder is None:
        folder = environment.get("TENSORBOARD_LOGGING_DIR") or os.path.join(str(args.output_dir), default_logdir())
        remember(args, {"logging_dir": folder})
    return os.path.expanduser(folder)


def held_options(args: ArgumentValue, config: str) -> Mapping[str, ArgumentValue]:
    """The options of an argument that is a dict or an AcceleratorConfig. Others have none."""
    held = getattr(args, config)
    if isinstance(held, AcceleratorConfig):
        return held.to_dict()
    return held if isinstance(held, Mapping) else {}


def _in_config(lifetime: str, config: str, key: str, *kinds: ValueType) -> OldName:
    return OldName(
        lifetime=lifetime,
        means=f'{config}={{"{key}": …}}',
        kind=or_none(*kinds),
        translate=lambda value: {} if value is None else {config: {key: value}},
        read=lambda args: held_options(args, config).get(key),
        reads_if_set=True,
    )


@typed("true, false, or words of a closed set")
def _sharding(value: object) -> list[str]:
    """FairScale's sharding options, which 4.x converted to a list."""
    if isinstance(value, bool):
        return ["simple"] if value else []
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)):
        raise Unreadable
    known = ("simple", "zero_dp_2", "zero_dp_3", "offload", "auto_wrap")
    return [read_choice(word, known, within=True) for word in words]


_SHARE = replace(
    number(Range(low=0, high=1)), way_out="use `warmup_steps` with a whole number to give the warmup in updates."
)
_COUNT = whole_number(Range(low=0, high=LARGEST_COUNT))
_COUNT_OR_OFF = whole_number(Range(low=-1, high=LARGEST_COUNT))
# the name of torch's mixed precision
_AMP = ("amp", "cuda_amp", "cpu_amp")
_BACKEND = choice(("auto", "amp", "apex", "cuda_amp", "cpu_amp"))

_TORCHS = "only torch's own mixed precision is left"


OLD_NAMES: dict[str, OldName] = {
    "evaluation_strategy": _renamed("3.2-4.50", "eval_strategy", if_set=False),
    "evaluate_during_training": _flag("3.0-3.5", "eval_strategy", "steps"),
    # 4.x has written `no_cuda=False` beside `use_cpu=True`
    "no_cuda": replace(_flag("3.0-4.57", "use_cpu", True), means="use_cpu", kind=None),
    "logging_dir": OldName(
        lifetime="3.0-5.14",
        means="kept as the attribute `logging_dir`, where TensorBoard files go",
        kind=path_value,
        read=_logging_dir,
    ),
    "warmup_ratio": OldName(
        lifetime="4.4-5.14",
        means="warmup_steps below 1; a ratio of 1.0 is a warm-up of all updates",
        kind=_SHARE,
        translate=_warmup_steps,
        read=_warmup_ratio,
        off=lambda args: {"warmup_steps": 0},
    ),
    "group_by_length": _flag("4.3-5.14", "train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": _item("4.19-4.57", "include_for_metrics", "inputs", ["inputs"]),
    "include_tokens_per_second": _flag(
        *("4.34-4.57", "include_num_input_tokens_seen", "all"),
        read=lambda args: args.include_num_input_tokens_seen != "no",
    ),
    "per_gpu_train_batch_size": _renamed("3.0-4.57", "per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _renamed("3.0-4.57", "per_device_eval_batch_size"),
    "adafactor": _flag("4.2-4.57", "optim", "adafactor"),
    "push_to_hub_token": _renamed("4.8-4.57", "hub_token"),
    "push_to_hub_model_id": _renamed("4.8-4.57", "hub_model_id", reads=False),
    "push_to_hub_organization": OldName(
        lifetime="4.8-4.57",
        means="the part of hub_model_id before the slash",
        kind=text_value,
    ),
    "overwrite_output_dir": OldName(
        lifetime="3.0-4.57",
        means="nothing: a flag for scripts; an output folder is never wiped",
        kind=truth_value,
        default=False,
    ),
    "save_safetensors": _inert("4.28-4.57", truth_value, True, "weights are always written as safetensors"),
    "torchdynamo": _renamed("4.20-4.57", "torch_compile_backend"),
    "xpu_backend": _renamed("4.11-4.31", "ddp_backend"),
    "tpu_metrics_debug": _item("3.0-4.57", "debug", "tpu_metrics_debug", "tpu_metrics_debug"),
    "dispatch_batches": _in_config("4.32-4.50", "accelerator_config", "dispatch_batches", truth_value),
    "split_batches": _in_config("4.35-4.50", "accelerator_config", "split_batches", truth_value),
    "fsdp_min_num_params": OldName(
        lifetime="4.19-4.57",
        means='fsdp_config={"min_num_params": …}',
        kind=_COUNT,
        translate=lambda value: {"fsdp_config": {"min_num_params": value}} if value else {},
        read=lambda args: held_options(args, "fsdp_config").get("min_num_params", 0),
        off=lambda args: {"fsdp_config": {**held_options(args, "fsdp_config"), "min_num_params": 0}},
    ),
    "fsdp_transformer_layer_cls_to_wrap": _in_config(
        "4.21-4.57", "fsdp_config", "transformer_layer_cls_to_wrap", list_of(text_value), text_value
    ),
    "place_model_on_device": OldName(
        lifetime="5.2.0.dev0",
        means="kept as the attribute `place_model_on_device`, a property otherwise",
        kind=or_none(truth_value),
    ),
    "_n_gpu": replace(
        _inert("4.2-4.57", _COUNT_OR_OFF, -1, "the number of devices is found out", 0, 1),
        read=lambda args: args.n_gpu,
    ),
    "fp16_backend": _inert("4.1-4.57", _BACKEND, "auto", _TORCHS, *_AMP),
    "fp16_opt_level": _inert(
        *("3.0-4.57", choice(("O0", "O1", "O2", "O3")), "O1"),
        "Apex is gone; `fp16`/`bf16` use torch's own mixed precision",
    ),
    "half_precision_backend": replace(
        _inert("4.13-4.57", _BACKEND, "auto", _TORCHS, *_AMP),
        read=lambda args: (
            remembered(args).get("half_precision_backend") or remembered(args).get("fp16_backend", "auto")
        ),
    ),
    "jit_mode_eval": _inert("4.20-4.57", truth_value, False, "gone upstream; `torch_compile` took its place"),
    "model_parallel": _inert("4.1", truth_value, False, "gone upstream; load the model with a `device_map`"),
    "mp_parameters": _inert(
        *("4.5-4.57", either((text_value, options_value)), "", "SageMaker model parallelism is gone upstream"), {}, "{}"
    ),
    "past_index": _inert("3.1-4.57", _COUNT_OR_OFF, -1, "gone upstream"),
    "ray_scope": _inert("4.20-4.57", text_value, "last", "set the environment variable RAY_SCOPE"),
    "sharded_ddp": _inert(
        *("4.1-4.34", _sharding, []), "FairScale is gone upstream; `fsdp` or `deepspeed` took its place"
    ),
    "tp_size": _inert("4.50-4.51", _COUNT, 0, "tensor parallelism is set up when the model is loaded", 1),
    "tpu_num_cores": _inert(*("3.0-4.57", or_none(_COUNT), None), "set the environment variable TPU_NUM_CORES"),
    "use_ipex": _inert("4.20-4.56", truth_value, False, "Intel's extension is gone upstream"),
    "use_legacy_prediction_loop": _inert("4.6-4.57", truth_value, False, "the old loop is gone upstream"),
    "use_mps_device": _inert("4.22-4.57", truth_value, False, "Apple's devices are found by themselves"),
}

# Kept as attributes, because no current argument corresponds to them.
ATTRIBUTES_ONLY = ("logging_dir", "overwrite_output_dir", "place_model_on_device", "push_to_hub_organization")


def read_old(name: str, value: ArgumentValue, checks: Mapping[str, ArgumentCheck]) -> ArgumentValue:
    """Read the value of an old name. None means that it is not set."""
    row = OLD_NAMES[name]
    if value is None or (isinstance(value, str) and value == f"<{name.upper()}>"):  # masked in a dump of 4.x
        return None
    kind = row.kind or (checks[row.means].kind if row.means in checks else None)
    return value if kind is None else read_as(name, kind, value)


def translate_legacy(
    given: Translation, known: Collection[str], checks: Mapping[str, ArgumentCheck]
) -> tuple[Translation, Translation]:
    """Translate the keywords of a call for any release into current ones.

    Returns:
        The arguments by current names, and the values of old names, which the old attributes read.

    Raises:
        UnknownArgument: No release has had the name. The message suggests the nearest name.
        ArgumentError: Names contradict each other, or an old name has a wrong value.
    """
    arguments = {name: value for name, value in given.items() if name in known}
    said_by = dict.fromkeys(arguments, "")
    old: Translation = {}
    of_earlier = [name for name in given if name not in known]
    for name in of_earlier:
        if name not in OLD_NAMES:
            near = nearest(name, [*known, *OLD_NAMES], cutoff=0.5) or name
            text = f"{name}=<{near.upper()}>" if is_secret(near) else shown(name, given[name])
            raise UnknownArgument(
                f"TrainingArguments got an unknown argument `{text}`.\n\nHint: {_meant(name, sorted(known))}"
            )
    for name in of_earlier:
        old[name] = value = take_old(name, given[name], checks)
        for new, said in OLD_NAMES[name].translate(value).items():
            arguments[new] = merge(name, value, new, said, arguments.get(new), said_by.get(new, ""))
            said_by[new] = shown(name, value)
    name_repository(arguments, old)
    return arguments, old


def drop_defaults(values: Translation, checks: Mapping[str, ArgumentCheck]) -> None:
    """Remove the defaults that a parser adds beside old names, which they would contradict."""
    for old in OLD_NAMES.keys() & values.keys():
        for name in OLD_NAMES[old].translate(read_old(old, values[old], checks)):
            if name in values and checks[name].read(values[name]) == checks[name].default:
                del values[name]


def name_repository(arguments: Translation, old: Translation) -> None:
    """Put an organization before the repository's name, as 4.x did."""
    owner = old.get("push_to_hub_organization")
    name = arguments.get("hub_model_id")
    if owner is None or (name is not None and name.startswith(f"{owner}/")):
        return
    if name is not None and ("/" in name or "push_to_hub_model_id" not in old):
        raise ArgumentError(
            f"`push_to_hub_organization={brief(owner)}` and `hub_model_id={brief(name)}` contradict each other.\n\n"
            "Hint: keep `hub_model_id` only."
        )
    folder = os.path.basename(os.path.normpath(arguments.get("output_dir") or "trainer_output"))
    arguments["hub_model_id"] = f"{owner}/{name or folder}"


def is_harmless(name: str, value: ArgumentValue) -> bool:
    """Whether a value of an old name had no effect."""
    return value is None or any(type(value) is type(one) and value == one for one in OLD_NAMES[name].harmless)


def take_old(name: str, value: ArgumentValue, checks: Mapping[str, ArgumentCheck]) -> ArgumentValue:
    """Read the value of an old name, and warn if the name no longer has its effect."""
    read, row = read_old(name, value, checks), OLD_NAMES[name]
    if row.inert and not is_harmless(name, read):
        warn_inert(shown(name, read), row.means.removeprefix("nothing: "))
    return read


def _union(*parts: ArgumentValue) -> list[ArgumentValue]:
    """Join lists, or texts with spaces between the items."""
    return list(dict.fromkeys(item for part in parts for item in (part.split() if isinstance(part, str) else part)))


def merge(
    name: str, value: ArgumentValue, new: str, said: ArgumentValue, given: ArgumentValue, giver: str = ""
) -> ArgumentValue:
    """Merge `said`, the value of the argument `new` by an old name, with one given already, by `giver` or its name."""
    if given is None or given == said:
        return said
    if isinstance(said, dict) and (options := _options_of(given)) is not None:
        free = (None, 0) if name == "fsdp_min_num_params" else (None,)
        if all(options.get(key) in (*free, item, [item]) for key, item in said.items()):
            return {**options, **said}
        given = options
    elif isinstance(said, list) or new == "debug":
        return _union(given, said)
    elif name == "warmup_ratio":  # 4.x: an explicit count of updates wins over the ratio
        return given or said
    elif name == "push_to_hub_model_id" and given.endswith(f"/{said}"):  # a dump of 4.x has the owner's name
        return given
    other = f"`{shown(new, plain(given))}` was given too" + (f", by the old name `{giver}`" if giver else "")
    raise ArgumentError(
        f"`{shown(name, value)}` is an old name for `{shown(new, plain(said))}`, but {other}.\n\n"
        f"Hint: keep `{new}` only."
    )


def _options_of(given: ArgumentValue) -> Translation | None:
    """The options of an argument that differ from their defaults, or None for a file or no options."""
    if isinstance(given, AcceleratorConfig):
        default = AcceleratorConfig().to_dict()
        return {key: value for key, value in given.to_dict().items() if value != default[key]}
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = options_value.read(given)
    return given if isinstance(given, dict) else None


# Names of other libraries → argument.
_CALLED_ELSEWHERE = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
    "precision": "bf16",
    "gradient_clip_val": "max_grad_norm",
    "accumulate_grad_batches": "gradient_accumulation_steps",
}


def _meant(name: str, known: list[str]) -> str:
    """Suggest an argument with a similar spelling, or those that contain all words of the name."""
    if name in ROWS and name not in known:
        return "it is one of `Seq2SeqTrainingArguments`, for a `Seq2SeqTrainer`."
    near = _CALLED_ELSEWHERE.get(name) or nearest(name, known, cutoff=0.7) or nearest(name, OLD_NAMES, cutoff=0.8)
    if near is not None:
        return f"did you mean `{near}`?"
    words = {word.removesuffix("s") for word in name.lower().split("_")}
    holding = [one for one in known if words <= {word.removesuffix("s") for word in one.split("_")}]
    if not holding:
        return "see docs/arguments.md for the list of arguments."
    return f"did you mean {' or '.join(f'`{one}`' for one in holding[:3])}?"


# Attributes of one process, which are not copied from another process.
PROCESS_ATTRIBUTES = frozenset(
    {"_launch", "deepspeed_plugin", "device", "distributed_state", "fsdp_plugin_args", "hf_deepspeed_config"}
)


class OldAttributes:
    """Old names as attributes. A subclass's field, property or method of that name takes precedence."""

    if not TYPE_CHECKING:  # any other name is an error to a type checker, too

        def __getattr__(self, name: str) -> ArgumentValue:
            if name in OLD_NAMES:
                return read_attribute(self, name)
            return object.__getattribute__(self, name)  # raises


def chosen_logging_dir(args: TrainingFields) -> str | None:
    """The folder for TensorBoard that was set or read before, or None."""
    if hasattr(type(args), "logging_dir") or "logging_dir" in vars(args):  # a subclass's own
        return cast("str | None", getattr(args, "logging_dir"))  # noqa: B009 - no field of ours
    return cast("str | None", remembered(args).get("logging_dir"))


def read_attribute(args: ArgumentValue, name: str) -> ArgumentValue:
    """Read the attribute of an old name."""
    row, given = OLD_NAMES[name], remembered(args)
    if row.read is None:
        return given.get(name, row.default)
    return row.read(args) if name in given or not row.reads_if_set else None


def read_old_state(args: TrainingFields, state: Mapping[str, ArgumentValue]) -> None:
    """Copy the attributes of a pickled object, such as `training_args.bin` of any release.

    Files of our class are copied unchanged. Files of older releases lack current fields. Their old names set the
    current arguments that still have their defaults.
    """
    held = {field.name: field for field in fields(args)}
    lacking = {name: default_of(field) for name, field in held.items() if name not in state}
    left_out = {*OLD_NAMES, *PROCESS_ATTRIBUTES, *(name for name in state if name.startswith("_"))} if lacking else ()
    vars(args).update(lacking | {name: value for name, value in state.items() if name not in left_out})
    if not lacking:
        return
    for name in (name for name in OLD_NAMES if state.get(name) not in (None, OLD_NAMES[name].default)):
        remember(args, {name: state[name]})
        for today, said in OLD_NAMES[name].translate(state[name]).items():
            if today in held and state.get(today, held[today].default) == held[today].default:
                setattr(args, today, said)


def assign_old(args: TrainingFields, value: object, *, name: str) -> None:
    """Set the current arguments that replace an old name, and remember the value."""
    remember(args, {name: set_by_old(args, name, value)})


def set_by_old(args: TrainingFields, name: str, value: object) -> ArgumentValue:
    """Check and set the current arguments that replace an old name, and return the converted value."""
    read, row = take_old(name, value, args._checks()), OLD_NAMES[name]
    asked = row.translate(read)
    if name == "push_to_hub_organization" and read:
        repository = args.hub_model_id or os.path.basename(os.path.normpath(str(args.output_dir)))
        asked = {"hub_model_id": f"{read}/{repository.rpartition('/')[2]}"}
    elif name == "warmup_ratio" and args.warmup_steps >= 1:  # 4.x: a count of updates wins
        asked = {}
    elif not asked and row.off is not None and read_attribute(args, name):
        for new, said in row.off(args).items():
            setattr(args, new, said)
    for new, said in asked.items():
        if isinstance(said, dict):
            said = {**held_options(args, new), **said}
        elif isinstance(said, list) or new == "debug":
            said = _union(getattr(args, new), said)
        setattr(args, new, said)
    return read


@functools.lru_cache(maxsize=64)
def declared_old_names(kind: type) -> Mapping[str, object]:
    """The old names that a class has as fields, except properties, with their defaults."""
    return {
        one.name: default_of(one)
        for one in fields(kind)
        if one.name in OLD_NAMES and not isinstance(getattr(kind, one.name, None), property)
    }


def obey_declared(args: TrainingFields) -> None:
    """Set the current arguments that declared old names replace, before they are normalised."""
    kind: type = type(args)
    defaults = {one.name: default_of(one) for one in fields(args)}
    for today, said in asked_by_declared(args, declared_old_names(kind), defaults, args._checks()).items():
        setattr(args, today, said)


def follow_declared(args: TrainingFields, name: str, value: ArgumentValue) -> None:
    """Set the current arguments of a declared old name when a script sets the field later."""
    kind: type = type(args)
    declared = declared_old_names(kind)
    if name in declared and keeps_its_meaning(name, declared[name], args._checks()):
        set_by_old(args, name, value)


def asked_by_declared(
    args: object, declared: Mapping[str, object], defaults: Mapping[str, object], checks: Mapping[str, ArgumentCheck]
) -> Translation:
    """The current arguments that declared old names change.

    A current argument wins over an old name's default, unless it has its own default.
    """
    changed: Translation = {}
    read: Translation = {}
    for name, default in declared.items():
        value = getattr(args, name)
        if not keeps_its_meaning(name, default, checks):
            warn_once(
                f"`{shown(name, value)}` of {type(args).__name__} has no effect by itself. The field has the name of "
                f"an earlier release's argument, but another meaning.\n\nHint: rename the field. "
                f"Today the argument is {OLD_NAMES[name].means}.",
                InertArgumentWarning,
            )
            continue
        read[name] = take_old(name, value, checks)
        for new, said in OLD_NAMES[name].translate(read[name]).items():
            held = changed.get(new, getattr(args, new, None))  # an older release lacks some
            if held is None or held == defaults.get(new):
                held = None
            elif value == default and not isinstance(said, (dict, list)):
                continue
            changed[new] = merge(name, value, new, said, held)
    if "push_to_hub_organization" in read:
        place: Translation = {one: changed.get(one, getattr(args, one)) for one in ("hub_model_id", "output_dir")}
        name_repository(place, {**remembered(args), **read})
        changed["hub_model_id"] = place["hub_model_id"]
    return changed


def keeps_its_meaning(name: str, default: object, checks: Mapping[str, ArgumentCheck]) -> bool:
    """Whether the default of a declared field is a value that the old name could have.

    `name: str = field(default=…),` gives a tuple by its last comma. Releases 4.x obey what the command line gives then.
    """
    if isinstance(default, tuple) and len(default) == 1 and isinstance(default[0], dataclasses.Field):
        default = default_of(default[0])
    try:
        read_old(name, None if default is NO_DEFAULT else default, checks)
    except ArgumentError:
        return False
    return True


# Python 3.13 calls the object's `__replace__`, which has the code of this other function.
REPLACE: CodeType = getattr(dataclasses, "_replace", dataclasses.replace).__code__


def source_of_replace(kind: type, caller: FrameType) -> TrainingFields | None:
    """The object that `dataclasses.replace` is copying.

    Python before 3.13 has no hook, and `replace` calls the class like any caller.
    """
    source: TrainingFields | None = caller.f_locals.get("obj", caller.f_locals.get("self"))
    return source if type(source) is kind else None


def without_outdated(
    source: TrainingFields, given: Mapping[str, object], checks: Mapping[str, ArgumentCheck]
) -> dict[str, ArgumentValue]:
    """Drop copied values from a call's keywords that an old name among the keywords changes."""
    changed: set[str] = set()
    kind: type = type(source)
    declared = declared_old_names(kind)
    for name in OLD_NAMES.keys() & given.keys():
        before = getattr(source, name)
        is_copied = name in declared and given[name] == before  # `replace` hands over every field
        if is_copied or (name in declared and not keeps_its_meaning(name, declared[name], checks)):
            continue
        for value in (given[name], before):
            asked = OLD_NAMES[name].translate(read_old(name, value, checks))
            changed |= {new for new, said in asked.items() if not isinstance(said, (dict, list))}  # these are joined
    return {name: v for name, v in given.items() if not (name in changed and v is getattr(source, name, None))}


def hand_over_old(source: TrainingFields, copied: TrainingFields, given: Mapping[str, object]) -> None:
    """Copy the values of the source's old names, except those that the call gives."""
    remember(copied, {name: value for name, value in remembered(source).items() if name not in given})
    if source._defaults_of_profile and copied.compat == source.compat:
        unchanged = (name for name in source._defaults_of_profile if getattr(source, name) == given.get(name))
        copied._defaults_of_profile = tuple(unchanged)
