"""Which device a process takes, what is said of several, and how many processes `hf-compat run` starts."""

from __future__ import annotations

import pytest
import torch

from helpers import toy
from helpers.pretended import pretended_device
from hf_compat import Trainer, TrainingArguments
from hf_compat.cli import run
from hf_compat.errors import ArgumentError
from hf_compat.runtime.launch import is_launched


@pytest.fixture
def environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "gpus", "device"),
    [
        ({}, 4, "cuda:0"),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}, 4, "cuda:3"),
        ({"RANK": "3", "WORLD_SIZE": "4"}, 1, "cuda:0"),  # a pod of its own
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}, 1, "cuda:0"),  # each process is shown one GPU
    ],
)
def test_a_process_takes_a_device_that_it_sees(environment, tmp_path, variables, gpus, device):
    for name, value in variables.items():
        environment.setenv(name, value)
    with pretended_device(count=gpus):
        args = TrainingArguments(tmp_path, per_device_train_batch_size=2)
        assert str(args.device) == device and args.n_gpu == 1 and args.train_batch_size == 2


def test_a_rank_that_nothing_places_on_one_of_several_devices_is_refused(environment, tmp_path):
    environment.setenv("RANK", "5")
    environment.setenv("WORLD_SIZE", "8")
    with pretended_device(count=4):
        with pytest.raises(ArgumentError, match="rank 5 of 8 and sees 4 GPUs; `LOCAL_RANK`"):
            TrainingArguments(tmp_path)
        assert TrainingArguments(tmp_path, use_cpu=True).device.type == "cpu"


def test_one_of_several_devices_is_said_with_both_batches(environment, tmp_path, caplog):
    with pretended_device(count=4) as machine:
        args = TrainingArguments(tmp_path, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=3,
                                 save_strategy="no", report_to="none", disable_tqdm=True)  # fmt: skip
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows())
        trainer.train()
        assert [machine.memory(index) > 0 for index in range(4)] == [True, False, False, False]
    (said,) = [record for record in caplog.records if "GPUs" in record.message]
    assert said.levelname == "WARNING" and "one of 4 GPUs, with 6 samples" in said.message and "24" in said.message


@pytest.mark.parametrize(
    ("words", "gpus", "variables", "started"),
    [
        ([], 4, {}, 4),
        ([], 1, {}, None),
        ([], 0, {}, None),
        (["--devices", "1"], 4, {}, None),
        (["--devices", "2"], 4, {}, 2),
        (["--devices", "auto"], 4, {}, 4),
        ([], 4, {"RANK": "0", "WORLD_SIZE": "1"}, None),
        ([], 4, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, None),
        ([], 4, {"ACCELERATE_USE_CPU": "true"}, None),
    ],
)
def test_run_starts_a_process_on_each_device(environment, tmp_path, words, gpus, variables, started):
    script = tmp_path / "script.py"
    script.write_text("")
    for name, value in variables.items():
        environment.setenv(name, value)
    environment.setattr(torch.cuda, "device_count", lambda: gpus)
    environment.setattr(run, "_launch", lambda chosen, machines, processes: processes)
    environment.setattr(run, "run_here", lambda chosen: None)
    environment.setattr(run.patching, "patch", lambda: None)
    assert run.main([*words, str(script)]) == (started or 0)
    assert run.main([*words, str(script), "--use_cpu"]) == ((started or 0) if words else 0)


def test_srun_counts_as_a_launcher_only_in_a_step():
    assert not is_launched({}) and not is_launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert is_launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"})
