"""What each strategy and the precision plugin do of their own, as any rank, with stand-ins for the process group."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from hf_compat.engine import strategies
from hf_compat.engine.internals import InnerModelDDPStrategy, InnerModelDeepSpeedStrategy
from hf_compat.engine.strategies import (
    ForwardPrecision,
    HFDDPStrategy,
    HFDeepSpeedStrategy,
    HFFSDP2Strategy,
    HFMeshStrategy,
    HFSingleDeviceStrategy,
    LaunchedEnvironment,
    UpdateMechanics,
    autocast_of,
    move_autocast_to_forward,
    wrapped_model,
)
from hf_compat.errors import MissingPackage
from hf_compat.plan.fsdp import FsdpPlan
from hf_compat.runtime.launch import Launch

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def spying(*names, told, **values):
    """An object whose methods tell their names and arguments."""

    def method(name):
        return lambda *args: told.append((name, *args))

    return SimpleNamespace(**{name: method(name) for name in names}, **values)


# The precision plugin


def test_each_step_of_the_users_own_has_its_context():
    contexts = {name: contextlib.nullcontext(name) for name in STEPS}
    plugin = ForwardPrecision()
    methods = {name: getattr(plugin, f"{name.replace('training', 'train').replace('validation', 'val')}_context")
               for name in STEPS}  # fmt: skip
    assert {method().__enter__() for method in methods.values()} == {None}
    plugin.of_own_steps = contexts
    assert {name: method() for name, method in methods.items()} == contexts


class Scaler:
    """A gradient scaler that may skip a step."""

    def __init__(self, steps=True):
        self.steps, self.told = steps, []

    def scale(self, loss):
        return loss * 8

    def unscale_(self, optimizer):
        self.told.append("unscaled")

    def step(self, optimizer, **options):
        self.told.append(("step", options))
        return optimizer.step(**options) if self.steps else None

    def update(self):
        self.told.append("updated")

    def state_dict(self):
        return {"scale": 8}

    def load_state_dict(self, state):
        self.told.append(state)


class Steps(torch.optim.SGD):
    """Takes an option of a step, and gives it back."""

    def step(self, closure=None, again=None):
        super().step(closure)
        return again


@pytest.fixture
def optimizer(monkeypatch):
    monkeypatch.setattr(strategies, "call_hooks_before_step", lambda plugin, model, optimizer: model.append("hooks"))
    monkeypatch.setattr(LightningPrecision, "pre_backward", lambda self, loss, told: told.append("before") or loss)
    made = Steps([nn.Parameter(torch.ones(1))], lr=1.0)
    made.param_groups[0]["params"][0].grad = torch.ones(1)
    return made


@pytest.mark.parametrize("steps", [True, False])
def test_a_scaler_steps_or_skips(optimizer, steps):
    scaler, told = Scaler(steps), []
    plugin = ForwardPrecision("16-mixed", scaler, "cuda")
    assert (plugin.precision, plugin.device, plugin.step_was_skipped) == ("16-mixed", "cuda", False)
    assert plugin.pre_backward(torch.tensor(2.0), told) == 16
    plugin.unscale(optimizer)
    plugin.unscale(optimizer)
    options = {"again": 3.0}
    result = plugin.optimizer_step(optimizer, told, lambda: told.append("closure"), **options)
    assert told == ["before", "closure", "hooks"] and result == (3.0 if steps else None)
    assert scaler.told == ["unscaled", ("step", options), "updated"] and plugin.step_was_skipped is (not steps)
    plugin.unscale(optimizer)
    assert scaler.told[3:] == ["unscaled"] and not optimizer._optimizer_step_pre_hooks
    plugin.load_state_dict({"scale": 2})
    assert plugin.state_dict() == {"scale": 8} and scaler.told[-1] == {"scale": 2}


def test_without_a_scaler_the_optimizer_steps_itself(optimizer, monkeypatch):
    told, plugin = [], ForwardPrecision()
    plugin.unscale(optimizer)
    assert plugin.optimizer_step(optimizer, told, lambda: told.append("closure"), again=5.0) == 5.0
    assert told == ["closure", "hooks"] and plugin.state_dict() == {} and plugin.scaler is None
    plugin.load_state_dict({"scale": 2})
    assert (plugin.precision, plugin.device) == ("32-true", "cpu")


def test_an_engine_steps_in_place_of_the_optimizer(optimizer):
    told, plugin = [], ForwardPrecision()
    plugin.engine = spying("step", told=told)
    assert plugin.optimizer_step(optimizer, told, lambda: told.append("closure")) is None
    assert told == ["closure", "hooks", ("step",)] and optimizer.param_groups[0]["params"][0] == 1


@pytest.mark.parametrize(
    ("plugin", "dtype"),
    [
        (ForwardPrecision(), None),
        (ForwardPrecision("bf16-mixed"), torch.bfloat16),
        (ForwardPrecision("16-mixed"), torch.float16),
        (MixedPrecision("bf16-mixed", "cpu"), None),
    ],
)
def test_autocast_of_a_plugin(plugin, dtype):
    found = autocast_of(plugin, "cpu")
    assert getattr(found, "fast_dtype", None) == dtype and getattr(found, "device", "cpu") == "cpu"


@pytest.mark.parametrize(
    ("plugin", "precision", "is_replaced"),
    [
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed", True),
        (MixedPrecision("16-mixed", "cpu", Scaler()), "16-mixed", True),
        (ForwardPrecision("bf16-mixed"), "bf16-mixed", False),
        (type("Own", (MixedPrecision,), {})("bf16-mixed", "cpu"), None, False),
        (LightningPrecision(), None, False),
    ],
)
def test_mixed_precision_moves_to_the_forward_pass(plugin, precision, is_replaced):
    strategy, model = SimpleNamespace(precision_plugin=plugin), nn.Linear(1, 1)
    move_autocast_to_forward(strategy, model, "cpu", ["training_step"])
    found = strategy.precision_plugin
    assert (found is not plugin) is is_replaced and ("forward" in vars(model)) is (precision is not None)
    if precision is not None:
        assert type(found) is ForwardPrecision and found.precision == precision
        assert found.scaler is plugin.scaler and found.device == "cpu"
        assert list(found.of_own_steps) == ["training_step"]
        assert found.train_step_context().fast_dtype == strategies.DTYPES[precision] == model.forward.dtype


# Strategies


def of_kind(cls, told, module=None, root="cpu", fn=TrainerFn.FITTING, **values):
    """A strategy of a class without what its constructor needs, and a trainer in a stage."""
    made = cls.__new__(cls)
    accelerator = spying("setup", "setup_device", "teardown", told=told)
    vars(made).update(
        _accelerator=accelerator, _precision_plugin=spying("teardown", told=told), _lightning_module=module,
        _checkpoint_io=spying("teardown", told=told), _root_device=torch.device(root), **values,
    )  # fmt: skip
    return made, SimpleNamespace(state=SimpleNamespace(fn=fn))


@pytest.mark.parametrize("name", STEPS[:3])
def test_steps_are_the_modules_own_in_their_context(name):
    entered = []

    @contextlib.contextmanager
    def context():
        entered.append(name)
        yield
        entered.append("left")

    module = SimpleNamespace(**{name: lambda *args, **kwargs: (args, kwargs, list(entered))})
    made, _ = of_kind(HFSingleDeviceStrategy, [], module)
    plugin = ForwardPrecision()
    plugin.of_own_steps = {name: context()}
    made._precision_plugin = plugin
    assert getattr(made, name)(1, two=2) == ((1,), {"two": 2}, [name]) and entered == [name, "left"]


@pytest.mark.parametrize("has_accelerator", [True, False])
def test_the_end_leaves_the_model_where_it_is(has_accelerator):
    told = []
    made, _ = of_kind(HFSingleDeviceStrategy, told)
    if not has_accelerator:
        made._accelerator = None
    made.teardown()
    assert told == [("teardown",)] * (2 + has_accelerator)


@pytest.mark.parametrize(
    ("model", "moves"),
    [(SimpleNamespace(), True), (SimpleNamespace(hf_device_map={"": 0}), False), (None, True)],
)
def test_a_model_that_is_spread_over_devices_stays(model, moves, monkeypatch):
    moved = []
    monkeypatch.setattr(SingleDeviceStrategy, "model_to_device", lambda self: moved.append(self))
    made, _ = of_kind(HFSingleDeviceStrategy, [], SimpleNamespace() if model is None else SimpleNamespace(model=model))
    made.model_to_device()
    assert moved == [made] * moves


@pytest.mark.parametrize("fn", [TrainerFn.FITTING, TrainerFn.VALIDATING, TrainerFn.TESTING, TrainerFn.PREDICTING])
def test_ddp_wraps_the_model_for_a_fit_alone(fn, monkeypatch):
    told = []
    monkeypatch.setattr(InnerModelDDPStrategy, "setup", lambda self, trainer: told.append(("wrapped", trainer)))
    monkeypatch.setattr(HFDDPStrategy, "model_to_device", lambda self: told.append("moved"))
    monkeypatch.setattr(HFDDPStrategy, "setup_precision_plugin", lambda self: told.append("precision"))
    monkeypatch.setattr(HFDDPStrategy, "set_world_ranks", lambda self: told.append("ranks"))
    made, trainer = of_kind(HFDDPStrategy, told, fn=fn, _model=nn.Linear(1, 1))
    made.setup(trainer)
    is_fit = fn is TrainerFn.FITTING
    assert told == ([("wrapped", trainer)] if is_fit else [("setup", trainer), "moved", "precision"])
    told.clear()
    made.setup_distributed()
    assert told == ["ranks"] and made.pre_backward(None) is None and made.post_backward(None) is None
    made.teardown()
    assert made.model is None and told[1:] == [("teardown",)] * 3


def test_a_mesh_divides_the_data_and_leaves_the_model_as_it_is(monkeypatch):
    launch = Launch(process_index=1, local_process_index=1, world_size=4, local_world_size=4)
    environment, plugin, told = LaunchedEnvironment(launch), ForwardPrecision(), []
    monkeypatch.setattr(HFMeshStrategy, "root_device", torch.device("cpu"))
    monkeypatch.setattr(HFMeshStrategy, "set_world_ranks", lambda self: told.append("ranks"))
    made = HFMeshStrategy(environment, plugin)
    assert (made._data_parallel_size, made._tensor_parallel_size) == (4, 1) and not made.writes_shards
    assert made.cluster_environment is environment and made.precision_plugin is plugin
    made.accelerator = spying("setup_device", told=told)
    made.setup_environment()
    assert told == [("setup_device", torch.device("cpu")), "ranks"] and made.shard(None) is None


@pytest.mark.parametrize(
    ("plan", "own_mesh", "expected"),
    [
        (FsdpPlan(), None, ("made", "cpu", 8, 4, False)),
        (FsdpPlan(hybrid=True), None, ("made", "cpu", 8, 4, True)),
        (FsdpPlan(hybrid=True, shard_size=2), None, ("made", "cpu", 8, 2, True)),
        (FsdpPlan(state_dict_type="SHARDED_STATE_DICT"), "own", "own"),
        (FsdpPlan(cpu_offload=True), None, ("made", "cpu", 8, 4, False)),
    ],
)
def test_fsdp_shards_over_the_ranks_or_over_the_models_mesh(plan, own_mesh, expected, monkeypatch):
    launch = Launch(process_index=1, local_process_index=1, world_size=8, local_world_size=4, nodes=2)
    told, model = [], nn.Linear(1, 1)
    monkeypatch.setattr(HFMeshStrategy, "root_device", torch.device("cpu"))
    monkeypatch.setattr(ModelParallelStrategy, "model_to_device", lambda self: told.append("moved"))
    monkeypatch.setattr(strategies, "data_mesh", lambda one: own_mesh if one is model else "wrong")
    monkeypatch.setattr(strategies, "shard_mesh", lambda *args: ("made", *args))
    monkeypatch.setattr(strategies, "shard_model", lambda *args: told.append(args))
    made = HFFSDP2Strategy(plan, LaunchedEnvironment(launch), ForwardPrecision("bf16-mixed"))
    assert made.writes_shards is (plan.state_dict_type == "SHARDED_STATE_DICT")
    made.shard(model)
    assert told == [(model, plan, expected, "bf16-mixed")]
    made.model_to_device()
    assert told[1:] == ["moved"] * (not plan.cpu_offload)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("keeps_whole", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_parts_are_sharded_before_the_model(is_sharded, precision, keeps_whole, offloads, recomputes, monkeypatch):
    calls, wrapped = [], []
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    plan = FsdpPlan(
        wrap="class", wrap_classes=("Linear",), reshard_after_forward=not keeps_whole, cpu_offload=offloads,
        activation_checkpointing=recomputes,
    )  # fmt: skip
    monkeypatch.setattr(strategies, "FSDPModule", nn.Sequential if is_sharded else type("Other", (), {}))
    monkeypatch.setattr(strategies, "fully_shard", lambda module, **options: calls.append((module, options)))
    monkeypatch.setattr(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing",
        lambda module, check_fn: wrapped.extend(one for one in module.modules() if check_fn(one)),
    )
    strategies.shard_model(model, plan, "mesh", precision)
    if is_sharded:
        assert calls == wrapped == []
        return
    assert [module for module, _ in calls] == [model[2], model[0], model]
    assert wrapped == [model[0], model[2]] * recomputes
    half = {"32-true": None, "bf16-mixed": torch.bfloat16}[precision]
    for _, options in calls:
        policy = options["mp_policy"]
        assert options["mesh"] == "mesh" and options["reshard_after_forward"] is not keeps_whole
        assert (policy.param_dtype, policy.reduce_dtype) == (half, half and torch.float32)
        assert isinstance(options["offload_policy"], CPUOffloadPolicy) is offloads


class Engine:
    """What tells DeepSpeed's engine, and what a backward pass asks of it."""

    def __init__(self):
        self.told = []

    def backward(self, loss, **options):
        self.told.append((loss, options))

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.told.append(is_boundary)


@pytest.fixture(autouse=True)
def _knows_engine(monkeypatch):
    monkeypatch.setattr(strategies, "is_deepspeed_engine", lambda one: isinstance(one, Engine))


def ddp(model):
    made = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(made)
    made.module = model
    return made


def test_the_wrapper_that_forward_passes_call():
    model, other, engine = nn.Linear(1, 1), nn.Linear(1, 1), Engine()
    around = ddp(model)
    for wrapped, expected in ((None, model), (around, around), (ddp(other), model), (other, model), (engine, engine)):
        assert wrapped_model(SimpleNamespace(model=wrapped), model) is expected


def test_deepspeed_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingPackage, match=r"`deepspeed=…` needs(.|\n)*pip install deepspeed"):
        HFDeepSpeedStrategy()


@pytest.mark.parametrize(("root", "expected"), [("cpu", torch.device("cpu", 3)), ("cuda:1", torch.device("cuda:1"))])
def test_deepspeed_gets_a_device_with_an_index(root, expected, monkeypatch):
    told = []
    monkeypatch.setattr(InnerModelDeepSpeedStrategy, "root_device", torch.device(root))
    monkeypatch.setattr(HFDeepSpeedStrategy, "local_rank", 3)
    monkeypatch.setattr(HFDeepSpeedStrategy, "set_world_ranks", lambda self: told.append("ranks"))
    monkeypatch.setattr(strategies, "start_deepspeed", lambda device: told.append(("deepspeed", device)))
    made, _ = of_kind(HFDeepSpeedStrategy, told)
    assert made.root_device == expected
    made.setup_environment()
    assert told == [("setup_device", torch.device(root)), "ranks", ("deepspeed", torch.device(root))]


@pytest.mark.parametrize(
    ("fn", "shares", "configured", "groups"),
    [
        (TrainerFn.FITTING, True, True, ("model", 2, 4, 16, "sdpa")),
        (TrainerFn.FITTING, True, False, None),
        (TrainerFn.FITTING, False, True, None),
        (TrainerFn.VALIDATING, True, True, "none"),
    ],
)
def test_an_engine_is_made_for_a_fit_and_shares_sequences_meanwhile(fn, shares, configured, groups, monkeypatch):
    told = []

    @contextlib.contextmanager
    def sharing(*args):
        yield args
        told.append("shared")

    plan = SimpleNamespace(sp_size=2, length=16, attention="sdpa") if shares else None
    monkeypatch.setattr(strategies, "sharing_sequences", sharing)
    monkeypatch.setattr(HFDeepSpeedStrategy, "set_up_engine", lambda self, groups: ("engine", groups))
    monkeypatch.setattr(InnerModelDeepSpeedStrategy, "teardown", lambda self: told.append("torn"), raising=False)
    made, trainer = of_kind(
        HFDeepSpeedStrategy, told, SimpleNamespace(model="model"), fn=fn, sequence=plan,
        config={"train_micro_batch_size_per_gpu": 4} if configured else None, _shared=contextlib.ExitStack(),
    )  # fmt: skip
    made._precision_plugin = plugin = ForwardPrecision()
    made.setup(trainer)
    assert plugin.engine == (None if groups == "none" else ("engine", groups))
    assert told == [("setup", trainer)]
    made.teardown()
    assert ("shared" in told) is isinstance(groups, tuple)


# How updates are made


class Sharded(nn.Module):
    """Stands for a model that FSDP 2 has sharded."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def set_requires_gradient_sync(self, value):
        self.asked.append(("sync", value))

    def set_requires_all_reduce(self, value):
        self.asked.append(("all_reduce", value))


def mechanics(wrapped, processes=1, plugin=None, backward=None, of_strategy=None, config=None):
    accelerator = SimpleNamespace(num_processes=processes)
    model = SimpleNamespace(config=config or SimpleNamespace())
    steps = SimpleNamespace(model_wrapped=wrapped, args=None, model=model, accelerator=accelerator)
    return UpdateMechanics(steps, backward, plugin or ForwardPrecision(), of_strategy)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("wrapping", ["plain", "ddp", "lightning's ddp", "fsdp"])
def test_when_gradients_are_exchanged(processes, every, wrapping, monkeypatch):
    monkeypatch.setattr(strategies, "FSDPModule", Sharded)
    monkeypatch.setattr(strategies, "exchanges_every_micro_batch", lambda args: every)
    around, backward = ddp(nn.Linear(1, 1)), object()
    wrapped = {"ddp": around, "fsdp": Sharded()}.get(wrapping, nn.Linear(1, 1))
    of_strategy = around if wrapping == "lightning's ddp" else None
    made = mechanics(wrapped, processes, backward=backward, of_strategy=of_strategy)
    assert made.engine is None and made.backward is backward
    asked = wrapped.asked if wrapping == "fsdp" else []
    assert asked == [("sync", True), ("all_reduce", True)] * (wrapping == "fsdp")
    assert (made.exchange is not None) is (processes > 1 and not every and wrapping != "plain")
    if made.exchange is not None:
        made.exchange(False)
        assert asked[2:] == [("sync", False)] if wrapping == "fsdp" else around.require_backward_grad_sync is False


@pytest.mark.parametrize(("copies", "name"), [(1, "sync"), (2, "all_reduce"), (3, "all_reduce")])
def test_copies_of_a_loaded_model_exchange_late_and_its_shards_at_once(copies, name, monkeypatch):
    monkeypatch.setattr(strategies, "FSDPModule", Sharded)
    monkeypatch.setattr(strategies, "exchanges_every_micro_batch", lambda args: False)
    wrapped = Sharded()
    config = SimpleNamespace(distributed_config=SimpleNamespace(dp_replicate_size=copies))
    mechanics(wrapped, 2, config=config).exchange(True)
    assert wrapped.asked[2:] == [(name, True)]


@pytest.mark.parametrize("scaler", [None, "scaler"])
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("has_engine", [True, False])
def test_who_scales_gradients(scaler, is_own, has_engine):
    plugin = ForwardPrecision(scaler=scaler) if is_own else SimpleNamespace(scaler=scaler)
    wrapped = Engine() if has_engine else nn.Linear(1, 1)
    made = mechanics(wrapped, plugin=plugin)
    assert made._scaler == (scaler if is_own else None)
    assert made.scaling is (plugin if is_own and scaler and not has_engine else None)
    assert made.engine is (wrapped if has_engine else None)


def test_an_engine_runs_the_backward_pass_of_a_copy_of_the_loss():
    engine, loss = Engine(), torch.ones(1)
    made = mechanics(engine, processes=2)
    made.exchange(False)
    made.backward(loss, retain_graph=True)
    boundary, (given, options) = engine.told
    assert boundary is False and given is not loss and torch.equal(given, loss)
    assert options == {"scale_wrt_gas": False, "retain_graph": True}
