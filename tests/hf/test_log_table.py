"""On a terminal logs are lines of a table; elsewhere they are the dicts that transformers prints, to the letter."""

from __future__ import annotations

import os
import pty
import re
import sys
import types

import pytest
import torch
import transformers

import hf_compat
from helpers import toy
from hf_compat.hf.log_table import LogTable, prints_table

LOGS = [
    (2, {"loss": 0.6931471, "grad_norm": 1.25, "learning_rate": 5e-05, "epoch": 0.5}),
    (4, {"loss": 0.5, "grad_norm": 1.0, "learning_rate": 4.327e-05, "epoch": 1.0, "total_flos": 12.0}),
    (
        4,
        {
            "eval_loss": 0.4321987,
            "eval_accuracy": 0.75,
            "eval_runtime": 0.1,
            "eval_steps_per_second": 9.0,
            "epoch": 1.0,
        },
    ),
    (6, {"loss": 0.25, "grad_norm": 0.5, "learning_rate": 0.0, "epoch": 1.5}),
    (6, {"train_runtime": 1.5, "train_steps_per_second": 4.0, "total_flos": 12.0, "train_loss": 0.4, "epoch": 1.5}),
]


def lines(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    table = LogTable()
    return [line for update, logs in LOGS for line in table.lines(update, logs)]


def test_a_log_is_a_line_and_a_new_name_a_column(monkeypatch):
    assert lines(monkeypatch, 120) == [
        "update   epoch       loss  grad_norm  learning_rate",
        "     2     0.5     0.6931       1.25          5e-05",
        "     4       1        0.5          1      4.327e-05",
        "update   epoch       loss  eval_loss  eval_accuracy  grad_norm  learning_rate",
        "     4       1                0.4322           0.75",
        "     6     1.5       0.25                                  0.5              0",
        "train_runtime 1.5  train_steps_per_second 4  train_loss 0.4  epoch 1.5",
    ]


def test_columns_without_room_are_counted(monkeypatch):
    shown = lines(monkeypatch, 60)
    assert shown[3] == "update   epoch       loss  eval_loss  eval_accuracy  +2" and len(shown) == 7
    assert all(len(line) <= 60 for line in shown[:-1])


def test_the_names_come_again_in_a_long_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table = LogTable()
    shown = [line for update in range(100) for line in table.lines(update, {"loss": 0.5, "epoch": 1.0})]
    assert [line.split()[0] for line in shown].count("update") == 3 and len(shown) == 103


def test_a_text_is_cut_and_a_wider_value_widens_its_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table = LogTable()
    assert table.lines(1, {"note": "short"})[1] == "     1      short"
    assert table.lines(2, {"note": "a text of more than twenty"}) == [
        "update                  note",
        "     2  a text of more than…",
    ]


class OwnPrinter(hf_compat.PrinterCallback):
    """A subclass that calls no constructor of ours."""

    def __init__(self):
        self.own = True


def trained(package, folder, **values):
    given = {"max_steps": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    args = package.TrainingArguments(str(folder / "out"), use_cpu=True, report_to="none", **given, **values)
    torch.manual_seed(0)
    trainer = package.Trainer(toy.Classifier(), args, train_dataset=toy.rows(16), eval_dataset=toy.rows(8))
    trainer.train()
    return trainer


@pytest.fixture
def at_a_terminal(monkeypatch):
    """Run something whose output is a terminal, and return what that shows."""

    def run(function, *args, **values):
        ours, its = pty.openpty()
        with open(its, "w") as terminal, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", terminal)
            patched.setenv("COLUMNS", "100")
            function(*args, **values)
            print("the end")
            terminal.flush()
            shown = b""
            while b"the end" not in shown:
                shown += os.read(ours, 65536)
        os.close(ours)
        return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", shown.decode()).replace("\r", "\n")

    return run


@pytest.mark.parametrize("values", [{"disable_tqdm": True}, {"disable_tqdm": False}], ids=["printer", "bar"])
def test_a_terminal_shows_a_table(tmp_path, at_a_terminal, capfd, values):
    shown = at_a_terminal(trained, hf_compat, tmp_path, **values)
    assert "{" not in shown
    assert "update   epoch       loss  grad_norm  learning_rate\n" in shown
    assert "update   epoch       loss  eval_loss  grad_norm  learning_rate\n" in shown
    assert len(re.findall(r"^ {5}[24] +\d", shown, flags=re.MULTILINE)) == 4 and "train_runtime " in shown
    assert "{'loss'" in at_a_terminal(trained, hf_compat, tmp_path, log_format="dict", **values)


def test_a_subclass_of_the_printer_needs_no_constructor_of_ours(tmp_path, at_a_terminal):
    def run():
        args = hf_compat.TrainingArguments(
            str(tmp_path), max_steps=2, logging_steps=1, use_cpu=True, disable_tqdm=False
        )
        trainer = hf_compat.Trainer(toy.Classifier(), args, train_dataset=toy.rows(16), callbacks=[OwnPrinter()])
        trainer.remove_callback(hf_compat.ProgressCallback)
        trainer.train()

    assert "update   epoch       loss" in at_a_terminal(run)


@pytest.mark.parametrize("values", [{"disable_tqdm": True}, {"disable_tqdm": False}], ids=["printer", "bar"])
def test_elsewhere_the_text_is_transformers(tmp_path, capsys, values):
    printed = []
    for package in (hf_compat, transformers):
        trained(package, tmp_path, **values)
        text = "".join(line for line in capsys.readouterr().out.splitlines(True) if line.startswith("{"))
        printed.append(re.sub(r"'(\w+_(?:runtime|per_second|preparation_time))': '?[\d.e+-]+'?", r"'\1'", text))
    assert printed[0] == printed[1] and printed[0].count("'loss'") == 2 and printed[0].count("'eval_loss'") == 2
    trained(hf_compat, tmp_path, log_format="table", **values)
    assert "{" not in capsys.readouterr().out


def test_a_format_that_nothing_prints_is_told(make_args):
    class Bar(hf_compat.TrainerCallback):
        pass

    args = make_args(max_steps=1, log_format="table", disable_tqdm=True)
    trainer = hf_compat.Trainer(toy.Classifier(), args, train_dataset=toy.rows(8), callbacks=[Bar()])
    trainer.remove_callback(hf_compat.PrinterCallback)
    with pytest.warns(UserWarning, match=r"`log_format='table'` \(another callback shows the logs\)"):
        trainer.train()


def test_arguments_of_transformers_leave_it_to_the_terminal(monkeypatch):
    arguments = transformers.TrainingArguments("out", use_cpu=True)
    for is_terminal in (True, False):
        monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(isatty=lambda found=is_terminal: found))
        assert prints_table(arguments) is is_terminal


@pytest.mark.parametrize(
    ("columns", "names", "left_out"), [(20, ["update", "loss"], 0), (19, ["update"], 1), (3, ["update"], 1)]
)
def test_a_column_needs_its_width_and_room_for_the_count(columns, names, left_out):
    table = LogTable()
    table._widths = {"loss": 8, "update": 6}
    assert table._with_room(columns) == (names, left_out)
