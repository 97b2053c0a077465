"""Each decision of the Accelerator that a script sees, on one rank and on several, with stand-ins for the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_compat import TrainingArguments
from hf_compat.optim.prepared import PreparedOptimizer
from hf_compat.trainer_methods import accelerate_facade
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade, AcceleratorState, DeepSpeedPlugin


class Facade(AcceleratorFacade):
    """An Accelerator with facts of its own in place of its process's."""

    device, use_distributed = torch.device("cpu"), False


def facade(tmp_path, device="cpu", is_distributed=False, **values):
    made = Facade(TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **values))
    made.device, made.use_distributed = torch.device(device), is_distributed
    return made


class Model(nn.Linear):
    """Notes where it is moved."""

    def __init__(self, is_trained=True):
        super().__init__(1, 1)
        self.moved = []
        self.requires_grad_(is_trained)

    def to(self, device):
        self.moved.append(str(device))
        return self


@pytest.fixture
def wrapped(monkeypatch):
    """The arguments of each DDP that is made."""

    def ddp(model, place, find_unused_parameters):
        made.append((model, place, find_unused_parameters))
        return "ddp"

    made = []
    kind = type("Kind", (type,), {"__instancecheck__": lambda cls, one: isinstance(one, DistributedDataParallel),
                                  "__call__": lambda cls, *args, **kwargs: ddp(*args, **kwargs)})  # fmt: skip
    monkeypatch.setattr(accelerate_facade, "DistributedDataParallel", kind("DDP", (), {}))
    return made


@pytest.mark.parametrize(
    ("changes", "options", "is_trained", "expected"),
    [
        ({}, {}, True, None),
        ({"is_distributed": True}, {}, True, (None, True)),
        ({"is_distributed": True}, {}, False, None),
        ({"is_distributed": True}, {"evaluation_mode": True}, True, None),
        ({"is_distributed": True, "device": "cuda:1"}, {}, True, ([torch.device("cuda:1")], True)),
        ({"is_distributed": True, "ddp_find_unused_parameters": False}, {}, True, (None, False)),
        ({"is_distributed": True, "ddp_find_unused_parameters": True}, {}, True, (None, True)),
    ],
)
def test_a_further_model_is_wrapped_where_several_ranks_train_it(
    changes, options, is_trained, expected, wrapped, tmp_path
):
    accelerator, model = facade(tmp_path, **changes), Model(is_trained)
    found = accelerator.prepare_model(model, **options)
    assert found == (model if expected is None else "ddp") and accelerator._models == [model]
    assert wrapped == ([] if expected is None else [(model, *expected)])
    assert model.moved == [changes.get("device", "cpu")]


def test_a_wrapped_model_is_wrapped_once(wrapped, tmp_path):
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = nn.Linear(1, 1)
    assert facade(tmp_path, is_distributed=True).prepare_model(model, device_placement=False) is model and not wrapped


@pytest.mark.parametrize("placement", [None, True, False])
@pytest.mark.parametrize("is_spread", [True, False])
@pytest.mark.parametrize("is_engines", [True, False, None])
def test_a_model_moves_unless_it_is_placed(placement, is_spread, is_engines, tmp_path, wrapped):
    accelerator, model = facade(tmp_path), Model()
    accelerator.verify_device_map = lambda one: is_spread
    accelerator.is_trained_by_engine = None if is_engines is None else lambda one: is_engines and one is model
    assert accelerator.prepare_model(model, device_placement=placement) is model
    stays = placement is False or (is_spread and not is_engines)
    assert model.moved == [] if stays else model.moved == ["cpu"]
    assert accelerator._models == ([] if is_engines else [model])


@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [
        ("no", "cpu", None),
        ("bf16", "cpu", torch.bfloat16),
        ("fp16", "cpu", None),
        ("fp16", "cuda", torch.float16),
        ("bf16", "cuda", torch.bfloat16),
    ],
)
def test_half_precision(precision, device, expected, tmp_path, wrapped):
    accelerator, model = facade(tmp_path, device), Model()
    accelerator.mixed_precision = precision
    assert accelerator._half_precision() == expected and accelerator.native_amp is (expected is not None)
    accelerator.prepare_model(model)
    forward = vars(model).get("forward")
    assert (forward and (forward.dtype, forward.device_type)) == (expected and (expected, device))
    if device == "cpu":
        with accelerator.autocast():
            assert torch.is_autocast_enabled("cpu") is (expected is not None)


def test_an_optimizer_is_prepared_once(tmp_path):
    accelerator, optimizer = facade(tmp_path), torch.optim.SGD(nn.Linear(1, 1).parameters())
    prepared = accelerator.prepare_optimizer(optimizer)
    assert type(prepared) is PreparedOptimizer and prepared.optimizer is optimizer
    assert accelerator.prepare_optimizer(prepared) is accelerator.prepare_optimizer(optimizer) is prepared
    assert accelerator._optimizers == [prepared]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("follows", ["first", "second", "none"])
def test_a_schedule_follows_its_own_optimizer_or_all(known, follows, tmp_path, monkeypatch):
    shared = []
    monkeypatch.setattr(accelerate_facade, "has_state", lambda: known)
    monkeypatch.setattr(accelerate_facade, "share_processes", lambda *args: shared.append(args))
    monkeypatch.setattr(AcceleratedScheduler, "__init__", lambda self, *args, **kwargs: vars(self).update(
        scheduler=args[0], optimizers=args[1], split_batches=kwargs["split_batches"]))  # fmt: skip
    accelerator = facade(tmp_path, accelerator_config={"split_batches": True})
    optimizers = [torch.optim.SGD(nn.Linear(1, 1).parameters()) for _ in range(2)]
    prepared = [accelerator.prepare_optimizer(one) for one in optimizers]
    accelerator._optimizers.append("an engine's")
    place = {"first": 0, "second": 1}.get(follows)
    plain = SimpleNamespace(get_last_lr=None, optimizer=None if place is None else optimizers[place])
    shared.clear()
    found = accelerator.prepare_scheduler(plain)
    assert found.scheduler is plain and found.split_batches is True
    assert found.optimizers == (prepared if place is None else [prepared[place]])
    assert found.gradient_state is accelerator.gradient_state and accelerator._schedulers == [found]
    assert shared == [(accelerator._args, accelerator.distributed_type)] * (not known)
    assert accelerator.prepare_scheduler(found) is found and accelerator._schedulers == [found]


def test_objects_are_prepared_by_their_kind_and_schedules_last(tmp_path, monkeypatch):
    accelerator, order = facade(tmp_path), []
    for name in ("data_loader", "model", "optimizer", "scheduler"):
        monkeypatch.setattr(
            accelerator, f"prepare_{name}", lambda one, name=name: order.append(name) or (name, one), raising=False
        )
    model = nn.Linear(1, 1)
    given = (
        SimpleNamespace(get_last_lr=None), torch.utils.data.DataLoader([1]), model, "other",
        torch.optim.SGD(model.parameters()),
    )  # fmt: skip
    names = ("scheduler", "data_loader", "model", None, "optimizer")
    expected = tuple(one if name is None else (name, one) for name, one in zip(names, given, strict=True))
    assert accelerator.prepare(*given) == expected and order == ["data_loader", "model", "optimizer", "scheduler"]
    assert accelerator.prepare("other") == "other" and accelerator.prepare() == ()


@pytest.mark.parametrize(
    ("fsdp", "config", "deepspeed", "kind", "is_fsdp2", "has_plugin"),
    [
        ("", None, False, "NO", False, False),
        ("full_shard", None, False, "FSDP", True, False),
        ("full_shard", {"version": 1}, False, "FSDP", False, False),
        ("full_shard", {"version": 2}, True, "FSDP", True, False),
        ("", {"version": 2}, True, "DEEPSPEED", False, True),
    ],
)
def test_the_state_names_the_strategy(fsdp, config, deepspeed, kind, is_fsdp2, has_plugin, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(accelerate_facade, "uses_deepspeed", lambda args, variables: deepspeed)
    monkeypatch.setattr(accelerate_facade, "may_be_asked", lambda: True)
    monkeypatch.setattr(accelerate_facade, "share_processes", lambda *args: told.append(args))
    monkeypatch.setattr(accelerate_facade, "share_accelerator", lambda *args: told.append(args))
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", bf16=True)
    vars(args).update(fsdp=fsdp, fsdp_config=config)
    state = AcceleratorState(args)
    assert str(getattr(state.distributed_type, "value", state.distributed_type)) == kind
    assert state.is_fsdp2 is is_fsdp2 and isinstance(state.deepspeed_plugin, DeepSpeedPlugin) is has_plugin
    assert args.deepspeed_plugin is state.deepspeed_plugin and state.mixed_precision == "bf16"
    assert told == [(args, state.distributed_type), ("bf16", state.deepspeed_plugin)]


@pytest.mark.parametrize(
    ("config", "stage", "size"),
    [
        ({}, 0, 3),
        ({"zero_optimization": {"stage": 2}}, 2, 3),
        ({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 5}, 3, 5),
    ],
)
def test_deepspeeds_plugin_has_a_stage_and_a_size(config, stage, size, monkeypatch):
    monkeypatch.setattr(accelerate_facade, "deepspeed_config", lambda args, variables: config)
    plugin = DeepSpeedPlugin(SimpleNamespace(per_device_train_batch_size=3))
    assert plugin.selected and plugin.zero_stage == stage
    assert plugin.is_zero3_init_enabled() is plugin.zero3_init_flag is (stage == 3)
    assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == size


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ({"adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False}, {}),
        ({"adjust_scheduler": False}, {"adjust_scheduler": False}),
        ({"sync_each_batch": True, "sync_with_dataloader": False},
         {"sync_each_batch": True, "sync_with_dataloader": False}),
    ],
)  # fmt: skip
def test_options_of_accumulation_that_differ_are_kept(given, expected, tmp_path):
    config = {} if given is None else {"accelerator_config": {"gradient_accumulation_kwargs": given}}
    state = facade(tmp_path, **config).gradient_state
    assert state.plugin_kwargs == {"num_steps": 1} | expected
    assert (state.num_steps, state.sync_with_dataloader) == (1, expected.get("sync_with_dataloader", True))
    state.num_steps = 4
    assert state.plugin_kwargs["num_steps"] == 4


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (None, (False, False, -1)),
        (SimpleNamespace(), (True, False, -1)),
        (SimpleNamespace(end_of_dataloader=True, remainder=3), (True, True, 3)),
    ],
)
def test_the_position_within_the_data(loader, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(Facade, "loader", loader)
    state = facade(tmp_path).gradient_state
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == expected


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", ["NO", "DEEPSPEED"])
@pytest.mark.parametrize("by_engine", [True, False])
def test_a_loss_is_divided_by_the_scripts_own_accumulation(steps, kind, by_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(Facade, "distributed_type", kind)
    accelerator, told = facade(tmp_path), []
    accelerator.gradient_accumulation_steps = steps
    accelerator.run_backward = (lambda loss, **options: told.append((loss.item(), options))) if by_engine else None
    weight = torch.ones(1, requires_grad=True)
    accelerator.backward((weight * 8).sum(), retain_graph=True)
    divided = 8 / steps if kind == "NO" else 8
    assert told == ([(divided, {"retain_graph": True})] if by_engine else [])
    assert by_engine or weight.grad.item() == divided


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("wrapping", ["plain", "compiled", "ddp", "data parallel", "ddp of a compiled one"])
def test_wrappers_come_off(keeps, wrapping, tmp_path):
    model = nn.Linear(1, 1)
    accelerate_facade.wrap_forward(model, "bf16-mixed", "cpu")
    compiled = SimpleNamespace(_orig_mod=model)

    def around(kind, inner):
        made = kind.__new__(kind)
        nn.Module.__init__(made)
        made.__dict__["module"] = inner
        return made

    given = {
        "plain": model, "compiled": compiled, "ddp": around(DistributedDataParallel, model),
        "data parallel": around(nn.DataParallel, model), "ddp of a compiled one":
        around(DistributedDataParallel, compiled),
    }[wrapping]  # fmt: skip
    assert facade(tmp_path).unwrap_model(given, keep_fp32_wrapper=keeps) is model
    assert ("forward" in vars(model)) is keeps
