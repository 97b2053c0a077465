"""hf_compat: training scripts written for Hugging Face's `Trainer`, on Lightning's engine.

Public are the names of `__all__`, loaded when they are first used, the modules that have the names of transformers'
modules, and `hf_compat.errors` (docs/public_api.md). Everything else is internal and may change in any release.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import opcode
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_compat.callbacks.bridge import HFBridge as HFBridge
    from hf_compat.callbacks.hf_in_lightning import HFCallbackAdapter as HFCallbackAdapter
    from hf_compat.callbacks.lightning_in_hf import LightningCallbackAdapter as LightningCallbackAdapter
    from hf_compat.callbacks.loggers import LoggerCallback as LoggerCallback
    from hf_compat.callbacks.trackers import TensorBoardCallback as TensorBoardCallback
    from hf_compat.callbacks.trackers import WandbCallback as WandbCallback
    from hf_compat.checkpoint.choice import get_last_checkpoint as get_last_checkpoint
    from hf_compat.cli.parser import HfArgumentParser as HfArgumentParser
    from hf_compat.data.collators import default_data_collator as default_data_collator
    from hf_compat.hf.arguments import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
    from hf_compat.hf.arguments import TrainingArguments as TrainingArguments
    from hf_compat.hf.callbacks import CallbackHandler as CallbackHandler
    from hf_compat.hf.callbacks import DefaultFlowCallback as DefaultFlowCallback
    from hf_compat.hf.callbacks import EarlyStoppingCallback as EarlyStoppingCallback
    from hf_compat.hf.callbacks import PrinterCallback as PrinterCallback
    from hf_compat.hf.callbacks import ProgressCallback as ProgressCallback
    from hf_compat.hf.callbacks import TrainerCallback as TrainerCallback
    from hf_compat.hf.enums import IntervalStrategy as IntervalStrategy
    from hf_compat.hf.enums import SaveStrategy as SaveStrategy
    from hf_compat.hf.enums import SchedulerType as SchedulerType
    from hf_compat.hf.metrics import EvalLoopOutput as EvalLoopOutput
    from hf_compat.hf.metrics import EvalPrediction as EvalPrediction
    from hf_compat.hf.metrics import PredictionOutput as PredictionOutput
    from hf_compat.hf.metrics import TrainOutput as TrainOutput
    from hf_compat.hf.metrics import speed_metrics as speed_metrics
    from hf_compat.hf.state import TrainerControl as TrainerControl
    from hf_compat.hf.state import TrainerState as TrainerState
    from hf_compat.interop.patching import patch as patch
    from hf_compat.interop.patching import unpatch as unpatch
    from hf_compat.native.datamodule import HFDataModule as HFDataModule
    from hf_compat.native.module import HFModule as HFModule
    from hf_compat.optim.lr_schedulers import get_scheduler as get_scheduler
    from hf_compat.plan.translate import translate as translate
    from hf_compat.runtime.seeding import enable_full_determinism as enable_full_determinism
    from hf_compat.runtime.seeding import set_seed as set_seed
    from hf_compat.tools.explanation import explain as explain
    from hf_compat.tools.preflight.report import PreflightReport as PreflightReport
    from hf_compat.trainer import Trainer as Trainer
    from hf_compat.trainer_methods.lightning_options import LightningOptions as LightningOptions
    from hf_compat.trainer_seq2seq import Seq2SeqTrainer as Seq2SeqTrainer

__version__ = "0.1.0"


def _homes(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each public name and its module: only type checkers run the imports above, but they are in the code."""
    module = ""
    for name in names:
        if name == "__version__":  # it comes after the imports
            return
        if name.startswith("hf_compat."):
            module = name
        elif module:
            yield name, module


_HOME = dict(_homes(sys._getframe().f_code.co_names))

__all__ = tuple(_HOME)


def __getattr__(name: str) -> Any:
    from hf_compat.runtime.text import as_import_error, nearest

    if name not in _HOME:
        # modules of transformers need no import of their own
        if name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        if _is_imported(sys._getframe(1)):
            # The name may be one of transformers', which has to be loaded to know
            with contextlib.suppress(ImportError, AttributeError):
                importlib.import_module("transformers")
            near = nearest(name, __all__)
            hint = _hint(name) or (f"; did you mean `{near}`?" if near else "")
            raise ImportError(f"cannot import name {name!r} from {__name__!r}{hint}", name=__name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}")
    with as_import_error(name, __name__):
        # It imports tqdm without its warning about notebooks. Else transformers does it first, by way of Lightning
        importlib.import_module(f"{__name__}.runtime.console")
        value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def _is_imported(frame: FrameType) -> bool:
    """Whether a line `from hf_compat import …` asks for a name, and not `getattr` or `hasattr`.

    Python replaces an AttributeError's text at such a line, and `hasattr` needs an AttributeError. Without this test
    the import of a name of transformers fails without the hint (`tests/test_mirrored_modules.py`).
    """
    return frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]


def _hint(name: str) -> str:
    """Say where a name of transformers' is, if that is what is asked for; nothing is imported to find out."""
    # parsers of configurations look for names that nobody has, thousands of times: `dir(transformers)` takes minutes
    known = getattr(sys.modules.get("transformers"), "__all__", ())
    return f"; import it from transformers: `from transformers import {name}`" if name in known else ""


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
