"""`explain`: each argument's destination, the settings, and the sizes of runs on machines that are not here."""

from __future__ import annotations

import json

import pytest

from hf_compat import TrainingArguments, explain
from hf_compat.runtime.launch import Launch, assuming


def test_explain_answers_for_machines_that_are_not_here():
    with assuming(Launch(world_size=64, local_world_size=8), "cuda:0"):
        said = str(explain(TrainingArguments("out", bf16=True, fsdp=True), parameters=70e9))
    assert "num_nodes=8" in said and "over 64 processes" in said
    assert "each device holds 16.3 GiB" in said and "a checkpoint has 782 GiB" in said


@pytest.mark.filterwarnings("ignore:.*ddp_timeout")
def test_arguments_that_are_set_and_where_they_go():
    args = TrainingArguments("out", use_cpu=True, max_grad_norm=0.5, ddp_timeout=60, hub_token="secret")
    explained = {argument.name: argument for argument in explain(args).arguments}
    assert "clipping by the module" in explained["max_grad_norm"].becomes
    assert "only matters with several processes" in explained["ddp_timeout"].becomes
    assert explained["hub_token"].value == "<hidden>" and "secret" not in str(explain(args))
    assert "accelerator_config" not in explained and "learning_rate" not in explained


def test_a_refused_argument_is_in_the_explanation():
    explanation = explain(TrainingArguments("out", use_cpu=True, torch_compile_backend="none_such"))
    assert explanation.plan is None and "no backend of torch.compile" in explanation.refused
    assert json.loads(explanation.to_json())["plan"] is None


# Parameters, gradients and two states of Adam, 4 bytes each, halved by two processes where they are sharded; under
# DeepSpeed's bf16: 2 + 2 bytes, and 4 + 4 + 4 with the master weights.
@pytest.mark.parametrize(
    ("values", "on_device", "sent"),
    [
        ({}, 16, 4),
        ({"fsdp": True}, 8, 6),
        ({"fsdp": True, "bf16": True}, 8, 4),
        ({"fsdp": True, "gradient_accumulation_steps": 2}, 10, 10),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, 12, 4),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}, "bf16": True}, 8, 3),
    ],
)
def test_bytes_for_each_parameter_on_two_devices(values, on_device, sent):
    from hf_compat import translate
    from hf_compat.plan.memory_estimate import size_of_run

    with assuming(Launch(world_size=2, local_world_size=2), "cuda:0"):
        size = size_of_run(translate(TrainingArguments("out", **values)), parameters=1000)
    assert (size.on_device / 1000, size.sent / 1000) == (on_device, sent)
