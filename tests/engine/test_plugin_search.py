"""Callbacks that installed packages bring: found in every trainer, and searched again after an installation only."""

from __future__ import annotations

import importlib.metadata
import logging
import sys

import pytest
import toy
from lightning.fabric.utilities import registry

from hf_compat import Trainer, TrainingArguments
from hf_compat.engine import build

PLUGIN = """
import lightning.pytorch as pl

class Heard(pl.Callback):
    evaluations = 0
    def on_validation_start(self, trainer, module):
        Heard.evaluations += 1

def callbacks():
    return [Heard()]
"""


@pytest.fixture
def trainer(tmp_path):
    args = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none", disable_tqdm=True)
    return Trainer(toy.Classifier(), args, eval_dataset=toy.rows(8))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a folder of installed packages, and forget afterwards what was imported of it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("heard_plugin", None)


def install_plugin(folder):
    (folder / "heard_plugin.py").write_text(PLUGIN)
    info = folder / "heard_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: heard-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lightning.pytorch.callbacks_factory]\nheard = heard_plugin:callbacks\n")


def test_a_plugin_that_is_installed_between_two_evaluations_is_heard_in_the_second(trainer, installed):
    trainer.evaluate()
    install_plugin(installed)
    trainer.evaluate()
    trainer.evaluate()
    assert sys.modules["heard_plugin"].Heard.evaluations == 2


def test_installed_packages_are_searched_once(trainer, monkeypatch):
    searches = []

    def searching(**query):
        searches.append(query)
        return importlib.metadata.EntryPoints(())

    monkeypatch.setattr(build, "_found", {})
    monkeypatch.setattr(build.metadata, "entry_points", searching)
    monkeypatch.setattr(registry, "entry_points", searching)
    for _ in range(3):
        trainer.evaluate()
    assert searches == [{"group": "lightning.pytorch.callbacks_factory"}]
    assert registry.entry_points is searching  # as it was


def test_a_search_of_another_kind_is_left_alone(trainer, monkeypatch):
    """A later Lightning may search in another way, and a test may stand in for it."""
    searches = []
    monkeypatch.setattr(registry, "entry_points", lambda group: searches.append(group) or ())
    trainer.evaluate()
    trainer.evaluate()
    assert len(searches) == 2


def test_loggers_of_lightning_keep_their_levels_and_filters(trainer):
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = (logger.level, list(logger.filters))
    heard = []

    class Within(toy.Classifier):
        def forward(self, x, labels=None):
            heard.append(logger.level)
            return super().forward(x, labels)

    trainer.model = Within()
    trainer.evaluate()
    assert heard and set(heard) == {before[0]}
    assert (logger.level, list(logger.filters)) == before
