"""A Trainer's one-time messages about model, inputs and signals, in transformers' words where these exist."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from helpers import toy
from hf_compat import Trainer, TrainerCallback
from hf_compat.hf.callbacks import JITCheckpointCallback
from hf_compat.trainer_methods import steps


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(steps.logger, "_told", set())


def test_label_smoothing_with_several_labels_is_off_and_said(make_args):
    model = toy.Classifier()
    model.config = SimpleNamespace(problem_type="multi_label_classification")
    with pytest.warns(UserWarning, match="Label smoothing is not compatible with multi-label classification"):
        trainer = Trainer(model, make_args(label_smoothing_factor=0.1))
    assert trainer.label_smoother is None


def test_a_loss_function_without_labels_is_called_and_said_once(make_args, caplog):
    seen = []

    def loss(outputs, labels, num_items_in_batch=None):
        seen.append(labels)
        return outputs["logits"].sum()

    samples = [{"x": torch.ones(8)}] * 8
    Trainer(toy.Classifier(), make_args(), train_dataset=samples, compute_loss_func=loss).train()
    assert seen and set(seen) == {None}
    assert sum("`labels=None`" in message for message in caplog.messages) == 1


def test_tokens_that_cannot_be_told_from_padding_are_all_counted_and_said(make_args, caplog):
    args = make_args(include_num_input_tokens_seen="non_padding", max_steps=2)
    samples = [{"input_ids": torch.ones(6, dtype=torch.long), "labels": torch.ones(6, dtype=torch.long)}] * 8
    trainer = Trainer(toy.tiny_gpt2(), args, train_dataset=samples)
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 2 * 4 * 6
    said = [message for message in caplog.messages if "method to count non-padding tokens" in message]
    assert len(said) == 1 and "All tokens are counted" in said[0]


class Asks(TrainerCallback):
    """Requests a checkpoint and the end, like a script that watches a queue."""

    def on_step_begin(self, args, state, control, trainer, **kwargs):
        (found,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, JITCheckpointCallback)]
        found.jit_manager.is_checkpoint_requested = state.global_step == 1


def test_a_script_asks_for_a_checkpoint_as_a_signal_does(make_args):
    args = make_args(max_steps=5, enable_jit_checkpoint=True)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(24), callbacks=[Asks])
    (found,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, JITCheckpointCallback)]
    assert found.trainer is trainer and found.jit_manager.is_checkpoint_requested is False
    assert trainer.train().global_step == 2
    assert [name for name in os.listdir(args.output_dir) if name.startswith("checkpoint-")] == ["checkpoint-2"]
    trainer.stop_signals.received = 15
    assert found.jit_manager.is_checkpoint_requested is True
    without = Trainer(toy.Classifier(), make_args())
    assert not any(isinstance(one, JITCheckpointCallback) for one in without.callback_handler.callbacks)
