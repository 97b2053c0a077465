"""Argument sets of five generations construct, read back what they say, and train; a sample of `argument_sets.py`."""

from __future__ import annotations

import pytest

from helpers import argument_sets
from hf_compat import TrainingArguments
from hf_compat.errors import HfCompatWarning

ALL = [(generation, number) for generation, sets in argument_sets.SETS.items() for number in range(len(sets))]
# One of each generation that is run at every commit; all of them: `python tests/helpers/argument_sets.py`.
SAMPLE = [("3.5", 0), ("4.19", 1), ("4.46", 1), ("4.57", 1), ("5.2", 2)]
READ_OTHERWISE = {
    "evaluation_strategy", "no_cuda", "debug", "do_eval", "logging_dir", "fsdp", "optim", "max_steps", "eval_steps",
    "report_to", "include_for_metrics", "warmup_ratio", "include_num_input_tokens_seen", "accelerator_config",
    "lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "sharded_ddp", "metric_for_best_model", "greater_is_better",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is gone upstream")
@pytest.mark.parametrize(("generation", "number"), ALL)
def test_a_set_is_read_back(generation, number, tmp_path):
    values = argument_sets.settings(tmp_path, argument_sets.SETS[generation][number])
    args = TrainingArguments(**values)
    held = {name: getattr(args, name) for name in values.keys() - READ_OTHERWISE}
    assert held == {name: value for name, value in values.items() if name in held}
    if "evaluation_strategy" in values:
        assert args.evaluation_strategy == args.eval_strategy == values["evaluation_strategy"]
    if values.get("logging_dir"):
        assert args.logging_dir == values["logging_dir"]


@pytest.mark.parametrize(("generation", "number"), SAMPLE)
def test_a_set_trains(generation, number, tmp_path):
    values = argument_sets.settings(tmp_path, argument_sets.SETS[generation][number])
    assert argument_sets.is_refused_by_transformers(values)
    trainer = argument_sets.trained(TrainingArguments(**values))
    assert trainer.state.global_step == 2
    assert any("eval_loss" in log for log in trainer.state.log_history) == (trainer.args.evaluation_strategy != "no")


def test_there_are_ten_of_each_generation():
    assert {len(sets) for sets in argument_sets.SETS.values()} == {10}


@pytest.mark.parametrize(("old", "today"), [("adamw_hf", "adamw_torch"), ("adamw_apex_fused", "adamw_torch_fused")])
def test_an_optimizer_that_is_gone_has_a_successor(old, today):
    with pytest.warns(HfCompatWarning, match=f"optim='{old}'.*optim='{today}'"):
        assert TrainingArguments("out", use_cpu=True, optim=old).optim == today


@pytest.mark.parametrize(("old", "today"), [(False, []), (True, ["tpu_metrics_debug"])])
def test_debug_was_a_truth_value(old, today):
    assert TrainingArguments("out", use_cpu=True, debug=old).debug == today
