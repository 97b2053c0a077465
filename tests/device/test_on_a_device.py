"""What a device has besides numbers: memory, placed models, native trainers, random states, exhaustion."""

from __future__ import annotations

import warnings
import weakref

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from transformers.trainer_pt_utils import set_rng_state_for_device
from transformers.utils import is_torch_cuda_available

from helpers import toy
from helpers.pretended import pretended_device
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments, set_seed
from hf_compat.errors import UnsupportedArgument
from hf_compat.runtime.launch import Launch

QUIET = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4}


def trainer_of(folder, model=None, metrics=None, rows=24, **options):
    set_seed(3)
    args = TrainingArguments(folder, **{**QUIET, "max_steps": 6, "logging_steps": 2, **options})
    return Trainer(model or toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(rows, 5),
                   compute_metrics=metrics)  # fmt: skip


def weights(model):
    return {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}


def test_a_lightning_trainer_of_the_users_own_gives_the_same_numbers(tmp_path):
    with pretended_device() as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = trainer_of(tmp_path, bf16=True, gradient_accumulation_steps=2)
        ours.train()
        machine.count.clear()
        set_seed(3)
        model, args = toy.Classifier(), ours.args
        trainer = pl.Trainer(max_steps=6, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False,
                             enable_checkpointing=False, enable_progress_bar=False,
                             enable_model_summary=False)  # fmt: skip
        trainer.fit(HFModule(model, args), HFDataModule(args, toy.rows()))
        assert {str(tensor.device) for tensor in model.state_dict().values()} <= {"cuda:0", "cpu"}
        native, own = weights(model), weights(ours.model)
    assert native.keys() == own.keys() and all(torch.equal(native[name], own[name]) for name in own)


@pytest.mark.parametrize(("options", "grows"), [({}, True), ({"eval_accumulation_steps": 1}, False)])
def test_predictions_stay_on_the_device_unless_they_are_moved(tmp_path, options, grows):
    class Wide(toy.Classifier):
        def forward(self, x, labels=None):
            out = super().forward(x, labels)
            return {**out, "logits": out["logits"].repeat(1, 1000)}

    with pretended_device() as machine:
        peaks = []
        for rows in (8, 80):
            trainer = trainer_of(tmp_path, Wide(), lambda p: {"n": len(p.predictions)}, rows, **options)
            machine.reset_peak_memory(0)
            before = machine.memory(0)
            assert trainer.evaluate()["eval_n"] == rows
            peaks.append(machine.peak_memory(0) - before)
    assert (peaks[1] > 3 * peaks[0]) is grows


def test_with_torchmetrics_memory_does_not_grow(tmp_path):
    with pretended_device() as machine:
        peaks = []
        for rows in (16, 160):
            metric = torchmetrics.classification.MulticlassAccuracy(3)
            trainer = trainer_of(tmp_path, metrics=metric, rows=rows)
            machine.reset_peak_memory(0)
            before = machine.memory(0)
            assert 0 <= trainer.evaluate()["eval_MulticlassAccuracy"] <= 1
            peaks.append(machine.peak_memory(0) - before)
    assert peaks[1] < 1.1 * peaks[0]


@pytest.mark.parametrize("place", [0, "cuda:0", "cuda"])
def test_a_model_that_is_placed_on_the_device_trains_there(tmp_path, place):
    with pretended_device(count=2):
        set_seed(3)
        model = toy.Classifier().to("cuda")
        model.hf_device_map = {"": place}
        trainer = trainer_of(tmp_path, model)
        assert not trainer.is_model_parallel
        trainer.train()
        plain = trainer_of(tmp_path)
        plain.train()
        assert all(torch.equal(one, weights(plain.model)[name]) for name, one in weights(model).items())


def test_quantized_weights_of_another_device_are_refused(tmp_path):
    with pretended_device(count=2):
        model = toy.Classifier().to("cuda:1")
        model.hf_device_map, model.is_loaded_in_8bit = {"": 1}, True
        with pytest.raises(UnsupportedArgument, match="trains on cuda:0"):
            trainer_of(tmp_path, model).train()


def test_a_resumed_run_draws_what_the_device_would_have_drawn(tmp_path):
    with pretended_device(count=2):
        whole = trainer_of(tmp_path / "a", save_strategy="steps", save_steps=3)
        whole.train()
        states = torch.load(tmp_path / "a" / "checkpoint-3" / "rng_state.pth", weights_only=False)
        assert states["cuda"].numel() == 16 and states["cuda"].device.type == "cpu"
        resumed = trainer_of(tmp_path / "a", save_strategy="steps", save_steps=3)
        torch.rand(5, device="cuda")
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
        assert all(torch.equal(one, weights(resumed.model)[name]) for name, one in weights(whole.model).items())
        assert torch.equal(torch.cuda.get_rng_state(), torch.cuda.get_rng_state(0))


def test_transformers_takes_the_device_states_of_several_processes(tmp_path):
    with pretended_device(count=2):
        trainer = trainer_of(tmp_path)
        vars(trainer.args)["_launch"] = Launch(process_index=1, local_process_index=1, world_size=2, local_world_size=2)
        trainer._save_rng_state(str(tmp_path))
        drawn = [torch.rand(3, device=f"cuda:{index}").cpu() for index in range(2)]
        states = torch.load(tmp_path / "rng_state_1.pth", weights_only=False)
        set_rng_state_for_device("CUDA", torch.cuda, states, True)  # it logs an error where it cannot
        assert all(torch.equal(torch.rand(3, device=f"cuda:{at}").cpu(), drawn[at]) for at in range(2))


def test_memory_of_the_device_is_told_and_freed_batches_go(tmp_path):
    is_torch_cuda_available.cache_clear()  # another test may have asked on a machine without one
    with pretended_device() as machine:
        trainer = trainer_of(tmp_path, skip_memory_metrics=False, torch_empty_cache_steps=2)
        metrics = trainer.train().metrics
        assert metrics["train_mem_gpu_alloc_delta"] > 0 and metrics["train_mem_gpu_peaked_delta"] >= 0
        assert machine.calls.count("empty_cache") >= 3
    is_torch_cuda_available.cache_clear()


def test_a_device_that_runs_out_halves_the_batch(tmp_path, monkeypatch):
    held, gone = [], []  # a tensor of each failed try; whether they were gone when the cache was emptied

    class Full(toy.Classifier):
        def forward(self, x, labels=None):
            if len(x) > 2:
                taken = torch.zeros(2, device=x.device)
                held.append(weakref.ref(taken))
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GB")
            return super().forward(x, labels)

    with pretended_device() as machine:
        empty_cache = torch.cuda.empty_cache

        def record():
            gone.append([ref() is None for ref in held])
            empty_cache()

        monkeypatch.setattr(torch.cuda, "empty_cache", record)
        trainer = trainer_of(tmp_path, Full(), auto_find_batch_size=True)
        trainer.train()
        monkeypatch.undo()
        assert trainer.state.train_batch_size <= 2 and "empty_cache" in machine.calls
        assert held and gone[-1] == [True] * len(held)
