"""What the check of Lightning's own files lets through, Lightning's loops can load."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest

from hf_compat.checkpoint.lightning_form import check_lightning
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
