"""Accelerate's own states, which libraries ask without a Trainer, say what the arguments say."""

from __future__ import annotations

import gc
import logging
import pickle
import sys
import time

import pytest
import torch
import transformers
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, PartialState

import hf_compat
from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.errors import ArgumentError
from hf_compat.hf.process_state import may_be_asked, start_deepspeed
from hf_compat.runtime import console
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade


@pytest.fixture(autouse=True)
def no_states():
    """Begin and end without them: they are one object each for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def make(api, tmp_path, **values):
    return api.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **values)


def test_a_library_logs_before_there_is_a_trainer(tmp_path, caplog):
    with pytest.raises(RuntimeError, match="initialize the accelerate state"):
        get_logger("library").warning("too early")
    make(hf_compat, tmp_path)
    with caplog.at_level(logging.WARNING):
        get_logger("library").warning("the reference model is the model itself")
    assert "the reference model is the model itself" in caplog.text


def test_a_callback_asks_the_state_of_the_accelerator(tmp_path):
    seen = []

    class Synchronise(hf_compat.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            found = AcceleratorState()
            seen.append((found.deepspeed_plugin, found.num_processes, found.mixed_precision, found.device))

    args = make(hf_compat, tmp_path, max_steps=1, bf16=True)
    with pytest.raises(ValueError, match="properly initialize your accelerator"):
        AcceleratorState()
    Trainer(toy.Classifier(), args, train_dataset=toy.rows(8), callbacks=[Synchronise]).train()
    assert seen == [(None, 1, "bf16", torch.device("cpu"))]


@pytest.mark.parametrize("values", [{}, {"bf16": True}])
def test_the_states_hold_what_upstreams_hold(tmp_path, values):
    held = {}
    for api in (transformers, hf_compat):
        AcceleratorState._reset_state(reset_partial_state=True)
        api.Trainer(toy.Classifier(), make(api, tmp_path, **values), train_dataset=toy.rows(8))
        held[api] = {name: vars(state()).copy() for name, state in (("P", PartialState), ("A", AcceleratorState))}
    for name, theirs in held[transformers].items():
        ours = held[hf_compat][name]
        assert ours.pop("wait_for_everyone") is not None
        for state in (theirs, ours):
            state.pop("dynamo_plugin", None)
        assert ours == theirs


def test_the_state_of_the_arguments_is_accelerates(tmp_path):
    args = make(hf_compat, tmp_path)
    assert isinstance(args.distributed_state, PartialState) and args.distributed_state.device == args.device
    args.distributed_state.distributed_type = "MULTI_GPU"
    assert PartialState().distributed_type == "MULTI_GPU"
    make(hf_compat, tmp_path)
    assert PartialState().distributed_type == "NO"


def test_a_state_that_the_script_has_set_up_is_kept(tmp_path):
    PartialState(cpu=True).distributed_type = "MULTI_GPU"
    TrainingArguments(str(tmp_path), use_cpu=True, accelerator_config={"use_configured_state": True})
    assert PartialState().distributed_type == "MULTI_GPU"


def test_a_state_that_is_to_be_kept_has_to_be_there(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)use_configured_state.*there is none.*Hint"):
        TrainingArguments(str(tmp_path), use_cpu=True, accelerator_config={"use_configured_state": True})


def test_nothing_is_loaded_for_a_script_without_transformers(monkeypatch):
    for name in ("accelerate", "transformers"):
        monkeypatch.delitem(sys.modules, name)
    assert not may_be_asked()
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as where its import is blocked
    assert not may_be_asked()


def test_a_library_prepares_its_reference_model_by_deepspeeds_configuration(tmp_path):
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}, "bf16": {"enabled": "auto"}}
    args = make(hf_compat, tmp_path, deepspeed=config, bf16=True, per_device_train_batch_size=2)
    accelerator = AcceleratorFacade(args)
    for plugin in (
        accelerator.state.deepspeed_plugin,
        accelerator.deepspeed_plugin,
        AcceleratorState().deepspeed_plugin,
        args.deepspeed_plugin,
    ):
        assert plugin.zero_stage == 3 and plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] == 1000
        assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 2
    assert AcceleratorState().mixed_precision == accelerator.mixed_precision == "bf16"
    assert "deepspeed_plugin" not in {**args.to_dict(), **pickle.loads(pickle.dumps(args)).__dict__}
    other = make(hf_compat, tmp_path)
    assert AcceleratorFacade(other).state.deepspeed_plugin is None and other.deepspeed_plugin is None
    assert AcceleratorState().deepspeed_plugin is None


@pytest.mark.parametrize("by_launcher", [False, True])
@pytest.mark.parametrize("config", [None, {"zero_optimization": {"stage": 2}}])
def test_a_constructor_of_a_subclass_knows_whether_deepspeed_trains(tmp_path, monkeypatch, config, by_launcher):
    if by_launcher:
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")

    class WithReference(hf_compat.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.reference_is_deepspeeds = self.is_deepspeed_enabled

    args = make(hf_compat, tmp_path, deepspeed=config)
    trainer = WithReference(toy.Classifier(), args)
    is_expected = by_launcher or config is not None
    assert trainer.reference_is_deepspeeds == is_expected
    assert (trainer.accelerator.distributed_type == "DEEPSPEED") == is_expected


@pytest.fixture
def launched(monkeypatch):
    """As if torchrun had started this process alone."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def test_transformers_knows_the_configuration_as_long_as_the_arguments_live(tmp_path, launched):
    config = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto", "optimizer": {"params": {"lr": "auto"}}}
    args = make(hf_compat, tmp_path, deepspeed=config, per_device_train_batch_size=3, gradient_accumulation_steps=2)
    told = transformers.integrations.deepspeed.deepspeed_config()
    assert (told["train_batch_size"], told["optimizer"]["params"]["lr"]) == (6, args.learning_rate)
    assert not transformers.integrations.is_deepspeed_zero3_enabled()
    copied = pickle.loads(pickle.dumps(args))
    assert "hf_deepspeed_config" not in {**copied.to_dict(), **vars(copied)}
    del args
    gc.collect()
    assert transformers.integrations.deepspeed.deepspeed_config() is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"zero_optimization": "2"}, "`deepspeed` has `zero_optimization='2'`, which is not a dict"),
        ({"zero_optimization": '{"stage": 2}'}, "which is not a dict of options"),
        ({"optimizer": [1]}, r"`deepspeed` has `optimizer=\[1\]`"),
        ({"optimizer": {"params": "auto"}}, r"`deepspeed\['optimizer'\]` has `params='auto'`"),
        ({"zero_optimization": {"stage": 3, "offload_param": "cpu"}}, "has `offload_param='cpu'`"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": ["cpu"]}}}, "which is not text"),
        ({"checkpoint": "none"}, "`deepspeed` has `checkpoint='none'`"),
    ],
)
def test_a_section_that_is_not_a_mapping_is_refused_before_transformers_reads_it(tmp_path, launched, config, named):
    with pytest.raises(ArgumentError, match=named):
        make(hf_compat, tmp_path, deepspeed=config, save_on_each_node=True)
    assert transformers.integrations.deepspeed.deepspeed_config() is None


def test_errors_of_transformers_own_reading_are_seen(tmp_path, launched, monkeypatch):
    def fail(*_):
        raise TypeError("a fault of transformers")

    monkeypatch.setattr(transformers.integrations.HfTrainerDeepSpeedConfig, "trainer_config_process", fail)
    with pytest.raises(TypeError, match="a fault of transformers"):
        make(hf_compat, tmp_path, deepspeed={"zero_optimization": {"stage": 2}})


def test_a_build_that_was_killed_is_named(monkeypatch, caplog, tmp_path):
    """torch waits for the file without end, and says nothing."""
    monkeypatch.setattr(console, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("deepspeed.init_distributed", lambda *_, **__: time.sleep(0.5))
    start_deepspeed(torch.device("cpu"))
    assert caplog.records == []
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (tmp_path / "deepspeed_shm_comm" / "lock").touch()
    start_deepspeed(torch.device("cpu"))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"DeepSpeed waits for a build of its code in {tmp_path}.") and "a build was killed" in said
