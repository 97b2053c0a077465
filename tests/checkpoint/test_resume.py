"""Resuming gives the uninterrupted run, from every checkpoint, bit for bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import toy
from helpers.parity.compare import same
from hf_compat import Trainer, TrainerState, get_last_checkpoint
from hf_compat.errors import CheckpointError

TIMED = ("_runtime", "_per_second")


def run(make_args, folder, data, resume=None, **values):
    args = make_args(
        output_dir=str(folder),
        gradient_accumulation_steps=3,
        num_train_epochs=3,
        save_steps=1,
        logging_steps=1,
        **values,
    )
    from hf_compat import set_seed

    set_seed(3)
    model = toy.Classifier()
    trainer = Trainer(model, args, train_dataset=data(), eval_dataset=toy.rows(9, 5))
    trainer.train(resume_from_checkpoint=resume)
    logs = [{k: v for k, v in log.items() if not k.endswith(TIMED)} for log in trainer.state.log_history]
    return model.state_dict(), logs, trainer


@pytest.mark.parametrize("count", [50, 48])  # a short last window, and none
def test_from_every_checkpoint(make_args, tmp_path, count):
    def data():
        return toy.rows(count)

    expected, logs, trainer = run(make_args, tmp_path / "whole", data, save_strategy="steps")
    steps = trainer.state.global_step
    assert steps == (15 if count == 50 else 12)
    for step in range(1, steps + 1):
        folder = tmp_path / "whole" / f"checkpoint-{step}"
        weights, resumed_logs, _ = run(make_args, tmp_path / f"from{step}", data, str(folder), save_strategy="no")
        assert same(weights, expected), f"resumed at update {step}"
        assert resumed_logs == logs, f"resumed at update {step}"


@pytest.mark.parametrize("count", [50, 48])
def test_the_order_goes_on_though_torch_was_seeded_otherwise(make_args, tmp_path, count):
    """A `model_init` that seeds torch has seeded the shuffling, too; the run that goes on has the model itself."""
    found = {}

    def train(name, resume=None, **options):
        saves = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 3}
        args = make_args(output_dir=str(tmp_path / name), num_train_epochs=3, logging_steps=1, **saves)
        trainer = Trainer(args=args, train_dataset=toy.rows(count), **options)
        trainer.train(resume_from_checkpoint=resume)
        found[name] = [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer.model.state_dict()

    def seeds():
        torch.manual_seed(9)
        return toy.Classifier()

    train("whole", model_init=seeds)
    for update in (3, 5, 7):
        train(f"from{update}", str(tmp_path / "whole" / f"checkpoint-{update}"), model=toy.Classifier())
        assert same(found[f"from{update}"], found["whole"]), f"resumed at update {update}"


def test_samples_that_were_trained_on_are_not_read_again(make_args, tmp_path):
    run(make_args, tmp_path / "whole", lambda: toy.Table(toy.rows()), save_strategy="steps")
    table = toy.Table(toy.rows())
    run(make_args, tmp_path / "again", lambda: table, str(tmp_path / "whole" / "checkpoint-14"), save_strategy="no")
    # one window of one micro-batch is left in the last epoch; it had been read ahead, so the checkpoint holds it
    assert table.reads == 0
    table = toy.Table(toy.rows())
    run(make_args, tmp_path / "again", lambda: table, str(tmp_path / "whole" / "checkpoint-13"), save_strategy="no")
    assert table.reads == 2 * 4 + 2


def test_true_takes_the_last_checkpoint(make_args, tmp_path):
    folder = tmp_path / "whole"
    run(make_args, folder, toy.rows, save_strategy="steps")
    assert get_last_checkpoint(folder) == str(folder / "checkpoint-15")
    (folder / "checkpoint-99.partial").mkdir()
    assert get_last_checkpoint(folder) == str(folder / "checkpoint-15")
    _, _, trainer = run(make_args, folder, toy.rows, resume=True, save_strategy="no")
    assert trainer.state.global_step == 15


def test_state_round_trips_its_json(make_args, tmp_path):
    _, _, trainer = run(make_args, tmp_path / "whole", toy.rows, save_strategy="epoch")
    path = tmp_path / "state.json"
    trainer.state.save_to_json(path)
    assert TrainerState.load_from_json(path) == trainer.state


def test_random_states_of_python_and_numpy_are_restored(make_args, tmp_path):
    import random

    import numpy as np

    from hf_compat import TrainerCallback

    class Draw(TrainerCallback):
        drawn: list = []

        def on_step_end(self, args, state, control, **kwargs):
            self.drawn.append((state.global_step, random.random(), float(np.random.rand())))

    def draws(folder, resume=None):
        Draw.drawn = []
        args = make_args(output_dir=str(folder), save_strategy="steps", save_steps=5, num_train_epochs=1)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=[Draw])
        trainer.train(resume_from_checkpoint=resume)
        return Draw.drawn

    whole = draws(tmp_path / "a")
    assert draws(tmp_path / "b", str(tmp_path / "a" / "checkpoint-5")) == whole[5:]


def saved_model(folder):
    torch.manual_seed(11)
    folder.mkdir()
    save_file(toy.Classifier().state_dict(), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("word", ["model_path", "resume_from_checkpoint"])
def test_a_folder_that_holds_a_model_alone_is_trained_from_the_start(make_args, tmp_path, word, caplog):
    """Scripts of 3.x, and examples until 4.31, hand the folder of a pretrained model to `train`."""
    folder = saved_model(tmp_path / "pretrained")
    found = []
    for give_weights in (False, True):
        model = toy.Classifier()
        if not give_weights:
            model.load_state_dict(load_file(folder / "model.safetensors"))
        trainer = Trainer(model, make_args(max_steps=3, save_strategy="no"), train_dataset=toy.rows(20))
        trainer.train(**({word: str(folder)} if give_weights else {}))
        found.append((trainer.state.global_step, model.state_dict()))
        trainer.train()  # once is once: this goes on with the weights as they are
        found.append(model.state_dict())
    assert same(found[:2], found[2:]) and "no state of a training" in caplog.text


def test_what_is_left_of_a_checkpoint_is_no_model_to_begin_with(make_args, tmp_path):
    trainer = Trainer(toy.Classifier(), make_args(max_steps=1), train_dataset=toy.rows(8))
    half = saved_model(tmp_path / "checkpoint-4")
    rest = saved_model(tmp_path / "rest")
    torch.save({}, rest / "optimizer.pt")
    for folder in (half, rest):
        with pytest.raises(CheckpointError, match=r"trainer_state\.json is missing"):
            trainer.train(resume_from_checkpoint=str(folder))
    (saved_model(tmp_path / "other") / "model.safetensors").unlink()
    save_file({"inner.weight": torch.zeros(1, 1)}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)holds another model.*Hint: make the model as it was"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "other"))
