"""Schedules of DeepSpeed, as a section `scheduler` of its configuration asks for them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

import torch

from hf_compat.errors import ArgumentError

State = dict[str, object]  # DeepSpeed's own


class DeepSpeedSchedule:
    """A schedule of DeepSpeed that the training steps, once an update, as DeepSpeed's engine does.

    Args:
        section: The section: `type`, and `params` without an `auto`.
        optimizer: Whose rates it sets.

    Raises:
        ArgumentError: DeepSpeed refuses the section.

    Mirrors:
        `accelerate.utils.DeepSpeedSchedulerWrapper`, 1.15.
    """

    def __init__(self, section: Mapping[str, object], optimizer: torch.optim.Optimizer) -> None:
        kind = getattr(importlib.import_module("deepspeed.runtime.lr_schedules"), str(section["type"]))
        try:
            self.scheduler = kind(optimizer, **cast(State, section.get("params") or {}))
        except (TypeError, ValueError, AssertionError) as error:
            raise ArgumentError(
                f"The DeepSpeed configuration's section `scheduler` does not work: {section['type']} says: {error}.\n\n"
                "Hint: mend its `params`, or leave the section out and set `lr_scheduler_type`."
            ) from error
        self.optimizer = optimizer

    def step(self) -> None:
        """Set the rates of the next update."""
        self.scheduler.step()

    def get_last_lr(self) -> list[float]:
        """The rates in force, one for each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> State:
        """What DeepSpeed keeps of it."""
        state: State = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: State) -> None:
        """Go on from a state."""
        self.scheduler.load_state_dict(state_dict)
