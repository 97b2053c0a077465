"""Which modules FSDP shards by themselves, as the plan names them, and over which mesh; what a strategy asks for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from torch import nn

from hf_compat.engine import strategies
from hf_compat.engine.strategies import _parts, gathering_method
from hf_compat.errors import ArgumentError
from hf_compat.interop.deepspeed import compile_engine, gathering, sharing_sequences
from hf_compat.runtime import launch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 3), nn.Linear(3, 4, bias=False)  # 9 and 12 parameters


class Net(nn.Module):
    def __init__(self, named=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(4, 1)  # 5
        if named is not None:
            self._no_split_modules = named


def names(model, **facts):
    plan = SimpleNamespace(**{"wrap": "classes", "wrap_classes": (), "min_num_params": 0, **facts})
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(module)] for module in _parts(model, plan)]


@pytest.mark.parametrize(
    ("least", "parts"),
    [
        (0, ["last", "blocks.1.outer", "blocks.1.inner", "blocks.1", "blocks.0.outer", "blocks.0.inner", "blocks.0"]),
        (5, ["last", "blocks.1.outer", "blocks.1.inner", "blocks.0.outer", "blocks.0.inner"]),
        (9, ["blocks.1.outer", "blocks.1.inner", "blocks.0.outer", "blocks.0.inner"]),
        (10, ["blocks.1.outer", "blocks.0.outer"]),
        (13, ["blocks.1", "blocks.0"]),
        (21, ["blocks.1", "blocks.0"]),
        (22, []),
    ],
)
def test_by_size_what_is_large_enough_without_its_parts(least, parts):
    assert names(Net(), wrap="size", min_num_params=least) == parts


def test_by_class_those_that_the_plan_or_the_model_names():
    assert names(Net(), wrap="none", wrap_classes=("Block",)) == []
    assert names(Net()) == names(Net([])) == []
    assert names(Net(["Block"])) == names(Net(), wrap_classes=("Block",)) == ["blocks.1", "blocks.0"]
    assert names(Net(["Block"]), wrap_classes=("Linear",))[0] == "last"
    with pytest.raises(ArgumentError, match=r"wraps \['Layer'\](.|\n)*its classes are Block, Linear\."):
        names(Net(), wrap_classes=("Block", "Layer"))


def test_a_method_of_a_whole_model_is_its_own():
    model = Net()
    with gathering_method(model, "get_submodule") as method:
        assert method("last") is model.last
    assert "get_submodule" not in vars(model)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_method_of_a_sharded_model_gathers_meanwhile(is_replaced, monkeypatch):
    model, own = Net(), {"get_submodule": "own"} if is_replaced else {}
    vars(model).update(own)
    monkeypatch.setattr(strategies, "FSDPModule", Net)
    monkeypatch.setattr(
        strategies, "register_fsdp_forward_method", lambda one, name: vars(one).update({name: (id(one), name)})
    )
    for error in (None, ValueError):
        with contextlib.suppress(ValueError), gathering_method(model, "get_submodule") as method:
            assert method == (id(model), "get_submodule")
            if error is not None:
                raise error
        assert {name: value for name, value in vars(model).items() if name == "get_submodule"} == own


@pytest.mark.parametrize(
    ("world_size", "per_node", "hybrid", "expected"),
    [
        (8, 2, True, ((4, 2), ("replicate", "data_parallel"))),
        (8, 2, False, ((8,), ("data_parallel",))),
        (2, 2, True, ((2,), ("data_parallel",))),
    ],
)
def test_a_hybrid_mesh_has_an_axis_of_nodes(monkeypatch, world_size, per_node, hybrid, expected):
    asked = []
    monkeypatch.setattr(
        strategies, "init_device_mesh", lambda device, shape, mesh_dim_names: asked.append((shape, mesh_dim_names))
    )
    strategies.shard_mesh.cache_clear()
    strategies.shard_mesh("cpu", world_size, per_node, hybrid)
    strategies.shard_mesh.cache_clear()
    assert asked == [expected]


class _Engine:
    def __init__(self):
        self.is_compiled, self.asked = False, []

    def compile(self, backend, compile_kwargs):
        self.is_compiled = True
        self.asked.append((backend, compile_kwargs))


def test_an_engine_compiles_once_with_the_keywords_of_torch():
    engine = _Engine()
    for _ in range(2):
        compile_engine(engine, {"backend": "eager", "mode": "max-autotune", "dynamic": True})
    assert engine.asked == [("eager", {"mode": "max-autotune", "dynamic": True})]


def test_the_environment_of_a_launcher_says_what_the_launch_says(monkeypatch):
    for name, value in {"MASTER_ADDR": "node7", "MASTER_PORT": "29123"}.items():
        monkeypatch.setitem(launch.environment, name, value)
    facts = SimpleNamespace(world_size=8, process_index=5, local_process_index=1, node_rank=2)
    found = strategies.LaunchedEnvironment(facts)
    assert (found.main_address, found.main_port) == ("node7", 29123)
    found.set_world_size(3)
    found.set_global_rank(2)
    assert (found.world_size(), found.global_rank(), found.local_rank(), found.node_rank()) == (8, 5, 1, 2)
    assert found.creates_processes_externally and not found.detect()


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_in_parts_is_gathered_by_an_engine_for_a_while(monkeypatch, fails):
    done, net, config = [], Net(), {"train_batch_size": 8, "zero_optimization": {"stage": 3}}

    def initialize(model, config):
        done.append((model, config))
        return SimpleNamespace(destroy=lambda: done.append("destroyed")), "others"

    monkeypatch.setattr("deepspeed.initialize", initialize)
    with pytest.raises(KeyError) if fails else contextlib.nullcontext(), gathering(net, config):
        done.append("runs")
        if fails:
            raise KeyError
    assert done == [(net, {"zero_optimization": {"stage": 3}}), "runs", "destroyed"] and len(config) == 2


@pytest.mark.parametrize("length", [None, 16])
@pytest.mark.parametrize("attention", [None, "flex_attention"])
@pytest.mark.parametrize("fails", [False, True])
def test_sequences_are_shared_until_the_training_ends(monkeypatch, length, attention, fails):
    from deepspeed.runtime.sequence_parallel import parallel_state_sp, ulysses_sp
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    released, given = [], []
    own = ALL_ATTENTION_FUNCTIONS["sdpa" if attention is None else attention]
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))

    def register(model, **options):
        given.append((model, options))
        ALL_ATTENTION_FUNCTIONS[options["core_attn_implementation"]] = "theirs"
        return "groups"

    monkeypatch.setattr(ulysses_sp.UlyssesSPAttentionHF, "register_with_transformers", register)
    monkeypatch.setattr(parallel_state_sp, "_release_sequence_parallel_groups", lambda: released.append(True))
    monkeypatch.setattr(groups, "mpu", "before", raising=False)
    with (
        pytest.raises(KeyError) if fails else contextlib.nullcontext(),
        sharing_sequences(model, 2, 4, length, attention) as found,
    ):
        assert found == "groups" and not released
        if fails:
            raise KeyError
    name = attention or "sdpa"
    assert ALL_ATTENTION_FUNCTIONS[name] is own and released == [True] and groups.mpu is None
    assert given == [
        (model, {"core_attn_implementation": name, "sequence_parallel_size": 2, "micro_batch_size": 4,
                 "seq_length": length, "seq_length_is_variable": length is None, "disable_in_eval": True})
    ]  # fmt: skip
