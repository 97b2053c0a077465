"""Options of an earlier release in shell scripts."""

from __future__ import annotations

import pytest

from hf_compat.tools.migration.report import Effect, Target
from hf_compat.tools.migration.shell import rewrite_shell

HEAD = "python train.py --num_train_epochs 3 "


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--evaluation_strategy epoch --no_cuda", "--eval_strategy epoch --use_cpu"),
        ("--evaluation-strategy=epoch \\\n  --no_cuda True", "--eval_strategy=epoch \\\n  --use_cpu True"),
        ("--per_gpu_train_batch_size $SIZE # note", "--per_device_train_batch_size $SIZE # note"),
        ("--group_by_length --seed 1", "--train_sampling_strategy group_by_length --seed 1"),
        ("--group_by_length True \\\r\n --seed 1", "--train_sampling_strategy group_by_length \\\r\n --seed 1"),
        ("--evaluate_during_training", "--eval_strategy steps"),
        ("--include_inputs_for_metrics", "--include_for_metrics inputs"),
        ("--adafactor true;", "--optim adafactor;"),
        ("--warmup_ratio 0.06", "--warmup_steps 0.06"),
        ("--warmup_ratio=0.1", "--warmup_steps=0.1"),
        ("--overwrite_output_dir --logging_dir x", "--overwrite_output_dir --logging_dir x"),
    ],
)
def test_options(old, new):
    result = rewrite_shell(f"#!/bin/sh\n{HEAD}{old}\n", Target.HF_COMPAT)
    assert result.text == f"#!/bin/sh\n{HEAD}{new}\n" and result.findings == ()
    again = rewrite_shell(result.text, Target.HF_COMPAT)
    assert again == result


@pytest.mark.parametrize(
    "line",
    [
        f"{HEAD}--warmup_ratio 1.0",
        f"{HEAD}--warmup_ratio $RATIO",
        f"{HEAD}--group_by_length False",
        f"{HEAD}--fp16_opt_level O1",
        "python other.py --no_cuda",
    ],
)
def test_what_a_person_decides_about(line):
    result = rewrite_shell(f"\n{line}\n", Target.TRANSFORMERS_5)
    assert result.text == f"\n{line}\n" and [one.line for one in result.findings] == [2]


def test_what_is_no_command_of_python_stays():
    text = "# python train.py --num_train_epochs 1 --no_cuda\necho --evaluation_strategy\ngrep -- --no_cuda x\n"
    assert rewrite_shell(text, Target.HF_COMPAT).text == text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{HEAD}--overwrite_output_dir", HEAD.rstrip()),
        (f"{HEAD}--overwrite_output_dir --fp16", f"{HEAD}--fp16"),
        (f"{HEAD}--overwrite_output_dir True", HEAD.rstrip()),
        (f"{HEAD}\\\n  --overwrite_output_dir \\\n  data.json", f"{HEAD.rstrip()} \\\n  data.json"),
    ],
)
def test_a_folder_that_5_never_wipes_needs_no_option(line, expected):
    result = rewrite_shell(f"{line}\n", Target.TRANSFORMERS_5)
    assert result.text == f"{expected}\n" and result.findings == ()
    assert [(one.what, one.effect) for one in result.mended] == [("--overwrite_output_dir", Effect.FAILS)]
    assert rewrite_shell(f"{line}\n", Target.HF_COMPAT).text == f"{line}\n"
