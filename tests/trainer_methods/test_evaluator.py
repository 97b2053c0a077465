"""The decisions around an evaluation, without one: its parts, its gathering, its Lightning trainer, its speed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_compat.engine.evaluation import WHOLE, EvaluationPart
from hf_compat.errors import SearchError
from hf_compat.hf.metrics import EvalLoopOutput
from hf_compat.trainer_methods import evaluator
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.trainer_methods.evaluator import Evaluator


def facade():
    return AcceleratorFacade.__new__(AcceleratorFacade)


def of_user(data):
    """Gather in another way."""


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize(
    ("own", "chosen", "kept", "used"),
    [
        ("ours", None, None, None),
        ("ours", of_user, "own", of_user),
        ("ours", "ours", "own", None),
        (of_user, None, of_user, None),
        (of_user, of_user, of_user, of_user),
    ],
)
def test_how_results_are_gathered(own, chosen, kept, used, as_objects, world_size, sharing, monkeypatch):
    ours = facade()
    accelerator = SimpleNamespace(
        gather="gather", gather_for_metrics=ours.gather_for_metrics if own == "ours" else own,
        rank_slice=SimpleNamespace(sharing=sharing),
    )  # fmt: skip
    args = SimpleNamespace(eval_use_gather_object=as_objects, world_size=world_size)
    host = SimpleNamespace(accelerator=accelerator, args=args)
    if chosen is not None:
        host.gather_function = ours.gather_for_metrics if chosen == "ours" else chosen
    monkeypatch.setattr(evaluator, "gather_objects", lambda data: [data + place for place in range(4)])
    monkeypatch.setattr(evaluator, "join_batches", list)
    gather, drops = Evaluator(host)._gather()
    if used is not None:
        assert gather is used and drops is False
    elif as_objects and world_size > 1:
        assert gather(10) == [10, 11, 12, 13][::sharing] and drops is True
    else:
        assert (gather, drops) == ("gather", True)
    # an override of the user's applies to one evaluation
    left = vars(host).get("gather_function")
    expected = {"own": accelerator.gather_for_metrics, None: None}.get(kept, kept)
    assert left is expected or left == expected


@pytest.mark.parametrize(
    ("metrics", "name", "found"),
    [
        (None, "a", None),
        ("one", "a", "one"),
        ({"a": 1, "None": 2}, "a", 1),
        ({"a": 1}, "b", None),
        ({"a": 1}, None, None),
    ],
)
def test_each_set_may_have_metrics_of_its_own(metrics, name, found):
    own = Evaluator(SimpleNamespace(compute_metrics=metrics))
    own._name = name
    assert own.compute_metrics == found


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b"], ["a", "b", "c"]])
@pytest.mark.parametrize("fails", [False, True])
def test_several_sets_are_the_parts_of_one_evaluation(names, fails, monkeypatch):
    told, seen = [], []
    monkeypatch.setattr(evaluator, "tell_of_nothing", lambda **values: told.append(values))

    def evaluate(eval_dataset, ignore_keys, metric_key_prefix):
        seen.append((eval_dataset, ignore_keys, metric_key_prefix, own._name, own._part))
        if fails:
            raise ValueError("in a set")
        return {f"{metric_key_prefix}_loss": len(seen)}

    own = Evaluator(SimpleNamespace(evaluate=evaluate))
    with pytest.raises(ValueError, match="in a set") if fails and names else contextlib.nullcontext():
        metrics = own.evaluate_each({name: name.upper() for name in names}, ["k"], "eval")
        assert metrics == {f"eval_{name}_loss": place for place, name in enumerate(names, 1)}
    assert own._name is None and own._part is WHOLE and told == ([] if names else [{"is_prediction": False}])
    for place, (dataset, keys, prefix, name, part) in enumerate(seen):
        assert (dataset, keys, prefix, name) == (names[place].upper(), ["k"], f"eval_{names[place]}", names[place])
        assert (part.is_first, part.is_last) == (place == 0, place == len(names) - 1)


@pytest.mark.parametrize(
    ("metrics", "samples", "size", "world", "batches", "begins"),
    [
        ({"eval_loss": 1.0}, 9, 4, 1, 3, 5.0),
        ({"eval_model_preparation_time": 2.0}, 8, 4, 1, 2, 7.0),
        ({"test_model_preparation_time": 2.0}, 9, 4, 2, 2, 5.0),
        (None, None, 4, 1, 0, 5.0),
    ],
)
def test_the_speed_of_an_evaluation(metrics, samples, size, world, batches, begins, monkeypatch):
    told = []
    monkeypatch.setattr(
        evaluator, "speed_metrics", lambda *place, **words: told.append((place, words)) or {"eval_runtime": 1}
    )
    args = SimpleNamespace(eval_batch_size=size, world_size=world)
    output = EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=samples)
    found = Evaluator(SimpleNamespace(args=args)).add_speed(output, "eval", 5.0)
    assert told == [(("eval", begins), {"num_samples": samples or 0, "num_steps": batches})]
    assert found["eval_runtime"] == 1 and (metrics is None or found is metrics)


class Plan(SimpleNamespace):
    def __hash__(self):
        return 0


def outside(monkeypatch, **values):
    """An evaluator whose Lightning trainers are numbers."""
    made = []
    monkeypatch.setattr(evaluator, "make_lightning_trainer", lambda host, plan, bridge: made.append(plan) or len(made))
    monkeypatch.setattr(evaluator, "make_module", lambda host, plan: "module")
    monkeypatch.setattr(evaluator, "HFBridge", lambda *_: Bridge())
    monkeypatch.setattr(evaluator.dataclasses, "replace", lambda plan, **changes: (plan, changes))
    host = SimpleNamespace(
        _run=SimpleNamespace(module=None), model="model", lightning_trainer=None, _lightning_options={}, _saver=None,
        _callbacks=SimpleNamespace(lightning=[]), args=SimpleNamespace(eval_strategy="no"),
        _model_state=SimpleNamespace(running=running),
    )  # fmt: skip
    vars(host).update(values)
    return Evaluator(host), host, made


RUNNING: list = []


@contextlib.contextmanager
def running(config):
    RUNNING.append(config)
    yield


class Bridge:
    def __init__(self):
        self.told = []

    def keep_requested_kwargs(self, keeps=True):
        self.told.append(keeps)


@pytest.mark.parametrize(
    ("change", "is_shared"),
    [
        ({}, True),
        ({"model": "another"}, False),
        ({"_run": SimpleNamespace(module=None)}, False),
        ({"_callbacks": SimpleNamespace(lightning=["callback"])}, False),
        ({"_lightning_options": {"logger": True}}, False),
        ({"plan": "another"}, False),
    ],
)
def test_a_trainer_serves_until_something_changes(change, is_shared, monkeypatch):
    own, host, made = outside(monkeypatch)
    plan, change = SimpleNamespace(strategy_options={}), dict(change)
    with own._outside_fit(plan) as first:
        assert own.kept is None and host.lightning_trainer == 1 and first.bridge.told == [True]
    assert own.kept is first and first.bridge.told == [True, False]
    other = SimpleNamespace(strategy_options={"a": 1}) if change.pop("plan", None) else plan
    vars(host).update(change)
    with own._outside_fit(other) as second:
        assert (second is first) is is_shared and len(made) == 2 - is_shared
    with pytest.raises(ValueError, match="within"), own._outside_fit(other) as third:
        raise ValueError("within")
    assert own.kept is None and third.bridge.told[-1] is False


@pytest.mark.parametrize("strategy", ["no", "steps"])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("config", [None, {"stage": 2}])
def test_the_trainer_of_an_evaluation(strategy, trains, config, monkeypatch):
    run, before = SimpleNamespace(module="module" if trains else None), list(RUNNING)
    own, host, made = outside(monkeypatch, args=SimpleNamespace(eval_strategy=strategy), _run=run)
    plan = SimpleNamespace(strategy_options={} if config is None else {"config": config})
    with own._outside_fit(plan) as kept:
        assert kept.trainer == 1 and kept.module == "module"
    assert made == [plan if strategy == "no" else (plan, {"validate_every_updates": 1})]
    assert host.lightning_trainer == (None if trains else 1)
    assert RUNNING[len(before) :] == ([] if config is None else [config])


class Ran:
    """Stands in for the run of an evaluation."""

    def __init__(self, host, model, loader, prefix, **options):
        self.model, self.loader, self.options, self.output = model, loader, options, None
        self.is_prediction = options["is_prediction"]

    def finish(self):
        return self


def evaluating(monkeypatch, **values):
    """An evaluator that runs nothing, and what it told of."""
    told, args = [], {
        "process_index": 0, "device": torch.device("cpu"), "fp16_full_eval": False, "bf16_full_eval": False,
        "eval_batch_size": 4, "eval_use_gather_object": False, "world_size": 1,
    } | values.pop("args", {})  # fmt: skip
    plan = SimpleNamespace(strategy=values.pop("strategy", "one_device"), precision="p", strategy_options={})
    host = SimpleNamespace(
        model=nn.Linear(2, 2), args=SimpleNamespace(**args), is_in_train=False, optimizer="optimizer",
        callback_handler=SimpleNamespace(), num_examples=len, compute_metrics=None,
        preprocess_logits_for_metrics="logits", _run=SimpleNamespace(module=None, lightning_trainer=None),
        _plan=SimpleNamespace(of=lambda args, model: plan, tell_in_evaluation=lambda *_: told.append("told")),
        _call_wrap_model=lambda training: told.append(("wrapped", training)),
        compiled=lambda model: ("compiled", model),
        accelerator=SimpleNamespace(
            gather="gather", gather_for_metrics=facade().gather_for_metrics,
            passes=SimpleNamespace(reading=lambda loader: contextlib.nullcontext()),
        ),
    )  # fmt: skip
    vars(host).update(values)
    monkeypatch.setattr(evaluator, "EvaluationRun", Ran)
    monkeypatch.setattr(evaluator, "wrap_forward", lambda *what: told.append(("forward", *what[1:])))
    monkeypatch.setattr(evaluator, "log_line", lambda text: told.append(text.strip()))
    monkeypatch.setattr(
        evaluator, "behaviour_of", lambda optimizer: SimpleNamespace(to_evaluation=lambda: told.append("averaged"))
    )
    monkeypatch.setattr(evaluator, "is_validating_within_fit", lambda trainer: trainer == "validating")
    monkeypatch.setattr(evaluator, "run_validation", lambda trainer, batches: told.append(("within", trainer)))
    own = Evaluator(host)

    @contextlib.contextmanager
    def outside_fit(of):
        trainer = SimpleNamespace(
            test="test",
            validation_of=lambda part: ("validate", part),
            run_command=lambda command, module, dataloaders, verbose: told.append(("outside", command, verbose)),
        )
        yield SimpleNamespace(trainer=trainer, module=SimpleNamespace(evaluating=lambda run: contextlib.nullcontext()))

    monkeypatch.setattr(own, "_outside_fit", outside_fit, raising=False)
    return own, host, told


@pytest.mark.parametrize("description", ["Evaluation", "Prediction"])
@pytest.mark.parametrize("part", [WHOLE, EvaluationPart(is_last=False)])
def test_an_evaluation_outside_of_a_fit(description, part, monkeypatch):
    own, host, told = evaluating(monkeypatch)
    own._part = part
    model, loader = host.model, [1, 2, 3]
    run = own.run(loader, description, True, ["k"], "eval")
    command = "test" if description == "Prediction" else ("validate", part)
    assert told == [
        "told", ("wrapped", False), ("forward", "p", "cpu"), "averaged", f"***** Running {description} *****",
        "Num examples = 3", "Batch size = 4", ("outside", command, False),
    ]  # fmt: skip
    assert own._part is WHOLE and host.callback_handler.eval_dataloader is loader and host.is_deepspeed_enabled is False
    assert run.model == ("compiled", model) == host.model_wrapped and own.is_prepared
    assert round(host.model_preparation_time, 4) == host.model_preparation_time >= 0
    assert (run.options["loss_only"], run.options["ignore_keys"], run.options["drops_fillers"]) == (True, ["k"], True)
    assert run.options["preprocess_logits"] == "logits" and run.options["gather"] == "gather"
    del host.model_wrapped
    assert own.run(iter(loader), description, True, None, "eval").model is model and not hasattr(host, "model_wrapped")
    assert "Num examples: Unknown" in told


@pytest.mark.parametrize(
    ("module", "trainer", "is_within"),
    [(None, None, False), ("m", None, False), (None, "t", False), ("m", "t", True), ("m", "validating", False)],
)
def test_an_evaluation_within_a_fit(module, trainer, is_within, monkeypatch):
    held = module and SimpleNamespace(evaluating=lambda run: contextlib.nullcontext())
    own, _host, told = evaluating(
        monkeypatch, is_in_train=True, _run=SimpleNamespace(module=held, lightning_trainer=trainer)
    )
    own.run([1], "Evaluation", False, None, "eval")
    assert ("told" not in told) and (told[-1] == ("within", trainer)) is is_within
    assert any(one[0] == "outside" for one in told) is not is_within


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    ("half", "dtype"),
    [((), torch.float32), (("fp16_full_eval",), torch.float16), (("bf16_full_eval",), torch.bfloat16)],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_evaluation_in_half_precision(trains, half, dtype, rank, monkeypatch):
    own, host, told = evaluating(
        monkeypatch, is_in_train=trains, args={**dict.fromkeys(half, True), "process_index": rank}
    )
    own.run([1], "Evaluation", False, None, "eval")
    assert host.model.weight.dtype == (torch.float32 if trains else dtype)
    assert ("told" in told) is (rank == 0 and not trains)


@pytest.mark.parametrize("strategy", ["one_device", "deepspeed"])
def test_deepspeed_has_its_own_precision(strategy, monkeypatch):
    own, host, told = evaluating(monkeypatch, strategy=strategy)
    own.run([1], "Evaluation", False, None, "eval")
    assert host.is_deepspeed_enabled is (strategy == "deepspeed")
    assert any(one[0] == "forward" for one in told) is (strategy != "deepspeed")


@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_evaluation_draws_and_switches_the_mode(count, monkeypatch):
    own, host, told = evaluating(monkeypatch)
    host.model.train()

    class Told:
        def __len__(self):
            return count

        def __iter__(self):
            told.append("begun")
            return iter(range(count))

    own.run(Told(), "Evaluation", False, None, "eval")
    assert ("begun" in told) is (count == 0) and host.model.training is (count == 1)


def test_without_a_model_there_is_a_way_out(monkeypatch):
    own, _, _ = evaluating(monkeypatch, model=None)
    with pytest.raises(SearchError, match="The Trainer has no model"):
        own.run([1], "Evaluation", False, None, "eval")
