"""The lean epoch loop against Lightning's own. A spy that overrides every hook sees the same calls."""

from __future__ import annotations

import inspect
import logging

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import SimpleProfiler

from helpers import toy
from hf_compat import Trainer, TrainerCallback, set_seed
from hf_compat.engine import window_trainer as lean_loop
from hf_compat.engine.window_trainer import find_listeners

# Hooks that a Trainer calls. Hooks around checkpoints return states and do not belong to a step.
HOOKS = [
    name
    for name, _ in inspect.getmembers(pl.Callback, inspect.isfunction)
    if name.startswith(("on_", "setup", "teardown"))
    and not any(word in name for word in ("checkpoint", "sanity_check", "predict"))
]


def progress_of(trainer: pl.Trainer) -> tuple:
    loop = trainer.fit_loop.epoch_loop
    batches, steps = loop.batch_progress, loop.manual_optimization.optim_step_progress
    return (
        vars(batches.total).copy(), vars(batches.current).copy(), batches.is_last_batch,
        vars(steps.total).copy(), vars(steps.current).copy(), loop._batches_that_stepped,
        trainer.global_step, trainer.current_epoch, trainer.should_stop, trainer.is_last_batch,
    )  # fmt: skip


def plain(value: object) -> object:
    """Convert a hook's argument to a comparable value."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def spy_of(hooks: list[str], logs: bool = False) -> pl.Callback:
    """Make a callback that overrides hooks and records their calls."""
    seen: list[tuple] = []

    def watch(name):
        def hook(self, trainer, module, *args, **kwargs):
            arguments = [plain(value) for value in args]
            seen.append((name, arguments, {k: plain(v) for k, v in kwargs.items()}, progress_of(trainer),
                         module._current_fx_name, module.training, trainer.training))  # fmt: skip
            if logs and name in ("on_train_batch_start", "on_train_batch_end"):
                module.log(f"seen_{name}", float(len(seen)), on_step=True, on_epoch=True)
                seen.append(("metrics", {k: float(v) for k, v in trainer.callback_metrics.items()}))

        return hook

    made = type("Spy", (pl.Callback,), {name: watch(name) for name in hooks})()
    made.seen = seen
    return made


class StopsAt(TrainerCallback):
    def __init__(self, update):
        self.update = update

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.update


class AsksToStop(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.should_stop = trainer.global_step == 2


CASES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "stops": {"callbacks": [StopsAt(3)]},
    "lightning stops": {"callbacks": [AsksToStop()]},
    "max_steps": {"max_steps": 7},
    "stream": {"stream": True, "max_steps": 7},
    "saves": {"save_strategy": "steps", "save_steps": 2},
    "resumes": {"save_strategy": "steps", "save_steps": 2, "resumes": True},
    "logs": {"logs": True},
    "only the start is heard": {"hooks": ["on_train_batch_start"], "logs": True},
    "only the end is heard": {"hooks": ["on_train_batch_end"]},
    "only backward is heard": {"hooks": ["on_before_backward", "on_after_backward"]},
    "only the step is heard": {"hooks": ["on_before_optimizer_step", "on_before_zero_grad"]},
    "nobody listens": {"hooks": []},
}


def run(make_args, case: dict) -> tuple:
    case = dict(case)
    data = toy.Stream(toy.rows(24)) if case.pop("stream", False) else toy.rows(22)
    spy = spy_of(case.pop("hooks", HOOKS), case.pop("logs", False))
    callbacks, resumes = case.pop("callbacks", []), case.pop("resumes", False)
    set_seed(3)
    args = make_args(**case)
    trainer = Trainer(toy.Classifier(), args, train_dataset=data, eval_dataset=toy.rows(9, 1),
                      callbacks=[spy, *callbacks])  # fmt: skip
    trainer.train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-4" if resumes else None)
    logs = [{k: v for k, v in log.items() if "runtime" not in k and "per_second" not in k}
            for log in trainer.state.log_history]  # fmt: skip
    return spy.seen, logs, trainer.model.state_dict(), trainer.lightning_trainer


@pytest.mark.parametrize("name", CASES)
def test_a_spy_sees_what_it_sees_in_lightnings_own_loop(make_args, monkeypatch, name):
    case = CASES[name]
    if case.get("resumes"):
        run(make_args, {**case, "resumes": False})
    mine, my_logs, my_weights, trainer = run(make_args, case)
    own_advance, calls = _TrainingEpochLoop.advance, []
    monkeypatch.setattr(lean_loop, "IS_KNOWN", False)
    monkeypatch.setattr(_TrainingEpochLoop, "advance", lambda *args: (calls.append(1), own_advance(*args)))
    theirs, their_logs, their_weights, trainer = run(make_args, case)
    assert calls and trainer.fit_loop.epoch_loop._listeners is None
    assert mine == theirs and (mine or name == "nobody listens")
    assert my_logs == their_logs
    assert all(torch.equal(my_weights[part], their_weights[part]) for part in their_weights)


class Late(TrainerCallback):
    """Adds a Lightning callback during training."""

    def __init__(self, added):
        self.added = added

    def on_step_end(self, args, state, control, trainer=None, **kwargs):
        if state.global_step == 2:
            trainer.lightning_trainer.callbacks.append(self.added)


def test_a_callback_that_comes_later_is_called(make_args):
    spy = spy_of(["on_train_batch_start", "on_before_backward", "on_before_optimizer_step"])
    late = Late(spy)
    trainer = Trainer(toy.Classifier(), make_args(num_train_epochs=1), train_dataset=toy.rows(20), callbacks=[late])
    trainer.train()
    assert [entry[0] for entry in spy.seen] == 3 * [
        "on_train_batch_start", "on_before_backward", "on_before_optimizer_step",
    ]  # fmt: skip


class Looks(TrainerCallback):
    """Records the hooks that the loop has looked up."""

    def on_step_end(self, args, state, control, trainer=None, **kwargs):
        self.found = find_listeners(trainer.lightning_trainer, "train")


def found_with(make_args, **options):
    looks = Looks()
    trainer = Trainer(toy.Classifier(), make_args(max_steps=2), train_dataset=toy.rows(20),
                      callbacks=[looks, *options.pop("callbacks", ())], lightning_options=options)  # fmt: skip
    trainer.train()
    return looks.found


def test_nothing_is_called_that_nobody_overrides(make_args):
    found = found_with(make_args)
    assert found.backward_is_plain and found.optimizer_is_plain
    # HF's events hang on these
    assert [len(hooks) for hooks in (found.before, found.after, found.before_optimizer)] == [1, 1, 1]


def test_a_function_of_a_lambda_callback_is_found(make_args):
    called = []
    callback = pl.callbacks.LambdaCallback(on_before_backward=lambda trainer, module, loss: called.append(1))
    found = found_with(make_args, callbacks=[callback])
    assert not found.backward_is_plain and len(called) == 2


def test_a_profiler_measures_lightnings_own_loop(make_args):
    profiler = SimpleProfiler()
    found = found_with(make_args, profiler=profiler)
    assert found is None
    assert len(profiler.recorded_durations["run_training_batch"]) == 2


def test_who_debugs_lightning_reads_its_calls(make_args, caplog):
    with caplog.at_level(logging.DEBUG, "lightning.pytorch.trainer.call"):
        assert found_with(make_args) is None
    assert "calling callback hook: on_train_batch_start" in caplog.text


def test_another_release_of_lightning_keeps_its_own_loop(make_args, monkeypatch, caplog):
    monkeypatch.setattr(lean_loop, "IS_KNOWN", False)
    with caplog.at_level(logging.INFO, "hf_compat"):
        trainer = Trainer(toy.Classifier(), make_args(max_steps=2), train_dataset=toy.rows(20))
        trainer.train()
    assert trainer.lightning_trainer.fit_loop.epoch_loop._listeners is None
    assert "does not support the loops of Lightning" in caplog.text


class ToldLonger(torch.utils.data.IterableDataset):
    """Reports a length greater than its number of rows."""

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(toy.rows(8))


def test_data_that_ends_before_its_length_is_told_of_once(make_args, caplog):
    trainer = Trainer(toy.Classifier(), make_args(num_train_epochs=2), train_dataset=ToldLonger())
    with caplog.at_level(logging.WARNING, "hf_compat"):
        trainer.train()
    (message,) = [record.getMessage() for record in caplog.records if "announces" in record.getMessage()]
    assert "3 micro-batches (12 samples) an epoch, and this one had 2. Training will make fewer updates" in message
