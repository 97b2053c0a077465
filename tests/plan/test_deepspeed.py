"""A DeepSpeed configuration and the arguments: `auto`, disagreements, and what `accelerate launch` sets."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_compat import translate
from hf_compat.errors import ArgumentError, HfCompatError, HfCompatWarning, InertArgumentWarning, UnsupportedArgument
from hf_compat.optim.lr_schedulers import DeepSpeedSchedule
from hf_compat.plan import deepspeed
from hf_compat.plan.deepspeed import KEYS, Fate, deepspeed_config, schedule_section, tensor_ranks_of
from hf_compat.runtime.launch import environment
from hf_compat.trainer_methods.accelerate_facade import DeepSpeedPlugin

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
        translate(
            args_of(deepspeed={"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}),
            model=torch.nn.Linear(1, 1),
        )


def test_sizes_that_follow_a_model_are_left_out_without_one(args_of):
    """As `explain` plans without a model, and libraries read the configuration of `accelerator.state`."""
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    args = args_of(deepspeed={"zero_optimization": {"stage": 3, "overlap_comm": True, **dict.fromkeys(sizes, "auto")}})
    assert translate(args).strategy_options["config"]["zero_optimization"] == {"stage": 3, "overlap_comm": True}
    plugin = DeepSpeedPlugin(args)
    assert plugin.zero_stage == 3 and plugin.is_zero3_init_enabled()


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
    section = schedule_section(args_of(deepspeed={"scheduler": {"type": "OneCycle", "params": {}}}), {}, 10)
    with pytest.raises(ArgumentError, match=r"(?s)OneCycle says: .*cycle_min_lr.*Hint"):
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
    ("split", "stage", "told"),
    [
        (3, 2, "Hint: start a multiple of it"),
        (2, 3, "beside ZeRO 3"),
        ("two", 2, "autotp_size"),
        (4, 2, None),
        (None, 3, None),
    ],
)
def test_layers_are_split_between_a_part_of_the_processes(args_of, split, stage, told):
    config = {"tensor_parallel": {"autotp_size": split}, "zero_optimization": {"stage": stage}}
    if told is None:
        assert tensor_ranks_of(args_of(deepspeed=config), {}) == (split or 1)
        return
    with pytest.raises(HfCompatError, match=told):
        tensor_ranks_of(args_of(deepspeed=config), {})


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


@pytest.mark.parametrize(
    ("size", "is_refused"), [(1, False), (2, True), (1.5, True), (0, False), (None, False), ("two", False)]
)
def test_sequences_that_models_exchange_by_themselves_are_refused(args_of, size, is_refused):
    refusal = pytest.raises(UnsupportedArgument, match="it is for models that exchange by themselves")
    with refusal if is_refused else contextlib.nullcontext():
        assert deepspeed_config(args_of(deepspeed={"sequence_parallel_size": size}), {})


def test_both_precisions_are_refused(args_of):
    halves = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    with pytest.raises(ArgumentError, match="enables `bf16` and `fp16`"):
        deepspeed_config(args_of(deepspeed=halves, bf16=True, fp16_full_eval=True), {})


@pytest.mark.parametrize("section", [{}, None])
def test_a_precision_that_its_section_leaves_off_is_warned_of(args_of, section):
    with pytest.warns(InertArgumentWarning, match="`bf16=True` has no effect"):
        deepspeed_config(args_of(deepspeed={"bf16": section}, bf16=True), {})


def test_the_launchers_precision_does_not_fill_an_auto_of_the_arguments(args_of, monkeypatch):
    monkeypatch.setitem(environment, "ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.warns(InertArgumentWarning, match="`ACCELERATE_MIXED_PRECISION=bf16` has no effect"):
        config = deepspeed_config(args_of(deepspeed={"bf16": {"enabled": "auto"}}), {})
    assert config["bf16"] == {"enabled": False}
    with warnings.catch_warnings(action="error"):
        assert deepspeed_config(args_of(deepspeed={"zero_optimization": {}}), {})["bf16"] == {"enabled": True}
        assert deepspeed_config(args_of(deepspeed={"bf16": {"enabled": True}}), {})["bf16"] == {"enabled": True}
        assert deepspeed_config(args_of(), {})["bf16"] == {"enabled": True}


def test_a_warmup_of_no_updates_is_one_of_deepspeeds(args_of):
    """A configuration that says 1 agrees with `warmup_steps=0`, and one that says 0 does not."""
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}
    assert schedule_section(args_of(deepspeed={"scheduler": section}), {}, 10) == section
    section["params"]["warmup_num_steps"] = 0
    with pytest.raises(ArgumentError, match=r"warmup_num_steps = 0.*max\(1, warmup_steps\) = 1"):
        schedule_section(args_of(deepspeed={"scheduler": section}), {}, 10)


ADAM, WARMUP = {"type": "AdamW", "params": {"lr": 0.1, "warmup_type": "linear"}}, {"type": "WarmupLR"}
BY_COSINE = {"lr_scheduler_type": "cosine"}


@pytest.mark.parametrize(
    ("config", "values", "refused", "told"),
    [
        ({}, BY_COSINE, "", ""),
        ({"optimizer": ADAM}, {}, "", ""),
        ({"optimizer": {"type": "adam"}}, {}, "", ""),
        ({"optimizer": {"type": "Lamb"}}, {}, "the optimizer 'Lamb'", ""),
        ({"optimizer": {}}, {}, "the optimizer None", ""),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {}, "", "sets torch_adam"),
        ({"scheduler": WARMUP}, {}, "", ""),
        ({"scheduler": {}}, {}, "the schedule None", ""),
        ({"scheduler": WARMUP}, BY_COSINE, "", "`lr_scheduler_type='cosine'` has no effect"),
        ({"scheduler": WARMUP}, {"lr_scheduler_kwargs": {"a": 1}}, "", "`lr_scheduler_kwargs={'a': 1}` has no effect"),
        ({"scheduler": WARMUP}, {"lr_scheduler_kwargs": {}}, "", ""),
    ],
)
def test_what_a_configuration_puts_in_the_place_of_arguments(args_of, recwarn, config, values, refused, told):
    args = args_of(**values)
    recwarn.clear()
    try:
        deepspeed._check_replaced(config, args)
        assert not refused
    except ArgumentError as error:
        assert refused and refused in str(error)
    assert len(recwarn) == bool(told) and told in "".join(str(one.message) for one in recwarn)


OFF, ON = {"enabled": False}, {"enabled": True}


@pytest.mark.parametrize(
    ("config", "asked", "found", "told"),
    [
        ({}, "no", (OFF, OFF), ""),
        ({}, "bf16", (ON, OFF), ""),
        ({}, "fp16", (OFF, {"enabled": True, "auto_cast": True}), ""),
        ({"bf16": OFF}, "bf16", (OFF, OFF), "has no effect"),
        ({"bf16": None}, "bf16", (None, OFF), "has no effect"),
        ({"bf16": ON}, "no", (ON, OFF), ""),
        ({"fp16": ON}, "bf16", None, ""),
        ({"bf16": ON, "fp16": ON}, "no", None, ""),
    ],
)
@pytest.mark.parametrize("by_launcher", [False, True])
def test_sections_of_half_precision_are_completed(
    args_of, monkeypatch, recwarn, config, asked, found, told, by_launcher
):
    values = {} if by_launcher or asked == "no" else {asked: True}
    if by_launcher:
        monkeypatch.setitem(environment, "ACCELERATE_MIXED_PRECISION", asked)
    args, config = args_of(**values), dict(config)
    recwarn.clear()
    if found is None:
        with pytest.raises(ArgumentError, match="enables `bf16` and `fp16`"):
            deepspeed._complete_precision(config, args)
    else:
        deepspeed._complete_precision(config, args)
        assert (config["bf16"], config["fp16"]) == found
    given = f"ACCELERATE_MIXED_PRECISION={asked}" if by_launcher else f"{asked}=True"
    assert len(recwarn) == bool(told) and all(f"`{given}` {told}" in str(one.message) for one in recwarn)


@pytest.mark.parametrize(
    ("values", "variable", "has_section", "rows"),
    [
        ({}, "no", False, [("bf16", False), ("fp16", False)]),
        ({"bf16": True}, "no", True, [("bf16", True), ("fp16", False)]),
        ({"fp16_full_eval": True}, "no", True, [("bf16", False), ("fp16", True)]),
        ({}, "bf16", False, [(None, True), ("fp16", False)]),
        ({}, "bf16", True, [(None, False), ("fp16", False)]),
        ({"bf16": True}, "bf16", True, [("bf16", True), ("fp16", False)]),
    ],
)
def test_who_asks_for_half_precision(args_of, monkeypatch, values, variable, has_section, rows):
    monkeypatch.setitem(environment, "ACCELERATE_MIXED_PRECISION", variable)
    found = deepspeed._rows_of(args_of(deepspeed=ZERO if has_section else None, **values))
    assert [found["bf16.enabled"], found["fp16.enabled"]] == rows


@pytest.mark.parametrize(
    ("config", "hidden"),
    [
        (None, None),
        ({}, None),
        ({"hidden_size": 8}, 8),
        ({"hidden_sizes": [4, 16]}, 16),
        ({"hidden_size": None, "hidden_sizes": (4, 2)}, 4),
        ({"text_config": SimpleNamespace(hidden_size=8)}, 8),
        ({"hidden_size": 2, "text_config": SimpleNamespace(hidden_size=8)}, 2),
    ],
)
def test_sizes_follow_a_models_configuration(config, hidden):
    found = deepspeed._rows_of_model(SimpleNamespace(config=config and SimpleNamespace(**config)))
    bucket = found.get("zero_optimization.reduce_bucket_size", (None, None))[1]
    assert bucket == (hidden and hidden * hidden) and bool(found) == bool(hidden)
