"""Under `patch()`, ours may hand work to the object of transformers that it replaces. It reaches the original."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "hf_compat"


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    folder = tmp_path_factory.mktemp("called")
    done = subprocess.run(
        [sys.executable, str(HERE / "called_names.py"), str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":16:8", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    return json.loads(line[5:])


def test_each_replaced_name_is_called(called):
    """A name that is replaced from now on needs a call."""
    assert called["replaced"] == sorted(called["under"]) and len(called["replaced"]) > 50


def test_each_replaced_name_gives_what_transformers_own_gives(called):
    for name, before in called["before"].items():
        assert called["under"][name] == before, name
    failed = {name for name, outcome in called["before"].items() if isinstance(outcome, dict) and "error" in outcome}
    assert failed == set(), "each call is one that works"


# Modules of transformers that our code imports other than by `of_installed`, with what it takes from them
KNOWN = {
    ("hf/process_state.py", "transformers.integrations"),  # `HfTrainerDeepSpeedConfig`
    ("hub/model_card.py", "transformers.modelcard"),  # what the card's own code compares with
    ("interop/former_names.py", "transformers.utils"),  # `is_torch_xla_available`
    ("interop/releases.py", "transformers."),  # `of_installed` and `of_transformers`
}


def test_our_code_looks_up_names_of_transformers_in_one_place(called):
    """A look-up elsewhere finds ours under `patch()`. Tools observe what a script has, so they are left out."""
    found, imported = set(), set()
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())) if not file.startswith("tools/") else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
                imported |= {(file, one.name) for one in node.names}
            name = node.func if isinstance(node, ast.Call) else None
            if name is None or getattr(name, "attr", getattr(name, "id", "")) not in ("import_module", "need"):
                continue
            text = next((one.value for one in ast.walk(node.args[0]) if isinstance(one, ast.Constant)), "")
            if text.startswith("transformers."):
                found.add((file, text))
    assert found == KNOWN
    assert {name for _, name in imported}.isdisjoint(called["replaced"])
