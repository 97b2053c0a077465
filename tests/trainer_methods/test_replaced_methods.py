"""Methods replaced other than in a subclass: on the object, on the class, by a wrapper, in a callback."""

from __future__ import annotations

import functools
import logging
import types

import pytest
import torch
import transformers

import hf_compat
import hf_compat.trainer_callback
from helpers import toy
from hf_compat import Trainer
from hf_compat.errors import ArgumentError, CallbackError, HfCompatWarning, OverrideError
from hf_compat.runtime import console
from hf_compat.tools.until_train import overrides, overrides_of

APIS = pytest.mark.parametrize("api", [transformers, hf_compat], ids=["theirs", "ours"])


def make_trainer(api, folder, kind=None, callbacks=(), **values):
    base = {"output_dir": str(folder), "max_steps": 2, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    base |= {"per_device_train_batch_size": 4, "disable_tqdm": True, "report_to": "none", **values}
    args = api.TrainingArguments(**base)
    rows = toy.rows(16)
    return (kind or api.Trainer)(toy.Classifier(), args, train_dataset=rows, callbacks=list(callbacks))


@APIS
def test_every_part_of_a_batch_is_prepared_by_the_object_s_own_method(api, tmp_path):
    trainer, seen = make_trainer(api, tmp_path, max_steps=1), []
    prepare = trainer._prepare_input
    trainer._prepare_input = lambda data: (seen.append(type(data).__name__), prepare(data))[1]
    trainer.train()
    assert seen == ["dict", "Tensor", "Tensor"]


@APIS
@pytest.mark.parametrize("where", ["object", "class"])
def test_a_wrapper_of_a_method_gets_what_upstream_passes_as_it_passes_it(api, tmp_path, where, monkeypatch):
    seen, original = [], api.Trainer._maybe_log_save_evaluate

    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        seen.append((len(args), set(kwargs)))
        return original(self, *args, **kwargs)

    if where == "class":
        monkeypatch.setattr(api.Trainer, original.__name__, wrapper)
    trainer = make_trainer(api, tmp_path)
    if where == "object":
        trainer._maybe_log_save_evaluate = types.MethodType(wrapper, trainer)
    trainer.train()
    assert seen and set(map(str, seen)) == {"(7, {'learning_rate'})"}


WRITERS = ("save_model", "_save", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


@pytest.mark.parametrize("name", [*WRITERS, "_rotate_checkpoints"])
def test_a_method_of_the_object_s_own_is_called_in_background_saves_too(tmp_path, name):
    trainer, calls = make_trainer(hf_compat, tmp_path, save_strategy="steps", save_steps=1, async_save=True), []
    inherited = getattr(trainer, name)
    setattr(trainer, name, lambda *args, **kwargs: (calls.append(name), inherited(*args, **kwargs))[1])
    with pytest.warns(HfCompatWarning, match=f"overrides {name}; checkpoints are not async"):
        trainer.train()
    assert calls == [name] * 2


def test_a_callback_that_puts_a_method_in_place_that_nothing_calls_is_told(tmp_path):
    class Late(hf_compat.TrainerCallback):
        def on_train_begin(self, args, state, control, trainer, **kwargs):
            trainer._run_epoch = lambda **kwargs: None

    with pytest.raises(OverrideError, match="Trainer overrides `_run_epoch`"):
        make_trainer(hf_compat, tmp_path, callbacks=[Late()]).train()


def test_a_loader_that_is_put_on_the_object_needs_no_data_set(tmp_path):
    class Own(Trainer):
        def __init__(self, *args, **kwargs):
            self.get_eval_dataloader = lambda eval_dataset=None: Trainer.get_eval_dataloader(self, toy.rows(8))
            super().__init__(*args, **kwargs)

    trainer = make_trainer(hf_compat, tmp_path, Own, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert sum("eval_loss" in log for log in trainer.state.log_history) == 2


@APIS
def test_the_log_level_of_an_override_is_asked_for_when_none_is_set(api, tmp_path):
    calls = []

    class Own(api.TrainingArguments):
        def get_process_log_level(self):
            calls.append(self.log_level)
            return super().get_process_log_level()

    api.Trainer(toy.Classifier(), Own(str(tmp_path), use_cpu=True, report_to="none"))
    assert calls == ["passive"]


def test_more_processes_than_there_are_are_not_waited_for(tmp_path):
    class Own(hf_compat.TrainingArguments):
        @property
        def world_size(self):
            return 4

    args = Own(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ArgumentError, match=r"Own\.world_size is 4, and the launcher has started this process with 1"):
        Trainer(toy.Classifier(), args)
    with pytest.raises(ArgumentError, match="Hint: leave the property out"), args.main_process_first():
        pass


@APIS
def test_a_callback_that_an_event_adds_or_removes_counts_for_that_event(api, tmp_path):
    seen = []

    class Added(api.TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            seen.append("added")

    class Leaves(api.TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            seen.append("leaves")
            trainer.remove_callback(Skipped)
            trainer.add_callback(Added())
            trainer.remove_callback(self)

    class Skipped(api.TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            seen.append("skipped")

    trainer = make_trainer(api, tmp_path, callbacks=[Leaves(), Skipped()])
    trainer.train()
    assert seen == ["leaves", "added"]


def test_a_handler_in_the_place_of_the_trainer_s_own(tmp_path):
    def replace(trainer, kind):
        old = trainer.callback_handler
        parts = old.callbacks, old.model, old.processing_class, old.optimizer, old.lr_scheduler
        trainer.callback_handler = kind(*parts)

    class Asks(hf_compat.TrainerCallback):
        def on_step_end(self, args, state, control, trainer, **kwargs):
            assert isinstance(trainer, Trainer)

    trainer = make_trainer(hf_compat, tmp_path, callbacks=[Asks()])
    replace(trainer, hf_compat.trainer_callback.CallbackHandler)
    assert trainer.train().global_step == 2
    replace(trainer, transformers.trainer_callback.CallbackHandler)
    with pytest.raises(CallbackError, match=r"Hint: inherit from `hf_compat\.trainer_callback\.CallbackHandler`"):
        trainer.train()


@pytest.mark.parametrize("zeroes", [False, True])
def test_an_optimizer_that_training_step_steps_waits_for_the_last_micro_batch(tmp_path, zeroes):
    def weights(api):
        class Own(api.Trainer):
            def training_step(self, *args, **kwargs):
                loss = super().training_step(*args, **kwargs)
                assert self.optimizer.step_was_skipped is False
                self.optimizer.step()
                if zeroes:
                    self.optimizer.zero_grad()
                return loss

        trainer = make_trainer(api, tmp_path, Own, gradient_accumulation_steps=2, learning_rate=0.1, max_steps=3)
        trainer.train()
        return trainer.model.state_dict()

    torch.manual_seed(0)
    theirs = weights(transformers)
    torch.manual_seed(0)
    ours = weights(hf_compat)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_lines_of_transformers_log_while_patched(tmp_path, monkeypatch):
    class Listens(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage().partition(" If extra")[0])

    def train(api):
        rows = [{**row, "extra": 1} for row in toy.rows(16)]
        trainer = make_trainer(api, tmp_path, max_steps=1, save_strategy="steps", save_steps=1, log_level="info")
        trainer.train_dataset = rows
        trainer.train()
        return [lines.pop(0) for _ in range(len(lines))]

    lines, listens = [], Listens()
    transformers_log = logging.getLogger("transformers.trainer")
    transformers_log.addHandler(listens)
    try:
        theirs = train(transformers)
        monkeypatch.setattr(console, "_in_place_of_transformers", [True])
        assert train(hf_compat) == theirs and len(theirs) == 14
    finally:
        transformers_log.removeHandler(listens)
        transformers.logging.set_verbosity_warning()


def test_an_ejected_project_knows_a_method_that_was_put_on_the_object(tmp_path):
    trainer = make_trainer(hf_compat, tmp_path)
    assert list(overrides_of(trainer)) == []
    trainer.training_step = functools.wraps(trainer.training_step)(lambda *args: None)
    assert list(overrides_of(trainer)) == [("training_step", "Trainer", trainer.training_step)]


def test_the_tools_know_a_method_that_was_put_on_our_class(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_compat.Trainer, "log", functools.wraps(hf_compat.Trainer.log)(lambda *_: None))
    trainer = make_trainer(hf_compat, tmp_path)
    assert [(name, owner) for name, owner, _ in overrides_of(trainer)] == [("log", "Trainer")]
    assert overrides(trainer, "log") and not overrides(trainer, "evaluate")
