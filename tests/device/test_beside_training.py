"""What asks for the device beside a training: adapters, native steps, the accelerator, tools, a search, strategies."""

from __future__ import annotations

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import transformers
import yaml
from torch import nn
from torch.utils.data import DataLoader

import hf_compat
from helpers import toy
from helpers.pretended import pretended_device
from hf_compat import HFCallbackAdapter, HFDataModule, HFModule, LightningCallbackAdapter, TrainingArguments
from hf_compat.engine import strategies
from hf_compat.errors import LossError, UnsupportedArgument
from hf_compat.native import loading
from hf_compat.optim.optimizers import check_request
from hf_compat.runtime import collectives
from hf_compat.tools.ejection.expressions import Expressions, ProjectFiles
from hf_compat.tools.ejection.project import eject
from hf_compat.tools.ejection.recording import Recorder
from hf_compat.tools.until_train import CapturedTrain

QUIET = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4}
NATIVE = {"report_to": "none", "per_device_train_batch_size": 4}
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Without effect"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but not supported on MPS"),
]


@pytest.fixture
def gpus():
    with pretended_device(count=2) as machine:
        yield machine


def trainer_of(folder, model=None, api=hf_compat, parts=None, **options):
    api.set_seed(3)
    args = api.TrainingArguments(str(folder), **{**QUIET, "max_steps": 4, "logging_steps": 2, **options})
    data = {"train_dataset": toy.rows(), "eval_dataset": toy.rows(40, 5)}
    return api.Trainer(args=args, **{"model": model or toy.Classifier(), **data, **(parts or {})})


def lightning_trainer(**options):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{"max_steps": 4, "accelerator": "gpu", "devices": 1, **quiet, **options})


# Callbacks of one trainer in the other --------------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", ["gpu", "cpu"])
def test_hf_callbacks_in_a_lightning_trainer_see_its_device(gpus, accelerator):
    class Look(hf_compat.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.device = str(args.device)

    class Hand(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = toy.Classifier()

        def training_step(self, batch, batch_idx):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    look = Look()
    trainer = lightning_trainer(accelerator=accelerator, callbacks=[HFCallbackAdapter(look)])
    trainer.fit(Hand(), DataLoader(toy.rows(16), batch_size=4))
    assert look.device == {"gpu": "cuda:0", "cpu": "cpu"}[accelerator] == str(trainer.strategy.root_device)


@pytest.mark.parametrize(
    ("kind", "options", "device"), [("cuda", {}, "cuda:0"), ("mps", {}, "mps:0"), ("cuda", {"use_cpu": True}, "cpu")]
)
def test_a_lightning_callback_in_transformers_trainer_sees_its_device(tmp_path, kind, options, device):
    class Look(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.device = str(trainer.strategy.root_device)

    look = Look()
    with pretended_device(kind):
        trainer_of(tmp_path, api=transformers, parts={"callbacks": [LightningCallbackAdapter(look)]}, **options).train()
    assert look.device == device


# Native mode ----------------------------------------------------------------------------------------------------------


class OwnStep(HFModule):
    def training_step(self, batch):
        self.seen = (batch["x"] @ batch["x"].T).dtype
        return self.model(**batch)["loss"]


class CallsHF(HFModule):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)])
def test_a_step_of_the_users_own_runs_under_the_precision_of_the_trainer(gpus, tmp_path, precision, dtype):
    args = TrainingArguments(tmp_path, **NATIVE, bf16=precision != "32-true")
    module = OwnStep(toy.Classifier(), args)
    trainer = lightning_trainer(precision=precision)
    trainer.fit(module, HFDataModule(args, toy.rows()))
    assert module.seen == dtype and trainer.global_step == 4


def test_a_step_that_calls_hfs_gives_hfs_numbers(gpus, tmp_path):
    found = []
    for kind in (HFModule, CallsHF):
        hf_compat.set_seed(3)
        args = TrainingArguments(tmp_path, **NATIVE, bf16=True)
        module = kind(toy.Classifier(), args)
        lightning_trainer(precision="bf16-mixed").fit(module, HFDataModule(args, toy.rows()))
        found.append({name: value.cpu() for name, value in module.model.state_dict().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_native_checkpoint_of_a_gpu_loads_with_and_without_one(tmp_path):
    with pretended_device():
        args = TrainingArguments(tmp_path, **NATIVE)
        trainer = lightning_trainer()
        trainer.fit(HFModule(toy.Classifier(), args), HFDataModule(args, toy.rows()))
        trainer.save_checkpoint(tmp_path / "it.ckpt")
        there = loading._read(str(tmp_path / "it.ckpt"), None, None)["state_dict"]
        assert {value.device.type for value in there.values()} <= {"cuda", "cpu"}
    module = HFModule.load_from_checkpoint(tmp_path / "it.ckpt", model=toy.Classifier())
    assert {value.device.type for value in module.parameters()} == {"cpu"}


# The accelerator ------------------------------------------------------------------------------------------------------


def test_a_saved_state_brings_back_what_the_device_draws(gpus, tmp_path):
    trainer = trainer_of(tmp_path / "run")
    trainer.train()
    folder = trainer.accelerator.save_state(tmp_path / "state")
    states = torch.load(f"{folder}/random_states_0.pkl", weights_only=False)
    assert len(states["torch_cuda_manual_seed"]) == 2
    drawn = torch.rand(3, device="cuda").cpu()
    assert not torch.equal(torch.rand(3, device="cuda").cpu(), drawn)
    trainer.accelerator.load_state(folder)
    assert torch.equal(torch.rand(3, device="cuda").cpu(), drawn)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"bf16": True}, torch.bfloat16), ({"fp16": True}, torch.float16), ({}, torch.float32),
     ({"fp16": True, "use_cpu": True}, torch.float32)],
)  # fmt: skip
def test_a_second_model_is_prepared_as_by_accelerate(gpus, tmp_path, options, dtype):
    for api in (transformers, hf_compat):
        accelerator = trainer_of(tmp_path, api=api, **options).accelerator
        second = accelerator.prepare(nn.Linear(3, 2))
        inputs = torch.ones(1, 3, device=accelerator.device)
        with accelerator.autocast():
            assert (inputs @ inputs.T).dtype == dtype
        assert second.weight.device == inputs.device and second(inputs).dtype == torch.float32


# Memory ---------------------------------------------------------------------------------------------------------------


def test_no_run_gives_the_memory_back_that_the_next_one_takes(gpus, tmp_path):
    trainer = trainer_of(tmp_path, eval_strategy="steps", eval_steps=2)
    for act in (trainer.evaluate, trainer.train, trainer.evaluate, lambda: trainer.predict(toy.rows(8))):
        act()
    assert gpus.calls == []


# Tools ----------------------------------------------------------------------------------------------------------------


def test_a_preflight_leaves_what_all_devices_draw(gpus, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (100, 1000))
    trainer = trainer_of(tmp_path, parts={"compute_metrics": lambda p: {"n": len(p.predictions)}})
    torch.rand(2, device="cuda:1")
    before = torch.cuda.get_rng_state_all()
    report = str(trainer.preflight())
    assert all(map(torch.equal, before, torch.cuda.get_rng_state_all()))
    assert "trains on cuda:0" in report and "100 bytes of GPU memory are free" in report
    assert "set `eval_accumulation_steps`" in report


def test_a_generator_of_the_device_is_not_written_as_one_of_the_cpu(gpus, tmp_path):
    write = Expressions(Recorder(tmp_path), ProjectFiles())
    assert write.of(torch.Generator().manual_seed(4)) == "torch.Generator().manual_seed(4)"


@pytest.mark.parametrize(
    ("use_cpu", "expected"), [(False, ("auto", "16-mixed")), (True, ("cpu", "32-true"))], ids=["gpu", "cpu"]
)
@pytest.mark.filterwarnings("ignore:Without effect")
def test_a_project_trains_on_the_kind_of_device_that_its_run_had(gpus, tmp_path, use_cpu, expected):
    trainer = trainer_of(tmp_path / "run", fp16=True, use_cpu=use_cpu)
    captured = CapturedTrain(trainer=trainer, positional=(), keywords={})
    eject(captured, Recorder(tmp_path), "script.py", tmp_path / "project")
    settings = yaml.safe_load((tmp_path / "project" / "config.yaml").read_text())["trainer"]
    assert (settings["accelerator"], settings["precision"]) == expected


def test_a_search_frees_the_memory_of_each_trial(gpus, tmp_path):
    trainer = trainer_of(tmp_path, parts={"model_init": lambda: toy.Classifier(), "model": None})
    gpus.calls.clear()
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
        n_trials=2,
        direction="minimize",
    )
    assert gpus.calls.count("empty_cache") == 2


# What only several processes, or other packages, would run ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "backend"), [({}, "nccl"), ({"ddp_backend": "gloo"}, "gloo"), ({"use_cpu": True}, "gloo")]
)
def test_a_process_joins_a_group_of_its_device(gpus, tmp_path, monkeypatch, options, backend):
    joined = []
    monkeypatch.setattr(collectives.distributed, "init_process_group", lambda name, **_: joined.append(name))
    monkeypatch.setattr(collectives, "_rendezvous_store", lambda *_: None)
    for name in ("leave_at_exit", "destroy_at_exit"):
        monkeypatch.setattr(collectives, name, lambda: None)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    collectives.start_processes(TrainingArguments(tmp_path, **options))
    assert joined == [backend] and torch.cuda.current_device() == (0 if "use_cpu" in options else 1)


@pytest.mark.parametrize(("device", "backend", "shown"), [("cuda:1", "nccl", "cuda:1"), ("cpu", "gloo", "cpu:1")])
def test_deepspeed_is_started_on_the_device(gpus, monkeypatch, device, backend, shown):
    import deepspeed

    asked = []
    monkeypatch.setattr(deepspeed, "init_distributed", lambda name, **_: asked.append(name))
    strategy = object.__new__(strategies.HFDeepSpeedStrategy)
    placed = SimpleNamespace(setup_device=lambda device: asked.append(str(device)))
    monkeypatch.setattr(strategies.InnerModelDeepSpeedStrategy, "root_device", torch.device(device))
    monkeypatch.setattr(strategies.InnerModelDeepSpeedStrategy, "accelerator", placed)
    monkeypatch.setattr(strategies.InnerModelDeepSpeedStrategy, "local_rank", 1)
    monkeypatch.setattr(strategies.InnerModelDeepSpeedStrategy, "set_world_ranks", lambda _: None)
    strategy.setup_environment()
    assert asked == [device, backend] and str(strategy.root_device) == shown


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_fsdp_takes_a_mesh_of_the_device(gpus, monkeypatch, device):
    asked = []
    monkeypatch.setattr(strategies, "shard_mesh", lambda kind, *_: asked.append(kind))
    monkeypatch.setattr(strategies, "shard_model", lambda *_: None)
    strategy = object.__new__(strategies.HFFSDP2Strategy)
    strategy.plan, strategy.precision = SimpleNamespace(shard_size=None, hybrid=False), "32-true"
    strategy.launch = SimpleNamespace(world_size=2, local_world_size=2)
    monkeypatch.setattr(strategies.HFFSDP2Strategy, "root_device", torch.device(device))
    strategy.shard(nn.Linear(2, 2))
    assert asked == [torch.device(device).type]


def test_a_loss_without_numbers_is_refused(gpus, tmp_path):
    class OnMeta(toy.Classifier):
        def forward(self, x, labels=None):
            return {"loss": torch.zeros((), device="meta")}

    with pytest.raises(LossError, match="on the meta device"):
        trainer_of(tmp_path, OnMeta()).train()


@pytest.mark.parametrize("use_cpu", [False, True])
def test_adalomo_needs_a_gpu_on_the_machine(gpus, tmp_path, monkeypatch, use_cpu):
    args = TrainingArguments(tmp_path, optim="adalomo", use_cpu=use_cpu)
    assert check_request(args, toy.Classifier()) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedArgument, match="GPU"):
        check_request(args, toy.Classifier())


@pytest.mark.parametrize("is_pinned", [True, False])
def test_loaders_pin_for_a_gpu_alone_and_where_they_may(gpus, tmp_path, is_pinned):
    of_gpu = trainer_of(tmp_path, dataloader_pin_memory=is_pinned)
    assert of_gpu.get_train_dataloader().pin_memory is of_gpu.get_eval_dataloader().pin_memory is is_pinned
    of_cpu = trainer_of(tmp_path, dataloader_pin_memory=is_pinned, use_cpu=True)
    assert of_cpu.get_train_dataloader().pin_memory is False
