"""From arguments to a plan: what Lightning is told, and what is refused."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from hf_compat import TrainingArguments, translate
from hf_compat.errors import ArgumentError, UnsupportedArgument
from hf_compat.hf.rows import ROWS
from hf_compat.plan import translate as translation
from hf_compat.plan.argument_support import EQUIVALENTS, in_one_line, inert_settings
from hf_compat.plan.translate import CurrentPlan, LightningPlan, make_run_counts


def plan_of(counts=None, **values) -> LightningPlan:
    return translate(TrainingArguments("out", use_cpu=True, **values), counts)


def counts_of(**values):
    args = TrainingArguments("out", use_cpu=True, **values)
    return make_run_counts(
        args, micro_batches=10, num_examples=40, total_train_batch_size=4 * args.gradient_accumulation_steps
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"precision": "32-true", "max_epochs": 3, "strategy": "one_device", "device": "cpu"}),
        ({"bf16": True}, {"precision": "bf16-mixed"}),
        ({"num_train_epochs": 1.2}, {"max_epochs": 2}),
        ({"num_train_epochs": 0.1}, {"max_epochs": 1}),
        ({"max_steps": 7}, {"max_epochs": -1}),
        ({"max_grad_norm": 0.0}, {"gradient_clip_norm": None}),
        ({"gradient_accumulation_steps": 4}, {"micro_batches_per_update": 4}),
        ({"full_determinism": True}, {"deterministic": True}),
        ({"logging_steps": 7}, {"log_every_n_steps": 7}),
        ({"logging_steps": 0.1}, {"log_every_n_steps": 1}),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
         {"exchange_every_micro_batch": True}),
    ],
)  # fmt: skip
def test_arguments_alone(values, expected):
    plan = plan_of(**values)
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eval_strategy": "epoch"}, {"validate_every_updates": 10, "max_epochs": 3}),
        ({"eval_strategy": "steps", "eval_steps": 4}, {"validate_every_updates": 4}),
        ({"eval_strategy": "steps", "eval_steps": 0.25}, {"validate_every_updates": 8}),  # 7.5 of 30 updates
        ({"logging_steps": 0.1}, {"log_every_n_steps": 3}),
        ({"max_steps": 15}, {"max_epochs": 2, "validate_every_updates": None}),
    ],
)
def test_arguments_and_counts(values, expected):
    plan = plan_of(counts_of(**values), **values)
    assert {name: getattr(plan, name) for name in expected} == expected


def test_data_without_a_length_leaves_the_epochs_open():
    args = TrainingArguments("out", use_cpu=True, max_steps=4)
    counts = make_run_counts(
        args, micro_batches=None, num_examples=None, total_train_batch_size=4 * args.gradient_accumulation_steps
    )
    assert translate(args, counts).max_epochs == -1


def test_lightning_takes_the_settings():
    plan = plan_of(counts_of(eval_strategy="epoch"), eval_strategy="epoch")
    trainer = pl.Trainer(**plan.trainer_settings(), enable_checkpointing=False, enable_progress_bar=False)
    assert (trainer.max_epochs, trainer.val_check_batch, trainer.check_val_every_n_epoch) == (3, None, None)
    assert trainer.strategy.root_device == torch.device("cpu")


@pytest.mark.parametrize(
    ("world", "per_node", "device", "expected"),
    [
        (1, 1, "cpu", {"accelerator": "cpu", "devices": 1, "num_nodes": 1}),
        (1, 1, "mps", {"accelerator": "mps", "devices": 1, "num_nodes": 1}),
        (1, 1, "cuda:3", {"accelerator": "gpu", "devices": [3], "num_nodes": 1}),
        (4, 2, "cuda:0", {"accelerator": "gpu", "devices": [0, 1], "num_nodes": 2}),
        (2, 2, "cpu", {"accelerator": "cpu", "devices": 2, "num_nodes": 1}),
    ],
)
def test_devices_of_the_lightning_trainer(world, per_node, device, expected):
    settings = LightningPlan(device=device, world_size=world, devices_per_node=per_node).trainer_settings()
    assert {name: settings[name] for name in expected} == expected


def test_several_processes_train_with_ddp_and_its_options(args_of):
    plan = translate(args_of(world=2, ddp_find_unused_parameters=True, ddp_bucket_cap_mb=10))
    assert (plan.strategy, plan.world_size) == ("ddp", 2)
    assert plan.strategy_options == {"find_unused_parameters": True, "bucket_cap_mb": 10}


def test_arguments_for_several_processes_are_warned_of_in_one():
    args = TrainingArguments("out", use_cpu=True, ddp_find_unused_parameters=True, ddp_timeout=60)
    told = "`ddp_find_unused_parameters=True`, `ddp_timeout=60` (it only matters with several processes, and the "
    assert in_one_line(inert_settings(args)) == f"{told}launcher has started one)"


@pytest.mark.parametrize(
    ("variable", "value", "flag"),
    [
        ("ACCELERATE_USE_MEGATRON_LM", "true", "--use_megatron_lm"),
    ],
)
def test_options_of_accelerate_launch_that_nothing_carries_out_are_refused(monkeypatch, variable, value, flag):
    monkeypatch.setenv(variable, value)
    with pytest.raises(UnsupportedArgument, match=f"`accelerate launch {flag}` is not supported yet"):
        plan_of()


def test_a_current_plan_follows_arguments_that_change():
    args, current = TrainingArguments("out", use_cpu=True), CurrentPlan()
    first = current.of(args)
    assert current.of(args) is first and first == translate(args)
    args.max_grad_norm = 0.5
    assert current.of(args) == translate(args) != first
    args.debug.append("tpu_metrics_debug")  # changed where it is
    with pytest.raises(UnsupportedArgument, match="tpu_metrics_debug"):
        current.of(args)


def test_arguments_of_a_lightning_trainer_are_named_as_it_names_them():
    known = {*inspect.signature(pl.Trainer).parameters, *inspect.signature(pl.Trainer.fit).parameters}
    named = {row.native for row in ROWS.values() if row.native and row.native.isidentifier()}
    assert len(named) > 5 and named <= known


@pytest.mark.parametrize(
    ("given", "half"),
    [("bf16-mixed", "bf16"), ("bf16", "bf16"), ("16-mixed", "fp16"), ("16", "fp16"), (16, "fp16"), ("32-true", None),
     ("32", None), (32, None)],
)  # fmt: skip
def test_each_spelling_of_a_precision_of_lightnings_is_an_argument(given, half):
    assert EQUIVALENTS["precision"](given) == {"bf16": half == "bf16", "fp16": half == "fp16"}


@pytest.mark.parametrize(
    ("values", "of_update", "variables", "found"),
    [
        ({}, False, {}, None),
        ({"torch_compile": True}, False, {}, ("inductor", "default", False, None, False)),
        (
            {"torch_compile": True, "torch_compile_backend": "EAGER"},
            False,
            {},
            ("eager", "default", False, None, False),
        ),
        ({"torch_compile_backend": "no"}, False, {}, None),
        ({}, False, {"BACKEND": "EAGER"}, ("eager", "default", False, None, False)),
        ({}, False, {"BACKEND": "NO"}, None),
        ({"torch_compile_backend": "eager"}, False, {"BACKEND": "inductor"}, ("eager", "default", False, None, False)),
        ({"compile_update": True}, False, {}, None),
        ({"compile_update": True}, True, {}, ("inductor", "default", False, None, False)),
        ({}, True, {}, None),
        ({"torch_compile_mode": "reduce-overhead"}, False, {}, ("inductor", "reduce-overhead", False, None, False)),
        ({"torch_compile_mode": "odd"}, False, {}, "`torch_compile_mode=odd`"),
        (
            {"torch_compile_mode": "odd", "torch_compile_backend": "eager"},
            False,
            {},
            ("eager", "odd", False, None, False),
        ),
        ({"torch_compile": True}, False, {"MODE": "odd"}, "`ACCELERATE_DYNAMO_MODE=odd`"),
        ({"torch_compile_backend": "odd"}, False, {}, "`torch_compile_backend=odd`"),
        ({}, False, {"BACKEND": "odd"}, "`ACCELERATE_DYNAMO_BACKEND=odd`"),
        ({"torch_compile": True}, False, {"USE_FULLGRAPH": "1"}, ("inductor", "default", True, None, False)),
        ({"torch_compile": True}, False, {"USE_DYNAMIC": "0"}, ("inductor", "default", False, False, False)),
        ({"torch_compile": True}, False, {"USE_DYNAMIC": "1"}, ("inductor", "default", False, True, False)),
        ({"torch_compile": True}, False, {"USE_REGIONAL_COMPILATION": "1"}, ("inductor", "default", False, None, True)),
    ],
)
def test_how_a_model_is_compiled(monkeypatch, values, of_update, variables, found):
    args = TrainingArguments("out", use_cpu=True, **values)
    monkeypatch.setattr(
        translation, "environment", {f"ACCELERATE_DYNAMO_{key}": text for key, text in variables.items()}
    )
    try:
        made = translation.compilation_of(args, of_update)
        assert made == found or (made.backend, made.mode, made.fullgraph, made.dynamic, made.by_blocks) == found
    except ArgumentError as error:
        assert str(error).replace("'", "").startswith(str(found))


def pretrained(**attributes):
    return type("Model", (torch.nn.Module,), attributes)()


@pytest.mark.parametrize(
    ("is_theirs", "attributes", "recomputes", "unused"),
    [
        (True, {}, False, True),
        (True, {}, True, False),
        (True, {"is_gradient_checkpointing": True}, False, False),
        (True, {"is_activation_checkpointing": True, "is_gradient_checkpointing": False}, False, False),
        (True, {"is_activation_checkpointing": False, "is_gradient_checkpointing": True}, False, True),
        (False, {"is_activation_checkpointing": True}, True, True),
    ],
)
def test_ddp_looks_for_unused_parameters_unless_layers_are_recomputed(
    monkeypatch, is_theirs, attributes, recomputes, unused
):
    monkeypatch.setattr(translation, "is_pretrained_model", lambda model: is_theirs)
    args = TrainingArguments("out", use_cpu=True, activation_checkpointing=recomputes)
    assert translation.ddp_options(args, pretrained(**attributes)) == {"find_unused_parameters": unused}
    assert translation.ddp_options(args, None) == {}
    args.ddp_find_unused_parameters = not unused
    assert translation.ddp_options(args, pretrained(**attributes)) == {"find_unused_parameters": not unused}


@pytest.mark.parametrize(
    ("interval", "updates", "found"), [(1, 9, 1), (1.0, 9, 1), (7, 3, 7), (0.5, 9, 5), (0.01, 9, 1), (0.999, 1000, 999)]
)
def test_an_interval_becomes_updates(interval, updates, found):
    assert translation._updates_of(interval, updates) == found


def test_a_current_plan_tells_of_an_evaluation_once_for_the_same_arguments(monkeypatch):
    told, current, args = [], CurrentPlan(), TrainingArguments("out", use_cpu=True)
    monkeypatch.setattr(translation, "inert_settings", lambda args, parts, in_evaluation: told.append(args.seed) or [])
    for seed in (1, 1, 2, 2):
        args.seed = seed
        current.of(args)
        current.tell_in_evaluation(args, lambda: None)
    assert told == [1, 2]


@pytest.mark.parametrize(("rank", "shown"), [(0, 1), (1, 0)])
def test_rank_0_shows_a_warning_of_the_plan_once(monkeypatch, recwarn, rank, shown):
    args, current = TrainingArguments("out", use_cpu=True), CurrentPlan()
    monkeypatch.setattr(type(args), "process_index", rank)
    monkeypatch.setattr(
        translation, "translate", lambda args, model: warnings.warn("told", UserWarning, 2) or LightningPlan()
    )
    for seed in (1, 2):
        args.seed = seed
        current.of(args)
    assert sum("told" in str(one.message) for one in recwarn) == shown


@pytest.mark.parametrize(
    ("facts", "fsdp_config", "world", "found"),
    [
        ("", None, 1, ("one_device", {})),
        ("", None, 2, ("ddp", "options")),
        ("megatron", None, 2, UnsupportedArgument),
        ("split", None, 2, "spread"),
        ("sharded", None, 2, "spread"),
        ("split sharded deepspeed", None, 2, "spread"),
        ("deepspeed", None, 2, ("deepspeed", {"config": {"zero_optimization": {"stage": 2}}})),
        ("deepspeed sequence fsdp", None, 2,
         ("deepspeed", {"config": {"zero_optimization": {"stage": 2}}, "sequence": "sequence"})),
        ("deepspeed parts", None, 2, ArgumentError),
        ("deepspeed parts stage3", None, 2, ("deepspeed", {"config": {"zero_optimization": {"stage": 3}}})),
        ("parts", None, 2, ArgumentError),
        ("fsdp", None, 2, ("fsdp2", {"plan": "plan"})),
        ("told", {"cpu_offload": True}, 1, ("one_device", {})),
        ("", {"cpu_offload": False}, 1, ("one_device", {})),
        ("told", "file", 2, ("ddp", "options")),
    ],
)  # fmt: skip
def test_a_strategy_is_chosen(monkeypatch, facts, fsdp_config, world, found):
    facts, told = facts.split(), []
    config = {"zero_optimization": {"stage": 3 if "stage3" in facts else 2}}
    stand_ins = {
        "parse_switch": "megatron" in facts,
        "tensor_ranks": 2 if "split" in facts else 1,
        "is_sharded_when_loaded": "sharded" in facts,
        "_strategy_of_spread": "spread",
        "parallel_sizes": None,
        "is_partitioned": "parts" in facts,
        "uses_deepspeed": "deepspeed" in facts,
        "_deepspeed_config": (config, "sequence" if "sequence" in facts else None),
        "uses_fsdp": "fsdp" in facts,
        "_plan_of_fsdp": "plan",
        "ddp_options": "options",
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(translation, name, lambda *given, value=value: value)
    monkeypatch.setattr(translation, "warn_inert", lambda *given: told.append(1))
    args = SimpleNamespace(fsdp_config=fsdp_config, world_size=world)
    if isinstance(found, type):
        with pytest.raises(found):
            translation._strategy(args, torch.nn.Linear(1, 1))
        if "parts" in facts:  # it is the model that was made in parts
            translation._strategy(args, None)
    else:
        assert translation._strategy(args, torch.nn.Linear(1, 1)) == found
    assert len(told) == ("told" in facts)


@pytest.mark.parametrize(
    ("split", "world", "facts", "found"),
    [
        (2, 4, "deepspeed", "`deepspeed` is set"),
        (1, 4, "", ("fsdp2", {"plan": "loaded"})),
        (2, 4, "sharded", ("fsdp2", {"plan": "loaded"})),
        (2, 2, "", ("tensor_parallel", {})),
        (2, 4, "fsdp", ("fsdp2", {"plan": "plan"})),
        (2, 2, "fsdp", "`fsdp` has none to shard over"),
        (2, 4, "", "each of 2 models has its own batches"),
    ],
)
def test_a_strategy_for_a_model_that_is_spread_already(monkeypatch, split, world, facts, found):
    stand_ins = {
        "tensor_ranks": split,
        "uses_deepspeed": facts == "deepspeed",
        "uses_fsdp": facts == "fsdp",
        "parallel_sizes": None,
        "_plan_of_loaded": "loaded",
        "_plan_of_fsdp": "plan",
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(translation, name, lambda *given, value=value: value)
    monkeypatch.setattr(translation, "FSDPModule", torch.nn.Linear if facts == "sharded" else torch.nn.Conv1d)
    args, model = SimpleNamespace(world_size=world), torch.nn.Sequential(torch.nn.Linear(1, 1))
    try:
        assert translation._strategy_of_spread(args, {}, model) == found
        if split == 2 and facts == "":
            assert translation._strategy_of_spread(args, {}, None) == found
    except ArgumentError as error:
        assert isinstance(found, str) and found in str(error)


@pytest.mark.parametrize(
    ("world", "has_rendezvous", "shares", "has_model", "found"),
    [
        (1, False, False, True, None),
        (1, True, False, True, ("auto", 0)),
        (4, False, False, True, ("auto", 0)),
        (4, False, True, True, (3 * 5 * 2, 1)),
        (4, False, True, False, (3 * 5 * 2, 0)),
    ],
)
def test_deepspeeds_configuration_counts_models_that_share_sequences(
    monkeypatch, world, has_rendezvous, shares, has_model, found
):
    checked, sequence = [], SimpleNamespace(sp_size=2) if shares else None
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}
    monkeypatch.setattr(translation, "has_rendezvous", lambda: has_rendezvous)
    monkeypatch.setattr(translation, "deepspeed_config", lambda *given: config)
    monkeypatch.setattr(translation, "sequence_plan", lambda *given: sequence)
    monkeypatch.setattr(translation, "check_shared_model", lambda *given: checked.append(1))
    args, model = SimpleNamespace(world_size=world), torch.nn.Linear(1, 1) if has_model else None
    if found is None:
        with pytest.raises(ArgumentError, match="needs a launcher"):
            translation._deepspeed_config(args, model)
    else:
        assert translation._deepspeed_config(args, model) == (config, sequence)
        assert (config["train_batch_size"], len(checked)) == found
