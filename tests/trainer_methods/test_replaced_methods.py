"""Methods that are replaced otherwise than in a subclass: on the object, on the class, by a wrapper, in a callback."""

from __future__ import annotations

import functools
import types

import pytest
import toy
import transformers

import hf_compat
from hf_compat import Trainer
from hf_compat.errors import HfCompatWarning, OverrideError

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
