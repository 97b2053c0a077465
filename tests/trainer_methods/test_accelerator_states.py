"""`accelerator.save_state` and `load_state` are Accelerate's own. They run no code of a file, and refuse shards."""

from __future__ import annotations

import os
import random
import sys

import pytest
import torch
import transformers
from torch import nn

from helpers import toy
from hf_compat import Trainer
from hf_compat.checkpoint.model_state import MeshState
from hf_compat.errors import CheckpointError, HfCompatWarning, MissingPackage, UnsupportedArgument


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
    names = ["custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl"]
    assert sorted(os.listdir(folder)) == names
    weights = weights_of(trained)
    moments = [state["exp_avg"].tolist() for state in trained.optimizer.state.values()]
    drawn = (random.random(), torch.rand(1).item())
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.zero_()
    trained.optimizer.state.clear()
    counter.count = 99
    accelerator.load_state(folder)
    assert weights_of(trained) == weights and counter.count == 3
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


class Payload:
    def __reduce__(self):
        return exec, ("raise SystemExit('run by a pickle')",)


@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "optimizer.bin", "random_states_0.pkl"])
@pytest.mark.parametrize("has_code", [True, False])
def test_a_file_with_code_or_damage_is_named_and_nothing_is_touched(trained, tmp_path, name, has_code):
    trained.accelerator.register_for_checkpointing(Counter())
    folder = trained.accelerator.save_state(tmp_path / "state")
    if has_code:
        torch.save({"count": Payload()}, folder / name)
    else:
        (folder / name).write_bytes(b"nothing")
    nn.init.zeros_(trained.model.outer.weight)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        trained.accelerator.load_state(folder, load_kwargs={"weights_only": False})
    assert not trained.model.outer.weight.any()


def test_bad_input_is_named(trained, make_args, tmp_path):
    accelerator = trained.accelerator
    for call, message in (
        (accelerator.save_state, "no `output_dir`"),
        (accelerator.load_state, "no `input_dir`"),
        (lambda: accelerator.save_state(tmp_path, tag="x"), "got tag"),
        (lambda: accelerator.register_for_checkpointing(3), "state_dict"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(CheckpointError, match="is not a folder"):
        accelerator.load_state(tmp_path / "nowhere")
    with pytest.warns(HfCompatWarning, match="saves no model"):
        early = Trainer(toy.Classifier(), make_args()).accelerator.save_state(tmp_path / "early")
    assert os.listdir(early) == ["random_states_0.pkl"]
    os.rename(early / "random_states_0.pkl", early / "random_states_1.pkl")
    with pytest.warns(HfCompatWarning, match="has no random states of process 0"):
        Trainer(toy.Classifier(), make_args()).accelerator.load_state(early)


def test_shards_and_a_missing_accelerate_are_refused(trained, tmp_path, monkeypatch):
    accelerator = trained.accelerator
    monkeypatch.setitem(sys.modules, "accelerate", None)
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(MissingPackage, match=r"(?s)_state` needs the package accelerate.*pip install accelerate"):
            call(tmp_path)
    for name in ("accumulate", "join_uneven_inputs", "save_model", "set_trigger", "register_save_state_pre_hook"):
        with pytest.raises(MissingPackage, match=f"`{name}` needs the package accelerate"):
            getattr(accelerator, name)
    accelerator._trained_state = MeshState(trained.model, writes_shards=False)
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(UnsupportedArgument, match=r"_save_checkpoint\("):
            call(tmp_path)
