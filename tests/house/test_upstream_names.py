"""On the day a newer transformers or Lightning is installed, this test lists what is new in it, and what is gone."""

from __future__ import annotations

import re
import tomllib

from house import upstream_names

ROOT = upstream_names.KNOWN.parents[2]


def test_the_installed_releases_have_the_names_that_are_known():
    found = upstream_names.differences()
    assert found == [], "\n".join([*found, "then: python tests/house/upstream_names.py --write"])


def test_a_name_that_is_not_known_is_listed_with_its_place(monkeypatch):
    names = upstream_names.installed()
    names["events of transformers.TrainerCallback"].append("on_batch_prefetch")
    names["private names of Lightning that hf_compat uses"].remove("_logger_connector")
    monkeypatch.setattr(upstream_names, "installed", lambda: names)
    text = "\n".join(upstream_names.differences())
    assert "new: on_batch_prefetch\n    see hf_compat/hf/callbacks.py" in text
    assert "gone: _logger_connector\n    see hf_compat/engine" in text


def test_every_dependency_has_a_suite_beside_its_oldest_release_or_a_reason():
    from sweeps.releases import bounds

    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", line)[0] for line in lines}
    assert set(bounds.oldest()) == names
    assert set(bounds.SUITES) | set(bounds.LEFT_OUT) == names and not set(bounds.SUITES) & set(bounds.LEFT_OUT)
