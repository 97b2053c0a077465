"""What a command does in isolation: it sees the user's files, and changes none, whatever it writes with."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hf_compat.errors import ArgumentError
from hf_compat.tools.commands.isolated import call_again
from hf_compat.tools.isolation import copies
from hf_compat.tools.isolation.isolated import Isolation, command, offered
from hf_compat.tools.isolation.plan import CHOSEN

pytestmark = [
    pytest.mark.real_python,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere there are copies, and no Landlock"),
]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import writers

# As a user without rights: namespaces are one's own, and no file system may be mounted otherwise.
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")


@pytest.fixture
def tmp_path():
    """A folder on the disk: beside a project in /dev/shm nothing may be changed, and OpenMP has a file there."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def runs(tmp_path):
    """A folder with a short path: sockets of multiprocessing stand in it, whose paths have 107 characters at most."""
    folder = tempfile.mkdtemp(prefix="runs-", dir="/var/tmp")
    (tmp_path / "runs").symlink_to(folder)
    yield
    shutil.rmtree(folder, ignore_errors=True)


def isolation_of(how, tmp_path, monkeypatch) -> Isolation:
    """What the system offers, or copies; skips where it has no overlay."""
    monkeypatch.setenv(CHOSEN, how)
    found = offered(os.path.realpath(tmp_path / "runs"))
    if found.how != how:
        pytest.skip(found.told)
    assert os.listdir(tmp_path / "runs") == [], "the trial leaves nothing"
    return found


def run(isolation, tmp_path, *words, before=()):
    """Run a command in isolation; returns the folder that it leaves, and the finished process."""
    plan = isolation.begin(os.path.realpath(tmp_path / "runs" / "run"), True, print)
    done = subprocess.run([*before, *command(plan, list(map(str, words)))], capture_output=True, text=True, timeout=200)
    return Path(plan.folder), done


def state_of(folder: Path) -> dict:
    """All that there is to know of the files in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        told = path.lstat()
        marks = (told.st_mode, told.st_uid, told.st_gid, told.st_mtime_ns, told.st_nlink)
        inside = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (marks, inside, tuple(os.listxattr(path, follow_symlinks=False)))
    return found


@pytest.mark.parametrize("how", ["overlay", "copies", pytest.param("user namespace", marks=pytest.mark.matrix)])
def test_nothing_that_writes_reaches_the_users_files(how, project, tmp_path, monkeypatch):
    before = () if how != "user namespace" else WITHOUT_RIGHTS
    if before and (os.getuid() or shutil.which("setpriv") is None):
        pytest.skip("only root has rights to lay down")
    isolation = isolation_of("copies" if how == "copies" else "overlay", tmp_path, monkeypatch)
    writers.prepare(project)
    beside = tmp_path / writers.BESIDE
    states = state_of(project), state_of(beside)
    folder, done = run(isolation, tmp_path, sys.executable, HERE / "writers.py", project, before=before)
    assert done.returncode == 0, done.stderr
    assert (state_of(project), state_of(beside)) == states
    told = {line["name"]: line["error"] for line in map(json.loads, done.stdout.splitlines())}
    refused = {name for name, error in told.items() if error}
    assert refused <= {*writers.OUTWARD, "chown"} and (how == "copies" or not refused & {*writers.OUTWARD}), told
    # Each has written: in the copy, or where the overlay keeps it
    kept = {os.path.relpath(path, f"{folder}/files{tmp_path}") for path in (folder / "files").rglob("*")}
    deleted = (folder / "deleted.txt").read_text().splitlines()
    for name in told.keys() - refused:
        place = f"{writers.BESIDE}/" if name in ("a link out of the folder", "a path upwards") else f"project/{name}"
        assert any(f"{one}/".startswith(place) for one in kept) or any(f"/{place}" in one for one in deleted), name
    assert not (folder / "layers").exists() and not (folder / "root").exists()


@pytest.mark.parametrize("how", ["overlay", "copies"])
def test_a_command_ends_as_it_would(how, project, tmp_path, monkeypatch):
    isolation = isolation_of(how, tmp_path, monkeypatch)
    for script, status in (("exit 3", 3), ("kill -9 $$", -9), ("sleep 60 & kill -TERM $PPID; sleep 60", -15)):
        began = time.monotonic()
        folder, done = run(isolation, tmp_path, "bash", "-c", f"echo new > new.txt; pwd; {script}")
        assert done.returncode == status and time.monotonic() - began < 30, done.stderr
        kept = {path: path.read_text() for path in (folder / "files").rglob("*.txt")}
        assert kept == {Path(f"{folder}/files{project}/new.txt"): "new\n"} and os.listdir(project) == []
        shutil.rmtree(folder)


@pytest.mark.parametrize("how", ["overlay", "copies"])
def test_what_is_there_is_read_and_what_stays_real_is_written(how, project, tmp_path, monkeypatch):
    isolation = isolation_of(how, tmp_path, monkeypatch)
    real = tmp_path / "real"
    real.mkdir()
    isolation = replace(isolation, open_to=(str(real),))
    (tmp_path / "beside").write_text("beside")
    (project / "link").symlink_to("../beside")
    (project / "whole").symlink_to(project / "rows")
    (project / "rows").write_text("rows")
    os.mkfifo(project / "pipe")  # whoever copies it waits for ever
    closed = project / "closed"
    (closed / "in").mkdir(parents=True)
    closed.chmod(0o555)
    script = f"cat link whole ../beside; echo new > {real}/new; stat -c %a closed; echo x >> whole; rm -rf closed"
    folder, done = run(isolation, tmp_path, "bash", "-c", script)
    assert done.stdout == "besiderowsbeside555\n", done.stderr
    assert (real / "new").read_text() == "new\n" and (project / "rows").read_text() == "rows"
    assert Path(f"{folder}/files{project}/rows").read_text() == "rowsx\n" and (closed / "in").is_dir()


def test_services_are_reached_through_an_overlay(project, tmp_path, monkeypatch):
    isolation = isolation_of("overlay", tmp_path, monkeypatch)
    with socket.socket(socket.AF_UNIX) as service, tempfile.TemporaryDirectory() as place:  # a short path
        service.bind(f"{place}/service")
        service.listen()
        asked = f"import socket; socket.socket(socket.AF_UNIX).connect('{place}/service')"
        _, done = run(isolation, tmp_path, sys.executable, "-c", asked)
    assert done.returncode == 0, done.stderr


def test_a_folder_on_another_file_system_is_covered(tmp_path, monkeypatch):
    memory = Path("/dev/shm", f"hf_compat_test_{os.getpid()}")
    memory.mkdir()
    try:
        monkeypatch.chdir(memory)
        isolation = isolation_of("overlay", tmp_path, monkeypatch)
        folder, done = run(isolation, tmp_path, "bash", "-c", "echo new > new.txt")
        assert done.returncode == 0 and os.listdir(memory) == []
        assert Path(f"{folder}/files{memory}/new.txt").read_text() == "new\n"
    finally:
        shutil.rmtree(memory)


def test_files_above_the_limit_are_read_only(project, tmp_path, monkeypatch):
    isolation = replace(isolation_of("copies", tmp_path, monkeypatch), copy_limit_bytes=10)
    (project / "small").write_bytes(b"small")
    (project / "large").write_bytes(bytes(100))
    said = []
    plan = isolation.begin(str(tmp_path / "runs" / "run"), True, said.append)
    assert str(project / "large") in said[0] and "--copy-limit" in said[0] and "read-only" in said[0]
    script = "echo more >> small; head -c 3 large | wc -c; echo more >> large"
    done = subprocess.run(command(plan, ["bash", "-c", script]), capture_output=True, text=True)
    assert done.returncode == 1 and "large: Permission denied" in done.stderr and done.stdout == "3\n"
    assert (project / "large").read_bytes() == bytes(100) and (project / "small").read_bytes() == b"small"
    monkeypatch.setattr(copies, "has_landlock", lambda: False)
    with pytest.raises(ArgumentError, match="raise `--copy-limit GIB`"):
        isolation.begin(str(tmp_path / "runs" / "other"), True, said.append)
    assert "not covered: whatever is written by a whole path" in isolation.told


@pytest.mark.parametrize("how", ["overlay", "copies"])
def test_a_killed_command_leaves_nothing(how, project, tmp_path, monkeypatch):
    isolation_of(how, tmp_path, monkeypatch)
    script = project / "waits.py"
    script.write_text("import time; time.sleep(100)")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "runs"))
    command = [sys.executable, "-m", "hf_compat", "check", str(script)]
    deadline = time.monotonic() + 120
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline().startswith("isolation: ")
        while not (found := list((tmp_path / "runs").glob("*/entered.json"))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        place = str(found[0].parent)
        if how == "copies":  # the command inside has its own temporary folder by now
            while not list((tmp_path / "runs").glob("**/tmp/hf_compat_check_*")):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    while os.path.exists(place) or of_place(place):
        assert time.monotonic() < deadline, (os.listdir(place), of_place(place))
        time.sleep(0.05)
    assert place not in Path("/proc/self/mounts").read_text() and os.listdir(tmp_path / "runs") == []


def test_a_full_disk_is_named(project, tmp_path):
    (tmp_path / "small").mkdir()
    script = """
        mount --make-rprivate / && mount -t tmpfs -o size=64k tmpfs "$0" || exit 99
        head -c 64k /dev/zero > "$0/fill"
        "$1" -c 'import sys; from hf_compat.tools.isolation.isolated import offered; offered(sys.argv[1])' "$0"
        echo "left: $(ls "$0")"
    """
    words = ["unshare", "-m", "bash", "-c", script, str(tmp_path / "small"), sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip("only root mounts")
    assert done.stdout == "left: fill\n" and "ArgumentError" in done.stderr, done.stderr
    assert "cannot take what a script writes: [Errno 28] No space left" in done.stderr
    assert "Hint: set TMPDIR" in done.stderr


def of_place(place: str) -> list[str]:
    """The processes that know of an isolation."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and place.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.parametrize(
    "launched", [{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {"OMPI_COMM_WORLD_RANK": "1"}]
)
def test_a_process_of_a_launcher_is_not_isolated_and_says_so(monkeypatch, capsys, launched):
    for name, value in {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", **launched}.items():
        monkeypatch.setenv(name, value)
    chosen = argparse.Namespace(module=True, allow_writes=[], copy_limit=1.0)
    assert call_again("check", ["a.module"], chosen, "a.module") is None
    assert "isolation: none: a launcher has started this process" in "".join(capsys.readouterr())
