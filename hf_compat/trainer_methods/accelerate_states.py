"""`accelerator.save_state`, `load_state` and `prepare`.

A folder has Accelerate's file names. It is put into place once all files are written, and everything is read before
any of it is used. Only tensors and plain containers are unpickled.
"""

from __future__ import annotations

import contextlib
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
from hf_compat.runtime.seeding import RandomStates, legacy_globals, pack_legacy_rng, read_rng, unpack_rng, write_rng

_WAYS_OUT = (
    "Hint: name a folder that `accelerator.save_state` has written with as many models and optimizers; from a "
    "checkpoint of the Trainer `trainer.train(resume_from_checkpoint=…)` goes on."
)


def numbered(name: str, index: int) -> str:
    """Return the name of a file of the first, or of a further, object of a kind: `model.bin`, `model_1.bin`."""
    stem, dot, suffix = name.rpartition(".")
    return name if index == 0 else f"{stem}_{index}{dot}{suffix}"


class StateFolder:
    """A folder of states.

    Args:
        path: The folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._written: list[str] = []

    def write_weights(self, weights: Weights, index: int, safe: bool) -> None:
        """Write a model's weights, with safetensors or torch."""
        if safe:
            self._write(numbered("model.safetensors", index), lambda path: write_weights(weights, path))
        else:
            self.write_torch(plain_names(weights), numbered("pytorch_model.bin", index))

    def write_torch(self, content: Plain, name: str) -> None:
        """Write tensors and plain containers."""
        self._write(name, lambda path: save_torch(content, path))

    def write_object(self, content: Plain, index: int, whose: str) -> None:
        """Write the state of an object of the script's own.

        Raises:
            CallbackError: It could not be read back.
        """
        self.write_torch(readable_state(content, f"The state of {whose}"), numbered_object(index))

    def write_random_states(self, rank: int, step: int) -> None:
        """Write the states of this process's random generators, and how often `accumulate` was entered."""
        states = unpack_rng(read_rng())
        content = {
            "step": step,
            "random_state": states["python"],
            "numpy_random_seed": states["numpy"],
            "torch_manual_seed": states["cpu"],
        }
        if torch.cuda.is_available():
            content["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
        self._write(_random_states(rank), lambda path: torch.save(content, path))

    def _write(self, name: str, write: Callable[[str], None]) -> None:
        os.makedirs(self.path, exist_ok=True)
        self._written.append(name)
        write(self._hidden(name))

    def _hidden(self, name: str) -> str:
        return os.path.join(self.path, f".{name}.partial")

    def land(self) -> None:
        """Put into place what is written."""
        for name in self._written:
            os.replace(self._hidden(name), os.path.join(self.path, name))
        self._written.clear()

    def discard(self) -> None:
        """Remove what is written and not in its place."""
        for name in self._written:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._hidden(name))
        self._written.clear()

    def read_weights(self, index: int) -> Weights:
        """Read a model's weights; `module.`, which DDP puts before names, is taken off.

        Raises:
            CheckpointError: There are none, or they are damaged.
        """
        path = self._find(numbered("model.safetensors", index), numbered("pytorch_model.bin", index))
        weights = plain_names(read_weights_file(path))
        if all(name.startswith("module.") for name in weights):
            return {name.removeprefix("module."): tensor for name, tensor in weights.items()}
        return weights

    def read_torch(self, name: str) -> tuple[str, Plain]:
        """Return a file's path and what is in it.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        path = self._find(name)
        return path, read_torch_file(path, allowed=legacy_globals())

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        return os.path.isfile(os.path.join(self.path, name))

    def count_objects(self) -> int:
        """Count the states of objects of the script's own."""
        known = (name for name in os.listdir(self.path) if name.startswith("custom_checkpoint_"))
        return sum(name.endswith(".pkl") for name in known)

    def read_random_states(self, rank: int) -> tuple[RandomStates, int] | None:
        """Return a process's random states, and how often `accumulate` was entered; None where it has none.

        Raises:
            CheckpointError: They are damaged.
        """
        if not self.has(_random_states(rank)):
            return None
        path, content = self.read_torch(_random_states(rank))
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

    def _find(self, *candidates: str) -> str:
        found = next(filter(self.has, candidates), None)
        if found is None:
            raise CheckpointError(f"{self.path} has no {' and no '.join(candidates)}.\n\n{_WAYS_OUT}")
        return os.path.join(self.path, found)


def numbered_object(index: int) -> str:
    """Return the name of the file of an object of the script's own."""
    return f"custom_checkpoint_{index}.pkl"


def _random_states(rank: int) -> str:
    return f"random_states_{rank}.pkl"


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
            refuse(path, schedule_problem(content))
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


# Options of Accelerate's that change nothing here.
Unused: TypeAlias = Any


def _is_never(_: nn.Module) -> bool:
    return False  # no lambda: native modules hold this object, and pickle finds a function by its name


class PreparingMembers(StateMembers):
    """What makes loaders, models, optimizers and schedules of the script's own work beside the engine's."""

    _args: TrainingArguments
    mixed_precision: str
    rank_slice: RankSlice
    sync_gradients: bool
    passes: OpenPasses
    run_backward: Callable[..., None] | None
    unscale: Callable[[Prepared], None] | None

    def _begin_unprepared(self) -> None:
        # what a script has prepared, and what a fit trains
        self._models: list[Prepared] = []
        self._optimizers: list[Prepared] = []
        self._schedulers: list[Prepared] = []
        self._dataloaders: list[Prepared] = []
        self._trained_optimizer: Prepared = None
        self.is_trained_by_engine: Callable[[nn.Module], bool] = _is_never
        self._begin_without_states()

    @property
    def dataloader_config(self) -> AcceleratorConfig:
        """How data is loaded across processes: `accelerator_config` of the arguments."""
        return AcceleratorConfig.from_any(self._args.accelerator_config)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is split between the processes."""
        return self.dataloader_config.split_batches

    def _half_precision(self) -> torch.dtype | None:
        raise NotImplementedError

    def prepare(self, *objects: Prepared, device_placement: list[bool] | None = None) -> Prepared:
        """Prepare loaders, models, optimizers and schedules of the script's own; the engine prepares what it trains."""
        prepared = [self._prepare_one(one) for one in objects if not hasattr(one, "get_last_lr")]
        made = iter(prepared)  # schedules come last: they follow the optimizers
        found = tuple(self.prepare_scheduler(one) if hasattr(one, "get_last_lr") else next(made) for one in objects)
        return found if len(found) != 1 else found[0]

    def _prepare_one(self, candidate: Prepared) -> Prepared:
        if isinstance(candidate, DataLoader):
            return self.prepare_data_loader(candidate)
        if isinstance(candidate, nn.Module):
            return self.prepare_model(candidate)
        return self.prepare_optimizer(candidate) if isinstance(candidate, torch.optim.Optimizer) else candidate

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Put a further model on the device and under the run's precision; of several processes, into DDP.

        Args:
            model: A reference or reward model, a discriminator; the Trainer's own is left to the engine.
            device_placement: False leaves it where it is.
            evaluation_mode: It is not trained: DDP is left out.
        """
        if self.is_trained_by_engine(model):
            return model if device_placement is False else model.to(self.device)
        if device_placement is not False and not self.verify_device_map(model):
            model = model.to(self.device)
        if self._half_precision() is not None:
            wrap_forward(model, {"bf16": "bf16-mixed", "fp16": "16-mixed"}[self.mixed_precision], self.device.type)
        self._note(self._models, model)
        is_wrapped = isinstance(model, DistributedDataParallel)
        return (
            self._in_ddp(model)
            if (self.use_distributed and not is_wrapped and any(one.requires_grad for one in model.parameters()))
            and not evaluation_mode
            else model
        )

    def _in_ddp(self, model: nn.Module) -> nn.Module:
        unused = self._args.ddp_find_unused_parameters
        place = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, place, find_unused_parameters=True if unused is None else unused)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a model, or a part of it, stands on several devices by its `hf_device_map`."""
        return any(len(getattr(part, "hf_device_map", None) or ()) > 1 for part in model.modules())

    def prepare_optimizer(self, optimizer: Prepared, device_placement: bool | None = None) -> Prepared:
        """Let an optimizer of the script's own step where an update ends, and not at each micro-batch."""
        if optimizer is not self._trained_optimizer and not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer = PreparedOptimizer(optimizer, self)
        return self._note(self._optimizers, optimizer)

    def prepare_scheduler(self, scheduler: Prepared) -> Prepared:
        """Let a schedule of the script's own step with its optimizer."""
        if not isinstance(scheduler, PreparedScheduler):
            followed = [one for one in self._optimizers if isinstance(one, PreparedOptimizer)]
            own = [one for one in followed if one.optimizer is getattr(scheduler, "optimizer", None)]
            scheduler = PreparedScheduler(scheduler, own or followed, self)
        return self._note(self._schedulers, scheduler)

    def take_up(self, held: ModelState, optimizer: object, scheduler: object) -> None:
        """List what a fit trains before what the script has prepared.

        Args:
            held: The model, and what reads and writes its state.
            optimizer: Its optimizer.
            scheduler: Its schedule.
        """
        self._optimizers[:] = [one for one in self._optimizers if unprepared(one) is not optimizer]
        self._models[:] = [held.model, *(one for one in self._models if one is not held.model)]
        self._optimizers.insert(0, optimizer)
        self._trained_state, self._trained_optimizer, self._trained_schedule = held, optimizer, scheduler

    def leave_fit(self) -> None:
        """Go on without the engine's passes; what was trained stays listed."""
        self.run_backward = self.unscale = None
        self.sync_gradients = True

    @staticmethod
    def _note(held: list[Prepared], candidate: Prepared) -> Prepared:
        if not any(candidate is one for one in held):
            held.append(candidate)
        return candidate

    def prepare_data_loader(self, loader: DataLoader[Batch], **kwargs: Unused) -> PreparedDataLoader:
        """Make a loader like the Trainer's own: one batch ahead, on the device, seeded shuffling."""
        if isinstance(loader, PreparedDataLoader):
            return loader
        chosen: dict[str, Any]
        if isinstance(loader.dataset, IterableDataset):
            chosen = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader.batch_sampler is None:  # the data set is asked for a batch at a time
            chosen = {"batch_size": None, "sampler": loader.sampler}
        elif loader.batch_size is None:
            chosen = {"batch_sampler": loader.batch_sampler}
        else:
            chosen = {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
        return self.make_loader(loader.dataset, **options_of(loader), **chosen)

    def make_loader(self, dataset: DataSource, **options: Any) -> PreparedDataLoader:
        """Make a loader for this process as the arguments ask for it.

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
