"""One rank that raises, exits or is killed ends the job; evaluation counts every sample once; resume is exact."""

from __future__ import annotations

import time

import pytest

from helpers.launching import OURS, TORCHRUN, result, start
from sweeps.distributed.kill_rank import kill_and_resume

EVALUATE = """
import sys, json
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from helpers import toy
from torchmetrics.classification import MulticlassAccuracy
from hf_compat import Trainer, TrainingArguments

args = TrainingArguments(sys.argv[1], per_device_eval_batch_size=16, use_cpu=True, disable_tqdm=True)
torch.manual_seed(0)
model, rows = toy.Classifier(), toy.rows(10_001, seed=3)

def function(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    order = float((prediction.label_ids * range(len(right))).sum())
    return {{"accuracy": float(right.mean()), "count": len(right), "order": order}}

found = {{}}
for name, metrics in (("function", function), ("torchmetrics", MulticlassAccuracy(3, average="micro"))):
    trainer = Trainer(model, args, eval_dataset=rows, compute_metrics=metrics)
    output = trainer.evaluate()
    found[name] = {{k: v for k, v in output.items() if not k.endswith(("_runtime", "_per_second", "_time"))}}
found["predicted"] = len(trainer.predict(rows).predictions)
if trainer.is_world_process_zero():
    import pathlib
    pathlib.Path(sys.argv[1]).mkdir(exist_ok=True)
    (pathlib.Path(sys.argv[1]) / "result.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize("launcher", [OURS, TORCHRUN], ids=["hf-compat run", "torchrun"])
def test_a_rank_that_raises_ends_the_job_with_its_error(tmp_path, launcher):
    began = time.monotonic()
    done = start(tmp_path / "out", "raise_at=3", "num_train_epochs=50", launcher=launcher)
    assert done.returncode != 0 and "a mistake on rank 1" in done.stderr
    assert time.monotonic() - began < 60
    assert (tmp_path / "out" / "checkpoint-2" / "manifest.json").is_file()


def test_a_rank_that_exits_ends_the_job_with_its_status(tmp_path):
    done = start(tmp_path / "out", "exit_at=3", "num_train_epochs=50")
    assert done.returncode == 7 and "Rank 1 has failed with status 7" in done.stderr


@pytest.mark.matrix
def test_a_job_that_is_started_again_goes_on_by_itself(tmp_path):
    words = ("save_steps=2", "resume=auto", "save_total_limit=2")
    whole = result(tmp_path / "whole", *words)
    again = result(tmp_path / "again", *words, "exit_at=5", "once=True", launcher=[*OURS, "--restarts", "1"])
    assert (tmp_path / "again" / "has_failed").exists() and again == whole


@pytest.mark.matrix  # a shorter one runs in test_kills.py
def test_a_killed_rank_ends_the_job_and_the_resumed_run_is_the_whole_one(tmp_path):
    counts = kill_and_resume(tmp_path, kills=2, seed=11)
    assert counts["kills"] == 2 and counts["slowest"] < 60 and counts["equal"] == counts["ended"] > 0


def test_every_sample_is_evaluated_once(tmp_path):
    script = tmp_path / "evaluate.py"
    script.write_text(EVALUATE.format(tests=str(__import__("pathlib").Path(__file__).resolve().parents[1])))
    two = result(tmp_path / "two", script=script)
    one = result(tmp_path / "one", script=script, launcher=())
    assert two["function"]["eval_count"] == two["predicted"] == 10_001
    for name, key in (("function", "accuracy"), ("function", "order"), ("torchmetrics", "MulticlassAccuracy")):
        assert two[name][f"eval_{key}"] == one[name][f"eval_{key}"]
    # the last batch of two processes holds first samples again, and its loss is their mean: as in transformers
    assert two["function"]["eval_loss"] == pytest.approx(one["function"]["eval_loss"], rel=1e-4)


def test_resume_with_another_number_of_processes_counts_samples(tmp_path):
    words = ("model=plain", "samples=32", "save_steps=3")
    two = result(tmp_path / "two", *words)
    one = result(
        tmp_path / "one", *words, "per_device_train_batch_size=4", f"resume={tmp_path / 'two' / 'checkpoint-3'}",
        launcher=(),
    )  # fmt: skip
    losses = [[log["loss"] for log in found["logs"] if "loss" in log] for found in (two, one)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and one["steps"] == two["steps"]


def test_streams_are_shared_out_and_resumed_exactly(tmp_path):
    words = ("model=plain", "samples=36", "stream=True", "save_steps=3")
    whole = result(tmp_path / "whole", *words)
    resumed = result(tmp_path / "resumed", *words, f"resume={tmp_path / 'whole' / 'checkpoint-3'}")
    assert resumed == whole


def test_a_script_that_is_not_there(tmp_path):
    done = start(tmp_path / "no_script.py", launcher=OURS, script=tmp_path / "nowhere.py")
    assert done.returncode == 2 and "There is no script" in done.stderr
