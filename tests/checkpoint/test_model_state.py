"""Each way of holding a model writes its state into a folder and reads it back, its own and the others'.

A process group of one process is enough for `fully_shard` and for DeepSpeed's engine; several processes are in
tests/distributed. `sharded/` was written by two processes under FSDP 2, by the version before `ModelState`.
"""

from __future__ import annotations

import contextlib
import copy
import enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import schedulefree
import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from helpers import toy
from helpers.parity.compare import same
from hf_compat.checkpoint import deepspeed_state
from hf_compat.checkpoint import model_state as model_states
from hf_compat.checkpoint.deepspeed_state import DeepSpeedState
from hf_compat.checkpoint.model_state import MeshState, PlainState, make_model_state
from hf_compat.checkpoint.reading import StoredTensor
from hf_compat.checkpoint.tensor_splits import TensorSplits
from hf_compat.checkpoint.zero_reader import ZeroStates
from hf_compat.errors import CheckpointError, CheckpointMismatch

SHARDED = Path(__file__).with_name("sharded")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch and DeepSpeed warn about their own insides


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of this process alone."""
    store = distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def classifier(seed):
    torch.manual_seed(seed)
    return toy.Classifier(dropout=0.0)


def loss_of(model):
    batch = torch.utils.data.default_collate(toy.rows(8))
    return model(**batch)["loss"]


def trained(model):
    """One update, so that the optimizer has a state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def plain(seed):
    return trained(classifier(seed))


def compiled(seed):
    return trained(torch.compile(classifier(seed), backend="eager"))


def sharded(seed):
    return trained(fully_shard(classifier(seed)))


def writer_of(model):
    """What `Trainer._save` does with weights."""

    def write(output_dir, state_dict=None):
        folder = Path(output_dir)
        folder.mkdir(exist_ok=True)
        weights = model.state_dict() if state_dict is None else state_dict
        if weights:
            save_file({name.replace("_orig_mod.", ""): w for name, w in weights.items()}, folder / "model.safetensors")

    return write


def write(state, model, optimizer, folder):
    state.write_weights(str(folder), writer_of(model), for_checkpoint=True)
    state.write_optimizer(str(folder), optimizer, is_writer=True)


def whole(model, optimizer):
    """Weights and optimizer state, whole, by position."""
    weights = {name.replace("_orig_mod.", ""): _whole(w) for name, w in model.state_dict().items()}
    states = [{k: _whole(v) for k, v in optimizer.state[p].items()} for p in model.parameters()]
    return weights, states


def _whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


WAYS = {"plain": plain, "compiled": compiled, "FSDP 2": sharded}


@pytest.mark.parametrize("reader", WAYS)
@pytest.mark.parametrize("writer", [*WAYS, "FSDP 2, shards"])
def test_each_way_reads_what_each_way_wrote(group, tmp_path, writer, reader):
    model, optimizer = WAYS[writer.removesuffix(", shards")](1)
    writes_shards = writer.endswith("shards")
    write(make_model_state(model, writes_shards=writes_shards), model, optimizer, tmp_path / "it")
    assert (tmp_path / "it" / "optimizer_0" / ".metadata").is_file() == writes_shards
    assert (tmp_path / "it" / "optimizer.pt").is_file() != writes_shards
    expected = whole(model, optimizer)

    other, its_optimizer = WAYS[reader](2)
    assert not same(whole(other, its_optimizer), expected)
    state = make_model_state(other)
    result = state.load_weights(str(tmp_path / "it"))
    assert not result.missing_keys and not result.unexpected_keys
    assert state.load_optimizer(str(tmp_path / "it"), its_optimizer)
    assert same(whole(other, its_optimizer), expected)


@pytest.mark.parametrize("reader", WAYS)
@pytest.mark.parametrize("writer", [*WAYS, "FSDP 2, shards"])
def test_a_parameter_without_a_gradient_has_no_state_afterwards_either(group, tmp_path, writer, reader):
    def made(way, seed):
        bare = classifier(seed)
        bare.pooler = nn.Linear(3, 3)  # nothing calls it
        return trained(fully_shard(bare) if way.startswith("FSDP 2") else bare)

    model, optimizer = made(writer, 1)
    write(make_model_state(model, writes_shards=writer.endswith("shards")), model, optimizer, tmp_path / "it")
    other, its_optimizer = made(reader, 2)
    assert make_model_state(other).load_optimizer(str(tmp_path / "it"), its_optimizer)
    assert same(whole(other, its_optimizer)[1], whole(model, optimizer)[1])
    assert its_optimizer.state.get(other.pooler.weight, {}) == {}


@pytest.mark.parametrize("way", ["plain", "FSDP 2"])
def test_a_schedule_free_state_is_read_but_for_a_sharded_model(group, tmp_path, way):
    def made(seed):
        model = fully_shard(classifier(seed)) if way == "FSDP 2" else classifier(seed)
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1)
        optimizer.train()
        loss_of(model).backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(1)
    write(make_model_state(model), model, optimizer, tmp_path / "it")
    other, its_optimizer = made(2)
    if way == "plain":
        assert make_model_state(other).load_optimizer(str(tmp_path / "it"), its_optimizer)
        return
    with pytest.raises(CheckpointError, match=r"(?s)AdamWScheduleFree cannot be loaded.*resume without `fsdp`"):
        make_model_state(other).load_optimizer(str(tmp_path / "it"), its_optimizer)


def test_a_sharded_model_saves_and_loads_itself_whole(group):
    expected = classifier(1)
    model, _ = sharded(2)
    with make_model_state(model).taking_whole():
        type(model)(dropout=0.0)  # torch's class would make one of its own
        model.inner.load_state_dict(expected.inner.state_dict())
        model.load_state_dict(expected.state_dict())
    assert type(model).__name__ == "FSDPClassifier"
    with make_model_state(model).giving_whole():
        assert type(model) is type(expected)
        assert same(model.state_dict(), expected.state_dict())
        assert same(model.inner.state_dict(), expected.inner.state_dict())
    assert hasattr(model.state_dict()["inner.weight"], "full_tensor")


def test_a_sharded_model_with_a_compiled_part_reads_plain_names(group, tmp_path):
    expected = classifier(1)
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    model = classifier(2)
    model.inner = torch.compile(model.inner, backend="eager")
    fully_shard(model)
    result = make_model_state(model).load_weights(str(tmp_path))
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(_whole(dict(model.named_parameters())["inner._orig_mod.weight"]), expected.inner.weight)


@pytest.mark.parametrize("way", ["plain", "FSDP 2"])
def test_shards_of_the_version_before_are_read(group, way):
    model, optimizer = WAYS[way](2)
    state = make_model_state(model)
    result = state.load_weights(str(SHARDED))
    assert not result.missing_keys and not result.unexpected_keys
    assert state.load_optimizer(str(SHARDED), optimizer)
    weights, states = whole(model, optimizer)
    assert same(weights, load_file(SHARDED / "weights.safetensors"))
    assert [float(values["step"]) for values in states] == [4.0] * 6


def test_weights_for_the_user_are_whole_whatever_checkpoints_hold(group, tmp_path):
    model, _ = sharded(1)
    MeshState(model, writes_shards=True).write_weights(str(tmp_path), writer_of(model), for_checkpoint=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_folder_without_an_optimizer_is_told(tmp_path):
    model, optimizer = plain(1)
    assert not PlainState(model).load_optimizer(str(tmp_path), optimizer)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        PlainState(model).load_weights(str(tmp_path))


def test_tied_weights_are_tied_again(tmp_path):
    source, target = toy.tiny_gpt2(), toy.tiny_gpt2()
    source.save_pretrained(tmp_path)
    target.lm_head.weight = nn.Parameter(target.lm_head.weight.detach().clone())
    PlainState(target).load_weights(str(tmp_path))
    assert target.lm_head.weight is target.transformer.wte.weight
    assert same(target.state_dict(), source.state_dict())


@pytest.fixture
def launched(group, monkeypatch):
    """What DeepSpeed asks of its launcher."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


def engine_around(model, stage):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, wrapped


def one_update(engine):
    loss = loss_of(engine)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


@pytest.mark.parametrize(
    ("stage", "python"), [(0, "this"), (1, "this"), (2, "this"), (3, "this"), (2, "3.11.0"), (3, "3.11.0")]
)
def test_deepspeeds_own_files(launched, tmp_path, monkeypatch, stage, python):
    if python == "3.11.0":
        monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, proto: (getattr, (type(self), self.name)))
    model = classifier(1)
    engine, optimizer = engine_around(model, stage)
    one_update(engine)
    state = make_model_state(model, engine)
    assert isinstance(state, DeepSpeedState)
    weights = {name: tensor.clone() for name, tensor in state.whole_weights().items()}
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in classifier(1).state_dict().items()
    }
    write(state, model, optimizer, tmp_path / "it")
    assert same(load_file(tmp_path / "it" / "model.safetensors"), weights)
    expected = [one_update(engine) for _ in range(3)]

    other = classifier(2)
    engine, optimizer = engine_around(other, stage)
    one_update(engine)
    again = make_model_state(other, engine)
    assert again.load_optimizer(str(tmp_path / "it"), optimizer)
    assert same(again.whole_weights(), weights)
    assert [one_update(engine) for _ in range(3)] == expected


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engines_model_reads_whole_weights(launched, tmp_path, stage):
    """The best model of a run is loaded while the engine still holds its parts."""
    expected = classifier(1).state_dict()
    save_file(expected, tmp_path / "model.safetensors")
    model = classifier(2)
    engine, _ = engine_around(model, stage)
    state = make_model_state(model, engine)
    result = state.load_weights(str(tmp_path))
    assert not result.missing_keys and not result.unexpected_keys
    assert same(state.whole_weights(), expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("unused", [False, True])
def test_an_engine_takes_over_the_state_of_a_whole_optimizer(launched, tmp_path, stage, unused):
    """The next update is that of the plain optimizer. A weight without a gradient has no state in the file."""
    model = classifier(1)
    if unused:
        model.unused = torch.nn.Parameter(torch.ones(3))
    model, optimizer = trained(model)
    optimizer.param_groups[0]["lr"] /= 4  # a schedule's, which the engine does not have
    write(PlainState(model), model, optimizer, tmp_path / "it")
    held = copy.deepcopy(model)
    engine, wrapped = engine_around(held, stage)
    state = make_model_state(held, engine)
    assert state.load_optimizer(str(tmp_path / "it"), wrapped)
    one_update(engine)
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    found = state.whole_weights()
    for name, weight in model.state_dict().items():
        if name != "unused":  # DeepSpeed gives it a gradient of zeros, so its decay differs
            torch.testing.assert_close(found[name], weight)


def test_an_engine_refuses_the_state_of_another_model(launched, tmp_path):
    model = classifier(1)
    model.more = torch.nn.Parameter(torch.ones(3))
    model, optimizer = trained(model)
    write(PlainState(model), model, optimizer, tmp_path / "it")
    held = classifier(2)
    engine, wrapped = engine_around(held, 1)
    with pytest.raises(CheckpointMismatch, match="state of 7 parameters, and this run trains 6"):
        make_model_state(held, engine).load_optimizer(str(tmp_path / "it"), wrapped)


def test_an_engine_refuses_an_optimizer_in_shards(launched, tmp_path):
    model, optimizer = sharded(1)
    write(make_model_state(model, writes_shards=True), model, optimizer, tmp_path / "it")
    held = classifier(2)
    engine, wrapped = engine_around(held, 2)
    with pytest.raises(CheckpointMismatch, match="shards of FSDP, which DeepSpeed cannot take"):
        make_model_state(held, engine).load_optimizer(str(tmp_path / "it"), wrapped)


def sized(*counts, **facts):
    return [
        SimpleNamespace(numel=lambda count=count: count, ds_tensor=SimpleNamespace(ds_numel=count)) for count in counts
    ]


@pytest.mark.parametrize(
    ("rank", "facts", "pieces"),
    [
        (0, {"stage2": 4, "offsets": [0, 3]}, [(0, 0, 3), (0, 3, 1)]),
        (1, {"stage2": 4, "offsets": [0, 3]}, [(4, 0, 0), (1, 0, 4)]),
        (0, {"stage3": 8}, [(0, 0, 3), (0, 3, 5)]),
        (2, {"stage3": 8}, [(6, 0, 3), (10, 3, 5)]),
        (0, {"stage2": 4}, None),
        (0, {"stage3": 8, "is_on_disk": True}, None),
        (0, {}, None),
    ],
)
def test_where_parameters_lie_in_the_flat_groups_of_deepspeed(monkeypatch, rank, facts, pieces):
    monkeypatch.setattr(deepspeed_state.distributed, "get_rank", lambda group: rank)
    parameters, zero = sized(3, 5), SimpleNamespace(dp_process_group=None, round_robin_bit16_groups=None)
    zero.round_robin_bit16_groups = [parameters]
    if "stage2" in facts:
        zero.single_partition_of_fp32_groups = [torch.zeros(facts["stage2"])]
    if "offsets" in facts:
        zero.round_robin_bit16_offsets = [facts["offsets"]]
    if "stage3" in facts:
        zero.fp32_partitioned_groups_flat = [torch.zeros(facts["stage3"])]
        if "is_on_disk" not in facts:
            zero.fp16_groups = [parameters]
    found = [group for _, group in deepspeed_state._flat_groups(zero)]
    assert found == ([] if pieces is None else [
        [deepspeed_state._Piece(parameter=one, begin=begin, place=place, length=length)
         for one, (begin, place, length) in zip(parameters, pieces, strict=True)]
    ])  # fmt: skip


def whole_state(shape=(2,), groups=((0,), (1,)), empty=0):
    return {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(shape), "flag": True}},
        "param_groups": [{"lr": 0.1, "params": [*one]} for one in groups] + [{"lr": 0.2, "params": []}] * empty,
    }


class OwnOptimizer:
    param_groups = ({}, {})


@pytest.mark.parametrize(
    ("changes", "facts", "told"),
    [
        ({}, {}, None),
        ({"empty": 1}, {}, None),
        ({"groups": ((0,), ()), "empty": 0}, {"count": 1}, None),
        ({}, {"is_of_stage3": True}, None),
        ({"shape": (1, 2)}, {}, "`exp_avg` of a with the shape"),
        ({"groups": ((0, 1), (2,))}, {}, "of 3 parameters, and this run trains 2"),
        ({"groups": ((0,),)}, {}, "of 1 parameters, and this run trains 2"),
        ({}, {"is_own": True}, "and this run's is OwnOptimizer"),
    ],
)
def test_the_state_of_a_whole_optimizer_goes_to_its_parameters(changes, facts, told):
    count = facts.get("count", 2)
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
    optimizer = OwnOptimizer() if facts.get("is_own") else torch.optim.AdamW([{"params": [one]} for one in parameters])
    zero = SimpleNamespace(optimizer=optimizer, fp16_groups=[parameters[:1], parameters[1:]])
    if not facts.get("is_of_stage3"):
        zero.bit16_groups, zero.fp16_groups = zero.fp16_groups, None
    names, splits = dict(zip(parameters, "ab", strict=False)), TensorSplits(None)
    state = whole_state(**changes)
    if told is not None:
        with pytest.raises(CheckpointMismatch, match=told):
            deepspeed_state._whole_states("it", state, zero, names, splits)
    else:
        found = deepspeed_state._whole_states("it", state, zero, names, splits)
        assert found.plain["a"] == {"step": torch.tensor(3.0), "flag": True} and set(found.by_name["a"]) == {"exp_avg"}
        assert found.plain.get("b") in ({}, None) and found.param_groups == [{"lr": 0.1}] * count
        assert found.by_name["a"]["exp_avg"].load().equal(torch.ones(2))


@pytest.mark.parametrize("is_split", [False, True])
def test_an_engine_takes_weights_values_and_counts(monkeypatch, is_split):
    class Splits:
        def __bool__(self):
            return is_split

        def part(self, name, whole, place):
            return whole * place if is_split else whole

    def stored(*values):
        return StoredTensor(name="", nbytes=0, load=lambda: torch.tensor(values))

    linked, model, step = [], nn.Linear(2, 1), torch.tensor(7.0)
    flat = torch.full((4,), 9.0)
    pieces = [
        deepspeed_state._Piece(parameter=model.weight, begin=1, place=0, length=1),
        deepspeed_state._Piece(parameter=model.bias, begin=0, place=2, length=1),
    ]
    zero = SimpleNamespace(optimizer=SimpleNamespace(state={}, param_groups=[{"lr": 1.0}]))
    engine = SimpleNamespace(optimizer=zero, module=model, global_steps=0)
    saved = ZeroStates(
        by_name={"weight": {"": stored(1.0, 2.0)}, "bias": {"": stored(3.0), "exp_avg": stored(4.0)}},
        plain={"weight": {}, "bias": {"step": step, "flag": True}},
        param_groups=[{"lr": 0.5}],
        counts={"global_steps": 8},
    )
    found = []
    for name, value in {
        "_flat_groups": lambda zero: found[0],
        "splits_of": lambda model: Splits(),
        "tensor_place": (lambda: 2) if is_split else None,
        "zero_states": lambda folder: saved,
    }.items():
        monkeypatch.setattr(deepspeed_state, name, value)
    for groups in ([], [(flat, pieces), (torch.zeros(0), [])]):
        found[:] = [groups]
        with pytest.raises(CheckpointMismatch, match="keeps its own elsewhere"):
            deepspeed_state.take_states("it", engine)
    found[:] = [[(flat, pieces)]]
    times = 2.0 if is_split else 1.0
    for _ in range(2):
        deepspeed_state.take_states("it", engine)
        values = zero.optimizer.state[flat]
        assert (flat / times).tolist() == [2.0, 0.0, 3.0, 0.0] and (values["exp_avg"] / times).tolist() == [0, 0, 4, 0]
        assert values["step"] == step and values["step"] is not step and values["flag"] is True
        assert (zero.optimizer.param_groups, engine.global_steps) == ([{"lr": 0.5}], 8)
        zero._link_all_hp_params = lambda: linked.append(1)
    assert linked == [1]
    zero.optimizer.param_groups = [{}, {}]
    with pytest.raises(CheckpointMismatch, match="other groups of them"):
        deepspeed_state.take_states("it", engine)


@pytest.mark.parametrize(
    ("own", "told", "has_groups"),
    [
        ([[0], [1]], 2, True),
        ([[0, 1]], 2, False),
        ([[0], [1]], 1, False),
        ([[0], [], [1]], 2, True),
        ([[0, 1], []], 1, True),
    ],
)
def test_the_groups_of_a_zero_checkpoint_are_those_of_the_optimizer(own, told, has_groups, monkeypatch):
    model, asked, loaded = nn.Linear(1, 1), [], []
    names, parameters = zip(*model.named_parameters(), strict=True)
    stored = SimpleNamespace(load=lambda: torch.ones(1))
    saved = SimpleNamespace(
        param_groups=[{"lr": float(place)} for place in range(told)], plain={name: {"step": 3} for name in names},
        by_name={name: {"exp_avg": stored, "": stored} for name in names},
        check=lambda folder, order, has_groups: asked.append((order, has_groups)) or check(has_groups),
    )  # fmt: skip

    def check(has_groups):
        if not has_groups:
            raise CheckpointMismatch("other groups")

    monkeypatch.setattr(model_states, "Contents", lambda folder: SimpleNamespace(find=lambda name: None))
    monkeypatch.setattr(model_states, "named_zero_folder", lambda contents: "zero")
    monkeypatch.setattr(model_states, "rank_files", lambda *_: ["file"])
    monkeypatch.setattr(model_states, "zero_states", lambda folder: saved)
    groups = [{"params": [parameters[place] for place in group], "lr": 9.0} for group in own]
    state = SimpleNamespace(model=model, set_optimizer_state=lambda path, whole, optimizer: loaded.append(whole))
    raised = contextlib.nullcontext() if has_groups else pytest.raises(CheckpointMismatch)
    with raised:
        assert model_states.TorchState.load_optimizer(state, "c", SimpleNamespace(param_groups=groups)) is True
    assert asked == [(list(names), has_groups)]
    if has_groups:
        (whole,) = loaded
        assert [group["params"] for group in whole["param_groups"]] == own
        assert whole["state"] == {0: {"step": 3, "exp_avg": torch.ones(1)}, 1: {"step": 3, "exp_avg": torch.ones(1)}}
        rates = iter(range(told))
        wanted = [float(next(rates)) if group or len(own) == told else 9.0 for group in own]
        assert [group["lr"] for group in whole["param_groups"]] == wanted


@pytest.mark.parametrize(("engine", "config", "gathers"), [(None, {}, True), (None, None, False), ("it", {}, False)])
def test_partitioned_weights_are_gathered_where_no_engine_does_it(engine, config, gathers, monkeypatch):
    asked = []
    gathering = lambda *words: asked.append(words) or contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(deepspeed_state, "gathering", gathering)
    model = nn.Linear(1, 1)
    with DeepSpeedState(model, engine).running(config):
        assert asked == ([(model, config)] if gathers else [])


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("is_parted", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_weights_are_given_and_taken_whole(is_split, is_parted, rank, monkeypatch):
    class Splits:
        def __bool__(self):
            return is_split

        def part(self, name, whole, place):
            return whole * 2 if (name, place) == ("weight", 1) else whole

        def gathered(self, name, part, place, group):
            return part + 1 if (place, group) == (1, "group") else part

    whole_ones = []

    @contextlib.contextmanager
    def whole_for_a_while(parameters):
        whole_ones.append(len(list(parameters)))
        yield

    for name, value in {
        "splits_of": lambda model: Splits(),
        "is_partitioned": lambda model: is_parted,
        "tensor_place": lambda: 1,
        "tensor_group": lambda: "group",
        "whole_for_a_while": whole_for_a_while,
    }.items():
        monkeypatch.setattr(deepspeed_state, name, value)
    monkeypatch.setattr(deepspeed_state.distributed, "get_rank", lambda: rank)
    model = nn.Sequential(nn.Linear(2, 1), nn.Tanh())[0]
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = {name: tensor + 1 if is_split else tensor for name, tensor in own.items()}
    state = DeepSpeedState(model, None)
    found = state.whole_weights()
    assert found.keys() == (set() if rank == 1 and (is_split or is_parted) else own.keys())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert whole_ones == ([2] if is_parted and not is_split else [])
    with state.giving_whole():
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert same(dict(model.state_dict()), own)
    whole_ones.clear()
    with state.taking_whole():
        model.load_state_dict({name: torch.full_like(tensor, 3.0) for name, tensor in own.items()})
    assert whole_ones == ([2] if is_parted and not is_split else [])
    assert model.weight.tolist() == [[6.0, 6.0] if is_split else [3.0, 3.0]] and model.bias.tolist() == [3.0]


@pytest.mark.parametrize("is_parted", [False, True])
def test_weights_are_set_a_module_at_a_time(is_parted, monkeypatch):
    whole_ones = []

    @contextlib.contextmanager
    def whole_for_a_while(parameters):
        whole_ones.append(len(list(parameters)))
        yield

    monkeypatch.setattr(deepspeed_state, "is_partitioned", lambda model: is_parted)
    monkeypatch.setattr(deepspeed_state, "whole_for_a_while", whole_for_a_while)
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
    weights = {
        name: torch.full(shape, 5.0) for name, shape in {"0.weight": (1, 1), "1.0.bias": (1,), "9.a": (1,)}.items()
    }
    missing, unexpected = DeepSpeedState(model, None).set_weights(weights)
    assert missing == ["0.bias", "1.0.weight", "2.weight", "2.bias"] and unexpected == ["9.a"]
    assert model[0].weight.item() == model[1][0].bias.item() == 5.0 != model[2].bias.item()
    assert whole_ones == ([2, 2] if is_parted else [])
