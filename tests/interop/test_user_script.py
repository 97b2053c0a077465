"""Where a script that runs in this process finds its modules."""

from __future__ import annotations

import sys

import pytest

from hf_compat.interop import user_script


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/of/the/command/hf-compat"])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    (tmp_path / "neighbour_of_a_script.py").write_text("")
    path = tmp_path / "script.py"
    path.write_text("import neighbour_of_a_script, sys\nsys.found = sys.path[:]\n")
    yield str(path)
    sys.modules.pop("neighbour_of_a_script", None)
    del sys.found


@pytest.mark.parametrize(
    ("path", "expected"),
    [(["", "/packages"], ["HERE", "/packages"]), (["/of/the/command", "/packages"], ["HERE", "/packages"]),
     (["/first", "/packages"], ["HERE", "/first", "/packages"])],
    ids=["the working folder", "that of the command", "somebody's own"],
)  # fmt: skip
def test_its_folder_takes_the_place_of_the_commands(tmp_path, monkeypatch, script, path, expected):
    monkeypatch.setattr(sys, "path", [*path, *sys.path])
    user_script.run_script(script, [])
    assert sys.found[: len(expected)] == [str(tmp_path) if one == "HERE" else one for one in expected]
    assert sys.argv == [script]
