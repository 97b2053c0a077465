"""Modules that replace those of `transformers`, with our names where we have them and its own otherwise."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from hf_compat.runtime.text import need

Lookup = Callable[[str], object]


# Modules that replace those of `transformers` → our modules → the names there. Other names are transformers' own.
_HOMES: dict[str, dict[str, str]] = {
    "data": {"data.collators": "default_data_collator"},
    "debug_utils": {"hf.enums": "DebugOption"},
    "integrations": {"callbacks.trackers": "TensorBoardCallback WandbCallback"},
    "integrations.integration_utils": {"callbacks.trackers": "TensorBoardCallback WandbCallback"},
    "optimization": {"optim.lr_schedulers": "get_scheduler"},
    "trainer_callback": {
        "hf.callbacks": "CallbackHandler DefaultFlowCallback EarlyStoppingCallback PrinterCallback ProgressCallback "
        "TrainerCallback",
        "hf.state": "ExportableState TrainerControl TrainerState",
    },
    "trainer_pt_utils": {
        "runtime.nested": "find_batch_size nested_detach nested_numpify",
        "hf.argument_values": "AcceleratorConfig",
        "hf.metrics": "metrics_format",
        "optim.label_smoothing": "LabelSmoother",
        "optim.stepping": "LayerWiseDummyOptimizer LayerWiseDummyScheduler",
    },
    "trainer_seq2seq": {"trainer": "Trainer"},
    "trainer_utils": {
        "checkpoint.layout": "PREFIX_CHECKPOINT_DIR",
        "checkpoint.manifest": "get_last_checkpoint",
        "data.collators": "RemoveColumnsCollator",
        "hf.enums": "EvaluationStrategy HubStrategy IntervalStrategy SaveStrategy SchedulerType",
        "hf.metrics": "EvalLoopOutput EvalPrediction PredictionOutput TrainOutput denumpify_detensorize speed_metrics",
        "hf.search": "BestRun HPSearchBackend default_compute_objective default_hp_space_optuna",
        "runtime.inspection": "has_length number_of_arguments",
        "runtime.seeding": "enable_full_determinism seed_worker set_seed",
    },
    "training_args": {"hf.arguments": "TrainingArguments", "hf.enums": "OptimizerNames ParallelMode"},
    "training_args_seq2seq": {"hf.arguments": "Seq2SeqTrainingArguments TrainingArguments"},
}
# Module → name → our module that has it
MIRRORS = {
    module: {name: home for home, names in homes.items() for name in names.split()} for module, homes in _HOMES.items()
}


def mirror(module: str) -> tuple[Lookup, Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a module that replaces one of `transformers`.

    Args:
        module: The module's full name. Names that are not ours are loaded from transformers when needed.
    """
    name_within = module.removeprefix("hf_compat.")
    ours, upstream = MIRRORS[name_within], f"transformers.{name_within}"

    def lookup(name: str) -> object:
        if name in ours:
            return getattr(importlib.import_module(f"hf_compat.{ours[name]}"), name)
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        need("transformers", "'hf-compat[transformers]'", f"`{module}.{name}`")
        theirs = importlib.import_module(upstream)
        if not hasattr(theirs, name):
            raise AttributeError(f"neither {module!r} nor {upstream!r} has {name!r}")
        return getattr(theirs, name)

    return lookup, lambda: sorted(ours)
