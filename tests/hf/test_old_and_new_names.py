"""An old and a new name given together: the same is fine, a contradiction shows both; 4.x dumps hold both."""

from __future__ import annotations

import dataclasses

import pytest

from hf_compat import TrainingArguments
from hf_compat.errors import ArgumentError
from hf_compat.hf import legacy
from hf_compat.hf.argument_values import AcceleratorConfig

CONTRADICTIONS = [
    ({"evaluation_strategy": "steps"}, {"eval_strategy": "epoch"}),
    ({"evaluate_during_training": True}, {"eval_strategy": "no"}),
    ({"evaluate_during_training": True}, {"evaluation_strategy": "epoch"}),
    ({"no_cuda": True}, {"use_cpu": False}),
    ({"per_gpu_train_batch_size": 4}, {"per_device_train_batch_size": 8}),
    ({"per_gpu_eval_batch_size": 4}, {"per_device_eval_batch_size": 2}),
    ({"group_by_length": True}, {"train_sampling_strategy": "random"}),
    ({"adafactor": True}, {"optim": "sgd"}),
    ({"push_to_hub_model_id": "me/it"}, {"hub_model_id": "me/other"}),
    ({"push_to_hub_organization": "us"}, {"hub_model_id": "me/it"}),
    ({"include_tokens_per_second": True}, {"include_num_input_tokens_seen": "non_padding"}),
    ({"torchdynamo": "eager"}, {"torch_compile_backend": "inductor"}),
    ({"xpu_backend": "gloo"}, {"ddp_backend": "mpi"}),
    ({"dispatch_batches": True}, {"accelerator_config": {"dispatch_batches": False}}),
    ({"split_batches": True}, {"accelerator_config": '{"split_batches": false, "dispatch_batches": true}'}),
    ({"fsdp_min_num_params": 7}, {"fsdp_config": {"min_num_params": 9}}),
    ({"fsdp_transformer_layer_cls_to_wrap": "A"}, {"fsdp_config": {"transformer_layer_cls_to_wrap": ["B"]}}),
]


def spelled(values):
    return [f"{name}={value!r}" for name, value in values.items() if not isinstance(value, (dict, str))] + [*values]


@pytest.mark.parametrize(("old", "new"), CONTRADICTIONS, ids=[next(iter(old)) for old, _ in CONTRADICTIONS])
def test_a_contradiction_shows_both_names_and_values(old, new):
    for values in ({**old, **new}, {**new, **old}):
        with pytest.raises(ArgumentError, match="Hint: keep") as caught:
            TrainingArguments("out", **{"use_cpu": True, **values})
        assert [word for word in spelled({**old, **new}) if word not in str(caught.value)] == []


def test_by_position_it_is_one_as_well():
    with pytest.raises(ArgumentError, match=r"per_gpu_train_batch_size=4.*per_device_train_batch_size=16"):
        TrainingArguments("out", 16, per_gpu_train_batch_size=4)
    with pytest.raises(TypeError, match="output_dir"):
        TrainingArguments("out", output_dir="out")


def test_a_secret_stays_one():
    with pytest.raises(ArgumentError, match="push_to_hub_token") as caught:
        TrainingArguments("out", push_to_hub_token="hf_old", hub_token="hf_new")
    assert "hub_token" in str(caught.value) and "hf_" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"evaluation_strategy": "steps", "eval_strategy": "steps"},
        {"evaluation_strategy": None, "eval_strategy": "steps"},
        {"no_cuda": True, "use_cpu": True},
        {"no_cuda": False, "use_cpu": True},
        {"per_gpu_train_batch_size": "4", "per_device_train_batch_size": 4},
        {"warmup_ratio": 0.1, "warmup_steps": 5},
        {"adafactor": True, "optim": "adafactor"},
        {"adafactor": False, "optim": "sgd"},
        {"push_to_hub_model_id": "it", "push_to_hub_organization": "us", "hub_model_id": "us/it"},
        {"push_to_hub_token": "<PUSH_TO_HUB_TOKEN>", "hub_token": "hf_real"},
        {"split_batches": True, "accelerator_config": {"even_batches": False}},
        {"fsdp_min_num_params": 7, "fsdp_config": {"min_num_params": 7, "xla": False}},
        {"fsdp_transformer_layer_cls_to_wrap": "A", "fsdp_config": {"transformer_layer_cls_to_wrap": ["A"]}},
        {"tpu_metrics_debug": False, "debug": ""},
    ],
)
def test_the_same_said_twice_is_fine(values):
    args = TrainingArguments("out", **{"use_cpu": True, **values})
    chosen = {name: value for name, value in values.items() if isinstance(value, (str, bool, float))}
    assert {
        name for name, value in chosen.items() if value and str(getattr(args, name)).lower() != str(value).lower()
    } <= {
        "push_to_hub_token",
        "eval_strategy",
        "evaluation_strategy",
        "optim",
    }


@pytest.mark.parametrize("debug", ["underflow_overflow", ["underflow_overflow"]])
def test_an_old_debug_mode_joins_the_others_in_either_form(debug):
    args = TrainingArguments("out", use_cpu=True, debug=debug, tpu_metrics_debug=True)
    assert args.debug == ["underflow_overflow", "tpu_metrics_debug"]


def test_an_owner_is_part_of_the_repository():
    assert TrainingArguments("some/out", push_to_hub_organization="us").hub_model_id == "us/out"
    args = TrainingArguments("out", push_to_hub_organization="us", push_to_hub_model_id="it")
    assert (args.hub_model_id, args.push_to_hub_model_id) == ("us/it", "it")


def test_a_subclass_with_a_default_of_its_own_gives_way():
    @dataclasses.dataclass
    class Own(TrainingArguments):
        eval_strategy: str = "epoch"

    assert Own("out", evaluation_strategy="steps", use_cpu=True).eval_strategy == "steps"


OFF = [
    (
        {"fsdp": "auto_wrap", "fsdp_config": {"min_num_params": 5, "limit_all_gathers": True}},
        "fsdp_min_num_params", 0, "fsdp_config", {"min_num_params": 0, "limit_all_gathers": True},
    ),
    ({"warmup_steps": 0.25}, "warmup_ratio", 0.0, "warmup_steps", 0),
    ({"train_sampling_strategy": "group_by_length"}, "group_by_length", False, "train_sampling_strategy", "random"),
    ({"include_for_metrics": ["inputs", "loss"]}, "include_inputs_for_metrics", False, "include_for_metrics", ["loss"]),
    ({"debug": "tpu_metrics_debug underflow_overflow"}, "tpu_metrics_debug", False, "debug", ["underflow_overflow"]),
]  # fmt: skip


@pytest.mark.parametrize(("values", "old", "off", "new", "left"), OFF)
def test_an_old_name_switches_its_own_part_off_and_nothing_beside(values, old, off, new, left):
    args = TrainingArguments("out", use_cpu=True, **values)
    assert getattr(args, old)
    setattr(args, old, off)
    found = getattr(args, new)
    assert (left.items() <= found.items()) if isinstance(left, dict) else found == left
    assert getattr(args, old) == off


@pytest.mark.parametrize(
    ("name", "new", "said", "given", "merged"),
    [
        ("old", "seed", 3, None, 3),
        ("old", "seed", 3, 3, 3),
        ("old", "seed", 3, 4, None),
        ("old", "fsdp_config", {"a": 5}, {"b": 1}, {"a": 5, "b": 1}),
        ("old", "fsdp_config", {"a": 5}, {"a": [5]}, {"a": 5}),
        ("old", "fsdp_config", {"a": 5}, {"a": None}, {"a": 5}),
        ("old", "fsdp_config", {"a": 5}, {"a": 6}, None),
        ("old", "fsdp_config", {"a": 5}, {"a": 0}, None),
        ("fsdp_min_num_params", "fsdp_config", {"a": 5}, {"a": 0}, {"a": 5}),
        ("old", "fsdp_config", {"a": 5}, ' {"b": 1}', {"a": 5, "b": 1}),
        ("old", "fsdp_config", {"a": 5}, "file.json", None),
        ("old", "accelerator_config", {"even_batches": True}, AcceleratorConfig(), {"even_batches": True}),
        ("old", "accelerator_config", {"split_batches": False}, AcceleratorConfig(split_batches=True), None),
        ("old", "fsdp", ["a"], "b a", ["b", "a"]),
        ("old", "debug", "x", "y", ["y", "x"]),
        ("warmup_ratio", "warmup_steps", 0.1, 0, 0.1),
        ("warmup_ratio", "warmup_steps", 0.1, 5, 5),
        ("push_to_hub_model_id", "hub_model_id", "name", "me/name", "me/name"),
        ("push_to_hub_model_id", "hub_model_id", "name", "me/other", None),
        ("old", "hub_model_id", "name", "me/name", None),
    ],
)
def test_an_old_and_a_new_name_are_merged(name, new, said, given, merged):
    if merged is None:
        with pytest.raises(ArgumentError, match=f"keep `{new}` only"):
            legacy.merge(name, said, new, said, given)
    else:
        assert legacy.merge(name, said, new, said, given) == merged


ORGANIZATION = {"push_to_hub_organization": "o"}


@pytest.mark.parametrize(
    ("arguments", "old", "repository"),
    [
        ({"hub_model_id": "a"}, {}, "a"),
        ({}, {}, ""),
        ({}, ORGANIZATION, "o/trainer_output"),
        ({"output_dir": "x/y/"}, ORGANIZATION, "o/y"),
        ({"hub_model_id": "o/a"}, ORGANIZATION, "o/a"),
        ({"hub_model_id": "a"}, ORGANIZATION, None),
        ({"hub_model_id": "a"}, {**ORGANIZATION, "push_to_hub_model_id": "a"}, "o/a"),
        ({"hub_model_id": "p/a"}, {**ORGANIZATION, "push_to_hub_model_id": "p/a"}, None),
    ],
)
def test_an_organization_goes_before_the_repository(arguments, old, repository):
    try:
        legacy.name_repository(arguments := dict(arguments), old)
        assert arguments.get("hub_model_id", "") == repository
    except ArgumentError:
        assert repository is None


@pytest.mark.parametrize(
    ("name", "known", "told"),
    [
        ("predict_with_generate", ["seed"], "it is one of `Seq2SeqTrainingArguments`"),
        ("seed", ["seed"], "did you mean `seed`?"),
        ("lr", ["learning_rate"], "did you mean `learning_rate`?"),
        ("learning_rat", ["learning_rate"], "did you mean `learning_rate`?"),
        ("use_ipx", ["seed"], "did you mean `use_ipex`?"),
        ("steps_of_eval", ["eval_of_step", "save_steps"], "did you mean `eval_of_step`?"),
        ("size_eval", ["per_device_eval_batch_size", "eval_steps"], "did you mean `per_device_eval_batch_size`?"),
        ("zzz_qqq", ["seed"], "see docs/arguments.md"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, known, told):
    assert legacy._meant(name, known).startswith(told)


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [("use_ipex", None, True), ("use_ipex", False, True), ("use_ipex", 0, False), ("use_ipex", True, False)],
)
def test_which_values_of_an_old_name_had_no_effect(name, value, harmless):
    assert legacy.is_harmless(name, value) is harmless


@pytest.mark.parametrize(("steps", "found"), [(0, 0.5), (0.9, 0.5), (1, 1), (5, 5)])
def test_a_count_of_warmup_updates_wins_over_a_ratio_that_is_set_later(steps, found):
    args = TrainingArguments("out", use_cpu=True, warmup_steps=steps)
    args.warmup_ratio = 0.5
    assert args.warmup_steps == found and args.warmup_ratio == 0.5


@pytest.mark.parametrize(
    ("organization", "repository", "found"), [("o", "a/b", "o/b"), ("o", None, "o/out"), (None, "a/b", "a/b")]
)
def test_an_organization_that_is_set_later_takes_the_owners_place(organization, repository, found):
    args = TrainingArguments("x/out", use_cpu=True, hub_model_id=repository)
    args.push_to_hub_organization = organization
    assert args.hub_model_id == found
