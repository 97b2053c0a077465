"""The documentation site builds without a warning: no broken link, no page outside of the navigation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import hf_compat

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "-d", str(tmp_path / "site")]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    shown = set(re.findall(r'<h3 id="hf_compat\.(\w+)"', page))
    assert shown == set(hf_compat.__all__), "docs/api.md shows each public name once"
