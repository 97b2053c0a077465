"""The parts of a save in their order, and what a save that fails leaves as it was."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback

from helpers.saving import Background, Folder, make
from hf_compat.checkpoint.manifest import SavingPlace
from hf_compat.errors import CheckpointWriteError
from hf_compat.training_run import saver as saving
from hf_compat.training_run.saver import Saver, Timing


def saving_to(monkeypatch, timing=Timing.NOW, in_place=False, put=True, **values):
    """A saver whose parts of a save only tell that they ran, in `told`."""
    told = []
    args = {"push_to_hub": False} | values.pop("args", {})
    best = SimpleNamespace(global_step=3, total_flos=1, best_global_step=3, best_model_checkpoint="before")
    saver = make(args=args, **({"state": best, "optimizer": "o", "current_flos": 2.0, "is_in_train": True} | values))
    saver.folder = Folder()
    saver.mirror = SimpleNamespace(check=lambda: None, send_held=lambda: told.append("sent"), has_lost_store=False)
    saver.background = Background()
    monkeypatch.setattr(saving, "SavingPlace", lambda final, owner, where: Prepared(final, owner, where, told))
    monkeypatch.setattr(
        saving, "behaviour_of", lambda o: SimpleNamespace(tell_of_saving=lambda: told.append("averaged"))
    )
    monkeypatch.setattr(saving, "log_line", told.append)
    monkeypatch.setattr(Saver, "_where_and_when", lambda self, final: (in_place, timing))
    monkeypatch.setattr(Saver, "check_folder", lambda self, path: told.append(("checked", path)))
    monkeypatch.setattr(Saver, "_frozen_write", lambda self: "frozen")
    monkeypatch.setattr(Saver, "_ask_lightning_callbacks", lambda self: told.append("asked"))
    monkeypatch.setattr(
        Saver,
        "_put",
        lambda self, folder, place, when, at_once, write: told.append(("put", when, at_once, write)) or put,
    )
    monkeypatch.setattr(
        Saver, "_finish_in_time", lambda self, final, when, finish: told.append(("finished", final, when))
    )
    return saver, told


class Prepared(SavingPlace):
    def __init__(self, final, owner, in_place, told):
        super().__init__(final, owner, in_place)
        self.told = told
        told.append(("place", final, in_place))

    def prepare(self, may_write):
        may_write()
        self.told.append("prepared")

    def discard(self):
        self.told.append("discarded")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("timing", [Timing.NOW, Timing.LATER, Timing.SUMMED])
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("put", [False, True])
def test_the_parts_of_a_save(in_place, timing, saves, put, monkeypatch):
    saver, told = saving_to(monkeypatch, timing, in_place, put, args={"should_save": saves})
    folder = saver.folder
    saver.save("run")
    final = os.path.join("run", "checkpoint-3")
    write = told[-1 - put][-1]
    assert write.__func__ is Saver._write_files
    assert told == [
        "sent", ("place", final, in_place), *[("checked", "run"), "prepared"] * saves,
        f"Saving model checkpoint to {final}", "averaged", ("put", timing, timing is Timing.NOW, write),
        *[("finished", final, timing)] * put,
    ]  # fmt: skip
    assert folder.told == [("held", "run")] * (2 * saves) and saver.background.told == ["settled"]
    assert saver._host.state.best_model_checkpoint == final and saver._host.state.total_flos == 1
    saver.save("run", stores_flos=True)
    assert saver._host.state.total_flos == 3.0 and saver._host.current_flos == 0


@pytest.mark.parametrize("callbacks", [[], [Callback()]])
@pytest.mark.parametrize("unpushed", [None, "checkpoint-2"])
def test_a_save_in_the_background(callbacks, unpushed, monkeypatch):
    saver, told = saving_to(monkeypatch, Timing.BACKGROUND, _callbacks=SimpleNamespace(lightning=callbacks))
    saver._host._pushes.unpushed, saver._weights, saver._extras = unpushed, "old", {"old": 1}
    saver._unfinished = lambda: None
    saver.save("run")
    assert ("asked" in told) is bool(callbacks) and saver._weights is None and saver._extras == {}
    assert saver._host._pushes.pushed == [unpushed] * (unpushed is not None)
    assert saver.background.told == ["submitted", "settled", "submitted"] and told[-1] == "averaged"


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_save_outside_of_a_training_takes_its_folder(trains, has_folder, monkeypatch):
    saver, told = saving_to(monkeypatch, is_in_train=trains)
    kept = saver.folder

    @contextlib.contextmanager
    def taking(self, at_once):
        told.append(("taken", at_once))
        self.folder = self.folder or kept
        yield
        told.append("left")

    monkeypatch.setattr(Saver, "taking_folder", taking)
    if not has_folder:
        saver.folder = None
    saver.save("run")
    alone = not (trains and has_folder)
    assert told[:3] == (["sent", ("checked", "run"), ("taken", False)] if alone else ["sent", told[1], told[2]])
    assert (told[-1] == "left") is alone and (("taken", False) in told) is alone


@pytest.mark.parametrize("fails", ["earlier", "prepare", "put"])
def test_a_save_that_fails_changes_nothing(fails, monkeypatch):
    saver, told = saving_to(monkeypatch)
    error = CheckpointWriteError("not written")

    def fail(*_):
        raise error

    if fails == "earlier":
        saver.background = Background(error)
    monkeypatch.setattr(*((Prepared, "prepare", fail) if fails == "prepare" else (Saver, "_put", fail)))
    with pytest.raises(CheckpointWriteError):
        saver.save("run")
    assert saver._host.state.best_model_checkpoint == "before"
    assert ("discarded" in told) is (fails != "put") and ("averaged" in told) is (fails == "put")


@pytest.mark.parametrize(
    ("exists", "is_own", "best", "expected"),
    [(True, True, 2, "checkpoint-2"), (True, False, 2, None), (False, True, 2, None), (True, True, 0, None)],
)
def test_the_best_checkpoint_is_one_of_this_run(exists, is_own, best, expected, monkeypatch, tmp_path):
    state = SimpleNamespace(global_step=3, total_flos=1, best_global_step=best, best_model_checkpoint=None)
    saver, _ = saving_to(monkeypatch, state=state)
    asked = []
    monkeypatch.setattr(saving, "written_by", lambda path: (True, "its writer"))
    monkeypatch.setattr(saving, "is_from_run", lambda *what: asked.append(what) or is_own)
    path = tmp_path / "checkpoint-2"
    if exists:
        path.mkdir()
    saver.save(str(tmp_path))
    assert state.best_model_checkpoint == (expected and str(path))
    assert asked == [(saver._host._run, str(path), "its writer")] * (exists and best > 0)
