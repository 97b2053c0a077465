"""What launchers say about processes, as a table; and what FSDP and DeepSpeed configurations become."""

from __future__ import annotations

import json

import pytest

from hf_compat import TrainingArguments, explain, translate
from hf_compat.errors import ArgumentError, HfCompatError, HfCompatWarning, UnsupportedArgument
from hf_compat.plan.fsdp import fsdp_plan
from hf_compat.runtime.launch import Launch, assuming, first_node, read_launch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 0, 1, 1)),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (5, 1, 8, 4)),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (1, 1, 2, 2)),
        ({"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8",
          "SLURM_STEP_ID": "0"}, (9, 1, 16, 8)),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}, (0, 0, 1, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "bash"}, (0, 0, 1, 1)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2(x2)",
          "SLURM_STEP_ID": "0"}, (3, 1, 4, 2)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (2, 0, 4, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 1, 2, 2)),
    ],
)  # fmt: skip
def test_launchers(variables, expected):
    launch = read_launch(variables)
    found = (launch.process_index, launch.local_process_index, launch.world_size, launch.local_world_size)
    assert found == expected


def test_machines():
    launch = Launch(process_index=9, local_process_index=1, world_size=16, local_world_size=8)
    assert (launch.node_rank, launch.nodes) == (1, 2)
    assert [first_node(nodes) for nodes in ("gpu[03-05,9],cpu1", "a,b", "node7", "")] == ["gpu03", "a", "node7", ""]


def args_of(world=8, **values):
    with assuming(Launch(world_size=world, local_world_size=min(world, 8)), "cuda:0"):
        return TrainingArguments("out", **values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"fsdp": True}, {"version": 2, "wrap": "class", "reshard_after_forward": True}),
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
def test_fsdp_in_every_spelling(values, expected):
    plan = fsdp_plan(args_of(**values), {})
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fsdp": "full_shart"}, "'full_shart', which is not known"),
        ({"fsdp": True, "fsdp_config": {"wrap": 1}}, "no option"),
        ({"fsdp": "no_shard"}, "DDP keeps whole"),
        ({"fsdp": True, "world": 1}, "launcher has started one"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}, "world": 1}, "needs a launcher"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "version"),
        ({"fsdp": True, "fsdp_config": {"state_dict_type": "LOCAL_STATE_DICT"}}, "LOCAL_STATE_DICT"),
    ],
)
def test_fsdp_that_cannot_be(values, message):
    with pytest.raises(HfCompatError, match=message):
        translate(args_of(**values))


ZERO = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_type": "linear"},
    },
    "bf16": {"enabled": "auto"},
}


def test_every_auto_of_deepspeed_is_resolved(tmp_path):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(ZERO))
    for given in (ZERO, str(file)):
        plan = translate(args_of(deepspeed=given, bf16=True, gradient_accumulation_steps=2))
        config = plan.strategy_options["config"]
        assert plan.strategy == "deepspeed" and config["train_batch_size"] == 8 * 2 * 8
        assert config["bf16"] == {"enabled": True} and config["gradient_accumulation_steps"] == 2
        assert "auto" not in json.dumps(config) and "optimizer" not in config
    assert ZERO["train_batch_size"] == "auto", "the user's dict stays as it is"


def test_disagreements_are_a_table_of_three_columns():
    config = {**ZERO, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5}
    with pytest.raises(ArgumentError) as raised:
        translate(args_of(deepspeed=config))
    lines = str(raised.value).splitlines()
    header = next(line for line in lines if line.startswith("DeepSpeed configuration"))
    assert (
        header.split("  ")[0] == "DeepSpeed configuration"
        and "arguments" in header
        and header.rstrip().endswith("used")
    )
    assert any("train_micro_batch_size_per_gpu = 4" in x and "per_device_train_batch_size = 8" in x for x in lines)
    assert any("gradient_clipping = 0.5" in x and "max_grad_norm = 1.0" in x for x in lines)


def test_an_auto_without_a_value_is_told():
    with pytest.raises(ArgumentError, match=r"zero_optimization\.reduce_bucket_size"):
        translate(args_of(deepspeed={"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}))


def test_explain_answers_for_machines_that_are_not_here():
    with assuming(Launch(world_size=64, local_world_size=8), "cuda:0"):
        said = str(explain(TrainingArguments("out", bf16=True, fsdp=True), parameters=70e9))
    assert "num_nodes=8" in said and "over 64 processes" in said
    assert "each device holds 16.3 GiB" in said and "a checkpoint has 782 GiB" in said


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fsdp": True, "fsdp_config": {"backward_prefetch": "backward_pre"}}, "backward_prefetch"),
        ({"fsdp_config": {"fsdp_cpu_offload": True}}, "fsdp_config"),
        ({"deepspeed": {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}}, "torch_adam"),
        ({"deepspeed": {"scheduler": {"type": "WarmupDecayLR", "params": {}}}}, "warmup_type"),
    ],
)
def test_what_has_no_effect_is_told(values, message):
    with pytest.warns(HfCompatWarning, match=message):
        translate(args_of(**values))


@pytest.mark.parametrize(
    ("variable", "flag"),
    [("ACCELERATE_DYNAMO_BACKEND", "--dynamo_backend"), ("ACCELERATE_USE_MEGATRON_LM", "--use_megatron_lm")],
)
def test_what_accelerate_asks_for_and_is_not_there_is_refused(monkeypatch, variable, flag):
    monkeypatch.setenv(variable, "inductor" if "DYNAMO" in variable else "true")
    with pytest.raises(UnsupportedArgument, match=flag):
        translate(args_of(world=1))
