"""Every block of the pages runs, in the order of its page, in one folder and one namespace, as a reader would.

What a fence says decides what is done with its block:

- `python`, `yaml` or `diff` with a title: a file to save, or a change of that file.
- `python`: runs in the namespace of the page.
- `diff`: its two sides run, one after the other.
- `sh`: each line runs in a shell, where `hf-compat`, `python` and so on are those of this environment.
- `text`, or a `diff` of two files: what was printed last has these lines.
- nothing: a drawing. It has no commands.

`prepared.py` has the files and the names that the pages take for granted. `NOT_RUN` lists what cannot run here.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hf_compat
from helpers import prepared

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.stem: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', flags=re.DOTALL | re.MULTILINE)
COMMAND = r"\$ |(hf-compat|pip|(\S*/)?python3?|(\S*/)?mkdocs|torchrun) "
PROGRAMS = {
    "python": (),
    "python3": (),
    "hf-compat": ("-m", "hf_compat"),
    "torchrun": ("-m", "torch.distributed.run"),
}
# Words that a reader replaces by his own.
ARGUMENTS = "--output_dir out --max_steps 2 --use_cpu true"
PLACES = {"ARGS…": ARGUMENTS, "PATH…": "train.py", "…": ARGUMENTS}
# Blocks and commands that cannot run in a test, by how they begin. They are checked without running.
NOT_RUN = {
    "pip install ": "changes the environment",
    "uvx ": "makes an environment; `tests/test_without_torch.py` runs the command with those packages",
    "python3 examples/run.py": "makes an environment; `tests/examples/test_gallery.py` runs its scripts",
    "python3 tests/run.py": "runs the tests",
    ".venv/bin/mkdocs ": "`test_site.py` builds the site",
    "mkdocs ": "`test_site.py` builds the site",
    "hf-compat upload ": "there is no bucket; `tests/training_run/test_uploads.py` uploads to a server",
    "hf-compat compare --against ": "needs an environment of that release",
    "python tests/sweeps/releases/matrix.py": "needs an environment of each release",
    "accelerate launch --use_fsdp … ": "needs devices that Accelerate knows; `tests/distributed` starts it",
    "deepspeed script.py ": "its launcher needs GPUs",
    "from hf_compat import Trainer, TrainingArguments, get_last_checkpoint\n": "there is no bucket",
    "from ray.train": "needs a Ray cluster; `tests/sweeps/ray/run.py` starts one",
}


# Commands that take long, by how they begin: they run with `-m matrix`. What they do is tested in other rooms, too.
LONG = ("hf-compat compare ", "hf-compat run --devices 4 ", "python examples/text_classification.py")


def blocks(page: str) -> list[tuple[str, str, str]]:
    """List the blocks of a page: language, title, text."""
    return BLOCK.findall(PAGES[page])


def commands(text: str) -> list[str]:
    """List the commands of a block, each with its comment."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def why_not_run(text: str) -> str:
    """Say why a block or command cannot run here; empty if it can."""
    return next((reason for start, reason in NOT_RUN.items() if text.startswith(start)), "")


def masked(text: str) -> str:
    """Mask what differs between machines: long fractions, durations, and sizes of files that hold paths."""
    return re.sub(r"\d+\.\d+ (s|KiB)\b", r"# \1", re.sub(r"\.\d{3,}", ".#", text))


class Reader:
    """Does what a page says.

    Attributes:
        names: The namespace of the page.
        printed: What the last block or command has printed. None if it was left out.
        seen: Each line that the page shows, and the line that was printed in its place.
    """

    def __init__(self, page: str, folder: Path, skipped: tuple[str, ...]) -> None:
        self.page, self.folder, self.skipped = page, folder, skipped
        self.names = {"__name__": page, **prepared.names(page)}
        self.printed: str | None = ""
        self.seen: dict[str, str] = {}

    def read(self, language: str, title: str, text: str) -> None:
        if language == "diff" and text.startswith("--- "):
            assert text in self.printed, self.printed
        elif language == "text":
            if self.printed is not None:
                self.compare(text)
        elif title and language == "diff":
            self.change(self.folder / title, text)
        elif title:
            (self.folder / title).write_text(text)
        elif language == "python":
            self.execute(text)
        elif language == "diff":
            for sign in "-+":
                self.execute("".join(line[1:] for line in text.splitlines(keepends=True) if line[0] in (sign, " ")))
        elif language == "sh":
            for command in commands(text):
                self.run(command)
        else:
            starts = [line for line in text.splitlines() if re.match(COMMAND, line)]
            assert starts == [], "commands are in a block that does not say `sh`"

    def execute(self, code: str) -> None:
        if not why_not_run(code):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, self.page, "exec"), self.names)
            self.printed = printed.getvalue()

    def run(self, command: str) -> None:
        """Run a line of a shell; a comment may name the exit status."""
        self.printed = None
        if why_not_run(command) or command.startswith(self.skipped):
            return
        expected = re.search(r"#.*exit status (\d)", command)
        for place, words in PLACES.items():
            command = command.replace(place, words)
        done = subprocess.run(["bash", "-ec", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == int(expected[1] if expected else 0), f"{command}\n{done.stdout[-4000:]}"
        self.printed = done.stdout

    def change(self, path: Path, diff: str) -> None:
        """Replace the lines that begin with `-` by those that begin with `+`."""
        old, new = ("".join(line[1:] + "\n" for line in diff.splitlines() if line[0] == sign) for sign in "-+")
        text = path.read_text()
        assert text.count(old) == 1, f"{path.name} has no such lines:\n{old}"
        path.write_text(text.replace(old, new))

    def compare(self, text: str) -> None:
        """Find each shown line in what was printed; lines are equal on the page where the printed ones are."""
        for line in filter(str.strip, text.splitlines()):
            found = [printed for printed in self.printed.splitlines() if masked(line) in masked(printed)]
            assert found, f"{line!r} is not in:\n{self.printed[-4000:]}"
            for shown, printed in self.seen.items():
                if masked(shown) == masked(line):
                    assert (shown == line) == (printed in found), f"shown: {shown!r}, {line!r}; printed: {found}"
            self.seen[line] = found[0]


WITH_LONG = [page for page in PAGES if any(start in PAGES[page] for start in LONG)]
# Pages that take long: what they show is tested in the rooms that they describe, too.
SLOW = {"command_eject", "command_line", "command_run", "libraries", "migration", "scale", "tutorial"}
ROWS = [pytest.param(page, marks=[pytest.mark.matrix] if page in SLOW else []) for page in PAGES if blocks(page)]
ROWS += [pytest.param(f"{page}-whole", marks=pytest.mark.matrix) for page in WITH_LONG]


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
    """Enter a folder with the files that a page takes for granted, and with the programs of this environment."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, words in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *words])} "$@"\n')
        (programs / name).chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(work)
    monkeypatch.chdir(work)
    before = set(sys.modules)
    yield work
    hf_compat.unpatch()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(work)):
            del sys.modules[name]


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval")
@pytest.mark.filterwarnings("ignore:These were imported from transformers")  # by other tests of this process
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub under a newer httpx
@pytest.mark.filterwarnings("error:(Without effect|This evaluation|The best evaluation)")  # elsewhere they are left out
@pytest.mark.parametrize("page", ROWS)
def test_the_blocks_of_a_page_run(page, folder, monkeypatch):
    page, _, is_whole = page.partition("-")
    assert PAGES[page].count("```") == 2 * len(blocks(page)), "a fence is not understood"
    assert {language for language, _, _ in blocks(page)} <= {"", "python", "yaml", "diff", "sh", "text"}
    prepared.write_files(page, folder)
    with prepared.surroundings(page, monkeypatch):
        reader = Reader(page, folder, skipped=() if is_whole else LONG)
        for language, title, text in blocks(page):
            reader.read(language, title, text)


def not_run() -> list[tuple[str, str]]:
    """List the language and the text of what `NOT_RUN` leaves out."""
    found = []
    for language, _, text in (block for page in PAGES for block in blocks(page)):
        parts = commands(text) if language == "sh" else [text] if language == "python" else []
        found += [(language, part) for part in parts if why_not_run(part)]
    return found


@pytest.mark.parametrize("start", NOT_RUN)
def test_what_is_left_out_is_in_the_pages_and_is_right_as_far_as_can_be_checked(start):
    left_out = [(language, text) for language, text in not_run() if text.startswith(start)]
    assert left_out, "no block begins so: take the row out"
    for language, text in left_out:
        if language == "python":
            imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
            ours = [alias.name for node in imports if node.module == "hf_compat" for alias in node.names]
            assert [name for name in ours if name not in hf_compat.__all__] == []
            continue
        words = shlex.split(text, comments=True)
        subprocess.run(["bash", "-nc", text], check=True)
        if words[0] == "hf-compat":
            shown = subprocess.run(
                [sys.executable, "-m", "hf_compat", words[1], "--help"], capture_output=True, text=True
            )
            assert [word for word in words[2:] if word.startswith("--") and word not in shown.stdout] == []
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {name for word in words for name in ",".join(re.findall(r"\[(.*)\]", word)).split(",") if name} <= {
            *extras
        }
        files = [word for word in words if word.endswith((".py", ".yml")) and word != "script.py"]
        assert [name for name in files if not (ROOT / name).is_file()] == []
        sources = "".join((ROOT / name).read_text() for name in files if name.endswith(".py"))
        assert not sources or [word for word in words if word.startswith("--") and word not in sources] == []
