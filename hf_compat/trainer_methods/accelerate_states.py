"""`accelerator.save_state`, `load_state` and what belongs to them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.accelerate_folder import StateFolder, numbered, numbered_object
from hf_compat.checkpoint.forms import check_schedule, check_weights
from hf_compat.checkpoint.model_state import DeepSpeedState, ModelState, make_model_state
from hf_compat.checkpoint.model_state.base import TorchState
from hf_compat.checkpoint.pickles import Plain
from hf_compat.checkpoint.reading import Weights, fitting
from hf_compat.errors import ArgumentError, CheckpointError, CheckpointWriteError, UnsupportedArgument, warn_once
from hf_compat.hf.process_state import ProcessMembers
from hf_compat.optim.prepared import Prepared, unprepared
from hf_compat.runtime.collectives import agree
from hf_compat.runtime.rng import RandomStates, write_rng

# Called before states are written, with models, weights and the folder; before they are read, with models and folder.
StateHook: TypeAlias = Callable[..., None]
_ONLY_PLAIN = "only tensors and plain containers are read, on the CPU first"


@runtime_checkable
class Stateful(Protocol):
    """An object that `register_for_checkpointing` takes."""

    def state_dict(self) -> dict[str, object]:
        """Return the state, of tensors and plain containers."""

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Take the state up."""


class StateMembers(ProcessMembers):
    """What writes and reads the states of all that is trained and prepared.

    Mirrors:
        `accelerate.Accelerator.save_state` and `load_state`, 1.15: their files have the same names.

    Differs:
        The schedule that a fit steps is saved, too. Models that are sharded are written whole.
    """

    _models: list[Prepared]
    _optimizers: list[Prepared]
    _schedulers: list[Prepared]
    scaler: torch.amp.GradScaler | None
    step: int

    def _begin_without_states(self) -> None:
        self._custom_objects: list[Stateful] = []
        self._save_model_state_pre_hook: dict[int, StateHook] = OrderedDict()
        self._load_model_state_pre_hook: dict[int, StateHook] = OrderedDict()
        # of a fit that is under way, or of the last one
        self._trained_state: ModelState | None = None
        self._trained_schedule: Prepared = None
        self.save_iteration = 0

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

    def register_for_checkpointing(self, *objects: Stateful) -> None:
        """Have objects saved and loaded with the other states.

        Raises:
            ArgumentError: One of them has no `state_dict` and `load_state_dict`; none is registered.
        """
        unfit = [repr(one) for one in objects if not isinstance(one, Stateful)]
        if unfit:
            raise ArgumentError(
                f"`register_for_checkpointing` got {', '.join(unfit)}, without `state_dict` and `load_state_dict`.\n\n"
                "Hint: give the class both methods."
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: StateHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before states are written; what it takes out of `weights` is not."""
        return _registered(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: StateHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` before states are read; what it takes out of `models` is not."""
        return _registered(self._load_model_state_pre_hook, hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: object,
    ) -> Path:
        """Write models, optimizers, schedules, the gradient scaler, registered objects and random states to a folder.

        Every process calls it. Inside a fit, what is trained comes first; `trainer.state` is no part of it.

        Args:
            output_dir: The folder, which may exist.
            safe_serialization: Write weights with safetensors.
            save_model_func_kwargs: Of DeepSpeed's own saving; none is taken.

        Returns:
            The folder.

        Raises:
            ArgumentError: No folder, or a keyword of DeepSpeed's.
            CheckpointWriteError: The files cannot be written; those of before are as they were.
            UnsupportedArgument: DeepSpeed trains.
        """
        if output_dir is None or save_model_func_kwargs:
            what = "no `output_dir`" if output_dir is None else ", ".join(save_model_func_kwargs)
            raise ArgumentError(f"`accelerator.save_state` got {what}.\n\nHint: pass the folder, and nothing else.")
        if not self._models:
            warn_once("`accelerator.save_state`: no model is prepared, and none is trained yet: none is saved.")
        folder = StateFolder(os.path.expanduser(output_dir))
        weights = [self._held(model).whole_weights() for model in self._models]
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, weights, folder.path)
        optimizers = [self._optimizer_state(place) for place in range(len(self._optimizers))]
        agree(_attempt(folder, lambda: self._write(folder, weights, optimizers, safe_serialization)))
        agree(_attempt(folder, folder.land))
        self.save_iteration += 1
        return Path(folder.path)

    def _write(self, folder: StateFolder, weights: list[Weights], optimizers: list[Plain], is_safe: bool) -> None:
        if self.is_main_process:
            for index, one in enumerate(weights):
                folder.write_weights(one, index, is_safe)
            for index, content in enumerate(optimizers):
                folder.write_torch(content, numbered("optimizer.bin", index))
            for index, schedule in enumerate(self._all_schedules()):
                folder.write_torch(schedule.state_dict(), numbered("scheduler.bin", index))
            if self.scaler is not None:
                folder.write_torch(self.scaler.state_dict(), names.SCALER_NAME)
            for index, custom in enumerate(self._custom_objects):
                folder.write_object(custom.state_dict(), index, type(custom).__name__)
        folder.write_random_states(self.process_index, self.step)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, object] | None = None,
        strict: bool = True,
        map_location: object = None,
    ) -> None:
        """Load what `save_state`, here or of Accelerate, has written.

        Every process calls it. All files are read before any state is touched.

        Args:
            input_dir: The folder.
            load_kwargs: Of `torch.load`, which always reads tensors and plain containers alone here.
            strict: Refuse weights that are missing or that a model does not know.
            map_location: Where tensors are read to; they end where those of the models and optimizers are.

        Raises:
            ArgumentError: No folder.
            CheckpointError: There is no such folder, a file is missing, damaged, or does not fit.
        """
        if input_dir is None:
            raise ArgumentError("`accelerator.load_state` got no `input_dir`.\n\nHint: pass the folder.")
        if load_kwargs:
            warn_once(f"`load_kwargs={dict(load_kwargs)!r}` have no effect: {_ONLY_PLAIN}.")
        folder = StateFolder(os.path.expanduser(input_dir))
        if not os.path.isdir(folder.path):
            raise CheckpointError(f"{folder.path} is no folder.\n\nHint: name one that `save_state` has written.")
        models = list(self._models)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, folder.path)
        takers = self._read(folder, models, strict)
        for take in takers:
            take()

    def _read(self, folder: StateFolder, models: list[nn.Module], strict: bool) -> list[Callable[[], object]]:
        """Read all files, and return what takes them up."""
        held = [self._held(model) for model in models]
        takers = [self._weights_taker(folder, index, one, strict) for index, one in enumerate(held)]
        takers += [self._optimizer_taker(folder, index) for index in range(len(self._optimizers))]
        takers += self._schedule_takers(folder)
        if self.scaler is not None:
            takers.append(_taker(*folder.read_torch(names.SCALER_NAME), self.scaler))
        there, registered = folder.count_objects(), len(self._custom_objects)
        if there != registered:
            raise CheckpointError(
                f"{folder.path} has the states of {there} objects, and {registered} are registered.\n\n"
                "Hint: call `register_for_checkpointing` with the same objects as before `save_state`."
            )
        read = (folder.read_torch(numbered_object(index)) for index in range(there))
        takers += [_taker(*found, custom) for found, custom in zip(read, self._custom_objects, strict=True)]
        random_states = folder.read_random_states(self.process_index)
        if random_states is None:
            warn_once(f"{folder.path} has no random states of process {self.process_index}: those in force stay.")
        else:
            takers.append(lambda: self._take_random_states(*random_states))
        return takers

    def _weights_taker(self, folder: StateFolder, index: int, held: ModelState, strict: bool) -> Callable[[], object]:
        weights = folder.read_weights(index)
        own = held.model.state_dict()
        check_weights(folder.path, weights, held.model)
        aliases = own.keys() - dict(held.model.named_parameters()).keys() - dict(held.model.named_buffers()).keys()
        differing = sorted((own.keys() - aliases) ^ (weights.keys() - aliases))
        if strict and differing:
            raise CheckpointError(
                f"{folder.path} does not fit the model: {', '.join(differing[:5])} on one side only.\n\n"
                "Hint: prepare the same models in the same order, or pass `strict=False`."
            )
        return lambda: held.set_weights(weights)

    def _optimizer_taker(self, folder: StateFolder, index: int) -> Callable[[], object]:
        path, content = folder.read_torch(numbered("optimizer.bin", index))
        held, optimizer = self._holder_of_optimizer(index), unprepared(self._optimizers[index])
        return lambda: held.set_optimizer_state(path, content, optimizer)

    def _schedule_takers(self, folder: StateFolder) -> list[Callable[[], object]]:
        takers = []
        for index, schedule in enumerate(self._all_schedules()):
            name = numbered("scheduler.bin", index)
            if schedule is self._trained_schedule and not folder.has(name):  # Accelerate does not know it
                warn_once(f"{folder.path} has no {name}: the training's schedule goes on as it is.")
                continue
            path, content = folder.read_torch(name)
            check_schedule(path, content)
            takers.append(_taker(path, content, schedule))
        return takers

    def _take_random_states(self, states: RandomStates, step: int) -> None:
        write_rng(states)
        self.step = step

    def _all_schedules(self) -> list[Prepared]:
        trained = [] if self._trained_schedule is None else [self._trained_schedule]
        return [*(one for one in self._schedulers if one is not self._trained_schedule), *trained]

    def _held(self, model: nn.Module) -> TorchState:
        """Return what reads and writes a model's weights.

        Raises:
            UnsupportedArgument: DeepSpeed's engine holds them.
        """
        own = self.unwrap_model(model)
        trained = self._trained_state
        held = trained if trained is not None and trained.model is own else make_model_state(own)
        if not isinstance(held, TorchState) or isinstance(held, DeepSpeedState):
            raise UnsupportedArgument(
                "`accelerator.save_state` and `load_state` do not know DeepSpeed's states.\n\n"
                "Hint: `trainer._save_checkpoint(trainer.model, None)` writes them, and "
                "`trainer.train(resume_from_checkpoint=…)` loads them."
            )
        return held

    def _holder_of_optimizer(self, index: int) -> TorchState:
        """Return what reads and writes an optimizer's state: with its model, where that is sharded."""
        first = next(iter(unprepared(self._optimizers[index]).param_groups[0]["params"]), None)
        for model in self._models:
            if any(parameter is first for parameter in self.unwrap_model(model).parameters()):
                return self._held(model)
        return self._held(nn.Identity())

    def _optimizer_state(self, index: int) -> Plain:
        return self._holder_of_optimizer(index).whole_optimizer_state(unprepared(self._optimizers[index]))


def _registered(hooks: dict[int, StateHook], hook: StateHook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _taker(path: str, content: Plain, owner: Stateful | Prepared) -> Callable[[], object]:
    def take() -> None:
        with fitting(path):
            owner.load_state_dict(content)

    return take


def _attempt(folder: StateFolder, write: Callable[[], None]) -> Exception | None:
    """Write, and return what went wrong: the other processes have to know before it is raised."""
    try:
        write()
        return None
    except Exception as error:
        folder.discard()
        if not isinstance(error, (OSError, RuntimeError)):  # of an object of the script's own
            return error
        failed = CheckpointWriteError(
            f"`accelerator.save_state` could not write to {folder.path}: {error}.\n\n"
            "Hint: make room or give write permission there; the files that were there are as they were."
        )
        failed.__cause__ = error
        return failed
