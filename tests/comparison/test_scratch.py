"""The folder that a compared script works in: the user's files are read there, and none is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_compat.comparison.child import scratch
from hf_compat.comparison.child.scratch import ScratchFolder

# An audit hook stays until its process ends: what a script does, it does in one of its own.
DRIVER = """
import importlib.util, os, shutil, sys
spec = importlib.util.spec_from_file_location("scratch", sys.argv[1])
scratch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scratch)
scratch._places_of_the_machine = lambda: iter(())
scratch.ScratchFolder(*sys.argv[2:5], sys.argv[5:6]).guard()
"""
SCRIPT = """
assert open("data/rows.txt").read() == open("../beside/more.txt").read() == "mine"
with open("new.txt", "w") as file:
    file.write("new")
with open("data/rows.txt", "a") as file:
    file.write(" and more")
assert open("data/rows.txt").read() == "mine and more"
os.makedirs("saved/deep", exist_ok=True)
os.makedirs("saved", exist_ok=True)
assert not os.path.islink("saved/model.bin"), "code beside Python may write it"
os.remove("notes.txt")
os.rename("saved/model.bin", "saved/other.bin")
shutil.rmtree("old")
os.chmod("data/mode.txt", 0o600)
with open("../beside/more.txt", "w") as file:
    file.write("changed")
"""


@pytest.fixture
def project(tmp_path):
    files = {
        "data/rows.txt": "mine", "data/mode.txt": "m", "saved/model.bin": "weights", "old/a/b.txt": "b",
        "notes.txt": "n", "../beside/more.txt": "mine",
    }  # fmt: skip
    folder = tmp_path / "project"
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "run" / "side").mkdir(parents=True)
    return folder


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_text(), path.stat().st_mode) for path in paths}


def run(project, script, *allowed):
    made = ScratchFolder(str(project.parent / "run" / "side" / "files"), str(project), str(project))
    made.make()
    (project.parent / "script.py").write_text(DRIVER + script)
    words = [scratch.__file__, made.place, made.origin, str(project), *allowed]
    command = [sys.executable, "-I", str(project.parent / "script.py"), *words]
    return made, subprocess.run(command, cwd=made.working_folder, capture_output=True, text=True)


def test_a_script_changes_nothing_of_the_users(project):
    before = contents(project), contents(project.parent / "beside")
    made, done = run(project, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert (contents(project), contents(project.parent / "beside")) == before
    written = Path(made.working_folder)
    assert (written / "new.txt").read_text() == "new" and (written / "saved" / "other.bin").read_text() == "weights"
    assert not (written / "old").exists() and not (written / "notes.txt").exists()
    shutil.rmtree(made.place)  # as `--clean` does: links go, not what they lead to
    assert (contents(project), contents(project.parent / "beside")) == before


@pytest.mark.parametrize("change", ["open(P, 'w')", "os.remove(P)", "os.makedirs(P + '/new')", "os.rename(P, 'here')"])
def test_an_absolute_path_is_refused_by_name(project, change):
    path = str(project / "notes.txt")
    _, done = run(project, f"P = {path!r}\n{change}")
    assert done.returncode == 1 and "PermissionError" in done.stderr
    assert "hf-compat compare" in done.stderr and path in done.stderr and "--allow-writes" in done.stderr
    assert (project / "notes.txt").read_text() == "n"


def test_a_folder_may_be_opened_to_the_script(project):
    target = project.parent / "open"
    _, done = run(project, f"os.makedirs({str(target)!r} + '/a')", str(target))
    assert done.returncode == 0 and (target / "a").is_dir(), done.stderr


def test_caches_stay_writable(project):
    made, done = run(project, "os.makedirs(sys.argv[4] + '/.cache/x')\nos.makedirs(sys.argv[4] + '/__pycache__')")
    assert done.returncode == 0, done.stderr
    assert os.path.isdir(project / ".cache" / "x") and os.path.isdir(made.working_folder)
