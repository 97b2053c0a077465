"""An optimizer or a schedule that cannot be made of the arguments is an error before training, with the arguments."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_compat import TrainingArguments
from hf_compat.errors import ArgumentError, InertArgumentWarning
from hf_compat.hf.rows import RunParts
from hf_compat.optim import optimizers
from hf_compat.plan import argument_support
from hf_compat.plan.argument_support import check_optimization, check_optimizer


def arguments(tmp_path, **values):
    return TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **values)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("linear", {}, None),
        ("polynomial", {"lr_end": 1e-7, "power": 2.0}, None),
        ("polynomial", {"lr_end": 1.0}, "lr_end"),
        ("polynomial", {"power": float("nan")}, "learning rates that are not finite"),
        ("cosine_with_restarts", {"num_cycles": "x"}, "ValueError: could not convert"),
        ("cosine", {"cycles": 2}, "cycles"),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, None),
        ("cosine_with_min_lr", {}, "min_lr"),
        ("warmup_stable_decay", {"num_decay_steps": 10}, None),
    ],
)
def test_a_schedule_is_tried_before_training(tmp_path, kind, options, said):
    found = ""
    try:
        check_optimization(arguments(tmp_path, lr_scheduler_type=kind, lr_scheduler_kwargs=options))
    except ArgumentError as error:
        found = str(error)
    assert bool(found) == (said is not None) and (said or "") in found
    assert not found or "lr_scheduler_type" in found


@pytest.mark.parametrize("error", [ValueError("odd betas"), TypeError("odd betas"), LookupError("odd betas")])
def test_an_optimizer_that_cannot_be_made_names_its_arguments(tmp_path, monkeypatch, error):
    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr(argument_support, "get_optimizer_cls_and_kwargs", lambda args: (broken, {}))
    with pytest.raises(ArgumentError) as raised:
        check_optimizer(arguments(tmp_path, adam_beta1=0.5))
    assert str(raised.value).startswith("The optimizer cannot be made: ") and "odd betas" in str(raised.value)
    assert "`adam_beta1=0.5`" in str(raised.value) and "optim_args" not in str(raised.value)


def test_an_optimizer_whose_keywords_depend_on_the_model_waits_for_it(tmp_path, monkeypatch):
    made = check_optimizer(arguments(tmp_path, adam_beta1=0.5, learning_rate=0.25))
    assert [len(group["params"]) for group in made.param_groups] == [1, 1]
    assert made.defaults["betas"][0] == 0.5 and made.defaults["lr"] == 0.25
    entry, rest = optimizers.read_request(arguments(tmp_path), None)
    for name in ("projects", "in_backward"):
        changed = type("Entry", (), {**{one: getattr(entry, one) for one in ("projects", "in_backward")}, name: True})
        monkeypatch.setattr(argument_support, "read_request", lambda args, model, found=changed: (found, rest))
        assert check_optimizer(arguments(tmp_path)) is None


@pytest.mark.parametrize(
    ("setting", "value", "values"),
    [
        ("max_epochs", 2, {"num_train_epochs": 2}),
        ("deterministic", True, {"full_determinism": True}),
        ("deterministic", "warn", None),
        ("precision", "bf16", {"bf16": True, "fp16": False}),
        ("precision", 16, {"bf16": False, "fp16": True}),
        ("precision", "32", {"bf16": False, "fp16": False}),
        ("precision", "64", None),
        ("val_check_interval", 2, {"eval_strategy": "steps", "eval_steps": 2}),
        ("val_check_interval", 1, {"eval_strategy": "steps", "eval_steps": 1}),
        ("val_check_interval", 1.0, None),
        ("val_check_interval", 2.0, {"eval_strategy": "steps", "eval_steps": 2}),
        ("check_val_every_n_epoch", 1, {"eval_strategy": "epoch"}),
        ("check_val_every_n_epoch", 2, None),
        ("accelerator", "cpu", {"use_cpu": True}),
        ("accelerator", "auto", {}),
        ("accelerator", "tpu", None),
        ("enable_progress_bar", False, {"disable_tqdm": True}),
    ],
)
def test_what_a_setting_of_lightnings_trainer_means(setting, value, values):
    read = argument_support.EQUIVALENTS[setting]
    if values is None:
        with pytest.raises(ArgumentError, match=f"trainer.{setting}"):
            read(value)
    else:
        assert read(value) == values


@pytest.mark.parametrize(
    ("found", "value", "values"),
    [
        ("cuda", "cpu", {"use_cpu": True}),
        ("cuda", "gpu", {"use_cpu": False}),
        ("cuda", "cuda", {"use_cpu": False}),
        ("cuda", "mps", None),
        (None, "gpu", None),
    ],
)
def test_an_accelerator_is_the_one_that_is_here(monkeypatch, found, value, values):
    here = found and torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: here)
    try:
        assert argument_support._accelerator(value) == values
    except ArgumentError:
        assert values is None


@pytest.mark.parametrize(
    ("trainer", "args", "given", "joined"),
    [
        ({"max_steps": 3}, {"seed": 1}, set(), {"seed": 1, "max_steps": 3}),
        ({"max_steps": None, "profiler": "simple"}, {}, set(), {}),
        ({"devices": 2}, {}, set(), None),
        ({"max_steps": 3}, {"max_steps": 3}, {"max_steps"}, {"max_steps": 3}),
        ({"max_steps": 3}, {"max_steps": 4}, {"max_steps"}, None),
        ({"max_steps": 3}, {"max_steps": -1}, set(), {"max_steps": 3}),
        ({"default_root_dir": "a"}, {"output_dir": Path("a")}, {"output_dir"}, {"output_dir": "a"}),
        ({"default_root_dir": "a"}, {"output_dir": Path("b")}, {"output_dir"}, None),
    ],
)
def test_two_sections_are_joined(trainer, args, given, joined):
    try:
        assert argument_support.join(trainer, args, given) == joined
    except ArgumentError:
        assert joined is None


@pytest.mark.parametrize(
    ("batches", "norm", "algorithm", "said"),
    [
        (1, None, None, ""),
        (1, 0, "norm", ""),
        (2, None, None, "`accumulate_grad_batches=2`"),
        (1, 0.5, None, "`gradient_clip_val=0.5`"),
        (1, None, "value", "`gradient_clip_algorithm='value'`"),
    ],
)
def test_a_trainer_of_lightnings_neither_accumulates_nor_clips(tmp_path, batches, norm, algorithm, said):
    trainer = SimpleNamespace(accumulate_grad_batches=batches, gradient_clip_val=norm)
    trainer.gradient_clip_algorithm = algorithm and SimpleNamespace(value=algorithm)
    found = ""
    try:
        argument_support.check_mechanics(arguments(tmp_path), trainer)
    except ArgumentError as error:
        found = str(error)
    assert bool(found) == bool(said) and found.startswith(said)


@pytest.mark.parametrize(
    ("values", "trainer", "said", "unsaid"),
    [
        ({}, {"max_epochs": 5}, "", ""),
        ({"num_train_epochs": 2}, {"max_epochs": 2}, "", ""),
        ({"num_train_epochs": 2}, {"max_epochs": 5}, "`lightning.Trainer(max_epochs=2)`", "(its default)"),
        ({"num_train_epochs": 2.5}, {"max_epochs": 5}, "to two values", "lightning.Trainer("),
        ({"num_train_epochs": 2}, {"max_epochs": 1000}, "(its default)", ""),
        ({"max_steps": 1000}, {"max_steps": 7}, "`lightning.Trainer(max_steps=1000)`", "(its default)"),
        ({"gradient_accumulation_steps": 2}, {"accumulate_grad_batches": 3}, "to two values", "lightning.Trainer("),
        ({"bf16": True}, {"precision": "32-true"}, "`bf16=True`", ""),
        ({"fp16": True}, {"precision": "32-true"}, "", ""),  # the CPU does not mix it
        ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 1}}, {}, "Without effect in this run", ""),
        ({"eval_strategy": "steps"}, {}, "`eval_strategy`", "`eval_steps`"),
        ({"eval_strategy": "steps", "eval_steps": 7}, {}, "`eval_steps`", "Without effect"),
        # a word, and an enum of that value
        ({"eval_strategy": "steps", "eval_steps": 7}, {"val_check_interval": 7}, "no effect", "to two values"),
        ({"eval_strategy": "epoch"}, {"val_check_interval": 500}, "`eval_strategy=", "no effect"),
        ({"eval_strategy": "epoch"}, {"check_val_every_n_epoch": 1}, "no effect", "to two values"),
    ],
)
def test_a_native_modules_arguments_are_compared_with_its_trainer(tmp_path, recwarn, values, trainer, said, unsaid):
    found = ""
    try:
        argument_support.check_native(arguments(tmp_path, **values), trainer, RunParts())
    except ArgumentError as error:
        found = str(error)
    found += "".join(str(one.message) for one in recwarn if one.category is InertArgumentWarning)
    assert bool(found) == bool(said) and said in found and not (unsaid and unsaid in found)


@pytest.mark.parametrize(
    ("values", "parts", "in_evaluation", "names"),
    [
        ({}, {}, False, []),
        ({"warmup_steps": 0}, {}, False, []),
        ({"fp16": True, "hub_token": "x"}, {}, False, ["fp16", "hub_token"]),
        ({"fp16": True, "hub_token": "x"}, {}, True, ["fp16"]),
        ({"hub_token": "x"}, {"reads": lambda name: name == "hub_token"}, False, []),
        ({"eval_strategy": "steps", "max_steps": 5, "num_train_epochs": 2}, {}, False, ["num_train_epochs"]),
        ({"accelerator_config": {"even_batches": False}}, {}, False, ["accelerator_config"]),
    ],
)
def test_arguments_without_effect_are_found(tmp_path, values, parts, in_evaluation, names):
    args = arguments(tmp_path, **values)
    found = argument_support.inert_settings(args, RunParts(**parts), in_evaluation)
    assert [one.name for one in found if one.name in values] == names


@pytest.mark.parametrize(
    ("values", "chosen"),
    [
        ({}, {}),
        ({"learning_rate": 5e-5, "seed": 42}, {}),
        ({"learning_rate": 0.5}, {"learning_rate": 0.5}),
        ({"eval_steps": 3}, {"eval_steps": 3}),
        ({"num_train_epochs": 3}, {}),
        ({"async_save": True}, {"async_save": True}),
        ({"async_save": False}, {}),
        ({"include_for_metrics": ["loss"]}, {"include_for_metrics": ["loss"]}),
        ({"max_grad_norm": 0.0}, {"max_grad_norm": 0.0}),
    ],
)
def test_arguments_that_were_set_are_known(values, chosen, tmp_path):
    usual = argument_support.set_arguments(arguments(tmp_path))
    found = argument_support.set_arguments(arguments(tmp_path, **values))
    assert {name: value for name, value in found.items() if name not in usual} == chosen


@pytest.mark.parametrize(
    ("config", "is_set"), [({}, False), ({"split_batches": True}, True), ({"even_batches": True}, False)]
)
def test_an_accelerator_config_is_compared_with_its_defaults(config, is_set, tmp_path):
    found = argument_support.set_arguments(arguments(tmp_path, accelerator_config=config))
    assert ("accelerator_config" in found) is is_set
