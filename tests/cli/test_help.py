"""`--help` fits on two screens and shows what there is; the rest on request; hints that make sense."""

from __future__ import annotations

import dataclasses

import pytest

from hf_compat import TrainingArguments
from hf_compat.cli.main import main
from hf_compat.plan.argument_support import ELSEWHERE, EQUIVALENTS, PASSED_ON


def shown(capsys, *words):
    try:
        assert main(list(words)) == 0
    except SystemExit as ended:  # as argparse ends after its help
        assert ended.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_is_short_and_grouped(command, capsys):
    text = shown(capsys, command, "--help")
    lines = text.splitlines()
    assert len(lines) < 140 and max(map(len, lines)) <= 120
    for part in ("model:", "data:", "arguments (", "trainer:", "  optimizer and schedule", "  checkpoints"):
        assert any(line.startswith(part) for line in lines), part
    for option in (
        "--model",
        "--ckpt_path",
        "--data.eval_dataset",
        "--compute_metrics",
        "--learning_rate",
        "--help.args",
    ):
        assert f" {option}" in text, option
    assert "--eval_strategy {no,steps,epoch}" in text and "cosine_with_restarts" in text and "[5e-05]" in text


@pytest.mark.parametrize("word", ["--help.args", "--args.help"])
def test_every_argument_on_request(word, capsys):
    text = shown(capsys, "fit", word)
    for field in dataclasses.fields(TrainingArguments):
        assert f"  --{field.name} " in text, field.name
    assert "paged_adamw_8bit" in text and "--async_save" in text


def test_every_setting_of_the_trainer_on_request(capsys):
    text = shown(capsys, "fit", "--help.trainer")
    for name in (*EQUIVALENTS, *PASSED_ON, *ELSEWHERE):
        assert name in text, name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nonsense", "see docs/arguments.md"),
        ("lerning_rate", "`learning_rate`"),
        ("lr", "`learning_rate`"),
        ("batch_size", "`per_device_train_batch_size`"),
        ("epochs", "`num_train_epochs`"),
        ("eval_batch_size", "`per_device_eval_batch_size`"),
        ("evaluation_stratgy", "`eval_strategy`"),
        ("accumulate_grad_batches", "`gradient_accumulation_steps`"),
    ],
)
def test_a_name_that_is_none_has_a_hint_that_makes_sense(name, hint, capsys):
    assert main(["explain", f"{name}=3"]) == 2
    told = capsys.readouterr().err
    assert f"unknown argument `{name}=3`" in told and told.rstrip().endswith(("?", ".")) and hint in told


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["eval_strategy=steps", "use_cpu=true"], ["eval_strategy", "use_cpu"]),
        (["evaluation_strategy=steps", "no_cuda=true"], ["eval_strategy", "use_cpu"]),
        (["learning_rate=5e-5", "use_cpu=true"], ["use_cpu"]),
    ],
)
def test_explain_lists_what_was_set(words, names, capsys):
    text = shown(capsys, "explain", *words)
    listed = text.partition("\n\n")[0].splitlines()[1:]
    assert [line.split("=")[0].strip() for line in listed] == names
