"""The first lines of a run name its devices, and explain how to use the machine's other GPUs."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest
import torch
from tqdm import tqdm

from helpers.toy import Classifier, rows
from hf_compat import Trainer, TrainingArguments, translate
from hf_compat.plan.translate import make_run_counts
from hf_compat.runtime.console import show_logs
from hf_compat.trainer_methods.fit import log_start


@pytest.mark.parametrize(("count", "is_said"), [(4, True), (1, False)])
def test_one_line_says_how_to_use_several_devices(tmp_path, monkeypatch, caplog, count, is_said):
    args = TrainingArguments(tmp_path, use_cpu=True)
    plan = replace(translate(args), device="cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    schedule = make_run_counts(args, micro_batches=3, num_examples=24, total_train_batch_size=8)
    with caplog.at_level("WARNING", logger="hf_compat"):
        log_start(plan, schedule, args, 10, 0, is_resumed=False)
    assert bool(caplog.messages) is is_said
    for said in caplog.messages:
        assert "one of 4 GPUs, with 8 samples" in said and "with 32." in said and "hf-compat run" in said


@pytest.mark.parametrize(("level", "lines"), [("passive", 1), ("info", 10)])
def test_a_run_opens_with_one_line_and_in_detail_where_it_is_asked_to(make_args, caplog, level, lines):
    trainer = Trainer(Classifier(), make_args(log_level=level, num_train_epochs=1), train_dataset=rows(8))
    with caplog.at_level("INFO", logger="hf_compat"):
        trainer.train()
    said = [record.message for record in caplog.records if record.name == "hf_compat.trainer_methods.fit"]
    assert len(said) == lines and "Training on Lightning: " in said[-1 if level == "info" else 0]
    if level == "info":
        assert said[0] == "***** Running training *****" and "  Num examples = 8" in said
        assert "  Number of trainable parameters = 227" in said


def test_the_one_line_names_the_update_that_a_run_goes_on_from(tmp_path, monkeypatch, caplog):
    args = TrainingArguments(tmp_path, use_cpu=True)
    plan = replace(translate(args), device="cuda:0")
    schedule = make_run_counts(args, micro_batches=3, num_examples=24, total_train_batch_size=8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with caplog.at_level("INFO", logger="hf_compat"):
        log_start(plan, schedule, args, 10, 5, is_resumed=True)
    (line,) = caplog.messages
    assert "from update 5 on" in line


def test_a_line_stands_above_a_bar_that_is_drawn_anew(capsys, monkeypatch):
    logger = logging.getLogger("hf_compat")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    show_logs(logging.WARNING)
    with tqdm(total=3, file=sys.stderr, ncols=40) as bar:
        bar.update(1)
        logger.warning("a line")
        bar.update(1)
    drawn = capsys.readouterr().err
    before = drawn[: drawn.index("a line")]
    assert before.endswith("\r") and "a line\n" in drawn and "33%" in drawn.partition("a line\n")[2]
