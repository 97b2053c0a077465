"""`explain`: each argument's destination, the settings, and the sizes of runs on machines that are not here."""

from __future__ import annotations

import json

import accelerate
import pytest
import torch

from hf_compat import Trainer, TrainingArguments, explain, translate
from hf_compat.cli.main import main
from hf_compat.errors import ArgumentError
from hf_compat.optim.optimizers import state_bytes
from hf_compat.runtime.launch import Launch, assuming
from hf_compat.tools.explanation import size_of_run


def test_explain_answers_for_machines_that_are_not_here():
    with assuming(Launch(world_size=64, local_world_size=8), "cuda:0"):
        said = str(explain(TrainingArguments("out", bf16=True, fsdp=True), parameters=70e9))
    assert "num_nodes=8" in said and "over 64 processes" in said
    assert "each device holds 16.3 GiB" in said and "a checkpoint has 782 GiB" in said


@pytest.mark.parametrize(
    ("stage", "split", "shares", "sent"),
    [
        (0, 8, (1 / 8, 1 / 8, 1 / 8), 8000 / 8 * 7 / 8),  # of each 8000 bytes; a ring of the 8 models
        (2, 4, (1 / 4, 1 / 64, 1 / 64), 8000 / 4 * 15 / 16),
    ],
)
def test_processes_that_share_layers_hold_and_send_parts(stage, split, shares, sent):
    config = {"zero_optimization": {"stage": stage}, "tensor_parallel": {"autotp_size": split}}
    with assuming(Launch(world_size=64, local_world_size=8), "cuda:0"):
        args = TrainingArguments("out", deepspeed=config)
        size = size_of_run(translate(args), parameters=1000)
        said = str(explain(args))
    assert f"mesh: {64 // split} models × {split} neighbouring processes" in said
    assert f"each holds 1/{split} of the split layers" in said
    assert "each of 8 samples × tokens × hidden numbers" in said
    assert (size.parameters, size.gradients, size.optimizer) == tuple(
        bytes_of * share for bytes_of, share in zip((4000, 4000, 8000), shares, strict=True)
    )
    assert size.sent == sent


def test_processes_that_share_sequences_say_what_they_exchange():
    mesh = accelerate.ParallelismConfig(sp_size=4, dp_shard_size=16)
    with assuming(Launch(world_size=64, local_world_size=8), "cuda:0"):
        sizes = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
        zero = {"zero_optimization": {"stage": 2}}
        args = TrainingArguments("out", deepspeed=zero, parallelism_config=mesh, **sizes)
        said = str(explain(args))
    assert "mesh: 16 groups × 4 neighbouring processes that share each sequence" in said
    assert "and 1/4 of the tokens of every sequence" in said
    assert "each attention layer and 3 time(s): 4 all-to-alls forward" in said
    assert "4 backward, each of 2 samples × tokens / 4 ×" in said and "every 4. one the batches" in said


@pytest.mark.filterwarnings("ignore:.*ddp_timeout")
def test_arguments_that_are_set_and_where_they_go():
    args = TrainingArguments("out", use_cpu=True, max_grad_norm=0.5, ddp_timeout=60, hub_token="secret")
    explained = {argument.name: argument for argument in explain(args).arguments}
    assert "clipping by the module" in explained["max_grad_norm"].becomes
    assert "only matters with several processes" in explained["ddp_timeout"].becomes
    assert explained["hub_token"].value == "<hidden>" and "secret" not in str(explain(args))
    assert "accelerator_config" not in explained and "learning_rate" not in explained


def test_an_argument_that_another_one_sets_says_so():
    args = TrainingArguments("out", use_cpu=True, eval_strategy="epoch")
    becomes = {argument.name: argument.becomes for argument in explain(args).arguments}
    assert becomes["do_eval"].endswith(" (follows from `eval_strategy`)")
    assert becomes["dataloader_pin_memory"].endswith(" (follows from `use_cpu`)")
    own = explain(TrainingArguments("out", do_eval=True, dataloader_pin_memory=False)).arguments
    assert not [argument.name for argument in own if "follows from" in argument.becomes]


def test_a_refused_argument_is_in_the_explanation():
    explanation = explain(TrainingArguments("out", use_cpu=True, torch_compile_backend="none_such"))
    assert explanation.plan is None and "not a backend of torch.compile" in explanation.refused
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
    with assuming(Launch(world_size=2, local_world_size=2), "cuda:0"):
        size = size_of_run(translate(TrainingArguments("out", **values)), parameters=1000)
    assert (size.on_device / 1000, size.sent / 1000) == (on_device, sent)


@pytest.mark.parametrize(
    ("optim", "optim_args", "states"),
    [("adamw_torch", None, 8), ("sgd", None, 0), ("sgd", "momentum=0.9", 4), ("adagrad", None, 4), ("rmsprop", None, 4),
     ("adafactor", None, 0), ("lion_32bit", None, 4), ("adamw_8bit", None, 2), ("galore_adamw", None, None)],
)  # fmt: skip
def test_an_optimizers_own_states_are_counted(optim, optim_args, states):
    args = TrainingArguments("out", use_cpu=True, optim=optim, optim_args=optim_args, optim_target_modules="all-linear")
    with assuming(Launch(), "cuda:0"):
        size = size_of_run(translate(args), 1000, optim=optim, optim_args=optim_args or "")
    assert (size.optimizer, size.unknown) == ((1000 * states, "") if states is not None else (0, optim))
    if not size.unknown:
        assert state_bytes(optim, optim_args) == states


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [("adamw_torch", None), ("adagrad", None), ("sgd", None), ("sgd", "momentum=0.9"), ("sgd", "momentum=0"),
     ("rmsprop", None), ("rmsprop", "momentum=0.5, centered=false"), ("rmsprop", "momentum=0.5, centered=true")],
)  # fmt: skip
def test_the_table_of_states_is_what_the_optimizers_keep(optim, optim_args):
    model = torch.nn.Linear(64, 64, bias=False)
    args = TrainingArguments("out", use_cpu=True, optim=optim, optim_args=optim_args)
    kind, keywords = Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer = kind(model.parameters(), **keywords)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    kept = [value for value in optimizer.state[model.weight].values() if torch.is_tensor(value) and value.numel() > 1]
    assert sum(value.nbytes for value in kept) / model.weight.numel() == state_bytes(optim, optim_args)


def test_activations_are_named_with_what_they_grow_with():
    args = {"per_device_train_batch_size": 4, "use_cpu": True}
    whole = str(explain(TrainingArguments("out", **args), parameters=7e9))
    assert "activations are not counted: they grow with 4 samples" in whole
    assert "`gradient_checkpointing=True` keeps one input of each layer instead" in whole
    recomputed = str(explain(TrainingArguments("out", **args, gradient_checkpointing=True), parameters=7e9))
    assert "one input of each layer is kept" in recomputed and "instead" not in recomputed


def test_what_is_gathered_trained_and_on_a_machine_is_said():
    with assuming(Launch(world_size=64, local_world_size=8), "cuda:0"):
        whole = str(explain(TrainingArguments("out", fsdp=True), parameters=70e9))
        parts = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
        sharded = str(explain(TrainingArguments("out", **parts), parameters=70e9))
        lora = str(explain(TrainingArguments("out"), parameters=7e9, trained=1e7))
    assert "the first process gathers 782 GiB" in whole and "gathers" not in sharded
    assert "a machine's 8 processes hold 130 GiB" in whole
    assert "the first process reads 782.3 GiB of a checkpoint back" in whole
    assert "a resume reads up to 782.3 GiB of a checkpoint in each process" in whole, "each file once"
    assert "the first process reads 12.2 GiB of a checkpoint back" in sharded, "each hashes what it has written"
    assert "a resume reads up to 12.2 GiB of a checkpoint in each process, and loads it part by part" in sharded
    assert "sockets to other processes: 63 of the first process, 1 of another one" in sharded
    assert "parameters 26.1, gradients 0.0, optimizer 0.1" in lora and "a checkpoint has 0 GiB" in lora
    with pytest.raises(ArgumentError, match="`trained=8"):
        explain(TrainingArguments("out"), parameters=7, trained=8)


def test_options_of_explain_may_come_before_and_after_the_values(capsys):
    said = []
    for words in (["--world-size", "4", "bf16=true"], ["bf16=true", "--world-size", "4"]):
        main(["explain", "--parameters", "1e6", *words])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "over 4 processes" in said[0]
