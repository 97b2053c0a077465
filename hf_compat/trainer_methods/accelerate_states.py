"""`accelerator.save_state`, `load_state` and `prepare`.

A folder has Accelerate's file names. Files get their names once all are written, and all are read before any is used.
Only tensors and plain containers are unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.files import Plain
from hf_compat.checkpoint.forms import check_weights, random_states_problem, refuse, schedule_problem
from hf_compat.checkpoint.lightning_io import write_weights
from hf_compat.checkpoint.model_state import DeepSpeedState, ModelState, make_model_state
from hf_compat.checkpoint.model_state.base import TorchState
from hf_compat.checkpoint.reading import Weights, fitting, plain_names, read_torch_file, read_weights_file
from hf_compat.checkpoint.run_state import readable_state
from hf_compat.checkpoint.torch_writer import save_torch
from hf_compat.data.loader import OpenPasses, PreparedDataLoader, options_of
from hf_compat.data.samplers import RankSlice
from hf_compat.data.types import Batch, DataSource
from hf_compat.engine.precision import wrap_forward
from hf_compat.errors import ArgumentError, CheckpointError, CheckpointWriteError, UnsupportedArgument, warn_once
from hf_compat.hf.argument_values import AcceleratorConfig
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.process_state import ProcessMembers
from hf_compat.optim.stepping import Prepared, PreparedOptimizer, PreparedScheduler, unprepared
from hf_compat.runtime.collectives import agree
from hf_compat.runtime.inspection import Delegated
from hf_compat.runtime.seeding import RandomStates, legacy_globals, pack_legacy_rng, read_rng, unpack_rng, write_rng

# `hook(models, weights, folder)` before states are written, `hook(models, folder)` before they are read.
StateHook: TypeAlias = Callable[..., None]
# Options of Accelerate's that change nothing here.
Unused: TypeAlias = Any


def numbered(name: str, index: int) -> str:
    """Name the file of the first, or of a further, object of a kind: `model.bin`, `model_1.bin`."""
    stem, dot, suffix = name.rpartition(".")
    return name if index == 0 else f"{stem}_{index}{dot}{suffix}"


class StateFolder:
    """A folder of states.

    Args:
        path: The folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._partial: dict[str, str] = {}  # files that are written under another name, by their final one

    def write(self, name: str, write: Callable[[str], object]) -> None:
        """Write a file under a hidden name."""
        os.makedirs(self.path, exist_ok=True)
        self._partial[os.path.join(self.path, name)] = hidden = os.path.join(self.path, f".{name}.partial")
        write(hidden)

    def rename(self) -> None:
        """Give the files their names."""
        for final, hidden in self._partial.items():
            os.replace(hidden, final)
        self._partial.clear()

    def agree_on(self, act: Callable[[], None]) -> None:
        """Run a part of a save on all ranks. A rank that fails removes its hidden files, and all raise.

        Raises:
            CheckpointWriteError: A file cannot be written.
        """
        failed: Exception | None = None
        try:
            act()
        except Exception as error:
            for hidden in self._partial.values():
                with contextlib.suppress(FileNotFoundError):
                    os.remove(hidden)
            self._partial.clear()
            failed = error
            if isinstance(error, (OSError, RuntimeError)):  # other errors come from an object of the script
                failed = CheckpointWriteError(
                    f"`accelerator.save_state` could not write to {self.path}: {error}.\n\n"
                    "Hint: free space or give write permission there. The earlier files are unchanged."
                )
                failed.__cause__ = error
        agree(failed)

    def find(self, *candidates: str) -> str:
        """Find the first of several files that exists.

        Raises:
            CheckpointError: None does.
        """
        found = next(filter(self.has, candidates), None)
        if found is None:
            raise CheckpointError(
                f"{self.path} has no {' and no '.join(candidates)}.\n\nHint: name a folder that "
                "`accelerator.save_state` has written with as many models and optimizers. To continue from a "
                "checkpoint of the Trainer, call `trainer.train(resume_from_checkpoint=…)`."
            )
        return os.path.join(self.path, found)

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return os.path.isfile(os.path.join(self.path, name))

    def read(self, name: str) -> tuple[str, Plain]:
        """Read a file. Give its path and content.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        path = self.find(name)
        return path, read_torch_file(path, allowed=legacy_globals())

    def read_random_states(self, rank: int) -> tuple[RandomStates, int] | None:
        """Read a rank's random states, and how often `accumulate` was entered. None if it has none.

        Raises:
            CheckpointError: They are damaged.
        """
        if not self.has(f"random_states_{rank}.pkl"):
            return None
        path, content = self.read(f"random_states_{rank}.pkl")
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
        return pack_legacy_rng(states), int(content.get("step", 0))


@runtime_checkable
class Stateful(Protocol):
    """An object that `register_for_checkpointing` accepts."""

    def state_dict(self) -> dict[str, object]:
        """Give the state, as tensors and plain containers."""

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Set the state."""


class StateMembers(ProcessMembers):
    """Writes and reads the states of everything that is trained and prepared.

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

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

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
        return _registered(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: StateHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` before states are read. It may remove entries of `models`."""
        return _registered(self._load_model_state_pre_hook, hook)

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
        folder = StateFolder(os.path.expanduser(output_dir))
        weights = [self._held(model).whole_weights() for model in self._models]
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, weights, folder.path)
        plain = {
            numbered("optimizer.bin", index): self._holder_of(one).whole_optimizer_state(unprepared(one))
            for index, one in enumerate(self._optimizers)
        }
        folder.agree_on(functools.partial(self._write, folder, weights, plain, safe_serialization))
        folder.agree_on(folder.rename)
        self.save_iteration += 1
        return Path(folder.path)

    def _write(self, folder: StateFolder, weights: list[Weights], plain: dict[str, Plain], is_safe: bool) -> None:
        if self.is_main_process:
            name = "model.safetensors" if is_safe else "pytorch_model.bin"
            for index, one in enumerate(weights):
                content = one if is_safe else plain_names(one)
                writer = write_weights if is_safe else save_torch
                folder.write(numbered(name, index), functools.partial(writer, content))
            for index, schedule in enumerate(self._all_schedules()):
                plain[numbered("scheduler.bin", index)] = schedule.state_dict()
            if self.scaler is not None:
                plain[names.SCALER_NAME] = self.scaler.state_dict()
            for index, custom in enumerate(self._custom_objects):
                state = readable_state(custom.state_dict(), f"The state of {type(custom).__name__}")
                plain[f"custom_checkpoint_{index}.pkl"] = state
            for file, content in plain.items():
                folder.write(file, functools.partial(save_torch, content))
        states = unpack_rng(read_rng())
        own = {
            "step": self.step,
            "random_state": states["python"],
            "numpy_random_seed": states["numpy"],
            "torch_manual_seed": states["cpu"],
        }
        if torch.cuda.is_available():
            own["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
        folder.write(f"random_states_{self.process_index}.pkl", functools.partial(torch.save, own))

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
        folder = StateFolder(os.path.expanduser(input_dir))
        if not os.path.isdir(folder.path):
            raise CheckpointError(f"{folder.path} is not a folder.\n\nHint: name one that `save_state` has written.")
        models = list(self._models)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, folder.path)
        for load in self._read(folder, models, strict):
            load()

    def _read(self, folder: StateFolder, models: list[nn.Module], strict: bool) -> list[Callable[[], object]]:
        """Read all files. Give the calls that set the states."""
        loads: list[Callable[[], object]] = []
        for index, held in enumerate([self._held(model) for model in models]):
            found = folder.find(numbered("model.safetensors", index), numbered("pytorch_model.bin", index))
            read = plain_names(read_weights_file(found))
            prefix = "module." if all(name.startswith("module.") for name in read) else ""  # DDP's
            weights = {name.removeprefix(prefix): tensor for name, tensor in read.items()}
            check_weights(folder.path, weights, held.model)
            own = held.model.state_dict()
            aliases = own.keys() - dict(held.model.named_parameters()).keys() - dict(held.model.named_buffers()).keys()
            differing = sorted((own.keys() - aliases) ^ (weights.keys() - aliases))
            if strict and differing:
                raise CheckpointError(
                    f"{folder.path} does not fit the model: {', '.join(differing[:5])} on one side only.\n\n"
                    "Hint: prepare the same models in the same order, or pass `strict=False`."
                )
            loads.append(functools.partial(held.set_weights, weights))
        for index, optimizer in enumerate(self._optimizers):
            path, content = folder.read(numbered("optimizer.bin", index))
            set_state = self._holder_of(optimizer).set_optimizer_state
            loads.append(functools.partial(set_state, path, content, unprepared(optimizer)))
        for index, schedule in enumerate(self._all_schedules()):
            name = numbered("scheduler.bin", index)
            if schedule is self._trained_schedule and not folder.has(name):  # Accelerate does not know it
                warn_once(f"{folder.path} has no {name}, so the training's schedule continues as it is.")
                continue
            path, content = folder.read(name)
            refuse(path, schedule_problem(content))
            loads.append(functools.partial(_load_into, schedule, path, content))
        if self.scaler is not None:
            loads.append(functools.partial(_load_into, self.scaler, *folder.read(names.SCALER_NAME)))
        objects = [name for name in os.listdir(folder.path) if name.startswith("custom_checkpoint_")]
        count, registered = sum(name.endswith(".pkl") for name in objects), len(self._custom_objects)
        if count != registered:
            raise CheckpointError(
                f"{folder.path} has the states of {count} objects, and {registered} are registered.\n\n"
                "Hint: call `register_for_checkpointing` with the same objects as before `save_state`."
            )
        for index, custom in enumerate(self._custom_objects):
            loads.append(functools.partial(_load_into, custom, *folder.read(f"custom_checkpoint_{index}.pkl")))
        random_states = folder.read_random_states(self.process_index)
        if random_states is None:
            warn_once(f"{folder.path} has no random states of process {self.process_index}. The present ones stay.")
        else:
            states, step = random_states
            loads += [functools.partial(write_rng, states), functools.partial(setattr, self, "step", step)]
        return loads

    def _all_schedules(self) -> list[Prepared]:
        trained = [] if self._trained_schedule is None else [self._trained_schedule]
        return [*(one for one in self._schedulers if one is not self._trained_schedule), *trained]

    def _held(self, model: nn.Module) -> TorchState:
        """Find the reader and writer of a model's weights.

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

    def _holder_of(self, optimizer: Prepared) -> TorchState:
        """Find the reader and writer of an optimizer's state. It is that of its model, which may be sharded."""
        first = next(iter(unprepared(optimizer).param_groups[0]["params"]), None)
        for model in self._models:
            if any(parameter is first for parameter in self.unwrap_model(model).parameters()):
                return self._held(model)
        return self._held(nn.Identity())


def _registered(hooks: dict[int, StateHook], hook: StateHook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _load_into(owner: Stateful | Prepared, path: str, content: Plain) -> None:
    with fitting(path):
        owner.load_state_dict(content)


def _is_never(_: nn.Module) -> bool:
    return False  # no lambda: native modules hold this object, and pickle finds a function by its name


class PreparingMembers(StateMembers):
    """Makes loaders, models, optimizers and schedules of a script work beside those of the engine."""

    _args: TrainingArguments
    mixed_precision: str
    rank_slice: RankSlice
    sync_gradients: bool
    passes: OpenPasses
    run_backward: Callable[..., None] | None
    unscale: Callable[[Prepared], None] | None

    def __init__(self) -> None:
        super().__init__()
        self.is_trained_by_engine: Callable[[nn.Module], bool] = _is_never

    @property
    def dataloader_config(self) -> AcceleratorConfig:
        """How data is loaded across ranks, by the argument `accelerator_config`."""
        return AcceleratorConfig.from_any(self._args.accelerator_config)

    split_batches = Delegated[bool]("dataloader_config.split_batches")

    def _half_precision(self) -> torch.dtype | None:
        raise NotImplementedError

    def prepare(self, *objects: Prepared, device_placement: list[bool] | None = None) -> Prepared:
        """Prepare a script's own loaders, models, optimizers and schedules. The engine prepares its own."""

        def prepared(candidate: Prepared) -> Prepared:
            if isinstance(candidate, DataLoader):
                return self.prepare_data_loader(candidate)
            if isinstance(candidate, nn.Module):
                return self.prepare_model(candidate)
            return self.prepare_optimizer(candidate) if isinstance(candidate, torch.optim.Optimizer) else candidate

        made = iter([prepared(one) for one in objects if not hasattr(one, "get_last_lr")])
        # schedules come last, as they follow the optimizers
        found = tuple(self.prepare_scheduler(one) if hasattr(one, "get_last_lr") else next(made) for one in objects)
        return found if len(found) != 1 else found[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a further model to the device and set the run's precision. With several ranks, wrap it in DDP.

        Args:
            model: A reference or reward model, or a discriminator. The engine prepares the Trainer's own.
            device_placement: False leaves it where it is.
            evaluation_mode: The model is not trained, so it needs no DDP.
        """
        if self.is_trained_by_engine(model):
            return model if device_placement is False else model.to(self.device)
        if device_placement is not False and not self.verify_device_map(model):
            model = model.to(self.device)
        if self._half_precision() is not None:
            wrap_forward(model, {"bf16": "bf16-mixed", "fp16": "16-mixed"}[self.mixed_precision], self.device.type)
        self._note(self._models, model)
        is_trained = not evaluation_mode and any(one.requires_grad for one in model.parameters())
        if not (self.use_distributed and is_trained) or isinstance(model, DistributedDataParallel):
            return model
        unused = self._args.ddp_find_unused_parameters
        place = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, place, find_unused_parameters=True if unused is None else unused)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model, or a part of it, is on several devices according to its `hf_device_map`."""
        return any(len(getattr(part, "hf_device_map", None) or ()) > 1 for part in model.modules())

    def prepare_optimizer(self, optimizer: Prepared, device_placement: bool | None = None) -> Prepared:
        """Let a script's own optimizer step at the end of an update, and not at each micro-batch."""
        if optimizer is not self._trained_optimizer and not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer = PreparedOptimizer(optimizer, self)
        return self._note(self._optimizers, optimizer)

    def prepare_scheduler(self, scheduler: Prepared) -> Prepared:
        """Let a script's own schedule step with its optimizer."""
        if not isinstance(scheduler, PreparedScheduler):
            followed = [one for one in self._optimizers if isinstance(one, PreparedOptimizer)]
            own = [one for one in followed if one.optimizer is getattr(scheduler, "optimizer", None)]
            scheduler = PreparedScheduler(scheduler, own or followed, self)
        return self._note(self._schedulers, scheduler)

    def take_up(self, held: ModelState, optimizer: object, scheduler: object) -> None:
        """List the objects that a fit trains before those that the script has prepared.

        Args:
            held: The model, and the reader and writer of its state.
            optimizer: Its optimizer.
            scheduler: Its schedule.
        """
        self._optimizers[:] = [one for one in self._optimizers if unprepared(one) is not optimizer]
        self._models[:] = [held.model, *(one for one in self._models if one is not held.model)]
        self._optimizers.insert(0, optimizer)
        self._trained_state, self._trained_optimizer, self._trained_schedule = held, optimizer, scheduler

    def leave_fit(self) -> None:
        """Drop the engine's passes. The trained objects stay listed."""
        self.run_backward = self.unscale = None
        self.sync_gradients = True

    @staticmethod
    def _note(held: list[Prepared], candidate: Prepared) -> Prepared:
        if not any(candidate is one for one in held):
            held.append(candidate)
        return candidate

    def prepare_data_loader(self, loader: DataLoader[Batch], **kwargs: Unused) -> PreparedDataLoader:
        """Make a loader like the Trainer's own, which reads one batch ahead, shuffles by seed and moves batches."""
        if isinstance(loader, PreparedDataLoader):
            return loader
        chosen: dict[str, Any]
        if isinstance(loader.dataset, IterableDataset):
            chosen = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader.batch_sampler is None:  # the data set gives a batch at a time
            chosen = {"batch_size": None, "sampler": loader.sampler}
        elif loader.batch_size is None:
            chosen = {"batch_sampler": loader.batch_sampler}
        else:
            chosen = {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
        return self.make_loader(loader.dataset, **options_of(loader), **chosen)

    def make_loader(self, dataset: DataSource, **options: Any) -> PreparedDataLoader:
        """Make a loader for this rank according to the arguments.

        Args:
            dataset: Map-style or iterable.
            options: Keywords of torch's `DataLoader`.
        """
        config = self.dataloader_config
        return PreparedDataLoader(
            dataset,
            device=self.device,
            non_blocking=config.non_blocking,
            seed=self._args.data_seed,
            use_seedable_sampler=config.use_seedable_sampler,
            rank_slice=self.rank_slice,
            passes=self.passes,
            **options,
        )
