"""What `fsdp`, `fsdp_config` and `accelerate launch` become: one plan for every spelling."""

from __future__ import annotations

import json

import pytest

from hf_compat import translate
from hf_compat.errors import ArgumentError, HfCompatError, HfCompatWarning
from hf_compat.plan.fsdp import FsdpPlan, fsdp_plan, uses_fsdp


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"fsdp": True}, {"wrap": "class", "reshard_after_forward": True}),
        ({"fsdp": "full_shard auto_wrap"}, {"reshard_after_forward": True}),
        ({"fsdp": "shard_grad_op offload"}, {"reshard_after_forward": False, "cpu_offload": True}),
        ({"fsdp": "hybrid_shard"}, {"hybrid": True}),
        ({"fsdp": "full_shard", "fsdp_min_num_params": 2000}, {"wrap": "size", "min_num_params": 2000}),
        ({"fsdp": "full_shard", "fsdp_transformer_layer_cls_to_wrap": "Block"}, {"wrap_classes": ("Block",)}),
        ({"fsdp": True, "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": ["A", "B"], "fsdp_cpu_offload": "true"}},
         {"wrap_classes": ("A", "B"), "cpu_offload": True}),
        ({"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": "shard_grad_op"}},
         {"reshard_after_forward": False}),
        ({"fsdp": True, "fsdp_config": {"state_dict_type": "sharded_state_dict"}},
         {"state_dict_type": "SHARDED_STATE_DICT"}),
    ],
)  # fmt: skip
def test_fsdp_in_every_spelling(args_of, values, expected):
    plan = fsdp_plan(args_of(**values), {})
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"wrap": "none", "reshard_after_forward": True}),
        ({"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "A, B"},
         {"wrap": "class", "wrap_classes": ("A", "B")}),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "500"},
         {"wrap": "size", "min_num_params": 500}),
        ({"FSDP_MIN_NUM_PARAMS": "100000000"}, {"wrap": "none", "min_num_params": 0}),
        ({"FSDP_OFFLOAD_PARAMS": "true", "FSDP_ACTIVATION_CHECKPOINTING": "False"},
         {"cpu_offload": True, "activation_checkpointing": False}),
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, {"reshard_after_forward": False}),
        ({"FSDP_SHARDING_STRATEGY": "1"}, {"reshard_after_forward": True, "hybrid": False}),
        ({"FSDP_SHARDING_STRATEGY": "2"}, {"reshard_after_forward": False, "hybrid": False}),
        ({"FSDP_SHARDING_STRATEGY": "4"}, {"reshard_after_forward": True, "hybrid": True}),
        ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2"}, {"reshard_after_forward": False, "hybrid": True}),
    ],
)  # fmt: skip
def test_what_accelerate_launch_has_set_counts_where_the_arguments_are_silent(args_of, variables, expected):
    args = args_of()
    assert uses_fsdp(args, {"ACCELERATE_USE_FSDP": "true"}) and not uses_fsdp(args, {})
    plan = fsdp_plan(args, variables)
    assert {name: getattr(plan, name) for name in expected} == expected


def test_the_arguments_go_before_the_launcher(args_of):
    args = args_of(fsdp=True, fsdp_config={"cpu_offload": False, "auto_wrap_policy": "NO_WRAP"})
    variables = {"FSDP_OFFLOAD_PARAMS": "true", "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}
    assert fsdp_plan(args, variables) == FsdpPlan(wrap="none")


def test_a_json_file_gives_what_its_dict_gives(args_of, tmp_path):
    options = {"fsdp_transformer_layer_cls_to_wrap": "Block", "state_dict_type": "SHARDED_STATE_DICT"}
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps(options))
    assert fsdp_plan(args_of(fsdp=True, fsdp_config=str(file)), {}) == fsdp_plan(
        args_of(fsdp=True, fsdp_config=options), {}
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fsdp": "full_shart"}, "'full_shart', which is not known"),
        ({"fsdp": True, "fsdp_config": {"wrap": 1}}, "no option"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "for TPUs"),
        ({"fsdp": "no_shard"}, "DDP keeps whole"),
        ({"fsdp": True, "world": 1}, "launcher has started one"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "`version` out. FSDP 2 has replaced FSDP 1"),
        ({"fsdp": True, "fsdp_config": {"version": 3}}, "version=3"),
        ({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "some"}}, "auto_wrap_policy='some'"),
        ({"fsdp": True, "fsdp_config": {"state_dict_type": "LOCAL_STATE_DICT"}}, "LOCAL_STATE_DICT"),
    ],
)
def test_fsdp_that_cannot_be(args_of, values, message):
    with pytest.raises(HfCompatError, match=message):
        translate(args_of(**values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fsdp": True, "fsdp_config": {"backward_prefetch": "backward_pre"}}, "backward_prefetch"),
        ({"fsdp": True, "fsdp_config": {"cpu_ram_efficient_loading": True}}, "loads the model whole"),
        ({"fsdp_config": {"fsdp_cpu_offload": True}}, "`fsdp` is off"),
    ],
)
def test_options_without_effect_are_warned_of_where_translate_is_called(args_of, values, message):
    args = args_of(**values)
    with pytest.warns(HfCompatWarning, match=message):
        translate(args)


def test_the_launchers_defaults_are_not_warned_of(args_of):
    defaults = {"FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    assert fsdp_plan(args_of(), defaults) == fsdp_plan(args_of(), {})  # and warnings are errors


def test_a_switch_that_is_no_truth_value_is_an_error(args_of):
    with pytest.raises(ArgumentError, match="ACCELERATE_USE_FSDP"):
        uses_fsdp(args_of(), {"ACCELERATE_USE_FSDP": "perhaps"})
