"""`TrainerState`, which callbacks read, and `TrainerControl` with its five flags."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from hf_compat.errors import CallbackError
from hf_compat.hf.enums import INTERVAL_KINDS
from hf_compat.hf.search import hp_params
from hf_compat.runtime.indented import indented_json
from hf_compat.runtime.text import brief

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments


# The state of a callback or of the control, as a dict in JSON types, or a list of such dicts.
ExportedState: TypeAlias = dict[str, Any]
#: Fields with the updates between logs, evaluations and saves.
INTERVALS = tuple(f"{kind}_steps" for kind in INTERVAL_KINDS)


class ExportableState:
    """Mixin for callbacks whose state goes into checkpoints.

    `state()` returns `{"args": constructor keywords, "attributes": attributes to set afterwards}`, all of it JSON.

    Mirrors:
        `transformers.trainer_callback.ExportableState`.
    """

    def state(self) -> ExportedState:
        """Export the values that rebuild this object."""
        raise NotImplementedError(f"{type(self).__name__} inherits ExportableState and needs a `state()` method")

    @classmethod
    def from_state(cls, state: ExportedState) -> Self:
        """Build an object from the result of `state()`."""
        instance = cls(**state.get("args", {}))
        for name, value in state.get("attributes", {}).items():
            setattr(instance, name, value)
        return instance


def is_exportable(candidate: object) -> bool:
    """Whether a callback has a state to save, by duck typing."""
    return callable(getattr(candidate, "state", None)) and callable(getattr(type(candidate), "from_state", None))


def export_states(candidates: Iterable[Any]) -> ExportedState:
    """Collect the states of exportable objects under their class names. Several states of one class become a list."""
    exported: ExportedState = {}
    for candidate in candidates:
        if not is_exportable(candidate):
            continue
        name, state = type(candidate).__name__, candidate.state()
        parts = (state.get("args", {}), state.get("attributes", {})) if isinstance(state, dict) else (None, None)
        if not isinstance(parts[0], dict) or not isinstance(parts[1], dict):
            raise CallbackError(
                f"{name}.state() returned {brief(state)}, which cannot be read back.\n\n"
                "Hint: return {'args': {…}, 'attributes': {…}}."
            )
        try:
            json.dumps(state)
        except (TypeError, ValueError, RecursionError) as error:
            raise CallbackError(
                f"{name}.state() returned something that JSON does not have: {error}.\n\n"
                "Hint: return numbers, text, lists and dicts."
            ) from error
        earlier = exported.get(name)
        exported[name] = state if earlier is None else [*(earlier if isinstance(earlier, list) else [earlier]), state]
    return exported


@dataclass
class TrainerState:
    """The progress of a run. One step is one update, of any number of micro-batches.

    Args:
        epoch: Epochs done, with a decimal part.
        global_step: Updates done.
        max_steps: Updates planned.
        logging_steps: Updates between logs.
        eval_steps: Updates between evaluations.
        save_steps: Updates between checkpoints.
        train_batch_size: Samples of a micro-batch.
        num_train_epochs: Epochs planned.
        num_input_tokens_seen: Input tokens so far, if counted.
        total_flos: Floating-point operations so far.
        log_history: Every log, with its step.
        best_metric: Best value of the tracked metric.
        best_global_step: Update of the best metric.
        best_model_checkpoint: Folder of the best checkpoint.
        is_local_process_zero: First process of this machine.
        is_world_process_zero: First process of all.
        is_hyper_param_search: Within a search over hyperparameters.
        trial_name: Name of the search's trial.
        trial_params: The trial's hyperparameters.
        stateful_callbacks: Exported states by class name. A list of objects is exported on construction.

    Mirrors:
        `transformers.TrainerState`. Fields and JSON are the same.
    """

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, float]] = None  # type: ignore[assignment]  # None means an empty list, as in HF
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, str | float | int | bool] | None = None
    stateful_callbacks: Any = None  # exported states, or the callbacks to export

    def __post_init__(self) -> None:
        if self.log_history is None:
            self.log_history = []
        if self.stateful_callbacks is None:
            self.stateful_callbacks = {}
        elif not isinstance(self.stateful_callbacks, dict):
            for candidate in self.stateful_callbacks:
                if not is_exportable(candidate):
                    kind = type(candidate).__name__
                    raise CallbackError(f"{kind} has no state.\n\nHint: inherit ExportableState and write `state()`.")
            self.stateful_callbacks = export_states(self.stateful_callbacks)

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        """Write the state as JSON.

        Raises:
            CallbackError: A field holds a value that JSON does not have. The message names the field.
        """
        names = [field.name for field in dataclasses.fields(self)]
        try:
            text = self._as_json(names)
        except (TypeError, ValueError, RecursionError) as error:
            for name in names:
                try:
                    json.dumps(getattr(self, name), sort_keys=True)
                except (TypeError, ValueError, RecursionError) as found:
                    raise CallbackError(
                        f"`state.{name}` cannot be saved: {found}.\n\n"
                        "Hint: log numbers through `trainer.log`, which leaves out what JSON does not have."
                    ) from error
            raise CallbackError(f"The state cannot be saved: {error}.") from error
        with open(json_path, "w", encoding="utf-8") as file:
            file.write(text + "\n")

    def _as_json(self, names: list[str]) -> str:
        try:
            return indented_json({name: getattr(self, name) for name in names}, 2, sort_keys=True)
        except TypeError:  # a user's dataclass is among the values, perhaps
            return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> TrainerState:
        """Read a state that `save_to_json` or `transformers` wrote."""
        with open(json_path, encoding="utf-8") as file:
            return cls(**json.load(file))

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Copy the three intervals from the arguments. Shares below 1 become updates, rounded up."""
        for name in INTERVALS:
            steps = getattr(args, name)
            if steps is not None:
                setattr(self, name, math.ceil(max_steps * steps) if steps < 1 else steps)

    def init_training_references(self, trainer: Any, max_steps: int, num_train_epochs: int, trial: object) -> None:
        """Copy the values of a `Trainer` at the start of a run."""
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        if trainer.hp_name is not None and trainer._trial is not None:
            self.trial_name = trainer.hp_name(trainer._trial)
        self.trial_params = None if trial is None else hp_params(trial)
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()


@dataclass
class TrainerControl(ExportableState):
    """The flags by which callbacks steer a run.

    Args:
        should_training_stop: Stop after this update. It stays set.
        should_epoch_stop: Leave this epoch. The next epoch clears it.
        should_save: Save now. `on_save` and the next update clear it.
        should_evaluate: Evaluate now. `on_evaluate` and the next update clear it.
        should_log: Log now. `on_log` and the next update clear it.

    Mirrors:
        `transformers.TrainerControl`.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = self.should_evaluate = self.should_log = False

    def state(self) -> ExportedState:
        """Export the flags."""
        return {"args": dataclasses.asdict(self), "attributes": {}}


CONTROL_FLAGS = frozenset(field.name for field in dataclasses.fields(TrainerControl))
