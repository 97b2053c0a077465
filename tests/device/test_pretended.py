"""The pretended device itself: plain torch programs that have to work there, and those that have to fail."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers.pretended import RaceError, pretended_device


@pytest.fixture
def gpu():
    with pretended_device(count=4) as machine:
        yield machine


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


# What works -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.tensor([1.0, 2.0], device="cuda:0"),
        lambda: torch.as_tensor([1.0], device=torch.device("cuda")),
        lambda: torch.ones(2).cuda(),
        lambda: torch.ones(2).to(0),
        lambda: torch.ones(2).to("cuda", torch.float16),
        lambda: torch.ones(2).to(torch.zeros(1, device="cuda")),
        lambda: torch.ones(2, device="cuda").new_tensor([1.0]),
        lambda: torch.zeros_like(torch.ones(2, device="cuda")),
        lambda: torch.randperm(3, device="cuda"),
        lambda: nn.Parameter(torch.ones(2, device="cuda")),
    ],
)
def test_what_is_made_there_is_there(gpu, make):
    made = make()
    assert made.device == torch.device("cuda:0") and made.is_cuda and made.get_device() == 0
    assert made.cpu().device.type == "cpu" and made.to("cuda") is made


def test_a_context_says_where_tensors_are_made(gpu):
    with torch.device("cuda:1"):
        assert {torch.ones(1).device, torch.tensor(2.0).device, nn.Linear(1, 1).weight.device} == {
            torch.device("cuda:1")
        }
    with torch.cuda.device(2):
        assert torch.ones(1, device="cuda").device == torch.device("cuda:2")


@pytest.mark.parametrize("fused", [True, False])
def test_training_gives_the_numbers_of_the_cpu(fused):
    def train(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        for _ in range(3):
            model(torch.arange(8.0).reshape(2, 4).to(device)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().cpu()

    with pretended_device() as machine:
        there = train("cuda")
        assert machine.waits() == {"h2d": 5, "d2h": 1}  # two weights and three batches; clipping waits for nothing
    assert torch.equal(there, train("cpu"))


def test_gradients_go_back_through_copies(gpu):
    leaf = torch.ones(2, requires_grad=True)
    (leaf.cuda() * 3).to("cuda:1").cpu().sum().backward()
    assert leaf.grad.device.type == "cpu" and leaf.grad.tolist() == [3.0, 3.0]


def test_a_module_moves_with_type_and_ties(gpu):
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    model.to(dtype=torch.bfloat16, device="cuda")
    assert model[1].weight is model[0].weight and isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.dtype == torch.bfloat16 and model[0].weight.device == torch.device("cuda:0")
    assert {one.device for one in copy.deepcopy(model).parameters()} == {torch.device("cuda:0")}
    assert model.cpu()[0].weight.device.type == "cpu"


def test_autocast_computes_in_half_precision_there_and_only_there(gpu):
    model, inputs = nn.Linear(2, 2).cuda(), torch.ones(1, 2, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(inputs)
    assert out.dtype == torch.bfloat16 and model(inputs).dtype == torch.float32
    out.float().sum().backward()
    assert inputs.grad.device.type == "cuda"


def test_a_scaler_skips_what_overflows(gpu):
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(weight.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0, 1.0] and scaler.get_scale() == 2.0


def test_what_is_saved_comes_back_on_its_device(gpu):
    file = io.BytesIO()
    torch.save({"a": torch.ones(2, device="cuda:1"), "b": nn.Parameter(torch.ones(1).cuda()), "c": torch.ones(1)}, file)
    for options, places in (({}, ["cuda:1", "cuda:0", "cpu"]), ({"map_location": "cpu"}, ["cpu"] * 3)):
        file.seek(0)
        loaded = torch.load(file, weights_only=True, **options)
        assert [str(one.device) for one in loaded.values()] == places
    assert isinstance(loaded["b"], nn.Parameter)


def test_a_file_says_where_its_tensors_were(tmp_path):
    with pretended_device():
        torch.save(torch.ones(2, device="cuda"), tmp_path / "there.pt")
    with pytest.raises(RuntimeError, match="CUDA"):  # as on a machine without one
        torch.load(tmp_path / "there.pt", weights_only=True)
    assert torch.load(tmp_path / "there.pt", map_location="cpu", weights_only=True).tolist() == [1.0, 1.0]


def test_each_device_draws_from_its_own_generator(gpu):
    torch.manual_seed(3)
    host, state = torch.random.get_rng_state(), torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda").cpu()
    assert torch.equal(torch.random.get_rng_state(), host) and not torch.equal(torch.cuda.get_rng_state(), state)
    assert not torch.equal(torch.rand(3, device="cuda").cpu(), first)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda").cpu(), first)
    assert state.numel() == 16 and len(torch.cuda.get_rng_state_all()) == 4
    torch.manual_seed(3)
    assert torch.equal(torch.cuda.get_rng_state(), state) and torch.equal(torch.rand(3, device="cuda:1").cpu(), first)


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_pin(gpu, workers):
    loader = DataLoader(torch.arange(6.0), batch_size=2, pin_memory=True, num_workers=workers)
    for batch in loader:
        assert batch.is_pinned() and batch.cuda(non_blocking=True).device.type == "cuda"
    assert "wait:h2d" not in gpu.count


def test_memory_is_that_of_live_tensors(gpu):
    kept = torch.zeros(1000, device="cuda")
    views = [kept[:10], kept.t()]
    assert torch.cuda.memory_allocated() == 4000
    torch.zeros(500, device="cuda").add_(1)
    assert torch.cuda.memory_allocated() == 4000 and torch.cuda.max_memory_allocated() == 6000
    del kept, views
    assert torch.cuda.memory_allocated() == 0


def test_memory_of_an_autograd_graph_is_held(gpu):
    weight = nn.Parameter(torch.ones(100, device="cuda"))
    loss = (weight * 2).square().sum()
    assert torch.cuda.memory_allocated() >= 400 + 400 + 4
    loss.backward()
    del loss
    assert torch.cuda.memory_allocated() == 800  # weight and gradient


# What is waited for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "waits"),
    [
        (lambda x: x.sum().item(), {"item": 1}),
        (lambda x: bool(x.sum() > 0), {"item": 1}),
        (lambda x: x[x > 0], {"mask": 1}),
        (lambda x: x.nonzero(), {"nonzero": 1}),
        (lambda x: x.cpu(), {"d2h": 1}),
        (lambda x: x.tolist(), {"tolist": 1}),
        (lambda x: torch.equal(x, x), {"equal": 1}),
        (lambda x: (x * 2 + 1).sum(), {}),
        (lambda x: x.copy_(torch.ones(3)), {"h2d": 1}),
        (lambda x: x.to("cpu", non_blocking=True), {}),
        (lambda x: torch.cuda.synchronize(), {"synchronize": 1}),
        (lambda x: torch.where(torch.isfinite(x), x, 0), {}),
        (lambda x: torch.nn.functional.cross_entropy(x, x), {}),
        (lambda x: x.to("cuda:1"), {}),
        (lambda x: torch.cuda.current_stream().synchronize(), {"stream": 1}),
    ],
)
def test_waits_are_counted(gpu, act, waits):
    there = torch.ones(3, device="cuda")
    gpu.count.clear()
    act(there)
    assert gpu.waits() == waits


# What fails -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3) * x,
        lambda x: torch.cat([x, torch.ones(1)]),
        lambda x: x.numpy(),
        lambda x: __import__("numpy").asarray(x),
        lambda x: x + torch.ones(3, device="cuda:1"),
        lambda x: x.to("cuda:7"),
        lambda x: nn.Linear(3, 1)(x),
        lambda x: torch.stack([x, torch.ones(3)]),
        lambda x: x.pin_memory(),
        lambda x: nn.functional.embedding(torch.ones(2, dtype=torch.long), x[None]),
        lambda x: torch.cuda.set_rng_state(torch.random.get_rng_state()),
        lambda x: torch.ones(3).index_select(0, x.long()),
        lambda x: torch.ones(3)[x.long()],
    ],
)
def test_what_does_not_work_on_a_gpu_does_not_work_there(gpu, act):
    with pytest.raises((RuntimeError, TypeError)):
        act(torch.ones(3, device="cuda"))


def test_scalars_and_indices_of_the_host_may_be_used(gpu):
    there = torch.ones(3, device="cuda")
    assert (there * torch.tensor(2.0)).tolist() == [2.0] * 3
    assert there[torch.tensor([0, 2])].shape == (2,)


# Streams --------------------------------------------------------------------------------------------------------------


def test_a_copy_is_not_there_before_it_was_waited_for(gpu):
    there = torch.ones(3, device="cuda")
    host = torch.empty(3, pin_memory=True)
    host.copy_(there, non_blocking=True)
    with pytest.raises(RaceError, match="has not waited"):
        host.sum()
    with pytest.raises(RaceError):
        host.numpy()
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert host.tolist() == [1.0] * 3


def test_an_event_of_before_the_copy_does_not_help(gpu):
    there = torch.ones(3, device="cuda")
    event = torch.cuda.current_stream().record_event()
    host = there.to("cpu", non_blocking=True)
    event.synchronize()
    with pytest.raises(RaceError):
        host.tolist()
    torch.cuda.synchronize()
    assert host.tolist() == [1.0] * 3


def test_a_stream_that_does_not_wait_for_another_is_a_race(gpu):
    there, side = torch.ones(3, device="cuda").mul_(2), torch.cuda.Stream()
    with pytest.raises(RaceError, match="reads what another stream writes"), torch.cuda.stream(side):
        there + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        more = there + 1
    with pytest.raises(RaceError, match="writes what another stream reads"):
        there.zero_()
    torch.cuda.current_stream().wait_event(side.record_event())
    there.zero_()
    assert more.tolist() == [3.0] * 3


def test_memory_that_a_side_stream_reads_is_not_freed_under_it():
    def read_beside(record: bool) -> None:
        with pretended_device():
            there, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                there.to("cpu", non_blocking=True)
            if record:
                there.record_stream(side)
            del there

    read_beside(True)
    with pytest.raises(RaceError, match="freed"):
        read_beside(False)


def test_the_host_may_not_change_what_a_copy_reads():
    with pytest.raises(RaceError, match="still reading"), pretended_device():
        host = torch.ones(3).pin_memory()
        there = host.to("cuda", non_blocking=True)
        host.zero_()
        there.sum().item()


# Other names, and the end ---------------------------------------------------------------------------------------------


def test_nothing_is_left_behind():
    before = {name: getattr(torch, name) for name in ("tensor", "zeros", "manual_seed", "is_autocast_enabled")}
    methods = {name: vars(torch.Tensor).get(name) for name in ("to", "cpu", "numpy", "pin_memory")}
    with pretended_device():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert before == {name: getattr(torch, name) for name in before}
    assert methods == {name: vars(torch.Tensor).get(name) for name in methods}


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_other_kinds_have_their_own_names(kind):
    with pretended_device(kind):
        made = torch.ones(2, device=kind)
        assert made.device.type == kind and not made.is_cuda and not torch.cuda.is_available()
        assert torch.accelerator.current_accelerator().type == kind
        with torch.autocast(kind, dtype=torch.bfloat16):
            assert nn.Linear(2, 2).to(kind)(made).dtype == torch.bfloat16
