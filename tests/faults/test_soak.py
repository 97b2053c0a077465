"""A short run of `soak.py`: nothing grows but the history."""

from __future__ import annotations

import tempfile

import soak


def test_nothing_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others write to the machine's own
    samples = soak.run(150, str(tmp_path / "out"))
    first, last = samples[len(samples) // 5], samples[-1]
    assert len(samples) == 50 and last["updates"] == 150
    assert all(last[name] <= first[name] + 3 for name in (*soak.COUNTED, "callbacks"))


def test_growth_is_the_slope():
    samples = [{"updates": 100 * place, "threads": 7 + place} for place in range(1, 51)]
    assert round(soak.growth(samples)["threads"], 6) == 10
