"""What the Trainer loads of a checkpoint, and what it tells of it, with small objects in the place of a training."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_compat import TrainerControl
from hf_compat.errors import CheckpointError, CheckpointMismatch
from hf_compat.trainer_methods import checkpoints as methods
from hf_compat.trainer_methods.checkpoints import CheckpointMethods


@pytest.fixture
def told(monkeypatch):
    said = []
    for level in ("warning", "info"):
        monkeypatch.setattr(methods.shared_logger, level, said.append)
    monkeypatch.setattr(methods, "warn_user", said.append)
    return said


@pytest.mark.parametrize(
    ("strategy", "ours", "peft", "callbacks", "indexed", "can"),
    [
        ("fsdp2", True, False, [], True, True),
        ("ddp", True, False, [], True, False),
        ("fsdp2", False, False, [], True, False),
        ("fsdp2", True, True, [], True, False),
        ("fsdp2", True, False, ["c"], True, False),
        ("fsdp2", True, False, [], False, False),
    ],
)
def test_when_shards_are_loaded_later(strategy, ours, peft, callbacks, indexed, can, monkeypatch):
    monkeypatch.setattr(methods, "is_peft_model", lambda model: peft)
    monkeypatch.setattr(methods, "Contents", lambda folder: SimpleNamespace(find=lambda name: "p" if indexed else None))
    own = SimpleNamespace(
        _model_state=SimpleNamespace(model=nn.Linear(1, 1)), _callbacks=SimpleNamespace(lightning=callbacks),
        _plan=SimpleNamespace(of=lambda args, model: SimpleNamespace(strategy=strategy)), args=None, model=None,
        _load_from_checkpoint=CheckpointMethods._load_from_checkpoint if ours else (lambda folder: None),
    )  # fmt: skip
    assert CheckpointMethods._can_load_shards_later(own, "c") is can


@pytest.mark.parametrize("name", ["_load_from_checkpoint", "_load_best_model", None])
def test_an_override_loads_whole_weights(name):
    own = SimpleNamespace(_model_state=SimpleNamespace(taking_whole=lambda: "whole"))
    for one in ("_load_from_checkpoint", "_load_best_model"):
        setattr(own, one, getattr(CheckpointMethods, one) if one != name else lambda *_: None)
    found = CheckpointMethods._loading_whole_weights(own)
    assert (found == "whole") is (name is not None) and (name is not None or isinstance(found, contextlib.nullcontext))


class Tied(nn.Module):
    def __init__(self, ignored=None):
        super().__init__()
        self.a = nn.Linear(1, 1, bias=False)
        self.b = nn.Linear(1, 1)
        self.b.weight = self.a.weight
        if ignored is not None:
            self._keys_to_ignore_on_save = ignored


@pytest.mark.parametrize(
    ("missing", "unexpected", "ignored", "left"),
    [
        ([], [], None, []),
        (["b.bias"], [], None, ["b.bias"]),
        (["b.weight"], [], None, []),
        (["b.weight", "b.bias", "a.weight"], [], None, ["a.weight", "b.bias"]),
        (["b.bias"], [], ["b.bias"], []),
        (["b.bias"], [], [], ["b.bias"]),
        ([], ["c"], None, []),
        (["b.bias"], ["c"], None, ["b.bias"]),
    ],
)
def test_weights_that_are_not_loaded_are_told(missing, unexpected, ignored, left, told):
    own = SimpleNamespace(accelerator=SimpleNamespace(unwrap_model=lambda model: model), model=Tied(ignored))
    result = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    CheckpointMethods._issue_warnings_after_load(own, result)
    assert own._weights_not_loaded == left and len(told) == bool(left) + bool(unexpected)
    assert not left or str(left) in told[0]
    assert not unexpected or "unexpected keys" in told[-1]


@pytest.mark.parametrize("given", [None, "wrapped", "another"])
@pytest.mark.parametrize(("peft", "whole"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("partitioned", [False, True])
def test_which_weights_are_loaded(given, peft, whole, partitioned, monkeypatch):
    done, model, other = [], nn.Linear(1, 1), nn.Linear(1, 1)
    model.bias.requires_grad = False
    monkeypatch.setattr(methods, "is_peft_model", lambda one: peft)
    monkeypatch.setattr(methods, "holds_whole_model", lambda folder, one: whole)
    monkeypatch.setattr(methods, "is_partitioned", lambda one: partitioned)
    monkeypatch.setattr(
        methods, "load_adapters", lambda one, folder: done.append(("adapters", one, folder)) or ["left"]
    )
    monkeypatch.setattr(methods, "make_model_state", lambda one: state("made"))

    @contextlib.contextmanager
    def whole_for_a_while(parameters):
        done.append(("whole", len(parameters)))
        yield

    def state(name):
        return SimpleNamespace(load_weights=lambda folder: done.append((name, folder)) or "result")

    monkeypatch.setattr(methods, "whole_for_a_while", whole_for_a_while)
    own = SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda one: one), model=model, model_wrapped="wrapped",
        _model_state=state("own"), _issue_warnings_after_load=lambda result: done.append(result),
    )  # fmt: skip
    target = {None: model, "wrapped": "wrapped", "another": other}[given]
    if given == "wrapped" and peft and not whole:
        return_value = pytest.raises(AttributeError)  # the text has no parameters
    else:
        return_value = contextlib.nullcontext()
    with return_value:
        CheckpointMethods._load_from_checkpoint(own, "c", None if given is None else target)
    if peft and not whole:
        assert given == "wrapped" or own._weights_not_loaded == ["left"]
        trained = 1 if target is model else 2
        assert given == "wrapped" or done == [*[("whole", trained)] * partitioned, ("adapters", target, "c")]
    else:
        assert done == [("made" if given == "another" else "own", "c"), "result"]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("has", [False, True])
@pytest.mark.parametrize("error", [None, CheckpointMismatch("of another model"), CheckpointError("broken")])
def test_the_best_model_is_loaded(there, has, error, told, tmp_path, monkeypatch):
    done, best = [], tmp_path / "checkpoint-2"
    if there:
        best.mkdir()

    def load(name):
        def run(folder):
            done.append((name, folder))
            if error is not None:
                raise error

        return run

    monkeypatch.setattr(methods, "log_line", lambda text, otherwise: None)
    monkeypatch.setattr(methods, "has_weights", lambda path: has)
    monkeypatch.setattr(
        methods, "behaviour_of", lambda one: SimpleNamespace(to_evaluation=lambda: done.append("averaged"))
    )
    own = SimpleNamespace(
        state=SimpleNamespace(best_model_checkpoint=str(best), best_metric=1.0), optimizer="o",
        _saver=SimpleNamespace(background=SimpleNamespace(wait=lambda: done.append("waited"))),
        _load_known_weights=load("known"), _load_from_checkpoint=load("own"), args=SimpleNamespace(output_dir="out"),
    )  # fmt: skip
    with pytest.raises(CheckpointError) if there and error is not None else contextlib.nullcontext() as caught:
        CheckpointMethods._load_best_model(own)
    assert done == ["waited", *["averaged", ("known" if has else "own", str(best))] * there]
    assert len(told) == (not there)
    if there and error is not None:
        assert (caught.value is error) is isinstance(error, CheckpointMismatch)
        assert isinstance(error, CheckpointMismatch) or "cannot load the best checkpoint" in str(caught.value)


@pytest.mark.parametrize("scaler", [None, "scaler"])
@pytest.mark.parametrize("checkpoint", [None, "c"])
@pytest.mark.parametrize("has", [False, True])
def test_a_scalers_state_is_loaded_if_there_is_one(scaler, checkpoint, has, monkeypatch):
    done = []
    monkeypatch.setattr(
        methods, "Contents", lambda folder: SimpleNamespace(find=lambda name: f"{folder}/{name}" if has else None)
    )
    monkeypatch.setattr(methods, "read_torch_file", lambda path: ("read", path))
    held = scaler and SimpleNamespace(load_state_dict=done.append)
    CheckpointMethods._load_scaler(SimpleNamespace(accelerator=SimpleNamespace(scaler=held)), checkpoint)
    assert done == [("read", "c/scaler.pt")] * bool(scaler and checkpoint and has)


@pytest.mark.parametrize(
    ("checkpoint", "of_run", "rng", "stored", "written"),
    [
        ("c", "c", "run's", "stored", "run's"),
        ("c", "c", None, "stored", "stored"),
        ("c", "other", "run's", "stored", "stored"),
        ("c", "c", None, None, None),
        (None, None, "run's", "stored", "run's"),
        (None, None, None, "stored", None),
    ],
)
def test_which_random_states_are_set(checkpoint, of_run, rng, stored, written, told, monkeypatch):
    done = []
    monkeypatch.setattr(methods, "write_rng", done.append)
    monkeypatch.setattr(
        methods, "read_random_states", lambda folder, rank, ranks: stored if (rank, ranks) == (1, 2) else None
    )
    run = SimpleNamespace(checkpoint=of_run, start=SimpleNamespace(rng=rng))
    own = SimpleNamespace(_run=run, args=SimpleNamespace(process_index=1, world_size=2))
    CheckpointMethods._load_rng_state(own, checkpoint)
    assert done == ([] if written is None else [written])
    assert len(told) == (checkpoint is not None and written is None)


class Keeps:
    def __init__(self, value=0):
        self.value = value

    @classmethod
    def from_state(cls, state):
        return cls(**state["args"])


def restoring(stored, callbacks, restores=True, first=True):
    return SimpleNamespace(
        args=SimpleNamespace(restore_callback_states_from_checkpoint=restores),
        callback_handler=SimpleNamespace(callbacks=callbacks), control=TrainerControl(),
        state=SimpleNamespace(stateful_callbacks=stored), is_world_process_zero=lambda: first,
        _tell_of_callback_states=lambda: callbacks.append("told"),
    )  # fmt: skip


def test_states_of_callbacks_are_restored(told):
    first, second, other = Keeps(1), Keeps(2), object()
    state = {"args": {"should_save": True}, "attributes": {}}
    stored = {
        "Keeps": [{"args": {"value": 5}}, {"args": {"value": 6}}], "Gone": {"args": {}}, "Lost": [],
        "TrainerControl": state,
    }  # fmt: skip
    own = restoring(stored, [first, other, second])
    CheckpointMethods._load_callback_state(own)
    kept = own.callback_handler.callbacks
    assert kept[0] is other and [one.value for one in kept[1:]] == [5, 6] and own.control.should_save is True
    assert told == ["The checkpoint has states of missing callbacks: Gone, Lost."]


def test_states_that_are_not_restored_are_looked_at():
    callbacks = [Keeps(1)]
    CheckpointMethods._load_callback_state(restoring({"Keeps": {"args": {"value": 5}}}, callbacks, restores=False))
    assert callbacks[0].value == 1 and callbacks[1:] == ["told"]


@pytest.mark.parametrize(
    ("stored", "now", "said"),
    [
        ({}, {}, []),
        ({"A": {"attributes": {"x": 1}}}, {"A": {"attributes": {"x": 1}}}, []),
        ({"A": {"attributes": {"x": 1}}}, {"A": {"attributes": {"x": 2}}}, ["A.x is 2 (it was 1)"]),
        ({"A": {"attributes": {"x": 1}}}, {"A": {"attributes": {}}}, ["A.x is None (it was 1)"]),
        ({"A": {"attributes": {}}}, {"A": {"attributes": {"x": 2}}}, []),
        ({"A": {"attributes": {"x": 1}}}, {}, []),
        ({"A": {}}, {"A": {}}, []),
        (
            {"A": [{"attributes": {"x": 1}}, {"attributes": {"x": 2}}]},
            {"A": [{"attributes": {"x": 1}}, {"attributes": {"x": 3}}]},
            ["A.x is 3 (it was 2)"],
        ),
        ({"A": [{"attributes": {"x": 1}}]}, {"A": {"attributes": {"x": 2}}}, ["A.x is 2 (it was 1)"]),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_states_that_begin_anew_are_told(stored, now, said, first, told, monkeypatch):
    monkeypatch.setattr(methods, "export_states", lambda callbacks: now)
    CheckpointMethods._tell_of_callback_states(restoring(stored, [], first=first))
    assert len(told) == (bool(said) and first) and all(part in told[0] for part in said if first)


@pytest.mark.parametrize(
    ("best", "prefix", "expected"),
    [(None, "checkpoint", [1, 2, 3]), (1, "checkpoint", [2, 1, 3]), (3, "checkpoint", [1, 2, 3]), (2, "other", [])],
)
def test_checkpoints_are_sorted_as_in_4_57(best, prefix, expected):
    paths = [f"out/checkpoint-{number}" for number in (1, 2, 3)]
    asked = []
    own = SimpleNamespace(
        args=SimpleNamespace(output_dir="out"),
        state=SimpleNamespace(global_step=3, best_model_checkpoint=best and paths[best - 1]),
        _saver=SimpleNamespace(in_rotation_order=lambda *what: asked.append(what) or list(paths)),
    )
    found = CheckpointMethods._sorted_checkpoints(own, checkpoint_prefix=prefix)
    assert found == [paths[number - 1] for number in expected] and asked == [("out", 3)]
    CheckpointMethods._sorted_checkpoints(own, "elsewhere")
    assert asked[-1] == ("elsewhere", 3)


@pytest.mark.parametrize("schedule", [None, "path"])
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize(
    ("lost", "listed", "level"), [(True, "as it is", 20), (True, None, 30), (False, "as it is", 30)]
)
def test_an_optimizer_that_a_checkpoint_lacks_is_told(schedule, loads, lost, listed, level, monkeypatch, caplog):
    done, optimizer = [], torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    monkeypatch.setattr(methods, "Contents", lambda folder: SimpleNamespace(find=lambda name: schedule))
    monkeypatch.setattr(
        methods, "behaviour_of", lambda one: SimpleNamespace(tell_of_resuming=lambda: done.append("told"))
    )
    monkeypatch.setattr(
        methods, "read_manifest", lambda folder: SimpleNamespace(files=["optimizer.pt"] if lost else None)
    )
    monkeypatch.setattr(methods, "listed_as_it_is", lambda folder: listed)
    monkeypatch.setattr(methods, "read_torch_file", lambda path: {"last_epoch": 3})
    monkeypatch.setattr(methods, "check_schedule", lambda *what: done.append(what[1]))
    own = SimpleNamespace(
        optimizer=optimizer, _model_state=SimpleNamespace(load_optimizer=lambda *_: loads), is_deepspeed_enabled=False,
        is_world_process_zero=lambda: False, lr_scheduler=SimpleNamespace(load_state_dict=done.append),
    )  # fmt: skip
    with caplog.at_level("INFO"):
        assert CheckpointMethods._load_optimizer_and_scheduler(own, None) is None and done == []
        CheckpointMethods._load_optimizer_and_scheduler(own, "c")
    is_loaded = schedule is not None and loads
    assert done == ["told"] * (schedule is not None) + [{"last_epoch": 3}] * (2 * is_loaded)
    assert [record.levelno for record in caplog.records] == ([] if is_loaded else [level])


@pytest.mark.parametrize(
    ("content", "count", "empty", "deepspeed", "lambdas", "expected"),
    [
        ({"base_lrs": [0.1, 0.1]}, 2, False, False, None, [0.1, 0.1]),
        ({"base_lrs": [0.1]}, 2, False, False, None, [0.5, 0.5]),  # one of all
        ({"base_lrs": [0.1, 0.2, 0.3]}, 2, False, False, None, [0.1, 0.2, 0.3]),
        ({"base_lrs": [0.1, 0.2, 0.3]}, 2, False, True, None, [0.5, 0.5]),
        ({"base_lrs": [0.1, 0.2, 0.3]}, 2, True, False, None, [0.5, 0.5]),
        ({"base_lrs": [0.1], "lr_lambdas": [{"a": 1}]}, 2, False, False, None, [0.1]),
        ({}, 2, False, False, [1, 2], None),
    ],
)
def test_rates_of_other_groups(content, count, empty, deepspeed, lambdas, expected, monkeypatch):
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(count)]
    groups = [
        {"params": [] if empty and place else [one], "initial_lr": 0.5, "lr": 0.25}
        for place, one in enumerate(parameters)
    ]
    seen, schedule = [], SimpleNamespace(base_lrs=[0.5] * count, load_state_dict=lambda state: seen.append(state))
    if lambdas is not None:
        schedule.lr_lambdas = lambdas
    monkeypatch.setattr(methods, "Contents", lambda folder: SimpleNamespace(find=lambda name: "path"))
    monkeypatch.setattr(methods, "read_torch_file", lambda path: dict(content))
    monkeypatch.setattr(methods, "check_schedule", lambda *_: None)
    monkeypatch.setattr(methods, "behaviour_of", lambda one: SimpleNamespace(tell_of_resuming=lambda: None))
    monkeypatch.setattr(methods, "tell_of_kept_options", lambda made, now, base: seen.append(base))
    own = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[*groups, {"params": ["of a callback"], "lr": 1.0}]),
        lr_scheduler=schedule,
        _model_state=SimpleNamespace(load_optimizer=lambda *_: True), is_deepspeed_enabled=deepspeed,
        is_world_process_zero=lambda: True,
    )  # fmt: skip
    CheckpointMethods._load_optimizer_and_scheduler(own, "c")
    base, state = seen
    assert tuple(base) == tuple(content.get("base_lrs", ())) and state.get("base_lrs") == expected
    changed = expected == [0.5, 0.5]
    assert state.get("_last_lr") == ([0.25, 0.25] if changed else None)
    if lambdas is not None:
        assert state["lr_lambdas"] == [None, None]
