"""`hf-compat migrate`: what it prints, writes and skips, and its exit status."""

from __future__ import annotations

import codecs
import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_compat.cli.main import main

OLD = "from transformers import TrainingArguments\n\na = TrainingArguments('o', no_cuda=True, tp_size=4)\n"
NEW = "from hf_compat import TrainingArguments\n\na = TrainingArguments('o', use_cpu=True)\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.py").write_text(OLD)
    return tmp_path


def test_a_diff_changes_nothing_and_says_so(project, capsys):
    assert main(["migrate", "old.py"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("--- a/old.py\n+++ b/old.py\n") and "+from hf_compat import TrainingArguments\n" in out
    assert "old.py:3: tp_size=4: taken out" in err and "1 of 1 files to change, 1 places for a person" in err
    assert (project / "old.py").read_text() == OLD and "\033" not in out
    applied = subprocess.run(["git", "apply", "-p1"], input=out, text=True, capture_output=True, cwd=project)
    assert applied.returncode == 0 and (project / "old.py").read_text() == NEW


def test_writing_and_a_second_time(project, capsys):
    (project / "old.py").chmod(0o750)
    assert main(["migrate", "old.py", "--write"]) == 0
    assert (project / "old.py").read_text() == NEW and "written: old.py" in capsys.readouterr().out
    assert stat.S_IMODE((project / "old.py").stat().st_mode) == 0o750
    assert [path.name for path in project.iterdir()] == ["old.py"]
    assert main(["migrate", "."]) == 0
    assert "0 of 1 files to change, 0 places for a person" in capsys.readouterr().err


def test_staying_with_transformers(project):
    assert main(["migrate", "--to", "transformers-5", "--write", "old.py"]) == 0
    assert (project / "old.py").read_text() == NEW.replace("hf_compat", "transformers")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (OLD.replace("\n", "\r\n").encode(), NEW.replace("\n", "\r\n").encode()),
        (codecs.BOM_UTF8 + OLD.encode(), codecs.BOM_UTF8 + NEW.encode()),
        (OLD.rstrip("\n").encode(), NEW.rstrip("\n").encode()),
        (f"# coding: latin-1\n# é\n{OLD}".encode("latin-1"), f"# coding: latin-1\n# é\n{NEW}".encode("latin-1")),
    ],
)
def test_bytes_that_are_no_matter_of_names_stay(project, data, expected):
    (project / "old.py").write_bytes(data)
    assert main(["migrate", "--write", "old.py"]) == 0
    assert (project / "old.py").read_bytes() == expected


def test_links_stay_links(project):
    (project / "link.py").symlink_to("old.py")
    assert main(["migrate", "--write", "link.py"]) == 0
    assert (project / "link.py").is_symlink() and (project / "old.py").read_text() == NEW


def test_what_cannot_be_read_is_one_line_each_and_the_others_go_on(project, capsys):
    (project / "two.py").write_text("from transformers import Trainer\nprint 'two'\n")
    (project / "wrong.py").write_text("import transformers\ndef f(:\n")
    (project / "bytes.py").write_bytes(b"import transformers\nx = '\xff'\n")
    (project / "data.csv").write_text("")
    (project / "nul.py").write_bytes(b"\0")
    assert main(["migrate", "--write", ".", "none.py", "data.csv"]) == 2
    err = capsys.readouterr().err
    for line in (
        "error: two.py: line 2: a statement of Python 2: print 'two'",
        "error: wrong.py: line 2: a syntax error: def f(:",
        "error: bytes.py: ",
        "error: nul.py: it is not text",
        "error: none.py: there is no such file or folder",
        "error: data.csv: not a source that can be migrated",
    ):
        assert sum(one.startswith(line) for one in err.splitlines()) == 1, line
    assert "Traceback" not in err and (project / "old.py").read_text() == NEW


def test_a_file_that_somebody_changes_meanwhile_stays(project, monkeypatch, capsys):
    import hf_compat.tools.migration.migrate as module

    rewrite = module.rewrite_path

    def rewritten(path, target):
        change = rewrite(path, target)
        path.write_text("x = 1\n")
        return change

    monkeypatch.setattr(module, "rewrite_path", rewritten)
    assert main(["migrate", "--write", "old.py"]) == 2
    assert "it has changed since it was read" in capsys.readouterr().err
    assert (project / "old.py").read_text() == "x = 1\n"


def test_what_is_skipped_in_folders(project, capsys):
    subprocess.run(["git", "init", "--quiet", str(project)], check=True)
    (project / ".gitignore").write_text("build/\n/out*\n!out_kept\n**/gen/*.py\nsecret.py\n# comment\n")
    for path in (
        "build/a.py", "outputs/a.py", "out_kept/a.py", "x/gen/b.py", "x/secret.py", "x/y.py", ".git/a.py",
        "x/gen/a.txt", "env/lib/a.py", "__pycache__/a.py", "x/notes.txt",
    ):  # fmt: skip
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(OLD)
    (project / "env" / "pyvenv.cfg").write_text("")
    assert main(["migrate", ".", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [file["path"] for file in report["files"]] == ["old.py", "out_kept/a.py", "x/y.py"]
    assert {one["path"]: one["reason"] for one in report["skipped"]} == {
        ".git": "a hidden folder",
        "__pycache__": "a cache",
        "build": "named in .gitignore",
        "env": "an environment",
        "outputs": "named in .gitignore",
        "x/gen/b.py": "named in .gitignore",
        "x/secret.py": "named in .gitignore",
    }
    assert main(["migrate", "build/a.py", "old.py", "./old.py"]) == 1
    assert "2 of 2 files" in capsys.readouterr().err


def test_json_has_everything(project, capsys):
    assert main(["migrate", "old.py", "none.py", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["target"] == "hf_compat" and report["files"][0]["changed"] and not report["files"][0]["written"]
    assert report["files"][0]["diff"].startswith("--- a/old.py")
    (one,) = report["needs_a_person"]
    assert (one["path"], one["line"], one["what"]) == ("old.py", 3, "tp_size=4") and one["cell"] is None
    assert report["errors"] == [{"path": "none.py", "reason": "there is no such file or folder"}]


def test_without_libcst_one_clear_error(project):
    code = "import sys; sys.modules['libcst'] = None\nfrom hf_compat.cli.main import main\n"
    code += "sys.exit(main(['migrate', 'old.py']))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=project)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "pip install 'libcst>=" in ended.stderr


@pytest.mark.parametrize("name", [".pre-commit-hooks.yaml", "docs/command_migrate.md"])
def test_the_hooks_for_pre_commit_judge_a_script(name, tmp_path, capsys):
    text = (Path(__file__).parents[2] / name).read_text()
    if name.endswith(".md"):
        (text,) = re.findall(r'title=".pre-commit-config.yaml"\n(.*?)^```', text, flags=re.DOTALL | re.MULTILINE)
    read = yaml.safe_load(text)
    hooks = read if isinstance(read, list) else read["repos"][0]["hooks"]
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text("from transformers import TrainingArguments\n\nTrainingArguments('out', eval_strategy='step')\n")
    new.write_text("from hf_compat import TrainingArguments\n\nTrainingArguments('out', eval_strategy='steps')\n")
    for hook in hooks:
        assert hook["language"] == "system" and hook["id"] == hook["entry"].replace(" ", "-")
        command = hook["entry"].split()
        assert [command[0], main([*command[1:], str(old)]), main([*command[1:], str(new)])] == ["hf-compat", 1, 0]
    assert capsys.readouterr().out
