"""On the day a newer transformers or Lightning is installed, this test lists what is new in it, and what is gone."""

from __future__ import annotations

import pytest

from house import upstream_names
from sweeps.releases import bounds

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


def test_every_lower_bound_of_pyproject_has_a_row_of_tests_or_a_reason():
    assert set(bounds.ROWS) == set(bounds.bounds())
    assert all(bool(row.tests) != bool(row.left_out) for row in bounds.ROWS.values())
    files = [word for row in bounds.ROWS.values() for word in row.tests if word.startswith("tests/")]
    assert all((ROOT / file).exists() for file in files)


@pytest.mark.parametrize("line", ["tqdm", "tqdm==4.64", "tqdm<5", "numpy>=1.25"])
def test_a_requirement_whose_bound_cannot_be_installed_literally_is_refused(line):
    text = (
        f'[project]\nname = "x"\ndependencies = ["numpy>=1.26"]\noptional-dependencies.extra = ["x[other]", "{line}"]'
    )
    with pytest.raises(ValueError, match=line.split(">")[0]):
        bounds.bounds(text)
