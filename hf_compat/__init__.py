"""hf_compat: training scripts written for Hugging Face's `Trainer`, on Lightning's engine.

The public names, loaded when they are first asked for; nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_compat.bridge.adapter import HFCallbackAdapter as HFCallbackAdapter
    from hf_compat.bridge.callback import HFBridge as HFBridge
    from hf_compat.bridge.loggers import LoggerCallback as LoggerCallback
    from hf_compat.bridge.reverse import LightningCallbackAdapter as LightningCallbackAdapter
    from hf_compat.doors.parser import HfArgumentParser as HfArgumentParser
    from hf_compat.engine.datamodule import HFDataModule as HFDataModule
    from hf_compat.engine.module import HFModule as HFModule
    from hf_compat.hf.arguments import TrainingArguments as TrainingArguments
    from hf_compat.hf.callbacks import CallbackHandler as CallbackHandler
    from hf_compat.hf.callbacks import TrainerCallback as TrainerCallback
    from hf_compat.hf.data import default_data_collator as default_data_collator
    from hf_compat.hf.enums import IntervalStrategy as IntervalStrategy
    from hf_compat.hf.enums import SaveStrategy as SaveStrategy
    from hf_compat.hf.enums import SchedulerType as SchedulerType
    from hf_compat.hf.flow import DefaultFlowCallback as DefaultFlowCallback
    from hf_compat.hf.flow import EarlyStoppingCallback as EarlyStoppingCallback
    from hf_compat.hf.flow import PrinterCallback as PrinterCallback
    from hf_compat.hf.flow import ProgressCallback as ProgressCallback
    from hf_compat.hf.manifest import get_last_checkpoint as get_last_checkpoint
    from hf_compat.hf.metrics import speed_metrics as speed_metrics
    from hf_compat.hf.outputs import EvalLoopOutput as EvalLoopOutput
    from hf_compat.hf.outputs import EvalPrediction as EvalPrediction
    from hf_compat.hf.outputs import PredictionOutput as PredictionOutput
    from hf_compat.hf.outputs import TrainOutput as TrainOutput
    from hf_compat.hf.seeding import enable_full_determinism as enable_full_determinism
    from hf_compat.hf.seeding import set_seed as set_seed
    from hf_compat.hf.state import TrainerControl as TrainerControl
    from hf_compat.hf.state import TrainerState as TrainerState
    from hf_compat.interop.trackers import TensorBoardCallback as TensorBoardCallback
    from hf_compat.interop.trackers import WandbCallback as WandbCallback
    from hf_compat.plan.explain import explain as explain
    from hf_compat.plan.translate import translate as translate
    from hf_compat.recipe.schedulers import get_scheduler as get_scheduler
    from hf_compat.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOME = {
    "Trainer": "trainer",
    "TrainingArguments": "hf.arguments",
    "TrainerCallback": "hf.callbacks",
    "CallbackHandler": "hf.callbacks",
    "TrainerState": "hf.state",
    "TrainerControl": "hf.state",
    "DefaultFlowCallback": "hf.flow",
    "ProgressCallback": "hf.flow",
    "PrinterCallback": "hf.flow",
    "EarlyStoppingCallback": "hf.flow",
    "EvalPrediction": "hf.outputs",
    "EvalLoopOutput": "hf.outputs",
    "PredictionOutput": "hf.outputs",
    "TrainOutput": "hf.outputs",
    "IntervalStrategy": "hf.enums",
    "SaveStrategy": "hf.enums",
    "SchedulerType": "hf.enums",
    "default_data_collator": "hf.data",
    "get_last_checkpoint": "hf.manifest",
    "set_seed": "hf.seeding",
    "enable_full_determinism": "hf.seeding",
    "get_scheduler": "recipe.schedulers",
    "speed_metrics": "hf.metrics",
    "HFModule": "engine.module",
    "HFDataModule": "engine.datamodule",
    "HFBridge": "bridge.callback",
    "HFCallbackAdapter": "bridge.adapter",
    "LightningCallbackAdapter": "bridge.reverse",
    "LoggerCallback": "bridge.loggers",
    "TensorBoardCallback": "interop.trackers",
    "WandbCallback": "interop.trackers",
    "HfArgumentParser": "doors.parser",
    "translate": "plan.translate",
    "explain": "plan.explain",
}

__all__ = tuple(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
