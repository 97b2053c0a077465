"""One set of arguments for a native module and its data module, which may each have been given their own."""

from __future__ import annotations

import copy
from dataclasses import fields

from hf_compat.errors import ArgumentError
from hf_compat.native.steps import NativeSteps
from hf_compat.plan.argument_support import default_of

# What loading data reads. Whichever module was given another value than the default sets it for both.
_OF_DATA = frozenset(
    {
        "accelerator_config", "average_tokens_across_devices", "data_seed", "dataloader_drop_last",
        "dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_num_workers",
        "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
        "eval_accumulation_steps", "gradient_accumulation_steps", "group_by_length", "ignore_data_skip",
        "include_num_input_tokens_seen", "label_names", "length_column_name", "per_device_eval_batch_size",
        "per_device_train_batch_size", "remove_unused_columns", "seed", "split_batches", "train_sampling_strategy",
        "use_cpu",
    }
)  # fmt: skip
# Where results go: a native run has Lightning's folders and loggers.
_OF_NO_EFFECT = frozenset({"output_dir", "run_name", "logging_dir", "report_to"})


def share_arguments(model: NativeSteps, data: NativeSteps) -> None:
    """Let the steps of a module and those of its data module work with the same arguments.

    Args:
        model: The steps of the module.
        data: The steps of the data module.

    Raises:
        ArgumentError: Both set an argument to different values, or the data module sets one of training.
    """
    if model.args is data.args:
        return
    values = _values_of_data(model, data) if data.has_own_arguments else {}
    if values:
        together = copy.copy(model.args)
        together.__dict__.update(values)
        model.use_arguments(together)
    data.use_arguments(model.args)


def _values_of_data(model: NativeSteps, data: NativeSteps) -> dict[str, object]:
    """Return the arguments that the data module sets and the module leaves open."""
    values: dict[str, object] = {}
    problems = []
    for field in fields(model.args):
        name, default = field.name, default_of(field)
        of_model, of_data = getattr(model.args, name), getattr(data.args, name, default)
        is_replaced = name == "learning_rate" and model.set_rate is not None
        if is_replaced or name in _OF_NO_EFFECT or of_data in (default, of_model):
            continue
        if name in _OF_DATA and of_model == default:
            values[name] = of_data
        else:
            problems.append(f"`{name}={of_data!r}` of HFDataModule's arguments, {name}={of_model!r} of HFModule's")
    if problems:
        raise ArgumentError(
            f"HFModule and HFDataModule were given different arguments: {'; '.join(problems)}.\n\n"
            "Hint: give both the same `TrainingArguments`, or none to HFDataModule, which takes HFModule's then."
        )
    return values
