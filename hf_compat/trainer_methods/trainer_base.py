"""`TrainerBase` declares the attributes of a Trainer, for the groups of its methods.

`TrainerApi` declares the methods that the objects of a run call. A group inherits from the others whose methods it
calls. Subclasses override methods of upstream's Trainer: they are called as upstream calls them, or refused. Methods
without a function here do nothing, but their overrides are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from hf_compat.callbacks.callback_set import CallbackSet
from hf_compat.checkpoint.model_state import ModelState
from hf_compat.data.types import Loader
from hf_compat.errors import CallbackError, OverrideError, warn_once
from hf_compat.hf.argument_values import AcceleratorConfig
from hf_compat.hf.callbacks import CallbackHandler
from hf_compat.hf.search import HPSearchBackend, Trial
from hf_compat.hub.pushes import Pushes
from hf_compat.interop.former_names import ABSENT, FORMER_METHODS, REFUSED_OVERRIDES
from hf_compat.interop.patching import tell_of_newer_names
from hf_compat.plan.translate import CurrentPlan
from hf_compat.runtime.inspection import delegated, home_of, kept_per_class
from hf_compat.runtime.nested import Nested
from hf_compat.runtime.text import Absent, brief
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.lightning_options import CheckedOptions
from hf_compat.trainer_methods.memory import UnmeasuredMemory
from hf_compat.trainer_methods.steps import StepMethods
from hf_compat.training_run.interface import TrainerApi
from hf_compat.training_run.resumer import Resumer
from hf_compat.training_run.saver import Saver

if TYPE_CHECKING:

    class _Declared(TrainerApi, Protocol): ...

else:
    _Declared = object


class TrainerBase(StepMethods, DataloaderMethods, _Declared):
    """Attributes of a Trainer alone, besides those of `TrainerApi`, and names that exist for subclasses only."""

    # for a hyperparameter search
    model_init: Callable[..., nn.Module] | None
    hp_search_backend: HPSearchBackend | None = None
    hp_name: Callable[..., str] | None = None
    _trial: Trial = None
    _own_attributes: frozenset[str] = frozenset()  # the names of the attributes that the constructor has set

    _lightning_options: CheckedOptions
    _pushes: Pushes
    _saver: Saver
    _resumer: Resumer
    _callbacks: CallbackSet
    _plan: CurrentPlan
    _memory_tracker: UnmeasuredMemory = UnmeasuredMemory()  # the constructor sets the active one
    gather_function: Callable[..., Nested]
    model_preparation_time: float
    _checks_optimizer = False  # whether the optimizer of the fit holds the model's own parameters, not shards
    _fit_model_state: ModelState | None = None  # from the last fit, as DeepSpeed's engine keeps the weights

    # Subclasses of transformers' Trainer read or write these.
    _tr_loss: torch.Tensor = delegated("_run.losses.since_last_log")
    _total_loss_scalar: float = delegated("_run.losses.total")
    _globalstep_last_logged: int = delegated("_run.losses.last_logged")
    _initial_num_input_tokens_seen: int = delegated("_run.tokens_before")
    initial_num_input_tokens_seen_for_session = _initial_num_input_tokens_seen  # its name in 5.0
    _initial_global_step: int = delegated("_run.updates_before")

    # Attributes that exist only for subclasses
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False
    is_distributed_loading_by_transformers = False
    # From 4.x, for a copied `training_step` or `prediction_step`. Accelerate's facade does all of it.
    use_amp = use_apex = use_cuda_amp = use_cpu_amp = do_grad_scaling = is_tp_enabled = False
    sharded_ddp = _mixed_mesh_grads = None
    _loggers_initialized = False  # constant, as upstream

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Refuse a class with an override that would silently not be called, or warn of it."""
        super().__init_subclass__(**kwargs)
        _look_for_overrides(cls, cls.__name__, _by_origin(vars(cls))[1])
        tell_of_newer_names(cls, next(kind for kind in cls.__mro__ if kind.__module__.startswith("hf_compat.")))

    def _refuse_late_overrides(self) -> None:
        """Refuse a late override, on this Trainer or on an earlier class, that would silently not be called.

        Also refuse a callback handler that is not one of ours.
        """
        handler: object = self.callback_handler
        if not isinstance(handler, CallbackHandler):
            kind = type(handler)
            raise CallbackError(
                f"`trainer.callback_handler` is a {kind.__module__}.{kind.__qualname__}, which does not inherit from "
                "ours.\n\nHint: inherit from `hf_compat.trainer_callback.CallbackHandler`, or start the script with "
                "`hf-compat run`."
            )
        handler.requestable_kwargs["trainer"] = self  # a script's own handler may lack it
        put_there: set[str] = set()
        for one in reversed(type(self).__mro__):
            if one.__module__.partition(".")[0] == "hf_compat":
                ours, others = _members_by_origin(one)
                put_there = (put_there - ours) | others
        ours, others = _by_origin(vars(self))
        _look_for_overrides(self, type(self).__name__, (put_there - ours) | others)

    def create_accelerator_and_postprocess(self) -> None:
        """Make `self.accelerator`. The constructor calls this once model and arguments are set.

        Mirrors:
            `transformers.Trainer.create_accelerator_and_postprocess`.
        """
        self.accelerator = AcceleratorFacade(self.args)
        self.accelerator.is_trained_by_engine = self._is_own_model
        self.is_deepspeed_enabled = self.accelerator.state.deepspeed_plugin is not None  # constructors read it
        self.gather_function = self.accelerator.gather_for_metrics

    def _make_accelerator(self) -> None:
        """Make `self.accelerator`. If an override makes Accelerate's own, copy its data options, with a warning."""
        self.create_accelerator_and_postprocess()
        made: object = self.accelerator
        if isinstance(made, AcceleratorFacade):
            return
        held = AcceleratorConfig.from_any(self.args.accelerator_config).to_dict()
        said = {name: getattr(made, name) for name in held if hasattr(made, name)}
        self.args.accelerator_config = {**held, **said}
        options = ", ".join(f"{name}={brief(value)}" for name, value in said.items())
        warn_once(
            f"{type(self).__name__}.create_accelerator_and_postprocess makes an {type(made).__name__} of "
            f"{type(made).__module__.partition('.')[0]}, but Lightning trains here. Only its data loader options are "
            f"used ({options}).\n\n"
            "Hint: remove the method, and set `accelerator_config` and the arguments `ddp_*`, `fsdp` and `deepspeed`."
        )
        TrainerBase.create_accelerator_and_postprocess(self)

    def _is_own_model(self, model: nn.Module) -> bool:
        return model is self.model or model is self.__dict__.get("model_wrapped")

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Loader | None = None) -> nn.Module:
        """Leave the model of a fit or an evaluation as it is, as Lightning's strategy wraps it."""
        return model

    def _call_wrap_model(self, training: bool) -> None:
        """Call `_wrap_model` as upstream does. Refuse another model, which Lightning's strategy would not train."""
        model = self.model_wrapped if training else self.model
        wrapped = self._wrap_model(model) if training else self._wrap_model(model, training=False)
        if wrapped is not model:
            raise OverrideError(
                f"{type(self).__name__}._wrap_model returned a {type(wrapped).__name__} around the model, but here "
                "Lightning's strategy wraps it.\n\n"
                "Hint: pass the final model to the Trainer, or set the arguments `ddp_*` and `fsdp`."
            )

    def _nested_gather(self, tensors: Nested, name: str | None = None) -> Nested:
        """Concatenate nested tensors of all ranks. Scalars become vectors.

        Mirrors:
            `transformers.Trainer._nested_gather`, 4.57, which overrides with copied parts of that release's loop call.
        """
        return self.accelerator.gather(tensors) if tensors is not None else None

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Whether gradients lie on several meshes, for a `_clip_grad_norm` copied from 5.23.

        `accelerator.clip_grad_norm_` takes such gradients.
        """
        return False

    def _pad_across_processes(self, tensor: Nested, pad_index: int = -100) -> Nested:
        """Pad nested tensors in their second dimension to the longest of all ranks.

        Mirrors:
            `transformers.Trainer._pad_across_processes`, 4.30.
        """
        return self.accelerator.pad_across_processes(tensor, dim=1, pad_index=pad_index)


# Names not defined above raise an error that explains this when they are read.
for _name, _way_out in {**ABSENT, **FORMER_METHODS, **REFUSED_OVERRIDES}.items():
    if not hasattr(TrainerBase, _name):
        setattr(TrainerBase, _name, Absent(_name, _way_out))


def _by_origin(members: Mapping[str, object]) -> tuple[set[str], set[str]]:
    """The names of members that this package has written, and of the others."""
    ours = set()
    for name, value in members.items():
        if isinstance(value, Absent) or str(getattr(value, "__module__", None)).startswith("hf_compat."):
            ours.add(name)
    return ours, members.keys() - ours


@kept_per_class
def _members_by_origin(kind: type) -> tuple[set[str], set[str]]:
    return _by_origin(vars(kind))


def _look_for_overrides(holder: object, called: str, own: Iterable[str]) -> None:
    for name, way_out in REFUSED_OVERRIDES.items():
        method = getattr(holder, name, None)
        if method is not None and home_of(method).partition(".")[0] != "hf_compat":
            raise OverrideError(
                f"{called} overrides `{name}`, which is never called, as Lightning runs the loop.\n\nHint: {way_out}."
            )
    for name in sorted(FORMER_METHODS.keys() & own):
        warn_once(
            f"{called} has a method `{name}`, which an older release of transformers called in each run. "
            "Neither 5.23 nor hf_compat calls it.\n\n"
            f"Hint: {FORMER_METHODS[name]}. Ignore this if your own code calls the method."
        )
