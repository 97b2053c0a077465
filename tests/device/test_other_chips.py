"""Chips of other makers: Apple's trains as under transformers; Intel's, Huawei's and others are refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import hf_compat
from helpers import toy
from helpers.pretended import pretended_device
from hf_compat import TrainingArguments, explain
from hf_compat.errors import ArgumentError
from hf_compat.plan.argument_support import _accelerator
from sweeps.device.device_matrix import run_apart, verdict

HERE = Path(__file__).resolve().parent
QUIET = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4}
# `python tests/sweeps/device/device_matrix.py --kind mps` runs all
SAMPLE = ["fp16_overflow_adamw_torch_fused", "bf16", "load_best", "memory"]
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but not supported on MPS")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mps")
    run_apart(made, SAMPLE, "mps")
    return made


@pytest.mark.parametrize("name", SAMPLE)
def test_apples_equals_transformers(folder, name):
    word, text = verdict(folder, name, "mps")
    assert word in ("equal", "explained"), text


def trainer_of(api, folder, model=None, **options):
    args = api.TrainingArguments(str(folder), max_steps=4, **{**QUIET, **options})
    return api.Trainer(model or toy.Classifier(), args, train_dataset=toy.rows())


def test_apples_is_explained(tmp_path):
    with pretended_device("mps"):
        args = TrainingArguments(tmp_path, report_to="none")
        assert args.device.type == "mps" and args.n_gpu == 1 and args.train_batch_size == 8
        assert "accelerator='mps'" in str(explain(args))
        assert _accelerator("mps") == _accelerator("gpu") == {"use_cpu": False}
        with pytest.raises(ArgumentError, match="'cuda'` is not available here"):
            _accelerator("cuda")


def test_apples_cache_is_emptied_when_transformers_does(tmp_path):
    found = []
    for api in (transformers, hf_compat):
        with pretended_device("mps") as machine:
            trainer_of(api, tmp_path, torch_empty_cache_steps=2).train()
        found.append([name for name in machine.calls if name in ("empty_cache", "clear_graph_cache")])
    theirs, ours = found
    assert ours == ["empty_cache", "clear_graph_cache"] * 2
    assert theirs == ["empty_cache", *ours]  # Accelerate's begin does it once more


def test_apples_memory_is_freed_before_a_smaller_batch(tmp_path):
    class Full(toy.Classifier):
        def forward(self, x, labels=None):
            if len(x) > 2:
                raise RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)")
            return super().forward(x, labels)

    with pretended_device("mps") as machine:
        trainer = trainer_of(hf_compat, tmp_path, Full(), auto_find_batch_size=True)
        trainer.train()
        assert trainer.state.train_batch_size <= 2 and "empty_cache" in machine.calls


def test_a_resumed_run_draws_on_apples_what_the_whole_one_drew(tmp_path):
    found = []
    with pretended_device("mps"):
        for checkpoint in (None, str(tmp_path / "checkpoint-2")):
            hf_compat.set_seed(3)
            trainer = trainer_of(hf_compat, tmp_path, save_strategy="steps", save_steps=2)
            torch.rand(5, device="mps")
            trainer.train(resume_from_checkpoint=checkpoint)
            found.append({name: value.cpu() for name, value in trainer.model.state_dict().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"dataloader_num_workers": 2}, "fork"), ({"dataloader_num_workers": 1}, None), ({}, None),
     ({"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "spawn"}, "spawn")],
)  # fmt: skip
def test_several_workers_beside_apples_are_forked(tmp_path, options, expected):
    for api in (transformers, hf_compat):
        with pretended_device("mps"):
            args = api.TrainingArguments(str(tmp_path), **options)
        assert args.dataloader_multiprocessing_context == expected


@pytest.mark.parametrize("options", [{"bf16": True}, {"bf16_full_eval": True}, {"tf32": True}])
def test_what_apples_cannot_do_is_refused(tmp_path, environment, options):
    for api in (transformers, hf_compat):
        with pretended_device("mps"):
            environment.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: False)
            with pytest.raises(ValueError, match=r"bf16|tf32"):
                api.TrainingArguments(str(tmp_path), **options)
            environment.undo()


def test_several_processes_beside_apples_are_refused(tmp_path, environment):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        environment.setenv(name, value)
    with pretended_device("mps"):
        with pytest.raises(ArgumentError, match="rank 1 of 2, and torch has no process group for Apple's GPU"):
            TrainingArguments(tmp_path)
        assert TrainingArguments(tmp_path, use_cpu=True).device.type == "cpu"


OF_LIGHTNING = r"'{}', which Lightning does not train on; transformers does.*\n\nHint: set `use_cpu=True`"


def test_intels_is_refused_and_the_cpu_beside_it_trains(tmp_path):
    with pretended_device("xpu") as machine:
        with pytest.raises(ArgumentError, match=OF_LIGHTNING.format("xpu")):
            TrainingArguments(tmp_path)
        trainer = trainer_of(hf_compat, tmp_path, use_cpu=True)
        trainer.train()
        assert trainer.state.global_step == 4 and not machine.count["kernels"]


def test_huaweis_is_refused_and_the_cpu_beside_it_trains(tmp_path):
    # A process of its own: torch keeps the name `npu`
    code = (
        "from helpers.pretended import pretended_device\n"
        "import pytest, hf_compat, test_other_chips as tests\n"
        "with pretended_device('npu'):\n"
        "    with pytest.raises(hf_compat.errors.ArgumentError, match=tests.OF_LIGHTNING.format('npu')):\n"
        f"        hf_compat.TrainingArguments({str(tmp_path)!r})\n"
        f"    trainer = tests.trainer_of(hf_compat, {str(tmp_path)!r}, use_cpu=True)\n"
        "    trainer.train()\n"
        "    print('UPDATES', trainer.state.global_step)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=HERE,
                          env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}:{HERE.parents[1]}"})  # fmt: skip
    assert "UPDATES 4" in done.stdout, done.stderr
