"""Closed sets of values that HF arguments take. HF words only; imports nothing of the package but its errors."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn

from hf_compat.errors import ArgumentError


class ExplicitEnum(str, Enum):  # noqa: UP042 - str() gives Class.MEMBER, as in HF
    """A string enum whose failed look-up lists what is allowed.

    Mirrors:
        `transformers.utils.ExplicitEnum`, 5.23. Members equal their string, so they also equal the members of the
        `transformers` enum of the same values.
    """

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        allowed = ", ".join(repr(member.value) for member in cls)
        raise ArgumentError(f"{value!r} is not a valid {cls.__name__}.\n\nHint: choose one of {allowed}.")


class IntervalStrategy(ExplicitEnum):
    """When to log or evaluate. Mirrors `transformers.IntervalStrategy`, 5.23."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


EvaluationStrategy = IntervalStrategy  # what 4.x had besides; its members were the same


class SaveStrategy(ExplicitEnum):
    """When to save. Mirrors `transformers.trainer_utils.SaveStrategy`, 5.23."""

    EPOCH = "epoch"
    NO = "no"
    STEPS = "steps"
    BEST = "best"


class HubStrategy(ExplicitEnum):
    """What to push to the Hub. Mirrors `transformers.trainer_utils.HubStrategy`, 5.23."""

    END = "end"
    EVERY_SAVE = "every_save"
    ALL_CHECKPOINTS = "all_checkpoints"
    CHECKPOINT = "checkpoint"


class SchedulerType(ExplicitEnum):
    """Learning-rate schedules. Mirrors `transformers.SchedulerType`, 5.23."""

    COSINE = "cosine"
    POLYNOMIAL = "polynomial"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    LINEAR = "linear"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    CONSTANT = "constant"
    INVERSE_SQRT = "inverse_sqrt"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    GREEDY = "greedy"


class ParallelMode(Enum):
    """How several devices are used. Mirrors `transformers.training_args.ParallelMode`, 5.23."""

    DISTRIBUTED = "distributed"
    NOT_DISTRIBUTED = "not_distributed"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
    NOT_PARALLEL = "not_parallel"
    TPU = "tpu"


class DebugOption(ExplicitEnum):
    """Debug modes. Mirrors `transformers.debug_utils.DebugOption`, 5.23."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"


class OptimizerNames(ExplicitEnum):
    """Every optimizer name that HF knows: `optim/optimizers.py` has them all. Mirrors `OptimizerNames`, 5.23."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    ADAFACTOR = "adafactor"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"
    ADALOMO = "adalomo"
    ADAMW_8BIT = "adamw_8bit"
    ADAMW_ANYPRECISION = "adamw_anyprecision"
    ADAMW_BNB = "adamw_bnb_8bit"
    PAGED_ADAMW = "paged_adamw_32bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    ADAMW_TORCH_4BIT = "adamw_torch_4bit"
    ADAMW_TORCH_8BIT = "adamw_torch_8bit"
    ADAMW_TORCH_NPU_FUSED = "adamw_torch_npu_fused"
    ADAMW_TORCH_XLA = "adamw_torch_xla"
    ADEMAMIX = "ademamix"
    ADEMAMIX_8BIT = "ademamix_8bit"
    PAGED_ADEMAMIX = "paged_ademamix_32bit"
    PAGED_ADEMAMIX_8BIT = "paged_ademamix_8bit"
    APOLLO_ADAMW = "apollo_adamw"
    APOLLO_ADAMW_LAYERWISE = "apollo_adamw_layerwise"
    GALORE_ADAFACTOR = "galore_adafactor"
    GALORE_ADAFACTOR_LAYERWISE = "galore_adafactor_layerwise"
    GALORE_ADAMW = "galore_adamw"
    GALORE_ADAMW_8BIT = "galore_adamw_8bit"
    GALORE_ADAMW_8BIT_LAYERWISE = "galore_adamw_8bit_layerwise"
    GALORE_ADAMW_LAYERWISE = "galore_adamw_layerwise"
    GROKADAMW = "grokadamw"
    LION = "lion_32bit"
    LION_8BIT = "lion_8bit"
    PAGED_LION = "paged_lion_32bit"
    PAGED_LION_8BIT = "paged_lion_8bit"
    LOMO = "lomo"
    RMSPROP_32BIT = "rmsprop_bnb_32bit"
    RMSPROP_8BIT = "rmsprop_bnb_8bit"
    RMSPROP_BNB = "rmsprop_bnb"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"
    SCHEDULE_FREE_RADAM = "schedule_free_radam"
    SCHEDULE_FREE_SGD = "schedule_free_sgd"
    STABLE_ADAMW = "stable_adamw"
