"""The objects that an accelerator has prepared, and Accelerate's own `save_state` and `load_state` for them."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_compat.checkpoint.model_state import ModelState, PlainState, make_model_state
from hf_compat.checkpoint.reading import read_torch_file
from hf_compat.engine.precision import unwrap_forward
from hf_compat.errors import ArgumentError, CheckpointError, UnsupportedArgument, warn_once
from hf_compat.hf.process_state import OfAccelerate, ProcessMembers, of_accelerate
from hf_compat.optim.stepping import Prepared, unprepared
from hf_compat.runtime.inspection import delegated
from hf_compat.runtime.seeding import legacy_globals
from hf_compat.runtime.text import need

# Options of Accelerate's that change nothing here.
Unused: TypeAlias = Any


class StateMembers(ProcessMembers):
    """What is trained and prepared, and its states.

    Mirrors:
        `accelerate.Accelerator`, 1.15, whose own code saves and loads the states.
    """

    scaler: torch.amp.GradScaler | None
    step: int

    save = OfAccelerate()
    save_model = OfAccelerate()
    register_for_checkpointing = OfAccelerate()
    register_save_state_pre_hook = OfAccelerate()
    register_load_state_pre_hook = OfAccelerate()
    save_iteration: int = delegated("project_configuration.iteration")

    def __init__(self) -> None:
        # the objects that a script has prepared, and those that a fit trains
        self._models: list[Prepared] = []
        self._optimizers: list[Prepared] = []
        self._schedulers: list[Prepared] = []
        self._dataloaders: list[Prepared] = []
        # of the running fit, or of the last one
        self._trained_state: ModelState | None = None
        self._trained_optimizer: Prepared = None
        self._custom_objects: list[object] = []
        self._save_model_state_pre_hook: dict[int, Callable[..., None]] = OrderedDict()
        self._load_model_state_pre_hook: dict[int, Callable[..., None]] = OrderedDict()

    @functools.cached_property
    def project_configuration(self) -> object:
        """Accelerate's `ProjectConfiguration`. Without a folder, so pass one to `save_state` and `load_state`."""
        return need("accelerate.utils", "accelerate", "`accelerator.project_configuration`").ProjectConfiguration()

    def take_up(self, held: ModelState, optimizer: object) -> None:
        """List the objects that a fit trains before those that the script has prepared."""
        self._optimizers[:] = [one for one in self._optimizers if unprepared(one) is not optimizer]
        self._models[:] = [held.model, *(one for one in self._models if one is not held.model)]
        self._optimizers.insert(0, optimizer)
        self._trained_state, self._trained_optimizer = held, optimizer

    def free_memory(self, *objects: Prepared) -> tuple[Prepared, ...]:
        """Forget prepared objects."""
        for held in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            held.clear()
        self._trained_optimizer = self._trained_state = None
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
        """Give a model's weights. Sharded weights are gathered to the first rank.

        Args:
            model: The model.
            unwrap: Leave the names of a wrapper of DDP out.
        """
        is_wrapped = isinstance(model, DistributedDataParallel) and not unwrap
        return model.state_dict() if is_wrapped else self._held(model).whole_weights()

    @property
    def should_save_model(self) -> bool:
        """Whether this rank writes models."""
        return self.is_main_process

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: object,
    ) -> Path:
        """Write models, optimizers, schedules, the gradient scaler, registered objects and random states to a folder.

        Every rank calls it. Within a fit, the trained objects come first. `trainer.state` and the training's own
        schedule are not saved, as under transformers.

        Args:
            output_dir: The folder, which may exist.
            safe_serialization: Write weights with safetensors.
            save_model_func_kwargs: Keywords of DeepSpeed's own saving. None is accepted.

        Returns:
            The folder.

        Raises:
            ArgumentError: No folder, or a keyword of DeepSpeed's.
            MissingPackage: Accelerate is not installed.
            UnsupportedArgument: A model is sharded by FSDP 2 or DeepSpeed.

        Mirrors:
            `accelerate.Accelerator.save_state`, 1.15, which this calls.
        """
        if output_dir is None or save_model_func_kwargs:
            what = "no `output_dir`" if output_dir is None else ", ".join(save_model_func_kwargs)
            raise ArgumentError(f"`accelerator.save_state` got {what}.\n\nHint: pass the folder, and nothing else.")
        if not self._models:
            warn_once("`accelerator.save_state` saves no model, as none is prepared and none is trained yet.")
        self._check_whole_models()
        folder = os.path.expanduser(output_dir)
        of_accelerate(self, "save_state")(folder, safe_serialization)
        return Path(folder)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, object] | None = None,
        **load_model_func_kwargs: object,
    ) -> None:
        """Load a folder that `save_state` has written, this one or Accelerate's. Every rank calls it.

        Args:
            input_dir: The folder.
            load_kwargs: Keywords of `torch.load`.
            load_model_func_kwargs: `strict` and `map_location`.

        Raises:
            ArgumentError: No folder.
            CheckpointError: The folder does not exist, or a file that is not safetensors is damaged or holds other
                objects than tensors and plain containers. Nothing is loaded then.
            MissingPackage: Accelerate is not installed.
            UnsupportedArgument: A model is sharded by FSDP 2 or DeepSpeed.

        Mirrors:
            `accelerate.Accelerator.load_state`, 1.15, which this calls.
        """
        if input_dir is None:
            raise ArgumentError("`accelerator.load_state` got no `input_dir`.\n\nHint: pass the folder.")
        folder = os.path.expanduser(input_dir)
        if not os.path.isdir(folder):
            raise CheckpointError(f"{folder} is not a folder.\n\nHint: name one that `save_state` has written.")
        self._check_whole_models()
        for name in sorted(os.listdir(folder)):
            if name.endswith((".bin", ".pkl")):  # Accelerate unpickles states of registered objects with their code
                read_torch_file(os.path.join(folder, name), allowed=legacy_globals())
        of_accelerate(self, "load_state")(folder, load_kwargs, **load_model_func_kwargs)
        if not os.path.isfile(os.path.join(folder, f"random_states_{self.process_index}.pkl")):
            warn_once(f"{folder} has no random states of process {self.process_index}. The present ones stay.")

    def _check_whole_models(self) -> None:
        """Refuse models that are sharded, which Accelerate would look for in plugins of its own."""
        if not all(isinstance(self._held(model), PlainState) for model in self._models):
            raise UnsupportedArgument(
                "`accelerator.save_state` and `load_state` do not know the states of FSDP 2 and DeepSpeed.\n\n"
                "Hint: `trainer._save_checkpoint(trainer.model, None)` writes them, and "
                "`trainer.train(resume_from_checkpoint=…)` loads them."
            )
