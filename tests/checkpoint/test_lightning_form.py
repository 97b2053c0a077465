"""What the check of Lightning's own files lets through, Lightning's loops can load."""

from __future__ import annotations

import copy
import logging

import lightning.pytorch as pl
import pytest
import torch

from helpers import damage, toy
from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.checkpoint.convert import check_lightning
from hf_compat.errors import CheckpointError


def loops() -> dict:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    return {"fit_loop": trainer.fit_loop.state_dict()}


def places(state: dict, before: tuple = ()) -> list[tuple]:
    inner = [
        place for name, value in state.items() if isinstance(value, dict) for place in places(value, (*before, name))
    ]
    return [*([before] if before else []), *inner]


def is_let_through(state: dict) -> bool:
    try:
        check_lightning("it.ckpt", {"state_dict": {}, "epoch": 0, "global_step": 0, "loops": state})
    except CheckpointError as error:
        assert "it.ckpt" in str(error)
        return False
    return True


@pytest.mark.parametrize(
    "new", [{}, {"total": {}}, {"optimizer": {}}, {"optimizer": {"step": {}, "zero_grad": {}}}], ids=str
)
def test_what_is_let_through_can_be_loaded(new):
    """Every mapping in the states of the loops is emptied, or holds less than it should."""
    assert is_let_through(loops())
    refused = []
    for place in places(loops()):
        state = loops()
        holder = state
        for name in place[:-1]:
            holder = holder[name]
        holder[place[-1]] = copy.deepcopy(new)
        if not is_let_through(state):
            refused.append(place)
        elif state.get("fit_loop"):
            pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop.load_state_dict(
                state["fit_loop"]
            )
    assert any(place[-1].endswith("optim_step_progress") for place in refused)
    assert any(place[-1].endswith("optim_progress") for place in refused) or "optimizer" in new


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_weight_that_is_gone_is_an_error_or_told_of(tmp_path, caplog):
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    path = tmp_path / "it.ckpt"
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=4)

    def fit(epochs: int, strict: bool = True, **resumed: str) -> pl.Trainer:
        trainer = pl.Trainer(max_epochs=epochs, enable_checkpointing=False, **options)
        module = HFModule(toy.Classifier(), args)
        module.strict_loading = strict
        trainer.fit(module, HFDataModule(args, toy.rows(16)), **resumed)
        return trainer

    fit(1).save_checkpoint(path)
    with caplog.at_level(logging.WARNING, "hf_compat"):
        fit(2, ckpt_path=str(path))
        assert "Missing key" not in caplog.text
        content = torch.load(path, weights_only=True)
        (name, *_) = [name for name in content["state_dict"] if name.endswith("weight")]
        torch.save(damage.changed(content, ("state_dict", name), damage.REMOVED), path)
        with pytest.raises(CheckpointError, match=f"(?s)it.ckpt does not fit.*{name}"):
            fit(2, ckpt_path=str(path))
        fit(2, strict=False, ckpt_path=str(path))
    assert f'{path} does not fit HFModule. Missing key(s) in state_dict: "{name}".' in caplog.text


def test_a_version_that_is_no_text_is_refused():
    with pytest.raises(CheckpointError, match="pytorch-lightning_version"):
        check_lightning("it.ckpt", {"state_dict": {}, "epoch": 0, "global_step": 0, "pytorch-lightning_version": None})
