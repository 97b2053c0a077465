"""fp16 on the CPU, `tf32` and `full_determinism` set the same in the process as under transformers."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import pytest
import torch
import transformers

import hf_compat
from helpers import toy
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments, translate
from hf_compat.errors import ArgumentError, InertArgumentWarning
from hf_compat.hf import arguments_rules


def test_fp16_on_the_cpu_is_float32_with_a_warning(make_args):
    trainer = Trainer(toy.Classifier(), make_args(fp16=True, save_strategy="epoch"), train_dataset=toy.rows(8))
    with pytest.warns(InertArgumentWarning, match=r"Without effect.*`fp16=True` \(the CPU computes in float32"):
        trainer.train()
    assert translate(trainer.args).precision == "32-true"
    with trainer.accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    assert trainer.accelerator.scaler is None and not trainer.accelerator.native_amp
    assert trainer.accelerator.mixed_precision == "fp16"
    assert not os.path.exists(f"{trainer.args.output_dir}/checkpoint-2/scaler.pt")


@pytest.mark.filterwarnings("ignore::hf_compat.errors.InertArgumentWarning")
def test_what_accelerate_launch_says_is_the_same(make_args, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert translate(make_args()).precision == "32-true"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert translate(make_args()).precision == "bf16-mixed"


def test_fp16_with_sharding_on_the_cpu_is_refused(make_args):
    with pytest.raises(ArgumentError, match=r"fp16=True.*requires a GPU"):
        make_args(fp16=True, fsdp=True)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore::hf_compat.errors.InertArgumentWarning")
def test_fp16_in_a_lightning_trainer_on_the_cpu(tmp_path):
    weights = []
    for values in ({"fp16": True}, {}):
        hf_compat.set_seed(1)
        args = TrainingArguments(str(tmp_path), use_cpu=True, **values)
        module = HFModule(toy.Classifier(), args)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, **quiet)
        trainer.fit(module, HFDataModule(args, train_dataset=toy.rows(16)))
        weights.append(toy.weights(module))
    assert torch.equal(*weights)


VARIABLES = (
    "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "ASCEND_LAUNCH_BLOCKING",
    "HCCL_DETERMINISTIC",
)  # fmt: skip


def determinism() -> tuple:
    names = tuple(name.partition("_")[0] for name in VARIABLES)
    variables = {name: value for name, value in os.environ.items() if name.startswith(names)}
    cudnn = torch.backends.cudnn
    return variables, torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


@pytest.mark.parametrize("trains", [False, True])
def test_full_determinism_sets_what_transformers_sets_and_leaves_it_so(tmp_path, monkeypatch, trains):
    found = []
    for package in (transformers, hf_compat):
        for name in VARIABLES:
            monkeypatch.setenv(name, "")
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        values = {"full_determinism": True, "use_cpu": True, "max_steps": 1, "report_to": "none"}
        args = package.TrainingArguments(output_dir=str(tmp_path), disable_tqdm=True, save_strategy="no", **values)
        before = determinism()
        trainer = package.Trainer(toy.Classifier(), args, train_dataset=toy.rows(8))
        if trains:
            trainer.train()
        found.append((before[1:], determinism()))
    assert found[0] == found[1] and found[0][1][1] is True


def test_a_trainer_without_it_leaves_deterministic_algorithms_on(make_args):
    torch.use_deterministic_algorithms(True)
    Trainer(toy.Classifier(), make_args(max_steps=1), train_dataset=toy.rows(8)).train()
    assert torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def ampere(monkeypatch):
    """Make both packages detect a GPU that supports TF32."""
    before = torch.backends.fp32_precision
    monkeypatch.setattr(transformers.training_args, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(arguments_rules, "has_tf32", lambda: True)
    yield
    torch.backends.fp32_precision = before


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"tf32": True},
        {"tf32": False},
        {"torch_compile": True},
        {"torch_compile": True, "tf32": False},
        {"torch_compile": True, "fp16": True},
        {"torch_compile": True, "bf16": True},
    ],
)
def test_tf32_is_chosen_when_transformers_chooses_it(tmp_path, ampere, values):
    found = []
    for package in (transformers, hf_compat):
        torch.backends.fp32_precision = "none"
        transformers.utils.import_utils.enable_tf32.cache_clear()
        package.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **values)
        found.append(torch.backends.fp32_precision)
    assert found[0] == found[1]


def test_tf32_without_such_a_gpu(make_args):
    with pytest.raises(ArgumentError, match="tf32=True"):
        make_args(tf32=True)
    before = torch.backends.fp32_precision
    make_args(tf32=False, torch_compile=True)
    assert torch.backends.fp32_precision == before
