"""When an argument has no effect: each condition where it holds, and where each part of it does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_compat.hf import inert
from hf_compat.hf.argument_values import AcceleratorConfig
from hf_compat.hf.rows import RunParts

# A run in which every argument has an effect
ARGS = vars(
    SimpleNamespace(
        device=torch.device("cuda", 0), world_size=2, fsdp=None, deepspeed=None, eval_strategy="steps", eval_steps=3,
        save_strategy="steps", logging_strategy="steps", logging_steps=5, enable_jit_checkpoint=False,
        metric_for_best_model="loss", max_steps=0, lr_scheduler_type="linear", activation_checkpointing=True,
        use_liger_kernel=True, use_cache=True, dataloader_num_workers=1, train_sampling_strategy="group_by_length",
        push_to_hub=True, report_to=["trackio"], log_format=None, batch_eval_metrics=False, predict_with_generate=True,
        local_rank=0, local_process_index=0,
    )
)  # fmt: skip


def reads(*names):
    return {"reads": lambda name: name in names}


def unread(*names):
    return {"unread": lambda: dict.fromkeys(names, "why")}


NO, STEPS, CONSTANT = {"eval_strategy": "no"}, {"eval_strategy": "steps"}, {"lr_scheduler_type": "constant"}
STREAM, TORCHMETRICS = {"trains_on_stream": True}, {"metrics": "torchmetrics"}


@pytest.mark.parametrize(
    ("name", "args", "parts", "holds"),
    [
        ("ALONE", {}, {}, False),
        ("ALONE", {"world_size": 1}, {}, True),
        ("NO_DDP", {}, {}, False),
        ("NO_DDP", {"fsdp": True}, {}, True),
        ("NO_DDP", {"deepspeed": "file"}, {}, True),
        ("ON_CPU", {}, {}, False),
        ("ON_CPU", {"device": torch.device("cpu")}, {}, True),
        ("FP16_ON_CPU", {"device": torch.device("cpu")}, {}, True),
        ("NO_EVALUATION", {}, {}, False),
        ("NO_EVALUATION", NO, {}, True),
        ("NO_EVALUATION", NO, reads("should_evaluate"), False),
        ("NO_EVALUATION_TO_DELAY", {}, {}, False),
        ("NO_EVALUATION_TO_DELAY", NO, reads("should_evaluate"), True),
        ("NO_SAVE", {}, {}, False),
        ("NO_SAVE", {"save_strategy": "no"}, {}, True),
        ("NO_SAVE", {"save_strategy": "no"}, reads("should_save"), False),
        ("NO_SAVE", {"save_strategy": "no", "enable_jit_checkpoint": True}, {}, False),
        ("NO_METRIC", {}, {}, False),
        ("NO_METRIC", {"metric_for_best_model": None}, {}, True),
        ("UPDATES_COUNT", {}, {}, False),
        ("UPDATES_COUNT", {"max_steps": 1}, {}, True),
        ("OWN_OPTIMIZER", {}, {}, False),
        ("OWN_OPTIMIZER", {}, {"optimizer": "optimizer_cls_and_kwargs"}, True),
        ("OWN_OPTIMIZER_OBJECT", {}, {"optimizer": "optimizer_cls_and_kwargs"}, False),
        ("OWN_OPTIMIZER_OBJECT", {}, {"optimizer": "optimizers"}, True),
        ("NO_WARMUP", CONSTANT, {}, False),
        ("NO_WARMUP", CONSTANT, {"optimizer": "optimizers"}, "the schedule 'constant' has no warm-up"),
        ("NO_WARMUP", CONSTANT, unread("warmup_steps"), "the schedule 'constant' has no warm-up"),
        ("NO_WARMUP", {}, unread("warmup_steps"), False),
        ("OWN_LOSS", {}, {}, False),
        ("OWN_LOSS", {}, {"loss": "compute_loss"}, "your own `compute_loss` computes the loss"),
        ("NO_OPTIONS", {}, {}, False),
        ("NO_OPTIONS", CONSTANT, {}, True),
        ("NO_CHECKPOINTING", {}, {}, False),
        ("NO_CHECKPOINTING", {"activation_checkpointing": False}, {}, True),
        ("NO_LIGER", {}, {}, False),
        ("NO_LIGER", {"use_liger_kernel": False}, {}, True),
        ("NO_CONFIG", {}, {}, False),
        ("NO_CONFIG", {}, {"has_config": False}, True),
        ("NO_CONFIG", {"use_cache": None}, {"has_config": False}, False),
        ("NO_WORKERS", {}, {}, False),
        ("NO_WORKERS", {"dataloader_num_workers": 0}, {}, True),
        ("NOT_BY_LENGTH", {}, {}, False),
        ("NOT_BY_LENGTH", {"train_sampling_strategy": "random"}, {}, True),
        ("NO_ORDER", {}, {}, False),
        (
            "NO_ORDER",
            {},
            {"has_length": False},
            "the training data set has no length, so its samples keep their own order",
        ),
        ("NO_ORDER", {"train_sampling_strategy": "random"}, {"has_length": False}, False),
        ("NOT_SHUFFLED", {}, {}, False),
        ("NOT_SHUFFLED", {"train_sampling_strategy": "sequential"}, {}, True),
        ("NOT_SHUFFLED", {}, STREAM, "the training data are a stream, which has its own order"),
        ("ONLY_STREAMS", {}, {"has_other_sets": False}, False),
        ("ONLY_STREAMS", {}, STREAM, False),
        ("ONLY_STREAMS", {}, {**STREAM, "has_other_sets": False}, True),
        ("NO_PUSH", {}, {}, False),
        ("NO_PUSH", {"push_to_hub": False}, {}, True),
        ("NO_TRACKER", {}, {}, False),
        ("NO_TRACKER", {"report_to": []}, {}, True),
        ("NO_TRACKER", {"report_to": []}, {"has_trackers": True}, False),
        ("NO_TRACKIO", {}, {}, False),
        ("NO_TRACKIO", {"report_to": None}, {}, True),
        ("NO_TRACKIO", {"report_to": ["wandb"]}, {}, True),
        ("NO_TRACKIO", {"report_to": ["wandb"]}, {"has_trackers": True}, False),
        ("PRINTS_NO_LOGS", {}, {"prints_logs": False}, False),
        ("PRINTS_NO_LOGS", {"log_format": "table"}, {}, False),
        ("PRINTS_NO_LOGS", {"log_format": "table"}, {"prints_logs": False}, True),
        ("NO_METRIC_FUNCTION", {}, {}, False),
        ("NO_METRIC_FUNCTION", {}, {"metrics": "none"}, "there is no `compute_metrics`"),
        ("NO_METRIC_FUNCTION", {}, TORCHMETRICS, "torchmetrics in `compute_metrics` are updated batch by batch"),
        ("KEEPS_NO_PREDICTIONS", {}, {"metrics": "function"}, False),
        ("KEEPS_NO_PREDICTIONS", {"batch_eval_metrics": True}, {}, False),
        ("KEEPS_NO_PREDICTIONS", {"batch_eval_metrics": True}, {"metrics": "function"}, True),
        ("KEEPS_NO_PREDICTIONS", {}, TORCHMETRICS, True),
        ("NO_GENERATION", {}, {}, False),
        ("NO_GENERATION", {"predict_with_generate": False}, {}, True),
        ("CANNOT_GENERATE", {}, {}, False),
        ("CANNOT_GENERATE", {}, {"generates": False}, True),
        ("OTHER_RANK", {}, {}, False),
        ("OTHER_RANK", {"local_rank": 1}, {}, True),
        ("NO_OPTION", {}, {}, False),
    ],
)
def test_where_a_condition_holds(name, args, parts, holds):
    args = SimpleNamespace(**(ARGS | {"accelerator_config": AcceleratorConfig()} | args))
    assert getattr(inert, name).when(args, RunParts(**parts)) == holds


@pytest.mark.parametrize(
    ("name", "args", "holds"),
    [
        *[(name, {f"{name}_strategy": "steps"}, False) for name in ("eval", "save", "logging")],
        ("eval", {"eval_strategy": "epoch"}, True),
        ("save", {"save_strategy": "epoch"}, True),
        ("save", {"save_strategy": "epoch", "eval_steps": 5}, True),
        ("logging", {"logging_strategy": "no"}, True),
        ("logging", {"logging_strategy": "no", "eval_steps": 5}, False),  # evaluations take their number
        ("logging", {"logging_strategy": "no", "eval_steps": 5, "eval_strategy": "epoch"}, True),
    ],
)
def test_where_a_number_of_updates_counts_for_nothing(name, args, holds):
    assert inert.NO_STEPS_OF[name].when(SimpleNamespace(**(ARGS | args)), RunParts()) is holds


@pytest.mark.parametrize(
    ("options", "ranks", "device", "named"),
    [
        ({"split_batches": True}, 1, "cuda", ["split_batches"]),
        ({"split_batches": True}, 2, "cuda", []),
        ({"non_blocking": True}, 2, "cpu", ["non_blocking"]),
        ({"non_blocking": True}, 2, "cuda", []),
        ({"non_blocking": True, "even_batches": False}, 1, "cpu", ["even_batches", "non_blocking"]),
        ({"non_blocking": True, "even_batches": False}, 1, "cuda", []),
        ({"use_seedable_sampler": False, "even_batches": False}, 1, "cpu", []),
    ],
)
def test_options_of_accelerate_without_effect(options, ranks, device, named):
    config = AcceleratorConfig(**options)
    args = SimpleNamespace(accelerator_config=config, world_size=ranks, device=torch.device(device))
    told = inert.NO_OPTION.when(args, RunParts())
    assert bool(told) == bool(named) and [name for name in sorted(options) if f"`{name}`" in (told or "")] == named


@pytest.mark.parametrize(
    ("name", "args", "value"),
    [
        ("EVALUATES", {}, True),
        ("EVALUATES", NO, False),
        ("ON_GPU", {"use_cpu": True}, False),
        ("ON_GPU", {"use_cpu": False}, True),
        ("AS_LOGGING", {}, 5),
        ("AS_LOGGING", {"eval_strategy": "epoch"}, None),
        ("IS_LOSS", {"load_best_model_at_end": True}, "loss"),
        ("IS_LOSS", {"load_best_model_at_end": False}, None),
        ("BY_NAME", {}, False),
        ("BY_NAME", {"metric_for_best_model": "f1"}, True),
        ("BY_NAME", {"metric_for_best_model": None}, None),
    ],
)
def test_what_an_argument_follows_from(name, args, value):
    assert getattr(inert, name).value(SimpleNamespace(**(ARGS | args))) == value
