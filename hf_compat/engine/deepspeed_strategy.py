"""DeepSpeed as a Lightning strategy: the engine around the model itself. Lightning words only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from hf_compat.engine.internals import InnerModelDeepSpeedStrategy, call_hooks_before_step
from hf_compat.engine.precision import ForwardPrecision
from hf_compat.engine.strategies import DirectStepsStrategy, LaunchedEnvironment, tear_down_in_place
from hf_compat.interop.deepspeed import DeepSpeedEngine
from hf_compat.plan.deepspeed import zero_stage
from hf_compat.runtime.launch import Launch
from hf_compat.runtime.text import need


class DeepSpeedPrecision(ForwardPrecision):
    """Lets the engine make the optimizer's step: it clips, and distributes what each process has updated."""

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
    """ZeRO 0 to 3 around the model itself: what HF calls `model_wrapped` is DeepSpeed's engine.

    Args:
        launch: The place of this process among several.
        precision_plugin: The plugin that lets the engine step.
        config: The resolved configuration.

    Raises:
        MissingPackage: DeepSpeed is not installed.
    """

    def __init__(self, launch: Launch, precision_plugin: DeepSpeedPrecision, config: dict[str, Any]) -> None:
        need("deepspeed", "deepspeed", "`deepspeed=…`")  # before Lightning asks for it, in other words
        super().__init__(config=config)
        self.cluster_environment = LaunchedEnvironment(launch)
        self.precision_plugin = precision_plugin
        self.stage = zero_stage(config)

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device  # DeepSpeed asks for an index

    def setup_environment(self) -> None:
        import deepspeed

        assert self.accelerator is not None
        self.accelerator.setup_device(super().root_device)
        self.set_world_ranks()
        backend = "nccl" if super().root_device.type == "cuda" else "gloo"
        deepspeed.init_distributed(backend, auto_mpi_discovery=False)  # takes the group that is there

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
