"""How a fit runs its model: precision, compilation, strategies, and how an update differs between them.

Precision applies to the model's forward only, as in HF. Lightning's own mixed precision covers the whole training
step, including a loss computed outside the model. It also refuses to clip with fused optimizers, while here the module
itself clips.

The strategies differ from Lightning's own in two ways. The model stays on its device after a fit, because a Trainer
evaluates, predicts and trains again. Steps are called directly, because each micro-batch makes its own forward pass
through the wrapped model. `optim/stepping.py` describes each optimizer's hooks on the parameters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

from hf_compat.engine.internals import InnerModelDDPStrategy, InnerModelDeepSpeedStrategy, call_hooks_before_step
from hf_compat.engine.windows import TrainingSteps
from hf_compat.errors import ArgumentError, OverrideError, UnsupportedArgument
from hf_compat.hf.process_state import start_deepspeed
from hf_compat.interop.deepspeed import DeepSpeedEngine, compile_engine, is_deepspeed_engine, sharing_sequences
from hf_compat.optim.stepping import OptimizerBehaviour
from hf_compat.plan.fsdp import FsdpPlan
from hf_compat.plan.parallelism import SequencePlan
from hf_compat.plan.translate import Compilation, PrecisionName, exchanges_every_micro_batch
from hf_compat.runtime.inspection import has_device_map, uncompiled
from hf_compat.runtime.launch import Launch, main_address
from hf_compat.runtime.meshes import data_mesh
from hf_compat.runtime.nested import map_nested
from hf_compat.runtime.text import need

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_HALF = (torch.float16, torch.bfloat16)
_NO_CONTEXT = contextlib.nullcontext()  # reusable and reentrant

ModelOutput = Any  # any result of the user's model


class AutocastForward:
    """A model's own forward under autocast, with outputs in float32. As a class it can be pickled and copied."""

    def __init__(self, forward: Callable[..., ModelOutput], device_type: str, dtype: torch.dtype) -> None:
        self.forward = forward
        self.__wrapped__ = forward  # `inspect.signature` finds the model's own
        self.device_type = device_type
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> ModelOutput:
        with torch.autocast(self.device_type, dtype=self.dtype):
            outputs = self.forward(*args, **kwargs)
        return map_nested(lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor, outputs)


def wrap_forward(model: nn.Module, precision: str, device_type: str) -> None:
    """Put a model's forward under autocast, once. Do nothing for full precision.

    As with Accelerate it stays so after training, so that later evaluations give the same numbers.
    """
    dtype = DTYPES.get(precision)
    if dtype is None or isinstance(model.__dict__.get("forward"), AutocastForward):
        return
    model.forward = AutocastForward(model.forward, device_type, dtype)


def unwrap_forward(model: nn.Module) -> None:
    """Restore a model's own forward."""
    if isinstance(model.__dict__.get("forward"), AutocastForward):
        del model.forward


class ForwardPrecision(Precision):
    """A Lightning precision plugin without autocast around the steps, as the model's forward has it.

    The gradient scaler is that of `16-mixed`. A step goes through DeepSpeed's engine if there is one, which also clips
    and distributes the updated parameters.
    """

    engine: DeepSpeedEngine | None = None

    def __init__(
        self, precision: PrecisionName = "32-true", scaler: torch.amp.GradScaler | None = None, device: str = "cpu"
    ) -> None:
        self.precision = precision
        self.scaler = scaler
        self.device = device  # its type. Scripts read it, as of Lightning's plugin
        self.step_was_skipped = False
        self._is_unscaled = False
        # the context for each user-defined step, by Lightning's name of the step
        self.of_own_steps: Mapping[str, contextlib.AbstractContextManager[None]] = {}

    def train_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.of_own_steps.get("training_step", _NO_CONTEXT)

    def val_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.of_own_steps.get("validation_step", _NO_CONTEXT)

    def test_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.of_own_steps.get("test_step", _NO_CONTEXT)

    def predict_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.of_own_steps.get("predict_step", _NO_CONTEXT)

    def pre_backward(self, tensor: torch.Tensor, module: pl.LightningModule) -> torch.Tensor:  # type: ignore[override]
        scaled = tensor if self.scaler is None else self.scaler.scale(tensor)
        return super().pre_backward(scaled, module)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients before they are clipped, once an update, as a script may have done it."""
        if self.scaler is not None and not self._is_unscaled:
            self.scaler.unscale_(optimizer)
            self._is_unscaled = True

    def optimizer_step(  # type: ignore[override]  # Lightning's parameter types differ from its base's as well
        self, optimizer: torch.optim.Optimizer, model: pl.LightningModule, closure: Callable[[], object], **kwargs: Any
    ) -> float | None:
        """Call the hooks before a step, then step. The gradients exist already, so the closure is not passed on."""
        closure()
        call_hooks_before_step(self, model, optimizer)
        if self.engine is not None:
            self.engine.step()
            return None
        if self.scaler is None:
            return optimizer.step(**kwargs)
        # As in Accelerate, a step is skipped if the scaler does not call it. The scaler always calls a fused optimizer,
        # which checks the gradients on the device. Reading the scale would wait for the device.
        self.step_was_skipped = True

        def note_step(*_: object) -> None:
            self.step_was_skipped = False

        handle = optimizer.register_step_pre_hook(note_step)
        try:
            result: float | None = self.scaler.step(optimizer, **kwargs)
        finally:
            handle.remove()
        self.scaler.update()
        self._is_unscaled = False
        return result

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)


def autocast_of(plugin: Precision, device_type: str) -> contextlib.AbstractContextManager[None]:
    """Return the autocast of a precision plugin. A null context for full and true precision."""
    dtype = DTYPES.get(plugin.precision) if isinstance(plugin, ForwardPrecision) else None
    return _NO_CONTEXT if dtype is None else torch.autocast(device_type, dtype=dtype)


def move_autocast_to_forward(
    strategy: Strategy, model: nn.Module, device_type: str, own_steps: Iterable[str] = ()
) -> None:
    """Replace the mixed precision of a strategy that is not set up yet by autocast around a model's forward.

    User-defined steps run under autocast as in any LightningModule.
    """
    plugin = strategy.precision_plugin
    if type(plugin) is MixedPrecision:
        precision: PrecisionName = "bf16-mixed" if plugin.precision == "bf16-mixed" else "16-mixed"
        strategy.precision_plugin = plugin = ForwardPrecision(precision, plugin.scaler, plugin.device)
    if isinstance(plugin, ForwardPrecision):  # possibly from an earlier call on the same trainer
        wrap_forward(model, plugin.precision, device_type)
        plugin.of_own_steps = {name: autocast_of(plugin, device_type) for name in own_steps}


def is_compiled(model: nn.Module) -> bool:
    """Whether a model's call is compiled by torch, in a wrapper or in place."""
    return uncompiled(model) is not model or getattr(model, "_compiled_call_impl", None) is not None


def compiled(model: nn.Module, how: Compilation) -> nn.Module:
    """Compile a model. A compiled model is returned as it is.

    Both share their parameters. The original still runs uncompiled.

    Mirrors:
        The end of `accelerate.Accelerator.prepare_model`, 1.15.
    """
    if is_compiled(model):
        return model
    keywords = how.keywords()
    if is_deepspeed_engine(model):  # the engine compiles the module inside it
        compile_engine(model, keywords)
        return model
    if how.by_blocks:
        utils = need("accelerate.utils", "accelerate", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true")
        form: nn.Module = utils.compile_regions(model, **keywords)  # it shares the model's parameters
        return form
    form = torch.compile(model, **keywords)  # type: ignore[call-overload]  # the keywords are a dict
    return form


@functools.lru_cache(maxsize=4)
def shard_mesh(device: str, world_size: int, per_node: int, hybrid: bool) -> DeviceMesh:
    """Return the mesh that parameters are sharded over, shared by all trainers of a process."""
    if hybrid and world_size > per_node:
        return init_device_mesh(
            device, (world_size // per_node, per_node), mesh_dim_names=("replicate", "data_parallel")
        )
    return init_device_mesh(device, (world_size,), mesh_dim_names=("data_parallel",))


def shard_model(model: nn.Module, plan: FsdpPlan, mesh: DeviceMesh, precision: str) -> None:
    """Shard a model in place: first the modules that the plan names, then the rest. Skip a sharded model.

    Raises:
        ArgumentError: The model has no module of a class that the plan names.
    """
    if isinstance(model, FSDPModule):
        return
    half = DTYPES.get(precision)
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        reshard_after_forward=plan.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None),
        offload_policy=CPUOffloadPolicy() if plan.cpu_offload else OffloadPolicy(),
    )
    parts = _parts(model, plan)
    if plan.activation_checkpointing:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        chosen = set(map(id, parts))
        apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
    for part in parts:
        shard(part)
    shard(model)


@contextlib.contextmanager
def gathering_method(model: nn.Module, method: str) -> Iterator[Callable[..., torch.Tensor]]:
    """Yield a method of a model that gathers sharded parameters before it runs, as a forward pass does.

    `generate` calls an encoder on its own, and the root's sharded parameters are not gathered for that call.
    """
    if not isinstance(model, FSDPModule):
        yield getattr(model, method)
        return
    attributes = vars(model)
    of_instance = {name: value for name, value in attributes.items() if name == method}
    register_fsdp_forward_method(model, method)
    try:
        yield getattr(model, method)
    finally:
        del attributes[method]
        attributes.update(of_instance)


def _parts(model: nn.Module, plan: FsdpPlan) -> list[nn.Module]:
    """Return the modules to shard separately, inner ones first."""
    if plan.wrap == "none":
        return []
    containers = (nn.ModuleList, nn.ModuleDict)  # fully_shard rejects both
    modules = [module for module in list(model.modules())[:0:-1] if not isinstance(module, containers)]
    if plan.wrap == "size":
        found, taken = [], set[int]()
        for module in modules:
            own = [parameter for parameter in module.parameters() if id(parameter) not in taken]
            if sum(parameter.numel() for parameter in own) >= plan.min_num_params:
                taken.update(map(id, own))
                found.append(module)
        return found
    names = set(plan.wrap_classes) or set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in modules if type(module).__name__ in names]
    missing = set(plan.wrap_classes) - {type(module).__name__ for module in found}
    if missing:
        raise ArgumentError(
            f"`fsdp_config` wraps {sorted(missing)}, and the model has no module of such a class.\n\n"
            f"Hint: its classes are {', '.join(sorted({type(m).__name__ for m in modules}))}."
        )
    return found


def _direct(step: str, context: str) -> Callable[..., STEP_OUTPUT]:
    """Make a strategy's method that calls a step of the module."""

    def run(self: Strategy, *args: object, **kwargs: object) -> STEP_OUTPUT:
        with getattr(self.precision_plugin, context)():
            output: STEP_OUTPUT = getattr(self.lightning_module, step)(*args, **kwargs)
            return output

    return run


class DirectStepsStrategy(Strategy):
    """Calls the module's steps directly, not within a forward pass of the wrapped model, which stays on its device."""

    training_step = _direct("training_step", "train_step_context")
    validation_step = _direct("validation_step", "val_step_context")
    test_step = _direct("test_step", "test_step_context")

    def teardown(self) -> None:
        """Leave the model on its device. Lightning's own strategies move model and optimizer to the CPU after a fit."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


class HFSingleDeviceStrategy(DirectStepsStrategy, SingleDeviceStrategy):
    """One device."""

    def model_to_device(self) -> None:
        if not has_device_map(getattr(self.lightning_module, "model", None)):
            super().model_to_device()


class LaunchedEnvironment(ClusterEnvironment):
    """The ranks of a launcher: torchrun, accelerate, deepspeed, SLURM or MPI."""

    creates_processes_externally = True

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch

    @property
    def main_address(self) -> str:
        return main_address()[0]

    @property
    def main_port(self) -> int:
        return main_address()[1]

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.launch.world_size

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self.launch.process_index

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self.launch.local_process_index

    def node_rank(self) -> int:
        return self.launch.node_rank


class HFDDPStrategy(DirectStepsStrategy, InnerModelDDPStrategy):
    """DDP around the model itself. HF calls the wrapper `model_wrapped`, and the model is its `module`."""

    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
            return
        # an evaluation needs no broadcast, as all ranks have the same weights
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        self.setup_precision_plugin()

    # DDP's own forward prepares each backward pass
    def pre_backward(self, closure_loss: torch.Tensor) -> None: ...
    def post_backward(self, closure_loss: torch.Tensor) -> None: ...

    def setup_distributed(self) -> None:
        """Join the process group without Lightning's seeding."""
        self.set_world_ranks()

    def teardown(self) -> None:
        super().teardown()
        self.model = None


class HFMeshStrategy(DirectStepsStrategy, ModelParallelStrategy):
    """All processes share one model, whose layers are split between them already (tensor parallelism)."""

    writes_shards = False  # whether checkpoints hold the parts of each process

    def __init__(self, cluster_environment: LaunchedEnvironment, precision_plugin: ForwardPrecision) -> None:
        super().__init__(data_parallel_size=cluster_environment.world_size(), tensor_parallel_size=1)
        self.cluster_environment, self.precision_plugin = cluster_environment, precision_plugin

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()

    def shard(self, model: nn.Module) -> None:
        """Shard the model, if the strategy does. `MeshModule.configure_model` calls it."""


class HFFSDP2Strategy(HFMeshStrategy):
    """FSDP 2 around the model's own modules, whose layers may be split already."""

    def __init__(
        self, plan: FsdpPlan, cluster_environment: LaunchedEnvironment, precision_plugin: ForwardPrecision
    ) -> None:
        super().__init__(cluster_environment, precision_plugin)
        self.plan, self.precision, self.launch = plan, precision_plugin.precision, cluster_environment.launch
        self.writes_shards = plan.state_dict_type == "SHARDED_STATE_DICT"

    def shard(self, model: nn.Module) -> None:
        launch = self.launch
        mesh = data_mesh(model)
        if mesh is None:
            per_copy = self.plan.shard_size or launch.local_world_size
            mesh = shard_mesh(self.root_device.type, launch.world_size, per_copy, self.plan.hybrid)
        shard_model(model, self.plan, mesh, self.precision)

    def model_to_device(self) -> None:
        if not self.plan.cpu_offload:
            super().model_to_device()


def wrapped_model(strategy: Strategy, model: nn.Module) -> nn.Module:
    """Return the model that forward passes call: the strategy's wrapper, or the model itself."""
    wrapped = strategy.model
    is_around = isinstance(wrapped, DistributedDataParallel) and wrapped.module is model
    return wrapped if wrapped is not None and (is_around or is_deepspeed_engine(wrapped)) else model


class HFDeepSpeedStrategy(DirectStepsStrategy, InnerModelDeepSpeedStrategy):
    """ZeRO 0 to 3 around the model itself. DeepSpeed's engine is HF's `model_wrapped`.

    Raises:
        MissingPackage: DeepSpeed is not installed.
    """

    def __init__(self, sequence: SequencePlan | None = None, **options: Any) -> None:
        need("deepspeed", "deepspeed", "`deepspeed=…`")  # before Lightning raises its own error
        super().__init__(**options)
        self.sequence = sequence  # how processes share sequences
        self._shared = contextlib.ExitStack()  # of the attention, while a fit runs

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device  # DeepSpeed needs an index

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(super().root_device)
        self.set_world_ranks()
        start_deepspeed(super().root_device)

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return  # hooks on the model gather what an evaluation needs
        precision = self.precision_plugin
        assert isinstance(precision, ForwardPrecision)  # given to __init__
        groups = None
        if (plan := self.sequence) is not None and self.config is not None:
            size, model = self.config["train_micro_batch_size_per_gpu"], self.lightning_module.model
            context = sharing_sequences(model, plan.sp_size, size, plan.length, plan.attention)
            groups = self._shared.enter_context(context)
        precision.engine = self.set_up_engine(groups)

    def teardown(self) -> None:
        self._shared.close()
        super().teardown()


class UpdateMechanics:
    """How the updates of one fit are made. The model's wrapper, the precision and the optimizer decide it.

    Args:
        steps: The owner of the overridable steps. Forward passes call its `model_wrapped`.
        backward: Lightning's backward pass. It takes the loss and torch's options.
        precision: The trainer's precision plugin.
        of_strategy: The strategy's wrapper. Lightning's own DDP wraps the whole module.

    Attributes:
        backward: The backward pass of a loss.
        engine: DeepSpeed's engine, which runs the backward pass and clips when it steps. None without DeepSpeed.
        scaling: The plugin that scales gradients, or None.
        exchange: Sets whether the coming backward pass exchanges gradients, as it does for a window's last. None if
            every pass does, or with one device.
        stepping: How the optimizer steps, under any strategy.
    """

    engine: DeepSpeedEngine | None = None
    scaling: ForwardPrecision | None = None
    exchange: Callable[[bool], None] | None = None
    stepping = OptimizerBehaviour()

    def __init__(
        self, steps: TrainingSteps, backward: Callable[..., None], precision: Precision, of_strategy: object = None
    ) -> None:
        self.steps, self.backward = steps, backward
        wrapped: object = steps.model_wrapped
        self._scaler = precision.scaler if isinstance(precision, ForwardPrecision) else None
        if is_deepspeed_engine(wrapped):
            self.engine, self.exchange = wrapped, wrapped.set_gradient_accumulation_boundary
            self.backward = self._through_engine
            return
        if isinstance(precision, ForwardPrecision) and precision.scaler is not None:
            self.scaling = precision
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(True)  # a fit that ended within a window may have switched it off
            wrapped.set_requires_all_reduce(True)
        if steps.accelerator.num_processes == 1 or exchanges_every_micro_batch(steps.args):
            return
        wrappers = (wrapped, of_strategy)
        ddp = next((one for one in wrappers if isinstance(one, DistributedDataParallel)), None)
        if ddp is not None:
            # the attribute that `no_sync` sets, without a context manager for each micro-batch
            self.exchange = functools.partial(setattr, ddp, "require_backward_grad_sync")
        elif isinstance(wrapped, FSDPModule):
            loaded = getattr(getattr(steps.model, "config", None), "distributed_config", None)
            # as upstream, copies that `from_pretrained` made exchange late, and the shards of a copy at once
            has_copies = getattr(loaded, "dp_replicate_size", 1) > 1
            self.exchange = wrapped.set_requires_all_reduce if has_copies else wrapped.set_requires_gradient_sync

    def _through_engine(self, loss: torch.Tensor, **options: object) -> None:
        """Run the engine's backward pass of a loss, which is already divided by the window.

        DeepSpeed would divide it once more if the loss were the very tensor that the model has returned.
        """
        assert self.engine is not None
        self.engine.backward(loss.clone(), scale_wrt_gas=False, **options)

    def begin(self, module: pl.LightningModule, stepping: OptimizerBehaviour, rate: Callable[[], float]) -> None:
        """Prepare a fit with an optimizer.

        Args:
            module: The trained module. It passes losses to an optimizer that runs the backward pass.
            stepping: How the optimizer steps.
            rate: Returns the learning rate of the current update.

        Raises:
            OverrideError: The optimizer runs the backward pass, and the module overrides `backward`.
            UnsupportedArgument: The optimizer updates parameters in the backward pass, and gradients have to be scaled
                or exchanged.
        """
        processes, optimizer = self.steps.accelerator.num_processes, type(stepping.optimizer).__name__
        if stepping.steps_in_backward and (processes > 1 or self._scaler is not None):
            what = f"exchanged between {processes} processes" if processes > 1 else "scaled for `fp16=True`"
            raise UnsupportedArgument(
                f"{optimizer} updates each parameter in the backward pass, and gradients are to be {what}.\n\n"
                "Hint: train in one process, without `fp16`, or choose another optimizer."
            )
        self.stepping = stepping
        stepping.attach()
        send = stepping.fused_backward
        if send is None:
            return
        if type(module).backward is not pl.LightningModule.backward:
            raise OverrideError(
                f"{type(module).__name__} overrides `backward`, and {optimizer} runs the backward pass itself.\n\n"
                "Hint: leave the override out, or choose another optimizer."
            )
        # Lightning's own backward pass finds it here, so all its hooks run
        module.__dict__["backward"] = lambda loss, *args, **kwargs: send(loss, rate())

    def end(self, module: pl.LightningModule) -> None:
        """Undo `begin`."""
        self.stepping.detach()
        module.__dict__.pop("backward", None)
