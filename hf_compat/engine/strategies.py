"""Lightning strategies for this engine.

They differ from Lightning's own in two ways. The model stays on its device after a fit, because a Trainer evaluates,
predicts and trains again. Steps are called directly, because each micro-batch makes its own forward pass through the
wrapped model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_compat.checkpoint.model_state import ModelState, make_model_state
from hf_compat.engine.fsdp2 import shard_mesh, shard_model
from hf_compat.engine.internals import InnerModelDDPStrategy, InnerModelDeepSpeedStrategy, call_hooks_before_step
from hf_compat.engine.precision import ForwardPrecision
from hf_compat.interop.deepspeed import DeepSpeedEngine, is_deepspeed_engine
from hf_compat.plan.deepspeed import zero_stage
from hf_compat.plan.fsdp import FsdpPlan
from hf_compat.runtime.launch import Launch, main_address
from hf_compat.runtime.text import need


class DirectStepsStrategy(Strategy):
    """Calls the module's steps directly, not within a forward pass of the wrapped model."""

    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        module = self.lightning_module
        assert module is not None  # a trainer runs one
        with self.precision_plugin.train_step_context():
            return module.training_step(*args, **kwargs)

    def validation_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        module = self.lightning_module
        assert module is not None  # as above
        with self.precision_plugin.val_step_context():
            return module.validation_step(*args, **kwargs)

    def test_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        module = self.lightning_module
        assert module is not None  # as above
        with self.precision_plugin.test_step_context():
            return module.test_step(*args, **kwargs)


class HFSingleDeviceStrategy(DirectStepsStrategy, SingleDeviceStrategy):
    """One device. The model stays on it.

    Lightning's own strategy moves model and optimizer to the CPU after a fit.
    """

    def model_to_device(self) -> None:
        module = self.lightning_module
        spread = getattr(getattr(module, "model", None), "hf_device_map", None)
        if spread is None:  # `device_map` has placed such a model already
            super().model_to_device()

    def teardown(self) -> None:
        tear_down_in_place(self)


class LaunchedEnvironment(ClusterEnvironment):
    """The ranks of a launcher: torchrun, accelerate, deepspeed, SLURM or MPI.

    Args:
        launch: Rank and number of this run's processes.
    """

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self._launch = launch

    @property
    def creates_processes_externally(self) -> bool:
        return True

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
        return self._launch.world_size

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._launch.process_index

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._launch.local_process_index

    def node_rank(self) -> int:
        return self._launch.node_rank


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

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Do nothing, as DDP's own forward prepares each backward pass."""

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Do nothing, as DDP's own forward prepares each backward pass."""

    def setup_distributed(self) -> None:
        """Join the process group without Lightning's seeding."""
        self.set_world_ranks()

    def teardown(self) -> None:
        tear_down_in_place(self)
        self.model = None


class HFFSDP2Strategy(DirectStepsStrategy, ModelParallelStrategy):
    """FSDP 2 around the model's own modules. `FSDP2Module.configure_model` shards them.

    Args:
        launch: Rank and number of this run's processes.
        precision_plugin: The precision plugin. FSDP 2 itself casts parameters.
        plan: What to shard, and how.
        precision: Lightning's name for the precision.
    """

    def __init__(self, launch: Launch, precision_plugin: ForwardPrecision, plan: FsdpPlan, precision: str) -> None:
        super().__init__(data_parallel_size=launch.world_size, tensor_parallel_size=1)
        self.cluster_environment = LaunchedEnvironment(launch)
        self.precision_plugin = precision_plugin
        self.plan = plan
        self.precision = precision
        self.launch = launch

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()

    def shard(self, model: nn.Module) -> None:
        """Shard the model unless it is sharded."""
        launch = self.launch
        per_copy = self.plan.shard_size or launch.local_world_size
        mesh = shard_mesh(self.root_device.type, launch.world_size, per_copy, self.plan.hybrid)
        shard_model(model, self.plan, mesh, self.precision)

    def model_to_device(self) -> None:
        if not self.plan.cpu_offload:
            super().model_to_device()

    def teardown(self) -> None:
        tear_down_in_place(self)


def tear_down_in_place(strategy: Strategy) -> None:
    """Tear a strategy down without moving the model."""
    strategy.precision_plugin.teardown()
    if strategy.accelerator is not None:
        strategy.accelerator.teardown()
    strategy.checkpoint_io.teardown()


def wrapped_model(strategy: Strategy, model: nn.Module) -> nn.Module:
    """Return the model that forward passes call: the strategy's wrapper, or the model itself."""
    wrapped = strategy.model
    is_around = isinstance(wrapped, DistributedDataParallel) and wrapped.module is model
    return wrapped if wrapped is not None and (is_around or is_deepspeed_engine(wrapped)) else model


def model_state_of(strategy: Strategy, model: nn.Module) -> ModelState:
    """Return a reader and writer for the state of a strategy's model."""
    writes_shards = isinstance(strategy, HFFSDP2Strategy) and strategy.plan.state_dict_type == "SHARDED_STATE_DICT"
    return make_model_state(model, wrapped_model(strategy, model), writes_shards)


class DeepSpeedPrecision(ForwardPrecision):
    """Steps through DeepSpeed's engine, which also clips and distributes the updated parameters."""

    engine: DeepSpeedEngine | None = None

    def optimizer_step(  # type: ignore[override]  # Lightning's parameter types differ from its base's as well
        self,
        optimizer: torch.optim.Optimizer,
        model: pl.LightningModule,
        closure: Callable[[], object],
        **kwargs: object,
    ) -> None:
        assert self.engine is not None  # `setup` makes it
        closure()
        call_hooks_before_step(self, model, optimizer)
        self.engine.step()


class HFDeepSpeedStrategy(DirectStepsStrategy, InnerModelDeepSpeedStrategy):
    """ZeRO 0 to 3 around the model itself. DeepSpeed's engine is HF's `model_wrapped`.

    Args:
        launch: Rank and number of this run's processes.
        precision_plugin: The plugin that steps through the engine.
        config: The resolved configuration.

    Raises:
        MissingPackage: DeepSpeed is not installed.
    """

    def __init__(self, launch: Launch, precision_plugin: DeepSpeedPrecision, config: dict[str, Any]) -> None:
        need("deepspeed", "deepspeed", "`deepspeed=…`")  # before Lightning raises its own error
        super().__init__(config=config)
        self.cluster_environment = LaunchedEnvironment(launch)
        self.precision_plugin = precision_plugin
        self.stage = zero_stage(config)

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device  # DeepSpeed needs an index

    def setup_environment(self) -> None:
        import deepspeed

        assert self.accelerator is not None
        self.accelerator.setup_device(super().root_device)
        self.set_world_ranks()
        backend = "nccl" if super().root_device.type == "cuda" else "gloo"
        deepspeed.init_distributed(backend, auto_mpi_discovery=False)  # reuses an existing group

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return  # hooks on the model gather what an evaluation needs
        precision = self.precision_plugin
        assert isinstance(precision, DeepSpeedPrecision)  # __init__ has set it
        precision.engine = self.set_up_engine()

    def teardown(self) -> None:
        tear_down_in_place(self)
