"""A short run of `soak.py`: nothing grows but the history."""

from __future__ import annotations

import subprocess
import sys

from sweeps.faults import soak


def test_nothing_grows(tmp_path):
    # In a process of its own: what other tests have left open is closed in the midst of a run, or opened.
    ran = subprocess.run([sys.executable, soak.__file__, "150"], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "grown: nothing" in ran.stdout


def test_what_comes_and_goes_has_not_grown():
    samples = [dict.fromkeys(soak.COUNTED, 7 + place % 5) for place in range(50)]
    assert soak.grown(samples) == {}


def test_what_stays_has_grown():
    samples = [{**dict.fromkeys(soak.COUNTED, 7), "threads": 7 + place // 10} for place in range(50)]
    assert soak.grown(samples) == {"threads": (8, 11)}


def test_growth_is_the_slope():
    samples = [{"updates": 100 * place, "threads": 7 + place} for place in range(1, 51)]
    assert round(soak.growth(samples)["threads"], 6) == 10
