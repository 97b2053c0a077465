"""The names of `transformers.trainer_utils`, from this package where it has them, otherwise from transformers."""

from __future__ import annotations

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(
    __name__,
    "transformers.trainer_utils",
    {
        "EvalPrediction": "hf.metrics",
        "BestRun": "hf.search",
        "HPSearchBackend": "hf.search",
        "default_compute_objective": "hf.search",
        "default_hp_space_optuna": "hf.search",
        "default_hp_space_ray": "hf.search",
        "default_hp_space_wandb": "hf.search",
        "EvalLoopOutput": "hf.metrics",
        "PredictionOutput": "hf.metrics",
        "TrainOutput": "hf.metrics",
        "EvaluationStrategy": "hf.enums",
        "HubStrategy": "hf.enums",
        "IntervalStrategy": "hf.enums",
        "SaveStrategy": "hf.enums",
        "SchedulerType": "hf.enums",
        "PREFIX_CHECKPOINT_DIR": "checkpoint.layout",
        "get_last_checkpoint": "checkpoint.manifest",
        "RemoveColumnsCollator": "data.collators",
        "denumpify_detensorize": "hf.metrics",
        "speed_metrics": "hf.metrics",
        "enable_full_determinism": "runtime.seeding",
        "seed_worker": "runtime.seeding",
        "set_seed": "runtime.seeding",
        "has_length": "runtime.inspection",
        "number_of_arguments": "runtime.inspection",
    },
)
