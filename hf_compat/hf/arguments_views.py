"""Sizes, devices, ranks, dumps and the `set_*` methods of `TrainingArguments`.

Each mirrors the method of the same name of `transformers.TrainingArguments`. A `set_*` method reads all values
before it sets the first one, so a call that raises changes nothing.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Self

from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import LEVELS, AcceleratorConfig, ArgumentValue, read_all
from hf_compat.hf.arguments_rules import generation_beside
from hf_compat.hf.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from hf_compat.hf.fields import TrainingFields
from hf_compat.hf.legacy import PROCESS_ATTRIBUTES, remembered
from hf_compat.hf.rows import OWN_ARGUMENTS
from hf_compat.runtime.indented import indented_json
from hf_compat.runtime.text import Absent, is_secret

if TYPE_CHECKING:
    import torch

    from hf_compat.hf.process_state import ProcessState

# Helpers of upstream's own methods → the replacement.
_HELPERS = {
    "_apply_legacy_fsdp_to_config": "set `fsdp_config`",
    "_dict_dtype_to_str": "call `to_dict()`, which writes torch's types as text",
    "_dict_torch_dtype_to_str": "call `to_dict()`, which writes torch's types as text",
    "_process_fsdp_args": "set `fsdp` and `fsdp_config`",
    "is_torch_greater_or_equal_than_2_8": "compare `torch.__version__`",
}
_IMMUTABLE = frozenset((bool, int, float, str, type(None)))
_COUNTING = (("logging_strategy", "logging_steps"), ("eval_strategy", "eval_steps"), ("save_strategy", "save_steps"))


class ArgumentViews(TrainingFields):
    """Properties, dumps and group setters of `TrainingArguments`."""

    framework = "pt"  # a property of 4.x

    @functools.cached_property
    def distributed_state(self) -> ProcessState:
        """The processes, in Accelerate's words. The process group is Lightning's.

        It is Accelerate's own `PartialState` if that is installed. The process has one, which follows the arguments
        made last.
        """
        from hf_compat.hf.process_state import ProcessState, may_be_asked, share_processes

        ours = ProcessState(self)
        return share_processes(self, ours.distributed_type) if may_be_asked() else ours

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the trainer moves the model to the device. None lets it decide (True in 4.x).

        Subclasses may override it.
        """
        chosen: bool | None = remembered(self).get("place_model_on_device")
        return True if chosen is None and generation_beside() == "4" else chosen

    @property
    def _no_sync_in_gradient_accumulation(self) -> bool:
        """Whether only an update's last micro-batch exchanges gradients. DeepSpeed decides by itself."""
        return not self.deepspeed

    def get_process_log_level(self) -> int:
        """The `logging` level of this process. `passive` means the current level."""
        name = self.log_level if self.should_log else self.log_level_replica
        return LEVELS.get(name, logging.getLogger("hf_compat").getEffectiveLevel())

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Count the updates of warmup. A `warmup_steps` below 1 is a share of all updates, rounded up.

        Mirrors:
            `transformers.TrainingArguments.get_warmup_steps`.
        """
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    def to_dict(self) -> dict[str, ArgumentValue]:
        """Convert the fields to plain values, with masked secrets, and our own arguments that are set.

        Mirrors:
            `transformers.TrainingArguments.to_dict`.
        """
        dumped = {}
        for field in fields(self):
            if field.init:
                dumped[field.name] = _plain(field.name, getattr(self, field.name))
        # `compat` only gave defaults, whose values the fields have
        for name in OWN_ARGUMENTS.keys() - {"compat"}:
            if name not in dumped and (value := getattr(self, name)):
                dumped[name] = value
        return dumped

    def to_json_string(self) -> str:
        """Convert the fields to JSON."""
        return indented_json(self.to_dict(), 2, default=str)

    def to_sanitized_dict(self) -> dict[str, bool | float | str | torch.Tensor]:
        """Convert the fields and batch sizes to values that TensorBoard's hparams accept."""
        import torch

        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        plain_types = (bool, int, float, str, torch.Tensor)
        return {name: value if type(value) in plain_types else str(value) for name, value in values.items()}

    def __str__(self) -> str:
        # As upstream prints it: enums by their member, text without quotes, and no secret
        lines = ""
        for name, plain in sorted(self.to_dict().items()):
            value = getattr(self, name)
            if isinstance(value, AcceleratorConfig):
                plain = value.to_dict()
            elif isinstance(value, Enum) or (isinstance(value, list) and isinstance(next(iter(value), None), Enum)):
                plain = value
            lines += f"{name}={plain},\n"
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in PROCESS_ATTRIBUTES}

    def _set(self, given: Mapping[str, object], *prefixes: str, **renamed: str) -> Self:
        """Set the arguments of a method's parameters. An argument has the parameter's name, or a prefix before it.

        Args:
            given: The method's parameters and other arguments, with their values.
            prefixes: The beginnings of the arguments' names.
            renamed: Parameters with another name → argument.
        """
        checks, values = self._checks(), {}
        for name, value in given.items():
            names = (renamed.get(name, ""), *(f"{prefix}{name}" for prefix in prefixes), name)
            argument = next((one for one in names if one in checks), None)
            if argument is not None:  # `self` and `jit_mode` are none
                values[argument] = value
        good, problems = read_all(checks, values)
        problems += [
            f"`strategy='steps'` needs `steps` above 0 (it sets `{steps}`).\n\nHint: give a number of updates."
            for kind, steps in _COUNTING
            if good.get(kind) == "steps" and good.get(steps) == 0
        ]
        if problems:
            raise ArgumentError("\n\n".join(problems))
        for name, value in good.items():
            setattr(self, name, value)
        if given.get("jit_mode"):
            setattr(self, "jit_mode_eval", True)  # noqa: B010 - an old name without a field
        return self

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> Self:
        """Set batch size, length and optimizer numbers of the training, and `do_train`."""
        recompute = activation_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        given = {**locals(), "activation_checkpointing": recompute, "gradient_checkpointing": recompute}
        return self._set(
            {**given, "do_train": True}, batch_size="per_device_train_batch_size", num_epochs="num_train_epochs"
        )

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
        jit_mode: bool = False,
    ) -> Self:
        """Set when and how to evaluate, and `do_eval`. `jit_mode` is `jit_mode_eval` of 4.x."""
        given = {**locals(), "delay": 0 if delay is None else delay}
        self._set(given, "eval_", "prediction_", batch_size="per_device_eval_batch_size")
        return self._set({"do_eval": self.eval_strategy != IntervalStrategy.NO})

    def set_testing(self, batch_size: int = 8, loss_only: bool = False, jit_mode: bool = False) -> Self:
        """Set how to predict, and `do_predict`. `jit_mode` is `jit_mode_eval` of 4.x."""
        return self._set({**locals(), "do_predict": True}, "prediction_", batch_size="per_device_eval_batch_size")

    def set_save(
        self,
        strategy: str | SaveStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set when to save and how much to keep."""
        return self._set(locals(), "save_")

    def set_logging(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Set the content, the time and the place of logs."""
        return self._set(locals(), "logging_", "log_", replica_level="log_level_replica")

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Set the uploads to the Hub, and `push_to_hub`."""
        return self._set({**locals(), "push_to_hub": True}, "hub_")

    def set_optimizer(
        self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the optimizer and its numbers."""
        return self._set(locals(), "adam_", "optim_", name="optim")

    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
        warmup_ratio: float = 0,
    ) -> Self:
        """Set the learning-rate schedule and its length.

        `warmup_ratio` is an argument until 5.0. It is a share, and counts if `warmup_steps` is 0. In 4.x it came before
        `warmup_steps`.
        """
        if warmup_ratio > 1:
            warmup_steps, warmup_ratio = warmup_ratio, warmup_steps
        given = {**locals(), "warmup_steps": warmup_steps or warmup_ratio}
        return self._set(given, name="lr_scheduler_type", num_epochs="num_train_epochs")

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set how data is loaded."""
        return self._set(locals(), "dataloader_", "per_device_", sampler_seed="data_seed")


for _name, _way_out in _HELPERS.items():
    setattr(ArgumentViews, _name, Absent(_name, _way_out))


def _plain(name: str, value: ArgumentValue) -> ArgumentValue:
    if name.endswith("_token") or (is_secret(name) and value is not None):
        return f"<{name.upper()}>"
    if isinstance(value, Enum):
        return value.value
    if name == "parallelism_config" and value is not None:
        return value.to_json()
    if isinstance(value, AcceleratorConfig):
        options = dict(vars(value))
        options.pop("use_configured_state", None)  # not an option, so upstream omits it as well
        return options
    if name == "report_to":  # Lightning loggers among the names
        return [item if isinstance(item, str) else type(item).__name__ for item in value]
    if isinstance(value, list):
        return [item.value if isinstance(item, Enum) else item for item in value]
    if isinstance(value, dict):
        plain = {}
        for key, item in value.items():
            plain[key] = _plain(str(key), item)
        return plain
    if (type(value).__module__, type(value).__name__) == ("torch", "dtype"):
        return str(value).removeprefix("torch.")
    return value if type(value) in _IMMUTABLE else copy.copy(value)
