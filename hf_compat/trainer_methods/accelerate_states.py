"""The objects that an accelerator has prepared, and `accelerator.save_state` and `load_state`.

A folder has Accelerate's file names. Files get their names once all are written, and all are read before any is used.
Only tensors and plain containers are unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import safetensors.torch
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.files import Plain
from hf_compat.checkpoint.forms import check_weights, random_states_problem, refuse, schedule_problem
from hf_compat.checkpoint.lightning_io import write_weights
from hf_compat.checkpoint.model_state import DeepSpeedState, ModelState, make_model_state
from hf_compat.checkpoint.model_state.base import TorchState
from hf_compat.checkpoint.reading import fitting, plain_names, read_torch_file, read_weights_file
from hf_compat.checkpoint.run_state import readable_state
from hf_compat.checkpoint.torch_writer import save_torch
from hf_compat.engine.precision import unwrap_forward
from hf_compat.errors import ArgumentError, CheckpointError, CheckpointWriteError, UnsupportedArgument, warn_once
from hf_compat.hf.process_state import ProcessMembers
from hf_compat.optim.stepping import Prepared, unprepared
from hf_compat.runtime.collectives import agree
from hf_compat.runtime.seeding import legacy_globals, pack_legacy_rng, read_rng, unpack_rng, write_rng

# `hook(models, weights, folder)` before states are written, `hook(models, folder)` before they are read.
StateHook: TypeAlias = Callable[..., None]
# Options of Accelerate's that change nothing here.
Unused: TypeAlias = Any


@runtime_checkable
class Stateful(Protocol):
    """An object that `register_for_checkpointing` accepts."""

    def state_dict(self) -> dict[str, object]:
        """Give the state, as tensors and plain containers."""

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Set the state."""


class _State(NamedTuple):
    """A state that is one file. Every rank calls `give`, as it may gather a sharded state."""

    file: str
    give: Callable[[], object]
    load: Callable[[str, Plain], None]  # takes the file's path and content
    problem: Callable[[object], str | None] = lambda content: None  # why a content cannot be loaded
    is_known_to_accelerate: bool = True


class StateMembers(ProcessMembers):
    """What is trained and prepared, and its states.

    Mirrors:
        `accelerate.Accelerator.save_state` and `load_state`, 1.15. The files have the same names.

    Differs:
        The schedule that a fit steps is saved, too. Sharded models are written whole.
    """

    scaler: torch.amp.GradScaler | None
    step: int

    def __init__(self) -> None:
        # the objects that a script has prepared, and those that a fit trains
        self._models: list[Prepared] = []
        self._optimizers: list[Prepared] = []
        self._schedulers: list[Prepared] = []
        self._dataloaders: list[Prepared] = []
        # of the running fit, or of the last one
        self._trained_state: ModelState | None = None
        self._trained_optimizer: Prepared = None
        self._trained_schedule: Prepared = None
        self._custom_objects: list[Stateful] = []
        self._save_model_state_pre_hook: dict[int, StateHook] = OrderedDict()
        self._load_model_state_pre_hook: dict[int, StateHook] = OrderedDict()
        self.save_iteration = 0

    def take_up(self, held: ModelState, optimizer: object, scheduler: object) -> None:
        """List the objects that a fit trains before those that the script has prepared."""
        self._optimizers[:] = [one for one in self._optimizers if unprepared(one) is not optimizer]
        self._models[:] = [held.model, *(one for one in self._models if one is not held.model)]
        self._optimizers.insert(0, optimizer)
        self._trained_state, self._trained_optimizer, self._trained_schedule = held, optimizer, scheduler

    def free_memory(self, *objects: Prepared) -> tuple[Prepared, ...]:
        """Forget prepared objects."""
        for held in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            held.clear()
        self._trained_optimizer = self._trained_schedule = self._trained_state = None
        self.step = 0
        return (None,) * len(objects)

    clear = free_memory

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: Unused = None
    ) -> nn.Module:
        """Take the wrappers of compilation and parallelism off a model.

        Args:
            model: The model. It comes back uncompiled, unless it is compiled in place.
            keep_fp32_wrapper: False also takes its forward out of autocast.
            keep_torch_compile: Has no effect.
        """
        model = getattr(model, "_orig_mod", model)
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            model = model.module
        model = getattr(model, "_orig_mod", model)
        if not keep_fp32_wrapper:
            unwrap_forward(model)
        return model

    def _held(self, model: nn.Module) -> ModelState:
        """Find the reader and writer of a model's weights."""
        own, trained = self.unwrap_model(model), self._trained_state
        return trained if trained is not None and trained.model is own else make_model_state(own)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Give a model's weights. Sharded weights are gathered to the first rank."""
        return self._held(model).whole_weights()

    @property
    def should_save_model(self) -> bool:
        """Whether this rank writes models."""
        return self.is_main_process

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights to a folder, from the first rank. Files have at most `max_shard_size`."""
        weights = self.get_state_dict(model)
        if self.is_main_process:
            from huggingface_hub import save_torch_state_dict

            os.makedirs(save_directory, exist_ok=True)
            save_torch_state_dict(
                weights, str(save_directory), max_shard_size=max_shard_size, safe_serialization=safe_serialization
            )

    def save(self, obj: Prepared, f: str, safe_serialization: bool = False) -> None:
        """Write an object with `torch.save`, or tensors with safetensors, from the first rank."""
        if self.is_main_process:
            safetensors.torch.save_file(obj, f) if safe_serialization else torch.save(obj, f)

    def register_for_checkpointing(self, *objects: Stateful) -> None:
        """Save and load objects with the other states.

        Raises:
            ArgumentError: One of them has no `state_dict` and `load_state_dict`. Then none is registered.
        """
        unfit = [repr(one) for one in objects if not isinstance(one, Stateful)]
        if unfit:
            raise ArgumentError(
                f"`register_for_checkpointing` got {', '.join(unfit)}, without `state_dict` and `load_state_dict`.\n\n"
                "Hint: give the class both methods."
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: StateHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before states are written. It may remove entries of `weights`."""
        handle = RemovableHandle(self._save_model_state_pre_hook)
        self._save_model_state_pre_hook[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: StateHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` before states are read. It may remove entries of `models`."""
        handle = RemovableHandle(self._load_model_state_pre_hook)
        self._load_model_state_pre_hook[handle.id] = hook
        return handle

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: object,
    ) -> Path:
        """Write models, optimizers, schedules, the gradient scaler, registered objects and random states to a folder.

        Every rank calls it. Within a fit, the trained objects come first. `trainer.state` is not saved.

        Args:
            output_dir: The folder, which may exist.
            safe_serialization: Write weights with safetensors.
            save_model_func_kwargs: Keywords of DeepSpeed's own saving. None is accepted.

        Returns:
            The folder.

        Raises:
            ArgumentError: No folder, or a keyword of DeepSpeed's.
            CheckpointWriteError: The files cannot be written. The earlier files are unchanged.
            UnsupportedArgument: DeepSpeed trains.
        """
        if output_dir is None or save_model_func_kwargs:
            what = "no `output_dir`" if output_dir is None else ", ".join(save_model_func_kwargs)
            raise ArgumentError(f"`accelerator.save_state` got {what}.\n\nHint: pass the folder, and nothing else.")
        if not self._models:
            warn_once("`accelerator.save_state` saves no model, as none is prepared and none is trained yet.")
        folder = os.path.expanduser(output_dir)
        weights = [self._whole_state(model).whole_weights() for model in self._models]
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, weights, folder)
        hidden = os.path.join(folder, f".partial_{self.process_index}")
        try:
            with _writing_to(folder):
                contents = {state.file: state.give() for state in self._states()}
                os.makedirs(hidden, exist_ok=True)
                if self.is_main_process:
                    for index, one in enumerate(weights):
                        if safe_serialization:
                            write_weights(one, os.path.join(hidden, _numbered("model.safetensors", index)))
                        else:
                            contents[_numbered("pytorch_model.bin", index)] = plain_names(one)
                    for file, content in contents.items():
                        save_torch(content, os.path.join(hidden, file))
                states = unpack_rng(read_rng())
                own = {
                    "step": self.step,
                    "random_state": states["python"],
                    "numpy_random_seed": states["numpy"],
                    "torch_manual_seed": states["cpu"],
                }
                if torch.cuda.is_available():
                    own["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
                torch.save(own, os.path.join(hidden, f"random_states_{self.process_index}.pkl"))
            with _writing_to(folder):
                for file in os.listdir(hidden):
                    os.replace(os.path.join(hidden, file), os.path.join(folder, file))
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        self.save_iteration += 1
        return Path(folder)

    def _states(self) -> Iterator[_State]:
        """Yield the states that are saved and loaded beside weights and random states."""
        for index, one in enumerate(self._optimizers):
            # the reader and writer of an optimizer's state is that of its model, which may be sharded
            own = unprepared(one)
            first = next(iter(own.param_groups[0]["params"]), None)
            models = (m for m in self._models if any(p is first for p in self.unwrap_model(m).parameters()))
            holder = self._whole_state(next(models, nn.Identity()))
            yield _State(
                _numbered("optimizer.bin", index),
                functools.partial(holder.whole_optimizer_state, own),
                functools.partial(holder.set_optimizer_state, optimizer=own),
            )
        trained = self._trained_schedule
        schedules = [one for one in self._schedulers if one is not trained]
        for index, one in enumerate([*schedules, *([] if trained is None else [trained])]):
            load = functools.partial(_load_into, one)
            file, is_own = _numbered("scheduler.bin", index), one is trained
            yield _State(file, one.state_dict, load, schedule_problem, is_known_to_accelerate=not is_own)
        if self.scaler is not None:
            yield _State(names.SCALER_NAME, self.scaler.state_dict, functools.partial(_load_into, self.scaler))
        for index, custom in enumerate(self._custom_objects):
            give = functools.partial(_readable_state_of, custom)
            yield _State(f"custom_checkpoint_{index}.pkl", give, functools.partial(_load_into, custom))

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, object] | None = None,
        strict: bool = True,
        map_location: object = None,
    ) -> None:
        """Load a folder that `save_state` has written, this one or Accelerate's.

        Every rank calls it. All files are read before any state changes.

        Args:
            input_dir: The folder.
            load_kwargs: Keywords of `torch.load`. They have no effect, as only tensors and plain containers are read.
            strict: Refuse weights that are missing or unknown to a model.
            map_location: Has no effect. Tensors move to the devices of the models and optimizers.

        Raises:
            ArgumentError: No folder.
            CheckpointError: The folder does not exist, or a file is missing, damaged, or does not fit.
        """
        if input_dir is None:
            raise ArgumentError("`accelerator.load_state` got no `input_dir`.\n\nHint: pass the folder.")
        if load_kwargs:
            warn_once(f"`load_kwargs={dict(load_kwargs)!r}` have no effect, as only plain values are read.")
        folder = os.path.expanduser(input_dir)
        if not os.path.isdir(folder):
            raise CheckpointError(f"{folder} is not a folder.\n\nHint: name one that `save_state` has written.")
        models = list(self._models)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, folder)
        loads = [self._weights_to_load(folder, index, model, strict) for index, model in enumerate(models)]
        for state in self._states():
            if not state.is_known_to_accelerate and not os.path.isfile(os.path.join(folder, state.file)):
                warn_once(f"{folder} has no {state.file}, so the training's schedule continues as it is.")
                continue
            path = _find(folder, state.file)
            content = read_torch_file(path, allowed=legacy_globals())
            refuse(path, state.problem(content))
            loads.append(functools.partial(state.load, path, content))
        objects = [name for name in os.listdir(folder) if name.startswith("custom_checkpoint_")]
        count, registered = sum(name.endswith(".pkl") for name in objects), len(self._custom_objects)
        if count != registered:
            raise CheckpointError(
                f"{folder} has the states of {count} objects, and {registered} are registered.\n\n"
                "Hint: call `register_for_checkpointing` with the same objects as before `save_state`."
            )
        for load in [*loads, *self._random_states_to_load(folder)]:
            load()

    def _weights_to_load(self, folder: str, index: int, model: nn.Module, strict: bool) -> Callable[[], object]:
        """Read a model's weights, and give the call that sets them."""
        held = self._whole_state(model)
        files = (_numbered("model.safetensors", index), _numbered("pytorch_model.bin", index))
        read = plain_names(read_weights_file(_find(folder, *files)))
        prefix = "module." if all(name.startswith("module.") for name in read) else ""  # DDP's
        weights = {name.removeprefix(prefix): tensor for name, tensor in read.items()}
        check_weights(folder, weights, held.model)
        own = held.model.state_dict()
        aliases = own.keys() - dict(held.model.named_parameters()).keys() - dict(held.model.named_buffers()).keys()
        differing = sorted((own.keys() - aliases) ^ (weights.keys() - aliases))
        if strict and differing:
            raise CheckpointError(
                f"{folder} does not fit the model: {', '.join(differing[:5])} on one side only.\n\n"
                "Hint: prepare the same models in the same order, or pass `strict=False`."
            )
        return functools.partial(held.set_weights, weights)

    def _random_states_to_load(self, folder: str) -> list[Callable[[], object]]:
        """Read this rank's random states and how often `accumulate` was entered, and give the calls that set them."""
        path = os.path.join(folder, f"random_states_{self.process_index}.pkl")
        if not os.path.isfile(path):
            warn_once(f"{folder} has no random states of process {self.process_index}. The present ones stay.")
            return []
        content = read_torch_file(path, allowed=legacy_globals())
        if not isinstance(content, Mapping) or "torch_manual_seed" not in content:
            raise CheckpointError(f"{path} cannot be used: it holds no random states.")
        states = {
            "python": content.get("random_state"),
            "numpy": content.get("numpy_random_seed"),
            "cpu": content["torch_manual_seed"],
        }
        refuse(path, random_states_problem(states))
        cuda = content.get("torch_cuda_manual_seed")
        if cuda and torch.cuda.is_available():
            states["cuda"] = cuda[min(torch.cuda.current_device(), len(cuda) - 1)]
        step = functools.partial(setattr, self, "step", int(content.get("step", 0)))
        return [functools.partial(write_rng, pack_legacy_rng(states)), step]

    def _whole_state(self, model: nn.Module) -> TorchState:
        """Find the reader and writer of a model's weights, unless DeepSpeed's engine holds them."""
        held = self._held(model)
        if not isinstance(held, TorchState) or isinstance(held, DeepSpeedState):
            raise UnsupportedArgument(
                "`accelerator.save_state` and `load_state` do not know DeepSpeed's states.\n\n"
                "Hint: `trainer._save_checkpoint(trainer.model, None)` writes them, and "
                "`trainer.train(resume_from_checkpoint=…)` loads them."
            )
        return held


def _numbered(name: str, index: int) -> str:
    """Name the file of the first, or of a further, object of a kind: `model.bin`, `model_1.bin`."""
    stem, dot, suffix = name.rpartition(".")
    return name if index == 0 else f"{stem}_{index}{dot}{suffix}"


@contextlib.contextmanager
def _writing_to(folder: str) -> Iterator[None]:
    """Run a part of a save on all ranks. If one fails, all raise."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
        if isinstance(error, (OSError, RuntimeError)):  # other errors come from an object of the script
            failed = CheckpointWriteError(
                f"`accelerator.save_state` could not write to {folder}: {error}.\n\n"
                "Hint: free space or give write permission there. The earlier files are unchanged."
            )
            failed.__cause__ = error
    agree(failed)


def _find(folder: str, *candidates: str) -> str:
    """Find the first of several files that exists, or raise a `CheckpointError`."""
    for name in candidates:
        if os.path.isfile(os.path.join(folder, name)):
            return os.path.join(folder, name)
    raise CheckpointError(
        f"{folder} has no {' and no '.join(candidates)}.\n\nHint: name a folder that "
        "`accelerator.save_state` has written with as many models and optimizers. To continue from a "
        "checkpoint of the Trainer, call `trainer.train(resume_from_checkpoint=…)`."
    )


def _readable_state_of(custom: Stateful) -> object:
    return readable_state(custom.state_dict(), f"The state of {type(custom).__name__}")


def _load_into(owner: Stateful | Prepared, path: str, content: Plain) -> None:
    with fitting(path):
        owner.load_state_dict(content)
