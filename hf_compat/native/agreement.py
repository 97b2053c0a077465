"""One set of arguments for a native module and its data module, which may each have been given their own."""

from __future__ import annotations

import copy
from dataclasses import fields

from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import ROWS
from hf_compat.native.steps import NativeSteps
from hf_compat.plan.argument_support import default_of

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
        if name in ROWS and ROWS[name].data and of_model == default:
            values[name] = of_data
        else:
            problems.append(f"`{name}={of_data!r}` of HFDataModule's arguments, {name}={of_model!r} of HFModule's")
    if problems:
        raise ArgumentError(
            f"HFModule and HFDataModule were given different arguments: {'; '.join(problems)}.\n\n"
            "Hint: give both the same `TrainingArguments`, or none to HFDataModule, which takes HFModule's then."
        )
    return values
