"""`accelerate launch`: the plan is what accelerate would have set up from the same flags, and it runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import yaml

from helpers.launching import JOB, result

PLAN = """
import dataclasses, json, sys
from hf_compat import TrainingArguments, translate

args = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2)
plan = translate(args)
options = {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in plan.strategy_options.items()}
ours = {"strategy": plan.strategy, "precision": plan.precision, "world": plan.world_size, **options}
theirs = {}
if plan.strategy.startswith("fsdp"):
    from accelerate.utils import FullyShardedDataParallelPlugin
    plugin = FullyShardedDataParallelPlugin()
    theirs = {
        "reshard_after_forward": plugin.reshard_after_forward,
        "cpu_offload": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        "wrap": {"transformer": "class", "size": "size"}.get(
            getattr(plugin.auto_wrap_policy, "__name__", "none").partition("_")[0], "none"
        ),
        "wrap_classes": list(plugin.transformer_cls_names_to_wrap or []),
        "min_num_params": plugin.min_num_params if ours["plan"]["wrap"] == "size" else 0,
        "activation_checkpointing": plugin.activation_checkpointing, "state_dict_type": plugin.state_dict_type.name,
    }
if plan.strategy == "deepspeed":
    from accelerate.utils import DeepSpeedPlugin
    theirs = DeepSpeedPlugin().hf_ds_config.config
if args.process_index == 0:
    print("PLAN" + json.dumps([ours, theirs], default=str))
"""


def launch(folder, flags, *script, check=True):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1",
               "--main_process_port", str(port), *flags, *script]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def plans(folder, *flags):
    (folder / "plan.py").write_text(PLAN)
    printed = launch(folder, flags, "plan.py").stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("PLAN")]
    return json.loads(line[4:])


def config_file(folder, **values):
    base = {
        "compute_environment": "LOCAL_MACHINE",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": False,
    }
    (folder / "accelerate.yaml").write_text(yaml.safe_dump({**base, **values}))
    return ["--config_file", "accelerate.yaml"]


FSDP_FLAGS = {
    "by class": ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
                 "--fsdp_transformer_layer_cls_to_wrap", "GPT2Block,Other", "--fsdp_reshard_after_forward", "false"],
    "by size": ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP",
                "--fsdp_min_num_params", "2000", "--fsdp_offload_params", "true"],
    "as it is": ["--use_fsdp", "--fsdp_version", "2", "--fsdp_activation_checkpointing", "true"],
}  # fmt: skip


@pytest.mark.parametrize("flags", FSDP_FLAGS.values(), ids=FSDP_FLAGS)
def test_fsdp_flags(tmp_path, flags):
    ours, theirs = plans(tmp_path, *flags)
    assert ours["strategy"] == "fsdp2" and ours["world"] == 2
    theirs["state_dict_type"] = ours["plan"]["state_dict_type"]  # whole weights are what a Trainer saves
    assert {key: ours["plan"][key] for key in theirs} == theirs


def test_a_config_file_with_fsdp_and_precision(tmp_path):
    options = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
    flags = config_file(tmp_path, distributed_type="FSDP", fsdp_config=options, mixed_precision="bf16")
    ours, theirs = plans(tmp_path, *flags)
    assert ours["precision"] == "bf16-mixed" and ours["plan"]["wrap_classes"] == ["GPT2Block"]
    assert {key: ours["plan"][key] for key in theirs} == theirs


def test_plain_processes(tmp_path):
    ours, _ = plans(tmp_path, *config_file(tmp_path, distributed_type="MULTI_GPU"))
    assert ours == {"strategy": "ddp", "precision": "32-true", "world": 2}


def test_deepspeed_flags_and_file(tmp_path):
    flags = ["--use_deepspeed", "--zero_stage", "3", "--gradient_accumulation_steps", "2",
             "--gradient_clipping", "1.0", "--offload_optimizer_device", "cpu"]  # fmt: skip
    ours, theirs = plans(tmp_path, *flags)
    config = ours["config"]
    assert ours["strategy"] == "deepspeed"
    assert config["gradient_accumulation_steps"] == theirs["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == theirs["gradient_clipping"] == 1.0
    assert config["zero_optimization"] == theirs["zero_optimization"]
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (16, 4)
    file = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto", "gradient_clipping": "auto"}
    (tmp_path / "zero.json").write_text(json.dumps(file))
    ours, theirs = plans(tmp_path, "--use_deepspeed", "--deepspeed_config_file", "zero.json")
    assert ours["config"]["zero_optimization"] == theirs["zero_optimization"] == {"stage": 2}
    assert ours["config"]["train_batch_size"] == 16


@pytest.mark.matrix
def test_a_run_under_accelerate_is_the_run_under_torchrun(tmp_path):
    words = ("model=gpt2", "samples=16", "num_train_epochs=1")
    launch(tmp_path, FSDP_FLAGS["as it is"][:3], str(JOB), str(tmp_path / "accelerate"), *words)
    mine = json.loads((tmp_path / "accelerate" / "result.json").read_text())
    assert mine == result(tmp_path / "ours", *words, "fsdp=True")


def test_what_the_model_does_not_have_is_told(tmp_path):
    done = launch(tmp_path, FSDP_FLAGS["by class"], str(JOB), str(tmp_path / "out"), "model=gpt2", check=False)
    assert done.returncode != 0 and "no module of such a class" in done.stderr and "GPT2Block" in done.stderr


EARLY = """
import sys
from pathlib import Path
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainingArguments

args = TrainingArguments(sys.argv[1], use_cpu=True, ddp_backend="gloo")
done = Path(sys.argv[1], "prepared")
with PartialState().main_process_first():
    assert done.exists() == (args.process_index == 1), "the first process prepares the data"
    done.touch()
assert gather_object([PartialState().process_index]) == [0, 1]
if args.process_index == 0:
    Path(sys.argv[1], "result.json").write_text(str(PartialState().num_processes))
"""


def test_a_library_prepares_data_before_there_is_a_trainer(tmp_path):
    (tmp_path / "early.py").write_text(EARLY)
    assert result(tmp_path, script=tmp_path / "early.py") == 2
