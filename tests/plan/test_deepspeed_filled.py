"""Every `auto` of a DeepSpeed configuration is filled as transformers and Accelerate fill it, at the borders too."""

from __future__ import annotations

import copy
import itertools
import json
import os
from types import SimpleNamespace

import accelerate.accelerator
import deepspeed
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from transformers.integrations import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config
from transformers.integrations.deepspeed import deepspeed_init, propagate_args_to_deepspeed

from hf_compat.errors import ArgumentError
from hf_compat.plan.deepspeed import deepspeed_config, schedule_section

OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
SCHEDULES = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
}
SECTIONS = [None, *({"type": name, "params": dict.fromkeys(keys, "auto")} for name, keys in SCHEDULES.items())]
SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
OFFLOAD = {"device": "auto", "nvme_path": "auto"}
WORLD, UPDATES = 8, 10
STAGES = (0, 1, 2, 3, "auto")

# What makes a border: arguments, keys of the configuration (None leaves one out), and the updates of the run
BORDERS = {
    "defaults": ({}, {}, UPDATES),
    "one update": ({}, {}, 1),
    "a warmup of one update": ({"warmup_steps": 1}, {}, UPDATES),
    "a warmup longer than the run": ({"warmup_steps": 3}, {}, 2),
    "a share of warmup": ({"warmup_steps": 0.25}, {}, UPDATES),
    "a share of warmup in one update": ({"warmup_steps": 0.01}, {}, 1),
    "no decay": ({"weight_decay": 0.0, "lr_scheduler_type": "constant"}, {}, UPDATES),
    "some decay": ({"weight_decay": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6, "learning_rate": 1.0}, {}, UPDATES),
    "no learning rate": ({"learning_rate": 0.0}, {}, UPDATES),
    "no clipping": ({"max_grad_norm": 0.0}, {}, UPDATES),
    "no key for clipping": ({}, {"gradient_clipping": None}, UPDATES),
    "accumulation": ({"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}, {}, UPDATES),
    "bf16": ({"bf16": True}, {}, UPDATES),
    "fp16": ({"fp16": True}, {}, UPDATES),
    "bf16 without a section": ({"bf16": True}, {"bf16": None, "fp16": None}, UPDATES),
    "fp16 without a section": ({"fp16": True}, {"bf16": None, "fp16": None}, UPDATES),
    "bf16 in evaluations": ({"bf16_full_eval": True}, {}, UPDATES),
    "fp16 in evaluations, without a section": ({"fp16_full_eval": True}, {"bf16": None, "fp16": None}, UPDATES),
    "own values": ({"learning_rate": 1e-4}, {"train_batch_size": 64, "gradient_clipping": 1.0}, UPDATES),
    "keys that are null": ({}, {"gradient_clipping": "null", "train_batch_size": "null"}, UPDATES),
    "an untested optimizer": ({}, {"zero_allow_untested_optimizer": False}, UPDATES),
    "files on each machine": ({"save_on_each_node": True}, {}, UPDATES),
}  # fmt: skip


class Model(torch.nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.one, self.config = torch.nn.Linear(1, 1), SimpleNamespace(**sizes)


MODEL = Model(hidden_size=64)


def configuration(stage, section, optimizer, changed=()):
    """Return a configuration as transformers' documentation has it, each value auto."""
    zero = {"stage": stage, "overlap_comm": False, "stage3_gather_16bit_weights_on_model_save": "auto"}
    config = {
        "zero_optimization": {**zero, **dict.fromkeys(SIZES, "auto"), "offload_optimizer": OFFLOAD},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        **dict.fromkeys(
            ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
            "auto",
        ),
        **({"scheduler": section} if section else {}),
        **({"optimizer": optimizer} if optimizer else {}),
        **dict(changed),
    }
    kept = {name: value for name, value in config.items() if value is not None}
    return copy.deepcopy({name: None if value == "null" else value for name, value in kept.items()})


class Handed(Exception):
    """Carries the configuration that DeepSpeed is given."""


def hand(config_params, **others):
    raise Handed(config_params)


class UpstreamArguments(transformers.TrainingArguments):
    world_size = WORLD


def filled_upstream(args, config, updates, model=MODEL):
    """Return the configuration that transformers' Trainer and Accelerate hand to DeepSpeed. None launches by flags."""
    if config is None:  # as `TrainingArguments.__post_init__`, with the launcher's variables or without
        plugin = DeepSpeedPlugin()
    else:
        filled = HfTrainerDeepSpeedConfig(config)
        filled.trainer_config_process(args)
        plugin = DeepSpeedPlugin(hf_ds_config=filled)
    plugin.set_mixed_precision(args.mixed_precision)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=plugin), deepspeed_plugin=plugin, device=torch.device("cpu"),
        fp8_backend=None, parallelism_config=None, split_batches=False, gradient_accumulation_steps=1,
        num_processes=WORLD,
    )  # fmt: skip
    if config is None:
        propagate_args_to_deepspeed(accelerator, args)
    trainer = SimpleNamespace(
        model=model, args=args, accelerator=accelerator, create_optimizer=lambda: torch.optim.AdamW(model.parameters())
    )  # fmt: skip
    prepared = [model, *(one for one in deepspeed_init(trainer, updates) if one is not None)]
    try:
        Accelerator._prepare_deepspeed(accelerator, *prepared)
    except Handed as handed:
        return handed.args[0]
    raise AssertionError("DeepSpeed was not started")


def filled_here(args, updates, model=MODEL, variables=()):
    config = deepspeed_config(args, dict(variables), model)
    section = schedule_section(args, dict(variables), updates)
    return config if section is None else {**config, "scheduler": section}


def expected_of(upstream):
    """Return upstream's configuration with the differences that are meant: the optimizer is torch's, made here."""
    expected = {name: value for name, value in upstream.items() if name not in ("optimizer", "steps_per_print")}
    return {**expected, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


@pytest.fixture
def upstream(monkeypatch):
    monkeypatch.setattr(deepspeed, "initialize", hand)
    # DeepSpeed's Adam for offloaded states is compiled when it is made
    monkeypatch.setattr(accelerate.accelerator, "map_pytorch_optim_to_deepspeed", lambda optimizer: optimizer)
    yield filled_upstream
    unset_hf_deepspeed_config()


def upstream_args(**values):
    return UpstreamArguments("out", use_cpu=True, report_to=[], **values)


@pytest.mark.filterwarnings("ignore::hf_compat.errors.HfCompatWarning")
@pytest.mark.parametrize("border", BORDERS)
def test_every_auto_is_filled_as_upstream_fills_it(border, args_of, upstream):
    values, changed, updates = BORDERS[border]
    theirs = upstream_args(**values)
    differing = []
    for stage, section, optimizer in itertools.product(STAGES, SECTIONS, (None, OPTIMIZER)):
        config = configuration(stage, section, optimizer, changed.items())
        expected = expected_of(upstream(theirs, config, updates))
        found = filled_here(args_of(WORLD, deepspeed=config, **values), updates)
        assert "'auto'" not in str(expected)
        if found != expected:
            differing.append((stage, section and section["type"], bool(optimizer), found, expected))
    assert not differing, differing[0]


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 64, "hidden_sizes": [128]},
        {"hidden_sizes": [32, 64]},
        {"text_config": SimpleNamespace(hidden_size=48)},
        {"text_config": SimpleNamespace(hidden_sizes=[32, 16])},
    ],
    ids=str,
)
def test_sizes_follow_the_models_hidden_size_as_upstream(sizes, args_of, upstream):
    config, model = configuration(3, None, None), Model(**sizes)
    expected = expected_of(upstream(upstream_args(), config, UPDATES, model))
    assert filled_here(args_of(WORLD, deepspeed=config), UPDATES, model) == expected


def test_a_model_without_a_size_is_refused_as_upstream(args_of, upstream):
    config, model = configuration(2, None, None), Model(vocab_size=3)
    with pytest.raises(ValueError, match="hidden_size"):
        upstream(upstream_args(), config, UPDATES, model)
    with pytest.raises(ArgumentError, match=r"zero_optimization\.reduce_bucket_size"):
        filled_here(args_of(WORLD, deepspeed=config), UPDATES, model)


@pytest.mark.filterwarnings("ignore::hf_compat.errors.HfCompatWarning")
@pytest.mark.parametrize("changed", [{}, {"bf16": None, "fp16": None}], ids=["sections", "no sections"])
def test_the_launchers_precision_is_filled_as_upstream(changed, args_of, upstream, monkeypatch):
    """It fills the sections that are missing. An `auto` follows the arguments."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    config = configuration(2, None, None, changed.items())
    expected = expected_of(upstream(upstream_args(), config, UPDATES))
    assert filled_here(args_of(WORLD, deepspeed=config), UPDATES) == expected


ON_DISK = {"OFFLOAD_PARAM_DEVICE": "nvme", "OFFLOAD_PARAM_NVME_PATH": "/disk", "OFFLOAD_OPTIMIZER_DEVICE": "cpu"}


@pytest.mark.parametrize("has_file", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"DEEPSPEED_ZERO_STAGE": "1"},
        {"DEEPSPEED_ZERO_STAGE": "3", "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"},
        {"DEEPSPEED_ZERO_STAGE": "0", "GRADIENT_ACCUMULATION_STEPS": "2", "GRADIENT_CLIPPING": "0.5"},
        {f"DEEPSPEED_{name}": value for name, value in ON_DISK.items()},
    ],
    ids=str,
)
def test_flags_of_accelerate_launch_are_filled_as_upstream(flags, has_file, args_of, upstream, monkeypatch, tmp_path):
    """Without a file they are the configuration. A file's own `auto` follow them, too."""
    variables = {f"ACCELERATE_{name}": value for name, value in flags.items()}
    if has_file:
        file = tmp_path / "zero.json"
        file.write_text(json.dumps(configuration("auto", SECTIONS[2], None)))
        variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(file)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    values = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    expected = expected_of(upstream(upstream_args(**values), None, UPDATES))
    variables["ACCELERATE_USE_DEEPSPEED"] = "true"
    assert filled_here(args_of(WORLD, **values), UPDATES, MODEL, variables) == expected
    if "ACCELERATE_GRADIENT_CLIPPING" in variables:
        with pytest.raises(ValueError, match=r"gradient_clipping=0\.5"):
            upstream(upstream_args(), None, UPDATES)
        with pytest.raises(ArgumentError, match=r"gradient_clipping = 0\.5"):
            deepspeed_config(args_of(WORLD), variables, MODEL)
