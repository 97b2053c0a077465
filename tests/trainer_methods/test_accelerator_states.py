"""`accelerator.save_state` and `load_state` restore everything. An error names what does not fit."""

from __future__ import annotations

import os
import random

import pytest
import torch
import toy
import transformers
from torch import nn

from hf_compat import Trainer
from hf_compat.errors import ArgumentError, CheckpointError, CheckpointWriteError, HfCompatWarning


class Counter:
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


@pytest.fixture
def trained(make_args):
    trainer = Trainer(toy.Classifier(), make_args(max_steps=2, learning_rate=0.01), train_dataset=toy.rows(16))
    trainer.train()
    return trainer


def weights_of(trainer):
    return {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}


def test_all_that_was_is_back_after_training(trained, tmp_path):
    accelerator, counter = trained.accelerator, Counter(3)
    accelerator.register_for_checkpointing(counter)
    folder = accelerator.save_state(tmp_path / "state")
    names = ["custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "scheduler.bin"]
    assert sorted(os.listdir(folder)) == names
    weights, schedule = weights_of(trained), trained.lr_scheduler.state_dict()
    moments = [state["exp_avg"].tolist() for state in trained.optimizer.state.values()]
    drawn = (random.random(), torch.rand(1).item())
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.zero_()
    trained.optimizer.state.clear()
    trained.lr_scheduler.last_epoch = counter.count = 99
    accelerator.load_state(folder)
    assert weights_of(trained) == weights and trained.lr_scheduler.state_dict() == schedule and counter.count == 3
    assert [state["exp_avg"].tolist() for state in trained.optimizer.state.values()] == moments
    assert (random.random(), torch.rand(1).item()) == drawn


@pytest.mark.parametrize("is_safe", [True, False])
def test_accelerates_folders_are_read_and_ours_by_it(make_args, tmp_path, is_safe):
    theirs = transformers.Trainer(
        toy.Classifier(),
        transformers.TrainingArguments(str(tmp_path / "out"), max_steps=2, use_cpu=True, report_to="none"),
        train_dataset=toy.rows(16),
    )
    theirs.train()
    theirs.accelerator.save_state(str(tmp_path / "theirs"), safe_serialization=is_safe)
    ours = Trainer(toy.Classifier(), make_args(max_steps=1), train_dataset=toy.rows(16))
    ours.train()
    with pytest.warns(HfCompatWarning, match="has no scheduler.bin, so the training's schedule continues"):
        ours.accelerator.load_state(tmp_path / "theirs")
    assert weights_of(ours) == weights_of(theirs)
    ours.accelerator.save_state(tmp_path / "ours", safe_serialization=is_safe)
    with torch.no_grad():
        theirs.model.outer.weight.zero_()
    theirs.accelerator.load_state(str(tmp_path / "ours"))
    assert weights_of(ours) == weights_of(theirs)


def test_hooks_and_further_models(trained, tmp_path):
    accelerator, seen = trained.accelerator, []
    critic = nn.Linear(2, 2)
    made, _ = accelerator.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9))

    def keeps_the_first(models, weights, folder):
        seen.append((len(models), len(weights), os.path.basename(folder)))
        weights.pop(0)
        weights.insert(0, {name: tensor + 1 for name, tensor in models[0].state_dict().items()})

    saves = accelerator.register_save_state_pre_hook(keeps_the_first)
    loads = accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(len(models)))
    before, other = weights_of(trained), critic.weight.tolist()
    folder = accelerator.save_state(tmp_path / "state")
    assert {"model_1.safetensors", "optimizer_1.bin"} <= set(os.listdir(folder)) and made is critic
    nn.init.zeros_(critic.weight)
    accelerator.load_state(folder)
    assert seen == [(2, 2, "state"), 2] and critic.weight.tolist() == other
    assert trained.model.outer.bias.tolist() == pytest.approx([one + 1 for one in before["outer.bias"]])
    saves.remove()
    loads.remove()
    accelerator.save_state(tmp_path / "further")
    assert len(seen) == 2


def damage(folder, name):
    (folder / name).write_bytes(b"nothing")


@pytest.mark.parametrize(
    "name, spoil, message",
    [
        ("optimizer.bin", os.remove, "has no optimizer.bin"),
        ("model.safetensors", os.remove, r"has no model.safetensors and no pytorch_model.bin.*resume_from_checkpoint"),
        ("random_states_0.pkl", lambda path: damage(path.parent, path.name), "random_states_0.pkl cannot be read"),
        ("scheduler.bin", lambda path: damage(path.parent, path.name), "scheduler.bin cannot be read"),
    ],
)
def test_what_is_damaged_is_named_and_nothing_is_touched(trained, tmp_path, name, spoil, message):
    folder = trained.accelerator.save_state(tmp_path / "state")
    spoil(folder / name)
    nn.init.zeros_(trained.model.outer.weight)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        trained.accelerator.load_state(folder)
    assert not trained.model.outer.weight.any()


def test_a_folder_of_another_model_is_refused(trained, make_args, tmp_path):
    folder = trained.accelerator.save_state(tmp_path / "state")
    for model, message in ((toy.Classifier(classes=4), "has the shape"), (toy.TupleRegressor(), "does not fit")):
        other = Trainer(model, make_args())
        other.accelerator._models.append(model)
        with pytest.raises(CheckpointError, match=message):
            other.accelerator.load_state(folder)


def test_bad_input_and_a_full_disk_are_named(trained, make_args, tmp_path):
    accelerator = trained.accelerator
    for call, message in (
        (accelerator.save_state, "no `output_dir`"),
        (accelerator.load_state, "no `input_dir`"),
        (lambda: accelerator.save_state(tmp_path, tag="x"), "got tag"),
        (lambda: accelerator.register_for_checkpointing(3), "`register_for_checkpointing` got 3"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
    with pytest.raises(CheckpointError, match="is not a folder"):
        accelerator.load_state(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match=r"save_state` could not write to .*file"):
        accelerator.save_state(tmp_path / "file")
    with pytest.warns(HfCompatWarning, match="saves no model"):
        Trainer(toy.Classifier(), make_args()).accelerator.save_state(tmp_path / "early")
    assert os.listdir(tmp_path / "early") == ["random_states_0.pkl"]
