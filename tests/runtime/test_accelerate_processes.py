"""Accelerate's own states, which libraries ask without a Trainer, say what the arguments say."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, PartialState

import hf_compat
from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.errors import ArgumentError
from hf_compat.hf import process_state
from hf_compat.hf.process_place import ProcessPlace
from hf_compat.hf.process_state import ProcessState, may_be_asked, start_deepspeed
from hf_compat.runtime import console
from hf_compat.runtime.launch import Launch
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


@pytest.mark.parametrize(
    ("loaded", "installed", "may"),
    [
        ({"accelerate": sys, "transformers": None}, False, True),
        ({"accelerate": None, "transformers": sys}, True, False),
        ({"transformers": sys}, True, True),
        ({"transformers": sys}, False, False),
        ({"transformers": None}, True, False),
        ({}, True, False),
    ],
)
def test_accelerate_is_asked_where_something_uses_it(monkeypatch, loaded, installed, may):
    monkeypatch.setattr(process_state, "sys", SimpleNamespace(modules=loaded))
    monkeypatch.setattr(process_state.importlib.util, "find_spec", lambda name: name if installed else None)
    assert may_be_asked() is may


@pytest.mark.parametrize(
    ("device", "backend", "ranks", "expected"),
    [
        ("cpu", None, (1, 0, 0), (True, None)),
        ("cpu", None, (2, 1, 1), (True, "gloo")),
        ("cuda", None, (2, 0, -1), (False, "nccl")),
        ("cuda", "gloo", (2, 1, 0), (False, "gloo")),
    ],
)
@pytest.mark.parametrize("has_accelerator", [False, True])
def test_the_shared_state_follows_the_arguments(monkeypatch, device, backend, ranks, expected, has_accelerator):
    waited = []
    for name in ("start_processes", "barrier"):
        monkeypatch.setattr(process_state, name, lambda *args, name=name: waited.append((name, *args)))
    monkeypatch.setattr("accelerate.state.is_initialized", lambda: has_accelerator)
    size, rank, local_rank = ranks
    args = SimpleNamespace(
        device=torch.device(device), ddp_backend=backend, world_size=size, process_index=rank,
        local_process_index=local_rank, ddp_timeout=9, other=1,
    )  # fmt: skip
    state = process_state.share_processes(args, "NO")
    found = vars(state)
    assert (found["_cpu"], found["backend"]) == expected and found["debug"] is False
    assert (found["device"], found["distributed_type"]) == (args.device, "NO")
    assert (state.num_processes, state.process_index, state.local_process_index) == (size, rank, max(local_rank, 0))
    assert AcceleratorState._shared_state.get("num_processes") == (size if has_accelerator else None)
    state.wait_for_everyone()
    kept = {name: value for name, value in vars(args).items() if name not in ("local_process_index", "other")}
    assert waited == [("start_processes", SimpleNamespace(**kept)), ("barrier",)]


@pytest.mark.parametrize("plugin", [None, "plugin"])
def test_the_shared_accelerator_has_what_upstreams_has(plugin):
    PartialState(cpu=True)
    process_state.share_accelerator("bf16", plugin)
    found = AcceleratorState._shared_state
    assert found["_mixed_precision"] == "bf16" and found["num_processes"] == 1
    assert found["deepspeed_plugins"] == (plugin and {"default": plugin})


@pytest.mark.parametrize(
    ("config", "by_variable", "is_launched", "lacks", "shares"),
    [
        ({"zero_optimization": {"stage": 2}}, "", True, "", "given"),
        ({"zero_optimization": {"stage": 3}}, "", True, "", "given"),
        ({"zero_optimization": {"stage": 2}}, "", False, "", None),
        ({"zero_optimization": {"stage": 2}}, "", True, "deepspeed", None),
        (None, "true", True, "", "plugin"),
        (None, "true", False, "", None),
        (None, "", True, "", None),
    ],
)
def test_transformers_is_told_of_a_configuration_that_trains(
    monkeypatch, config, by_variable, is_launched, lacks, shares
):
    done = []

    def shared(given):
        zero3 = (given or {}).get("zero_optimization", {}).get("stage") == 3
        return SimpleNamespace(is_zero3=lambda: zero3, given=given, trainer_config_process=done.append)

    def plugin():
        return SimpleNamespace(
            set_mixed_precision=done.append, set_deepspeed_weakref=lambda: done.append("weak"), dschf=shared(None)
        )

    monkeypatch.setattr("transformers.integrations.HfTrainerDeepSpeedConfig", shared)
    monkeypatch.setattr("accelerate.utils.DeepSpeedPlugin", plugin)
    monkeypatch.setattr(process_state, "is_launched", lambda: is_launched)
    monkeypatch.setattr(process_state.importlib.util, "find_spec", lambda name: None if name == lacks else name)
    monkeypatch.setattr(process_state, "start_processes", lambda args: done.append("started"))
    monkeypatch.setattr(process_state, "start_deepspeed", done.append)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", by_variable)
    args = SimpleNamespace(deepspeed=config, device="cpu", mixed_precision="bf16")
    process_state.share_deepspeed(args)
    found = vars(args).get("hf_deepspeed_config")
    assert (found and ("given" if found.given else "plugin")) == shares
    is_third = config is not None and config["zero_optimization"]["stage"] == 3
    told = {"given": [args], "plugin": ["bf16", "weak"], None: []}[shares]
    assert done == [*told, *["started", "cpu"] * is_third]


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [("cpu", None, ("1", "2")), ("cuda", "5", ("5", "as before")), ("cuda", "", ("", "as before"))],
)
def test_deepspeed_joins_the_process_group(monkeypatch, tmp_path, device, before, after):
    joined = []
    monkeypatch.setattr("deepspeed.init_distributed", lambda *words, **options: joined.append((words, options)))
    monkeypatch.setattr(
        process_state, "read_launch", lambda: SimpleNamespace(local_process_index=1, local_world_size=2)
    )
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "as before")
    monkeypatch.setenv("LOCAL_RANK", before or "")
    if before is None:
        monkeypatch.delenv("LOCAL_RANK")
    start_deepspeed(torch.device(device))
    assert joined == [(("nccl" if device == "cuda" else "gloo",), {"auto_mpi_discovery": False})]
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == after


@pytest.mark.parametrize("ranks", [(1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 1, 1)])
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_first_process_runs_a_block_before_the_others(monkeypatch, ranks, local, fails):
    done = []
    monkeypatch.setattr("torch.distributed.barrier", lambda: done.append("waits"))
    monkeypatch.setattr("hf_compat.runtime.collectives.start_processes", lambda args: done.append("starts"))
    monkeypatch.setattr(ProcessPlace, "_refuse_claims", lambda self: done.append("checks"))
    args = ProcessPlace()
    size, rank, local_rank = ranks
    args._launch = Launch(process_index=rank, local_process_index=local_rank, world_size=size)
    with pytest.raises(KeyError) if fails else contextlib.nullcontext(), args.main_process_first(local):
        done.append("works")
        if fails:
            raise KeyError
    is_first = (local_rank if local else rank) == 0
    around = [] if size == 1 else ["works", "waits"] if is_first else ["waits", "works"]
    assert done == ["checks", "starts", *(around or ["works"])]


@pytest.mark.parametrize("ranks", [(1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 1, 1), (3, 2, 2)])
@pytest.mark.parametrize("each_node", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_arguments_say_of_this_process(ranks, each_node, device):
    args = ProcessPlace()
    size, rank, local_rank = ranks
    args._launch = Launch(process_index=rank, local_process_index=local_rank, world_size=size)
    args.device = torch.device(device)
    args.log_on_each_node, args.save_on_each_node = each_node, not each_node
    args.per_device_train_batch_size, args.per_device_eval_batch_size, args.ddp_timeout = 3, 5, 60
    assert (args.should_log, args.should_save) == tuple(
        (local_rank if each else rank) == 0 for each in (each_node, not each_node)
    )
    assert (args.n_gpu, args.train_batch_size, args.eval_batch_size) == (int(device == "cuda"), 3, 5)
    assert args.parallel_mode.value == ("distributed" if size > 1 else "not_parallel")
    assert args.ddp_timeout_delta.total_seconds() == 60 and args._setup_devices == args.device
    state = ProcessState(args)
    assert state.distributed_type == ("NO" if size == 1 else "MULTI_CPU" if device == "cpu" else "MULTI_GPU")
    assert (state.is_main_process, state.is_local_main_process) == (rank == 0, local_rank == 0)
    assert (state.is_last_process, state.use_distributed) == (rank == size - 1, size > 1)


@pytest.mark.parametrize(
    ("size", "claims", "named"),
    [
        (1, {}, None),
        (1, {"process_index": 3}, None),
        (1, {"world_size": 2}, "world_size is 2"),
        (2, {"process_index": 3}, "process_index is 3"),
        (2, {"local_process_index": 3}, "local_process_index is 3"),
        (2, {"process_index": 1}, None),
    ],
)
def test_a_count_of_processes_that_nobody_has_started_is_refused(size, claims, named):
    args = type("Own", (ProcessPlace,), claims)()
    args._launch = Launch(process_index=size - 1, local_process_index=size - 1, world_size=size)
    with pytest.raises(ArgumentError, match=f"Own.{named}") if named else contextlib.nullcontext():
        args._refuse_claims()
