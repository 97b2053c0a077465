"""A DeepSpeed configuration and the arguments: `auto`, disagreements, and what `accelerate launch` sets."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from hf_compat import translate
from hf_compat.errors import ArgumentError, HfCompatWarning, InertArgumentWarning, UnsupportedArgument
from hf_compat.optim.lr_schedulers import DeepSpeedSchedule
from hf_compat.plan.deepspeed import KEYS, Fate, deepspeed_config, schedule_section, uses_deepspeed, zero_stage

AUTO = {"warmup_num_steps": "auto"}

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


def test_every_auto_of_deepspeed_is_resolved(args_of, tmp_path):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(ZERO))
    for given in (ZERO, str(file)):
        plan = translate(args_of(deepspeed=given, bf16=True, gradient_accumulation_steps=2))
        config = plan.strategy_options["config"]
        assert plan.strategy == "deepspeed" and config["train_batch_size"] == 8 * 2 * 8
        assert config["bf16"] == {"enabled": True} and config["gradient_accumulation_steps"] == 2
        assert "auto" not in json.dumps(config) and "optimizer" not in config
    assert ZERO["train_batch_size"] == "auto", "the user's dict stays as it is"


def test_disagreements_are_a_table_of_three_columns(args_of):
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


def test_max_grad_norm_without_a_key_in_the_configuration(args_of):
    """transformers leaves the key out, so DeepSpeed does not clip."""
    with pytest.warns(InertArgumentWarning, match=r"`max_grad_norm=0\.5` has no effect"):
        assert "gradient_clipping" not in deepspeed_config(args_of(deepspeed=ZERO, max_grad_norm=0.5), {})
    with warnings.catch_warnings(action="error"):
        deepspeed_config(args_of(deepspeed=ZERO), {})
        deepspeed_config(args_of(deepspeed={**ZERO, "gradient_clipping": "auto"}, max_grad_norm=0.5), {})


def test_an_auto_without_a_value_is_told(args_of):
    with pytest.raises(ArgumentError, match=r"zero_optimization\.reduce_bucket_size"):
        translate(args_of(deepspeed={"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}))


class Sizes:
    def __init__(self, **values):
        vars(self).update(values)


@pytest.mark.parametrize(
    "model_config",
    [Sizes(hidden_size=64), Sizes(hidden_sizes=[32, 64]), Sizes(text_config=Sizes(hidden_size=64))],
    ids=["hidden_size", "hidden_sizes", "text_config"],
)
def test_sizes_follow_the_models_hidden_size(args_of, model_config):
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = {"zero_optimization": {"stage": 3, **dict.fromkeys(sizes, "auto")}}
    zero = deepspeed_config(args_of(deepspeed=config), {}, model_config)["zero_optimization"]
    assert [zero[name] for name in sizes] == [4096, 3686, 640]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"stage": 2}),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, {"stage": 1}),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"},
         {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
          "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/disk"},
         {"stage": 2, "offload_optimizer": {"device": "cpu"},
          "offload_param": {"device": "nvme", "nvme_path": "/disk"}}),
    ],
)  # fmt: skip
def test_the_flags_of_accelerate_launch(args_of, variables, expected):
    args = args_of(gradient_accumulation_steps=2)
    assert uses_deepspeed(args, {"ACCELERATE_USE_DEEPSPEED": "true"}) and not uses_deepspeed(args, {})
    config = deepspeed_config(args, variables)
    assert config["zero_optimization"] == expected and zero_stage(config) == expected["stage"]
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (128, 2)
    assert "gradient_clipping" in config and config["bf16"] == {"enabled": False}


def test_accelerates_own_values_have_to_agree(args_of):
    variables = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_GRADIENT_CLIPPING": "0.5"}
    with pytest.raises(ArgumentError, match=r"(?s)gradient_accumulation_steps = 4.*gradient_clipping = 0\.5"):
        deepspeed_config(args_of(), variables)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "Lamb"}}, "the optimizer 'Lamb', which is not supported"),
        ({"scheduler": {"type": "ThreeCycles"}}, "the schedule 'ThreeCycles', which is not supported"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0}}}, "learning_rate = "),
        ("nowhere.json", "is not a readable JSON file"),
    ],
)
def test_configurations_that_cannot_be(args_of, config, message):
    with pytest.raises(ArgumentError, match=message):
        translate(args_of(deepspeed=config))


def test_a_launcher_is_needed(args_of):
    with pytest.raises(ArgumentError, match="needs a launcher"):
        translate(args_of(world=1, deepspeed={"zero_optimization": {"stage": 2}}))


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}, {}, "torch_adam"),
        ({"scheduler": {"type": "WarmupLR"}}, {"lr_scheduler_type": "cosine"}, "lr_scheduler_type.*no effect"),
    ],
)
def test_what_has_no_effect_is_warned_of_where_translate_is_called(args_of, section, values, message):
    args = args_of(deepspeed=section, **values)
    with pytest.warns(HfCompatWarning, match=message) as caught:
        translate(args)
    assert {warning.filename for warning in caught} == {__file__}


def test_a_section_that_deepspeed_refuses_is_an_error_of_ours(args_of):
    parameter = torch.nn.Parameter(torch.zeros(1))
    section = schedule_section(args_of(deepspeed={"scheduler": {"type": "WarmupLR", "params": AUTO}}), {}, 10)
    with pytest.raises(ArgumentError, match=r"(?s)WarmupLR says: warmup_num_steps must be a positive.*Hint"):
        DeepSpeedSchedule(section, torch.optim.SGD([parameter], lr=0.1))


def test_a_total_that_differs_from_the_training_is_a_disagreement(args_of):
    args = args_of(deepspeed={"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 11}}})
    with pytest.raises(ArgumentError, match=r"(?s)total_num_steps = 11.*updates of the training.* = 10"):
        schedule_section(args, {}, 10)


class Recorded(dict):
    """A configuration that notes which keys are asked for."""

    def __init__(self, values, asked):
        super().__init__(values)
        self.asked = asked

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self):
        return self  # `x in config.keys()` asks, too


def test_the_table_has_every_key_that_deepspeed_reads(monkeypatch):
    from deepspeed.runtime.config import DeepSpeedConfig

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(int(name == "WORLD_SIZE")))
    asked: set[str] = set()
    DeepSpeedConfig(Recorded({"train_batch_size": 2}, asked))
    # read by `deepspeed.initialize`
    assert asked | {"sequence_parallel_size", "data_parallel_size"} == set(KEYS)


def test_the_table_of_keys_stands_in_the_documentation():
    text = (Path(__file__).resolve().parents[2] / "docs" / "scale.md").read_text()
    lines = text[text.index("| key of DeepSpeed |") :].split("\n\n")[0].splitlines()[2:]
    told = [f"| `{name}` | {key.fate} | {key.why} |" for name, key in KEYS.items() if key.fate is not Fate.PASSED]
    passed = ", ".join(f"`{name}`" for name, key in KEYS.items() if key.fate is Fate.PASSED)
    assert lines == [*told, f"| {passed} | passed on | |"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"amp": {"enabled": True}}, "amp: it needs NVIDIA's apex"),
        ({"elasticity": {"enabled": True}}, "elasticity: it chooses batch sizes"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor parallelism"),
        ({"nebula": {"enabled": True}, "hybrid_engine": {"enabled": True}}, "nebula: .*\n  hybrid_engine"),
        ({"checkpoint": {"load_universal": True}}, "universal"),
    ],
)
def test_keys_that_are_refused_say_why(args_of, config, told):
    with pytest.raises(UnsupportedArgument, match=told):
        translate(args_of(deepspeed=config))
    off = {name: dict.fromkeys(section, 0) for name, section in config.items()}
    assert translate(args_of(deepspeed=off)).strategy == "deepspeed"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"dataloader_drop_last": True}, "`dataloader_drop_last` has no effect"),
        ({"zero_optimisation": {"stage": 2}}, "(?s)reads no key 'zero_optimisation'.*zero_optimization"),
        ({"my_note": 1}, "reads no key 'my_note'"),
    ],
)
def test_keys_without_an_effect_are_warned_of(args_of, config, told):
    with pytest.warns(InertArgumentWarning, match=told):
        translate(args_of(deepspeed=config))


def test_the_old_name_of_bf16_is_read(args_of):
    config = translate(args_of(deepspeed={"bfloat16": {"enabled": "auto"}}, bf16=True)).strategy_options["config"]
    assert config["bf16"] == {"enabled": True} and "bfloat16" not in config
