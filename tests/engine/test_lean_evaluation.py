"""The lean evaluation loop against Lightning's own. A spy that overrides every hook sees the same calls."""

from __future__ import annotations

import contextlib
import gc
import inspect
import multiprocessing
import weakref
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from helpers import toy
from hf_compat import Trainer, TrainerCallback, set_seed
from hf_compat.engine import window_trainer as lean_loop
from hf_compat.engine.evaluation import WHOLE, EvaluationBatch, EvaluationBatches, EvaluationPart
from hf_compat.engine.window_trainer import LeanEvaluationLoop
from hf_compat.trainer_methods import evaluator
from hf_compat.trainer_methods.fit import TrainerModule, make_module

# Hooks that a Trainer calls. Hooks around checkpoints return states and do not belong to an evaluation.
HOOKS = [
    name
    for name, _ in inspect.getmembers(pl.Callback, inspect.isfunction)
    if name.startswith(("on_", "setup", "teardown"))
    and not any(word in name for word in ("checkpoint", "sanity_check", "predict"))
]


def plain(value: object) -> object:
    """Convert a hook's argument to a comparable value."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def progress_of(loop) -> tuple:
    batches = loop.batch_progress
    counts = [vars(part).copy() for part in (batches.total, batches.current)]
    return *counts, batches.is_last_batch, dict(loop._seen_batches_per_dataloader), loop._has_run


def spy_of(hooks, logs=False) -> pl.Callback:
    seen: list[tuple] = []

    def watch(name):
        def hook(self, trainer, module, *args, **kwargs):
            loop = trainer._evaluation_loop if trainer.evaluating else None
            seen.append((name, [plain(value) for value in args], loop and progress_of(loop),
                         module._current_fx_name if module is not None else None))  # fmt: skip
            if logs and name.endswith(("_batch_start", "_batch_end")):
                module.log(f"seen_{name}", float(len(seen)), on_step=True, on_epoch=True, batch_size=1)
                seen.append(("metrics", {k: float(v) for k, v in trainer.callback_metrics.items()}))

        return hook

    made = type("Spy", (pl.Callback,), {name: watch(name) for name in hooks})()
    made.seen = seen
    return made


class EvaluatesWithin(TrainerCallback):
    """Evaluates another set, and predicts, during training."""

    def on_step_end(self, args, state, control, trainer=None, **kwargs):
        if state.global_step == 2:
            trainer.evaluate(toy.rows(7, 2), metric_key_prefix="other")
            trainer.predict(toy.rows(5, 3))


CASES = {
    "every hook": {},
    "logs": {"logs": True},
    "only the start is heard": {"hooks": ["on_validation_batch_start", "on_test_batch_start"], "logs": True},
    "only the end is heard": {"hooks": ["on_validation_batch_end", "on_test_batch_end"]},
    "nobody listens": {"hooks": []},
    "within a fit": {"trains": True},
    "losses only": {"prediction_loss_only": True},
    "moved at every batch": {"eval_accumulation_steps": 1},
}


def run(make_args, case: dict) -> tuple:
    case = dict(case)
    spy, trains = spy_of(case.pop("hooks", HOOKS), case.pop("logs", False)), case.pop("trains", False)
    set_seed(3)
    values = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4} if trains else {}
    trainer = Trainer(
        toy.Classifier(),
        make_args(per_device_eval_batch_size=4, **values, **case),
        train_dataset=toy.rows(22),
        eval_dataset=toy.rows(9, 1),
        compute_metrics=lambda p: {"sum": float(p.predictions.sum() + p.label_ids.sum())},
        callbacks=[spy, *([EvaluatesWithin()] if trains else [])],
    )
    if trains:
        trainer.train()
    metrics = trainer.evaluate()
    found = trainer.predict(toy.rows(10, 2))
    kept = {k: v for k, v in {**metrics, **found.metrics}.items() if "_runtime" not in k and "_per_second" not in k}
    kept = {k: v for k, v in kept.items() if "preparation" not in k}
    return spy.seen, kept, found.predictions, trainer.lightning_trainer


@pytest.mark.parametrize("name", CASES)
def test_a_spy_sees_what_it_sees_in_lightnings_own_loop(make_args, monkeypatch, name):
    mine, my_metrics, my_predictions, trainer = run(make_args, CASES[name])
    assert type(trainer.validate_loop) is type(trainer.test_loop) is LeanEvaluationLoop
    assert type(trainer.fit_loop.epoch_loop.val_loop) is LeanEvaluationLoop
    own_step, calls = _EvaluationLoop._evaluation_step, []
    monkeypatch.setattr(lean_loop, "IS_KNOWN", False)
    monkeypatch.setattr(_EvaluationLoop, "_evaluation_step", lambda *args: (calls.append(1), own_step(*args)))
    theirs, their_metrics, their_predictions, trainer = run(make_args, CASES[name])
    assert calls
    assert mine == theirs and (mine or name == "nobody listens")
    assert my_metrics == their_metrics
    assert np.array_equal(my_predictions, their_predictions)


@pytest.fixture
def counted(monkeypatch):
    """Count the batches that Lightning's own code evaluates."""
    calls, own = [], _EvaluationLoop._evaluation_step
    monkeypatch.setattr(_EvaluationLoop, "_evaluation_step", lambda self, *args: (calls.append(1), own(self, *args)))
    return calls


def evaluate(make_args, model=None, **options):
    args = make_args(per_device_eval_batch_size=4)
    Trainer(model or toy.Classifier(), args, eval_dataset=toy.rows(9, 1), lightning_options=options).evaluate()


def test_lightnings_own_code_runs_where_somebody_measures_it(make_args, counted):
    evaluate(make_args)
    assert counted == []
    profiler = SimpleProfiler()
    evaluate(make_args, profiler=profiler)
    assert len(counted) == 3 and profiler.recorded_durations


def test_an_end_of_iteration_in_the_users_code_is_no_end_of_the_data(make_args):
    class Ends(toy.Classifier):
        def forward(self, x, labels=None):
            raise StopIteration

    with pytest.raises((StopIteration, RuntimeError)):
        evaluate(make_args, Ends())
    assert torch.is_grad_enabled()


class ToldLonger(torch.utils.data.IterableDataset):
    """Reports a length greater than its number of rows, so its loader ends early."""

    def __len__(self):
        return 15

    def __iter__(self):
        return iter(toy.rows(9, 1))


@pytest.mark.parametrize("is_lean", [True, False])
def test_a_loader_that_ends_before_its_length_ends_the_evaluation(make_args, monkeypatch, is_lean):
    if not is_lean:
        monkeypatch.setattr(lean_loop, "IS_KNOWN", False)
    trainer = Trainer(toy.Classifier(), make_args(per_device_eval_batch_size=4), eval_dataset=ToldLonger())
    assert len(trainer.get_eval_dataloader()) == 4
    assert trainer.predict(ToldLonger()).predictions.shape == (9, 3)
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("on", ["class", "module"])
def test_a_hook_after_a_batch_that_a_script_replaces_is_called(make_args, monkeypatch, on):
    calls = []
    trainer = Trainer(toy.Classifier(), make_args(per_device_eval_batch_size=4), eval_dataset=toy.rows(9, 1))
    own = TrainerModule.on_validation_batch_end

    def replaced(self, *args, **kwargs):
        calls.append(1)
        return own(self, *args, **kwargs)

    if on == "class":
        monkeypatch.setattr(TrainerModule, "on_validation_batch_end", replaced)
    else:

        def with_hook(host, plan):
            module = make_module(host, plan)
            module.on_validation_batch_end = replaced.__get__(module)
            return module

        monkeypatch.setattr(evaluator, "make_module", with_hook)
    trainer.evaluate()
    assert len(calls) == 3


def test_workers_end_with_an_evaluation_that_fails(make_args):
    """The error's traceback holds the loop's frames, which hold the loader's iterator."""

    class Fails(toy.Classifier):
        def forward(self, x, labels=None):
            raise ZeroDivisionError

    args = make_args(per_device_eval_batch_size=4, dataloader_num_workers=1)
    trainer = Trainer(Fails(), args, eval_dataset=toy.rows(9, 1))
    with pytest.raises(ZeroDivisionError) as raised:
        trainer.evaluate()
    assert raised.tb is not None and multiprocessing.active_children() == []


def test_evaluations_outside_a_fit_share_a_trainer_while_nothing_changes(make_args):
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(8), eval_dataset=toy.rows(9, 1))
    first = trainer.evaluate()["eval_loss"]
    shared = trainer.lightning_trainer
    assert trainer.evaluate()["eval_loss"] == first and trainer.lightning_trainer is shared
    assert "_run_stage" not in vars(shared)  # whoever takes it finds Lightning's own
    assert trainer.predict(toy.rows(5)).predictions.shape == (5, 3) and trainer.lightning_trainer is shared
    trainer.model = toy.Classifier()
    assert trainer.evaluate()["eval_loss"] != first and trainer.lightning_trainer is not shared
    shared = trainer.lightning_trainer
    trainer.args.full_determinism = True
    trainer.evaluate()
    assert trainer.lightning_trainer is not shared
    spy = spy_of(["on_validation_start"], False)
    trainer.add_callback(spy)
    trainer.evaluate()
    assert len(spy.seen) == 1


def test_an_evaluation_after_one_that_failed_has_a_trainer_of_its_own(make_args):
    class Once(toy.Classifier):
        fails = True

        def forward(self, x, labels=None):
            if self.fails:
                raise RuntimeError("once")
            return super().forward(x, labels)

    trainer = Trainer(Once(), make_args(), eval_dataset=toy.rows(9, 1))
    with pytest.raises(RuntimeError, match="once"):
        trainer.evaluate()
    failed, trainer.model.fails = trainer.lightning_trainer, False
    assert trainer.evaluate()["eval_loss"] > 0 and trainer.lightning_trainer is not failed


def test_a_training_lets_go_of_the_model_that_was_evaluated_before(make_args):
    trainer = Trainer(args=make_args(max_steps=1), model_init=lambda: toy.Classifier(), train_dataset=toy.rows(8),
                      eval_dataset=toy.rows(9, 1))  # fmt: skip
    trainer.evaluate()
    before = weakref.ref(trainer.model)
    trainer.train()
    gc.collect()
    assert before() is None


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_gradients_that_a_script_has_computed_outlive_an_evaluation(make_args, command):
    trainer = Trainer(toy.Classifier(), make_args())
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):  # the second uses the kept Lightning trainer
        getattr(trainer, command)(toy.rows()[:4])
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in trainer.model.parameters())


class OwnBatches(EvaluationBatches):
    pass


BATCHES, STREAM = EvaluationBatches([1, 2]), EvaluationBatches(iter([1, 2]))


def lean(source, stage="validation", limits=(1.0, 1.0), world_size=1, callbacks=()):
    """A lean loop of a trainer that does nothing."""
    loop = LeanEvaluationLoop.__new__(LeanEvaluationLoop)
    vars(loop).update(
        trainer=SimpleNamespace(
            testing=stage == "test",
            limit_val_batches=limits[0],
            limit_test_batches=limits[1],
            world_size=world_size,
            callbacks=list(callbacks),
        ),
        _data_source=SimpleNamespace(instance=source),
        _data_fetcher=None,
    )
    return loop


@pytest.mark.parametrize(
    ("options", "is_known", "most"),
    [
        ({"source": BATCHES}, True, 2),
        ({"source": STREAM}, True, float("inf")),
        ({"source": BATCHES}, False, None),
        ({"source": OwnBatches([1])}, True, None),
        ({"source": [1, 2]}, True, None),
        ({"source": BATCHES, "limits": (1, 1.0)}, True, None),
        ({"source": BATCHES, "limits": (0.5, 1.0)}, True, None),
        ({"source": BATCHES, "limits": (0.5, 1.0), "stage": "test"}, True, 2),
        ({"source": BATCHES, "limits": (1.0, 2), "stage": "test"}, True, None),
        ({"source": BATCHES, "world_size": 2}, True, None),
    ],
)
def test_which_batches_are_taken_as_they_are(options, is_known, most, monkeypatch):
    asked = []
    monkeypatch.setattr(_EvaluationLoop, "setup_data", lambda self: asked.append(1))
    monkeypatch.setattr(lean_loop, "IS_KNOWN", is_known)
    loop = lean(**options)
    loop.setup_data()
    assert len(asked) == (most is None)
    if most is not None:
        assert loop._max_batches == [most] and loop._seen_batches_per_dataloader[0] == 0
        assert loop._combined_loader.flattened == [options["source"]]


@pytest.mark.parametrize("of_loop", [False, True])
@pytest.mark.parametrize(
    ("part", "noted", "is_heard", "at_end"),
    [
        (WHOLE, [], True, True),
        (EvaluationPart(is_first=True, is_last=False), [], True, False),
        (EvaluationPart(is_first=False, is_last=False, earlier={"a": 1}), [], False, False),
        (EvaluationPart(is_first=False, is_last=True, earlier={"a": 1}), [{"a": 1}], False, True),
        (EvaluationPart(is_first=False, is_last=True), [], False, True),
    ],
)
def test_callbacks_hear_of_the_first_part_and_of_the_last(part, noted, is_heard, at_end, of_loop, monkeypatch):
    heard, told, looked, spy = [], [], [], pl.Callback()
    for name in ("on_run_start", "on_run_end"):
        monkeypatch.setattr(_EvaluationLoop, name, lambda self: heard.append(list(self.trainer.callbacks)))
    monkeypatch.setattr(lean_loop, "note_metrics", lambda trainer, metrics: told.append(metrics))
    monkeypatch.setattr(LeanEvaluationLoop, "_look_up", lambda self: looked.append(1))
    loop = lean(EvaluationBatches([1, 2], part), callbacks=[spy])
    loop._seen = [spy] if of_loop else [spy, spy]
    loop.on_run_start()
    assert told == noted and heard == [[spy] if is_heard else []] and loop.trainer.callbacks == [spy]
    assert bool(looked) is (is_heard or not of_loop)
    loop.on_run_end()
    assert heard[1] == ([spy] if at_end else []) and loop.trainer.callbacks == [spy]


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("has_listeners", [False, True])
@pytest.mark.parametrize(("is_first", "is_last"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_part_that_nobody_hears_of_calls_no_hook(is_plain, has_listeners, is_first, is_last, monkeypatch):
    told = []
    for name in ("_on_evaluation_start", "_on_evaluation_epoch_start", "_on_evaluation_end"):
        monkeypatch.setattr(_EvaluationLoop, name, lambda self, *_, name=name, **__: told.append(name))
    loop = lean(BATCHES)
    loop._part, loop._is_plain = EvaluationPart(is_first=is_first, is_last=is_last), is_plain
    loop._listeners = object() if has_listeners else None
    loop.trainer._logger_connector = SimpleNamespace(reset_results=lambda: told.append("reset"))
    loop._on_evaluation_start()
    loop._on_evaluation_epoch_start()
    loop._on_evaluation_end()
    is_unheard = is_plain and has_listeners and not is_first and not is_last
    assert told == (
        ["reset"] if is_unheard else ["_on_evaluation_start", "_on_evaluation_epoch_start", "_on_evaluation_end"]
    )


@pytest.mark.parametrize("stage", ["validation", "test"])
@pytest.mark.parametrize(
    ("of_module", "of_strategy", "is_plain"),
    [
        ([], [], True),
        (["on_{}_start"], [], False),
        (["on_{}_epoch_start"], [], False),
        (["on_{}_end"], [], False),
        (["on_{}_epoch_end", "on_{}_batch_end"], [], True),
        ([], ["on_{}_start"], False),
        ([], ["on_{}_end"], False),
        ([], ["setup"], True),
    ],
)
def test_a_hook_of_module_or_strategy_is_called_in_each_part(stage, of_module, of_strategy, is_plain, monkeypatch):
    def made(base, names):
        return type("Own", (base,), {name.format(stage): lambda self, *_: None for name in names})

    monkeypatch.setattr(lean_loop, "find_listeners", lambda trainer, found: found)
    loop, spy = lean(BATCHES, stage, callbacks=[pl.Callback()]), pl.Callback()
    loop.trainer.lightning_module = made(pl.LightningModule, of_module)()
    loop.trainer.strategy = made(SingleDeviceStrategy, of_strategy)()
    loop.trainer.callbacks.append(spy)
    loop._look_up()
    assert loop._is_plain is is_plain and loop._listeners == stage and loop._seen == loop.trainer.callbacks
    assert loop._seen is not loop.trainer.callbacks


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("takes_index", [False, True])
def test_a_batch_is_counted_and_a_signal_heard(is_told, is_last, logs, takes_index):
    told = []
    counts = dict.fromkeys(("ready", "started", "processed", "completed"), 0)
    total, current = SimpleNamespace(**counts), SimpleNamespace(**counts)
    module = pl.LightningModule()
    module._current_fx_name = "outer"
    step = (
        (lambda batch, index: told.append(index) or "out")
        if takes_index
        else (lambda batch: told.append("one") or "out")
    )
    loop = lean(BATCHES)
    loop.trainer._logger_connector = SimpleNamespace(
        _first_loop_iter=None, on_batch_end=lambda: told.append("end"), update_eval_step_metrics=told.append
    )
    loop.trainer._signal_connector = SimpleNamespace(received_sigterm=is_told)
    loop.batch_progress = SimpleNamespace(total=total, current=current, is_last_batch=is_last)
    results = type("Results", (SimpleNamespace,), {"__bool__": lambda self: logs})(
        batch=1, batch_size=1, dataloader_idx=1
    )
    vars(loop).update(_results=results, _seen=[], _seen_batches_per_dataloader={0: 5}, _has_run=False)
    loop._listeners = SimpleNamespace(
        module=module, names=("before", "step", "after"), step=step, takes_index=takes_index,
        before=[lambda batch, index: told.append(("before", index, module._current_fx_name))],
        after=[lambda output, batch, index: told.append((output, index, module._current_fx_name))],
    )  # fmt: skip
    batch = EvaluationBatch({"x": 1}, is_last, 0)
    with pytest.raises(SIGTERMException) if is_told and not is_last else contextlib.nullcontext():
        loop._evaluation_step(batch, 3, 0, None)
    noted = ["end", 5] if logs else []
    assert told == [("before", 3, "before"), 3 if takes_index else "one", ("out", 3, "after"), *noted]
    assert set(vars(total).values()) == set(vars(current).values()) == {1} and loop._has_run
    assert loop._seen_batches_per_dataloader == {0: 6} and module._current_fx_name == "outer"
    assert (results.batch is batch) is logs and loop.trainer._logger_connector._first_loop_iter is True


@pytest.mark.parametrize("case", ["no listeners", "another batch"])
def test_other_batches_are_lightnings(case, monkeypatch):
    told = []
    monkeypatch.setattr(_EvaluationLoop, "_evaluation_step", lambda self, *what: told.append(what))
    loop = lean(BATCHES)
    loop.batch_progress, loop._results, loop._seen = SimpleNamespace(), None, []
    loop._listeners = None if case == "no listeners" else object()
    batch = EvaluationBatch({}, True, 0) if case == "no listeners" else {"x": 1}
    loop._evaluation_step(batch, 3, 1, None)
    assert told == [(batch, 3, 1, None)]
