"""What the method groups of the Trainer ask of each other. Declarations only; HF's method names."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_compat.engine.module import WindowModule
from hf_compat.hf.callbacks import CallbackHandler
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.trainer_methods.base import TrainerBase


class RunBase(TrainerBase):
    """Attributes and methods of a run that more than one group uses; each group overrides its own."""

    callback_handler: CallbackHandler

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        raise NotImplementedError

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        raise NotImplementedError

    def store_flos(self) -> None:
        raise NotImplementedError

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        raise NotImplementedError

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        raise NotImplementedError

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        raise NotImplementedError

    def _make_module(self, plan: LightningPlan) -> WindowModule:
        raise NotImplementedError

    def _get_learning_rate(self) -> float:
        raise NotImplementedError
