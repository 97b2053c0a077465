"""Which arguments the project takes over, and what is said of the others."""

from __future__ import annotations

from dataclasses import fields

from hf_compat.hf.argument_values import ROWS
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.argument_support import default_of
from hf_compat.runtime.text import shown
from hf_compat.tools.ejection.findings import Findings


def check_arguments(args: TrainingArguments, findings: Findings) -> None:
    """Say what becomes of the arguments that are set and that the project does not take over."""
    for field in fields(TrainingArguments):
        row, default, value = ROWS[field.name], default_of(field), getattr(args, field.name)
        is_set = (value is not None) if default is None else bool(value != default)
        if not is_set or row.ejected in ("taken", "nothing"):
            continue
        told = shown(field.name, value)
        if row.ejected == "refused":
            findings.forbid(f"`{told}`: {row.says} cannot be written in plain Lightning here.", "leave it out.")
        elif row.ejected == "sharded":
            findings.forbid(
                f"`{told}` spreads the weights over devices, and the project clips gradients, chooses parameter groups "
                "and saves the model by whole weights.",
                f"leave it out; Lightning's {row.says} goes into `config.yaml` afterwards, with its own clipping in "
                "the place of the project's.",
            )
        else:
            findings.tell(f"`{told}` is left out: {row.says}.")
