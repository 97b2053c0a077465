"""Which training arguments an ejected project can have."""

from __future__ import annotations

import pytest

from hf_compat import TrainingArguments
from hf_compat.tools.ejection.findings import Findings


@pytest.mark.parametrize(
    ("argument", "strategy"),
    [
        ({"fsdp": "full_shard"}, "FSDPStrategy"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "DeepSpeedStrategy"),
    ],
)
def test_weights_spread_over_devices_are_refused(argument, strategy, tmp_path):
    findings = Findings()
    findings.check_arguments(TrainingArguments(tmp_path, **argument))
    (problem,) = findings.problems
    assert strategy in problem and next(iter(argument)) in problem and not findings.notes


def test_options_of_one_process_say_nothing(tmp_path):
    findings = Findings()
    findings.check_arguments(TrainingArguments(tmp_path, accelerator_config={"split_batches": True}))
    assert findings.problems == [] and findings.notes == []
