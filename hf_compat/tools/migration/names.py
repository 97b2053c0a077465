"""Which names of transformers this package has, by module, and where a name comes from today. Data only.

`tests/migration/test_names.py` compares the tables with the packages.
"""

from __future__ import annotations

from hf_compat.interop.former_names import MOVED, MOVED_MODULES, RENAMED

# At the top level of both packages, in some release.
TOP_LEVEL = frozenset(
    {
        "DefaultFlowCallback", "EarlyStoppingCallback", "EvalPrediction", "HfArgumentParser", "IntervalStrategy",
        "PrinterCallback", "ProgressCallback", "SchedulerType", "Seq2SeqTrainer", "Seq2SeqTrainingArguments",
        "Trainer", "TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments", "default_data_collator",
        "enable_full_determinism", "get_scheduler", "set_seed",
    }
)  # fmt: skip

# Names at the top level of this package that transformers has in a module of its own.
_IN_MODULES = frozenset(
    {
        "CallbackHandler", "EvalLoopOutput", "PredictionOutput", "SaveStrategy", "TensorBoardCallback", "TrainOutput",
        "WandbCallback", "get_last_checkpoint", "speed_metrics",
    }
)  # fmt: skip
PUBLIC = TOP_LEVEL | _IN_MODULES

# Modules of the same name in both packages → the names that are ours; any other name there is transformers' own.
MIRRORS: dict[str, frozenset[str]] = {
    "debug_utils": frozenset({"DebugOption", "DebugUnderflowOverflow", "detect_overflow"}),
    "optimization": frozenset({"Adafactor", "GreedyLR", "get_scheduler"}),
    "trainer_callback": frozenset(
        {
            "CallbackHandler", "DefaultFlowCallback", "EarlyStoppingCallback", "ExportableState", "PrinterCallback",
            "ProgressCallback", "TrainerCallback", "TrainerControl", "TrainerState",
        }
    ),
    "trainer_pt_utils": frozenset(
        {
            "AcceleratorConfig", "BatchRebalanceSampler", "LabelSmoother", "LayerWiseDummyOptimizer",
            "LayerWiseDummyScheduler", "LengthGroupedSampler", "find_batch_size", "metrics_format", "nested_detach",
            "nested_numpify",
        }
    ),
    "trainer_utils": frozenset(
        {
            "BestRun", "EvalLoopOutput", "EvalPrediction", "HPSearchBackend", "HubStrategy", "IntervalStrategy",
            "PREFIX_CHECKPOINT_DIR", "PredictionOutput", "RemoveColumnsCollator", "SaveStrategy", "SchedulerType",
            "TrainOutput", "default_compute_objective", "default_hp_space_optuna",
            "default_hp_space_ray", "default_hp_space_wandb", "denumpify_detensorize", "enable_full_determinism",
            "get_last_checkpoint", "has_length", "number_of_arguments", "seed_worker", "set_seed", "speed_metrics",
        }
    ),
    "training_args": frozenset({"OptimizerNames", "ParallelMode", "TrainingArguments"}),
    "training_args_seq2seq": frozenset({"Seq2SeqTrainingArguments", "TrainingArguments"}),
    "trainer_seq2seq": frozenset({"Seq2SeqTrainer", "Trainer"}),
}  # fmt: skip

# Modules whose own names of PUBLIC come from this package's top level.
_TO_TOP_LEVEL = frozenset(
    {
        "transformers", "transformers.trainer", "transformers.hf_argparser", "transformers.integrations",
        "transformers.integrations.integration_utils", "transformers.data.data_collator", "transformers.data",
    }
)  # fmt: skip

# Names of PUBLIC that modules have besides their own, in some release: a star import of the module binds them.
_ALSO_BOUND: dict[str, frozenset[str]] = {
    "transformers": TOP_LEVEL,
    "transformers.trainer": frozenset(
        {
            "CallbackHandler",
            "DefaultFlowCallback",
            "EvalLoopOutput",
            "EvalPrediction",
            "IntervalStrategy",
            "PredictionOutput",
            "PrinterCallback",
            "ProgressCallback",
            "SaveStrategy",
            "TrainOutput",
            "Trainer",
            "TrainerCallback",
            "TrainerControl",
            "TrainerState",
            "TrainingArguments",
            "default_data_collator",
            "enable_full_determinism",
            "get_last_checkpoint",
            "get_scheduler",
            "set_seed",
            "speed_metrics",
        }
    ),
    "transformers.hf_argparser": frozenset({"HfArgumentParser"}),
    "transformers.integrations": frozenset({"TensorBoardCallback", "WandbCallback"}),
    "transformers.integrations.integration_utils": frozenset(
        {
            "IntervalStrategy",
            "ProgressCallback",
            "TensorBoardCallback",
            "TrainerCallback",
            "TrainingArguments",
            "WandbCallback",
        }
    ),
    "transformers.data": frozenset({"default_data_collator"}),
    "transformers.data.data_collator": frozenset({"default_data_collator"}),
    "transformers.optimization": frozenset({"SchedulerType"}),
    "transformers.trainer_callback": frozenset({"IntervalStrategy", "SaveStrategy", "TrainingArguments"}),
    "transformers.training_args": frozenset({"IntervalStrategy", "SaveStrategy", "SchedulerType"}),
}

ADAMW_DIFFERS = (
    "is torch's AdamW now, with the defaults of transformers' (eps=1e-6, weight_decay=0.0); torch adds eps after the "
    "bias correction, so the numbers differ slightly"
)


def renamed(name: str) -> str:
    """Return what a name of transformers is called today."""
    return RENAMED.get(name, name)


def home(module: str, name: str, *, ours: bool) -> str:
    """Return the module that has a name today.

    Args:
        module: The module of transformers that a script takes the name from.
        name: As it is called today.
        ours: Whether names that this package has come from this package.
    """
    if ours and module in _TO_TOP_LEVEL and name in (TOP_LEVEL if module == "transformers" else PUBLIC):
        return "hf_compat"
    mirror = module.removeprefix("transformers.")
    if ours and name in MIRRORS.get(mirror, ()):
        return "hf_compat" if name == "Seq2SeqTrainer" else f"hf_compat.{mirror}"
    if ours and name in _ALSO_BOUND.get(module, ()):
        return "hf_compat"
    return MOVED.get(f"{module}.{name}") or MOVED_MODULES.get(module, module)


def bound_by_star(module: str) -> frozenset[str]:
    """Return the names that a star import of a module binds, in any release, and that this package has."""
    names = MIRRORS.get(module.removeprefix("transformers."), frozenset()) | _ALSO_BOUND.get(module, frozenset())
    return names | {old for old, today in RENAMED.items() if today in names}
