"""Arguments that are not ours: `transformers.TrainingArguments`. HF words only."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from hf_compat.errors import ArgumentError
from hf_compat.hf.arguments import TrainingArguments

# What upstream resolves into objects of Accelerate and DeepSpeed; ours are made from the fields.
_DERIVED = frozenset({"distributed_state", "deepspeed_plugin", "hf_deepspeed_config", "fsdp_plugin_args", "device"})


def adopt_arguments(args: object) -> TrainingArguments:
    """Return arguments as ours: ours as they are, `transformers`' own field by field.

    Raises:
        ArgumentError: An object that is neither.
    """
    if isinstance(args, TrainingArguments):
        return args
    names = [field.name for field in fields(TrainingArguments)]
    if isinstance(args, type) or not is_dataclass(args) or not hasattr(args, "output_dir"):
        raise ArgumentError(f"`args` is a {type(args).__name__}.\n\nHint: pass `hf_compat.TrainingArguments(…)`.")
    ours = TrainingArguments(**{name: getattr(args, name) for name in names if hasattr(args, name)})
    for name, value in vars(args).items():  # fields of a subclass, and attributes that a script has set
        if name not in names and name not in _DERIVED and not name.startswith("_"):
            setattr(ours, name, value)
    return ours
