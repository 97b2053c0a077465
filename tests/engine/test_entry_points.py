"""Callbacks that installed packages register with Lightning are in our trainer, too, though packages are read once."""

import importlib.metadata
import sys
from types import ModuleType

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities import registry

from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.engine import window_trainer


class Registered(pl.Callback):
    pass


@pytest.fixture
def make_trainer(tmp_path):
    def make():
        args = TrainingArguments(str(tmp_path / "run"), max_steps=1, use_cpu=True, save_strategy="no", report_to="none")
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8), eval_dataset=toy.rows(8))
        trainer.evaluate()
        return trainer.lightning_trainer

    return make


def test_a_package_that_is_installed_later_is_found(make_trainer, tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    assert not any(isinstance(one, Registered) for one in make_trainer().callbacks)
    module = ModuleType("registering")
    module.make = lambda: [Registered()]
    monkeypatch.setitem(sys.modules, "registering", module)
    info = site / "registering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: registering\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lightning.pytorch.callbacks_factory]\nmine = registering:make\n")
    first, second = (
        [one for one in make_trainer().callbacks if isinstance(one, Registered)] for _ in range(2)
    )  # each trainer has its own
    assert len(first) == len(second) == 1 and first[0] is not second[0]


def test_packages_are_looked_at_once(make_trainer, monkeypatch):
    looked = []
    monkeypatch.setattr(window_trainer, "names_no_entry_point", lambda path, group: looked.append(group) or True)
    window_trainer._entry_points_in.cache_clear()
    make_trainer()
    make_trainer()
    assert looked == ["lightning.pytorch.callbacks_factory"]


def test_lightning_searches_by_itself_outside_of_our_trainer(make_trainer):
    make_trainer()
    assert registry.entry_points is importlib.metadata.entry_points


def test_a_search_that_another_package_has_replaced_is_called(make_trainer, monkeypatch):
    asked = []
    monkeypatch.setattr(registry, "entry_points", lambda group: asked.append(group) or ())
    make_trainer()
    assert asked == ["lightning.pytorch.callbacks_factory"]
