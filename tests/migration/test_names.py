"""The tables of names, against both packages."""

from __future__ import annotations

import importlib

import transformers

import hf_compat
from hf_compat.interop.former_names import MOVED, MOVED_MODULES, RENAMED
from hf_compat.tools.migration.expression_types import _CLASSES
from hf_compat.tools.migration.gone_names import GONE
from hf_compat.tools.migration.names import MIRRORS, PUBLIC, TOP_LEVEL, bound_by_star


def test_the_top_level_is_what_both_have():
    assert {name for name in hf_compat.__all__ if name in transformers.__all__} == TOP_LEVEL
    homes = ("trainer_utils", "trainer_callback", "integrations", "trainer")
    theirs = set().union(*(dir(importlib.import_module(f"transformers.{one}")) for one in homes))
    assert {name for name in hf_compat.__all__ if name in theirs} | TOP_LEVEL == PUBLIC


def test_mirrored_modules_hold_these_names():
    for module, names in MIRRORS.items():
        assert names <= set(dir(importlib.import_module(f"hf_compat.{module}"))) | {"Seq2SeqTrainer"}, module
        theirs = importlib.import_module(f"transformers.{module}")
        for name in names:
            assert hasattr(theirs, name), f"{module}.{name}"


def test_successors_exist_and_what_is_gone_does_not():
    for path in (*MOVED_MODULES.values(), *MOVED.values()):
        assert importlib.import_module(path)
    for name in RENAMED.values():
        assert hasattr(transformers, name)
    assert [name for name in GONE if name in transformers.__all__] == []
    for name in _CLASSES:
        assert name == "AdamW" or name in PUBLIC


def test_star_imports_bind_these_names():
    """As Python does it, of this release."""
    modules = (
        "trainer", "hf_argparser", "integrations", "integrations.integration_utils", "data", "data.data_collator",
        "optimization", "trainer_callback", "training_args", "trainer_utils",
    )  # fmt: skip
    for module in ("transformers", *(f"transformers.{one}" for one in modules)):
        theirs = importlib.import_module(module)
        public = getattr(theirs, "__all__", None) or [name for name in vars(theirs) if not name.startswith("_")]
        mirrored = MIRRORS.get(module.removeprefix("transformers."), frozenset())
        assert bound_by_star(module) & PUBLIC - mirrored == set(public) & PUBLIC - mirrored, module
